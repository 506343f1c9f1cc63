"""`gpmil paper`: every table and figure of the paper's experiments, on one page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gpmil.cli.options import PaperOptions, Source
from gpmil.cli.parts import carried_out
from gpmil.models.base import package_versions
from gpmil.models.checks import one_of
from gpmil.paper import cohorts, methods, page, study
from gpmil.paper.cohorts import StudyData
from gpmil.paper.findings import check
from gpmil.paper.methods import Method
from gpmil.paper.results import Results
from gpmil.runs.workspace import run_folder
from gpmil.show.report import RESEARCH

PANDA_SIZES = {"full": 1.0, "tenth": 0.1}
PANDA_RUNS = 2
QUICK_RUNS = 2
UNSAID = Source()  # nothing is said of how the data are read


def run(options: PaperOptions) -> None:
    """Compute what is not yet there, then write tables, figures and the page."""
    _check(options)
    console = Console(stderr=True, highlight=False)
    main, panda = _studies(options)
    plans = [*main.parts, *(panda.parts if panda else [])]
    found = carried_out(plans, options.parts, options.jobs, console)
    results = study.collect(main.cohort, main.methods, found)
    large = study.collect(panda.cohort, panda.methods, found) if panda else None
    config = {"command": "paper", **{k: _text(v) for k, v in vars(options).items()}}
    with run_folder(options.out, config | {"versions": package_versions()}) as folder:
        exhibits = page.exhibits(results, large)
        for exhibit in exhibits:
            exhibit.write(folder)
        text = page.html(exhibits, results, large)
        (folder / "index.html").write_text(text, encoding="utf-8", newline="\n")
    _print(results, large, options)


@dataclass(frozen=True)
class _Study:
    cohort: StudyData
    methods: Sequence[Method]
    parts: Sequence[study.Part]


def _check(options: PaperOptions) -> None:
    if options.panda is not None:
        one_of("--panda", options.panda, (*PANDA_SIZES, "none"))
    for name, least in (("runs", 1), ("folds", 2), ("components", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}.")
    if options.data is None and (options.source != UNSAID or options.cache is not None):
        raise ValueError("--labels and the like say how --data is read: name it, too.")
    if options.images is not None and not options.images.is_dir():
        raise ValueError(f"--images {options.images} is no folder: it holds one image per slide.")


def _studies(options: PaperOptions) -> tuple[_Study, _Study | None]:
    common: dict[str, Any] = {"n_components": options.components, "device": options.device}
    if options.data is None:
        cohort = cohorts.sicapv2_like(options.seed, options.quick)
    else:
        reading = _reading(options.source, options.cache)
        cohort = cohorts.from_files(options.data, options.folds, options.images, **reading)
    compared = methods.compared(common, options.quick, options.search)
    n_runs = options.runs or (QUICK_RUNS if options.quick else 5)
    main = _Study(cohort, compared, study.planned(cohort, compared, n_runs))
    size = options.panda or ("tenth" if options.data is None else "none")
    if size == "none":
        return main, None
    scale = 0.008 if options.quick and size == "tenth" else PANDA_SIZES[size]
    large = cohorts.panda_like(scale, options.seed, options.quick)
    kept = set(page.table6_panda.KEYS)
    few = [m for m in methods.compared(common, options.quick) if m.key in kept]
    n_large = min(n_runs, PANDA_RUNS)
    return main, _Study(large, few, study.planned(large, few, n_large, flags=False))


def _reading(source: Source, cache: Path | None) -> dict[str, Any]:
    """What was said of how the data are read, for `gpmil.read`."""
    if source.patch_labels is not None:
        raise ValueError(
            "--patch-labels: the models of the paper learn from labels of slides. Leave it out, or "
            "use gpmil cv."
        )
    unsaid = UNSAID.arguments()
    said = {k: v for k, v in source.arguments().items() if v != unsaid[k]}
    return said if cache is None else said | {"cache": cache}


# --- The terminal ---------------------------------------------------------------------------------
def _print(results: Results, panda: Results | None, options: PaperOptions) -> None:
    console = Console(highlight=False)
    console.print(f"What the paper finds, on the {results.name}:", style="bold")
    for finding in check(results, panda):
        console.print(f"- {finding.verdict}: {finding.claim} {finding.evidence}", markup=False)
    page_at = options.out / "index.html"
    console.print(f"\nWritten to {options.out}: open {page_at}. {RESEARCH}", markup=False)
    console.print(
        f"Finished parts are in {options.parts}; the folder may be deleted.", markup=False
    )


def _text(value: Any) -> Any:
    if isinstance(value, Source):
        return {k: v for k, v in value.card().items() if v != UNSAID.card()[k]}
    return str(value) if isinstance(value, Path) else value
