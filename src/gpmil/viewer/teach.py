"""What the viewer's marks teach: the run's model learns from them, and maps are drawn anew.

Marks belong to a run (gpmil.runs.marks). Its model can learn from them where it lies in the run and
the data of its fit are found again, as they were. Everywhere else marks are kept all the same, and
saved as a table for `gpmil fit --patch-labels`; the page says why. A run of `gpmil demo` shows
slides that its model has not seen: those with marks join the fit, with their labels.
"""

import copy
import getpass
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gpmil.data.checks import listed
from gpmil.files.whole import write_whole
from gpmil.runs.data_card import KIND, cache_of, fingerprint
from gpmil.runs.marks import History, Mark, MarksFile, described, table_rows
from gpmil.runs.source import arguments, patch_words
from gpmil.runs.workspace import csv_bytes
from gpmil.viewer.cohort import Missing, ShownCohort, ShownRun, as_dict, found_again, model_card
from gpmil.viewer.maps import Maps, PatchMap

if TYPE_CHECKING:  # torch, for a page asked for later
    from gpmil.data.bags import Bags
    from gpmil.models import BagClassifier

logger = logging.getLogger("gpmil")

LEARNERS = ("VGPMILPRI", "VGPMILPR")
TAUGHT, LABEL_FILE = "taught", "patch_labels.csv"  # what saving writes into the run
PATHS = ("labels", "slide_table")
SUGGESTED = 6
HOW = "Uncertain patches near the boundary that many others look like: the largest change expected."
OF_BEFORE = ("p_value", "flagged", "doubt", "unlike")  # columns of a run's tables
SIMULATED = ("seed", "bags", "held_out")  # what gpmil demo notes of its slides
NO_MODEL = {
    "cv": "gpmil cv fits a model for every fold and keeps none, so there is no single model to "
    "teach. Teach a run of gpmil fit on the same data, or give the label file to gpmil cv "
    "--patch-labels.",
    "predict": "gpmil predict uses a model that was fitted to other slides. Open the run of its "
    "gpmil fit to teach it.",
}
MOST_PATCHES = 5_000  # of a slide whose own probability is computed at every mark


class Refused(Exception):
    """A mark that cannot be made; the message says why, in one line."""


class Lesson:
    """The data of a fit and its model, before and after it learned from marks.

    Bags beyond the first `n_fitted` were not in the fit: they join it once they are marked.
    """

    def __init__(self, bags: "Bags", model: "BagClassifier", n_fitted: int | None = None) -> None:
        self.bags, self.fitted, self.before = bags, model, _plain(model)
        self.calibrated = bool(getattr(model, "calibrated", False))
        self.after, self.taught, self.lines = self.before, bags, -1
        self.n_fitted = len(bags) if n_fitted is None else n_fitted
        self._chosen, self._working = np.arange(self.n_fitted), copy.copy(self.before)
        self.places = {str(name): b for b, name in enumerate(bags.names)}
        self._before: dict[int, float] = {}
        self._cohort: Bags | None = None  # the bags of the last update
        used = getattr(model, "instance_labels", "ignore") == "use"
        self.known = np.array(bags.instance_labels) if used else np.full(bags.n_instances, -1)

    def probability_before(self, number: int, bag: "Bags") -> float:
        """Of a slide by the model before any mark, computed once."""
        if number not in self._before:
            self._before[number] = float(self.before.predict_proba(bag)[0, 1])
        return self._before[number]

    def learn(self, rows: Sequence[int], labels: Sequence[int], lines: int) -> "BagClassifier":
        """The model with these labels, and those of its fit."""
        values = self.known.copy()
        values[list(rows)] = list(labels)
        if not len(rows) and self.lines < 0:  # nothing is taught yet
            self.taught, self.lines = self.bags.with_instance_labels(values), lines
        if lines != self.lines:
            taught = self.bags.with_instance_labels(values)
            self._update(taught, np.unique(self.bags.bag_index[list(rows)]))
            self.taught, self.lines = taught, lines
        return self.after

    def _update(self, taught: "Bags", marked: np.ndarray) -> None:
        """One model goes on from mark to mark, and keeps what makes the next step short.

        What is handed out is a copy: other threads predict with it meanwhile.
        """
        chosen = np.union1d(np.arange(self.n_fitted), marked)
        working: Any = self._working
        if self._cohort is None or not np.array_equal(chosen, self._chosen):
            self._cohort = taught if len(chosen) == len(taught) else taught[chosen]
        if not np.array_equal(chosen, self._chosen):  # other bags: from the start
            working = _of_cohort(copy.copy(self.before), self._cohort)
        # the same features from mark to mark, by which the model knows them again
        rows = np.isin(taught.bag_index, chosen)
        working.update(self._cohort.with_instance_labels(taught.instance_labels[rows]))
        self._chosen, self._working, self.after = chosen, working, copy.copy(working)

    def asked(self) -> "Bags":
        """The bags that marks can be asked for, with the labels that are known now."""
        if self.n_fitted == len(self.bags):
            return self.taught
        return self.taught[np.arange(self.n_fitted, len(self.bags))]

    def whole(self) -> "BagClassifier":
        """The taught model with what is cross-fitted, which takes longer: to be saved."""
        taught = self.taught[self._chosen]
        model: Any = _of_cohort(copy.copy(self.fitted), taught)
        if len(taught) == self.n_fitted or model.cross_fit_ is None:
            return model.update(taught)
        from gpmil.models.cross_fit import CrossFit, planned_folds

        model.update(taught, cross_fit=False)
        n_folds, calibrated = int(model.cross_fit_.fold.max()) + 1, bool(model.calibrated)
        fold = planned_folds(taught, taught.labels, n_folds, 0, calibrated)
        model.cross_fit_ = CrossFit.fit(model, taught, taught.labels, fold, calibrated)
        return model


