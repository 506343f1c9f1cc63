"""Classes of labels: which values are positive, which negative, and which are left out.

Labels come as people write them. Values that differ in capitals or blanks only are one class. Of
two classes it is enough to name one; of more each must be named, so that none becomes negative
without a word. Classes are named by themselves, several with commas between ("3,4"), or, where
they are numbers, by a comparison (">=2").
"""

import csv
import io
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int

POSITIVE, NEGATIVE, EXCLUDED, UNLABELLED = "positive", "negative", "left out", "unlabelled"
CODES = {POSITIVE: 1, NEGATIVE: 0, EXCLUDED: -1, UNLABELLED: -1}
WORDS = {"positive": POSITIVE, "negative": NEGATIVE, "exclude": EXCLUDED}  # as they are asked for
PLAIN = {"1": POSITIVE, "0": NEGATIVE, "-1": UNLABELLED}  # what needs no word

Found = dict[str, tuple[int, str]]
"""Count and role of each class, as in {"tumour": (16, "positive")}."""

NUMBER = re.compile(r"[+-]?\d{1,15}(\.\d{0,15})?")
COMPARISON = re.compile(rf"(>=|<=|>|<)\s*({NUMBER.pattern})")
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

# For examples in messages only: nothing is decided by them.
DOUBTFUL = re.compile(r"unknown|missing|not |n/?a$|indeterminate|unclear|exclude|other|\?|none|^-$")
HEALTHY = re.compile(r"benign|normal|negative|healthy|control|wild|^wt$|^no|^non|false|low|stroma")


@dataclass(frozen=True)
class Labels:
    """Labels as 0, 1 and -1 (unlabelled), the classes they are of, and what is worth a word.

    `names` are those of classes 0 and 1; None where the labels were 0 and 1 already.
    """

    values: Int[np.ndarray, " n"]
    classes: Found
    names: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()


def encode(
    values: Iterable[Any], positive: Any = None, negative: Any = None, exclude: Any = None
) -> Labels:
    """Labels of any kind, with what was said of their classes, as 0, 1 and -1.

    Without `positive` and `negative` they must be 0 and 1. Missing values are -1, and so is the
    class "-1" unless it is named.

    >>> grades = encode([2, 3, 4, 4, None], positive=">=3", negative=2)
    >>> grades.values.tolist(), grades.names
    ([0, 1, 1, 1, -1], ('2', '3,4'))
    >>> print(described(grades.classes))
    '3' 1 (positive), '4' 2 (positive), '2' 1 (negative)
    >>> found = encode(["LUAD", "luad", "LUAD ", "none", "?"], positive="LUAD", exclude="?")
    >>> print(*found.notes, described(found.classes), sep=chr(10))
    'LUAD' (2) and 'luad' (1) are taken as one class, 'LUAD'.
    LUAD 3 (positive), none 1 (negative), '?' 1 (left out)
    """
    spelled = [text(value) for value in values]
    names, notes = _choose_spellings(Counter(word for word in spelled if word is not None))
    known = [None if word is None else names[fold(word)] for word in spelled]
    counts = _sort_classes(Counter(name for name in known if name is not None))
    asked = {
        word: _read_request(given, word, counts)
        for word, given in (("positive", positive), ("negative", negative), ("exclude", exclude))
    }
    roles, missing = _assign_named(asked, counts)
    _assign_rest(roles, asked, counts, missing)
    codes = [-1 if name is None else CODES[roles[name]] for name in known]
    classes = {n: (counts[n], role) for role in CODES for n in counts if roles[n] == role}
    absent = [f"{word}={item!r} is not among the classes found." for word, item in missing]
    by_name = bool(asked["positive"] or asked["negative"])
    return Labels(
        np.array(codes, dtype=np.int64),
        classes,
        _class_names(classes, asked) if by_name else None,
        (*notes, *absent),
    )


# ------------------------------------------------------------------ values as classes


