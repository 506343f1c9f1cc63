"""Teaching on the page: marks by click, stroke and key, undo, reload, suggestions, saving."""

import json

import pandas as pd
import pytest

import gpmil
from browser.test_viewer_page import Page, context, view_text  # noqa: F401

VIEW = (448, 448, 0.6)
SLIDE = "slide-13"
STEP = 64


@pytest.fixture
def page(context, lesson):  # noqa: F811
    """The page of a run that may be taught; must end without any error."""
    found = Page(context, lesson[0]).open(slide=SLIDE, view=view_text(VIEW))
    found.page.wait_for_selector("#teach:not([hidden])")
    yield found
    assert found.faults == []


@pytest.fixture
def patches(lesson):
    table = pd.read_csv(lesson[1] / "patches" / f"{SLIDE}.csv.gz")
    return table.sort_values("probability", ascending=False)


def middle(page, patch) -> tuple[float, float]:
    return page.point(patch.x + STEP / 2, patch.y + STEP / 2, VIEW)


def lines(run) -> list[dict]:
    return [json.loads(line) for line in (run / "marks.jsonl").read_text().splitlines()]


def count(page, number: int) -> None:
    """Wait until so many marks are listed, and the map of them is drawn.

    The first mark may wait for loops to be compiled, half a minute where others work.
    """
    page.page.wait_for_function(
        "n => document.querySelector('#marks-count').textContent === `Marks (${n})`",
        arg=number,
        timeout=120_000,
    )
    page.page.wait_for_timeout(30)
    page.loaded()


def pinned(page, slide: str) -> None:
    """Wait until the page is at a slide with a patch pinned: it fetches the patch's map first."""
    page.page.wait_for_function(
        "name => document.querySelector('#slide-name').textContent === name"
        " && !document.querySelector('#pinned').hidden",
        arg=slide,
    )
    page.loaded()


def test_marks_by_click_stroke_and_key_survive_a_reload(page, lesson, patches, screenshots):
    before = page.pixels()
    page.page.click("summary")
    page.page.fill("#who", "M. K.")
    page.page.keyboard.press("Tab")
    top, low = patches.iloc[0], patches[patches["probability"] < 0.2]
    page.page.click("#brush1")
    page.page.mouse.click(*middle(page, top))
    count(page, 1)
    page.page.wait_for_function(
        "() => document.querySelector('#teach-result').innerText.includes('This slide:')",
        timeout=120_000,
    )
    page.loaded()
    assert "This slide:" in page.page.inner_text("#teach-result")
    page.page.click("#brush0")
    row = low[low["y"] == low["y"].mode()[0]].sort_values("x")
    first, last = row.iloc[0], row.iloc[2]
    page.page.mouse.move(*middle(page, first))
    page.page.mouse.down()
    page.page.mouse.move(*middle(page, last), steps=12)
    page.page.mouse.up()
    drawn = patches[(patches["y"] == first.y) & patches["x"].between(first.x, last.x)]
    total = 2 + len(drawn)
    count(page, total - 1)
    page.page.keyboard.press("Escape")  # clicks pin patches again
    other = patches.drop([top.name, *drawn.index]).iloc[-1]  # not one of those marked
    page.page.mouse.move(*middle(page, other))
    page.page.keyboard.press("n")
    count(page, total)
    said = [(line["label"], line["who"]) for line in lines(lesson[1])]
    assert said == [(1, "M. K."), (0, "M. K."), (0, "M. K.")]
    after = page.pixels()
    assert after != before
    page.page.uncheck("#taught")
    page.loaded()
    untaught = page.pixels()
    page.page.check("#taught")
    page.loaded()
    assert page.pixels() == after != untaught
    page.page.reload()
    page.page.wait_for_selector("body[data-ready]")
    count(page, total)
    assert page.page.locator("#marks li").count() == total
    page.page.keyboard.press("z")  # the strokes of this window are still known
    count(page, total - 1)
    page.page.keyboard.press("Control+Shift+z")
    count(page, total)
    page.page.click("summary")
    assert page.page.input_value("#who") == "M. K."
    page.page.check("#taught")
    page.loaded()
    page.page.screenshot(path=screenshots / "viewer_teach.png")
    page.page.click("#undo")
    count(page, total - 1)


def test_suggestions_lead_to_patches_and_the_taught_model_is_saved(page, lesson):
    page.page.click("#suggest")
    page.page.wait_for_selector("#suggestions li")
    names = page.page.locator("#suggestions .name").all_inner_texts()
    assert len(names) >= 2 and len({name.split(",")[0] for name in names}) == len(names)
    page.page.locator("#suggestions button").first.click()
    pinned(page, names[0].split(",")[0])
    page.page.keyboard.press("t")  # the pinned patch
    count(page, 1)
    assert page.page.locator("#suggestions li").count() == len(names) - 1
    page.page.click("#save-taught")
    page.page.wait_for_function(
        "() => document.querySelector('#status').textContent.includes('saved')"
    )
    table = pd.read_csv(lesson[1] / "taught" / "patch_labels.csv")
    assert table["slide"].tolist() == [names[0].split(",")[0]] and table["label"].tolist() == [1]
    assert gpmil.load(lesson[1] / "taught" / "model").instance_labels == "use"
    with page.page.expect_download() as file:
        page.page.click("#label-file")
    assert file.value.suggested_filename == "patch_labels.csv"


def test_a_tumour_mark_on_a_negative_slide_is_refused(page, lesson):
    page.open(slide="slide-02")
    page.page.wait_for_selector("#teach:not([hidden])")
    box = page.page.locator("canvas[role=img]").bounding_box()
    page.page.click("#brush1")
    page.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2 - 20)
    page.page.wait_for_selector("#status.failed")
    assert "is labelled negative" in page.page.inner_text("#status")
    assert not (lesson[1] / "marks.jsonl").exists()
    page.faults.clear()  # the browser notes the refusal as an error
