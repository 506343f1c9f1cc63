"""What several commands share: where the data are, the settings of a model, progress."""

import ast
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer import Context

    from gpmil.data.bags import Bags
    from gpmil.models import BagClassifier
else:
    # What a command is given is click's own, of which typer may carry a copy.
    Context = typer.Context.__mro__[1]

logger = logging.getLogger("gpmil")

SETTINGS = "settings"

# --- Options by name ------------------------------------------------------------------------------
READABLE = "Folder of feature files (TRIDENT, CLAM, STAMP, ...), a table or an npz file."
DataArgument = Annotated[Path, typer.Argument(help=READABLE, show_default=False)]
MaybeData = Annotated[Path | None, typer.Argument(help=READABLE, show_default=False)]
Labels = Annotated[
    Path | None, typer.Option(help="Table with one row per slide: slide, label, maybe patient.")
]
SlideColumn = Annotated[str | None, typer.Option(help="Its column with the slide's name.")]
LabelColumn = Annotated[str | None, typer.Option(help="Its column with the label.")]
PatientColumn = Annotated[
    str | None,
    typer.Option(help="Its column with the patient; none: every slide is one of its own."),
]
Positive = Annotated[
    str | None, typer.Option(help="The class that counts as positive: cancer, or 3,4, or '>=3'.")
]
Negative = Annotated[
    str | None,
    typer.Option(help="The negative one, likewise; of two classes --positive is enough."),
]
Exclude = Annotated[
    str | None, typer.Option(help="Classes that are taken as unlabelled: unknown, say.")
]
SlideTable = Annotated[
    Path | None,
    typer.Option(
        help="Patient and file name of every slide, where --labels has one row per patient."
    ),
]
Step = Annotated[
    str | None, typer.Option(help="Spacing of patches where files do not tell: 256 or 256,512.")
]
Graph = Annotated[str, typer.Option(help="Neighbours: grid4, grid8, radius, knn, chain or none.")]
Format = Annotated[str | None, typer.Option(help="Format of the files, if it is not recognised.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out files that are corrupt.")]
Cache = Annotated[
    Path | None, typer.Option(help="Folder in which features are kept for the next time.")
]
Out = Annotated[Path, typer.Option(help="Folder to write; an earlier run there is replaced.")]
ModelName = Annotated[str, typer.Option("--model", help="The class of the model.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="config.json of a run, to be repeated exactly.")
]
Rate = Annotated[float, typer.Option(help="False discovery rate of flagged patches.")]
Alpha = Annotated[float, typer.Option(help="Error allowed among accepted slides.")]
IntervalPatches = Annotated[
    int,
    typer.Option(
        help="Slides of more patches get no interval, which takes about as long as predicting them."
    ),
]
Batch = Annotated[int, typer.Option(help="Patches predicted, and kept, at a time.")]


@dataclass(frozen=True)
class Source:
    """Where the data are and how they are read, as on the command line."""

    data: str
    labels: str | None = None
    slide: str | None = None
    label: str | None = None
    positive: str | None = None
    patient: str | None = None
    step: str | None = None
    graph: str = "grid4"
    format: str | None = None
    skip_bad: bool = False
    negative: str | None = None
    exclude: str | None = None
    slide_table: str | None = None

    def read(self, cache: Path | None = None) -> "tuple[Bags, Any]":
        """The cohort, and the report of what was read."""
        from gpmil import io

        return io.read_with_report(
            self.data,
            self.labels,
            slide=self.slide,
            label=self.label,
            positive=self.positive,
            patient=patient_column(self.patient),
            step=None if self.step is None else _step(self.step),
            graph=None if self.graph.lower() == "none" else self.graph,
            format=self.format,
            skip_bad=self.skip_bad,
            cache=cache,
            negative=self.negative,
            exclude=self.exclude,
            slide_table=self.slide_table,
        )

    def cohort(self, cache: Path | None = None) -> "tuple[Bags, list[str]]":
        """The cohort, and lines about it for config.json; classes and what is alarming are said."""
        bags, report = self.read(cache)
        lines, warnings = report_lines(report)
        for line in warnings:
            logger.warning("%s: %s", Path(self.data).name, line)
        for line in lines:
            if line.startswith("classes:") or "taken as one class" in line:
                print_line(line, sys.stderr)
        # Where features are kept for the next time is not a fact of the data.
        return bags, [*(x for x in lines if not x.startswith("features are kept")), *warnings]


def report_lines(report: Any) -> tuple[list[str], list[str]]:
    """What a reader found and what is alarming, in the words of the command line."""
    return [in_options(x) for x in report.lines()], [in_options(x) for x in report.warnings()]


# What messages call by the name of a Python argument; the last four are no options.
ARGUMENTS = (
    *("labels", "slide_table", "slide", "label", "patient", "positive", "negative", "exclude"),
    *("step", "graph", "format", "skip_bad", "cache"),
)
NO_OPTION = ("coords", "features", "split", "instance_label")
ARGUMENT = re.compile(
    rf"""(?<![\w./'"-])({"|".join((*ARGUMENTS, *NO_OPTION))})="""
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+)?(, (?=\w+=['"]))?"""
)


def in_options(message: str) -> str:
    """A message of the package with options in place of Python arguments.

    >>> in_options("Say which one with slide=, as in positive='a b', exclude='?', or graph=None.")
    "Say which one with --slide, as in --positive 'a b' --exclude '?', or --graph none."
    """

    def option(found: re.Match[str]) -> str:
        name, value, another = found[1], found[2], found[3]
        if name in NO_OPTION:
            return f"{found[0]} (of gpmil.io.tables.read in Python)"
        words = ["--" + name.replace("_", "-")]
        if value is not None and value != "True":
            quoted = value[0] in "'\""
            words.append(shlex.quote(ast.literal_eval(value)) if quoted else value.lower())
        return " ".join(words) + (" " if another else "")

    return ARGUMENT.sub(option, message)


def patient_column(given: str | None) -> str | bool | None:
    """The column as `gpmil.read` takes it, where none says that there are no patients."""
    return False if given is not None and given.casefold() == "none" else given


def _step(text: str) -> float | tuple[float, ...]:
    try:
        numbers = tuple(float(piece) for piece in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"--step must be a number or a pair such as 256,512, got {text!r}."
        ) from error
    return numbers[0] if len(numbers) == 1 else numbers


def labelled(bags: "Bags") -> "Bags":
    """The slides with a label; how many were left out is said."""
    from gpmil.data.checks import count

    known = bags.labels >= 0
    if not known.any():
        raise ValueError(
            f"none of the {len(bags)} slides has a label: name a table with a row a slide with "
            "--labels, and its columns with --slide and --label."
        )
    if not known.all():
        logger.warning("left out for want of a label: %s.", count(int((~known).sum()), "slide"))
    return bags if known.all() else bags[known]


# --- Settings of a model --------------------------------------------------------------------------
class WithSettings(TyperCommand):
    """A command whose unknown options are settings of the model: `--coupling 0.5`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the settings aside, before anything takes their values for arguments."""
        own = {name for p in self.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
        rest, ctx.meta[SETTINGS] = separate(args, own)
        return super().parse_args(ctx, rest)


def separate(args: Sequence[str], own: set[str]) -> tuple[list[str], dict[str, str | None]]:
    """Arguments of the command, and settings by Python name; None where a value is missing.

    >>> separate(["data", "--mean", "-4", "--out", "run", "--n-inducing=9"], {"--out"})
    (['data', '--out', 'run'], {'mean': '-4', 'n_inducing': '9'})
    """
    rest: list[str] = []
    found: dict[str, str | None] = {}
    left = list(args)
    while left:
        token = left.pop(0)
        name, equals, text = token.partition("=")
        value: str | None = text
        if token == "--":
            return [*rest, token, *left], found
        if not token.startswith("--") or name in own:
            rest.append(token)
            continue
        key = name.removeprefix("--").replace("-", "_")
        if key in found:
            raise typer.BadParameter(f"{name} is given twice.")
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("--") else None
        found[key] = value
    return rest, found


def build_model(name: str, given: Mapping[str, str | None]) -> "BagClassifier":
    """The model with the settings of the command line; random_state is 0 unless said otherwise."""
    from gpmil.models import CLASSES

    plain = name.replace("-", "").replace("_", "").casefold()
    found = next((cls for key, cls in CLASSES.items() if key.casefold() == plain), None)
    if found is None:
        raise ValueError(f"--model must be one of {', '.join(CLASSES)}; got {name!r}.")
    defaults = found().get_params(deep=False)
    unknown = [key for key in given if key not in defaults]
    if unknown:
        raise ValueError(
            f"no such option: --{unknown[0].replace('_', '-')}; settings of {found.__name__} are "
            f"{', '.join(sorted(defaults))}."
        )
    settings = {key: _value(key, text, defaults[key]) for key, text in given.items()}
    return found(**{"random_state": 0, **settings})


def _value(key: str, text: str | None, default: Any) -> Any:
    if text is None:
        if isinstance(default, bool):
            return True
        raise ValueError(f"option --{key.replace('_', '-')} requires an argument.")
    if isinstance(default, tuple):
        return tuple(parse(piece) for piece in text.split(",") if piece.strip())
    return parse(text)


def parse(text: str) -> Any:
    """A setting from its text: none, true, false, a number, several, or a word.

    >>> parse("auto"), parse("None"), parse("true"), parse("3"), parse("1e-3"), parse("1,2.5")
    ('auto', None, True, 3, 0.001, [1, 2.5])
    """
    text = text.strip()
    words = {"none": None, "true": True, "false": False}
    if text.casefold() in words:
        return words[text.casefold()]
    if "," in text:
        return [parse(piece) for piece in text.split(",")]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def model_card(model: "BagClassifier") -> dict[str, Any]:
    """Class and settings, for config.json."""
    from gpmil.models.checks import plain

    settings = model.get_params(deep=False)
    return {"class": type(model).__name__, "settings": {k: plain(v) for k, v in settings.items()}}


def model_from_card(card: Mapping[str, Any]) -> "BagClassifier":
    """The model that `model_card` described, not fitted."""
    from gpmil.models import CLASSES

    try:
        settings = {k: tuple(v) if k == "optimize" else v for k, v in card["settings"].items()}
        return CLASSES[card["class"]](**settings)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the model of this configuration is not known here ({error}): was it written by "
            "another version of gpmil?"
        ) from error


# --- A run that is repeated -----------------------------------------------------------------------
def refuse_others(ctx: Context) -> None:
    """With --config nothing else is said but --out."""
    given = [
        name
        for name in ctx.params
        if name not in ("out", "config", "cache")
        and getattr(ctx.get_parameter_source(name), "name", "DEFAULT") == "COMMANDLINE"
    ]
    given += list(ctx.meta.get(SETTINGS, {}))
    if given:
        raise ValueError(
            f"--config repeats a run as it was: leave out {given[0].replace('_', '-')!r}, or name "
            "all options in place of --config."
        )


def repeated(file: Path, command: str) -> dict[str, Any]:
    """The configuration of the run that is to be repeated."""
    from gpmil.runs.files import read_config

    card = read_config(file)
    if card["command"] != command:
        raise ValueError(
            f"{file} is the configuration of gpmil {card['command']}: repeat it with gpmil "
            f"{card['command']} --config."
        )
    return card


def check_repeated(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """The data must be the same; other versions are worth a line."""
    # Earlier versions noted less of the data.
    if any(now["data"].get(name) != value for name, value in before["data"].items()):
        raise ValueError(
            "the data are not those of the run to be repeated (another fingerprint): files, labels "
            "or positions have changed. Run without --config on the data as they are now."
        )
    if before["versions"] != now["versions"]:
        logger.warning("versions differ from those of the run: digits may, too.")


# --- Progress -------------------------------------------------------------------------------------
@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that announces the next step: a bar on a terminal, else one line a step."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: print_line(text, sys.stderr)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun: list[str] = []

        def step(text: str) -> None:
            bar.update(task, description=text, completed=len(begun))
            begun.append(text)

        yield step


def print_line(text: str, file: Any = None) -> None:
    """A plain line, to standard output unless said otherwise."""
    (file or sys.stdout).write(text + "\n")


def write_report(folder: Path) -> None:
    """report.html of an assembled run."""
    from gpmil.runs import page

    page.write(folder)


def show_metrics(found: Mapping[str, Any]) -> None:
    """The main metrics with their intervals, a line each."""
    from gpmil.runs.judge import NO_PATIENT, estimate_of

    for coupling, part in found.get("couplings", {}).items():
        print_line(f"coupling {coupling}:")
        show_metrics(part)
    for what, names in SHOWN.items():
        for name in names if what in found else ():
            estimate = estimate_of(found[what]["metrics"][name])
            print_line(f"{what} {name.replace('_', ' ')}: {estimate}")
    if "slides" in found:
        patients = found["slides"]["patients"]
        known = f"Slides of one patient stay together; intervals by patient, of {patients}."
        print_line(NO_PATIENT if patients is None else known)


SHOWN = {
    "slides": ("auc", "average_precision", "accuracy", "log_loss", "calibration_error"),
    "patches": ("auc", "average_precision", "within_bag_auc", "false_discovery_rate", "power"),
}
