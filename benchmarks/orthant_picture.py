"""The picture of docs/explanation/integrals.md: how far off the answers to the two integrals are.

    python benchmarks/orthant_picture.py [--out docs/images/orthant_error.png]

Simulated slides; a model fitted on other slides of the same population predicts each of them as
m* ~ N(mu, S). Left and middle: error of log P(all m* < 0) against the coupling and against the
size of the slide; the reference is the tilted sampler with 8 x 4096 points. Right: error of the
truncated mean inside training, for negative slides and at the paper's settings; the reference is
long Gibbs sampling.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import log_ndtr, ndtri_exp

import gpmil
from gpmil.coupling.operator import Dense, dense_parts, sparse_precision
from gpmil.moments.ep import ep
from gpmil.moments.sampling import tilted
from gpmil.process.sparse_gp import joint
from gpmil.show import plots

SEED = 3
STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0)
SIZES = (10, 30, 100, 300, 600)
SIZE, STRENGTH = 150, 1.0  # of the panel in which the other one varies
# variance, length over sqrt(D), prior mean
WIDE, PAPER = (9.0, 2.0, -4.0), (1.0, 1.0, 0.0)
POOL = 40  # positive slides drawn, of which four are shown
DRAWS = 5_000
LOG_ROOT_2PI = math.log(2 * math.pi) / 2
FLOOR = 1e-5  # errors below it are drawn on it
TOP = 4e2  # where infinite ones are marked
# name, colour, marker
ANSWERS = (
    ("independent patches", plots.POSITIVE, "s"),
    ("5,000 draws", plots.MUTED, "o"),
    ("EP", plots.NEGATIVE, "^"),
    ("EP + correction", "#009e73", "D"),
)


class Predicted(NamedTuple):
    """A slide as a fitted model sees it: m* ~ N(mu, S); Sigma and P are those of its graph."""

    mu: torch.Tensor
    S: torch.Tensor
    Sigma: torch.Tensor
    P: np.ndarray


def fitted(strength, settings):
    variance, length, mean = settings
    train = gpmil.simulate.cohort(40, 24, seed=SEED)
    model = gpmil.VGPMILPRI(
        coupling=strength,
        variance=variance,
        lengthscale=length * math.sqrt(train.n_features),
        mean=mean,
        n_inducing=100,
        moments="coupled",
        random_state=0,
        device="cpu",
    )
    return model.fit(train)


def negative_training_slides(count):
    """The smallest ones: Gibbs sampling is slow."""
    train = gpmil.simulate.cohort(40, 24, seed=SEED)
    order = np.argsort(train.sizes, kind="stable")
    return train[order[train.labels[order] == 0][:count]]


def slides(n):
    """New slides of about n patches: two negative, two with a common lesion, two with a large one.

    Simulated lesions are small (median 6 % of the slide), those of SICAPv2 large (54 %): hence
    the choice of the largest.
    """
    bags = gpmil.simulate.cohort(
        POOL + 2, POOL, seed=SEED, part=1, mean_size=n, size_shape=1e4, min_size=min(n, 10)
    )
    share = np.add.reduceat(bags.instance_labels, bags.offsets[:-1]) / bags.sizes
    order = np.argsort(share, kind="stable")
    middle = 2 + POOL // 2
    return bags[np.concatenate([order[:2], order[middle : middle + 2], order[-2:]])]


def predicted(model, bags):
    cpu = torch.device("cpu")
    predictor = model._predictor(cpu)
    for b in range(len(bags)):
        bag = bags[b]
        part: Dense
        (part,) = dense_parts(bag.adjacency, bag.offsets, np.array([0]), model.coupling_)
        x = part.pad(model._inputs(bag.features, cpu))
        mu, S = joint(predictor, part.sigma, x)
        P = sparse_precision(bag.adjacency, model.coupling_).toarray()
        yield Predicted(mu[0], S[0], part.sigma[0], P)


# --- The slide's probability ------------------------------------------------------------------


def log_probabilities(slide, seed):
    """log P by each of the answers, then the reference and its standard error."""
    mu, S = slide.mu, slide.S
    found = ep(mu[None], S[None])
    alone = torch.special.log_ndtr(-mu / S.diagonal().sqrt()).sum()
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(S.numpy())
    draws = mu.numpy() + rng.standard_normal((DRAWS, len(mu))) @ root.T
    share = (draws < 0).all(1).mean()
    counted = math.log(share) if share > 0 else -math.inf
    reference, se = tilted(mu, S, n_points=4096, sites=found, seed=11)
    answers = (float(alone), counted, float(found.log_p), float(found.log_p + found.c3))
    return *answers, reference, se, float(found.error)


def study(cases):
    """Rows (slides of a case) of answers, reference, standard error and error estimate."""
    out = []
    for model, n in cases:
        bags = slides(n)
        rows = [log_probabilities(s, b) for b, s in enumerate(predicted(model, bags))]
        out.append(np.array(rows))
        errors = np.abs(out[-1][:, :4] - out[-1][:, 4:5])
        print(
            f"lambda {model.coupling_:g}, n {n}: log P {np.round(out[-1][:, 4], 2).tolist()}; "
            f"median errors {np.median(errors, 0).round(5).tolist()}, "
            f"largest {errors.max(0).round(5).tolist()}, se {out[-1][:, 5].max():.5f}, "
            f"no draw {int(np.isinf(out[-1][:, 1]).sum())} of {len(bags)}",
            flush=True,
        )
    return out


# --- The truncated mean -----------------------------------------------------------------------


def gibbs(mu, P, chains=1_000, sweeps=1_500, burn=300):
    """E[m | all m < 0], m ~ N(mu, P^-1), and its standard error; chains side by side.

    Averaged are the means of m_i given its neighbours, which vary less than m_i.
    """
    rng = np.random.default_rng(SEED)
    sd = 1 / np.sqrt(np.diag(P))
    neighbours = [np.flatnonzero(row) for row in P - np.diag(np.diag(P))]
    m = np.minimum(mu, -0.1)[:, None] - 0.1 * rng.random((len(mu), chains))
    total = np.zeros_like(m)
    for sweep in range(sweeps):
        log_u = np.log(rng.random(m.shape))
        for i, js in enumerate(neighbours):
            center = mu[i] - P[i, js] @ (m[js] - mu[js, None]) / P[i, i]
            t = center / sd[i]
            log_p = log_ndtr(-t)
            m[i] = center + sd[i] * ndtri_exp(log_u[i] + log_p)
            if sweep >= burn:
                total[i] += center - sd[i] * np.exp(-(t**2) / 2 - LOG_ROOT_2PI - log_p)
    means = total / (sweeps - burn)
    return means.mean(1), means.std(1) / math.sqrt(chains)


def truncated_means(slide):
    """Errors of the diagonal approximation and of EP, and the reference's se, root mean square."""
    mu, sigma = slide.mu, slide.Sigma.diagonal().sqrt()
    t = mu / sigma
    # E_i = mu_i - sigma_i phi(t_i) / (1 - Phi(t_i))
    log_pdf = -(t**2) / 2 - LOG_ROOT_2PI
    diagonal = mu - sigma * torch.exp(log_pdf - torch.special.log_ndtr(-t))
    mean = ep(mu[None], slide.Sigma[None]).mean[0]
    reference, se = gibbs(mu.numpy(), slide.P)
    off = [(e.numpy() - reference) / sigma.numpy() for e in (diagonal, mean)]
    return [float(np.sqrt(np.mean(e**2))) for e in (*off, se / sigma.numpy())]