def text(value: Any) -> str | None:
    """A value as text, blanks folded, 2.0 and "2.0" as "2", True as "1"; None where missing.

    >>> text(2.0), text(" non  tumour "), text(True), text("-1.0"), text(float("nan")), text(" ")
    ('2', 'non tumour', '1', '-1', None, None)
    """
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return None
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    words = " ".join(str(value).split())
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", words) or None


def fold(name: str) -> str:
    """What two spellings of a class have in common.

    >>> fold("Squamous  Cell") == fold("SQUAMOUS CELL"), fold("2") == fold("2.00")
    (True, True)
    """
    number = _number(name)
    if number is not None:
        return repr(number + 0.0)
    words = unicodedata.normalize("NFD", " ".join(name.split()))
    return unicodedata.normalize("NFD", words.casefold())


def _number(name: str) -> float | None:
    return float(name) if NUMBER.fullmatch(name.strip()) else None


def _choose_spellings(counts: Mapping[str, int]) -> tuple[dict[str, str], list[str]]:
    """The most frequent spelling of each class by its fold, and a note for each with several."""
    spellings: dict[str, list[str]] = {}
    for word in sorted(counts, key=lambda word: -counts[word]):
        spellings.setdefault(fold(word), []).append(word)
    notes = [
        f"{join_words([f'{word!r} ({counts[word]})' for word in words])} are taken as one class, "
        f"{words[0]!r}."
        for words in spellings.values()
        if len(words) > 1
    ]
    return {key: words[0] for key, words in spellings.items()}, notes


def _sort_classes(counts: Mapping[str, int]) -> dict[str, int]:
    """Numbers first, as they rise, then words, the most frequent first."""

    def place(name: str) -> tuple[bool, float, str]:
        number = _number(name)
        return number is None, -counts[name] if number is None else number, name

    return {name: counts[name] for name in sorted(counts, key=place)}


# ------------------------------------------------------------------ what was asked for

Request = list[tuple[str, list[str]]]
"""What was said of classes, item by item, and the classes that each item means."""


def _read_request(given: Any, word: str, counts: Mapping[str, int]) -> Request:
    if given is None:
        return []
    # A class may have a comma in its name: the whole comes first.
    if isinstance(given, str) and not _match(given, counts):
        items: Sequence[Any] = next(csv.reader([given], skipinitialspace=True), [])
    else:
        items = list(given) if isinstance(given, (list, tuple, set, np.ndarray)) else [given]
    said = [text(item) for item in items]
    if not said or None in said:
        raise ValueError(f"labels: {word}={given!r}: expected a class, or several, as in 'a,b'.")
    return [(item, _match(item, counts)) for item in said if item is not None]


def _match(item: str, counts: Mapping[str, int]) -> list[str]:
    """The classes that a name, or a comparison, stands for; -1 must be named."""
    same = [name for name in counts if fold(name) == fold(item)]
    compared = COMPARISON.fullmatch(item.strip())
    if same or compared is None:
        return same
    compare, bound = COMPARE[compared[1]], float(compared[2])
    numbers = {name: _number(name) for name in counts if name != "-1"}
    return [
        name for name, number in numbers.items() if number is not None and compare(number, bound)
    ]


