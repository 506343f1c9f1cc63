"""A small cohort with two runs, served by the viewer, and a browser to look at it with."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.ndimage import gaussian_filter, zoom
from typer.testing import CliRunner

from gpmil.cli import app
from gpmil.runs import judge
from gpmil.runs.files import patch_file

SCRIPT = "<img src=x onerror=alert(1)>"
STEP, SIDE = 64, 14  # pixels of a patch; the lattice is SIDE x SIDE
FIXED = ["--variance", "2.3", "--lengthscale", "2.2", "--mean", "-1.4", "--n-inducing", "40"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Place:
    """Folders of a cohort: its runs, and the slides' pictures."""

    folder: Path

    @property
    def runs(self) -> list[Path]:
        return [self.folder / "couplings", self.folder / "fit"]

    @property
    def slides(self) -> Path:
        return self.folder / "slides"

    def patches(self, slide: str, coupling: str) -> pd.DataFrame:
        """A table of patches as text, digit by digit."""
        under = self.runs[0] / "patches" / f"coupling-{coupling}"
        return pd.read_csv(under / patch_file(slide), dtype=str, keep_default_na=False)

    def predictions(self, coupling: str) -> pd.DataFrame:
        """Rows of the first run at one coupling."""
        table = pd.read_csv(self.runs[0] / "predictions.csv", dtype={"coupling": str})
        return table[table["coupling"] == coupling].reset_index(drop=True)


def tissue(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Cells of a round piece of tissue, and which of them lie near one point in it."""
    cells = np.argwhere(np.ones((SIDE, SIDE), dtype=bool))
    away = np.linalg.norm((cells - (SIDE - 1) / 2) / rng.uniform(0.75, 1.0, 2), axis=1)
    cells = cells[away + rng.normal(0, 0.5, len(cells)) < SIDE / 2]
    centre = cells[rng.integers(len(cells))]
    near = np.linalg.norm(cells - centre, axis=1) < rng.uniform(1.6, 3.1)
    return cells, near


def write_cohort(path: Path, n_slides: int = 26, n_features: int = 5, seed: int = 9) -> None:
    """A table of patches; odd slides have a lesion, the last one a name that is markup."""
    rng = np.random.default_rng(seed)
    tables = []
    for b in range(n_slides):
        cells, near = tissue(rng)
        malignant = near.astype(int) * (b % 2)
        features = rng.normal(size=(len(cells), n_features)) + 0.9 * malignant[:, None]
        frame = pd.DataFrame(features.round(5), columns=[f"f{d}" for d in range(n_features)])
        name = SCRIPT if b == n_slides - 1 else f"slide-{b:02d}"
        head = {"slide": name, "label": b % 2, "patient": f"patient-{b // 2}"}
        head |= {"patch_label": malignant, "x": STEP * cells[:, 0], "y": STEP * cells[:, 1]}
        tables.append(frame.assign(**head))
    pd.concat(tables).to_csv(path, index=False)


def write_slides(folder: Path, cohort: pd.DataFrame) -> None:
    """Pictures of two slides: pink tissue where patches are, crowded dark dots in the lesion."""
    from PIL import Image

    folder.mkdir()
    rng = np.random.default_rng(8)
    for name in ("slide-01", "slide-13"):
        cells = np.zeros((2, SIDE + 2, SIDE + 2))  # tissue and lesion, row by row, with a border
        rows = cohort[cohort["slide"] == name]
        at = rows["y"] // STEP + 1, rows["x"] // STEP + 1
        cells[0][at], cells[1][at] = 1, rows["patch_label"]
        tissue, lesion = (zoom(c, STEP, order=1)[STEP:-STEP, STEP:-STEP] for c in cells)
        dots = rng.random(tissue.shape) < 0.0012 + 0.004 * (lesion > 0.4)
        nuclei = gaussian_filter(dots.astype(float), 2.2) > 0.008
        waves = gaussian_filter(rng.normal(size=tissue.shape), 9) * 260
        pink = np.array([224, 158, 196]) + waves[..., None]
        pixels = np.where((tissue > 0.35)[..., None], pink, 243.0)
        pixels[nuclei & (tissue > 0.35)] = [104, 66, 140]
        pixels = gaussian_filter(pixels, (0.7, 0.7, 0)) + rng.normal(0, 3, pixels.shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{name}.png")


def ran(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="gpmil")
    assert result.exit_code == 0, result.output + repr(result.exception)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Runs of `fit` and of `predict` with two couplings, the second that of the fit."""
    folder = tmp_path_factory.mktemp("viewer")
    write_cohort(folder / "cohort.csv")
    write_slides(folder / "slides", pd.read_csv(folder / "cohort.csv"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "RESAMPLES", 20)
        for command in ("fit", "predict"):
            patch.setattr(f"gpmil.cli.{command}.write_report", lambda folder: None)
        settings = ["--coupling", "0.6", *FIXED, "--flags", "--calibrated", "--n-folds", "3"]
        data = folder / "cohort.csv"
        ran(
            "fit",
            data,
            "--out",
            folder / "fit",
            *settings,
            "--alpha",
            "0.2",
            "--interval-patches",
            "0",
        )
        couplings = ["--coupling", "0,0.6", "--alpha", "0.2", "--interval-patches", "130"]
        ran("predict", folder / "fit", data, "--out", folder / "couplings", *couplings)
    return Place(folder)


@contextmanager
def serving(runs: list[Path], slides: Path) -> Iterator[str]:
    """The viewer's address while it answers, in a thread of its own."""
    pytest.importorskip("fastapi", reason="the viewer needs fastapi: pip install 'gpmil[viewer]'")
    uvicorn = pytest.importorskip("uvicorn", reason="the viewer needs uvicorn")
    from gpmil.viewer import serve

    served = serve.prepare(runs, slides)
    config = uvicorn.Config(served.app, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([served.listening],), daemon=True)
    thread.start()
    yield served.url
    server.should_exit = True
    thread.join(timeout=10)
    served.listening.close()


@pytest.fixture(scope="session")
def address(place: Place) -> Iterator[str]:
    """The viewer with all runs."""
    with serving(place.runs, place.slides) as url:
        yield url


@pytest.fixture
def lesson(place: Place, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The viewer with a run of its own, which may be taught, and that run."""
    run = shutil.copytree(place.folder / "fit", tmp_path / "fit")
    with serving([run], place.slides) as url:
        yield url, run


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """The system's Chromium without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of the page go: GPMIL_SCREENSHOTS, or a folder that is thrown away."""
    given = os.environ.get("GPMIL_SCREENSHOTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
