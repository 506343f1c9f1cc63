"""`gpmil qupath`: the patches of every slide of a finished run, as GeoJSON for QuPath."""

from collections.abc import Sequence
from pathlib import Path

from gpmil import qupath, slides
from gpmil.cli.patch_tables import (
    check_out,
    config,
    counted,
    look,
    say_done,
    slide_files,
    tables,
)
from gpmil.report import run_folder


def run(
    source: Path,
    folder: Path | None,
    wanted: Sequence[str] | None,
    out: Path,
    gzip: bool,
    step: float | None = None,
) -> None:
    """Write one file a slide into `out`; nothing is left there unless all could be written."""
    found = tables(source, wanted)
    check_out(out, source)
    files = slide_files(folder, found)
    overview = look(found, config(source), step)
    card = {"command": "qupath", "slides": [table.slide for table in overview.filled]}
    with run_folder(out, card) as fresh:
        for table in counted(overview.filled, "GeoJSON files"):
            file = files.get(table.slide)
            if file is None and overview.microns:
                raise ValueError(
                    f"slide {table.slide}: its positions are in microns, QuPath wants pixels, and "
                    "the slide file says how large they are. Give its folder as --slides."
                )
            info = None if file is None else slides.describe(file)
            patches, _, size = overview.placed(table, info)
            offset = (0, 0) if info is None else info.offset
            path = fresh / f"{table.stem}.geojson"
            qupath.write(path, patches, size, gzip=gzip, offset=offset)
    say_done(len(overview.filled), "GeoJSON file", out)
