"""Files written whole or not at all; the lock of a folder that is being filled."""

import subprocess
import sys

import pytest

from gpmil.files.whole import locked, write_whole

HOLD = """
import os, pathlib, signal, sys
from gpmil.files.whole import locked

with locked(pathlib.Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_whole(tmp_path / "new" / "a.txt", b"one")
    write_whole(tmp_path / "new" / "a.txt", b"two")
    assert (tmp_path / "new" / "a.txt").read_bytes() == b"two"
    with pytest.raises(OSError):
        write_whole(tmp_path / "new", b"a folder is in the way")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "a.txt"]


def test_a_second_writer_is_refused_and_no_file_is_left(tmp_path):
    with locked(tmp_path) as unlock:
        with pytest.raises(ValueError, match="another gpmil"), locked(tmp_path):
            pass
        unlock()
        assert list(tmp_path.iterdir()) == []
        with locked(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_the_lock_ends_with_a_killed_process(tmp_path):
    done = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
