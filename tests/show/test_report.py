"""Pages that need nothing else, folders that are whole or not there."""

import json
import re
from pathlib import Path

import pytest

from gpmil.runs.files import CARD
from gpmil.runs.workspace import run_folder
from gpmil.show.report import RESEARCH, Picture, Section, Table, page


def write(folder: Path, text: str = "first") -> None:
    with run_folder(folder, {"command": "test"}) as fresh:
        (fresh / "a.txt").write_text(text)
        (fresh / "more").mkdir()
        (fresh / "more" / "b.txt").write_text("b")


# --- Pages ----------------------------------------------------------------------------------------
@pytest.fixture
def html() -> str:
    table = Table(["model", "AUC"], [["A", "0.7"], ["B <b>", "0.8"]], "numbers", ["model"], [1])
    picture = Picture(b"\x89PNG", 'a "map"', 320, "slide-1", "caption")
    return page("Title & more", "lead", [Section("One", ["text"], [table], [picture])])


def test_a_page_asks_for_nothing_outside_itself(html):
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []
    assert "http" not in html and "@import" not in html and "url(" not in html


def test_a_page_holds_everything(html):
    assert RESEARCH in html
    for text in ("Title &amp; more", "lead", "One", "numbers", "slide-1", "caption", "0.7"):
        assert text in html
    assert "data:image/png;base64,iVBORw==" in html and 'width="320"' in html


def test_text_is_escaped(html):
    assert "B &lt;b&gt;" in html and "B <b>" not in html
    assert 'alt="a &#34;map&#34;"' in html


def test_rows_and_columns_are_marked(html):
    strong = re.search(r'<tr class="strong">(.*?)</tr>', html, re.DOTALL)
    assert strong and "0.8" in strong[1] and "0.7" not in strong[1]
    assert '<th scope="col" class="text">model' in html and '<th scope="col">AUC' in html


def test_captions_do_not_scroll_with_wide_tables(html):
    caption, box = html.index(">numbers</p>"), html.index('<div class="scroll">')
    assert caption < box and 'id="c1-1"' in html and 'aria-labelledby="c1-1"' in html


# --- Folders --------------------------------------------------------------------------------------
def test_a_folder_appears_when_it_is_complete(tmp_path):
    out = tmp_path / "deep" / "out"
    with run_folder(out, {"command": "test", "seed": 3}) as fresh:
        (fresh / "a.txt").write_text("a")
        assert not out.exists()
    assert sorted(p.name for p in out.iterdir()) == ["a.txt", CARD]
    card = json.loads((out / CARD).read_text())
    assert card == {"format": "gpmil-run", "command": "test", "seed": 3, "files": ["a.txt"]}
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_a_folder_of_gpmil_is_replaced(tmp_path):
    out = tmp_path / "out"
    write(out, "first")
    for name in (".DS_Store", "._a.txt", "Thumbs.db", "desktop.ini"):
        (out / name).write_text("a file manager was here")
    with run_folder(out, {"command": "test"}) as fresh:
        (fresh / "c.txt").write_text("c")
    assert sorted(p.name for p in out.iterdir()) == ["c.txt", CARD]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_failure_keeps_what_was_there(tmp_path):
    out = tmp_path / "out"
    write(out, "first")
    with pytest.raises(KeyboardInterrupt), run_folder(out, {}) as fresh:
        (fresh / "a.txt").write_text("second")
        raise KeyboardInterrupt
    assert (out / "a.txt").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out" / "a.txt").read_text() == "first"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "a.txt").exists()


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"thesis.tex": ""}, "thesis.tex"),
        ({CARD: "{}", "x": ""}, "config.json, x"),
        ({CARD: "no json"}, "config.json"),
        ({CARD: '{"format": "other", "files": ["x"]}', "x": ""}, "config.json, x"),
        (dict.fromkeys("dabce", ""), "a, b, c, ..."),
    ],
)
def test_a_folder_of_someone_else_is_refused(tmp_path, files, found):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(ValueError, match=re.escape(f"({found})")), run_folder(tmp_path, {}):
        pytest.fail("the block must not begin")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_other_files_beside_ours_are_not_deleted(tmp_path):
    out = tmp_path / "out"
    write(out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"did not write \(notes.txt\)"):
        write(out)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_file_and_the_current_folder_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write(tmp_path / "file")
    monkeypatch.chdir(tmp_path / "..")
    with pytest.raises(ValueError, match="current folder"):
        write(Path())