def mean_study(models):
    out = []
    for model in models:
        rows = [truncated_means(s) for s in predicted(model, negative_training_slides(2))]
        out.append(np.array(rows))
        print(
            f"lambda {model.coupling_:g}: truncated mean, {out[-1].round(5).tolist()}", flush=True
        )
    return out


# --- Drawing ----------------------------------------------------------------------------------


def draw(by_strength, by_size, means):
    figure = plots.new_figure(11.0, 4.3)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    probability_panel(left, STRENGTHS, by_strength)
    plots.style(
        left, "coupling λ", "error of log P(all m* < 0)", f"a  The slide's probability, n = {SIZE}"
    )
    probability_panel(middle, SIZES, by_size)
    plots.style(
        middle, "patches in the slide, n", "", f"b  The slide's probability, λ = {STRENGTH:g}"
    )
    middle.sharey(left)
    mean_panel(right, means)
    plots.style(right, "coupling λ", "error of E[m], in σ", "c  The truncated mean in training")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles[1:] + handles[:1],  # the grey band last
        labels[1:] + labels[:1],
        loc="lower center",
        ncols=6,
        frameon=False,
        fontsize=plots.FONT - 0.5,
        columnspacing=1.4,
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def log_axes(ax, ticks):
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="y", color=plots.GRID, linewidth=0.6)
    ax.set_axisbelow(True)


