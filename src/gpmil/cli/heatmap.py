"""`gpmil heatmap`: a picture of every slide of a finished run, over the slide where it is given."""

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from gpmil.runs.maps_input import (
    MapOptions,
    Overview,
    PatchTable,
    config,
    counted,
    look,
    slide_files,
    tables,
)
from gpmil.runs.maps_output import making, part_of, say_done, with_place
from gpmil.show import heatmaps, plots, slides
from gpmil.show.slides import Extent, Thumbnail

UNCERTAINTY = ("panel", "opacity", "none")
BOX = (4.2, 4.8)  # inches of a panel
AROUND = 0.05  # of the tissue's longer side is shown around it


def run(wanted: MapOptions, uncertainty: str = "panel") -> None:
    """Draw the slides and add the maps to `out`, when all could be drawn."""
    if uncertainty not in UNCERTAINTY:
        raise ValueError(
            f"--uncertainty: expected one of {', '.join(UNCERTAINTY)}, found {uncertainty!r}."
        )
    found = tables(wanted)
    wanted = with_place(wanted, "heatmaps", found)
    files = slide_files(wanted.slides, found)
    overview = look(found, config(wanted.run), wanted.step)
    scale = overview.largest_std if uncertainty != "none" else None  # the same on all maps
    card = {"command": "heatmap", "uncertainty": uncertainty} | part_of(found)
    with making(wanted, card) as work:
        for table in counted(overview.filled, "heat maps"):
            file = files.get(table.slide)
            work.make(
                f"{table.stem}.png",
                ["heatmap", uncertainty, scale, BOX, *overview.facts(table, file)],
                table,
                partial(content, table, file, overview, uncertainty),
            )
    say_done(work, "heat map", wanted.out)


def content(table: PatchTable, file: Path | None, overview: Overview, uncertainty: str) -> bytes:
    """The picture of one slide."""
    figure = draw(table, file, overview, uncertainty)
    return plots.png(figure, heatmaps.sharp_dpi(figure))


def draw(table: PatchTable, file: Path | None, overview: Overview, uncertainty: str) -> Figure:
    """The figure of one slide; uncertainties have one scale for all slides of the call."""
    info = None if file is None else slides.describe(file)
    patches, step, size = overview.placed(table, info)
    picture = None
    if file is not None:
        picture = _around(heatmaps.lay_out(patches.coords, step, size).extent, file)
    return heatmaps.heatmap(
        patches.coords,
        patches.probability,
        step,
        size=size,
        std=None if uncertainty == "none" else patches.std,
        std_limits=(0.0, overview.largest_std or 1.0),
        uncertainty="opacity" if uncertainty == "opacity" else "panel",
        flagged=patches.flagged,
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
