"""The pictures and numbers of docs/explanation/decisions.md: scores, p-values, marks and maps.

    python benchmarks/decisions_picture.py --data FOLDER [--predictions FOLDER] [--out docs/images]

Five folds (seed 0) of the SICAPv2 subset and of the colon images, everything learned inside the
training folds, no patch label used; a fold of the colon images takes 40 to 60 s on one core. With
--predictions what was predicted is kept there, and drawn from the next time.

No pixel of tissue is drawn: the maps are coloured squares where the tiles lie.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from real_data import DATA, read
from real_data import SETS as FILES
from scipy.special import ndtr, ndtri
from sklearn.metrics import f1_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold

import gpmil
from gpmil.decide.marks import benjamini_hochberg
from gpmil.decide.metrics import calibration_error, false_discovery_rate
from gpmil.show import heatmaps, plots

SETS = {
    "sicapv2": ("SICAPv2 subset", {"flags": True}),
    "colon": ("colon", {"n_components": 64, "flags": True, "calibrated": True}),
}
RATE = 0.1
RATES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
ALPHA = 0.1  # error among accepted slides
BENIGN = "#cc79a7"
KINDS = (
    ("of negative slides", plots.NEGATIVE),
    ("benign, in positive slides", BENIGN),
    ("malignant", plots.POSITIVE),
    ("label unknown, in positive slides", plots.MUTED),
)
PROBABILITIES = {1e-6: "10⁻⁶", 1e-4: "10⁻⁴", 0.01: "0.01", 0.1: "0.1", 0.5: "0.5", 0.9: "0.9"}
SHADES = "YlGnBu_r"  # of p-values: small is dark
MARKED = "#2c5f8a"


# --- Predictions out of fold ------------------------------------------------------------------


def out_of_fold(bags, settings):
    """What models say of bags they have not seen; arrays a patch and a bag."""
    patch = {k: np.empty(bags.n_instances) for k in ("score", "p_value", "p_value_by_bag")}
    slide = {k: np.full(len(bags), np.nan) for k in ("plain", "calibrated", "low", "high")}
    slide["accepted"] = np.zeros(len(bags), dtype=bool)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    for train, test in folds.split(np.zeros(len(bags)), bags.labels):
        held_out, rows = bags[test], np.isin(bags.bag_index, test)
        model = gpmil.VGPMILPRI(**settings, random_state=0, device="cpu").fit(bags[train])
        found = model.predict_instances(held_out)
        patch["score"][rows] = found.mean / found.std
        patch["p_value"][rows] = found.p_value
        by_bag = model.predict_instances(held_out, weights="bag")
        patch["p_value_by_bag"][rows] = by_bag.p_value
        slide["plain"][test] = -np.expm1(model.log_proba_negative(held_out)[0])
        if settings.get("calibrated"):
            p = model.predict_proba(held_out)[:, 1]
            slide["calibrated"][test] = p
            slide["low"][test], slide["high"][test] = model.predict_interval(held_out)
            slide["accepted"][test] = model.refer_rule(ALPHA).decide(p)
    return patch | slide


def predictions(bags, name, folder):
    path = None if folder is None else folder / f"{name}.npz"
    if path is not None and path.exists():
        with np.load(path, allow_pickle=False) as kept:
            return dict(kept)
    found = out_of_fold(bags, SETS[name][1])
    if path is not None:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, **found)
    return found


def kinds(bags):
    """Which patches are of each of KINDS."""
    slide, patch = bags.labels[bags.bag_index], bags.instance_labels
    return slide == 0, (slide == 1) & (patch == 0), patch == 1, (slide == 1) & (patch < 0)


def present(bags):
    """Name, colour and rows of the kinds of patches there are."""
    return [(*kind, rows) for kind, rows in zip(KINDS, kinds(bags)) if rows.any()]


def mosaic(bags, p, seed=0):
    """p-values with every benign patch of a positive slide replaced by one of a negative slide.

    What remains of the rate then is the procedure's own; what is gone is the tissue beside lesions.
    """
    negative, benign, *_ = kinds(bags)
    rng = np.random.default_rng(seed)
    mixed = p.copy()
    mixed[benign] = rng.choice(p[negative], size=int(benign.sum()))
    return mixed


def realised(bags, p, rate):
    """False discovery rate of all marks together, marked slide by slide."""
    flagged = benjamini_hochberg(p, rate, bags.bag_index)
    return false_discovery_rate(bags.instance_labels, flagged)


def swapped(bags, p, rate):
    """The same with benign patches of positive slides replaced, a mean over draws."""
    return np.mean([realised(bags, mosaic(bags, p, seed), rate) for seed in range(20)])


# --- Numbers ----------------------------------------------------------------------------------


def report(title, bags, found):
    labels, score = bags.instance_labels, found["score"]
    known = labels >= 0
    print(f"{title}: patch AUC {roc_auc_score(labels[known], score[known]):.3f}")
    for name, _, rows in present(bags):
        above = int((score[rows] > 0).sum())
        level = ", ".join(f"{(found['p_value'][rows] <= a).mean():.3f}" for a in (0.01, 0.05, 0.1))
        print(f"  {name}: {rows.sum()}, {above} above 0.5; p <= .01, .05, .1 in {level} of them")
    print(f"  F1 at 0.5: {f1_score(labels[known], score[known] > 0):.3f}")
    for weights, p in (("patch", found["p_value"]), ("bag", found["p_value_by_bag"])):
        for rate in RATES:
            print(f"  weights {weights}, rate {rate:g}: {marks(bags, p, rate)}")
    for name in ("plain", "calibrated"):
        if np.isfinite(found[name]).all():
            print(f"  slides, {name}: {slides(bags.labels, found[name])}")
    if np.isfinite(found["low"]).all():
        print(f"  {accepted(bags.labels, found)}")


def marks(bags, p, rate):
    """What is marked at a rate, in words."""
    labels = bags.instance_labels
    known = labels >= 0
    negative, benign, malignant, unknown = kinds(bags)
    beside = benign & (bags.adjacency @ malignant.astype(float) > 0)
    flagged = benjamini_hochberg(p, rate, bags.bag_index)
    marked = np.bincount(bags.bag_index, flagged, minlength=len(bags)) > 0
    f1 = f1_score(labels[known], flagged[known], zero_division=0)
    each = [realised(bags[[b]], p[bags.bag_index == b], rate) for b in np.flatnonzero(bags.labels)]
    return (
        f"realised {realised(bags, p, rate):.3f}, swapped {swapped(bags, p, rate):.3f}, "
        f"mean of positive slides {np.mean(each):.3f}, "
        f"power {flagged[malignant].mean():.3f}, F1 {f1:.3f}; negative slides with a mark "
        f"{marked[bags.labels == 0].sum()} of {(bags.labels == 0).sum()}; wrong marks in negative "
        f"slides {flagged[negative].sum()}, beside a lesion {flagged[beside].sum()} of "
        f"{beside.sum()}, elsewhere in positive slides {flagged[benign & ~beside].sum()} of "
        f"{(benign & ~beside).sum()}; marks of unknown label {flagged[unknown].sum()} of "
        f"{unknown.sum()}"
    )


def without_nuclei(data, bags, found):
    """Wrong marks in positive colon images on tiles without a marked nucleus of any class."""
    with np.load(data / FILES["colon"][0], allow_pickle=False) as d:
        order = np.argsort(d["bag_id"].astype(str))
        rows = np.concatenate([np.flatnonzero(d["bag"] == b) for b in order])
        empty = d["nuclei_count"][rows].sum(1) == 0
    benign = kinds(bags)[1]
    flagged = benjamini_hochberg(found["p_value"], RATE, bags.bag_index)
    return (
        f"benign tiles of positive images {benign.sum()}, wrongly marked {flagged[benign].sum()}; "
        f"without any nucleus {(benign & empty).sum()} and {flagged[benign & empty].sum()} of them"
    )


def slides(labels, p):
    rng = np.random.default_rng(0)
    exact = [calibration_error((rng.random(len(p)) < p).astype(int), p) for _ in range(200)]
    return (
        f"accuracy {np.mean((p > 0.5) == labels):.3f}, AUC {roc_auc_score(labels, p):.3f}, "
        f"log loss {log_loss(labels, p):.3f}, "
        f"calibration error {calibration_error(labels, p):.3f}, "
        f"that of exactly right probabilities {np.mean(exact):.3f}"
    )


def accepted(labels, found):
    wrong, taken = (found["calibrated"] > 0.5) != labels, found["accepted"]
    width = found["high"] - found["low"]
    return (
        f"accepted {taken.sum()} of {len(labels)}, {wrong[taken].sum()} wrong; referred "
        f"{(~taken).sum()}, {wrong[~taken].sum()} wrong; median width of the interval "
        f"{np.median(width[wrong]):.3f} where wrong, {np.median(width[~wrong]):.3f} where right"
    )


# --- Scores, p-values, rates ------------------------------------------------------------------


def draw_scores(results):
    figure = plots.new_figure(11.0, 3.0 * len(results) + 0.5)
    axes = figure.subplots(len(results), 3, squeeze=False, width_ratios=(1.35, 1, 1))
    for row, (title, bags, found) in zip(axes, results):
        score_panel(row[0], bags, found)
        plots.style(row[0], "", "share of the patches", title)
        p_value_panel(row[1], bags, found["p_value"])
        plots.style(row[1], "", "share with p ≤ a")
        rate_panel(row[2], bags, found["p_value"])
        plots.style(row[2], "", "realised rate")
    for ax, name in zip(axes[-1], ("patch probability", "a", "nominal false discovery rate")):
        ax.set_xlabel(name, fontsize=plots.FONT)
    for ax, name in zip(axes[0, 1:], ("p-values", "marks")):
        ax.set_title(name, fontsize=plots.FONT + 1, color=plots.INK, loc="left")
    entries = {}
    for ax in axes[::-1, 0]:
        entries |= dict(zip(*ax.get_legend_handles_labels()[::-1]))
    figure.legend(
        entries.values(), entries, loc="lower center", ncols=3, frameon=False, fontsize=plots.FONT
    )
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def score_panel(ax, bags, found):
    """Histograms on the scale of the score m*/sd, labelled by the probability it stands for."""
    edges = np.linspace(-5.5, 1.5, 43)
    for name, colour, rows in present(bags):
        values = found["score"][rows].clip(edges[0], edges[-1])
        weights = np.full(len(values), 1 / len(values))
        ax.hist(values, edges, weights=weights, color=colour, alpha=0.25, linewidth=0)
        ax.hist(values, edges, weights=weights, color=colour, histtype="step", lw=1.3, label=name)
    ax.axvline(0, color=plots.INK, linewidth=1, linestyle=":", label="0.5")
    low, high = np.quantile(lowest_marks(bags, found), [0.1, 0.9])
    ax.axvspan(low, high, color=plots.GRID, zorder=0, linewidth=0,
               label="lowest marked patch, 10–90 % of slides")  # fmt: skip
    ax.set_xticks(ndtri(list(PROBABILITIES)), list(PROBABILITIES.values()))
    ax.set_xlim(edges[0], edges[-1])


def lowest_marks(bags, found):
    """The lowest score that was marked, of every slide with a mark."""
    flagged = benjamini_hochberg(found["p_value"], RATE, bags.bag_index)
    lowest = np.full(len(bags), np.inf)
    np.minimum.at(lowest, bags.bag_index[flagged], found["score"][flagged])
    return lowest[np.isfinite(lowest)]


def p_value_panel(ax, bags, p):
    a = np.geomspace(1e-3, 1, 200)
    ax.plot(a, a, color=plots.MUTED, linewidth=0.8, linestyle="--")
    for _, colour, rows in present(bags):
        share = np.searchsorted(np.sort(p[rows]), a, side="right") / rows.sum()
        ax.plot(a, np.where(share > 0, share, np.nan), color=colour, linewidth=1.5)
    ax.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(3e-4, 1.3))
    ticks = (0.001, 0.01, 0.1, 1)
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()


def rate_panel(ax, bags, p):
    ax.plot([0, 0.3], [0, 0.3], color=plots.MUTED, linewidth=0.8, linestyle="--")
    ax.annotate("nominal", (0.3, 0.3), (-4, -12), textcoords="offset points", ha="right",
                fontsize=plots.FONT - 1, color=plots.MUTED)  # fmt: skip
    lines = [("all marks of known label", [realised(bags, p, r) for r in RATES], plots.INK, -20)]
    if kinds(bags)[1].any():
        mixed = [swapped(bags, p, r) for r in RATES]
        lines.append(("benign patches swapped\nfor negative slides'", mixed, plots.NEGATIVE, -32))
    for name, rates, colour, above in lines:
        ax.plot(RATES, rates, "o-", color=colour, markersize=4, linewidth=1.3)
        ax.annotate(name, (RATES[4], rates[4]), (0, above), textcoords="offset points",
                    ha="center", fontsize=plots.FONT - 1, color=colour)  # fmt: skip
    ax.set(xlim=(0, 0.31), ylim=(-0.08, 0.58))
    ax.set_yticks([0, 0.1, 0.2, 0.3, 0.4, 0.5])


# --- Maps -------------------------------------------------------------------------------------


def shown_images(bags, found):
    """By rule, not by beauty: three positive images by lesion size, two negative ones."""
    share = np.bincount(bags.bag_index, bags.instance_labels == 1) / bags.sizes
    flagged = benjamini_hochberg(found["p_value"], RATE, bags.bag_index)
    count = np.bincount(bags.bag_index, flagged, minlength=len(bags))
    positive = np.flatnonzero(bags.labels == 1)
    positive = positive[np.argsort(share[positive], kind="stable")]
    negative = np.flatnonzero(bags.labels == 0)
    highest = np.array([found["score"][bags.bag_index == b].max() for b in negative])
    middle = negative[np.argsort(highest, kind="stable")[len(negative) // 2]]
    worst = negative[count[negative].argmax()]
    chosen = [positive[int(q * len(positive))] for q in (0.1, 0.5, 0.9)]
    names = [f"positive, {100 * share[b]:.0f} % of tiles" for b in chosen]
    return [*chosen, middle, worst], [*names, "negative, a common one", "negative, most marks"]


def draw_maps(bags, found):
    chosen, names = shown_images(bags, found)
    flagged = benjamini_hochberg(found["p_value"], RATE, bags.bag_index)
    figure = plots.new_figure(10.6, 7.7)
    axes = figure.subplots(4, len(chosen))
    figure.subplots_adjust(left=0.1, right=0.9, top=0.95, bottom=0.01, wspace=0.08, hspace=0.06)
    limits = LogNorm(1 / 3000, 1)
    probability = ndtr(found["score"])
    for column, b, name in zip(axes.T, chosen, names):
        rows = bags.bag_index == b
        truth = bags.instance_labels[rows]
        layout = heatmaps.lay_out(bags.coords[rows], bags.step[b])
        column[0].set_title(name, fontsize=plots.FONT, color=plots.INK)
        heatmaps.draw_truth(column[0], layout, truth)
        heatmaps.draw(column[1], layout, probability[rows])
        image = heatmaps.draw(column[2], layout, found["p_value"][rows], SHADES)
        image.set_norm(limits)
        two = ListedColormap([heatmaps.BENIGN, MARKED])
        heatmaps.draw(column[3], layout, flagged[rows].astype(float), two)
        for ax in column[1:]:
            heatmaps.outline(ax, layout, truth == 1)
    headings = ("truth", "probability", "p-value", f"marked at {100 * RATE:g} %")
    for ax, name in zip(axes[:, 0], headings):
        ax.text(-0.08, 0.5, name, transform=ax.transAxes, rotation=90, ha="center", va="center",
                fontsize=plots.FONT + 1, color=plots.INK)  # fmt: skip
    colour_bar(figure, axes[1, -1], ScalarMappable(Normalize(0, 1), heatmaps.PROBABILITY))
    colour_bar(figure, axes[2, -1], ScalarMappable(limits, SHADES))
    return figure


def colour_bar(figure, beside, scale):
    box = beside.get_position()
    ax = figure.add_axes((box.x1 + 0.012, box.y0 + 0.01, 0.012, box.height - 0.02))
    bar = figure.colorbar(scale, cax=ax)
    bar.outline.set_visible(False)
    bar.formatter = lambda value, _: f"{value:g}"
    ax.tick_params(labelsize=plots.FONT - 1, colors=plots.MUTED)
    ax.minorticks_off()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--predictions", type=Path)
    images = Path(__file__).parents[1] / "docs" / "images"
    parser.add_argument("--out", type=Path, default=images)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, (title, _) in SETS.items():
        bags = read(args.data, name)
        results.append((title, bags, predictions(bags, name, args.predictions)))
        report(*results[-1])
    print(f"  {without_nuclei(args.data, *results[-1][1:])}")
    scores, maps = draw_scores(results), draw_maps(*results[-1][1:])
    (args.out / "decisions_scores.png").write_bytes(plots.png(scores, dpi=110))
    (args.out / "decisions_maps.png").write_bytes(plots.png(maps, dpi=110))


if __name__ == "__main__":
    main()
