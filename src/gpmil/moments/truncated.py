"""One-sided moments of the patch variables m_b, stable in both tails.

q(m_b) is N(mu_b, diag(sigma_b^2)) restricted to all m < 0 (a negative bag) or to its complement
(a positive bag): the paper's eqs. (qmi_0) and (qmi_1). With t = mu / sigma and the hazard
h(t) = phi(t) / (1 - Phi(t)), everything follows from three quantities per bag:

    log q = sum_i log(1 - Phi(t_i))        log P(all m < 0), independent patches
    r     = q / (1 - q)
    rho_i = r h_i                          the pull of a positive bag on patch i

The paper's (mu - (1 - Z) E) / Z is never formed: it is 0/0 where the bag is surely positive or
surely negative. All arithmetic is in float64, whatever the dtype that comes and goes.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SERIES = 50.0  # t above which mu - sigma h cancels and its series in 1/t takes over
FAR = -8.0  # a positive bag with every t below: 1 - q = sum_j Phi(t_j) to the last digit
QUICK = 8.0  # t up to which mu - sigma h keeps twelve digits
DOUBTFUL = -1e-3  # log q of a positive bag above which 1 - q needs care
NEAR = 5.0  # t up to which phi / (1 - Phi) loses less than 1e-13 to its two roundings

# Of (1 + 2 z) erfcx(z) in powers of (z - k) / (z + k), the highest first: Chebyshev's expansion,
# cut where it is below 1e-16
ERFCX_MIDDLE = 3.75
ERFCX = (
    3.1114333809799254e-10, -2.623107347133476e-09, -3.744210080962018e-09, 3.197926671666804e-08,
    2.3263508708859124e-08, -2.4857126248016745e-07, -5.7218230603224086e-08,
    1.7419821586224816e-06, -9.73559896736775e-07, -1.1438048033346894e-05, 2.238423915508223e-05,
    5.164652974177416e-05, -0.0002901540805408417, 0.000293714378044958, 0.0017556258528952954,
    -0.009746579683265262, 0.028362277418956406, -0.05869339857664934, 0.09230432116037748,
    -0.10880393014244462, 0.0822767384901452, 0.0035854154854790257, -0.14024059858554697,
    1.2375126308378275,
)  # fmt: skip


class Moments(NamedTuple):
    """What inference needs of q(m): first moments, their slopes, and the log normalisers.

    dE/dmu = diag(slope) - left right' inside a bag, where left and right are zero in negative
    bags; d log Z / dmu = gamma, and its own derivative is diag(curvature) - pull pull'.
    """

    mean: Float[Tensor, " n"]  # E[m_i]
    slope: Float[Tensor, " n"]  # diagonal part of dE/dmu
    left: Float[Tensor, " n"]  # sigma rho
    right: Float[Tensor, " n"]  # rho / (q sigma)
    gamma: Float[Tensor, " n"]  # d log Z_b / dmu_i
    curvature: Float[Tensor, " n"]  # diagonal part of d2 log Z_b / dmu2
    pull: Float[Tensor, " n"]  # rho / (sqrt(q) sigma): its rank-one part
    log_z: Float[Tensor, " b"]  # log Z_b: log q (negative bag) or log(1 - q)


def segment_sum(x: Float[Tensor, " n"], offsets: Int[Tensor, " b1"]) -> Float[Tensor, " b"]:
    """Sum of x within each bag; the same bits every time, on CPU and GPU."""
    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0)


def segment_max(x: Float[Tensor, " n"], offsets: Int[Tensor, " b1"]) -> Float[Tensor, " b"]:
    """Largest x within each bag."""
    return torch.segment_reduce(x, "max", offsets=offsets)


def hazard(t: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """h(t) = phi(t) / (1 - Phi(t)) = sqrt(2/pi) / erfcx(t / sqrt 2)."""
    # erfcx overflows below -37, and its derivative with it: there h = phi to the last digit
    near = math.sqrt(2 / math.pi) / _erfcx(t.clamp(min=-37) / math.sqrt(2))
    return torch.where(t < -37, torch.exp(-t * t / 2) / math.sqrt(2 * math.pi), near)


def _erfcx(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """exp(x^2) erfc(x); on a GPU from a polynomial, as torch compiles its own for seconds there."""
    if not x.is_cuda or (x.requires_grad and torch.is_grad_enabled()):
        return torch.special.erfcx(x)
    z = x.abs()
    # (1 + 2 z) erfcx(z) is smooth in u = (z - k) / (z + k)
    u, p = (z - ERFCX_MIDDLE) / (z + ERFCX_MIDDLE), torch.zeros_like(z)
    for coefficient in ERFCX:
        p = p.mul_(u).add_(coefficient)
    right = p / (1 + 2 * z)
    # erfcx(-z) = 2 exp(z^2) - erfcx(z)
    return torch.where(x < 0, 2 * torch.exp(z.square()) - right, right)


def upper_tail(t: Float[Tensor, "*n"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """log(1 - Phi(t)) and the hazard h(t), by functions that use the whole width of the CPU.

    torch's erfcx and log_ndtr go number by number, ten times as slow as its erfc; they are called
    for the few t beyond NEAR, on a GPU, and where derivatives are wanted.
    """
    if t.device.type != "cpu" or (t.requires_grad and torch.is_grad_enabled()):
        return torch.special.log_ndtr(-t), hazard(t)
    z = t.abs() * math.sqrt(0.5)
    tail = torch.erfc(z).mul_(0.5)  # Phi(-|t|)
    left = t < 0
    # log(1 - Phi(t)): log(1 - tail) on the left, log(tail) on the right
    log_upper = torch.where(left, torch.log1p(-tail), torch.log(tail))
    upper = torch.where(left, 1 - tail, tail)
    # h = phi(t) / (1 - Phi(t))
    h = (-z.square()).exp_().mul_(1 / math.sqrt(2 * math.pi)).div_(upper)
    beyond = t > NEAR
    if beyond.any():
        log_upper[beyond] = torch.special.log_ndtr(-t[beyond])
        h[beyond] = hazard(t[beyond])
    return log_upper, h


def excess(t: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """h(t) - t > 0; the mean distance below zero of a truncated variable, in sigmas."""
    return _excess(t, hazard(t))


def _excess(t: Tensor, h: Tensor) -> Tensor:
    if _nowhere(t > SERIES):
        return h - t
    s = 1 / t.clamp(min=SERIES)
    s2 = s * s
    # h(t) - t = 1/t - 2/t^3 + 10/t^5 - 74/t^7 + 706/t^9 - ...
    series = s * (1 + s2 * (-2 + s2 * (10 + s2 * (-74 + s2 * 706))))
    return torch.where(t > SERIES, series, h - t)


def _nowhere(condition: Tensor) -> bool:
    """Whether a special case can be left out; on a GPU asking would cost more than doing it."""
    return condition.device.type == "cpu" and not condition.any()


def variance_ratio(t: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """1 - h (h - t): the variance of N(t, 1) given m < 0, which is also dE/dmu."""
    return _variance_ratio(t, hazard(t))


def _variance_ratio(t: Tensor, h: Tensor) -> Tensor:
    if _nowhere(t > SERIES):
        return 1 - h * (h - t)
    s2 = t.clamp(min=SERIES) ** -2
    # 1 - h (h - t) = 1/t^2 - 6/t^4 + 50/t^6 - 518/t^8 + 6354/t^10 - ...
    series = s2 * (1 + s2 * (-6 + s2 * (50 + s2 * (-518 + s2 * 6354))))
    return torch.where(t > SERIES, series, 1 - h * (h - t))


def log_not(log_q: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log(1 - q) from log q < 0, accurate at both ends."""
    # each branch sees only its own numbers, so that neither spoils the other's derivative
    near = log_q > -math.log(2)
    near_one = torch.log(-torch.expm1(torch.where(near, log_q, -0.5)))
    return torch.where(near, near_one, torch.log1p(-torch.exp(torch.where(near, -1.0, log_q))))


