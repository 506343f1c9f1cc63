"""Commands as users call them, and a small table to call them with."""

from pathlib import Path

import numpy as np
import pandas as pd
from typer.testing import CliRunner

from gpmil.cli import app


def write_table(path: Path, n_slides=18, n_features=4, seed=5, **columns) -> Path:
    """A cohort in a table of patches: 3 x 3 patches per slide, two slides per patient."""
    rng = np.random.default_rng(seed)
    rows = []
    for b in range(n_slides):
        for k in range(9):
            malignant = int(b % 2 and k in (0, 1, 3))
            row = {"slide": f"s{b:02d}", "label": b % 2, "patient": f"p{b // 2}"}
            row |= {"patch_label": malignant, "x": 10 * (k % 3), "y": 10 * (k // 3)}
            features = rng.normal(2.1 * malignant, 1, n_features)
            row |= {f"f{d}": round(v, 6) for d, v in enumerate(features)}
            rows.append(row | {name: of(b) for name, of in columns.items()})
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="gpmil")


def ran(*arguments) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout
