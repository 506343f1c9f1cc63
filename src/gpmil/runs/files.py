"""The files of a run: their names, and one function per kind that reads and checks them.

Runs are copied, cut off, opened in spreadsheets and written by other programs. What cannot be what
`gpmil` wrote is a ValueError that names file, place, what was expected and what was found. Nothing
here needs the model or torch.
"""

import csv
import gzip
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import pandas as pd

from gpmil.data.checks import listed
from gpmil.files.foreign import BadFile, read_json, reading

CARD, FORMAT = "config.json", "gpmil-run"
PREDICTIONS, LABELS, METRICS = "predictions.csv", "labels.csv", "metrics.json"
PATCHES, ENDING = "patches", ".csv.gz"
ATTENTION = "attention"  # weights of patches, beside PATCHES: no probabilities
MARKS = "marks.jsonl"  # made in the viewer
LEVEL = 0.9  # of the interval of a slide's probability
EVIDENCE = ("evidence_patches", "evidence_slide")  # of models with a slide context
NEEDED = ("slide", "patient", "probability", "log_odds", "decision", "label")
GIVEN = ["slide", "label", "patient"]  # the columns of labels.csv
FARTHEST = 1e10  # positions, whatever their unit: slides have some 1e5 pixels
STEPS = (1e-6, FARTHEST)  # distances of patches, and their sides
TRUTH = {"true": "1", "false": "0"}
MARK = {"accept", "refer", ""}
RATE = ["value", "low", "high", "slides"]
ESTIMATE = ("value", "low", "high", "level", "n", "n_undefined")


class Range(NamedTuple):
    """Numbers from low to high; `missing` allows empty cells, `only` some numbers alone."""

    low: float = -math.inf
    high: float = math.inf
    missing: bool = True
    only: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.only:
            return f"numbers among {', '.join(f'{v:g}' for v in self.only)}"
        words = [f"from {self.low:g}"] if self.low > -math.inf else []
        words += [f"to {self.high:g}"] if self.high < math.inf else []
        return " ".join(["numbers", *words])

    def good(self, values: np.ndarray) -> np.ndarray:
        """Which of the values are within."""
        if self.only:
            return np.isin(values, self.only) | (np.isnan(values) & self.missing)
        within = np.isfinite(values) | np.isinf((self.low, self.high)).all()
        return np.where(np.isnan(values), self.missing, within & _between(values, self))


def _between(values: np.ndarray, limits: Range) -> np.ndarray:
    return (values >= limits.low) & (values <= limits.high)


SHARE, KNOWN_SHARE = Range(0, 1), Range(0, 1, missing=False)
POSITION = Range(-FARTHEST, FARTHEST, missing=False)
SLIDE_COLUMNS = {
    "probability": KNOWN_SHARE,
    "low": SHARE,
    "high": SHARE,
    "log_odds": Range(),  # of a certainty infinite
    "evidence_patches": Range(),
    "evidence_slide": Range(),
    "novelty": Range(0, 1e300),
    "call": Range(only=(0, 1)),
    "label": Range(only=(0, 1)),
}
PATCH_COLUMNS = {
    "x": POSITION,
    "y": POSITION,
    "z": POSITION,
    "probability": KNOWN_SHARE,
    "sd": Range(0, 1e30),
    "std": Range(0, 1e30),
    "p_value": SHARE,
    "flagged": Range(only=(0, 1)),
    "doubt": SHARE,
    "unlike": SHARE,
    "novelty": Range(0, 1e300),
    "label": Range(only=(-1, 0, 1)),
}


# --- Names ----------------------------------------------------------------------------------------
def coupling_folder(coupling: str) -> str:
    """Where in patches/ the tables of one of several couplings lie."""
    return f"coupling-{coupling}"


def repeat_folder(repeat: int | str) -> str:
    """Where in patches/ the tables of a later repeat lie."""
    return f"repeat-{repeat}"


def patch_file(slide: str) -> str:
    """The name of a slide's table of patches, whatever the slide is called.

    >>> patch_file("TCGA-01"), patch_file("a/b 1"), patch_file("../x")
    ('TCGA-01.csv.gz', 'a%2Fb 1.csv.gz', '%2E.%2Fx.csv.gz')
    """
    safe = quote(slide, safe=" ()[]{}+,;=@!$&'#~^")
    return (f"%2E{safe[1:]}" if safe.startswith(".") else safe) + ENDING


