"""One-sided moments of patches that share an effect: m_b ~ N(mu_b, diag(sigma_b^2) + tau^2 11').

Given the effect s ~ N(0, tau^2) of a bag its patches are independent, so that everything is an
average over s of what truncated.py has at mu + s. With q(s) = prod_i (1 - Phi((mu_i + s)/sigma_i)),

    Q = int N(s; 0, tau^2) q(s) ds         P(all m < 0);  Z = Q (negative bag), 1 - Q (positive)
    pi(s) = N(s; 0, tau^2) q(s) / Q        the effect of a bag that is all negative
    g(s) = d log q / dmu,  c_i(s) = d2 log q / dmu_i^2

    dQ / Q = E_pi[g],  d2 Q / Q = diag(E_pi[c]) + E_pi[g g']

and dZ, d2 Z are the same but for their sign. Where Q of a positive bag is nearly one the average
is taken over N(s; 0, tau^2) (1 - q(s)) instead, which keeps all digits of Z. With gamma the
derivative of log Z, E[m] = mu + sigma^2 gamma + E[s], and with s = tau x the derivative of log Z by
log tau is E[s d log z(s) / ds].

The integral is a sum over a lattice s = k h. For integrands that are smooth and vanish at both ends
this rule gains digits faster than any power of h; Gauss and Hermite's, centred at the mode, needs
twice as many nodes where a bag cuts off one side of N(s; 0, tau^2). And the nodes do not follow mu,
so that gradient and Hessian are those of the sum itself: the solvers need that more than they need
the integral. The step h is as fine as the bag needs; which nodes count depends on mu.

On a CPU the sums over the nodes are compiled (effect_sums.py); bags beyond the range of the
compiled ones are summed here.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.moments import effect_nodes, truncated
from gpmil.moments.effect_nodes import TOGETHER, At, Nodes, walk
from gpmil.moments.effect_sums import compiled_sums
from gpmil.moments.given_effect import PLAIN, Given, Patches, all_below, some_above
from gpmil.moments.truncated import log_not, segment_sum

RANK = 2  # of the low-rank part of the second derivative
NEAR_ONE = -0.05  # log Q of a positive bag above which 1 - Q is summed directly


class EffectMoments(NamedTuple):
    """What inference needs of q(m) with a slide effect.

    d2 log Z / dmu2 = diag(curvature) - gamma gamma' + sign F F' inside a bag, F its rows of
    `factors`; sign is 1 in negative bags, -1 in positive ones.
    """

    mean: Float[Tensor, " n"]  # E[m_i]
    gamma: Float[Tensor, " n"]  # d log Z_b / dmu_i
    curvature: Float[Tensor, " n"]  # diagonal part of d2 log Z_b / dmu2
    factors: Float[Tensor, "n k"]  # its low-rank part
    sign: Float[Tensor, " b"]
    log_z: Float[Tensor, " b"]
    effect: Float[Tensor, " b"]  # E[s_b]
    effect_variance: Float[Tensor, " b"]  # Var[s_b]
    by_log_tau: Float[Tensor, " b"]  # d log Z_b / d log tau


def moments(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    positive: Bool[Tensor, " b"],
    offsets: Int[Tensor, " b1"],
    tau: float | Float[Tensor, ""],
    row: Int[Tensor, " n"] | None = None,
) -> EffectMoments:
    """All of it for bags of rows offsets[b]:offsets[b+1]; tau = 0 is truncated.moments.

    Can be differentiated in mu, sigma and tau. `row`, the bag of every instance, spares a repeated
    caller some work.
    """
    patches = Patches.of(mu, sigma, offsets, row)
    none, tau = _none(tau), torch.as_tensor(tau, dtype=torch.float64, device=mu.device)
    if none:
        found = _without_effect(patches, positive)
    else:
        sums = _over_effect(patches, tau, all_below, len(mu))
        found = _labelled(patches, tau, sums, positive)
        near_one = positive & (sums.log_z > NEAR_ONE)
        if near_one.any():
            some, rows = patches.some(near_one)
            rare = _over_effect(some, tau, some_above, len(mu))
            found = found.replaced(rare, rows, near_one.nonzero()[:, 0])
    mean, gamma, curvature, factors, log_z, effect, square, by_log_tau = found
    sign, variance = torch.where(positive, -1.0, 1.0), square - effect.square()
    out = (mean, gamma, curvature, factors, sign, log_z, effect, variance, by_log_tau)
    return EffectMoments(*(x.to(mu.dtype) for x in out))


def gradient(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    positive: Bool[Tensor, " b"],
    offsets: Int[Tensor, " b1"],
    tau: float | Float[Tensor, ""],
    row: Int[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " b"]]:
    """d log Z / dmu and log Z alone, as `moments` has them."""
    none, tau = _none(tau), torch.as_tensor(tau, dtype=torch.float64, device=mu.device)
    if none:
        return truncated.gradient(mu, sigma, positive, offsets, row)
    patches = Patches.of(mu, sigma, offsets, row)
    log_q, slope = _below_alone(patches, tau)
    near_one = positive & (log_q > NEAR_ONE)
    log_z = torch.where(positive, log_not(log_q.clamp(max=NEAR_ONE)), log_q)
    # dZ / Z = -r dQ / Q,  r = Q / (1 - Q)
    factor = torch.where(positive, -torch.exp(log_q - log_z), 1.0)
    gamma = factor.index_select(0, row) * slope
    if near_one.any():
        some, rows = patches.some(near_one)
        rare = _over_effect(some, tau, some_above, len(mu))
        gamma = gamma.index_copy(0, rows, rare.gamma)
        log_z = log_z.index_copy(0, near_one.nonzero()[:, 0], rare.log_z)
    return gamma.to(mu.dtype), log_z.to(mu.dtype)


def _none(tau: float | Tensor) -> bool:
    """Whether tau is zero; a GPU is not asked where it is a number."""
    return float(tau.detach() if isinstance(tau, Tensor) else tau) == 0


# --- Labels ---------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """E[m] and the derivatives of log Z in mu; log Z, E[s], E[s^2], d log Z / d log tau."""

    mean: Tensor
    gamma: Tensor
    curvature: Tensor
    factors: Tensor
    log_z: Tensor
    effect: Tensor
    square: Tensor
    by_log_tau: Tensor

    def replaced(self, other: "_Found", rows: Tensor, bags: Tensor) -> "_Found":
        """With what another has for some of the bags."""
        where = (rows, rows, rows, rows, bags, bags, bags, bags)
        return _Found(*(x.index_copy(0, at, y) for x, y, at in zip(self, other, where)))


def _without_effect(patches: Patches, positive: Tensor) -> _Found:
    mu, sigma, offsets, row = patches
    m = truncated.moments(mu, sigma, positive, offsets, row)
    # pull pull' = gamma gamma' / q = gamma gamma' + F F',  F = pull sqrt(1 - q)
    rest = m.pull * torch.exp(m.log_z / 2)[row]
    factor = torch.where(positive[row], rest, m.gamma)
    factors = torch.nn.functional.pad(factor[:, None], (0, RANK - 1))
    zero = torch.zeros_like(m.log_z)
    return _Found(m.mean, m.gamma, m.curvature, factors, m.log_z, zero, zero, zero)


def _labelled(patches: Patches, tau: Tensor, sums: _Found, positive: Tensor) -> _Found:
    """From averages over all m < 0: as they are, or what they leave of N(mu, S)."""
    row = patches.row
    log_q = torch.where(positive, sums.log_z.clamp(max=NEAR_ONE), -1.0)
    log_p = log_not(log_q)
    # dZ / Z = -r dQ / Q,  r = Q / (1 - Q)
    factor = torch.where(positive, -torch.exp(log_q - log_p), 1.0)
    root = torch.where(positive, torch.exp((log_q - log_p) / 2), 1.0)
    gamma = factor[row] * sums.gamma
    # E[s] = 0 and E[s^2] = tau^2 before the label is known
    effect = factor * sums.effect
    rest = tau.square() * torch.exp(-log_p) + factor * sums.square
    mean = patches.mu + patches.sigma.square() * gamma + effect[row]
    return _Found(
        torch.where(positive[row], mean, sums.mean),
        gamma,
        factor[row] * sums.curvature,
        root[row][:, None] * sums.factors,
        torch.where(positive, log_p, sums.log_z),
        effect,
        torch.where(positive, rest, sums.square),
        factor * sums.by_log_tau,
    )


# --- The sum over the effect ----------------------------------------------------------------------


POWERS = 2 * RANK - 1


def _over_effect(patches: Patches, tau: Tensor, given: At, among: int) -> _Found:
    """Sums of N(s; 0, tau^2) z(s) over the lattice, for bags out of `among` patches."""
    sums = compiled_sums(patches, tau, given, True, among)
    if sums is None:
        return _plain_sums(patches, tau, given)
    nodes, by_bag, by_row, served = sums
    found = _averages(patches, tau, nodes, by_bag, by_row)
    if not served.all():
        some, rows = patches.some(~served)
        rest = _plain_sums(some, tau, given)
        found = found.replaced(rest, rows, (~served).nonzero()[:, 0])
    return found


def _plain_sums(patches: Patches, tau: Tensor, given: At) -> _Found:
    """The sums in torch, which can be differentiated."""
    with torch.no_grad():
        nodes = effect_nodes.find(patches.detach(), tau.detach(), given)
    by_bag = [torch.zeros_like(nodes.first)] * (4 + POWERS)
    by_row = [torch.zeros_like(patches.mu)] * (3 + RANK)
    for j, some, here, rows, bags in walk(patches, nodes):
        s = (here.first + j) * here.step
        at = given(some, s)
        weight = torch.exp(at.log_z - s.square() / (2 * tau.square()) - here.top)
        per_bag, per_row = _terms(at, some.row, weight, s, (s - here.mode) / here.width)
        by_bag = [_add(x, y, bags) for x, y in zip(by_bag, per_bag)]
        by_row = [_add(x, y, rows) for x, y in zip(by_row, per_row)]
    return _averages(patches, tau, nodes, by_bag, by_row)


def _add(total: Tensor, more: Tensor, where: Tensor) -> Tensor:
    """With more added to some of its numbers, or to all; of copies with their sum."""
    more = more if len(more) == len(where) else more.view(-1, len(where)).sum(0)
    return total + more if len(more) == len(total) else total.index_add(0, where, more)


def _terms(
    at: Given, row: Tensor, weight: Tensor, s: Tensor, z: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """What one node adds, per bag and per row."""
    w, heavy = weight.index_select(0, row), weight * at.size.square()
    powers = [heavy * z**j for j in range(POWERS)]
    per_bag = [weight, weight * s, weight * s.square(), weight * s * at.slope, *powers]
    per_row = [w * at.gamma, w * at.curvature, w * at.mean]
    return per_bag, per_row + [p.index_select(0, row) * at.direction for p in powers[:RANK]]


def _below_alone(patches: Patches, tau: Tensor) -> tuple[Tensor, Tensor]:
    """log Q and d log Q / dmu in few steps, where these keep their digits."""
    sums = compiled_sums(patches, tau, all_below, False, len(patches.mu))
    if sums is None:
        nodes, total, slope, served = _plain_slopes(patches, tau)
    else:
        nodes, (total, *_), (slope,), served = sums
    if not served.any():
        full = _plain_sums(patches, tau, all_below)
        return full.log_z, full.gamma
    total = total + weight_before(tau, nodes)
    log_q, slope = log_total(tau, nodes, total), slope / total.index_select(0, patches.row)
    if not served.all():
        some, rows = patches.some(~served)
        full = _plain_sums(some, tau, all_below)
        log_q = log_q.index_copy(0, (~served).nonzero()[:, 0], full.log_z)
        slope = slope.index_copy(0, rows, full.gamma)
    return log_q, slope


def _plain_slopes(patches: Patches, tau: Tensor) -> tuple[Nodes, Tensor, Tensor, Tensor]:
    """Nodes, sums of their weights and of d log q / dmu, and in which bags these are right."""
    root = math.sqrt(0.5)
    with torch.no_grad():
        nodes = effect_nodes.find(patches.detach(), tau.detach(), all_below)
    total, hazard = torch.zeros_like(nodes.first), torch.zeros_like(patches.mu)
    # t is largest at the last node
    walked = torch.ceil(nodes.many / TOGETHER) * TOGETHER
    last = (nodes.first + walked - 1) * nodes.step
    plain = bool(((patches.mu + last[patches.row]) / patches.sigma).detach().max() <= PLAIN)
    base, scale, seen = patches.mu, patches.sigma, None
    for j, some, here, rows, bags in walk(patches, nodes) if plain else ():
        if some is not seen:
            base, scale, seen = some.mu / some.sigma * root, root / some.sigma, some
        s = (here.first + j) * here.step
        z = torch.addcmul(base, s.index_select(0, some.row), scale)
        upper = torch.erfc(z)
        log_q = segment_sum(upper.log() - math.log(2), some.offsets)
        weight = torch.exp(log_q - s.square() / (2 * tau.square()) - here.top)
        h = z.square().neg().exp() / upper * weight.index_select(0, some.row)
        total, hazard = _add(total, weight, bags), _add(hazard, h, rows)
    # h = phi / (1 - Phi), but for sqrt(2 / pi)
    slope = -math.sqrt(2 / math.pi) * hazard / patches.sigma
    return nodes, total, slope, torch.full_like(total, plain, dtype=torch.bool)


def _averages(
    patches: Patches,
    tau: Tensor,
    nodes: Nodes,
    by_bag: list[Tensor],
    by_row: list[Tensor],
) -> _Found:
    """The sums over what their weights sum to, and its logarithm."""
    row = patches.row
    before = sums_before(tau, nodes)
    total = by_bag[0] + before[0]
    total_row = total.index_select(0, row)
    gamma, curvature, mean, *weighted = (x / total_row for x in by_row)
    effect, square = (by_bag[1] + before[1]) / total, (by_bag[2] + before[2]) / total
    # mu + sigma^2 gamma + E[s], by what keeps its digits
    plain = patches.mu + patches.sigma.square() * gamma + effect[row]
    mean = torch.where(nodes.certain[row], plain, mean)
    moment = torch.stack([x / total for x in by_bag[4:]], 1)
    factors = _factors(moment, torch.stack(weighted, 1), row)
    log_z, by_log_tau = log_total(tau, nodes, total), by_bag[3] / total
    return _Found(mean, gamma, curvature, factors, log_z, effect, square, by_log_tau)


def log_total(tau: Tensor, nodes: Nodes, total: Tensor) -> Tensor:
    """log Z from the sum of exp(-s^2 / (2 tau^2)) z(s) in the nodes' unit."""
    # N(s; 0, tau^2) ds; on the lattice the density sums to 1 + 2 exp(-2 (pi tau / h)^2)
    density = 1 + 2 * torch.exp(-2 * (math.pi * tau / nodes.step).square())
    scale = (nodes.step / tau).log() - math.log(2 * math.pi) / 2 - density.log()
    return (nodes.top + scale + total.log()).clamp(max=0.0)


