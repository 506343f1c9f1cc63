"""The viewer's page in a browser: what is seen and done there equals the files of the runs."""

import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gpmil.decide.marks import benjamini_hochberg

SCRIPT = "<img src=x onerror=alert(1)>"
# for pictures of the page: another name in place of one that only tests have
PLAIN_NAMES = """([from, to]) => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(from, to);
}"""
STEP = 64
FITTED, OTHER = "0.6", "0"
MOST = 20_000  # milliseconds that anything may take; the real bars are in benchmarks/
SLOW_FRAME = 160
FRAMES = "() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))"
COPY = """const copy = k => {
  const canvas = document.querySelectorAll('canvas[role=img]')[k];
  const { width, height } = canvas;
  const context = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  return context.getImageData(0, 0, width, height);
};"""
SUM = """const sum = ({ data }) => new Uint32Array(data.buffer).reduce(
  (sum, word) => Math.imul(sum ^ word, 0x01000193), 0x811c9dc5);"""
PIXELS = "k => {" + COPY + SUM + "return sum(copy(k)); }"
NOTHING = "() => {" + COPY + SUM + "const all = copy(0); all.data.fill(0); return sum(all); }"


def three(p: float) -> str:
    """A probability as the page writes it: three digits, never certain."""
    if p < 0.001 or p >= 0.9995:
        return "< 0.001" if p < 0.001 else "> 0.999"
    return f"{float(f'{p:.3g}'):g}"


class Page:
    """A page with what tests ask for; notes errors, and requests to other hosts."""

    def __init__(self, context, address: str):
        self.address = address
        self.faults: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(MOST)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._check)
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))

    def _note(self, message) -> None:
        if message.type == "error":
            self.faults.append(message.text)

    def _check(self, request) -> None:
        if not request.url.startswith((self.address, "data:", f"blob:{self.address}")):
            self.faults.append(f"request to {request.url}")

    def open(self, **state: object) -> "Page":
        """The page in this state, its maps drawn."""
        words = "&".join(f"{k}={v}" for k, v in state.items())
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{words}")
        self.page.wait_for_selector("body[data-ready]")
        if state.get("page") != "cohort":
            self.loaded()
        return self

    def loaded(self) -> None:
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.pane')].every(p => p.dataset.loaded)"
        )
        self.frame()

    def frame(self) -> None:
        self.page.evaluate(FRAMES)

    def pixels(self, pane: int = 0) -> int:
        """A checksum of a map's pixels."""
        self.frame()
        return self.page.evaluate(PIXELS, pane)

    def slide(self, control: str, value: float) -> None:
        """Move a slider as the hand does: its value, then the event."""
        self.page.locator(control).first.evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', { bubbles: true })); }",
            value,
        )
        self.frame()

    def listed(self) -> list[str]:
        """Names in the order of the list, of the rows that exist."""
        found = self.page.evaluate(
            "() => [...document.querySelectorAll('.row:not([hidden])')]"
            ".map(r => [Number(r.dataset.place), r.querySelector('.name').textContent])"
        )
        return [name for _, name in sorted(found)]

    def numbers(self, table: str) -> dict[str, str]:
        cells = self.page.locator(f"{table} td[data-field]").all()
        found = {c.get_attribute("data-field"): c for c in cells}
        if "probability" in found:
            cell = found["probability"]
            assert cell.text_content() == three(float(cell.get_attribute("title")))
        return {field: cell.get_attribute("title") for field, cell in found.items()}

    def point(self, x: float, y: float, view: tuple[float, float, float], pane: int = 0):
        """Where on the screen a point of the slide is."""
        box = self.page.locator(".stage").nth(pane).bounding_box()
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        return middle[0] + (x - view[0]) * view[2], middle[1] + (y - view[1]) * view[2]

    def hash(self) -> str:
        self.page.wait_for_timeout(350)  # the address follows after a rest
        return self.page.evaluate("() => location.hash")


@pytest.fixture
def context(browser):
    found = browser.new_context(
        viewport={"width": 1280, "height": 720}, color_scheme="light", accept_downloads=True
    )
    found.grant_permissions(["clipboard-read", "clipboard-write"])
    yield found
    found.close()


