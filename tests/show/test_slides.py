"""Slide files: scale, bounds and thumbnails; the real slides where the data is present."""

import re
import sys

import numpy as np
import pytest
from oracles.maps import block_mean
from PIL import Image

from gpmil import extras
from gpmil.show import slides


class Pyramid:
    """What `gpmil.show.slides` uses of an OpenSlide, on arrays; read_region counts its pixels."""

    def __init__(self, image: np.ndarray, downsamples=(1.0, 4.0), properties=None):
        self.levels = [
            block_mean(image, (image.shape[1] // int(d), image.shape[0] // int(d)))
            for d in downsamples
        ]
        self.dimensions = image.shape[1], image.shape[0]
        self.level_downsamples, self.properties = downsamples, properties or {}
        self.largest = 0

    def get_best_level_for_downsample(self, downsample: float) -> int:
        return max(k for k, d in enumerate(self.level_downsamples) if d <= max(downsample, 1))

    def read_region(self, corner, level, size):
        self.largest = max(self.largest, size[0] * size[1])
        scale = self.level_downsamples[level]
        x, y = (round(c / scale) for c in corner)
        out = np.zeros((size[1], size[0], 4), dtype=np.uint8)  # transparent outside the slide
        part = self.levels[level][y : y + size[1], x : x + size[0]].round()
        out[: part.shape[0], : part.shape[1], :3] = part
        out[: part.shape[0], : part.shape[1], 3] = 255
        return Image.fromarray(out, "RGBA")


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def a_png(tmp_path):
    pytest.importorskip("openslide")
    Image.fromarray(noise(120, 80)).save(tmp_path / "one.png")
    return tmp_path / "one.png"


# --- Thumbnails -----------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [4096, 40, 7])
@pytest.mark.parametrize("downsamples", [(1.0,), (1.0, 4.0)])
def test_shrinking_is_averaging_however_it_is_read(monkeypatch, block, downsamples):
    monkeypatch.setattr(slides, "BLOCK", block)
    image = noise(192, 160)
    slide = Pyramid(image, downsamples)
    found = slides.read_region(slide, (0, 0, 192, 160), (24, 20))
    np.testing.assert_allclose(found, block_mean(image, (24, 20)), atol=1.5)  # rounded twice
    assert slide.largest <= (block + 2) ** 2


def test_a_part_is_cut_out_of_the_slide():
    image = noise(192, 160)
    found = slides.read_region(Pyramid(image), (64, 32, 128, 64), (64, 32))
    np.testing.assert_array_equal(found, image[32:64, 64:128])


def test_what_was_not_scanned_has_the_background_colour():
    slide = Pyramid(noise(40, 40), (1.0,), {"openslide.background-color": "F0E0D0"})
    found = slides.read_region(slide, (20, 20, 60, 60), (40, 40))
    assert (found[20:, 20:] == [0xF0, 0xE0, 0xD0]).all()
    assert (slides.read_region(Pyramid(noise(8, 8)), (8, 0, 16, 8), (8, 8)) == 255).all()


def test_a_plain_image_is_a_slide(a_png):
    info = slides.describe(a_png)
    assert info == slides.SlideInfo((120, 80), None, (0, 0, 120, 80)) and info.offset == (0, 0)
    picture = slides.thumbnail(a_png)
    np.testing.assert_array_equal(picture.image, noise(120, 80))
    assert picture.extent == (0, 120, 80, 0) and picture.mpp is None
    small = slides.thumbnail(a_png, longest=30)
    np.testing.assert_allclose(small.image, block_mean(noise(120, 80), (30, 20)), atol=1.5)
    part = slides.thumbnail(a_png, (-50.0, 60.0, 80.0, 39.5))  # cut at the border, whole pixels
    assert part.extent == (0, 60, 80, 39)
    np.testing.assert_array_equal(part.image, noise(120, 80)[39:80, :60])


# --- Properties -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ("0.2527", "0.25", (0.2527, 0.25)),
        (None, None, None),
        ("0.25", None, None),
        ("0", "0", None),
        ("-1", "0.25", None),
        ("nan", "0.25", None),
        ("unknown", "0.25", None),
    ],
)
def test_a_scale_that_is_not_stated_is_not_guessed(x, y, expected):
    properties = {"openslide.mpp-x": x, "openslide.mpp-y": y}
    assert slides._mpp({k: v for k, v in properties.items() if v is not None}) == expected


