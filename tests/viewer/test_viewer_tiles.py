"""Slide files in the viewer: Deep Zoom tiles, patches, threads."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from oracles.viewer import deep_zoom_tile
from PIL import Image
from viewer_runs import patches, write_run

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from gpmil.viewer import cohort as cohorts
from gpmil.viewer import tiles
from gpmil.viewer.app import build
from gpmil.viewer.security import door


def client(folder, slides) -> TestClient:
    app = build(cohorts.open_cohort([folder], slides), door("127.0.0.1"))
    return TestClient(app, base_url="http://127.0.0.1")


def picture(answer) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/jpeg"
    return np.asarray(Image.open(io.BytesIO(answer.content)))


def smooth(width: int, height: int) -> np.ndarray:
    """A picture that jpeg keeps well: slow waves of colour, different everywhere."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 97), np.cos(y / 71), np.sin((x + 2 * y) / 130)]
    return np.stack([(127 + 120 * w) for w in waves], axis=-1).astype(np.uint8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of three slides, of which one has a picture."""
    place = tmp_path_factory.mktemp("viewer-tiles")
    (place / "slides" / "deep").mkdir(parents=True)
    Image.fromarray(smooth(700, 530)).save(place / "slides" / "deep" / "a.png")
    table = patches(6, 1, step=64.0, side=3).assign(x=lambda t: t["x"] - 900)
    table["y"] -= 600
    write_run(place / "run", {"a": table, "b": patches(4, 2), "c": None}, steps={"a": 64})
    return place


@pytest.fixture(scope="module")
def page(place):
    return client(place / "run", place / "slides")


# --- Plain pictures -------------------------------------------------------------------------------
def test_a_slide_is_described(page):
    assert page.get("/api/cohort").json()["columns"]["image"] == [True, False, False]
    found = page.get("/api/slide/0").json()
    assert (found["width"], found["height"], found["mpp"]) == (700, 530, None)
    assert (found["scale"], found["offset"], found["note"]) == (1, [0, 0], None)
    dzi = page.get(found["tiles"])
    assert dzi.headers["content-type"].startswith("application/xml")
    assert 'Overlap="1"' in dzi.text and 'TileSize="254"' in dzi.text
    assert '<Size Width="700" Height="530"/>' in dzi.text


@pytest.mark.parametrize("level", range(11))
def test_tiles_cover_the_slide(page, level):
    image = smooth(700, 530)
    size = tiles.Pyramid((700, 530)).level_size(level)
    shrink = 2 ** (10 - level)
    for row in range(-(-size[1] // 254)):
        for column in range(-(-size[0] // 254)):
            found = picture(page.get(f"/api/tiles/0_files/{level}/{column}_{row}.jpeg"))
            expected = deep_zoom_tile(image, level, 10, column, row)
            assert found.shape == (expected[1], expected[0], 3)
            if level >= 8:
                left, top = (max(254 * k - 1, 0) for k in (column, row))
                part = image[top * shrink :: shrink, left * shrink :: shrink]
                part = part[: found.shape[0], : found.shape[1]].astype(int)
                assert np.abs(found - part).mean() < 6


@pytest.mark.parametrize("tile", ["11/0_0", "-1/0_0", "10/3_0", "10/0_3", "10/-1_0", "99/9_9"])
def test_tiles_that_are_not_there(page, tile):
    answer = page.get(f"/api/tiles/0_files/{tile}.jpeg")
    assert answer.status_code == 404 and "there is no" in answer.json()["detail"]


def test_a_patch_is_its_part_of_the_slide(page):
    found = picture(page.get("/api/patch/0/0/4.jpg"))
    assert found.shape == (64, 64, 3)  # not enlarged
    x, y = 1000 - 900 + 64, 700 - 600 + 64
    assert np.abs(found - smooth(700, 530)[y : y + 64, x : x + 64].astype(int)).mean() < 6
    assert picture(page.get("/api/patch/0/0/4.jpg?size=16")).shape == (16, 16, 3)
    assert picture(page.get("/api/patch/0/0/4.jpg?size=-5")).shape == (1, 1, 3)
    assert "no patch 6" in page.get("/api/patch/0/0/6.jpg").json()["detail"]


def test_patches_that_cannot_be_of_this_slide_are_said(tmp_path):
    (tmp_path / "slides").mkdir()
    Image.fromarray(smooth(90, 70)).save(tmp_path / "slides" / "a.jpg")
    own = client(write_run(tmp_path / "run", {"a": patches(4, 1)}), tmp_path / "slides")
    assert "outside the slide file of 90 x 70" in own.get("/api/slide/0").json()["note"]
    assert "outside the slide file" in own.get("/api/patch/0/0/0.jpg").json()["detail"]


def test_a_large_picture_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "MOST_PIXELS", 6000)
    (tmp_path / "slides").mkdir()
    Image.fromarray(smooth(90, 70)).save(tmp_path / "slides" / "a.jpg")
    own = client(write_run(tmp_path / "run", {"a": patches(4, 1)}), tmp_path / "slides")
    answer = own.get("/api/tiles/0.dzi")
    assert answer.status_code == 404 and "90 x 70 pixels" in answer.json()["detail"]


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.svs", "a.tif"])
def test_a_file_that_is_no_slide_is_said(tmp_path, name):
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / name).write_bytes(b"no slide")
    own = client(write_run(tmp_path / "run", {"a": patches(4, 1)}), tmp_path / "slides")
    for path in ("slide/0", "tiles/0.dzi", "tiles/0_files/0/0_0.jpeg", "patch/0/0/0.jpg"):
        answer = own.get(f"/api/{path}")
        assert answer.status_code == 404 and f"{name} cannot be read" in answer.json()["detail"]
    (tmp_path / "slides" / name).unlink()
    assert "no longer there" in own.get("/api/slide/0").json()["detail"]


def test_a_link_out_of_the_slides_is_not_followed(tmp_path, caplog):
    (tmp_path / "slides").mkdir()
    Image.fromarray(smooth(90, 70)).save(tmp_path / "private.png")
    (tmp_path / "slides" / "a.png").symlink_to(tmp_path / "private.png")
    own = client(write_run(tmp_path / "run", {"a": patches(4, 1)}), tmp_path / "slides")
    assert own.get("/api/cohort").json()["columns"]["image"] == [False]
    assert own.get("/api/slide/0").status_code == 404
    assert "a.png is a link out of" in caplog.text


def test_a_file_that_becomes_a_link_is_not_followed(tmp_path):
    (tmp_path / "slides").mkdir()
    file = tmp_path / "slides" / "a.png"
    Image.fromarray(smooth(90, 70)).save(file)
    own = client(write_run(tmp_path / "run", {"a": patches(4, 1)}), tmp_path / "slides")
    assert own.get("/api/slide/0").status_code == 200
    file.rename(tmp_path / "private.png")
    file.symlink_to(tmp_path / "private.png")
    answer = own.get("/api/slide/0")
    assert answer.status_code == 404 and "link out" in answer.json()["detail"]


def test_many_threads_open_a_file_once(place, monkeypatch):
    made = []
    opened = tiles.open_scan
    monkeypatch.setattr(tiles, "open_scan", lambda file: made.append(file) or opened(file))
    own = tiles.Tiles(cohorts.open_cohort([place / "run"], place / "slides"))
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: own.scan(0), range(60)))
    assert len(made) == 1 and all(scan is found[0] for scan in found)


# --- Slides through OpenSlide ---------------------------------------------------------------------
def test_microns_become_pixels(tmp_path, monkeypatch):
    pytest.importorskip("openslide")
    (tmp_path / "slides").mkdir()
    Image.fromarray(smooth(700, 530)).save(tmp_path / "slides" / "a.png")
    table = patches(4, 1, step=32.0, side=2).assign(x=[0, 32, 0, 32], y=[0, 0, 32, 32])
    run = write_run(tmp_path / "run", {"a": table}, units="microns", steps={"a": 32})
    own = client(run, tmp_path / "slides")
    assert "microns" in own.get("/api/patch/0/0/0.jpg").json()["detail"]
    made = tiles.open_scan(tmp_path / "slides" / "a.png")
    info = tiles.SlideInfo((700, 530), (0.5, 0.25), (20, 10, 600, 500))
    monkeypatch.setattr(made, "info", info)
    monkeypatch.setattr(tiles, "open_scan", lambda file: made)
    own = client(run, tmp_path / "slides")
    assert own.get("/api/slide/0").json()["scales"] == [2, 4]
    assert picture(own.get("/api/patch/0/0/3.jpg")).shape == (128, 64, 3)
    ring = own.get("/api/qupath/0/0.geojson").json()["features"][3]["geometry"]["coordinates"][0]
    assert ring[0] == [64 - 20, 128 - 10] and ring[2] == [128 - 20, 256 - 10]


@pytest.mark.parametrize("limits", [{"LARGE": 100}, {"LARGE": 10**9, "HUGE": 100}])
def test_tiles_of_a_slide_with_one_level_are_the_same_however_read(tmp_path, monkeypatch, limits):
    pytest.importorskip("openslide")
    file = tmp_path / "a.tif"
    Image.fromarray(smooth(700, 530)).save(file)
    monkeypatch.setattr(tiles, "OVERVIEW", 256)
    direct, other = tiles.open_scan(file), tiles.open_scan(file)
    assert isinstance(direct, tiles.OpenSlideScan)
    keys = [(level, 0, 0) for level in range(9)] + [(9, 1, 1), (10, 2, 2)]
    before = [np.asarray(direct.tile(*key).convert("RGB")) for key in keys]
    assert direct._overview is None
    for name, value in limits.items():
        monkeypatch.setattr(tiles, name, value)
    after = [np.asarray(other.tile(*key).convert("RGB")) for key in keys]
    assert (other._overview is None) == ("HUGE" in limits)
    for key, a, b in zip(keys, before, after):
        assert a.shape == b.shape
        # Small levels differ by a part of a pixel: sizes are rounded up at every level.
        assert np.abs(a.astype(int) - b).mean() < (2 if key[0] > 7 else 8) or key[0] < 6


@pytest.mark.data
def test_fifty_threads_read_a_real_slide(data_dir, tmp_path):
    openslide = pytest.importorskip("openslide")
    from openslide.deepzoom import DeepZoomGenerator

    name = "CMU-1-Small-Region"
    table = patches(50, 1, step=256.0, side=6).assign(x=lambda t: t["x"] - 1000)
    run = write_run(tmp_path / "run", {name: table}, steps={name: 256})
    own = client(run, data_dir / "slides")
    assert own.get("/api/slide/0").json()["mpp"] == 0.499
    with openslide.OpenSlide(data_dir / "slides" / f"{name}.svs") as slide:
        zoom = DeepZoomGenerator(slide, 254, 1, limit_bounds=False)
        wanted = [
            (level, column, row)
            for level in range(zoom.level_count)
            for column in range(zoom.level_tiles[level][0])
            for row in range(zoom.level_tiles[level][1])
        ]
        expected = {key: zoom.get_tile_dimensions(key[0], key[1:]) for key in wanted}
    start = threading.Barrier(50)

    def ask(k: int) -> list[bool]:
        start.wait()
        good = []
        for level, column, row in wanted[k % 23 :: 23]:
            found = picture(own.get(f"/api/tiles/0_files/{level}/{column}_{row}.jpeg"))
            good.append(found.shape[1::-1] == expected[level, column, row])
        return good

    with ThreadPoolExecutor(50) as pool:
        assert all(all(good) and good for good in pool.map(ask, range(50)))
    patch = picture(own.get("/api/patch/0/0/7.jpg"))
    with openslide.OpenSlide(data_dir / "slides" / f"{name}.svs") as slide:
        x, y = int(table["x"][7]), int(table["y"][7])
        part = np.asarray(slide.read_region((x, y), 0, (256, 256)).convert("RGB")).astype(int)
    assert np.abs(patch - part).mean() < 8
