"""How soon does the viewer's map answer a mark? A cohort of SICAPv2 size, one mark after another.

    python benchmarks/viewer_teaching.py --slides 95

Simulated slides (some 160 patches with 128 features each) are fitted with `gpmil fit` at given
settings; then patches are marked twice. First by the viewer's own requests, without the network:
the request that keeps a mark on the disk, and the taught map (update, prediction of the slide,
encoding). Then, where Chromium is installed, by key t or n over the page: from the key to the first
frame with the taught map. The bar is one second; the first mark also imports torch and reads the
data. Processor time is that of this process, the server and what drives the browser: other load on
the machine makes answers later, and leaves it nearly as it is.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fastapi.testclient import TestClient
from typer.testing import CliRunner
from viewer_page import browser_here, opened_page

import gpmil
from gpmil.cli import app
from gpmil.runs.files import MARKS
from gpmil.viewer import cohort as cohorts
from gpmil.viewer.app import build
from gpmil.viewer.security import door

BAR = 1.0  # seconds
OURS = {"origin": "http://127.0.0.1:8000"}
SETTINGS = ["--variance", "2", "--lengthscale", "11.3", "--mean", "-1.5", "--coupling", "0.5"]
SETTINGS += ["--slide-effect", "1", "--n-inducing", "200", "--interval-patches", "0"]
# A pinned patch is marked by its key; the pane says which map it has once it has been drawn.
MARKED = """async key => {
  const frame = () => new Promise(requestAnimationFrame);
  const pane = document.querySelector('.pane');
  const [before, start] = [pane.dataset.loaded, performance.now()];
  document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  while (!pane.dataset.loaded || pane.dataset.loaded === before) await frame();
  await frame(); await frame();
  return (performance.now() - start) / 1000;
}"""


def fitted(folder: Path, n_slides: int) -> Path:
    """A run of `gpmil fit` on simulated slides."""
    bags = gpmil.simulate.cohort(n_slides, 3 * n_slides // 4, seed=0, mean_size=161.7)
    x, y = bags.coords.T
    np.savez(folder / "c.npz", X=bags.features, bag=bags.bag_index, y_bag=bags.labels,
             bag_id=bags.names, x=x, y=y)  # fmt: skip
    result = CliRunner().invoke(
        app, ["fit", str(folder / "c.npz"), "--out", str(folder / "run"), *SETTINGS]
    )
    assert result.exit_code == 0, result.output
    print(f"{len(bags)} slides, {bags.n_instances:,} patches")
    return folder / "run"


def said(what: str, drawn: Sequence[float], worked: Sequence[float]) -> None:
    print(f"{what}: first {drawn[0]:.2f} s, then median {np.median(drawn[1:]):.3f} s, "
          f"longest {max(drawn[1:]):.3f} s; bar {BAR:g} s. Processor time: median "
          f"{np.median(worked[1:]):.3f} s, longest {max(worked[1:]):.3f} s")  # fmt: skip


def by_requests(run: Path, marks: int) -> list[str]:
    """Marks by the viewer's requests; the names of the slides that were marked."""
    web = build(cohorts.open_cohort([run]), door("127.0.0.1"))
    page = TestClient(web, base_url="http://127.0.0.1:8000")
    columns = page.get("/api/cohort").json()["columns"]
    slides = [k for k, label in enumerate(columns["label"]) if label == 1]
    kept, drawn, worked = [], [], []
    for k in range(marks):
        slide = slides[k % 7]
        body = {"slide": slide, "indices": [k], "label": k % 2, "who": "", "window": "w"}
        start = time.perf_counter()
        assert page.post("/api/marks/0", json=body, headers=OURS).status_code == 200
        middle, before = time.perf_counter(), time.process_time()
        answer = page.get(f"/api/taught/0/{slide}")
        assert answer.status_code == 200, answer.text
        kept.append(middle - start)
        drawn.append(time.perf_counter() - middle)
        worked.append(time.process_time() - before)
    print(f"a mark on the disk: {np.median(kept):.3f} s")
    said("its map, asked for", drawn, worked)
    start = time.perf_counter()
    page.get("/api/suggest/0")
    print(f"suggestions: {time.perf_counter() - start:.2f} s")
    return [columns["name"][k] for k in slides[:7]]


def by_hand(run: Path, program: str, slides: Sequence[str], marks: int) -> None:
    """The same marks on the page, by keys."""
    drawn, worked = [], []
    with opened_page(run, program) as (page, address):
        for k in range(marks):
            page.goto("about:blank")
            page.goto(f"{address}#slide={slides[k % len(slides)]}&pinned={k}")
            page.wait_for_selector("body[data-ready]")
            page.wait_for_selector("#teach:not([hidden])")
            page.wait_for_selector(".pane[data-loaded]")
            page.wait_for_timeout(200)  # marks of before are drawn
            page.wait_for_selector(".pane[data-loaded]")
            before = time.process_time()
            drawn.append(page.evaluate(MARKED, "nt"[k % 2]))
            worked.append(time.process_time() - before)
    said("its map in the browser", drawn, worked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slides", type=int, default=95)
    parser.add_argument("--marks", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as held:
        run = fitted(Path(held), asked.slides)
        slides = by_requests(run, asked.marks)
        (run / MARKS).unlink()
        if (program := browser_here()) is not None:
            by_hand(run, program, slides, asked.marks)


if __name__ == "__main__":
    main()
