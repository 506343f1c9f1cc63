"""log P(all m < 0) of patches that share an effect, m ~ N(mu, S + tau^2 11'), from EP on S alone.

EP on S + tau^2 11' is slow and wrong: given all m < 0 the effect is as skewed as a normal cut at
its middle, and no Gaussian is. Given the effect s there is S alone, where EP is quick and right:

    P = int N(s; 0, tau^2) exp f(s) ds,    f(s) = log P(all m < 0), m ~ N(mu + s, S).

EP is run once, at an s* where the integrand falls. Its sites T, nu serve all others: with
m ~ N(M(s), V) the Gaussian that they make there, V = (S^-1 + T)^-1, M(s) = mhat + (1 - V tau)(s -
s*), and r_i(m) = 1(m < 0) exp(tau_i m^2/2 - nu_i m) a constraint over its site,

    f(s) = lZG(s) + log E[prod_i r_i(m_i)].

At s* the r_i neither pull nor bend. Elsewhere they do: effect_terms.py has what they add.

All of this costs a few products of V with as many columns as there are nodes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpmil.fast import compiled
from gpmil.moments import ep_bag
from gpmil.moments.effect_nodes import SEARCH, find_mode
from gpmil.moments.effect_terms import PASSES, AtOne, Columns, Correlations, Terms
from gpmil.moments.given_effect import Patches, all_below
from gpmil.moments.sites import Sites
from gpmil.moments.truncated import upper_tail

# Nodes lie STEP apart on the scale of the integrand, so many on either side of s*
STEP, BEFORE, AFTER = 0.8, 10, 6
BROAD, TURN = 1.0, -2.0  # where, and how fast, that scale becomes wider on the left
FAR = 4.8  # so many tau left of zero they end
# s* is looked for up to so many widths right of the mode and so many tau right of zero
REACH, MOST, HALVINGS = 6.0, 3.0, 8
# What the nodes and sites found to 3e-3 leave; and of the rings, which are summed in part.
FLOOR, SHARE_OF_RINGS = 1e-4, 0.1


def middle(
    mu: Float[Tensor, "b n"],
    variance: Float[Tensor, "b n"],
    mask: Bool[Tensor, "b n"],
    effect: float,
) -> Float[Tensor, " b"]:
    """s*: where the integrand falls, from independent patches with the diagonal of S.

    Where N(s; 0, tau^2) d exp(f) / ds is largest: where P falls if tau is large, else near zero.
    Left of it no constraint counts, and sites are easier taken away than added.
    """
    kernel = None if mu.is_cuda else compiled.sites()
    if kernel is not None:
        quick = _compiled_middle(mu, variance, mask, effect, kernel)
        if quick is not None:
            return quick
    sizes = mask.sum(-1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    patches = Patches.of(mu[mask], variance[mask].sqrt(), offsets, None)
    tau = torch.tensor(effect, dtype=torch.float64, device=mu.device)
    low, width, _ = find_mode(patches, tau, all_below)
    high = torch.minimum(low + REACH * width, low.clamp(min=MOST * effect))
    for _ in range(HALVINGS):
        s = (low + high) / 2
        at = all_below(patches, s)
        # d/ds of -s^2 / (2 tau^2) + f + log(-f')
        left = at.slope + at.bend / at.slope.clamp(max=-1e-300) > s / effect**2
        low, high = torch.where(left, s, low), torch.where(left, high, s)
    return (low + high) / 2


def _compiled_middle(
    mu: Tensor, variance: Tensor, mask: Tensor, effect: float, kernel: Any
) -> Float[Tensor, " b"] | None:
    out = torch.empty(len(mu), dtype=torch.float64)
    for b in range(len(mu)):
        own = (mu[b, mask[b]].numpy(), variance[b, mask[b]].sqrt().numpy())
        out[b], largest = kernel.middle(*own, effect, SEARCH, REACH, MOST, HALVINGS)
        if not largest < kernel.FURTHEST:
            return None
    return out


class OverEffect(NamedTuple):
    """log P(all m < 0), its error, and how it comes from k values of the effect."""

    log_p: Float[Tensor, " b"]
    error: Float[Tensor, " b"]
    weight: Float[Tensor, "b k"]  # of the values, given all m < 0; they sum to one
    further: Float[Tensor, "b k"]  # how far they are from s*
    terms: Terms  # what the patches do at each
    effect: float

    @property
    def s(self) -> Float[Tensor, "b k"]:
        """The values themselves."""
        return self.terms.at.s[:, None] + self.further

    def pulls(self, sites: Sites) -> Columns:
        """d f / d mu = nu - T E[m] at each of them, where these are the sites."""
        return sites.nu - sites.tau * self.terms.means(sites, self.terms.M)

    def shares(self, G: Float[Tensor, "b n k"]) -> Float[Tensor, "b k"]:
        """How far every direction moves all patches together, as far as their pulls at s* see.

        Any share will do in `joined`; less of it where tau is small and s / tau^2 is not.
        """
        at = self.terms.at
        pull = at.sites.nu - at.sites.tau * at.gauss.mean
        share = (pull[..., None] * G).sum(1) / pull.sum(-1, keepdim=True).clamp(max=-1e-300)
        return share * (self.effect**4 / (1 + self.effect**4))

    def joined(self, share: Tensor, slopes: Tensor, bends: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and bend along G from [G - 1 share', 1]: slopes at every value, mean of the bends.

        1 moves m as the effect does. There a bend is a small difference of large ones, and is
        better taken by parts: P_x1 / P = sum_j pi_j s_j / tau^2 slope_j.
        """
        pi, s = self.weight[:, None], self.terms.at.s[:, None, None] + self.further[:, None]
        every = slopes[:, :-1] + share[..., None] * slopes[:, -1:]
        slope, by_s = (every * pi).sum(-1), (every * pi * s).sum(-1) / self.effect**2
        twice = (slopes[:, -1:] * pi * s).sum(-1)[..., None] / self.effect**2
        # second derivatives over P
        rest = ((slopes * pi) @ slopes.mT - bends)[:, :-1, :-1]
        both = share[..., None] * by_s[:, None]
        second = rest + both + both.mT - twice * share[..., None] * share[:, None]
        return slope, slope[..., None] * slope[:, None] - second