@pytest.fixture
def page(context, address):
    """A page that must end without any error, and without a request to another host."""
    found = Page(context, address)
    yield found
    assert found.faults == []


def view_text(view: tuple[float, float, float]) -> str:
    return ",".join(str(v) for v in view)


# --- The list -------------------------------------------------------------------------------------
def by_name(table):
    key = [[int(p) if p.isdigit() else p for p in re.split(r"(\d+)", n)] for n in table["slide"]]
    return table.iloc[sorted(range(len(table)), key=lambda i: key[i])]


def attention(table):
    """Referred slides first, then those nearest to one half."""
    calm = (table["decision"] != "refer").astype(int)
    away = (table["probability"] - 0.5).abs()
    return table.assign(calm=calm, away=away).sort_values(["calm", "away"], kind="stable")


def test_what_needs_attention_comes_first(page, place):
    page.open()
    table = place.predictions(FITTED)
    expected = attention(table)["slide"].tolist()
    shown = page.listed()
    assert len(shown) > 6 and shown == expected[: len(shown)]
    assert page.page.locator("#slide-name").text_content() == expected[0]
    assert page.page.locator("#count").text_content() == f"{len(table)} slides"


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("probability", lambda t: t.sort_values("probability", ascending=False)),
        ("label", lambda t: t.sort_values(["label", "probability"], ascending=False)),
        ("name", lambda t: by_name(t[t["slide"] != SCRIPT])),
        (
            "wrong",
            lambda t: t.assign(
                right=(t["probability"] > 0.5) == (t["label"] == 1),
                near=-(t["probability"] - 0.5).abs(),
            ).sort_values(["right", "near"], kind="stable"),
        ),
    ],
)
def test_list_sorts(page, place, sort, order):
    page.open()
    page.page.select_option("#sort", sort)
    page.frame()
    shown = [name for name in page.listed() if sort != "name" or name != SCRIPT]
    assert shown == order(place.predictions(FITTED))["slide"].tolist()[: len(shown)]


def test_list_filters_and_searches(page, place):
    page.open(sort="probability")
    table = place.predictions(FITTED).sort_values("probability", ascending=False)
    wrong = (table["probability"] > 0.5) != (table["label"] == 1)
    kept = {
        "refer": table["decision"] == "refer",
        "accept": table["decision"] == "accept",
        "positive": table["probability"] > 0.5,
        "negative": table["probability"] <= 0.5,
        "wrong": wrong,
    }
    assert wrong.any() and kept["refer"].any()
    for name, rows in kept.items():
        page.page.select_option("#filter", name)
        page.frame()
        shown = page.listed()
        assert shown == table["slide"][rows].tolist()[: len(shown)]
        count = page.page.locator("#count").text_content()
        assert count == f"{rows.sum()} of {len(table)} slides"
    assert page.page.locator(".row:not([hidden]) .label.wrong").count() == wrong.sum()
    page.page.select_option("#filter", "all")
    page.page.fill("#search", "patient-7")
    page.frame()
    assert set(page.listed()) == set(table["slide"][table["patient"] == "patient-7"])
    page.page.fill("#search", "nowhere")
    assert page.page.locator("#no-slides").is_visible()


def test_keys_walk_through_the_list(page, place):
    page.open()
    names = attention(place.predictions(FITTED))["slide"].tolist()
    for key in ("j", "ArrowDown", "k", "j", "Enter"):
        page.page.keyboard.press(key)
    page.loaded()
    assert page.page.locator("#slide-name").text_content() == names[2]
    page.page.keyboard.press("/")
    page.page.keyboard.type("slide-1")
    page.frame()
    assert page.listed() and all(name.startswith("slide-1") for name in page.listed())


