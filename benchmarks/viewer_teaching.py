"""How soon does the viewer's map answer a mark? A cohort of SICAPv2 size, one mark after another.

    python benchmarks/viewer_teaching.py --slides 95

Simulated slides (some 160 patches with 128 features each) are fitted with `gpmil fit` at given
settings; then patches are marked by the viewer's own requests, without the network. Per mark: the
request that keeps it on the disk, and the taught map (update, prediction of the slide, encoding).
The bar is one second for the map; the first one also imports torch and reads the data.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import gpmil
from gpmil.cli import app
from gpmil.viewer import cohort as cohorts
from gpmil.viewer.app import build
from gpmil.viewer.security import door

BAR = 1.0  # seconds
SETTINGS = ["--variance", "2", "--lengthscale", "11.3", "--mean", "-1.5", "--coupling", "0.5"]
SETTINGS += ["--slide-effect", "1", "--n-inducing", "200", "--interval-patches", "0"]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slides", type=int, default=95)
    parser.add_argument("--marks", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as held:
        run = fitted(Path(held), asked.slides)
        web = build(cohorts.open_cohort([run]), door("127.0.0.1"))
        page = TestClient(web, base_url="http://127.0.0.1:8000")
        labels = page.get("/api/cohort").json()["columns"]["label"]
        slides = [k for k, label in enumerate(labels) if label == 1]
        kept, drawn, worked = [], [], []
        for k in range(asked.marks):
            body = {
                "slide": slides[k % 7],
                "indices": [k],
                "label": k % 2,
                "who": "",
                "window": "w",
            }
            start = time.perf_counter()
            head = {"origin": "http://127.0.0.1:8000"}
            assert page.post("/api/marks/0", json=body, headers=head).status_code == 200
            middle, before = time.perf_counter(), time.process_time()
            answer = page.get(f"/api/taught/0/{slides[k % 7]}")
            assert answer.status_code == 200, answer.text
            kept.append(middle - start)
            drawn.append(time.perf_counter() - middle)
            worked.append(time.process_time() - before)
        print(f"a mark on the disk: {np.median(kept):.3f} s")
        print(f"its map: first {drawn[0]:.2f} s, then median {np.median(drawn[1:]):.3f} s, "
              f"longest {max(drawn[1:]):.3f} s; bar {BAR:g} s. Processor time: median "
              f"{np.median(worked[1:]):.3f} s")  # fmt: skip
        start = time.perf_counter()
        page.get("/api/suggest/0")
        print(f"suggestions: {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