def moments(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    positive: Bool[Tensor, " b"],
    offsets: Int[Tensor, " b1"],
    row: Int[Tensor, " n"] | None = None,
) -> Moments:
    """E[m], its slope and log Z for bags of rows offsets[b]:offsets[b+1]; positive: y_b = 1.

    `row`, the bag of every instance, spares a repeated caller some work.
    """
    dtype, mu, sigma = mu.dtype, mu.double(), sigma.double()
    if row is None:
        row = torch.arange(len(positive), device=mu.device).repeat_interleave(offsets.diff())
    t = mu / sigma
    log_upper, h = upper_tail(t)
    v = _variance_ratio(t, h)
    # log q_b = sum_i log(1 - Phi(t_i))
    log_q = segment_sum(log_upper, offsets)
    log_p, rho, scaled, over_q, far, far_row = _pulls(t, h, log_q, offsets, row)
    pos_row = positive[row]

    # E = mu - sigma h (eq. qmi_0) = -sigma (h - t);  E = mu + sigma rho (eq. qmi_1)
    mean_neg = -sigma * _excess(t, h)
    mean_pos = torch.where(far_row, sigma * far.mean, mu + sigma * rho)
    zero = torch.zeros_like(t)
    bent = rho * torch.where(far_row, -t, h - t)
    out = (
        torch.where(pos_row, mean_pos, mean_neg),
        torch.where(pos_row, 1 + bent, v),
        torch.where(pos_row, sigma * rho, zero),
        torch.where(pos_row, over_q / sigma, zero),
        torch.where(pos_row, rho, -h) / sigma,
        torch.where(pos_row, bent, v - 1) / sigma**2,
        torch.where(pos_row, scaled / sigma, zero),
        torch.where(positive, log_p, log_q),
    )
    return Moments(*(x.to(dtype) for x in out))


