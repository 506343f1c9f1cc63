"""grades.csv or classes.csv of a run: a probability per grade or type of every slide, and a call.

Nothing here needs the model or torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from gpmil.data.classes import fold
from gpmil.files.foreign import BadFile
from gpmil.runs.files import SHARE, class_columns, read_table, with_numbers
from gpmil.runs.naming import shown
from gpmil.show.classes import ClassLayer

GRADES, CLASSES = "grades.csv", "classes.csv"
TRUTH = {GRADES: "grade", CLASSES: "class"}  # the column with what is known


@dataclass(frozen=True)
class ClassTable:
    """The slides of a run, the classes in their order, and the file, which tells what they are."""

    rows: pd.DataFrame
    names: list[str]
    file: str  # GRADES, in an order, or CLASSES

    @classmethod
    def read(cls, folder: Path) -> "ClassTable | None":
        """What a run says; None where its slides have two classes."""
        for name in TRUTH:
            file = Path(folder) / name
            if file.is_file():
                frame = read_table(file, f"a table of {name.removesuffix('.csv')}", TOLD)
                columns = class_columns(frame)
                frame = with_numbers(frame, dict.fromkeys(columns.values(), SHARE), file)
                found = cls(frame, list(columns), name)
                found.check(file)
                return found
        return None

    def check(self, file: Path) -> None:
        """A BadFile where calls are no class, or probabilities are none."""
        if len(self.names) < 2 or not self.rows["call"].isin(self.names).all():
            raise BadFile(f"{file}: calls and columns P(...) differ: was it changed by hand?")
        total = self.rows[list(class_columns(self.rows).values())].sum(axis=1, skipna=False)
        if not np.allclose(total, 1, atol=1e-3):
            raise BadFile(f"{file}: probabilities of a slide do not sum to 1: changed by hand?")

    @property
    def truth(self) -> str:
        """The column with what is known: grade or class."""
        return TRUTH[self.file]

    @property
    def ordered(self) -> bool:
        """Whether classes are grades, the lowest first."""
        return self.file == GRADES

    @property
    def p(self) -> Float[np.ndarray, "B K"]:
        """The probabilities; rows sum to 1 but for what was written."""
        found = self.rows[list(class_columns(self.rows).values())].to_numpy(dtype=np.float64)
        return found / found.sum(1, keepdims=True)

    def codes(self, column: str) -> Int[np.ndarray, " B"]:
        """Classes as numbers, in their order."""
        place = {name: k for k, name in enumerate(self.names)}
        return self.rows[column].map(place).to_numpy(dtype=np.int64)

    def known(self) -> "ClassTable":
        """The slides whose class is known."""
        if self.truth not in self.rows:
            return replace(self, rows=self.rows.iloc[:0])
        return replace(self, rows=self.rows[self.rows[self.truth].isin(self.names)])

    def told(self, words: Mapping[str, str | None]) -> "ClassTable":
        """With the classes of slides as a table of labels has them, by slide."""
        names = {fold(name): name for name in self.names}
        said = [words.get(slide) for slide in self.rows["slide"]]
        column = ["" if word is None else names.get(fold(word), word) for word in said]
        return replace(self, rows=self.rows.assign(**{self.truth: column}))

    def in_words(self, slide: str) -> str:
        """The call of a slide with all probabilities; "" where the table has no such slide."""
        own = self.rows[self.rows["slide"] == slide]
        if not len(own):
            return ""
        row = own.iloc[0]
        each = [f"{name} {shown(float(row[f'P({name})']))}" for name in self.names]
        said = f"{self.truth}: called {row['call']} ({', '.join(each)})"
        true = str(row.get(self.truth) or "")
        return f"{said}; is {true}" if true else said


TOLD = ("slide", "call")  # columns that are always there


def class_layer(patches: pd.DataFrame) -> ClassLayer | None:
    """Grades or types in a table of patches; None where it has none."""
    found = class_columns(patches)
    if len(found) < 2:
        return None
    p = patches[list(found.values())].to_numpy(dtype=np.float64)
    return ClassLayer(tuple(found), p, "expected_grade" in patches)


def counted(column: Any, names: list[str]) -> str:
    """How many slides are of which class.

    >>> counted(["3", "benign", "3"], ["benign", "3", "4"])
    'benign 1, 3 2, 4 0'
    """
    said = list(column)
    return ", ".join(f"{name} {said.count(name)}" for name in names)
