"""The pictures of docs/how-to/maps.md: the same slides, drawn by this version.

    python benchmarks/maps_picture.py [--data FOLDER] [--out docs/images] [--sets colon ...]

One held-out slide of each cohort, predicted by a model at settings that were learned once; only the
layout is shown. The real slide, a piece of skin, is
predicted by the colon model: features of one encoder, another organ, as a warning example.
"""

import argparse
from pathlib import Path

import numpy as np
from real_data import DATA, SETS, read

import gpmil
from gpmil.runs.naming import far
from gpmil.show import heatmaps, plots

SETTINGS = ("variance", "lengthscale", "mean", "coupling", "slide_effect")
LEARNED = {
    "colon": (120.6, 21.8, -5.86, 1.57, 0.51),
    "sicapv2": (129.9, 39.9, -4.34, 0.39, 0.78),
    "simulated": (73.3, 39.9, -5.32, 0.46, 0.83),
}
SHOWN = {"colon": 1, "sicapv2": 0, "simulated": 0}  # place among positive slides, by patches
RATE = 0.1


def cohort(folder, name):
    """The bags of a set."""
    if name == "simulated":
        return gpmil.simulate.cohort(n_bags=120, seed=0)
    return read(folder, name)


def fitted(name, bags):
    """A model at the settings learned once."""
    known = dict(zip(SETTINGS, LEARNED[name])) | {"flags": True, "calibrated": True}
    extra = SETS[name][2] if name in SETS else {}
    return gpmil.VGPMILPRI(**(extra | known), random_state=0).fit(bags)


def chosen(name, bags):
    """The slide to show: positive, with many patches."""
    positive = np.flatnonzero(bags.labels == 1)
    order = positive[np.argsort(-bags.sizes[positive], kind="stable")]
    return int(order[SHOWN[name]])


def real_slide(folder):
    """The patches of the skin slide."""
    import h5py

    with h5py.File(folder / "slides" / "CMU-1-Small-Region_features.h5") as file:
        x, xy = file["features"][:], file["coords"][:]
    return gpmil.Bags.from_arrays([x], coords=[xy], step=256, names=["CMU-1-Small-Region"])


def figure(name, model, bag):
    """The heat map of one slide."""
    found = model.predict_all(bag, rate=RATE, level=0.9)
    patches = found.instances
    p, (low, high) = found.proba[0, 1], found.interval[0]
    call = "positive" if p > 0.5 else "negative"
    between = f"90 % interval {low:.3g} to {high:.3g}"
    said = "no label" if bag.labels[0] < 0 else f"is {('negative', 'positive')[bag.labels[0]]}"
    truth = bag.instance_labels if (bag.instance_labels >= 0).any() else None
    return heatmaps.heatmap(
        bag.coords,
        patches.probability,
        bag.step[0],
        p_value=patches.p_value,
        unlike=patches.unlike,
        doubt=patches.doubt,
        flagged=patches.flagged,
        rate=RATE,
        truth=truth,
        box=(2.3, 2.6),
        title=f"{bag.names[0]} ({name})",
        about=[f"{said}; called {call}, probability {p:.3g} ({between})", *far(found.novelty[0])],
    )


def main():
    """One picture per set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/images")
    parser.add_argument("--sets", nargs="+", choices=list(LEARNED), default=list(LEARNED))
    args = parser.parse_args()
    for name in args.sets:
        bags = cohort(args.data, name)
        b = chosen(name, bags)
        model = fitted(name, bags[np.arange(len(bags)) != b])
        print(f"{name}: {model.cross_fit_.unlike}")
        drawn = {name: figure(name, model, bags[b])}
        if name == "colon":
            drawn["real"] = figure("skin, by a model of colon", model, real_slide(args.data))
        for key, picture in drawn.items():
            (args.out / f"maps_{key}.png").write_bytes(plots.png(picture, 110))


if __name__ == "__main__":
    main()