def test_only_rows_in_sight_exist(page, place):
    """A cohort of 10,500 slides is as few elements as one of thirty."""

    def many(route):
        cohort = route.fetch().json()
        columns = cohort["columns"]
        b, times = len(columns["name"]), 10_500 // len(columns["name"]) + 1

        def grown(values):
            return (values * times)[:10_500]

        for own in (columns, *columns["runs"], *columns["runs"][0]["couplings"].values()):
            for key, values in own.items():
                if key not in ("runs", "couplings"):
                    own[key] = grown(values)
        columns["name"] = [n if i < b else f"{n}-{i}" for i, n in enumerate(columns["name"])]
        route.fulfill(json=cohort)

    page.page.route("**/api/cohort", many)
    page.page.route("**/api/thumbnail/**", lambda route: route.abort("aborted"))
    page.open()
    assert page.page.locator("#count").text_content() == "10500 slides"
    page.page.locator("#list").evaluate("e => { e.scrollTop = 300000; }")
    page.frame()
    assert page.page.locator(".row").count() < 40
    top = page.page.locator("#list").bounding_box()
    under = page.page.evaluate(
        "([x, y]) => document.elementFromPoint(x, y).closest('.row').dataset.place",
        [top["x"] + 60, top["y"] + 2],
    )
    assert int(under) == 300_000 // 66
    page.faults[:] = [fault for fault in page.faults if "ERR_ABORTED" not in fault]


# --- Maps -----------------------------------------------------------------------------------------
def test_a_click_opens_a_slide(page):
    page.open(sort="name")
    before = page.pixels()
    page.page.locator(".row:not([hidden])", has_text="slide-02").click()
    page.loaded()
    assert page.page.locator("#slide-name").text_content() == "slide-02"
    assert page.pixels() != before
    assert page.page.locator(".message").is_hidden()


def test_layers_and_sliders_change_pixels(page, place):
    page.open(slide="slide-13", outlines=0, panes="0~~probability")
    seen = {"probability": page.pixels()}
    for layer in ("suspicion", "doubt", "flags", "none"):
        page.page.select_option(".pane .layer", layer)
        seen[layer] = page.pixels()
    assert len(set(seen.values())) == 5
    page.page.select_option(".pane .layer", "probability")
    assert page.pixels() == seen["probability"]
    for control, value in (("#opacity", 0.3), ("#threshold", 0.2)):
        before = page.pixels()
        page.slide(control, value)
        assert page.pixels() != before
    before = page.pixels()
    page.page.select_option("#colours", "magma")
    assert page.pixels() != before
    before = page.pixels()
    page.page.check("#outlines")
    outlined = page.pixels()
    assert outlined != before
    page.slide("#rate", 0.45)
    assert page.pixels() != outlined


def test_threshold_hides_patches_below_it(page, place):
    """One screen pixel a patch, no image, no outline: transparent or tissue where hidden."""
    table = place.patches("slide-05", FITTED)
    p, x, y = (table[c].to_numpy(float) for c in ("probability", "x", "y"))
    limit = float(np.quantile(p, 0.8).round(2)) + 0.01  # the lowest look like tissue anyway
    view = (x.mean(), y.mean(), 0.4)
    shown_as = {"panes": "0~~probability", "top": 1}
    page.open(slide="slide-05", outlines=0, view=view_text(view), threshold=limit, **shown_as)
    shown = page.page.evaluate(
        "points => {"
        + COPY
        + """
        const box = document.querySelector('canvas[role=img]').getBoundingClientRect();
        const { data, width } = copy(0);
        return points.map(([x, y]) => {
          const at = 4 * (Math.round(y - box.top) * width + Math.round(x - box.left));
          return [...data.slice(at, at + 3)]; }); }""",
        [page.point(a + STEP / 2, b + STEP / 2, view) for a, b in zip(x, y)],
    )
    tissue = (np.array(shown) == [201, 204, 209]).all(axis=1)
    legend = y > y.mean() + 200  # the legend covers some of the lowest patches
    np.testing.assert_array_equal(tissue[~legend], (p < limit)[~legend])
    words = page.page.evaluate(
        "async () => [...(await import('/static/colour.js')).table('viridis', 4)]"
    )
    table = np.array(words, dtype="<u4").view(np.uint8).reshape(256, 4).astype(float)
    seen = ~legend & ~tissue
    shade = table[np.minimum(255, np.floor(256 * p[seen])).astype(int)]  # the scale of the link
    opaque = shade[:, 3:] / 255  # low values let tissue through
    assert seen.sum() > 5 and opaque.min() < 1
    expected = opaque * shade[:, :3] + (1 - opaque) * [201, 204, 209]
    np.testing.assert_allclose(np.array(shown)[seen], expected, atol=2)