def _assign_named(
    asked: Mapping[str, Request], counts: Mapping[str, int]
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The roles of the classes that were named, and what was named and is not there."""
    by: dict[str, str] = {}
    missing = []
    for word, items in asked.items():
        for item, meant in items:
            missing += [] if meant else [(word, item)]
            for name in meant:
                if by.setdefault(name, word) != word:
                    raise ValueError(
                        f"labels: class {name!r} is named twice, by {by[name]}= and by {word}=. "
                        f"The classes are {_list_counts(counts)}."
                    )
    return {name: WORDS[word] for name, word in by.items()}, missing


def _assign_rest(
    roles: dict[str, str],
    asked: Mapping[str, Request],
    counts: Mapping[str, int],
    missing: list[tuple[str, str]],
) -> None:
    """Roles of classes that were not named, where there is no doubt; else a ValueError."""
    sides = [word for word in ("positive", "negative") if asked[word]]
    if "-1" in counts:
        roles.setdefault("-1", UNLABELLED)
    rest = [name for name in counts if name not in roles]
    if not sides and all(name in PLAIN for name in rest):
        roles.update({name: PLAIN[name] for name in rest})
        return
    kept = [name for name in counts if roles.get(name) not in (EXCLUDED, UNLABELLED)]
    if rest and missing:
        word, item = missing[0]
        raise ValueError(
            f"labels: {word}={item!r} is not among the classes found, {_list_counts(counts)}."
        )
    if rest and (len(kept) > 2 or not sides or len(rest) > 1):
        raise ValueError(_describe_unsaid(asked, counts, rest))
    if rest:
        roles[rest[0]] = NEGATIVE if sides == ["positive"] else POSITIVE
    alone = len({roles[name] for name in kept}) == 1
    if len(sides) == 1 and alone and roles.get("-1") == UNLABELLED:
        other = "negative" if sides == ["positive"] else "positive"
        raise ValueError(
            f"labels: the classes are {_list_counts(counts)}, and -1 means unlabelled here. Say "
            f"{other}='-1' if it is the {other} class, exclude='-1' if those are unlabelled."
        )


def _class_names(classes: Found, asked: Mapping[str, Request]) -> tuple[str, str]:
    """Names of classes 0 and 1, also where no label is of one of them."""

    def name(word: str) -> str:
        return named(classes, WORDS[word]) or ",".join(item for item, _ in asked[word])

    negative, positive = name("negative"), name("positive")
    return negative or f"not {positive}", positive or f"not {negative}"


# ------------------------------------------------------------------ in words


def described(classes: Found) -> str:
    """Classes with counts and roles in one line.

    >>> described({"Benign": (14, "negative"), "1": (2, "positive")})
    "Benign 14 (negative), '1' 2 (positive)"
    """
    return ", ".join(
        f"{name if name.isalpha() else repr(name)} {n:,} ({role})"
        for name, (n, role) in classes.items()
    )


def named(classes: Mapping[str, Any], role: str) -> str | None:
    """The name of the class with a role, several with commas between; None without any.

    >>> named({"3": (9, "positive"), "4": (2, "positive")}, "positive")
    '3,4'
    """
    return ",".join(_with_role(classes, role)) or None


def of_one_class(classes: Found) -> str:
    """A warning where all labels are of one class; else nothing.

    >>> of_one_class({"1": (16, "positive"), "-1": (2, "unlabelled")})
    'all 16 labelled slides are positive: a model needs both classes.'
    """
    there = {role: sum(n for n, own in classes.values() if own == role) for role in CODES}
    sides = [role for role in (POSITIVE, NEGATIVE) if there[role]]
    if len(sides) != 1:
        return ""
    return f"all {there[sides[0]]:,} labelled slides are {sides[0]}: a model needs both classes."


def of_codes(labels: Int[np.ndarray, " n"], names: tuple[str, str] | None = None) -> Found:
    """Classes of labels 0 and 1, which may have names.

    >>> of_codes(np.array([0, 1, 1, -1]))
    {'1': (2, 'positive'), '0': (1, 'negative')}
    """
    negative, positive = names or ("0", "1")
    found = {positive: (int((labels == 1).sum()), POSITIVE)}
    found[negative] = (int((labels == 0).sum()), NEGATIVE)
    return {name: (n, role) for name, (n, role) in found.items() if n}


def _describe_unsaid(
    asked: Mapping[str, Request], counts: Mapping[str, int], rest: list[str]
) -> str:
    how_many = f"{len(counts)} class{'es' if len(counts) > 1 else ''}"
    words = ", ".join(f"{word}={said!r}" for word, said in example(asked, counts).items())
    found = f"labels: found {how_many}: {_list_counts(counts)}."
    if not any(asked.values()):
        found = f"labels: expected 0 and 1 (-1 or empty: unlabelled), {found[8:]}"
    what = f"what {join_words([repr(name) for name in rest])} {'is' if len(rest) == 1 else 'are'}"
    if len(counts) <= 2:
        return f"{found} Say which one is positive, as in {words}."
    return (
        f"{found} Say {what}, as in {words}. Grades or types can be kept apart, too: "
        "gpmil.OrdinalMIL, gpmil.NominalMIL (gpmil fit --task ordinal, --task nominal)."
    )


def example(asked: Mapping[str, Request], counts: Mapping[str, int]) -> dict[str, str]:
    """Words that would do, such as {"positive": "tumour", "exclude": "unknown"}."""
    roles, _ = _assign_named(asked, counts)
    rest = [name for name in counts if name not in roles and name != "-1"]
    sure = [name for name in rest if not DOUBTFUL.search(fold(name))] or rest
    rising = all(_number(name) is not None for name in sure)
    grades = rising and len(sure) > 2 and not {POSITIVE, NEGATIVE} & set(roles.values())
    if POSITIVE not in roles.values():
        ill = [name for name in sure if not HEALTHY.search(fold(name))] or sure
        highest = sure[1:] if grades else ill[-1:] if rising else ill[:1]
        if len(ill) < len(sure) and len(sure) > 2:  # one is healthy: the others may be grades
            highest = ill
        roles |= dict.fromkeys(highest, POSITIVE)
    roles |= {name: NEGATIVE for name in sure if name not in roles}
    roles |= {name: EXCLUDED for name in rest if name not in roles}
    said = {word: write_list([n for n in counts if roles.get(n) == WORDS[word]]) for word in WORDS}
    if grades:
        said |= {"positive": f">={sure[1]}", "negative": f"<{sure[1]}"}
    if len(counts) == 2 and not said["exclude"]:
        del said["negative"]
    return {word: items for word, items in said.items() if items}


def write_list(names: Sequence[str]) -> str:
    """Names with commas between, as `_read_request` takes them apart."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names)
    return line.getvalue()


def _with_role(classes: Mapping[str, Any], role: str) -> list[str]:
    return [name for name, (_, own) in classes.items() if own == role]


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} ({n:,})" for name, n in counts.items())