def _factors(moment: Tensor, by_row: Tensor, row: Tensor) -> Tensor:
    """a_0, a_1, ... with E[size^2 direction direction'] = sum_j a_j a_j', but for what is left out.

    Averages with polynomials in z that are orthonormal under size^2 pi: the rows of L^-1, where
    L L' is the matrix of the moments of z.
    """
    j = torch.arange(RANK, device=row.device)
    hankel = moment[:, j[:, None] + j]
    size = hankel[:, 0, 0].clamp(min=1e-300)
    eye = torch.eye(RANK, dtype=hankel.dtype, device=hankel.device)
    L = torch.linalg.cholesky(hankel / size[:, None, None] + 1e-13 * eye)
    inverse = torch.linalg.solve_triangular(L, eye, upper=False) * size.rsqrt()[:, None, None]
    return (inverse[row] @ by_row[..., None])[..., 0]


def weight_before(tau: Tensor, nodes: Nodes) -> Tensor:
    """The sum of 1 over the lattice before the first node, where z = 1, in its unit.

    The integral to the midpoint a before the first node, with Euler and Maclaurin's corrections:
    sum_k d f(k d) = int f - d^2/24 f'(a) + 7/5760 d^4 f^(3)(a), f = phi.
    """
    return _weight_to(_to_midpoint(tau, nodes), nodes)


