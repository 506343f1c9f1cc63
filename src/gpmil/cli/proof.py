"""`gpmil proof`: tests with a known answer for every model, on one page."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from gpmil.cli.options import ProofOptions
from gpmil.cli.parts import carried_out
from gpmil.models.base import package_versions
from gpmil.models.checks import one_of
from gpmil.paper import study
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
    plans = {name: list(TESTS[name].parts(plan)) for name in chosen}
    parts = [part for of in plans.values() for part in of]
    known = {part.method.key for part in parts if isinstance(part, study.Part)}
    if unknown := set(plan.only) - known:
        raise ValueError(f"--model {' '.join(sorted(unknown))}: no such model in these tests.")
    console = Console(stderr=True, highlight=False)
    found = carried_out(parts, options.parts, options.jobs, console, options.minutes)
    config: dict[str, Any] = {"command": "proof"}
    config |= {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    with run_folder(options.out, config | {"versions": package_versions()}) as folder:
        exhibits = [TESTS[name].exhibit(plans[name], found) for name in chosen]
        for exhibit in exhibits:
            exhibit.write(folder)
        each = [_command(options, [name]) for name in chosen]
        text = html(exhibits, _command(options, options.only), each)
        (folder / "index.html").write_text(text, encoding="utf-8", newline="\n")
    out = Console(highlight=False)
    page_at = options.out / "index.html"
    out.print(f"Written to {options.out}: open {page_at}. {RESEARCH}", markup=False)
    if len(found) < len(parts):
        out.print(
            f"{len(parts) - len(found)} of {len(parts)} parts were not finished in time: the same "
            "command goes on with them.",
            soft_wrap=True,
        )
    out.print(f"Finished parts are in {options.parts}; the folder may be deleted.", markup=False)


def _chosen(options: ProofOptions) -> list[str]:
    for name, least in (("seeds", 1), ("cohorts", 2), ("jobs", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}.")
    if options.minutes is not None and not options.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {options.minutes:g}.")
    for name in options.only or ():
        one_of("--only", name, tuple(TESTS))
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"--data {options.data} is no folder: it holds the real sets as .npz.")
    wanted = [name for name in TESTS if not options.only or name in options.only]
    return [n for n in wanted if n != "real-sets" or options.data is not None or options.only]


def _command(options: ProofOptions, only: list[str] | None) -> str:
    """What makes these tests again, the folders apart."""
    words = ["gpmil", "proof"]
    words += ["--quick"] if options.quick else []
    words += [word for name in only or () for word in ("--only", name)]
    words += [word for name in options.model or () for word in ("--model", name)]
    words += ["--seeds", str(options.seeds)] if options.seeds is not None else []
    words += ["--cohorts", str(options.cohorts)] if options.cohorts != Plan.cohorts else []
    words += ["--minutes", f"{options.minutes:g}"] if options.minutes is not None else []
    words += ["--jobs", str(options.jobs)] if options.minutes is not None else []
    real = options.data is not None and "real-sets" in (only or TESTS)
    words += ["--data", "FOLDER"] if real else []
    return shlex.join(words)
