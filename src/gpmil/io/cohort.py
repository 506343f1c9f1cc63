"""Feature files of slides, labels and steps brought together: `Bags` and a report."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from gpmil.data import classes, extraction, graphs
from gpmil.data.bags import Bags
from gpmil.data.checks import UNKNOWN, count, listed, offsets_of
from gpmil.io import patients, steps
from gpmil.io.cache import CachedCohort, cached, discarded_on_failure
from gpmil.io.copying import CopiedSlide
from gpmil.io.formats import Listing
from gpmil.io.labels import JoinedLabels, join
from gpmil.io.report import NO_POSITIONS, ReadReport, cohort_facts

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
        refuse(said | {"patient": said["patient"] or None})
    else:
        # Whatever is wrong with the table, before hours are spent on the slides.
        join(list(listing.files), labels, **said)
    found = cached(listing, cache, skip_bad)
    names = [s.name for s in found.slides]
    joined = _own_labels(found.slides) if labels is None else join(names, labels, **said)
    guessed = patients.Guess()
    if joined.groups is None and said["patient"] is not False:
        guessed = patients.guess(names)
    # A step that does not fit is no fault of the files.
    with discarded_on_failure(found) if step is None else nullcontext():
        return _assembled(listing, found, joined, guessed, step, graph)


def _assembled(
    listing: Listing,
    found: CachedCohort,
    joined: JoinedLabels,
    guessed: patients.Guess,
    step: Any,
    graph: str | None,
) -> tuple[Bags, ReadReport]:
    """The slides as one cohort; that they do not fit together is a fault of the files."""
    coords = _coords(found, graph, listing)
    told = [s.told for s in found.slides]
    units = NO_POSITIONS if coords is None else _units({t.units for t in told}, listing)
    offsets = offsets_of(np.array([s.n for s in found.slides]))
    value, words, guesses = steps.resolve(step, told, coords, offsets, graph in NEED_STEP)
    facts, undecided = _extraction(found.slides)
    bags = Bags(
        found.features,
        offsets,
        names=[s.name for s in found.slides],
        coords=coords,
        instance_labels=found.instance_labels,
        step=value,
        graph=graph,
        metadata=_metadata(found, facts, units),
    ).with_labels(joined.labels, guessed.patients if joined.groups is None else joined.groups)
    notes = (*joined.notes, *filter(None, [guessed.note]), *guesses, *undecided)
    return bags.with_digests(found.digests), ReadReport(
        format=found.format,
        n_files=len(listing.files),
        encoder=facts.get("encoder"),
        patches=extraction.words(facts, extraction.NAMES[1:]),
        step=words,
        units=units if coords is None else _with_anchor(units, told[0].anchor),
        skipped=(*((name, "no patch") for name in found.empty), *found.bad),
        notes=(*notes, *_notes(found, listing, units)),
        patients_doubted=guessed.warning,
        cache=str(found.folder),
        classes=joined.labels.classes,
        matched=joined.matched,
        labels_without_slide=joined.labels_without_slide,
        slides_without_label=joined.slides_without_label,
        duplicates=joined.duplicates,
        **cohort_facts(bags),
    )


def _metadata(found: CachedCohort, facts: extraction.Facts, units: str) -> dict[str, Any]:
    return {
        **facts,
        "format": found.format,
        "units": units,
        "anchor": found.slides[0].told.anchor,
        # By name: a part of the cohort has the same metadata.
        "sizes": {s.name: s.told.size for s in found.slides if s.told.size is not None},
    }


def _with_anchor(units: str, anchor: str) -> str:
    return units if anchor == "top left" else f"{units}, tile {anchor}s"


def refuse(options: dict[str, Any]) -> None:
    """What is said of a table of labels, where there is none."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is about a table of labels, and none is given. Add labels=, the "
                "path of that table."
            )


def _own_labels(slides: Sequence[CopiedSlide]) -> JoinedLabels:
    """The labels that the files hold themselves, where they do."""
    found = classes.encode(s.told.label for s in slides)
    without = tuple(s.name for s, value in zip(slides, found.values) if value == UNKNOWN)
    return JoinedLabels(found, matched=len(slides) - len(without), slides_without_label=without)


def _extraction(slides: Sequence[CopiedSlide]) -> tuple[extraction.Facts, list[str]]:
    """What all slides say of how their features were made, and notes where not all say the same."""
    said = [extraction.known(asdict(s.told)) for s in slides]
    facts: extraction.Facts = {}
    notes = []
    for name in extraction.NAMES:
        values = Counter(own[name] for own in said if name in own)
        without = [s.name for s, own in zip(slides, said) if name not in own]
        told_apart = [v for v in values if not extraction.same(name, v, next(iter(values)))]
        if not told_apart:
            facts |= {name: next(iter(values))} if values else {}
        elif values:
            shown = ", ".join(f"{v} ({count(n, 'slide')})" for v, n in values.most_common())
            title = name.replace("_", " ")
            notes.append(f"Slides differ in their {title}: {shown}. A model cannot compare it.")
        if values and without:
            title = extraction.words({name: next(iter(values))})
            notes.append(f"{count(len(without), 'slide')} without {title}: {listed(without)}.")
    return facts, notes


def _coords(found: CachedCohort, graph: str | None, listing: Listing) -> np.ndarray | None:
    """Positions of all patches, or None; some slides with and some without are an error."""
    mixed = 0 < len(found.without_coords) < len(found.slides)
    if mixed and graph not in (None, "chain"):
        raise ValueError(
            f"{listing.folder}: {count(len(found.without_coords), 'slide')} without positions: "
            f"{listed(found.without_coords)}, the others have them. Add or remove those files, or "
            "say graph=None."
        )
    return found.coords


def _units(units: set[str], listing: Listing) -> str:
    if len(units) > 1:
        raise ValueError(
            f"{listing.folder}: positions in different units, {listed(sorted(units))}. Keep files "
            "of one tool in a folder."
        )
    return units.pop()


def _notes(found: CachedCohort, listing: Listing, units: str) -> list[str]:
    said = Counter(s.told.note for s in found.slides if s.told.note)
    notes = list(said)
    if len(listing.formats) > 1:
        notes.append(f"By what is in them, the files are of {found.format}; format= overrides it.")
    if units == NO_POSITIONS:
        notes.append("The files hold no positions: the model runs uncoupled.")
    return notes
