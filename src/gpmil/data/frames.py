"""A table with one row per instance, read for ``Bags.from_frame``.

Columns are found by name (some may be absent, which is logged), rows are brought together bag
by bag, and columns that hold one value per bag are checked to do so.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from gpmil.data.checks import all_columns, count, factorize, listed, offsets_of, refuse_same_names
from gpmil.data.neighbours import bag_index

logger = logging.getLogger("gpmil")


def read(
    df: Any,
    bag: str,
    label: str | None,
    features: str | Sequence[str] | None,
    coords: str | Sequence[str] | None,
    group: str | None,
    instance_label: str | None,
) -> dict[str, Any]:
    """What the columns of a table are to `Bags`, by the names of its arguments."""
    table = Table(df, bag)
    label = table.label_column(label)
    axes = table.coord_columns(coords)
    used = [c for c in (bag, label, group, instance_label, *axes) if c is not None]
    return {
        "features": table.numbers(table.feature_columns(features, used), "features"),
        "offsets": table.offsets,
        "labels": table.constant(label, "label"),
        "names": table.names,
        "groups": table.constant(group, "group"),
        "coords": table.numbers(axes, "coords") if axes else None,
        "instance_labels": table.column(instance_label, "instance_label"),
    }


class Table:
    """A table with one row per instance: bags by first appearance, rows of a bag in order."""

    def __init__(self, df: Any, bag: str) -> None:
        self.df = _as_frame(df)
        self.require([bag], "bag")
        codes, names = factorize(self.df[bag], "bag")
        if (codes < 0).any():
            raise ValueError(f"bag: {count(int((codes < 0).sum()), 'row')} without {bag!r}")
        self.order = np.argsort(codes, kind="stable")
        self.offsets = offsets_of(np.bincount(codes))
        self.names = np.array([str(name) for name in names])
        refuse_same_names(self.names)

    def require(self, columns: Sequence[Any], argument: str) -> None:
        """Raise ValueError if a column is missing, listing those there are."""
        missing = [c for c in columns if c not in self.df.columns]
        if missing:
            raise ValueError(
                f"{argument}: no column {listed(missing)}; the columns are "
                f"{all_columns(self.df.columns)}"
            )

    def label_column(self, label: str | None) -> str | None:
        """The label column; the default one may be absent, and that is said."""
        if label == "label" and label not in self.df.columns:
            logger.warning('no column "label": the bags are unlabelled')
            return None
        return label

    def coord_columns(self, coords: str | Sequence[str] | None) -> list[str]:
        """The coordinate columns; the default pair may be absent, and that is said."""
        if coords is None:
            return []
        axes = [coords] if isinstance(coords, str) else list(coords)
        if axes == ["x", "y"] and not {"x", "y"} & set(self.df.columns):
            logger.warning('no columns "x" and "y": the instances have no positions')
            return []
        self.require(axes, "coords")
        return axes

    def feature_columns(self, features: str | Sequence[str] | None, used: list[str]) -> list[str]:
        """Columns given, those with a beginning, or (said) all numeric ones not used otherwise."""
        if features is None:
            columns = [c for c in self.df.select_dtypes("number").columns if c not in used]
            if columns:
                many, ends = count(len(columns), "numeric column"), (columns[0], columns[-1])
                logger.warning("features: %s not named otherwise, '%s' to '%s'", many, *ends)
        elif isinstance(features, str):
            columns = [c for c in self.df if str(c).startswith(features) and c not in used]
        else:
            columns = list(features)
            self.require(columns, "features")
        if not columns:
            what = "numeric columns" if features is None else f"columns {features!r}..."
            raise ValueError(f"features: expected {what}, found none")
        return columns

    def column(self, name: str | None, argument: str) -> np.ndarray | None:
        """A column, bag after bag, (N,)."""
        if name is None:
            return None
        self.require([name], argument)
        return np.asarray(self.df[name])[self.order]

    def constant(self, name: str | None, argument: str) -> np.ndarray | None:
        """A column with one value per bag, (B,)."""
        values = self.column(name, argument)
        if values is None:
            return None
        bag, first = bag_index(self.offsets), self.offsets[:-1]
        codes, _ = factorize(values, argument)
        differs = np.unique(bag[codes != codes[first][bag]])
        if len(differs):
            raise ValueError(
                f"{argument}: expected one {name!r} per bag, bag '{self.names[differs[0]]}' has "
                f"{listed(values[bag == differs[0]])} ({count(len(differs), 'such bag')})"
            )
        return values[first]

    def numbers(self, columns: list[str], argument: str) -> np.ndarray:
        """Numeric columns, bag after bag, (N, columns)."""
        part = self.df[columns]
        text = [c for c in columns if not pd.api.types.is_numeric_dtype(part[c])]
        if text:
            raise ValueError(f"{argument}: columns that are not numbers: {listed(text)}")
        if any(isinstance(t, pd.api.extensions.ExtensionDtype) for t in part.dtypes):
            part = part.astype(np.float64)
        return part.to_numpy()[self.order]


def _as_frame(df: Any) -> pd.DataFrame:
    """A DataFrame with rows, and with columns that can be told apart."""
    if not isinstance(df, pd.DataFrame):
        raise ValueError(f"df: expected a pandas DataFrame, found {type(df).__name__}")
    twice = df.columns[df.columns.duplicated()]
    if len(twice):
        raise ValueError(f"df: columns that share a name: {listed(twice)}")
    if len(df) == 0:
        raise ValueError("df: expected one row per instance, found no rows")
    return df
