"""`gpmil proof`: tests with a known answer for every model, on one page."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from gpmil.cli.options import ProofOptions
from gpmil.cli.parts import carried_out
from gpmil.models.base import package_versions
from gpmil.models.checks import one_of
from gpmil.proof.page import TESTS, html
from gpmil.proof.plan import Plan
from gpmil.runs.workspace import run_folder
from gpmil.show.report import RESEARCH

SEEDS, QUICK_SEEDS = 10, 2


def run(options: ProofOptions) -> None:
    """Compute what is not yet there, then write tables, pictures and the page."""
    chosen = _chosen(options)
    plan = Plan(
        options.quick,
        options.seeds or (QUICK_SEEDS if options.quick else SEEDS),
        options.cohorts,
        options.data,
        tuple(options.model or ()),
    )
    parts = [part for name in chosen for part in TESTS[name].parts(plan)]
    if options.model and not parts:
        raise ValueError(f"--model {' '.join(options.model)}: no such model in these tests.")
    console = Console(stderr=True, highlight=False)
    found = carried_out(parts, options.parts, options.jobs, console)
    config: dict[str, Any] = {"command": "proof"}
    config |= {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    with run_folder(options.out, config | {"versions": package_versions()}) as folder:
        exhibits = [TESTS[name].build(found) for name in chosen]
        for exhibit in exhibits:
            exhibit.write(folder)
        text = html(exhibits, _command(options))
        (folder / "index.html").write_text(text, encoding="utf-8", newline="\n")
    out = Console(highlight=False)
    page_at = options.out / "index.html"
    out.print(f"Written to {options.out}: open {page_at}. {RESEARCH}", markup=False)
    out.print(f"Finished parts are in {options.parts}; the folder may be deleted.", markup=False)


def _chosen(options: ProofOptions) -> list[str]:
    for name, least in (("seeds", 1), ("cohorts", 2), ("jobs", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}.")
    for name in options.only or ():
        one_of("--only", name, tuple(TESTS))
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"--data {options.data} is no folder: it holds the real sets as .npz.")
    wanted = [name for name in TESTS if not options.only or name in options.only]
    return [n for n in wanted if n != "real-sets" or options.data is not None or options.only]


def _command(options: ProofOptions) -> str:
    """What makes the page again, the folders apart."""
    words = ["gpmil", "proof"]
    words += ["--quick"] if options.quick else []
    words += [word for name in options.only or () for word in ("--only", name)]
    words += [word for name in options.model or () for word in ("--model", name)]
    words += ["--seeds", str(options.seeds)] if options.seeds is not None else []
    words += ["--cohorts", str(options.cohorts)] if options.cohorts != Plan.cohorts else []
    words += ["--data", "FOLDER"] if options.data is not None else []
    return shlex.join(words)