def slide_name(file: Path) -> str:
    """The slide whose patches a file holds.

    >>> slide_name(Path("patches") / patch_file("../x"))
    '../x'
    """
    return unquote(file.name.removesuffix(ENDING))


def patch_path(folder: Path, slide: str, under: str = "", kind: str = PATCHES) -> Path:
    """The table of a slide's patches in a run; `under` is the folder of its coupling or repeat."""
    return folder / kind / under / patch_file(slide)


# --- Tables ---------------------------------------------------------------------------------------
def read_table(file: Path, what: str, needed: Iterable[str] = ()) -> pd.DataFrame:
    """A table of texts as they are written; a slide may be called NA.

    Not by pandas: it shifts columns under rows that are longer than the header, and fills up
    shorter ones.
    """
    opened = gzip.open if file.suffix == ".gz" else open
    with reading(file, what), opened(file, "rt", encoding="utf-8-sig", newline="") as lines:
        header, *rows = [row for row in csv.reader(lines, strict=True) if row] or [[]]
    if not header:
        raise BadFile(f"{file} cannot be read as {what}: it is empty.")
    for k, row in enumerate(rows):
        if len(row) != len(header):
            raise BadFile(
                f"{file} cannot be read as {what}: row {k + 2} has {len(row)} cells, the header "
                f"{len(header)}. Was it cut off, or changed by hand?"
            )
    twice = [name for k, name in enumerate(header) if name in header[:k]]
    if twice:
        raise BadFile(f"{file} has several columns {twice[0]!r:.60}: was it changed by hand?")
    missing = [name for name in needed if name not in header]
    if missing:
        raise BadFile(f"{file} has no column {missing[0]!r}: was it changed by hand?")
    return pd.DataFrame(dict(zip(header, zip(*rows) if rows else [()] * len(header))), dtype=str)


def _row(chosen: np.ndarray) -> int:
    """The first of some rows, as an editor counts lines."""
    return int(np.flatnonzero(chosen)[0]) + 2


def _numbers(column: pd.Series, expected: Range, file: Path) -> np.ndarray:
    """Numbers as Python reads them, to the last digit, which pandas does not promise."""
    try:
        return np.array(
            [float(text) if text else math.nan for text in column.tolist()], dtype=np.float64
        )
    except ValueError as error:
        raise BadFile(
            f"{file}: expected {expected} in column {str(column.name)!r}: {error!s:.100}. "
            "Changed by hand?"
        ) from error


def _check_numbers(
    columns: Mapping[str, np.ndarray], limits: Mapping[str, Range], file: Path
) -> None:
    for name, expected in limits.items():
        if name not in columns:
            continue
        bad = ~expected.good(columns[name])
        if bad.any():
            found = columns[name][bad][0]
            if math.isnan(found) and name in "xyz":
                raise BadFile(f"{file}: found patches without a position {name}. Remove them.")
            raise BadFile(
                f"{file}: expected {expected} in column {name!r}, found "
                f"{'none' if math.isnan(found) else f'{found:g}'} in row {_row(bad)}. Changed by "
                "hand?"
            )


def with_numbers(frame: pd.DataFrame, limits: Mapping[str, Range], file: Path) -> pd.DataFrame:
    """The columns that are to be numbers as such, within their limits."""
    for name in limits.keys() & set(frame):
        frame[name] = _numbers(frame[name], limits[name], file)
    _check_numbers({c: frame[c].to_numpy() for c in limits if c in frame}, limits, file)
    return frame


def read_predictions(folder: Path, needed: Iterable[str] = NEEDED) -> pd.DataFrame:
    """predictions.csv: numbers are floats exactly as they are written, the others stay texts."""
    file = folder / PREDICTIONS
    if not file.exists():
        raise ValueError(
            f"{folder} has no {PREDICTIONS}: expected a run of gpmil fit, predict, cv or demo."
        )
    frame = read_table(file, "a whole table of slides", needed)
    frame = with_numbers(frame, SLIDE_COLUMNS, file)
    if (frame["slide"] == "").any():
        raise BadFile(f"{file}: row {_row((frame['slide'] == '').to_numpy())} names no slide.")
    for name, good in (("coupling", _is_strength), ("repeat", str.isdecimal)):
        bad = ~frame[name].map(good).to_numpy(dtype=bool) if name in frame else np.zeros(0, bool)
        if bad.any():  # a part of paths: a number, nothing else
            raise BadFile(
                f"{file}: expected a number in column {name!r}, found "
                f"{frame[name][bad].iloc[0]!r:.60}. Changed by hand?"
            )
    if "decision" in frame and not set(frame["decision"]) <= MARK:
        raise BadFile(f"{file}: expected accept, refer or nothing in column 'decision'.")
    _check_keys(frame, file)
    return frame