def _plain(model: "BagClassifier") -> "BagClassifier":
    """The model without what was cross-fitted, p-values and calibration: for an answer at once."""
    plain: Any = copy.copy(model)
    plain.cross_fit_, plain.flags, plain.calibrated = None, False, False
    return plain


def _of_cohort(model: "BagClassifier", bags: "Bags") -> "BagClassifier":
    """The model, which is to be updated to a cohort with more bags than that of its fit."""
    counts = {"bags": len(bags), "positive": int(bags.labels.sum()), "instances": bags.n_instances}
    model.cohort_ = model.cohort_ | counts
    return model


class Teacher:
    """The marks of one run, and its model that learns from them."""

    def __init__(self, cohort: ShownCohort, number: int, maps: Maps) -> None:
        self.cohort, self.number, self.maps = cohort, number, maps
        self.run: ShownRun = cohort.run(number)
        self.file = MarksFile(self.run.folder)
        self.slides = {name: k for k, name in enumerate(cohort.names)}
        self._lock = threading.Lock()
        self._lesson: Lesson | None = None
        self._why = _cannot_learn(self.run)

    # --- Marks ------------------------------------------------------------------------------------
    def mark(
        self, slide: int, indices: Sequence[int], label: int, who: str, window: str
    ) -> History:
        """Mark patches, by their numbers in the table of the slide."""
        own, name = self.maps.get(self.number, slide), self.cohort.slide(slide)
        wrong = [i for i in indices if not 0 <= i < len(own)]
        if wrong or not indices:
            raise Refused(f"there is no patch {wrong[0] if wrong else ''}: {len(own)} are there.")
        table = self.run.tables[self.run.shown]
        if label == 1 and name in table.index and table["label"][name] == 0:
            raise Refused(
                f"slide {name} is labelled negative: a positive patch would contradict it. If the "
                "label is wrong, correct it and fit again."
            )
        places = [(float(own.x[i]), float(own.y[i])) for i in dict.fromkeys(indices)]
        return self._kept(lambda: self.file.add(name, label, places, who, window))

    def turn(self, what: str, who: str, window: str) -> History:
        """Undo or redo."""
        return self._kept(lambda: self.file.turn(what, who, window))

    def history(self) -> History:
        """What was marked by now, in whatever window."""
        return self._kept(self.file.read)

    @staticmethod
    def _kept(act: Any) -> History:
        try:
            return act()
        except (ValueError, OSError) as error:
            raise Refused(str(error)) from error

    def found(self, marks: Sequence[Mark]) -> tuple[list[tuple[int, int, Mark]], list[Mark]]:
        """Slide, patch and mark, for those that are there; the others, whose patches are not."""
        there, lost = [], []
        known: dict[str, dict[tuple[float, float], int]] = {}
        for mark in marks:
            if mark.slide not in known:
                known[mark.slide] = self._patches(mark.slide)
            index = known[mark.slide].get(mark.place)
            if index is None:
                lost.append(mark)
            else:
                there.append((self.slides[mark.slide], index, mark))
        return there, lost

    def _patches(self, slide: str) -> dict[tuple[float, float], int]:
        try:
            own = self.maps.get(self.number, self.slides[slide])
        except (Missing, KeyError):
            return {}
        return {place: i for i, place in enumerate(zip(own.x.tolist(), own.y.tolist()))}

    def as_json(self, history: History, window: str) -> dict[str, Any]:
        """As the page reads it, the latest mark last."""
        there, lost = self.found(history.marks())
        notes = [described(history)] if history.damaged else []
        if lost:
            notes.append(
                f"{len(lost)} marks are of patches that the run has not: "
                f"{listed(mark.slide for mark in lost)}."
            )
        return {
            "marks": [
                {"slide": s, "index": i, "label": m.label, "who": m.who, "when": m.when}
                for s, i, m in there
            ],
            "version": history.lines,
            "can_undo": bool(history.done.get(window)),
            "can_redo": bool(history.undone.get(window)),
            "note": " ".join(notes),
            "learns": not self._why,
            "why": self._why,
            "who": _user(),
        }

    # --- Learning ---------------------------------------------------------------------------------
    def lesson(self) -> Lesson:
        """Data and model, read once; Missing says why they cannot be."""
        with self._lock:
            if self._lesson is None and not self._why:
                try:
                    self._lesson = _read(self.run)
                except (ValueError, OSError) as error:
                    self._why = " ".join(str(error).split())
            if self._lesson is None:
                raise Missing(f"the model cannot learn from marks here: {self._why}")
            return self._lesson

    def taught(self) -> tuple["BagClassifier", History]:
        """The model with all marks as they are now; several windows ask for one update."""
        lesson = self.lesson()
        with self._lock:
            history = self.history()
            there, _ = self.found(history.marks())
            rows = [int(lesson.bags.offsets[self._bag(lesson, s)]) + i for s, i, _ in there]
            try:
                return lesson.learn(rows, [m.label for _, _, m in there], history.lines), history
            except ValueError as error:
                raise Missing(f"the model cannot learn this: {error}") from error

    def _bag(self, lesson: Lesson, slide: int) -> int:
        name = self.cohort.slide(slide)
        if name not in lesson.places:
            raise Missing(f"slide {name!r} is not among those of the fit.")
        b = lesson.places[name]
        if lesson.bags.sizes[b] != len(self.maps.get(self.number, slide)):
            raise Missing(f"slide {name!r} has other patches now than in the fit.")
        return b

    def map(self, slide: int) -> tuple[PatchMap, dict[str, str]]:
        """The map of a slide by the taught model, and the slide's probability."""
        lesson, (model, history) = self.lesson(), self.taught()
        number = self._bag(lesson, slide)
        bag = lesson.bags[[number]].in_memory()
        small = bag.n_instances <= MOST_PATCHES
        both = model.predict_all(bag) if small else None
        said = both.instances if both is not None else None
        said = model.predict_instances(bag) if said is None else said
        own = self.maps.get(self.number, slide)
        tag = f"{own.tag}-{history.lines}"
        # What else the run's table says of patches is of the model before.
        found: dict[str, Any] = {name: None for name in OF_BEFORE if hasattr(own, name)}
        drawn = replace(own, probability=said.probability, sd=said.std, tag=tag, **found)
        facts = {"x-gpmil-version": str(history.lines)}
        if both is not None:
            facts["x-gpmil-before"] = repr(lesson.probability_before(number, bag))
            facts["x-gpmil-probability"] = repr(float(both.proba[0, 1]))
            facts["x-gpmil-calibrated"] = str(int(lesson.calibrated))
        return drawn, facts

    def suggest(self) -> dict[str, Any]:
        """Patches whose labels are expected to change the maps most, at most one of a slide."""
        lesson, (model, _) = self.lesson(), self.taught()
        # Only now: a thread that imports a part of a package does not wait for the whole of it.
        from gpmil.models.suggestions import suggest

        bags = lesson.asked()
        rows = suggest(model, bags, SUGGESTED)
        found = []
        for row, b in zip(rows.tolist(), bags.bag_index[rows].tolist()):
            slide, index = self.slides[str(bags.names[b])], row - int(bags.offsets[b])
            found.append({"slide": slide, "index": index})
        return {"patches": found, "how": HOW}

    # --- Saving -----------------------------------------------------------------------------------
    def label_file(self) -> bytes:
        """The marks as a table, for `gpmil fit --patch-labels`."""
        rows = table_rows(self.history().marks())
        return csv_bytes(pd.DataFrame(rows, columns=["slide", "x", "y", "label", "who", "when"]))

    def save(self) -> dict[str, str | None]:
        """The taught model and the label file, into the folder `taught` of the run."""
        place = self.run.folder / TAUGHT
        if place.is_symlink():
            raise Refused(f"{TAUGHT} of this run is a link: nothing was written.")
        table = self.label_file()
        if not self._why:
            self.taught()
        try:
            write_whole(place / LABEL_FILE, table)
            model = None if self._lesson is None else self._lesson.whole()
            if model is not None:
                model.save(place / "model")
        except (ValueError, OSError) as error:
            raise Refused(f"could not be saved: {error}") from error
        return {
            "labels": str(place / LABEL_FILE),
            "model": None if model is None else str(place / "model"),
        }


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""