class Profile:
    """f(s) for any s, from EP at one."""

    def __init__(self, at: AtOne, correlations: Correlations) -> None:
        self.at, self.correlations = at, correlations
        tau, nu = at.sites
        # d lZG / ds = 1'(nu - T mhat),  -d2 lZG / ds2 = 1'(T^-1 + S)^-1 1 = tau'(1 - V tau)
        shared = correlations.times(tau[..., None])[..., 0]
        self.moved = at.mask.double() - at.gauss.var * tau - shared
        self.rise = (nu - tau * at.gauss.mean).sum(-1)
        self.fall = (tau * self.moved).sum(-1)

    def terms(self, s: Float[Tensor, "b k"]) -> Terms:
        """The constraints over their sites, m ~ N(M(s), V)."""
        d = s - self.at.s[:, None]
        M = self.at.gauss.mean[..., None] + self.moved[..., None] * d[:, None, :]
        return Terms(self.at, self.correlations, M)

    def value(self, s: Float[Tensor, "b k"], terms: Terms) -> Float[Tensor, "b k"]:
        """f(s) within its bounds."""
        f = self.expanded(s, terms)[0]
        return _kept_in_bounds(self.at, f, s - self.at.s[:, None], self.rise, self.here)

    def expanded(self, s: Float[Tensor, "b k"], terms: Terms) -> tuple[Tensor, Tensor]:
        """f(s) as the terms have it, and the rings of more than two in it."""
        d = s - self.at.s[:, None]
        f = self.at.gauss.log_gauss[:, None] + self.rise[:, None] * d
        f = f - self.fall[:, None] * d.square() / 2
        rings, left_out = terms.rings()
        return f + terms.trees + rings + terms.c3, left_out

    @property
    def here(self) -> Float[Tensor, "b 1"]:
        """f(s*)."""
        s = self.at.s[:, None]
        return self.expanded(s, self.terms(s))[0]


