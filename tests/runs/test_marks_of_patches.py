"""The file of marks: what is in it after crashes, undo, and several windows at once."""

import json
import threading

import pytest

from gpmil.runs import marks
from gpmil.runs.files import MARKS
from gpmil.runs.marks import MarksFile, described, table_rows
from gpmil.runs.workspace import check_target

A, B, C = (512.0, 256.0), (768.0, 256.5), (0.0, -3.0)


def said(history) -> list[tuple]:
    return [(m.slide, m.place, m.label, m.who) for m in history.marks()]


def test_later_marks_take_the_place_of_earlier_ones(tmp_path):
    file = MarksFile(tmp_path)
    file.add("s1", 1, [A, B], " M.\n K. ", "w")
    file.add("s2", 0, [A], "other", "w")
    history = file.add("s1", 0, [B], "M. K.", "w")
    assert said(history) == [("s1", A, 1, "M. K."), ("s2", A, 0, "other"), ("s1", B, 0, "M. K.")]
    assert said(MarksFile(tmp_path).read()) == said(history)  # another server, another day
    assert said(file.add("s1", -1, [A, C], "", "w")) == said(history)[1:]
    rows = table_rows(file.read().marks())
    assert list(rows[0]) == ["slide", "x", "y", "label", "who", "when"]
    assert rows[0]["when"].endswith("Z") and rows[1]["y"] == 256.5


def test_undo_and_redo_are_about_the_strokes_of_one_window(tmp_path):
    file = MarksFile(tmp_path)
    file.add("s", 1, [A], "x", "left")
    file.add("s", 1, [B], "x", "right")
    file.add("s", 0, [A], "x", "left")
    places = [[m.label for m in file.turn(*turn).marks()] for turn in (
        ("undo", "x", "left"), ("undo", "x", "left"), ("undo", "x", "left"),
        ("redo", "x", "left"), ("redo", "x", "right"), ("redo", "x", "left"),
    )]  # fmt: skip
    assert places == [[1, 1], [1], [1], [1, 1], [1, 1], [1, 0]]
    file.turn("undo", "x", "left")
    file.add("s", 1, [C], "x", "left")  # nothing is left to redo after another stroke
    before = file.read().lines
    assert file.turn("redo", "x", "left").lines == before
    assert len(file.read().strokes) == 4  # nothing is ever forgotten


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    file = MarksFile(tmp_path)
    file.add("s", 1, [A], "x", "w")
    whole = (tmp_path / MARKS).read_bytes()
    (tmp_path / MARKS).write_bytes(whole + whole[:25])
    history = file.read()
    assert len(history.marks()) == 1 and history.damaged == 1
    assert "1 line of marks.jsonl" in described(history)
    assert len(file.add("s", 0, [B], "x", "w").marks()) == 2  # on a line of its own
    assert len(MarksFile(tmp_path).read().marks()) == 2


WHOLE = {"id": "a", "when": "", "who": "", "window": "w", "slide": "s"}
ODD = [
    {"label": 2, "patches": [[0, 0]]},
    {"label": True, "patches": [[0, 0]]},
    {"label": 1, "patches": [[0, 1e99]]},
    {"label": 1, "patches": [["a", 0]]},
    {"label": 1, "patches": []},
    {"label": 1, "patches": [[0, 0]], "who": 3},
]
WORDS = ["[1]", "\x00", "[" * 9999, '{"window": "w"}', '{"undo": "none", "window": "w"}']


@pytest.mark.parametrize("line", [*WORDS, *(json.dumps(WHOLE | odd) for odd in ODD)])
def test_other_lines_are_counted(tmp_path, line):
    file = MarksFile(tmp_path)
    file.add("s", 1, [A], "x", "w")
    with (tmp_path / MARKS).open("a") as out:
        out.write(line + "\n")
    history = file.add("s", 0, [B], "x", "w")
    assert history.damaged == 1 and len(history.marks()) == 2


def test_windows_at_once_lose_nothing(tmp_path):
    def window(k: int) -> None:
        own = MarksFile(tmp_path)
        for i in range(6):
            own.add(f"s{k}", 1, [(float(i), float(k))], f"user {k}", f"w{k}")

    threads = [threading.Thread(target=window, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = MarksFile(tmp_path).read()
    assert len(history.marks()) == 24 and history.damaged == 0
    assert all(json.loads(line) for line in (tmp_path / MARKS).read_text().splitlines())


def test_what_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / MARKS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link or no file"):
        MarksFile(tmp_path).add("s", 1, [A], "x", "w")
    assert (tmp_path / "elsewhere").read_text() == ""
    monkeypatch.setattr(marks, "SECONDS", 0.05)
    (tmp_path / "run").mkdir()
    file = MarksFile(tmp_path / "run")
    with marks.FileLock(file.lock), pytest.raises(ValueError, match="another window"):
        MarksFile(tmp_path / "run").add("s", 1, [A], "x", "w")
    with pytest.raises(ValueError, match="the run folder is no longer there"):
        MarksFile(tmp_path / "nowhere").add("s", 1, [A], "x", "w")
    (tmp_path / "run" / ".marks.lock").unlink(missing_ok=True)
    (tmp_path / "run" / ".marks.lock").mkdir()
    with pytest.raises(ValueError, match="marks cannot be kept in the run folder"):
        file.add("s", 1, [A], "x", "w")


def test_no_run_replaces_marks(tmp_path):
    (tmp_path / "run").mkdir()
    MarksFile(tmp_path / "run").add("s", 1, [A], "x", "w")
    with pytest.raises(ValueError, match="holds marks that people made in the viewer"):
        check_target(tmp_path / "run")