def test_the_margin_of_a_slide_is_its_offset(monkeypatch):
    bounds = {"x": "64", "y": "24", "width": "96", "height": "72"}
    image = noise(192, 160)
    properties = {f"openslide.bounds-{k}": v for k, v in bounds.items()}
    info = slides.info_of(Pyramid(image, (1.0,), properties))
    assert info.bounds == (64, 24, 96, 72) and info.offset == (64, 24)
    assert slides._region(info, None, slides.Path("x")) == (64, 24, 160, 96)


# --- Mistakes -------------------------------------------------------------------------------------
def test_without_openslide_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "openslide", None)
    for function in (slides.describe, slides.thumbnail):
        with pytest.raises(ValueError, match=re.escape(extras.install("slides"))):
            function(tmp_path / "a.svs")


def test_a_bad_file_is_named(tmp_path, a_png):
    with pytest.raises(ValueError, match=r"no slide file at .*missing\.svs"):
        slides.describe(tmp_path / "missing.svs")
    for name, content in (("a.svs", b"no slide"), ("b.png", a_png.read_bytes()[:200])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            slides.thumbnail(tmp_path / name)


def test_a_part_outside_the_slide_is_refused(a_png):
    with pytest.raises(ValueError, match="outside the slide of 120 x 80 pixels"):
        slides.thumbnail(a_png, (500.0, 600.0, 80.0, 0.0))
    with pytest.raises(ValueError, match="at least 1 pixel"):
        slides.thumbnail(a_png, longest=0)


# --- Folders --------------------------------------------------------------------------------------
def test_slides_are_found_by_name(tmp_path):
    (tmp_path / "deep" / "c").mkdir(parents=True)
    for name in ("a.svs", "a.png", "deep/TCGA-1.f00d.SVS", "deep/c.mrxs", "a_features.h5", "x.csv"):
        (tmp_path / name).write_text("")
    (tmp_path / "d.svs").mkdir()
    found = {name: str(p.relative_to(tmp_path)) for name, p in slides.find(tmp_path).items()}
    assert found == {"a": "a.svs", "TCGA-1.f00d": "deep/TCGA-1.f00d.SVS", "c": "deep/c.mrxs"}
    with pytest.raises(ValueError, match="no folder with slides"):
        slides.find(tmp_path / "none")


# --- Real slides ----------------------------------------------------------------------------------
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "size", "mpp"),
    [
        ("CMU-1-Small-Region.svs", (2220, 2967), (0.499, 0.499)),
        ("tcga-cr-7395-01a-01-ts1.svs", (4443, 3567), None),
    ],
)
def test_real_slides(data_dir, name, size, mpp):
    openslide = pytest.importorskip("openslide")
    file = data_dir / "slides" / name
    assert slides.describe(file) == slides.SlideInfo(size, mpp, (0, 0, *size))
    found = slides.thumbnail(file, longest=300)
    assert max(found.image.shape) == 300 and found.extent == (0, size[0], size[1], 0)
    # OpenSlide's own thumbnail is sharpened in another way, but shows the same tissue.
    with openslide.OpenSlide(file) as slide:
        theirs = np.asarray(slide.get_thumbnail((300, 300)).resize(found.image.shape[1::-1]))
    assert np.abs(found.image.astype(float) - theirs).mean() < 6
    part = slides.thumbnail(file, (512.0, 768.0, 1024.0, 768.0))
    with openslide.OpenSlide(file) as slide:
        whole = np.asarray(slide.read_region((512, 768), 0, (256, 256)).convert("RGB"))
    np.testing.assert_array_equal(part.image, whole)