def test_hatching_in_long_pieces_goes_through_every_marked_cell(page):
    """Pixels of the merged diagonals against those of one diagonal a marked cell."""
    marked = np.random.default_rng(2).random((9, 12)) < 0.4
    page.open()
    found = page.page.evaluate(
        """async marked => {
        const { hatching } = await import('/static/layers.js');
        const [rows, columns] = [marked.length, marked[0].length];
        const every = marked.flatMap((line, r) => line.map((_, c) => [c, r]));
        const column = every.map(([c]) => c), row = every.map(([, r]) => r);
        const raster = { width: columns, height: rows, left: 5, top: 7, pixel: [16, 16],
                         cover: [1, 1], column, row };
        const fast = hatching({ n: every.length, raster }, marked.flat());
        const slow = new Path2D();
        every.forEach(([c, r]) => {
          if (!marked[r][c]) return;
          slow.moveTo(5 + 16 * c, 7 + 16 * (r + 1));
          slow.lineTo(5 + 16 * (c + 1), 7 + 16 * r);
        });
        return [fast, slow].map(path => {
          const context = new OffscreenCanvas(220, 170).getContext('2d');
          context.lineWidth = 3;
          context.stroke(path);
          return [...context.getImageData(0, 0, 220, 170).data.filter((_, i) => i % 4 === 3)]
            .map(opaque => opaque > 100); }); }""",
        marked.astype(int).tolist(),
    )
    fast, slow = (np.array(one) for one in found)
    assert fast.sum() > 1000 and (fast != slow).sum() < 0.01 * fast.sum()  # where pieces meet


