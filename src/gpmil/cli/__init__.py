"""The command line, `gpmil`: one module per command, imported when it is called.

Bad options and bad input end with exit code 2 and one readable line, never a traceback.
"""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpmil import __version__
from gpmil.cli import options, settings

logger = logging.getLogger("gpmil")
INTERRUPTED = 130

# Typer may carry its own copy of click: the class of its errors is found through one of them.
ClickException: Any = typer.BadParameter.__mro__[2]


class OneLineErrors(TyperGroup):
    """A group of commands that says what is wrong in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the arguments; without any, show the help."""
        return super().parse_args(ctx, args or ["--help"])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; the exit code is 2 for bad options or input, 130 when interrupted."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except ClickException as error:
            code = _complain(error.format_message())
        except (ValueError, OSError) as error:
            logger.debug("where it happened:", exc_info=True)
            code = _complain(options.in_options(str(error)))
        if code == INTERRUPTED:
            typer.echo("gpmil: interrupted, no folder was written", err=True)
        sys.exit(code)


def _complain(message: str) -> int:
    typer.echo(f"gpmil: {' '.join(message.split())}", err=True)
    return 2


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Gaussian-process multiple instance learning with coupled neighbours. "
    "For research, not a medical device.",
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def _gpmil(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that come before the command."""


_Port = Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")]
_Browser = Annotated[
    bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
]


@app.command("demo")
def _demo(
    out: Annotated[
        Path, typer.Option(help="Folder to write; one that gpmil wrote is replaced.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Another seed, another cohort.")] = 0,
    bags: Annotated[
        int, typer.Option(help="Slides to train on, at least 10; a third as many are held out.")
    ] = 120,
    hard: Annotated[
        bool, typer.Option("--hard", help="Smaller and fainter lesions, from one patch on.")
    ] = False,
    view: Annotated[
        bool, typer.Option("--view", help="Open the held-out slides in the viewer afterwards.")
    ] = False,
    port: _Port = 0,
    browser: _Browser = True,
) -> None:
    """Simulate slides, fit, predict held-out slides, write a page with heat maps."""
    from gpmil.cli import demo

    demo.run(out, seed, bags, hard, view, port, browser)


@app.command("paper")
@options.spread
def _paper(wanted: options.PaperOptions) -> None:
    """Every table and figure of the paper's experiments, beside its own numbers."""
    from gpmil.cli import paper

    paper.run(wanted)


@app.command("proof")
@options.spread
def _proof(wanted: options.ProofOptions) -> None:
    """Tests with a known answer for every model, on one page."""
    from gpmil.cli import proof

    proof.run(wanted)


# --- Runs -----------------------------------------------------------------------------------------
@app.command("inspect")
@options.spread
def _inspect(
    data: options.DataArgument, source: options.Source, cache: options.Cache = None
) -> None:
    """Say what would be read: slides, patches, grid, labels, and what looks wrong."""
    from gpmil.cli import inspect

    inspect.run(source.at(data), cache)


@app.command("fit", cls=settings.WithSettings)
@options.spread
def _fit(
    *,
    ctx: options.Context,
    out: options.Out,
    data: options.MaybeData = None,
    source: options.Source,
    cache: options.Cache = None,
    model: options.ModelName = "VGPMILPRI",
    task: options.Task = "binary",
    config: options.ConfigFile = None,
    rate: options.Rate = 0.1,
    alpha: options.Alpha = 0.1,
    interval_patches: options.IntervalPatches = 20_000,
    batch: options.Batch = 20_000,
) -> None:
    """Fit a model. Its settings are options too: --coupling 0.5 --n-inducing 100 --calibrated."""
    source = options.with_data(ctx, source, data, config)
    from gpmil.cli import fit
    from gpmil.runs.predict import PredictionOptions

    if config is not None:
        return fit.repeat(config, out, cache)
    asked = PredictionOptions(rate, alpha, interval_patches, batch)
    taught = source.patch_labels is not None
    model = settings.model_for(task, model)
    built = settings.build_model(model, ctx.meta[settings.SETTINGS], taught)
    return fit.run(source, asked, out, built, cache)


@app.command("cv", cls=settings.WithSettings)
@options.spread
def _cv(
    *,
    ctx: options.Context,
    out: options.Out,
    data: options.MaybeData = None,
    source: options.Source,
    cache: options.Cache = None,
    model: options.ModelName = "VGPMILPRI",
    task: options.Task = "binary",
    config: options.ConfigFile = None,
    folds: Annotated[int, typer.Option(help="Folds; slides of a known patient stay together.")] = 5,
    repeats: Annotated[int, typer.Option(help="Times everything is repeated, other folds.")] = 1,
    splits: Annotated[
        Path | None,
        typer.Option(help="Given splits: folder of CLAM's splits_0.csv, ... or table slide, fold."),
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="Column of the label table: a site stays in one fold.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the folds.")] = 0,
    rate: options.Rate = 0.1,
    alpha: options.Alpha = 0.1,
    interval_patches: options.IntervalPatches = 20_000,
) -> None:
    """Cross-validate. Settings of the model are options too: --coupling 0.5 --n-inducing 100."""
    source = options.with_data(ctx, source, data, config)
    from gpmil.cli import cv
    from gpmil.runs.predict import PredictionOptions

    if config is not None:
        return cv.repeat(config, out, cache)
    given = None if splits is None else str(splits)
    held_out = cv.Folds(folds, repeats, given, site, seed)
    asked = PredictionOptions(rate, alpha, interval_patches)
    taught = source.patch_labels is not None
    model = settings.model_for(task, model)
    built = settings.build_model(model, ctx.meta[settings.SETTINGS], taught)
    return cv.run(source, held_out, asked, out, built, cache)


