"""Feature files of slides, labels and steps brought together: `Bags` and a report."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpmil import classes, graphs
from gpmil.bag_checks import UNKNOWN, count, listed, offsets_of
from gpmil.bags import Bags
from gpmil.io import steps
from gpmil.io.cache import Kept, Stored, stored
from gpmil.io.formats import Listing
from gpmil.io.labels import Joined, join
from gpmil.io.report import NO_POSITIONS, ReadReport, graph_facts

NEED_STEP = ("grid4", "grid8", "radius")


def read(
    listing: Listing,
    labels: Any,
    said: dict[str, Any],
    step: Any,
    graph: str | None,
    skip_bad: bool,
    cache: Any,
) -> tuple[Bags, ReadReport]:
    """The cohort of the listed files; `said` are options of `labels.join`."""
    if graph not in (None, *graphs.GRAPHS):
        raise ValueError(f"graph: expected {', '.join(graphs.GRAPHS)} or None, found {graph!r}.")
    if labels is None:
        refuse(said)
    else:
        join(list(listing.files), labels, **said)  # before hours are spent on the slides
    found = stored(listing, cache, skip_bad)
    names = [s.name for s in found.slides]
    joined = _own_labels(found.slides) if labels is None else join(names, labels, **said)
    coords = _coords(found, graph, listing)
    offsets = offsets_of(np.array([s.n for s in found.slides]))
    told = [s.told for s in found.slides]
    units = _said({t.units for t in told}, listing) if coords is not None else NO_POSITIONS
    value, words, guesses = (
        (None, "none", [])
        if coords is None
        else steps.resolve(step, told, coords, offsets, graph in NEED_STEP)
    )
    encoder = next((t.encoder for t in told if t.encoder is not None), None)
    anchor = told[0].anchor
    bags = Bags(
        found.features,
        offsets,
        names=names,
        coords=coords,
        instance_labels=found.instance_labels,
        step=value,
        graph=graph,
        metadata={
            "encoder": encoder,
            "format": found.format,
            "units": units,
            "anchor": anchor,
            # By name: a part of the cohort has the same metadata.
            "sizes": {s.name: s.told.size for s in found.slides if s.told.size is not None},
        },
    )._with_labels(joined.labels, joined.groups)
    notes = [*joined.notes, *guesses, *_notes(found, listing, units)]
    return bags, ReadReport(
        format=found.format,
        n_files=len(listing.files),
        n_slides=len(bags),
        n_patches=bags.n_instances,
        n_features=bags.n_features,
        dtype=str(bags.features.dtype),
        encoder=encoder,
        step=words,
        units=units if anchor == "top left" or coords is None else f"{units}, tile {anchor}s",
        matched=joined.matched,
        labels_without_slide=joined.labels_without_slide,
        slides_without_label=joined.slides_without_label,
        duplicates=joined.duplicates,
        skipped=(*((name, "no patch") for name in found.empty), *found.bad),
        notes=tuple(notes),
        cache=str(found.folder),
        classes=joined.labels.classes,
        **graph_facts(bags),
    )


def refuse(options: dict[str, Any]) -> None:
    """What is said of a table of labels, where there is none."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is about a table of labels, and none is given. Add labels=, the "
                "path of that table."
            )


def _own_labels(slides: Sequence[Kept]) -> Joined:
    """The labels that the files hold themselves, where they do."""
    found = classes.encode(s.told.label for s in slides)
    without = tuple(s.name for s, value in zip(slides, found.values) if value == UNKNOWN)
    return Joined(found, matched=len(slides) - len(without), slides_without_label=without)


def _coords(found: Stored, graph: str | None, listing: Listing) -> np.ndarray | None:
    """Positions of all patches, or None; some slides with and some without are an error."""
    mixed = 0 < len(found.without_coords) < len(found.slides)
    if mixed and graph not in (None, "chain"):
        raise ValueError(
            f"{listing.folder}: {count(len(found.without_coords), 'slide')} without positions: "
            f"{listed(found.without_coords)}, the others have them. Add or remove those files, or "
            "say graph=None."
        )
    return found.coords


def _said(units: set[str], listing: Listing) -> str:
    if len(units) > 1:
        raise ValueError(
            f"{listing.folder}: positions in different units, {listed(sorted(units))}. Keep files "
            "of one tool in a folder."
        )
    return units.pop()


def _notes(found: Stored, listing: Listing, units: str) -> list[str]:
    said = Counter(s.told.note for s in found.slides if s.told.note)
    notes = list(said)
    if len(listing.formats) > 1:
        notes.append(f"By what is in them, the files are of {found.format}; format= overrides it.")
    if units == NO_POSITIONS:
        notes.append("The files hold no positions: the model runs uncoupled.")
    return notes
