"""`gpmil qupath`: the patches of every slide of a finished run, as GeoJSON for QuPath."""

from functools import partial
from pathlib import Path

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
from gpmil.show import qupath, slides


def run(wanted: MapOptions, gzip: bool = False) -> None:
    """Write one file per slide and add them to `out`, when all could be written."""
    found = tables(wanted)
    wanted = with_place(wanted, "qupath", found)
    files = slide_files(wanted.slides, found)
    overview = look(found, config(wanted.run), wanted.step)
    ending = ".geojson.gz" if gzip else ".geojson"
    with making(wanted, {"command": "qupath"} | part_of(found)) as work:
        for table in counted(overview.filled, "GeoJSON files"):
            file = files.get(table.slide)
            work.make(
                table.stem + ending,
                ["qupath", gzip, *overview.facts(table, file)],
                table,
                partial(content, table, file, overview, gzip),
            )
    say_done(work, "GeoJSON file", wanted.out)


def content(table: PatchTable, file: Path | None, overview: Overview, gzip: bool) -> bytes:
    """The file of one slide."""
    if file is None and overview.microns:
        raise ValueError(
            f"slide {table.slide}: its positions are in microns, QuPath wants pixels, and "
            "the slide file says how large they are. Give its folder as --slides."
        )
    info = None if file is None else slides.describe(file)
    patches, _, size = overview.placed(table, info)
    offset = (0, 0) if info is None else info.offset
    return qupath.to_bytes(qupath.to_geojson(patches, size, offset=offset), gzip)