@app.command("predict")
@options.spread
def _predict(
    *,
    ctx: options.Context,
    out: options.Out,
    model: Annotated[
        Path | None,
        typer.Argument(help="A run of gpmil fit, or a saved model.", show_default=False),
    ] = None,
    data: options.MaybeData = None,
    source: options.Source,
    cache: options.Cache = None,
    rate: options.Rate = 0.1,
    alpha: options.Alpha = 0.1,
    coupling: Annotated[
        str | None,
        typer.Option(help="In place of the fitted one; several, as in 0,0.5,1, one after another."),
    ] = None,
    interval_patches: options.IntervalPatches = 20_000,
    batch: options.Batch = 20_000,
    device: options.Device = None,
    allow_mismatch: Annotated[
        bool,
        typer.Option(
            "--allow-mismatch",
            help="Predict though magnification, patch size, overlap, encoder or positive class are "
            "not those of the model.",
        ),
    ] = False,
    config: options.ConfigFile = None,
) -> None:
    """Predict slides and their patches with a fitted model."""
    if model is None and config is None:
        raise typer.BadParameter("name the model, then the data: gpmil predict RUN DATA --out NEW.")
    source = options.with_data(ctx, source, data, config)
    from gpmil.cli import predict
    from gpmil.runs.predict import PredictionOptions

    if config is not None:
        return predict.repeat(config, out, cache)
    use = predict.ModelUse(str(model), coupling, device, allow_mismatch)
    asked = PredictionOptions(rate, alpha, interval_patches, batch)
    return predict.run(source, use, asked, out, cache)


@app.command("evaluate")
@options.spread
def _evaluate(
    run: Annotated[
        Path, typer.Argument(help="A run of gpmil predict or gpmil cv.", show_default=False)
    ],
    table: options.LabelTable,
    patch_labels: Annotated[
        Path | None, typer.Option(help="Table with one row per patch: slide, x, y, label.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: metrics.json of the run.")
    ] = None,
) -> None:
    """Judge the predictions of a run by a table of labels, with intervals."""
    from gpmil.cli import evaluate

    evaluate.run(run, table, patch_labels, out)