def sums_before(tau: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of 1, s and s^2 over it: f = phi, x phi and x^2 phi."""
    d, a, phi, whole = midpoint = _to_midpoint(tau, nodes)
    small, tiny = d**2 / 24, 7 * d**4 / 5760
    # derivatives of phi, over phi
    p1, p2, p3 = -a, a**2 - 1, 3 * a - a**3
    p4, p5 = a**4 - 6 * a**2 + 3, -(a**5) + 10 * a**3 - 15 * a
    one = phi * (small * p2 - tiny * p4 - 1)
    two = whole + phi * (p1 - small * (p3 + p1) + tiny * (p5 + p3))
    one, two = (torch.where(nodes.certain, x / d, 0.0) for x in (one, two))
    return _weight_to(midpoint, nodes), one * tau, two * tau.square()


def _weight_to(midpoint: tuple[Tensor, ...], nodes: Nodes) -> Tensor:
    d, a, phi, whole = midpoint
    # derivatives of phi, over phi
    p1, p3 = -a, 3 * a - a**3
    total = whole + phi * (7 * d**4 / 5760 * p3 - d**2 / 24 * p1)
    return torch.where(nodes.certain, total / d, 0.0)


def _to_midpoint(tau: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d and a in units of tau, sqrt(2 pi) times the density and the distribution function at a."""
    d = nodes.step / tau
    # where nothing is added its derivative must not overflow either
    first, top = (torch.where(nodes.certain, x, 0.0) for x in (nodes.first, nodes.top))
    a = (first - 0.5) * d
    phi = torch.exp(-a.square() / 2 - top)
    return d, a, phi, torch.exp(torch.special.log_ndtr(a) - top) * math.sqrt(2 * math.pi)