# --- The data and the model of a run --------------------------------------------------------------
def _cannot_learn(run: ShownRun) -> str:
    """Why a run's model cannot learn from marks, as far as can be seen without reading it all."""
    command = str(run.config.get("command"))
    if command not in ("fit", "demo"):
        return NO_MODEL.get(command, f"this is a run of gpmil {command}, without a model.")
    kind = model_card(run.folder, {}).get("class")
    if kind not in LEARNERS:
        return f"its model is {kind or 'not there'}, and {' and '.join(LEARNERS)} can learn."
    if command == "demo":
        known = all(type(run.config.get(name)) is int for name in SIMULATED)
        return "" if known else "the run does not say which slides were simulated."
    data = _source(run).get("data")
    if not data:
        return "the run does not say where its features are."
    return "" if found_again(str(data), run.folder) else f"there is nothing at {data} any more."


def _source(run: ShownRun) -> dict[str, Any]:
    return as_dict(as_dict(run.config.get("options")).get("source"))


def _read(run: ShownRun) -> Lesson:
    """Read the data again, as the fit did, and load its model; a ValueError says what is wrong."""
    from gpmil import io
    from gpmil.models import load

    if run.config.get("command") == "demo":
        return _simulated(run)
    source = _placed(_source(run), run)
    path, cache = source["data"], cache_of(run.config)
    bags, _ = io.read_with_report(path, cache=cache, **arguments(source))
    if source.get("patch_labels") is not None:
        bags = io.with_patch_labels(bags, source["patch_labels"], **patch_words(source))
    bags = bags[bags.labels >= 0]
    noted = as_dict(run.config.get("data")).get("fingerprint")
    if isinstance(noted, str) and noted.startswith(KIND) and noted != fingerprint(bags):
        raise ValueError(
            f"{path} has changed since the fit: files, labels or positions. Fit again."
        )
    return Lesson(bags, load(run.folder / "model"))