def test_hover_shows_the_numbers_of_the_table(page, place):
    table = place.patches("slide-05", FITTED)
    view = (400.0, 380.0, 0.5)
    page.open(slide="slide-05", view=view_text(view), panes="0~~probability")
    for i in (3, len(table) // 2, len(table) // 2 + 9):
        x, y = float(table["x"][i]), float(table["y"][i])
        page.page.mouse.move(*page.point(x + STEP / 2, y + STEP / 2, view))
        page.frame()
        shown = page.numbers("#hand-numbers")
        assert shown.keys() == set(table.columns)
        assert {k: float(v) for k, v in shown.items()} == {
            k: float(v) for k, v in table.iloc[i].items()
        }
        # nine digits are the shortest text of their number; only exponents are written otherwise
        assert shown["probability"] == table["probability"][i] or "e" in table["probability"][i]
        readout = page.page.locator(".readout").text_content()
        assert readout == f"probability {three(float(shown['probability']))}"


def test_a_pinned_patch_has_neighbours_and_a_tile(page, place):
    table = place.patches("slide-01", FITTED).astype(float)
    view = (400.0, 380.0, 0.5)
    page.open(slide="slide-01", view=view_text(view))
    i = len(table) // 2
    page.page.mouse.click(*page.point(table["x"][i] + 30, table["y"][i] + 30, view))
    page.frame()
    assert page.numbers("#pinned-numbers")["probability"] == str(table["probability"][i])
    apart = (table[["x", "y"]] - table.loc[i, ["x", "y"]]).abs().sum(axis=1)
    expected = set(np.flatnonzero(apart == STEP))
    entries = page.page.locator("#neighbours button").all_text_contents()
    assert {int(text.split(":")[0]) for text in entries} == expected
    page.page.wait_for_function("() => document.querySelector('#tile').naturalWidth > 0")
    page.page.wait_for_selector("#similar button")
    name, index = re.fullmatch(
        r"(.*), patch (\d+)", page.page.locator("#similar .name").first.text_content()
    ).groups()
    page.page.locator("#similar button").first.click()
    page.loaded()
    assert page.page.locator("#slide-name").text_content() == name
    first = place.patches(name, FITTED).astype(float).loc[int(index)]
    page.frame()
    assert float(page.numbers("#pinned-numbers")["probability"]) == first["probability"]
    page.page.keyboard.press("Escape")
    assert page.page.locator("#pinned").is_hidden()


def test_marks_are_those_of_the_run_and_of_benjamini_and_hochberg(page, place):
    page.open()
    rates = [0.02, 0.1, 0.23, 0.5]
    found = page.page.evaluate(
        """async ([count, rates]) => {
        const { decode } = await import('/static/map.js');
        return Promise.all(Array.from({ length: count }, async (_, slide) => {
          const answer = await fetch(`/api/map/0/${slide}?coupling=0.6`);
          const map = decode(await answer.arrayBuffer());
          return [[...map.flagged], [...map.p_value], ...rates.map(r => [...map.flags(r)])];
        })); }""",
        [len(place.predictions(FITTED)), rates],
    )
    for flagged, p, *marked in found:
        assert marked[rates.index(0.1)] == flagged  # the run's rate
        for rate, marks in zip(rates, marked):
            assert marks == benjamini_hochberg(np.array(p), rate).astype(int).tolist()
    assert any(any(flagged) for flagged, *_ in found)


def test_colours_are_those_of_the_heat_maps(page):
    from matplotlib import colormaps

    page.open()
    for name in ("viridis", "cividis", "magma"):
        words = page.page.evaluate(
            "async name => [...(await import('/static/colour.js')).table(name)]", name
        )
        found = np.array(words, dtype="<u4").view(np.uint8).reshape(256, 4)
        expected = colormaps[name](np.arange(256)) * 255
        assert np.abs(found - expected).max() < 12
        assert (np.diff(found[:, :3].astype(int) @ [2126, 7152, 722]) > -3000).all()


def test_patches_off_a_lattice_are_found(page):
    """Lookups by bins against a look at every patch."""
    rng = np.random.default_rng(11)
    x, y = rng.uniform(0, 3000, 400).round(3), rng.uniform(-500, 900, 400).round(3)
    points = np.column_stack([rng.uniform(-50, 3100, 300), rng.uniform(-600, 1000, 300)])
    page.open()
    at, near, counted = page.page.evaluate(
        """async ([x, y, points]) => {
        const { PatchMap } = await import('/static/map.js');
        const header = { n: x.length, grid: null, side: 90, step: null, anchor: 'centre' };
        const map = new PatchMap(header, { x: Float64Array.from(x), y: Float64Array.from(y) });
        const every = [...map.within(...map.extent())];
        return [points.map(([a, b]) => map.at(a, b)), x.map((_, i) => map.neighbours(i)),
                new Set(every).size]; }""",
        [x.tolist(), y.tolist(), points.tolist()],
    )
    assert counted == 400
    away = np.maximum(np.abs(points[:, :1] - x), np.abs(points[:, 1:] - y))
    apart = np.hypot(points[:, :1] - x, points[:, 1:] - y)
    for k, found in enumerate(at):
        inside = np.flatnonzero(away[k] <= 45)
        assert found == (inside[np.argmin(apart[k, inside])] if len(inside) else -1)
    for i, found in enumerate(near):
        close = np.hypot(x - x[i], y - y[i]) <= 1.1 * 90
        assert set(found) == set(np.flatnonzero(close)) - {i}


# --- Comparing ------------------------------------------------------------------------------------
def test_two_maps_move_and_point_together(page, place):
    view = (400.0, 380.0, 0.3)
    page.open(slide="slide-05", view=view_text(view), panes="0~~probability")
    page.page.click("#add-pane")
    page.page.wait_for_selector(".pane:nth-child(2)[data-loaded]")
    shown = page.page.locator(".coupling-value").all_text_contents()
    assert shown == ["0.6 (fitted)", "0"]
    tables = [place.patches("slide-05", c).astype(float) for c in (FITTED, OTHER)]
    i = len(tables[0]) // 2
    x, y = tables[0]["x"][i] + STEP / 2, tables[0]["y"][i] + STEP / 2
    for pane in (0, 1):  # the hand is over either map, both say what they have there
        page.page.mouse.move(*page.point(x, y, view, pane))
        page.frame()
        said = page.page.locator(".readout").all_text_contents()
        assert said == [f"probability {three(t['probability'][i])}" for t in tables]
    before = [page.pixels(0), page.pixels(1)]
    page.page.mouse.wheel(0, -300)
    page.page.mouse.down()
    page.page.mouse.move(*page.point(x + 150, y + 60, view, 1), steps=4)
    page.page.mouse.up()
    assert all(page.pixels(k) != before[k] for k in (0, 1))
    moved = page.page.evaluate("async () => (await import('/static/state.js')).get().view")
    assert moved["zoom"] > view[2] and moved["x"] < x
    page.page.locator(".pane:nth-child(2) .close").click()
    assert page.page.locator(".pane").count() == 1


def test_the_coupling_has_a_slider(page, place):
    page.open(slide="slide-05", view="400,380,0.3", outlines=0)
    before = page.pixels()
    page.slide(".coupling", 0)
    page.loaded()
    assert page.pixels() != before
    # the map is that of the other coupling, the call that of the fit
    row = place.predictions(FITTED).set_index("slide").loc["slide-05"]
    facts = page.page.locator("#facts").text_content()
    assert f"probability{row['probability']:.3g}" in facts and "accept: " in facts


def test_suspicion_is_shown_first_and_probability_where_there_are_no_p_values(page, place):
    page.open(slide="slide-05")
    assert page.page.locator(".pane .layer").input_value() == "suspicion"
    words = "() => import('/static/layers.js').then(l => [l.LAYERS.suspicion.title, l.NO_P_VALUES])"
    title, instead = page.page.evaluate(words)
    assert "unlike tissue of negative slides" in title and "without flags" in instead
    with_p_values = page.pixels()
    page.slide(".coupling", 0)  # not that of the fit: p-values would not hold
    page.loaded()
    assert page.pixels() != with_p_values
    suspicion = page.page.locator(".pane .layer option", has_text="Suspicion")
    assert suspicion.is_disabled()
    assert page.page.locator(".pane .layer").input_value() == "probability"  # as it is drawn
    # there are no p-values away from the coupling of the fit, so nothing to test them with
    assert page.page.locator("#rate").is_disabled()


# --- Cohort, links, files -------------------------------------------------------------------------
def test_a_cell_of_the_confusion_matrix_picks_its_slides(page, place):
    page.open(page="cohort", sort="probability")
    page.page.wait_for_selector("#curves figure")
    table = place.predictions(FITTED).sort_values("probability", ascending=False)
    cells = {
        "true positives": (table["probability"] > 0.5) & (table["label"] == 1),
        "false negatives": (table["probability"] <= 0.5) & (table["label"] == 1),
        "true negatives": (table["probability"] <= 0.5) & (table["label"] == 0),
    }
    for words, rows in cells.items():
        page.page.locator(".confusion td", has_text=words).click()
        page.page.wait_for_selector(".confusion td.picked")
        shown = page.listed()
        assert shown == table["slide"][rows].tolist()[: len(shown)]
        assert page.page.locator("#pick-words").text_content() == words
        count = page.page.locator("#count").text_content()
        assert count == f"{rows.sum()} of {len(table)} slides"
    page.page.click("#unpick")
    page.frame()
    assert page.page.locator("#picked").is_hidden()
    dots = page.page.locator("svg .dot")
    assert dots.count() > 4
    bins = page.page.locator("svg[aria-label='Reliability'] .dot")
    said = [bins.nth(k).get_attribute("aria-label") for k in range(bins.count())]
    for k, words in enumerate(said):  # as many slides as the bin holds, by the keyboard
        bins.nth(k).focus()
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector(f"svg[aria-label='Reliability'] [aria-label='{words}'].picked")
        count = page.page.locator("#count").text_content()
        assert count == f"{words.split()[0]} of {len(table)} slides"
    assert sum(int(words.split()[0]) for words in said) == len(table)
    page.page.locator("svg[aria-label='ROC curve'] .dot").nth(1).click()
    limit = float(re.search(r"from ([\d.]+) on", page.page.text_content("#pick-words")).group(1))
    last = 10 ** (math.floor(math.log10(limit)) - 2)  # it is said with three digits
    expected = (table["probability"] >= limit - last / 2).sum()
    assert page.page.text_content("#count").startswith(f"{expected} of ")


def test_patients_stand_beside_slides(page, place):
    page.open(page="cohort", panes="1~~suspicion")
    page.page.wait_for_selector("#patient-rows tr")
    table = pd.read_csv(place.runs[1] / "patients.csv")
    order = (table["probability"] - 0.5).abs().sort_values(kind="stable").index
    names = page.page.locator("#patient-rows th").all_text_contents()
    assert names == table["patient"][order].tolist() and len(names) == 13
    page.page.locator("figure", has_text="Metrics per patient").wait_for()
    row = page.page.locator("#patient-rows tr", has=page.page.locator("th", has_text="patient-3"))
    slides = row.locator("button").all_text_contents()
    assert slides == ["slide-06", "slide-07"]
    row.locator("button", has_text="slide-07").click()
    page.loaded()
    assert page.page.locator("#slide-name").text_content() == "slide-07"
    said = page.page.locator("#facts").text_content()
    assert "patient's probability" in said and "patient called" in said
    page.page.locator("#sibling-slides button", has_text="slide-06").click()
    page.loaded()
    assert page.page.locator("#slide-name").text_content() == "slide-06"


def test_a_link_restores_the_view(page, context, address):
    page.open(slide="slide-01", filter="positive", sort="name")
    page.page.click("#add-pane")
    page.page.wait_for_selector(".pane:nth-child(2)[data-loaded]")
    page.page.locator(".layer").nth(1).select_option("doubt")
    page.slide("#threshold", 0.13)
    page.slide("#opacity", 0.8)
    page.slide("#rate", 0.31)
    page.page.select_option("#colours", "cividis")
    box = page.page.locator(".stage").first.bounding_box()
    page.page.mouse.move(box["x"] + 130, box["y"] + 160)
    page.page.mouse.wheel(0, -250)
    page.frame()
    page.page.mouse.click(box["x"] + 130, box["y"] + 160)
    page.page.mouse.move(5, 5)
    page.page.click("#copy-link")
    page.page.wait_for_function("() => document.querySelector('#status').textContent")
    link = page.page.evaluate("() => navigator.clipboard.readText()")
    assert link.startswith(address)
    other = Page(context, address)
    other.open(**dict(word.split("=", 1) for word in link.split("#")[1].split("&")))
    for k in (0, 1):
        assert other.pixels(k) == page.pixels(k)
    assert other.listed() == page.listed()
    assert other.numbers("#pinned-numbers") == page.numbers("#pinned-numbers") != {}
    assert other.faults == []


def test_words_of_a_link_that_make_no_sense_are_left_out(page):
    page.open(panes="9~7~x!zz", view="a,b", opacity="5", sort="?", rate="-1", slide="slide-03")
    assert page.page.locator("#slide-name").text_content() == "slide-03"
    assert page.page.locator("#sort").input_value() == "attention"
    page.open(slide="nowhere", pinned="99999")
    assert "nowhere" in page.page.locator(".message").text_content()


def test_state_survives_the_way_through_the_address(page):
    page.open()
    same = page.page.evaluate(
        """async () => { const { defaults, toHash, fromHash } = await import('/static/state.js');
        const state = { ...defaults(), slide: 'a&b=c#d/%~!', search: '+ \\u00e9', rate: 0.17,
          view: { x: -1.5e3, y: 0.25, zoom: 1e-3 }, pinned: 12, opacity: 0, outlines: false,
          panes: [{ run: 1, coupling: null, layer: 'doubt' },
                  { run: 0, coupling: '0.6', layer: 'none' }] };
        return [toHash(defaults()), JSON.stringify(fromHash('#' + toHash(state))) ===
          JSON.stringify(state)]; }"""
    )
    assert same == ["", True]


def test_pictures_and_geojson_can_be_saved(page, place):
    from PIL import Image

    page.open(slide="slide-01", opacity=0.4)
    page.page.wait_for_timeout(500)  # tiles arrive
    with page.page.expect_download() as waiting:
        page.page.click("#save-picture")
    assert waiting.value.suggested_filename == "slide-01.png"
    picture = Image.open(io.BytesIO(Path(waiting.value.path()).read_bytes())).convert("RGB")
    box = page.page.locator(".stage").bounding_box()
    assert picture.size[0] >= box["width"] and picture.size[1] >= box["height"]
    pixels = np.array(picture).astype(int)
    # pink tissue below the map: more red than green, which no colour of viridis alone has so much
    assert ((pixels[..., 0] - pixels[..., 1]) > 25).mean() > 0.05
    with page.page.expect_download() as waiting:
        page.page.click("#geojson")
    found = json.loads(Path(waiting.value.path()).read_text())
    assert len(found["features"]) == len(place.patches("slide-01", FITTED))


# --- Safety, errors, looks ------------------------------------------------------------------------
def test_a_name_that_is_markup_stays_text(page):
    page.open(sort="name", search="onerror")
    page.page.locator(".row:not([hidden])").first.click()
    page.loaded()
    assert page.page.locator("#slide-name").text_content() == SCRIPT
    assert page.listed() == [SCRIPT]
    assert page.page.locator("img[src='x']").count() == 0


def test_an_error_is_one_readable_line(page):
    page.open(slide="slide-01")
    page.page.route("**/api/map/**", lambda r: r.fulfill(status=404, json={"detail": "gone away."}))
    page.page.locator(".row:not([hidden])", has_text="slide-03").click()
    page.page.wait_for_selector(".message.failed")
    assert page.page.locator(".message").text_content() == "gone away."
    page.page.unroute("**/api/map/**")
    page.page.locator(".row:not([hidden])", has_text="slide-01").click()
    page.loaded()
    assert page.page.locator(".message").is_hidden()
    page.faults[:] = [fault for fault in page.faults if "404" not in fault]


def test_says_what_it_waits_for(page):
    page.open(slide="slide-01")
    waiting = []
    page.page.route("**/api/map/**", lambda route: waiting.append(route))
    page.page.locator(".row:not([hidden])", has_text="slide-03").click()
    message = page.page.locator(".message")
    assert message.text_content() == "loading map of slide slide-03 …"
    assert page.pixels() == page.page.evaluate(NOTHING)  # no other slide's map under this name
    waiting[0].continue_()
    page.loaded()
    assert message.is_hidden()


def test_every_control_has_a_name_and_can_be_reached(page):
    page.open(slide="slide-01")
    nameless = page.page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, canvas[tabindex]')]
        .filter(e => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))
        .map(e => e.outerHTML)"""
    )
    assert nameless == []
    reached = set()
    for _ in range(40):
        page.page.keyboard.press("Tab")
        reached.add(
            page.page.evaluate(
                "() => document.activeElement.id || document.activeElement.className"
            )
        )
    assert {"search", "list", "opacity", "threshold", "rate", "layer", "copy-link"} <= reached


def test_map_and_redraw_are_not_slow(page):
    page.open(slide="slide-01")
    for _ in range(30):
        page.page.locator("canvas[role=img]").focus()
        page.page.keyboard.press("+")
        page.frame()
    times = page.page.evaluate("async () => (await import('/static/view.js')).drawTimes")
    assert np.median(times) < SLOW_FRAME


@pytest.mark.parametrize(
    ("name", "size", "scheme", "state"),
    [
        ("slide", (1280, 720), "light", {"slide": "slide-13", "threshold": 0.05}),
        ("large", (2560, 1440), "light", {"slide": "slide-13", "pinned": 60}),
        ("dark", (1280, 720), "dark", {"slide": "slide-05", "pinned": 30}),
        (
            "compare",
            (1280, 720),
            "light",
            {"slide": "slide-13", "panes": "0~0.6~probability!0~0~probability", "opacity": 0.6},
        ),
        ("cohort", (1280, 720), "light", {"page": "cohort"}),
        ("patients", (1280, 720), "light", {"page": "cohort", "panes": "1~~suspicion"}),
    ],
)
def test_looks(browser, address, screenshots, name, size, scheme, state):
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = Page(context, address).open(**state)
    page.page.wait_for_timeout(700)  # pictures arrive
    if name == "patients":
        page.page.locator("#patients h3").evaluate("e => e.scrollIntoView()")
    page.page.evaluate(PLAIN_NAMES, [SCRIPT, "slide-25"])
    page.page.screenshot(path=screenshots / f"viewer_{name}.png")
    overflow = page.page.evaluate(
        "() => [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    )
    assert overflow == list(size)
    dark = page.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (scheme == "dark")
    assert page.faults == []
    context.close()
