"""Figure 3: two cancerous and two non-cancerous patches of test slides, where images are given."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int
from matplotlib.figure import Figure
from PIL import Image

from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.patch_rows import Row, lower_median, patch_rows, short
from gpmil.paper.results import Results
from gpmil.show.plots import FONT, INK, MUTED

EACH = 2  # patches per class
CLASSES = ((1, "cancerous"), (0, "non-cancerous"))
SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
exhibit = partial(Exhibit, "Figure 3", "figure3_example_patches", "Example patches")

Patches = Int[np.ndarray, " n"]


class Patch(NamedTuple):
    """A patch that is shown: its number among all test patches, and its picture."""

    number: int
    image: Image.Image


class Found(NamedTuple):
    """Patches of one class, and why slides were passed over."""

    patches: list[Patch]
    reasons: list[str]


def build(results: Results) -> Exhibit:
    """Cut typical patches of either class out of the images of the slides."""
    reason = _why_not(results)
    if reason:
        return exhibit(missing=f"There are no example patches: {reason}")
    row = _preferred(results)
    found = [find(results, label, row) for label, _ in CLASSES]
    reasons = list(dict.fromkeys(reason for one in found for reason in one.reasons))
    shown = [(patch, name) for one, (_, name) in zip(found, CLASSES) for patch in one.patches]
    if not shown:
        return exhibit(missing=f"There are no example patches: {reasons[0]}")
    return exhibit(
        frame=_frame(results, [patch.number for patch, _ in shown], row),
        figure=_figure(results, shown),
        alt="Photographs of patches: " + ", ".join(name for _, name in shown) + ".",
        caption=_caption(row, reasons),
    )


def _caption(row: Row | None, reasons: list[str]) -> str:
    which = "in the middle of the list"
    if row is not None:
        which = f"of median probability ({row.method.label}, first run) in its class"
    passed = ""
    if reasons:
        passed = f" Slides passed over: {len(reasons)}, the first because {reasons[0]}"
    return (
        "Patches of the test set, the slide below each: from the slides with the most patches of "
        f"a class the one {which}.{passed}"
    )


def _figure(results: Results, shown: list[tuple[Patch, str]]) -> Figure:
    figure, (axes,) = panels(1.9 * len(shown) + 0.2, 2.3, 1, len(shown))
    for ax, (patch, name) in zip(axes, shown):
        ax.imshow(np.asarray(patch.image), interpolation="bicubic")
        ax.set_axis_off()
        ax.set_title(name, fontsize=FONT + 1, color=INK)
        where = short(str(results.test.names[results.test.bag_index[patch.number]]))
        ax.text(0.5, -0.04, where, transform=ax.transAxes, ha="center", va="top")
        ax.texts[-1].set(fontsize=FONT - 1, color=MUTED)
    return figure


def _why_not(results: Results) -> str:
    test = results.test
    if results.images is None:
        return f"no images of the slides were given ({results.name})."
    if test.coords is None or test.coords.shape[1] != 2 or test.step is None:
        return "the patches have no positions in two dimensions with a known step."
    if not np.isin(test.instance_labels, (0, 1)).any():
        return "no patch has a known label."
    return ""


# --- Images of slides -----------------------------------------------------------------------------
def slide_image(results: Results, slide: int) -> tuple[Image.Image | None, str]:
    """The image of a test slide in pixels of the coordinates, or None and the reason."""
    name = str(results.test.names[slide])
    if results.images is None:
        return None, "no images of the slides were given."
    candidates = [results.images / f"{name}{suffix}" for suffix in SUFFIXES]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        return None, f"there is no image {name}{SUFFIXES[0]} (or {', '.join(SUFFIXES[1:])})."
    try:
        image = Image.open(path).convert("RGB")
    except (OSError, Image.DecompressionBombError) as error:
        return None, f"the image {path.name} could not be read ({error})."
    assert results.test.coords is not None
    corners = results.test.split(results.test.coords)[slide]
    if (corners < 0).any() or (corners >= image.size).any():
        return None, (
            f"the image {path.name} has {image.width} x {image.height} pixels, and patches lie "
            f"at {corners.min(axis=0).tolist()} to {corners.max(axis=0).tolist()}: it is of "
            "another resolution than the positions."
        )
    return image, ""


# --- Which patches --------------------------------------------------------------------------------
def _preferred(results: Results) -> Row | None:
    """The method whose probabilities say which patch is typical, where there is one."""
    rows = patch_rows(results)
    return rows[-1] if rows else None


def find(results: Results, label: int, row: Row | None) -> Found:
    """At most `EACH` patches of a class, each of another slide that has an image."""
    test = results.test
    value = np.arange(float(test.n_instances)) if row is None else row.patches
    count = np.bincount(test.bag_index, test.instance_labels == label, len(test))
    found = Found([], [])
    for slide in np.argsort(-count, kind="stable")[: int((count > 0).sum())]:
        if len(found.patches) == EACH:
            break
        image, reason = slide_image(results, int(slide))
        if image is None:
            found.reasons.append(reason)
            continue
        own = np.flatnonzero((test.bag_index == slide) & (test.instance_labels == label))
        own = own[_inside(results, own, image.size)]
        if not len(own):
            found.reasons.append(f"no such patch lies inside the image of {test.names[slide]}.")
            continue
        middle = lower_median(own, value)
        found.patches.append(Patch(middle, image.crop(_box(results, middle))))
    return found


def _box(results: Results, index: int) -> tuple[int, int, int, int]:
    """Left, upper, right and lower pixel of a patch: a step from its upper left corner."""
    test = results.test
    assert test.coords is not None and test.step is not None
    corner = np.round(test.coords[index]).astype(int)
    x, y = (corner + np.round(test.step[test.bag_index[index]]).astype(int)).tolist()
    return int(corner[0]), int(corner[1]), x, y


def _inside(results: Results, own: Patches, size: tuple[int, int]) -> Bool[np.ndarray, " n"]:
    ends = np.array([_box(results, int(i))[2:] for i in own]).reshape(-1, 2)
    return np.all(ends <= np.array(size), axis=1)


def _frame(results: Results, shown: list[int], row: Row | None) -> pd.DataFrame:
    test = results.test
    boxes = np.array([_box(results, i) for i in shown])
    return pd.DataFrame(
        {
            "slide": test.names[test.bag_index[shown]],
            "x": boxes[:, 0],
            "y": boxes[:, 1],
            "width": boxes[:, 2] - boxes[:, 0],
            "height": boxes[:, 3] - boxes[:, 1],
            "patch_label": test.instance_labels[shown],
            "probability": np.full(len(shown), np.nan) if row is None else row.patches[shown],
        }
    )
