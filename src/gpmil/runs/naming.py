"""Slides in words, the same on pages, maps and in the viewer: classes, calls, numbers, headings."""

import math
from collections.abc import Mapping
from typing import Any

from gpmil.data.classes import NEGATIVE, POSITIVE
from gpmil.runs.files import LEVEL

Row = Any  # of predictions.csv: a Series, or a dictionary
PLAIN = ("0", "1", "0.0", "1.0")  # names that say nothing
MOST_NAMES = 3
NO_CALLS = (
    "Maps of couplings other than that of the fit are there to compare; slides are called with "
    "the coupling of the fit alone, because nothing was learned or calibrated at another."
)


def class_words(config: Mapping[str, Any]) -> tuple[str, str]:
    """What the negative and the positive class are called; the words themselves if by no name.

    >>> class_words({"data": {"classes": {"benign": [3, "negative"], "1": [2, "positive"]}}})
    ('benign', 'positive')
    """
    data, model = (config.get(key) or {} for key in ("data", "model"))
    known = data.get("classes") or model.get("classes") or {}
    return _words(known, NEGATIVE), _words(known, POSITIVE)


def _words(known: Mapping[str, Any], role: str) -> str:
    names = [name for name, (_, own) in known.items() if own == role]
    if not names or set(names) & set(PLAIN):
        return role
    return " or ".join(names[:MOST_NAMES]) + (" ..." if len(names) > MOST_NAMES else "")


def shown(p: float) -> str:
    """Three significant digits, but no certainty.

    >>> shown(0.12345), shown(0.0412), shown(0.99999), shown(1e-9)
    ('0.123', '0.0412', '> 0.999', '< 0.001')
    """
    if p >= 0.9995:
        return "> 0.999"
    return f"{p:.3g}" if p >= 0.001 else "< 0.001"


def is_positive(row: Row) -> bool:
    """Whether a slide is called positive; earlier versions called the likelier class."""
    call = row.get("call", math.nan)
    return bool(call == 1 if call in (0, 1) else row["log_odds"] > 0)


def called(row: Row, words: tuple[str, str] = (NEGATIVE, POSITIVE)) -> str:
    """The call, by the name of its class."""
    return f"called {words[is_positive(row)]}"


def decided(row: Row, words: tuple[str, str] = (NEGATIVE, POSITIVE)) -> str:
    """The decision, and of what is accepted as what."""
    decision = str(row.get("decision") or "")
    return f"accept as {words[is_positive(row)]}" if decision == "accept" else decision


def interval(row: Row) -> str:
    """The interval of the probability; "" where there is none."""
    low, high = (row.get(end, math.nan) for end in ("low", "high"))
    return "" if math.isnan(low) else f"{shown(low)} to {shown(high)}"


def heading(row: Row, config: Mapping[str, Any]) -> list[str]:
    """What is above the map of a slide: its class, call, probability, decision, and novelty."""
    words = class_words(config)
    label = row.get("label", math.nan)
    said = [f"is {words[int(label)]}"] if label in (0, 1) else ["of unknown class"]
    probability = f"{called(row, words)}, probability {shown(row['probability'])}"
    if between := interval(row):
        probability += f" ({100 * LEVEL:g} % interval {between})"
    said += [probability, decided(row, words)]
    return ["; ".join(word for word in said if word), *far(row.get("novelty", math.nan))]


def far(novelty: float) -> list[str]:
    """A warning above a map of tissue that the model has not seen the like of.

    >>> far(0.7), far(2.34)[0][:44]
    ([], 'beyond the training range (novelty 2.34, up ')
    """
    if not novelty > 1:
        return []
    return [
        f"beyond the training range (novelty {novelty:.3g}, up to 1 is within): what the map says "
        "is a guess"
    ]


def rate_of(config: Mapping[str, Any]) -> float | None:
    """The false discovery rate that patches were marked at, where the run says it."""
    options = config.get("options") or {}
    rate = (options.get("asked") or {}).get("rate")
    return float(rate) if isinstance(rate, int | float) else None
