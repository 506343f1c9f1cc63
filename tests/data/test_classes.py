"""Classes of labels: what is positive, negative, left out; and that nothing is so silently."""

import ast
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gpmil.data import classes
from gpmil.data.classes import encode, fold, text

WORDS = st.sampled_from(["LUAD", "luad", "Lusc", "benign ", "unknown", "n/a", "a, b", "x'y", '"q"'])
NUMBERS = st.sampled_from([0, 1, 2, 3, 4.0, "2", "3.0", 2.5, True])
MISSING = st.sampled_from([None, float("nan"), "", "  "])
LABELS = st.lists(st.one_of(WORDS, NUMBERS, MISSING), min_size=1, max_size=30)


def counts_of(values) -> Counter:
    return Counter(fold(text(v)) for v in values if text(v) is not None)


# ------------------------------------------------------------------ properties


@given(st.text(st.characters(codec="ascii"), min_size=1))
def test_folding_twice_is_folding_once(name):
    assume(text(name) is not None)
    once = " ".join(name.split())
    assert fold(once) == fold(f"  {once} ") == fold(once.upper())


@given(LABELS)
@example(["a", "b", "unknown"])
def test_no_class_becomes_negative_without_a_word(values):
    """One class named: the others count as negative only if there is just one of them."""
    kinds = counts_of(values)
    for kind in {text(v) for v in values} - {None}:
        others = [name for name in kinds if name != fold(kind)]
        if len(others) > 1:
            with pytest.raises(ValueError, match=f"found {len(kinds)} classes"):
                encode(values, positive=[kind])
            continue
        found = encode(values, positive=[kind])
        missing = [text(v) is None for v in values]
        expected = [-1 if m else int(fold(text(v)) == fold(kind)) for v, m in zip(values, missing)]
        assert found.values.tolist() == expected


@given(LABELS)
def test_the_example_of_an_error_would_do(values):
    try:
        encode(values)
    except ValueError as error:
        said = dict(re.findall(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")", str(error)))
        found = encode(values, **{word: ast.literal_eval(value) for word, value in said.items()})
        assert sum(n for n, _ in found.classes.values()) == sum(counts_of(values).values())
        assert (found.values == 1).any()


@given(LABELS, st.randoms())
def test_every_label_is_counted_once(values, random):
    """Roles given to all classes at random are the ones found."""
    kinds = list(dict.fromkeys(fold(text(v)) for v in values if text(v) is not None))
    role = {kind: random.choice(["positive", "negative", "exclude"]) for kind in kinds}
    asked = {
        word: [text(v) for v in values if text(v) and role[fold(text(v))] == word] or None
        for word in ("positive", "negative", "exclude")
    }
    assume(asked["positive"] and asked["negative"])
    found = encode(values, **asked)
    for value, code in zip(values, found.values):
        word = None if text(value) is None else role[fold(text(value))]
        assert code == {"positive": 1, "negative": 0}.get(word, -1)
    by_role = Counter()
    for n, kind in found.classes.values():
        by_role[kind] += n
    assert by_role["positive"] == (found.values == 1).sum()
    assert by_role["negative"] == (found.values == 0).sum()
    assert (found.values >= 0).sum() + by_role["left out"] == sum(counts_of(values).values())


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 9))
def test_comparisons_are_those_of_numbers(values, bound):
    found = encode(values, positive=f">={bound}", negative=f"< {bound}")
    assert found.values.tolist() == [int(v >= bound) for v in values]


# ------------------------------------------------------------------ cases


def test_the_label_table_of_a_lab():
    kinds = ["Adenocarcinoma"] * 12 + ["ADENOCARCINOMA"] * 4 + ["Benign"] * 14 + ["unknown"] * 3
    with pytest.raises(ValueError) as caught:
        encode(kinds, positive="Adenocarcinoma")
    assert "'Adenocarcinoma' (16), 'Benign' (14), 'unknown' (3)" in str(caught.value)
    assert "positive='Adenocarcinoma', negative='Benign', exclude='unknown'" in str(caught.value)
    found = encode(kinds, positive="adenocarcinoma", exclude="unknown")
    assert found.values.tolist() == [1] * 16 + [0] * 14 + [-1] * 3
    assert found.names == ("Benign", "Adenocarcinoma")
    assert classes.described(found.classes) == (
        "Adenocarcinoma 16 (positive), Benign 14 (negative), unknown 3 (left out)"
    )
    assert found.notes == (
        "'Adenocarcinoma' (12) and 'ADENOCARCINOMA' (4) are taken as one class, 'Adenocarcinoma'.",
    )


def test_a_word_that_is_misspelt_is_no_permission():
    with pytest.raises(ValueError, match=r"exclude='unknwon' is not among .*'unknown' \(1\)"):
        encode(["a", "unknown"], positive="a", exclude="unknwon")
    found = encode(["b", "b"], positive="a", negative="b")
    assert found.values.tolist() == [0, 0] and found.names == ("b", "a")
    assert found.notes == ("positive='a' is not among the classes found.",)


def test_names_with_commas():
    kinds = ["Adenocarcinoma, NOS", "Benign", "Squamous, NOS"]
    found = encode(kinds, positive="Adenocarcinoma, NOS", negative='Benign,"Squamous, NOS"')
    assert found.values.tolist() == [1, 0, 0]


def test_minus_one_is_never_caught_by_a_comparison():
    found = encode([0, 1, 2, -1], positive=">=1", negative="<1")
    assert found.values.tolist() == [0, 1, 1, -1]
    with pytest.raises(ValueError, match="-1 means unlabelled here"):
        encode([3, 4, -1], positive=">=3")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"positive": ""}, "expected a class"),
        ({"positive": []}, "expected a class"),
        ({"positive": "a", "negative": "a"}, "'a' is named twice, by positive= and by negative="),
        ({"positive": ">=1"}, "positive='>=1' is not among"),
        ({"exclude": "c"}, "found 3 classes"),
    ],
)
def test_what_cannot_be_meant(asked, message):
    with pytest.raises(ValueError, match=message):
        encode(["a", "b", "c"], **asked)


def test_one_class_alone_is_said():
    assert "all 2 labelled slides are positive" in classes.of_one_class(encode([1, 1, -1]).classes)
    assert "all 1 labelled slides are negative" in classes.of_one_class(encode([0]).classes)
    assert classes.of_one_class(encode([0, 1]).classes) == ""
    assert classes.of_one_class(encode([-1, None]).classes) == ""


FITTED = {"LUAD": [9, "positive"], "LUSC": [7, "negative"], "other": [1, "left out"]}


@pytest.mark.parametrize("given", [{"LUSC": (3, "positive")}, {"luad": (3, "negative")}])
def test_classes_that_changed_sides(given):
    with pytest.raises(ValueError, match="positive class of the model is 'LUAD'"):
        classes.refuse_other_classes(FITTED, given, "the model")


def test_classes_that_agree_or_cannot_be_compared():
    luad = {"Luad": (3, "positive"), "normal": (2, "negative")}
    assert classes.refuse_other_classes(FITTED, luad, "the model") == ""
    assert classes.refuse_other_classes({}, luad, "the model") == ""
    assert classes.refuse_other_classes(FITTED, {}, "the model") == ""
    coded = classes.of_codes(np.array([0, 1]))
    assert "'1' is taken for" in classes.refuse_other_classes(FITTED, coded, "the model")
    with pytest.raises(ValueError, match="'cancer' is positive here"):
        classes.refuse_other_classes(FITTED, {"cancer": (2, "positive")}, "the model")
