"""What labelled patches teach: patches and slides of unseen images against the number of clicks.

    python benchmarks/teaching.py --jobs 16 --json teaching.json --picture docs/images/teach.png
    python benchmarks/teaching.py --sets sicapv2 --seeds 0 --clicks 0 20 --jobs 2
    python benchmarks/teaching.py --times

Five folds (patients kept together where they are known), predictions of the folds pooled, means
over fold seeds. Clicks are labels of random patches of positive training images, the first ones
among the next. Settings, the slide effect included, are learned without labels and kept
(`update`), or learned again with the labels in. `--ways calibrated`: at the settings kept, with
calibrated=True, which fits five more models. `--ways alone tumour other`: what labels do to slides
if these are not averaged with those of the fit without labels, all labels and either kind of them.
`--times`: how long an update takes, SICAPv2 and 22,023 patches.
"""

import argparse
import copy
import json
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from real_data import DATA, SETS, read
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

import gpmil
from gpmil.data.folds import folds
from gpmil.inference import solvers
from gpmil.metrics import calibration_error

NAMES = ("simulated", "sicapv2", "colon", "glas")
CLICKS = (0, 20, 50, 100)
WAYS = {
    "kept": "settings kept",
    "calibrated": "kept, calibrated",
    "again": "learned again",
    "alone": "slides by the taught patches alone",
    "tumour": "the same with labels 1 alone",
    "other": "the same with labels 0 alone",
}
FIGURES = (
    *("patch AP", "patch AUC", "patch calibration error", "malignant above .5"),
    *("slide AUC", "slide log loss"),
)


def cohort(name: str, data: Path) -> gpmil.Bags:
    """The bags of a set; simulated slides have the size of EVIDENCE's."""
    return gpmil.simulate.cohort(120, seed=0) if name == "simulated" else read(data, name)


def model_of(name: str, budget: int, **settings) -> gpmil.VGPMILPRI:
    """As users have it, with a slide effect."""
    more = {k: v for k, v in SETS.get(name, ("", None, {}))[2].items() if k == "n_components"}
    common = {"slide_effect": "auto", "tuning_budget": budget, "random_state": 0, "device": "cpu"}
    return gpmil.VGPMILPRI(**common, **more, **settings)


def clicked(bags: gpmil.Bags, count: int, seed: int) -> gpmil.Bags:
    """The same bags where nothing is known but `count` random patches of positive bags."""
    truth = bags.instance_labels
    rows = np.flatnonzero((truth >= 0) & (bags.labels == 1)[bags.bag_index])
    order = np.random.default_rng(seed).permutation(rows)
    known, left = np.full(len(truth), -1), bags.sizes.copy()
    for row in order:
        # a positive bag cannot be labelled negative as a whole
        left[bags.bag_index[row]] -= truth[row] == 0
        if left[bags.bag_index[row]] > 0 and count > 0:
            known[row], count = truth[row], count - 1
    return bags.with_instance_labels(known)