class _Far(NamedTuple):
    rho: Tensor
    mean: Tensor
    log_p: Tensor


def _pulls(
    t: Tensor, h: Tensor, log_q: Tensor, offsets: Tensor, row: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, _Far, Tensor]:
    """Of a positive bag log(1 - q), and rho, rho / sqrt(q), rho / q; which are in the far tail."""
    is_far = segment_max(t, offsets) < FAR
    none = _Far(torch.zeros_like(t), torch.zeros_like(t), torch.zeros_like(log_q))
    far = none if _nowhere(is_far) else _far_tail(t, offsets, row)
    far_row = is_far[row]
    near_q = torch.where(is_far, -1.0, log_q)
    near_p = log_not(near_q)
    # rho = r h, r = q / (1 - q); rho / sqrt(q) stays finite as q -> 0
    per_bag = near_q - near_p, near_q / 2 - near_p, -near_p
    # h times a number per bag; in the far tail, where q = 1 to the last digit, rho itself
    rho, by_root, by_q = (torch.where(far_row, far.rho, torch.exp(r)[row] * h) for r in per_bag)
    return torch.where(is_far, far.log_p, near_p), rho, by_root, by_q, far, far_row


def expectations(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    positive: Bool[Tensor, " b"],
    offsets: Int[Tensor, " b1"],
    row: Int[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " b"]]:
    """E[m] and log Z alone, as `moments` has them; `row` is the bag of every instance.

    In few steps where the plain formulas keep their digits, which is nearly always.
    """
    found = _quick(mu, sigma, positive, offsets, row)
    if found is not None:
        return found[0].add_(mu), found[1]
    full = moments(mu, sigma, positive, offsets, row)
    return full.mean, full.log_z


def gradient(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    positive: Bool[Tensor, " b"],
    offsets: Int[Tensor, " b1"],
    row: Int[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " b"]]:
    """d log Z / dmu and log Z alone, as `moments` has them."""
    found = _quick(mu, sigma, positive, offsets, row)
    if found is not None:
        # gamma = (E - mu) / sigma^2
        return found[0].div_(sigma.square()), found[1]
    full = moments(mu, sigma, positive, offsets, row)
    return full.gamma, full.log_z


def _quick(
    mu: Tensor, sigma: Tensor, positive: Tensor, offsets: Tensor, row: Tensor
) -> tuple[Tensor, Tensor] | None:
    """E - mu and log Z in few steps; None where the plain formulas would lose digits."""
    if mu.is_cuda:
        return None
    z = (mu / sigma).mul_(math.sqrt(0.5))
    upper = torch.erfc(z).mul_(0.5)  # 1 - Phi(t)
    log_q = segment_sum(upper.log(), offsets)
    doubtful = (log_q > DOUBTFUL) & positive
    if float(z.max()) > math.sqrt(0.5) * QUICK or bool(doubtful.any()):
        return None
    sigma_h = z.mul_(z).neg_().exp_().mul_(sigma).div_(upper)  # but for sqrt(2 pi)
    q = log_q.exp()
    not_q = 1 - q
    # E - mu = -sigma h (eq. qmi_0), r sigma h (eq. qmi_1), r = q / (1 - q)
    pull = torch.where(positive, q / not_q, -1.0).mul_(1 / math.sqrt(2 * math.pi))
    shift = sigma_h.mul_(pull.index_select(0, row))
    return shift, torch.where(positive, not_q.log(), log_q)


def _far_tail(t: Tensor, offsets: Tensor, row: Tensor) -> _Far:
    """A positive bag none of whose patches comes near zero: one of them must, the likeliest.

    With weights p_i = Phi(t_i) / sum_j Phi(t_j) of being the one,
    rho_i = p_i h(-t_i) and E_i / sigma = t_i + rho_i = (1 - p_i) t_i + p_i (h(-t_i) + t_i).
    """
    log_ndtr = torch.special.log_ndtr(t)
    top = segment_max(log_ndtr, offsets)
    e = torch.exp(log_ndtr - top[row])
    total = segment_sum(e, offsets)[row]
    p = e / total
    # 1 - p where p is nearly one: the sum of the others, not a difference
    others = segment_sum(torch.where(p > 0.5, 0.0, e), offsets)[row] / total
    not_p = torch.where(p > 0.5, others, 1 - p)
    rho = p * hazard(-t)
    log_p = top + torch.log(segment_sum(e, offsets))
    return _Far(rho, not_p * t + p * excess(-t), log_p)
