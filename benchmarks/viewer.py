"""The viewer's server under load: large maps, large cohorts, many clients, memory.

    python benchmarks/viewer.py [--slide FILE]

A run of 10,500 slides, one of them with 100,000 patches, is written to a temporary folder and
served by `gpmil view` in a process of its own. Printed are medians and the worst of what a browser
would wait for. FILE is a slide for the tiles (default: a picture made here).
"""

import argparse
import gzip
import http.client
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from gpmil.runs.files import PATCHES, PREDICTIONS, patch_file
from gpmil.runs.workspace import csv_bytes

N_SLIDES, LARGE, SMALL = 10_500, 100_000, 105
CLIENTS = 50
START = "from gpmil.cli import main; main()"


def patches(n: int, rng: np.random.Generator, side: int) -> bytes:
    cell = np.arange(n)
    frame = pd.DataFrame({"x": 256 * (cell % side), "y": 256 * (cell // side)})
    for name in ("probability", "sd", "p_value"):
        frame[name] = rng.random(n)
    frame["flagged"] = (frame["p_value"] < 0.1).astype(int)
    return gzip.compress(csv_bytes(frame), compresslevel=1, mtime=0)


def write_run(folder: Path, large_name: str) -> None:
    rng = np.random.default_rng(0)
    names = [large_name, *(f"slide-{k:05d}" for k in range(1, N_SLIDES))]
    (folder / PATCHES).mkdir(parents=True)
    made = [patches(SMALL, rng, 12) for _ in range(40)]  # as many different ones are enough
    for k, name in enumerate(names):
        body = patches(LARGE, rng, 400) if k == 0 else made[k % len(made)]
        (folder / PATCHES / patch_file(name)).write_bytes(body)
    p = rng.random(N_SLIDES)
    table = pd.DataFrame({"slide": names, "patient": [f"p{k // 2}" for k in range(N_SLIDES)]})
    table["probability"], table["low"], table["high"] = p, p / 2, (1 + p) / 2
    table["log_odds"] = np.log(p / (1 - p))
    table["decision"] = np.where(rng.random(N_SLIDES) < 0.3, "refer", "accept")
    table["label"] = (rng.random(N_SLIDES) < p).astype(int)
    (folder / PREDICTIONS).write_bytes(csv_bytes(table))
    card = {"format": "gpmil-run", "command": "predict", "steps": dict.fromkeys(names, 256)}
    (folder / "config.json").write_text(json.dumps(card))


class Server:
    """`gpmil view` in a process of its own."""

    def __init__(self, run: Path, slides: Path) -> None:
        command = [sys.executable, "-c", START, "view", str(run), "--no-browser"]
        self.begun = time.perf_counter()
        quiet = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*command, "--slides", str(slides)], stdout=subprocess.PIPE, text=True, env=quiet
        )
        line = self.process.stdout.readline()
        self.port = int(re.search(r":(\d+)/", line).group(1))
        self.get("/api/health")
        self.startup = time.perf_counter() - self.begun

    def get(self, path: str, **headers: str) -> tuple[int, bytes, float]:
        """Status, body and seconds."""
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body, time.perf_counter() - begun

    def memory(self) -> tuple[float, float]:
        """Resident now and at most, in MB (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kb = {
            key: int(re.search(rf"{key}:\s+(\d+)", status).group(1)) for key in ("VmRSS", "VmHWM")
        }
        return kb["VmRSS"] / 1024, kb["VmHWM"] / 1024


def show(what: str, seconds: list[float], more: str = "") -> None:
    middle, worst = np.median(seconds), max(seconds)
    print(f"{what:42s} median {middle * 1e3:7.1f} ms, worst {worst * 1e3:7.1f} ms  {more}")


def maps(server: Server) -> None:
    status, body, first = server.get("/api/map/0/0")
    assert status == 200
    again = [server.get("/api/map/0/0")[2] for _ in range(20)]
    show("map of 100,000 patches, first time", [first], f"{len(body) / 1e6:.1f} MB")
    show("map of 100,000 patches, again", again)
    pictures = [server.get(f"/api/thumbnail/0/{k}.png")[2] for k in range(200)]
    show("thumbnail", pictures)
    show("geojson of 100,000 patches", [server.get("/api/qupath/0/0.geojson")[2]])


def cohort(server: Server) -> None:
    plain = [server.get("/api/cohort") for _ in range(5)]
    packed = [server.get("/api/cohort", **{"accept-encoding": "gzip"}) for _ in range(5)]
    size = f"{len(plain[0][1]) / 1e6:.2f} MB, packed {len(packed[0][1]) / 1e6:.2f} MB"
    show("cohort of 10,500 slides", [found[2] for found in plain + packed], size)
    show("curves of 10,500 slides, first time", [server.get("/api/curves/0")[2]])


def tiles(server: Server) -> None:
    size = json.loads(server.get("/api/slide/0")[1])
    last = int(np.ceil(np.log2(max(size["width"], size["height"]))))
    wanted = []
    for level in range(last + 1):
        shrink = 2 ** (last - level)
        across, down = (math.ceil(math.ceil(size[k] / shrink) / 254) for k in ("width", "height"))
        wanted += [(level, c, r) for c in range(across) for r in range(down)]
    start = threading.Barrier(CLIENTS)

    def client(k: int) -> list[tuple[int, float]]:
        rng = np.random.default_rng(k)
        start.wait()
        found = []
        for i in rng.choice(len(wanted), min(20, len(wanted)), replace=False):
            level, column, row = wanted[i]
            status, _, wall = server.get(f"/api/tiles/0_files/{level}/{column}_{row}.jpeg")
            found.append((status, wall))
        return found

    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = [one for part in pool.map(client, range(CLIENTS)) for one in part]
    wall = time.perf_counter() - begun
    errors = sum(status != 200 for status, _ in found)
    more = f"{len(found)} tiles in {wall:.1f} s, {errors} errors"
    show(f"tiles, {CLIENTS} clients at once", [seconds for _, seconds in found], more)


def fill(server: Server) -> None:
    """As many maps as are kept."""
    show("other maps", [server.get(f"/api/map/0/{k}")[2] for k in range(1, 300)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slide", type=Path)
    slide = parser.parse_args().slide
    with tempfile.TemporaryDirectory() as place:
        folder, pictures = Path(place) / "run", Path(place) / "slides"
        pictures.mkdir()
        if slide is None:
            noise = np.random.default_rng(1).integers(0, 255, (300, 400, 3), dtype=np.uint8)
            slide = pictures / "slide-00000.jpg"
            Image.fromarray(noise).resize((8000, 6000)).save(slide)
        else:
            pictures = slide.parent
        write_run(folder, slide.stem)
        server = Server(folder, pictures)
        try:
            print(f"{'start until the first answer':42s} {server.startup:14.2f} s")
            for part in (cohort, maps, tiles, fill):
                part(server)
                now, most = server.memory()
                print(f"{'memory':42s} now {now:.0f} MB, at most {most:.0f} MB")
        finally:
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()