def join_words(words: Sequence[str]) -> str:
    """Words as a sentence lists them.

    >>> join_words(["a", "b", "c"]), join_words(["a"]), join_words([])
    ('a, b and c', 'a', '')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# ------------------------------------------------------------------ two tables


def refuse_other_classes(known: Mapping[str, Any], given: Found, whose: str) -> str:
    """Refuse labels whose positive class is not that of `known`; a note where names do not tell.

    >>> fitted = {"LUAD": (9, "positive"), "LUSC": (7, "negative")}
    >>> refuse_other_classes(fitted, {"lusc": (3, "positive")}, "the model")
    Traceback (most recent call last):
    ValueError: labels: 'lusc' is positive here, ... is 'LUAD' (and negative 'LUSC')...
    """
    was, now = _sides(known), _sides(given)
    turned = (now[POSITIVE] & was[NEGATIVE]) | (now[NEGATIVE] & was[POSITIVE])
    shared = (now[POSITIVE] & was[POSITIVE]) | (now[NEGATIVE] & was[NEGATIVE])
    if not any(was.values()) or not any(now.values()) or (shared and not turned):
        return ""
    words = [", ".join(repr(n) for n in _with_role(c, r)) for c in (known, given) for r in was]
    plain = {"0.0", "1.0"}
    coded = [side[POSITIVE] | side[NEGATIVE] <= plain for side in (was, now)]
    if not turned and any(coded):
        return f"{words[2] or 'none'} is taken for the positive class of {whose}, {words[0]}."
    raise ValueError(
        f"labels: {words[2] or 'none'} is positive here, but the positive class of {whose} is "
        f"{words[0] or 'none'}{f' (and negative {words[1]})' if words[1] else ''}. Nothing was "
        f"written. Name the same class with positive=, or rename it in the table."
    )


def _sides(classes: Mapping[str, Any]) -> dict[str, set[str]]:
    return {r: {fold(name) for name in _with_role(classes, r)} for r in (POSITIVE, NEGATIVE)}