@app.command("doctor")
def _doctor() -> None:
    """Check the installation: PASS, WARN and FAIL, with the fix."""
    from gpmil.cli import doctor

    if not doctor.run():
        raise typer.Exit(1)


# --- Maps -----------------------------------------------------------------------------------------
_Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A finished run, or one patches/<slide>.csv.gz.", show_default=False
    ),
]
_SlideFiles = Annotated[
    Path | None, typer.Option(help="Folder of the slide files, named like the slides.")
]
_OneSlide = Annotated[
    list[str] | None, typer.Option("--slide", help="Only this slide; can be given several times.")
]
_PatchStep = Annotated[
    float | None,
    typer.Option("--step", help="Distance of neighbouring patches; default as the run noted it."),
]

_OneCoupling = Annotated[
    float | None,
    typer.Option("--coupling", help="Where a run has several; default the smallest."),
]
_OneRepeat = Annotated[
    int | None,
    typer.Option(
        "--repeat", help="Of gpmil cv, from 0; default where a slide is tested first.", min=0
    ),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Make again what is there already.")]


@app.command("heatmap")
def _heatmap(
    run: _Run,
    slides: _SlideFiles = None,
    slide: _OneSlide = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to add the maps to; default: RUN/heatmaps.")
    ] = None,
    uncertainty: Annotated[
        str,
        typer.Option(help="Doubt: panel (beside), opacity (fainter) or none."),
    ] = "panel",
    per_class: Annotated[
        bool, typer.Option("--per-class", help="A map of every grade or type, too.")
    ] = False,
    step: _PatchStep = None,
    coupling: _OneCoupling = None,
    repeat: _OneRepeat = None,
    overwrite: _Overwrite = False,
) -> None:
    """Draw the slides of a run as heat maps, over the slide files where they are given."""
    from gpmil.cli import heatmap
    from gpmil.runs.maps_input import MapOptions

    wanted = MapOptions(run, out, slides, slide, step, coupling, repeat, overwrite)
    heatmap.run(wanted, uncertainty, per_class)


@app.command("qupath")
def _qupath(
    run: _Run,
    slides: _SlideFiles = None,
    slide: _OneSlide = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to add the files to; default: RUN/qupath.")
    ] = None,
    gzip: Annotated[bool, typer.Option("--gzip", help="Compress: <slide>.geojson.gz.")] = False,
    step: _PatchStep = None,
    coupling: _OneCoupling = None,
    repeat: _OneRepeat = None,
    overwrite: _Overwrite = False,
) -> None:
    """Write the patches of a run as GeoJSON for QuPath (slide files: for their bounds)."""
    from gpmil.cli import qupath
    from gpmil.runs.maps_input import MapOptions

    qupath.run(MapOptions(run, out, slides, slide, step, coupling, repeat, overwrite), gzip)


# --- Viewer ---------------------------------------------------------------------------------------
@app.command("view")
def _view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Finished runs; several are compared.", show_default=False
        ),
    ],
    slides: _SlideFiles = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this computer need a token.")
    ] = "127.0.0.1",
    port: _Port = 0,
    browser: _Browser = True,
    token: Annotated[
        str | None, typer.Option(help="What the address must end in; default: made up if needed.")
    ] = None,
) -> None:
    """Look at runs in the browser: slides, maps, uncertainty, flags. Ctrl-C ends it."""
    from gpmil.cli import view

    view.run(runs, slides, host, port, browser, token)


# --- Speed ----------------------------------------------------------------------------------------
@app.command(
    "bench",
    add_help_option=False,  # the benchmarks have their own
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _bench(ctx: options.Context) -> None:
    """Measure this machine: seconds, memory and ratios to a naive twin (in a clone)."""
    from gpmil.cli import bench

    raise typer.Exit(bench.run(ctx.args))


def main() -> None:
    """Entry point of the command `gpmil`."""
    app(prog_name="gpmil")
