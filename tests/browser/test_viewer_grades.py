"""Grades in the viewer's page: colours, what is called, and which slides and patches are shown."""

import numpy as np
import pytest
from viewer_runs import patches, with_grades, write_grades, write_run

from browser.conftest import serving
from browser.test_viewer_page import Page

NAMES = ["one", "two", "three", "four"]
SHADES = """colours => {
  const canvas = document.querySelector('canvas[role=img]');
  const { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext('2d');
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, width, height - 40); // above the legend
  const hex = k => '#' + [0, 1, 2].map(c => data[4 * k + c].toString(16).padStart(2, '0')).join('');
  const seen = new Set();
  for (let k = 0; k < data.length / 4; k += 7) seen.add(hex(k));
  return colours.map(colour => seen.has(colour));
}"""


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A run with grades, served."""
    folder = tmp_path_factory.mktemp("graded") / "run"
    own = {name: with_grades(patches(30, k), k) for k, name in enumerate(NAMES)}
    run = write_run(folder, own)
    write_grades(run, NAMES)
    with serving([run], None) as url:
        yield url


@pytest.fixture
def page(context, graded):
    found = Page(context, graded)
    yield found
    assert found.faults == []


@pytest.fixture
def context(browser):
    found = browser.new_context(viewport={"width": 1280, "height": 720}, color_scheme="light")
    yield found
    found.close()


def test_slides_are_called_and_listed_by_grade(page):
    page.open(slide="two", sort="name")
    facts = page.page.locator("#facts").inner_text()
    assert "grade 3 (is 4: wrong)" in facts and "P(benign)" in facts and "not benign" in facts
    page.page.select_option("#called", "3")
    page.frame()
    assert page.listed() == ["two"]
    assert "called=3" in page.hash()


def test_patches_have_the_colour_of_their_grade_and_can_be_hidden(page):
    page.open(slide="one", panes="0~~grade", outlines="0")
    colours = page.page.evaluate(
        "async () => (await (await fetch('api/cohort')).json()).classes[0].colours"
    )
    assert page.page.evaluate(SHADES, colours) == [True, True, True]
    page.page.uncheck("#class-field input[value='3']")
    page.frame()
    assert page.page.evaluate(SHADES, colours) == [True, False, True]
    page.open(slide="one", panes="0~~grade", outlines="0", hide="benign%0A4")
    shown = np.array(page.page.evaluate(SHADES, colours))
    assert shown.tolist() == [False, True, False]
