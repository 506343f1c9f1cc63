"""`gpmil heatmap`: a picture of every slide of a finished run, over the slide where it is given."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from gpmil import heatmaps, plots, slides
from gpmil.cli.patch_tables import (
    Overview,
    Table,
    check_out,
    config,
    counted,
    look,
    say_done,
    slide_files,
    tables,
)
from gpmil.report import run_folder
from gpmil.slides import Extent, Thumbnail

UNCERTAINTY = ("panel", "opacity", "none")
BOX = (4.2, 4.8)  # inches of a panel
AROUND = 0.05  # of the tissue's longer side is shown around it


def run(
    source: Path,
    folder: Path | None,
    wanted: Sequence[str] | None,
    out: Path,
    uncertainty: str,
    step: float | None = None,
) -> None:
    """Draw the slides into `out`; nothing is left there unless all could be drawn."""
    if uncertainty not in UNCERTAINTY:
        raise ValueError(
            f"--uncertainty: expected one of {', '.join(UNCERTAINTY)}, found {uncertainty!r}."
        )
    found = tables(source, wanted)
    check_out(out, source)
    files = slide_files(folder, found)
    overview = look(found, config(source), step)
    card = {"command": "heatmap", "slides": [table.slide for table in overview.filled]}
    with run_folder(out, card | {"uncertainty": uncertainty}) as fresh:
        for table in counted(overview.filled, "heat maps"):
            figure = draw(table, files.get(table.slide), overview, uncertainty)
            png = plots.png(figure, heatmaps.sharp_dpi(figure))
            (fresh / f"{table.stem}.png").write_bytes(png)
    say_done(len(overview.filled), "heat map", out)


def draw(table: Table, file: Path | None, overview: Overview, uncertainty: str) -> Figure:
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
        title=table.slide,
        box=BOX,
    )


def _around(extent: Extent, file: Path) -> Thumbnail:
    """The part of the slide with the patches, and some of what lies around."""
    left, right, bottom, top = extent
    more = AROUND * max(right - left, bottom - top)
    return slides.thumbnail(file, (left - more, right + more, bottom + more, top - more))