def _simulated(run: ShownRun) -> Lesson:
    """The slides of gpmil demo, simulated again, those of the fit first."""
    from gpmil import simulate
    from gpmil.data.bags import Bags
    from gpmil.models import load

    model, hard = load(run.folder / "model"), bool(run.config.get("hard"))
    seed, n_train, n_test = (run.config[name] for name in SIMULATED)
    parts = simulate.demonstration(seed, n_train, n_test, hard)
    train = parts[0]
    if not np.allclose(train.features.mean(0), model.feature_mean_, rtol=1e-4, atol=1e-5):
        raise ValueError("slides are simulated otherwise by now: run gpmil demo again.")
    every = [bag for part in parts for bag in part]
    bags = Bags.from_arrays(
        [bag.features for bag in every],
        labels=[int(bag.labels[0]) for bag in every],
        coords=[bag.coords for bag in every],
        step=None if train.step is None else tuple(train.step[0].tolist()),
        graph=train.graph,
        names=[str(bag.names[0]) for bag in every],
        groups=np.concatenate([part.groups for part in parts if part.groups is not None]),
    )
    return Lesson(bags, model, len(train))


def _placed(source: Mapping[str, Any], run: ShownRun) -> dict[str, Any]:
    """The same with paths that exist."""
    found = dict(source)
    for name in ("data", *PATHS, "patch_labels"):
        if source.get(name) is not None:
            places: list[Path] = found_again(str(source[name]), run.folder)
            if not places:
                raise ValueError(f"there is nothing at {source[name]} any more.")
            found[name] = places[0]
    return found