def probability_panel(ax, ticks, results):
    log_axes(ax, ticks)
    band(ax, ticks, [np.median(rows[:, 5]) for rows in results])
    for k, (name, colour, marker) in enumerate(ANSWERS):
        medians = []
        for x, rows in zip(ticks, results):
            errors = np.abs(rows[:, k] - rows[:, 4])
            finite = np.isfinite(errors)
            place = x * 1.08 ** (k - 1.5)
            ax.plot(
                np.full(finite.sum(), place),
                errors[finite].clip(FLOOR),
                marker,
                color=colour,
                markersize=2.6,
                alpha=0.45,
                markeredgewidth=0,
            )
            if not finite.all():
                ax.plot([place], [TOP], "x", color=colour, markersize=5)
                ax.annotate(
                    f"{(~finite).sum()} of {len(rows)}",
                    (place, TOP),
                    (0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=plots.FONT - 2,
                    color=plots.MUTED,
                )
            # errors of slides without a draw are infinite, and count as such in the median
            medians.append(max(np.median(errors), FLOOR))
        ax.plot(
            [x * 1.08 ** (k - 1.5) for x in ticks],
            [m if np.isfinite(m) else np.nan for m in medians],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.2,
            label=name,
        )
    ax.plot([], [], "x", color=plots.MUTED, label="slides without any such draw: log P = −∞")
    ax.set_ylim(FLOOR / 1.5, 10 * TOP)


def band(ax, x, se):
    ax.fill_between(
        x,
        np.full(len(x), 1e-9),
        np.maximum(se, 1e-9),
        color=plots.GRID,
        label="standard error of the reference",
        linewidth=0,
    )


def mean_panel(ax, results):
    log_axes(ax, STRENGTHS)
    band(ax, STRENGTHS, [rows[:, 2].mean() for rows in results])
    for k, (name, colour, marker) in enumerate(
        (("diagonal (the paper)", plots.POSITIVE, "s"), ("EP", plots.NEGATIVE, "^"))
    ):
        values = [math.sqrt((rows[:, k] ** 2).mean()) for rows in results]
        ax.plot(STRENGTHS, values, color=colour, marker=marker, markersize=5, linewidth=1.2)
        ax.annotate(
            name,
            (STRENGTHS[2], values[2]),
            (-6, 8),
            textcoords="offset points",
            fontsize=plots.FONT - 0.5,
            color=colour,
            ha="right",
        )
    ax.set_ylim(5e-5, 0.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = Path(__file__).parents[1] / "docs" / "images"
    parser.add_argument("--out", type=Path, default=images / "orthant_error.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {strength: fitted(strength, WIDE) for strength in STRENGTHS}
    by_strength = study([(models[s], SIZE) for s in STRENGTHS])
    by_size = study([(models[STRENGTH], n) for n in SIZES])
    means = mean_study([fitted(strength, PAPER) for strength in STRENGTHS])
    args.out.write_bytes(plots.png(draw(by_strength, by_size, means), dpi=110))


if __name__ == "__main__":
    main()
