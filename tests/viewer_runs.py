"""Runs for the tests of the viewer, written by hand: any names, any positions."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil.runs.files import PATCHES, PREDICTIONS, patch_file
from gpmil.runs.workspace import csv_bytes

NASTY = '<img src=x onerror="alert(1)">'


def patches(n: int, seed: int, *, step=256.0, side: int = 0, label: bool = True) -> pd.DataFrame:
    """A table of patches in rows of `side`, off the origin; some labels unknown."""
    rng = np.random.default_rng(seed)
    side = side or int(np.ceil(np.sqrt(n)))
    cell = np.arange(n)
    frame = pd.DataFrame(
        {
            "x": 1000 + step * (cell % side),
            "y": 700 + step * (cell // side),
            "probability": rng.beta(0.7, 3, n),
            "sd": rng.gamma(2, 0.3, n),
            "p_value": rng.random(n),
        }
    )
    frame["flagged"] = (frame["p_value"] < 0.3).astype(int)
    if label:
        frame["label"] = rng.choice(["0", "1", ""], n)
    return frame


def with_grades(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The same patches with probabilities of three grades."""
    p = np.random.default_rng(seed).dirichlet([2, 1, 1], len(table)).round(6)
    return table.assign(**{"P(benign)": p[:, 0], "P(3)": p[:, 1], "P(4)": p[:, 2]}).assign(
        expected_grade=p @ np.arange(3)
    )


def write_grades(folder: Path, slides: list[str]) -> pd.DataFrame:
    """grades.csv of a run: calls go round, the truth is one further where it is known."""
    names, k = np.array(["benign", "3", "4"]), np.arange(len(slides))
    p = np.full((len(slides), 3), 0.2)
    p[k, k % 3] = 0.6
    truth = np.where(k % 4 == 3, "", names[(k + k % 2) % 3])
    table = pd.DataFrame({"slide": slides, "P(benign)": p[:, 0], "P(3)": p[:, 1], "P(4)": p[:, 2]})
    table = table.assign(call=names[k % 3], grade=truth)
    (folder / "grades.csv").write_bytes(csv_bytes(table))
    return table


def write_run(
    folder: Path,
    tables: dict[str, pd.DataFrame | None],
    *,
    seed: int = 3,
    couplings: tuple[str, ...] = (),
    repeats: int = 1,
    labels: bool = True,
    **config: Any,
) -> Path:
    """A run folder as gpmil writes it; a slide without a table has no patches."""
    rng = np.random.default_rng(seed)
    rows = []
    for coupling in couplings or ("",):
        for repeat in range(repeats):
            for b, slide in enumerate(tables):
                row = {"slide": slide, "patient": f"p{b // 2}"}
                row |= {"coupling": coupling} if couplings else {}
                row |= {"repeat": repeat, "fold": b % 3} if repeats > 1 else {}
                p = float(rng.beta(2, 2))
                row |= {"probability": p, "low": p / 2, "high": (1 + p) / 2}
                row |= {"log_odds": np.log(p / (1 - p)), "decision": ["accept", "refer"][b % 2]}
                rows.append(row | {"label": str(b % 2) if labels else ""})
    folder.mkdir(parents=True)
    rows[0]["low"] = rows[0]["high"] = np.nan  # a slide too large for an interval
    (folder / PREDICTIONS).write_bytes(csv_bytes(pd.DataFrame(rows)))
    for k, coupling in enumerate(couplings or ("",)):
        place = folder / PATCHES / (f"coupling-{coupling}" if coupling else "")
        place.mkdir(parents=True)
        for slide, table in tables.items():
            if table is not None:
                own = table.assign(probability=table["probability"] ** (k + 1))
                packed = gzip.compress(csv_bytes(own), mtime=0)
                (place / patch_file(slide)).write_bytes(packed)
    card: dict[str, Any] = {"format": "gpmil-run", "command": "predict"}
    card |= {"model": {"class": "VGPMILPRI", "settings": {"coupling": 0.7}}}
    card |= {"options": {"asked": {"rate": 0.2}, "source": {"positive": "cancer"}}}
    (folder / "config.json").write_text(json.dumps(card | config))
    return folder