def _check_keys(frame: pd.DataFrame, file: Path) -> None:
    """One row per slide and coupling, no slide without one of them, both ends of intervals."""
    keys = [name for name in ("slide", "coupling", "repeat", "fold") if name in frame]
    twice = frame.duplicated(keys).to_numpy()
    if twice.any():
        raise BadFile(
            f"{file}: slide {frame['slide'][twice].iloc[0]!r:.60} is in several rows: keep one "
            "row per slide."
        )
    if "coupling" in frame:
        rows = frame.groupby("slide", sort=False)["coupling"].nunique()
        fewer = rows[rows < frame["coupling"].nunique()]
        if len(fewer):
            raise BadFile(
                f"{file}: expected every slide with every coupling, found {len(fewer)} with fewer, "
                f"{fewer.index[0]!r:.60} first. Changed by hand?"
            )
    for one, other in (("low", "high"), EVIDENCE):
        if (one in frame) != (other in frame):
            raise BadFile(
                f"{file} has one of the columns {one!r} and {other!r} alone: changed by hand?"
            )


def _is_strength(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) >= 0 and text == text.strip()
    except ValueError:
        return False


def read_patches(file: Path, needed: Iterable[str] = ()) -> pd.DataFrame:
    """patches/<slide>.csv.gz: what gpmil writes as numbers, other columns as texts."""
    frame = read_table(file, "a whole table of patches", needed)
    if "flagged" in frame:
        frame["flagged"] = frame["flagged"].map(lambda text: TRUTH.get(text.lower(), text))
    known = dict.fromkeys(class_columns(frame).values(), SHARE)
    return with_numbers(frame, PATCH_COLUMNS | known, file)


def class_columns(header: Iterable[str]) -> dict[str, str]:
    """Columns with the probability of a grade or type, by its name, in their order.

    >>> class_columns(["x", "P(benign)", "P(3)", "p_value"])
    {'benign': 'P(benign)', '3': 'P(3)'}
    """
    return {c[2:-1]: c for c in header if c.startswith("P(") and c.endswith(")")}


# --- Labels that were given later -----------------------------------------------------------------
def label_rows(predictions: pd.DataFrame) -> pd.DataFrame:
    """labels.csv of predictions that `gpmil evaluate` gave other labels: one row per slide.

    predictions.csv keeps what the run itself has read; whoever shows or judges the run takes these
    in place of those, as long as the file is there.
    """
    found = predictions[GIVEN].drop_duplicates("slide")
    return found.assign(label=["" if pd.isna(y) else str(int(y)) for y in found["label"]])


def has_given_labels(folder: Path) -> bool:
    """Whether a run has labels from `gpmil evaluate`."""
    return (folder / LABELS).is_file()


