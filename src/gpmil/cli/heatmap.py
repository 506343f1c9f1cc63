"""`gpmil heatmap`: a picture of every slide of a finished run, over the slide where it is given."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from gpmil.runs.class_table import ClassTable
from gpmil.runs.files import PREDICTIONS, read_predictions, with_given_labels
from gpmil.runs.maps_input import (
    MapOptions,
    Overview,
    PatchTable,
    config,
    counted,
    look,
    run_of,
    slide_files,
    tables,
)
from gpmil.runs.maps_output import making, part_of, say_done, with_place
from gpmil.runs.naming import NO_CALLS, heading, rate_of
from gpmil.show import heatmaps, plots, slides
from gpmil.show.slides import Extent, Thumbnail

UNCERTAINTY = ("panel", "opacity", "none")
BOX = (4.2, 4.8)  # inches of a panel
Extremes = tuple[float, float]
AROUND = 0.05  # of the tissue's longer side is shown around it


def run(wanted: MapOptions, uncertainty: str = "panel", per_class: bool = False) -> None:
    """Draw the slides and add the maps to `out`, when all could be drawn."""
    if uncertainty not in UNCERTAINTY:
        raise ValueError(
            f"--uncertainty: expected one of {', '.join(UNCERTAINTY)}, found {uncertainty!r}."
        )
    found = tables(wanted)
    wanted = with_place(wanted, "heatmaps", found)
    files = slide_files(wanted.slides, found)
    overview = look(found, config(wanted.run), wanted.step)
    if per_class and overview.filled[0].read().classes is None:
        raise ValueError(
            f"--per-class: {wanted.run} knows no grades or types. Its model was fitted to two "
            "classes; gpmil fit --task ordinal or --task nominal keeps more apart."
        )
    rows = slide_rows(wanted)
    card = {"command": "heatmap", "uncertainty": uncertainty} | part_of(found)
    with making(wanted, card) as work:
        for table in counted(overview.filled, "heat maps"):
            file, about = files.get(table.slide), rows.get(table.slide)
            work.make(
                f"{table.stem}.png",
                [
                    *facts(overview, uncertainty, rows.get(table.slide)),
                    per_class,
                    *overview.facts(table, file),
                ],
                table,
                partial(content, table, file, overview, uncertainty, about, per_class),
            )
    say_done(work, "heat map", wanted.out)


class About(NamedTuple):
    """What stands above the map of a slide, and the rate of its marks."""

    lines: list[str]
    rate: float | None


def slide_rows(wanted: MapOptions) -> dict[str, About]:
    """What a run says of its slides; nothing of couplings other than that of the fit."""
    place = run_of(wanted.run)
    if place is None or not (place / PREDICTIONS).exists():
        return {}
    card, rate = config(wanted.run), rate_of(config(wanted.run))
    table = read_predictions(place, ["slide"])
    if not {"probability", "log_odds"} <= set(table):
        return {}
    table = with_given_labels(table, place)
    if "coupling" in table:
        return {name: About([NO_CALLS], rate) for name in table["slide"].unique()}
    if "repeat" in table and wanted.repeat is not None:
        table = table[table["repeat"] == str(wanted.repeat)]
    first, classes = table.drop_duplicates("slide"), ClassTable.read(place)
    found = {}
    for _, row in first.iterrows():
        more = "" if classes is None else classes.in_words(row["slide"])
        found[row["slide"]] = About([*filter(None, [more, *heading(row, card)])], rate)
    return found


def facts(overview: Overview, uncertainty: str, about: About | None) -> list[Any]:
    """What a picture depends on beside its table."""
    std, doubt = overview.scales.std, _limits(overview)[1]
    return ["heatmap", uncertainty, _limits(overview)[0], BOX, about] + (
        [] if uncertainty == "none" else [std, doubt]
    )


def _limits(overview: Overview) -> tuple[Extremes, Extremes]:
    """The scales of probabilities and of doubts, the same for all slides of the run."""
    scales = overview.scales
    top = heatmaps.scale_top(np.array([scales.probability]))
    return (0.0, top), heatmaps.doubt_limits(np.array(sorted(scales.doubt)))


def content(
    table: PatchTable,
    file: Path | None,
    overview: Overview,
    uncertainty: str,
    about: About | None,
    per_class: bool = False,
) -> bytes:
    """The picture of one slide."""
    figure = draw(table, file, overview, uncertainty, about, per_class)
    return plots.png(figure, heatmaps.sharp_dpi(figure))


def draw(
    table: PatchTable,
    file: Path | None,
    overview: Overview,
    uncertainty: str,
    about: About | None = None,
    per_class: bool = False,
) -> Figure:
    """The figure of one slide; every layer has one scale for all slides of the run."""
    info = None if file is None else slides.describe(file)
    patches, step, size = overview.placed(table, info)
    picture = None
    if file is not None:
        picture = _around(heatmaps.lay_out(patches.coords, step, size).extent, file)
    asked, (limits, doubts) = uncertainty != "none", _limits(overview)
    doubt = patches.doubt if asked else None
    return heatmaps.heatmap(
        patches.coords,
        patches.probability,
        step,
        size=size,
        p_value=patches.p_value,
        unlike=patches.unlike,
        doubt=doubt,
        std=patches.std if asked else None,
        limits=limits,
        std_limits=(0.0, overview.scales.std or 1.0) if doubt is None else doubts,
        uncertainty="opacity" if uncertainty == "opacity" else "panel",
        classes=patches.classes,
        per_class=per_class,
        flagged=patches.flagged,
        rate=None if about is None else about.rate,
        about=[] if about is None else about.lines,
        slide=picture,
        mpp=1.0 if overview.microns and picture is None else None,
        title=table.title,
        box=BOX,
    )


def _around(extent: Extent, file: Path) -> Thumbnail:
    """The part of the slide with the patches, and some of what lies around."""
    left, right, bottom, top = extent
    more = AROUND * max(right - left, bottom - top)
    return slides.thumbnail(file, (left - more, right + more, bottom + more, top - more))