def one_fold(
    name: str, data: Path, seed: int, k: int, clicks: tuple, budget: int, ways: list[str]
) -> list[dict]:
    """Every number of clicks, each way, on the bags of one fold."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    bags = cohort(name, data)
    fold = folds(bags.labels, bags.groups, 5, seed)
    train, test = bags[fold != k], bags[fold == k]
    model, out = model_of(name, budget).fit(clicked(train, 0, seed)), []
    for count in clicks:
        told = clicked(train, count, 100 * seed + k)
        for way in ways if count else ("kept",):
            if way == "again":
                used = model_of(name, budget, instance_labels="use").fit(told)
            else:
                used = updated(model, told, way) if count else model
            found = used.predict_all(test)
            out.append(
                {
                    "set": name, "seed": seed, "fold": k, "clicks": count, "way": way,
                    "slides": found.proba[:, 1].tolist(), "labels": test.labels.tolist(),
                    "patches": found.instances.probability.tolist(),
                    "truth": test.instance_labels.tolist(),
                    "settings": used._settings()._asdict(),
                }
            )  # fmt: skip
    return out


def updated(model: gpmil.VGPMILPRI, told: gpmil.Bags, way: str) -> gpmil.VGPMILPRI:
    """The model with some of the labels; `way` as in WAYS."""
    if way == "kept":
        return model.update(told)
    if way == "calibrated":
        more = {"calibrated": True, "instance_labels": "use"}
        return model.with_settings_fixed().set_params(**more).fit(told)
    known = told.instance_labels.copy()
    if way in ("tumour", "other"):
        known[known != (1 if way == "tumour" else 0)] = -1
    alone = copy.copy(model).update(told.with_instance_labels(known))
    alone.untaught_mean_ = None
    return alone


def figures(rows: list[dict]) -> dict[str, float]:
    """Of pooled folds."""
    slides, labels, patches, truth = (
        np.concatenate([np.asarray(r[name]) for r in rows])
        for name in ("slides", "labels", "patches", "truth")
    )
    p, h = patches[truth >= 0], truth[truth >= 0]
    values = (
        average_precision_score(h, p),
        roc_auc_score(h, p),
        calibration_error(h, p),
        float((p[h == 1] > 0.5).mean()),
        roc_auc_score(labels, slides),
        log_loss(labels, np.clip(slides, 1e-12, 1 - 1e-12)),
    )
    return dict(zip(FIGURES, map(float, values)))


def summary(found: list[dict], clicks: tuple) -> list[dict]:
    """Means over seeds, one row per set, number of clicks and way."""
    out = []
    for name in dict.fromkeys(r["set"] for r in found):
        for count in clicks:
            for way in WAYS:
                mine = [r for r in found if (r["set"], r["clicks"], r["way"]) == (name, count, way)]
                if not mine:
                    continue
                by_seed = [figures([r for r in mine if r["seed"] == s]) for s in _seeds(mine)]
                means = {f: float(np.mean([b[f] for b in by_seed])) for f in FIGURES}
                out.append({"set": name, "clicks": count, "way": way, **means})
    return out


def _seeds(rows: list[dict]) -> list[int]:
    return sorted({r["seed"] for r in rows})


def table(rows: list[dict]) -> str:
    """For the page."""
    head = ["set", "clicks", "settings", *FIGURES]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        way = WAYS[r["way"]] if r["clicks"] else ""
        cells = [r["set"], str(r["clicks"]), way, *(f"{r[f]:.3f}" for f in FIGURES)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(rows: list[dict], path: Path) -> None:
    """Curves against the number of clicks."""
    import matplotlib.pyplot as plt

    shown = ("patch AP", "patch calibration error", "slide AUC")
    fig, axes = plt.subplots(1, len(shown), figsize=(11, 3.4), layout="constrained")
    for number, name in enumerate(dict.fromkeys(r["set"] for r in rows)):
        for way, style in (("kept", ":"), ("calibrated", "-"), ("again", "--")):
            mine = [r for r in rows if r["set"] == name and (r["way"] == way or not r["clicks"])]
            if not any(r["clicks"] for r in mine):
                continue
            for ax, figure in zip(axes, shown):
                x, y = [r["clicks"] for r in mine], [r[figure] for r in mine]
                label = f"{name}, {WAYS[way]}"
                ax.plot(x, y, style, marker="o", ms=3, color=f"C{number}", label=label)
    for ax, figure in zip(axes, shown):
        ax.set(title=figure, xlabel="labelled patches")
    axes[-1].legend(fontsize=7)
    fig.savefig(path, dpi=150)


# --- How long an update takes -----------------------------------------------------------------


class Watch:
    """Solver time of updates: from H, R and its factor to w, the Hessian to begin with included.

    The same problem is then solved as a fit does, from zero, for comparison.
    """

    def __init__(self) -> None:
        self.near, self.whole, self.apart = 0.0, 0.0, 0.0

    def __enter__(self) -> "Watch":
        self.plain = gpmil.VGPMILPRI._solve_near
        watch = self

        def timed(model, problem, *args):
            start = time.process_time()
            found = watch.plain(model, problem, *args)
            watch.near, start = time.process_time() - start, time.process_time()
            whole = solvers.direct(problem, int(model.max_iter), float(model.tol))
            watch.whole = time.process_time() - start
            watch.apart = float((whole.w - found.w).abs().max() / whole.w.abs().max())
            return found

        gpmil.VGPMILPRI._solve_near = timed
        return self

    def __exit__(self, *_) -> None:
        gpmil.VGPMILPRI._solve_near = self.plain


def times(data: Path) -> None:
    """Processor time of update(bags) with one more label, and of the solver in it, one thread."""
    torch.set_num_threads(1)
    many = gpmil.simulate.cohort(170, seed=0, n_features=64)
    for name, bags in (("sicapv2", read(data, "sicapv2")), ("22,023 patches", many)):
        given = {"variance": 10.0, "mean": -6.0, "coupling": 0.5, "slide_effect": 1.0}
        length = 2 * np.sqrt(bags.n_features)
        model, found = gpmil.VGPMILPRI(**given, lengthscale=length, random_state=0).fit(bags), []
        with Watch() as watch:
            for count in range(20, 36):
                told, start = clicked(bags, count, 0), time.process_time()
                model.update(told)
                spent = time.process_time() - start - watch.whole
                found.append((spent, watch.near, watch.whole, watch.apart, model.n_iter_))
        spent, near, whole, _, steps = np.median(found[1:], axis=0)
        print(
            f"{name}: {len(bags)} slides, {bags.n_instances} patches, processor time, one thread: "
            f"first 20 labels {found[0][0]:.2f} s; one more {spent:.2f} s, of it the solver "
            f"{1e3 * near:.0f} ms "
            f"({steps:.0f} steps; from zero {1e3 * whole:.0f} ms); w of a whole fit to "
            f"{max(row[3] for row in found):.0e}"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--clicks", nargs="+", type=int, default=CLICKS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["kept", "again"])
    parser.add_argument("--budget", type=int, default=40, help="tuning_budget of every fit")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where the rows of the table go")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--times", action="store_true", help="only how long updates take")
    args = parser.parse_args()
    if args.times:
        times(args.data)
        return
    clicks = tuple(sorted({0, *args.clicks}))
    jobs = [(n, s, k) for s in args.seeds for n in args.sets for k in range(5)]
    parts = Parallel(args.jobs, verbose=5)(
        delayed(one_fold)(n, args.data, s, k, clicks, args.budget, args.ways) for n, s, k in jobs
    )
    rows = summary([row for part in parts for row in part], clicks)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.picture:
        picture(rows, args.picture)


if __name__ == "__main__":
    main()