def integrate(
    profile: Profile,
    effect: float,
    more: Callable[[Terms], Float[Tensor, "b k"]] | None = None,
) -> OverEffect:
    """Sum over the effect; `more` is to be added to f."""
    at = profile.at
    s, log_ds = _nodes(at.s, profile.fall, effect)
    terms = profile.terms(s)
    f, left_out = profile.expanded(s, terms)
    f = _kept_in_bounds(at, f, s - at.s[:, None], profile.rise, f[:, BEFORE, None])
    if more is not None:
        f = f + more(terms)
    # N(s; 0, tau^2) exp f(s) ds
    log_w = f - (s / effect).square() / 2 + log_ds - math.log(effect * math.sqrt(2 * math.pi))
    log_p = torch.logsumexp(log_w, -1)
    weight = torch.exp(log_w - log_p[:, None])
    error = at.error + FLOOR + SHARE_OF_RINGS * (weight * left_out.abs()).sum(-1)
    return OverEffect(log_p, error, weight, s - at.s[:, None], terms, effect)


def quick(bag: ep_bag.Bag, found: ep_bag.LogP, s: float, effect: float) -> ep_bag.LogP | None:
    """log P and its error of one bag on a CPU, from EP at s; None in the deep tail."""
    n = len(bag.mu)
    arrays = (bag.V, bag.x[:n], bag.x[n:], bag.gauss[0], bag.mu, bag.prior)
    numbers = (s, bag.log_gauss, found.log_p + found.c3)
    rule = (STEP, float(BEFORE), float(AFTER), BROAD, TURN, FAR)
    loops = compiled.over_effect()
    log_p, rings, top = loops.over_effect(*arrays, *numbers, effect, rule, PASSES)
    if not top < bag.kernel.FURTHEST:
        return None
    error = found.error + FLOOR + SHARE_OF_RINGS * rings
    return found._replace(log_p=log_p, c3=0.0, c4=0.0, error=error)


def _nodes(
    s: Float[Tensor, " b"], fall: Float[Tensor, " b"], effect: float
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Values of the effect around s*, and log ds between them.

    The integrand falls with its own width there, and far on the left, where all m < 0 is certain,
    with tau: s(u) with ds/du = width + more / (1 + exp(BROAD (u - TURN))).
    """
    width = (effect**-2 + fall).rsqrt()[:, None]
    u = STEP * torch.arange(-BEFORE, AFTER + 1, dtype=s.dtype, device=s.device)
    z = BROAD * (u - TURN)
    soft = (torch.nn.functional.softplus(-z) - math.log1p(math.exp(BROAD * TURN))) / BROAD
    s = s[:, None]
    # so much that the first is FAR tau left of zero, or of s*
    more = ((s.clamp(min=0.0) + FAR * effect + width * u[0]) / soft[0]).clamp(min=0.0)
    slope = width + more * torch.sigmoid(-z)
    return s + width * u - more * soft, slope.log() + math.log(STEP)


def _kept_in_bounds(
    at: AtOne, f: Float[Tensor, "b k"], d: Float[Tensor, "b k"], rise: Tensor, here: Tensor
) -> Float[Tensor, "b k"]:
    """f below min_i log P(m_i < 0); it falls with s from `here` at s*, and is concave."""
    t = torch.where(at.mask, at.mu, -math.inf)[..., None] + d[:, None, :]
    worst = (t * at.variance.rsqrt()[..., None]).amax(1)
    bound = upper_tail(worst)[0]
    # the tangent at s*
    most = torch.minimum(bound, torch.where(d > 0, here + rise[:, None] * d, 0.0))
    f = torch.where(f.isfinite(), f, most)
    return torch.minimum(torch.where(d < 0, torch.maximum(f, here), f), most)