def with_given_labels(predictions: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """The predictions of a run with the labels and patients that it was given, where it was."""
    if not has_given_labels(folder):
        return predictions
    given = _read_labels(folder / LABELS).reindex(predictions["slide"])
    label = pd.to_numeric(given["label"]).to_numpy(dtype=float)
    return predictions.assign(label=label, patient=given["patient"].fillna("").to_numpy())


def _read_labels(file: Path) -> pd.DataFrame:
    """Labels and patients by slide."""
    frame = read_table(file, "a table of labels")
    if list(frame) != GIVEN:
        raise ValueError(f"{file}: expected the columns {listed(GIVEN)}, found {listed(frame)}.")
    wrong = frame[~frame["label"].isin(["0", "1", ""])]["label"]
    if len(wrong) or frame["slide"].duplicated().any():
        what = f"labels {listed(wrong)}" if len(wrong) else "slides in several rows"
        raise ValueError(
            f"{file}: {what}; expected 0, 1 or nothing, once per slide. Was it changed by hand? "
            "gpmil evaluate RUN --labels TABLE writes it anew."
        )
    return frame.set_index("slide")


# --- JSON -----------------------------------------------------------------------------------------
def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run, or the file itself; a ValueError where gpmil wrote none."""
    file = folder / CARD if folder.is_dir() else folder
    if not file.exists():
        raise ValueError(f"{folder} is no run of gpmil: there is no {CARD}. Check the path.")
    card = read_card(file)
    if card.get("format") != FORMAT or not isinstance(card.get("command"), str):
        raise ValueError(f"{file} does not describe a run of gpmil (format {FORMAT!r} expected).")
    return card


def read_card(file: Path) -> dict[str, Any]:
    """config.json, its entries of the kinds that gpmil writes, as far as there are any."""
    card = read_json(file)
    if not isinstance(card, dict):
        raise BadFile(
            f"{file} does not describe a run of gpmil: expected names with values, found "
            f"{card!r:.60}."
        )
    for name in ("options", "model", "versions", "data"):
        _expect(isinstance(card.get(name, {}), dict), file, name, "names with values", card)
    for name in ("note", "cache", "units", "anchor", "command"):
        _expect(isinstance(card.get(name, ""), str | None), file, name, "a text", card)
    for name in ("files", "read"):
        lines = card.get(name, [])
        good = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
        _expect(good, file, name, "a list of texts", card)
    for name in ("asked", "source"):
        options = card.get("options", {})
        _expect(isinstance(options.get(name, {}), dict), file, name, "names with values", options)
    rate = card.get("options", {}).get("asked", {}).get("rate")
    _expect(rate is None or _is_number(rate), file, "rate", "a number", {"rate": rate})
    _expect(
        isinstance(card.get("model", {}).get("class", ""), str | None),
        file, "class", "a word", card.get("model", {}),
    )  # fmt: skip
    for name in ("steps", "sizes"):
        _check_sides(card.get(name), name, file)
    return card


def _expect(good: bool, file: Path, name: str, wanted: str, card: Mapping[str, Any]) -> None:
    if not good:
        raise BadFile(f'{file}: expected "{name}" to be {wanted}, found {card[name]!r:.60}.')


def _check_sides(noted: Any, name: str, file: Path) -> None:
    """{slide: number, or one per axis}, as maps need them."""
    if noted is None:
        return
    if not isinstance(noted, dict):
        raise BadFile(f'{file}: expected "{name}" to be {{slide: number}}, found {noted!r:.60}.')
    for slide, value in noted.items():
        sides = value if isinstance(value, list) else [value]
        good = all(_is_number(v) and STEPS[0] <= v <= STEPS[1] for v in sides)
        if not good or not 1 <= len(sides) <= 3:
            raise BadFile(
                f"{file}: {name} of {slide:.60} in {file.name}: expected a positive number, or "
                f"one per axis, found {value!r:.60}."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rate(rate: Any) -> bool:
    return isinstance(rate, dict) and list(rate) == RATE and all(map(_is_number, rate.values()))


def read_metrics(file: Path) -> dict[str, Any]:
    """metrics.json; empty where there is none."""
    if not file.exists():
        return {}
    found = read_json(file)
    several = found.get("couplings", {}) if isinstance(found, dict) else None
    if not isinstance(several, dict) or not all(isinstance(p, dict) for p in several.values()):
        raise BadFile(f"{file}: expected metrics by name, found {found!r:.60}.")
    for part in (found, *several.values()):
        for what in ("slides", "patients", "patches"):
            if what in part:
                _check_metrics(part[what], what, file)
    if not isinstance(found.get("training", {}), dict):
        raise BadFile(f'{file}: expected "training" to be names with values.')
    return found


def _check_metrics(part: Any, what: str, file: Path) -> None:
    metrics = part.get("metrics") if isinstance(part, dict) else None
    if not isinstance(metrics, dict):
        raise BadFile(f'{file}: expected "metrics" of {what}, found {part!r:.60}.')
    rates = part.get("operating", {})
    if not isinstance(rates, dict) or not all(_is_rate(rate) for rate in rates.values()):
        raise BadFile(f'{file}: expected rates as "operating" of {what}, found {rates!r:.60}.')
    if what == "patches" and not isinstance(part.get("decided"), str):
        raise BadFile(f'{file}: expected "decided" of {what}, found {part.get("decided")!r:.60}.')
    for name, estimate in metrics.items():
        good = isinstance(estimate, dict) and all(
            _is_number(estimate.get(key)) or (key in estimate and estimate[key] is None)
            for key in ESTIMATE
        )
        if not good:
            raise BadFile(
                f"{file}: {what} {name:.60}: expected numbers {', '.join(ESTIMATE)}, found "
                f"{estimate!r:.60}. gpmil evaluate writes the file anew."
            )
