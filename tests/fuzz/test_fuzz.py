"""A few cases of the campaign for every target, and the campaign's own parts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import campaign, mutate

CASES = 8  # of some thirty targets; make fuzz runs ten thousand of each
KNOWN = campaign.targets()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", KNOWN)
def test_no_case_fails(name, tmp_path):
    found = {k: campaign.run_case(KNOWN[name], k, tmp_path / "case") for k in range(CASES)}
    assert list(campaign._failures(name, found)) == []


@pytest.mark.parametrize("name", KNOWN)
def test_a_case_is_a_function_of_target_and_number(name, tmp_path):
    made = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        target = KNOWN[name]
        target.make(tmp_path / place, campaign.rng_of(target, 7))
        files = sorted(p for p in (tmp_path / place).rglob("*") if p.is_file())
        made.append([(str(p.relative_to(tmp_path / place)), p.read_bytes()) for p in files])
    # Files of a cache have names drawn by chance.
    names = [[re.sub(r"-[0-9a-f]{8}\b", "", name) for name, _ in one] for one in made]
    assert names[0] == names[1]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.sampled_from(mutate.BYTES))
def test_bytes_are_damaged_whatever_they_are(data, seed, change):
    one = change(data, np.random.default_rng(seed))
    assert isinstance(one, bytes) and len(one) <= 2 * len(data) + 1024 + 8
    assert one == change(data, np.random.default_rng(seed))


# ------------------------------------------------------------------ what counts as what


def outcome(tmp_path, attempt, judge=lambda folder, result: None):
    target = campaign.Target("t", lambda folder, rng: (folder / "a.bin").touch(), attempt, judge)
    return campaign.run_case(target, 0, tmp_path / "case").kind


def refuse(folder):
    from gpmil.files.foreign import require_regular

    require_regular(folder)


def leave(folder):
    (folder / "more").touch()
    refuse(folder)


def warn(folder):
    return np.float64(1e300) * np.float64(1e300)


def wrong(folder, result):
    raise AssertionError("wrong")


def test_outcomes(tmp_path):
    assert outcome(tmp_path, lambda folder: 1) == "right"
    assert outcome(tmp_path, refuse) == "refused"
    assert outcome(tmp_path, lambda folder: (folder / "b").read_bytes()) == "refused"
    assert outcome(tmp_path, lambda folder: int("x")) == "traceback"
    assert outcome(tmp_path, lambda folder: json.loads("{")) == "traceback"
    assert outcome(tmp_path, lambda folder: {}["x"]) == "traceback"
    assert outcome(tmp_path, warn) == "traceback"
    assert outcome(tmp_path, lambda folder: 1, wrong) == "accepted"
    assert outcome(tmp_path, leave) == "left behind"


def test_limits_end_a_case_and_not_the_campaign(tmp_path, monkeypatch):
    """One case waits, one takes memory, one ends its process; the others end right."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time, os\n"
        "from pathlib import Path\n"
        "from fuzz import campaign\n"
        "def attempt(folder):\n"
        "    case = int((folder / 'case').read_text())\n"
        "    if case == 1: time.sleep(60)\n"
        "    if case == 2: held = bytearray(b'x') * 900_000_000; time.sleep(60)\n"
        "    if case == 3: os.kill(os.getpid(), 9)\n"
        "def run_case(target, case, folder):\n"
        "    folder.mkdir(parents=True, exist_ok=True)\n"
        "    (folder / 'case').write_text(str(case)); attempt(folder)\n"
        "    return campaign.Outcome('right')\n"
        "campaign.run_case = run_case\n"
        "a = sys.argv\n"
        "campaign.work(None, range(*map(int, a[a.index('--work') + 1].split(','))), Path(a[-1]))\n"
    )
    started = subprocess.Popen

    def start(command, **options):
        tests = Path(__file__).parents[1]
        code = f"import sys; sys.path.insert(0, {str(tests)!r}); exec(open({str(script)!r}).read())"
        return started([sys.executable, "-c", code, *command[3:]], **options)

    monkeypatch.setattr(campaign.subprocess, "Popen", start)
    worker = campaign.Worker("slow", list(range(5)), seconds=4.0, megabytes=700)
    worker.run()
    kinds = [worker.found[case].kind for case in range(5)]
    assert kinds == ["right", "hung", "memory", "traceback", "right"]
