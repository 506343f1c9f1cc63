"""Options of the commands, each written once, and the cohort that they name."""

import ast
import functools
import inspect
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from gpmil.cli.settings import SETTINGS
from gpmil.cli.terminal import print_line
from gpmil.runs.source import arguments as read_arguments
from gpmil.runs.source import patch_words

if TYPE_CHECKING:
    from typer import Context

    from gpmil.data.bags import Bags
else:
    # What a command is given is click's own, of which typer may carry a copy.
    Context = typer.Context.__mro__[1]

logger = logging.getLogger("gpmil")


# --- Groups of options ----------------------------------------------------------------------------
def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with an option for every field, where a parameter is one of the groups below.

    Typer knows no groups; it reads the signature, so that the fields are put there.
    """
    own = inspect.signature(command).parameters
    groups = {name: p.annotation for name, p in own.items() if is_dataclass(p.annotation)}
    options: list[inspect.Parameter] = []
    for name, parameter in own.items():
        one = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        options += _options(groups[name]) if name in groups else one

    @functools.wraps(command)
    def called(**given: Any) -> Any:
        single = {name: given[name] for name in own if name not in groups}
        return command(**single, **{name: _filled(kind, given) for name, kind in groups.items()})

    vars(called)["__signature__"] = inspect.Signature(options)
    return called


def _option_fields(group: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of the fields that are options, or groups of them."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if get_origin(hints[field.name]) is Annotated or is_dataclass(hints[field.name]):
            yield field.name, hints[field.name], field.default


def _options(group: Any) -> Iterator[inspect.Parameter]:
    for name, kind, default in _option_fields(group):
        if is_dataclass(kind):
            yield from _options(kind)
        else:
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )


def _filled(group: Any, given: Mapping[str, Any]) -> Any:
    return group(
        **{
            name: _filled(kind, given) if is_dataclass(kind) else given[name]
            for name, kind, _ in _option_fields(group)
        }
    )


# --- Options by name ------------------------------------------------------------------------------
READABLE = "Folder of feature files (TRIDENT, CLAM, STAMP, ...), a table or an npz file."
DataArgument = Annotated[Path, typer.Argument(help=READABLE, show_default=False)]
MaybeData = Annotated[Path | None, typer.Argument(help=READABLE, show_default=False)]
Cache = Annotated[
    Path | None, typer.Option(help="Folder in which features are kept for the next time.")
]
Out = Annotated[Path, typer.Option(help="Folder to write; an earlier run there is replaced.")]
ModelName = Annotated[str, typer.Option("--model", help="The class of the model.")]
Task = Annotated[
    str,
    typer.Option(
        help="binary; ordinal, with --grades benign,3,4,5 in their order; or nominal, with "
        "--classes benign,ductal,lobular, the negative one first."
    ),
]
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
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if any.")]
Batch = Annotated[int, typer.Option(help="Patches predicted, and kept, at a time.")]


@dataclass(frozen=True, kw_only=True)
class LabelTable:
    """The table with the labels of slides, its columns and its classes."""

    labels: Annotated[
        Path | None, typer.Option(help="Table with one row per slide: slide, label, maybe patient.")
    ] = None
    slide_table: Annotated[
        Path | None,
        typer.Option(
            help="Patient and file name of every slide, where --labels has one row per patient."
        ),
    ] = None
    slide: Annotated[str | None, typer.Option(help="Its column with the slide's name.")] = None
    label: Annotated[str | None, typer.Option(help="Its column with the label.")] = None
    positive: Annotated[
        str | None,
        typer.Option(help="The class that counts as positive: cancer, or 3,4, or '>=3'."),
    ] = None
    negative: Annotated[
        str | None,
        typer.Option(help="The negative one, likewise; of two classes --positive is enough."),
    ] = None
    exclude: Annotated[
        str | None, typer.Option(help="Classes that are taken as unlabelled: unknown, say.")
    ] = None
    patient: Annotated[
        str | None,
        typer.Option(help="Its column with the patient; none: every slide is one of its own."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """What `gpmil.read` takes, in its own types."""
        # The word none says that there are no patients.
        none = self.patient is not None and self.patient.casefold() == "none"
        return asdict(self) | {"patient": False if none else self.patient}


@dataclass(frozen=True)
class Source(LabelTable):
    """Where the data are and how they are read; all but `data` is the same option everywhere."""

    data: str = ""
    step: Annotated[
        str | None, typer.Option(help="Spacing of patches where files do not tell: 256 or 256,512.")
    ] = None
    graph: Annotated[
        str, typer.Option(help="Neighbours: grid4, grid8, radius, knn, chain or none.")
    ] = "grid4"
    format: Annotated[
        str | None, typer.Option(help="Format of the files, if it is not recognised.")
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out files that are corrupt.")
    ] = False
    patch_labels: Annotated[
        Path | None,
        typer.Option(
            help="Labels of patches: a table with slide, x, y, label; QuPath annotations "
            "(.geojson, named after the slide); or a folder of them. fit and cv learn from them."
        ),
    ] = None
    patch_positive: Annotated[
        str | None,
        typer.Option(help="Class of --patch-labels that is tumour, where slides have other words."),
    ] = None
    patch_negative: Annotated[
        str | None, typer.Option(help="Its classes that are not tumour, likewise.")
    ] = None
    patch_exclude: Annotated[
        str | None, typer.Option(help="Its classes that are taken as unlabelled.")
    ] = None

    def at(self, data: Path | None) -> "Source":
        """The same way of reading, of these data."""
        if data is None:
            raise typer.BadParameter(
                "Missing argument 'DATA': a folder of feature files or a table."
            )
        return replace(self, data=str(data))

    def arguments(self) -> dict[str, Any]:
        """What `gpmil.read` takes besides the path, in its own types."""
        return read_arguments(asdict(self))

    def card(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> "Source":
        """What `card` wrote."""
        paths = ("labels", "slide_table", "patch_labels")
        tables = {k: card[k] and Path(card[k]) for k in paths if k in card}
        return cls(**{**card, **tables})

    def read(self, cache: Path | None = None) -> "tuple[Bags, Any]":
        """The cohort, and the report of what was read."""
        from gpmil import io

        bags, report = io.read_with_report(self.data, cache=cache, **self.arguments())
        if self.patch_labels is not None:
            try:
                bags = io.with_patch_labels(bags, self.patch_labels, **patch_words(asdict(self)))
            except ValueError as error:  # slides may have other words for their classes
                why = re.sub("--(positive|negative|exclude)", r"--patch-\1", in_options(str(error)))
                raise ValueError(why) from error
        return bags, report

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


def parts_beside(out: Path) -> Path:
    """Where finished parts of a study are kept.

    >>> parts_beside(Path("a/paper")).as_posix()
    'a/paper-parts'
    """
    return out.with_name(out.name + "-parts")


@dataclass(frozen=True)
class PaperOptions:
    """What gpmil paper is asked for."""

    out: Annotated[
        Path, typer.Option(help="Folder to write; one that gpmil wrote is replaced.")
    ] = Path("paper")
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version of everything, in two minutes.")
    ] = False
    data: Annotated[
        Path | None,
        typer.Option(
            help="Own cohort in place of the simulated one: a folder of feature files (with "
            "--labels), of SICAPv2 tables (Train.csv, Test.csv), a table or an npz file; with "
            "parts 'train' and 'test', or cross-validated."
        ),
    ] = None
    source: Source = Source()  # how the data are read
    cache: Cache = None
    images: Annotated[
        Path | None, typer.Option(help="Folder with one image per slide, named like the slide.")
    ] = None
    panda: Annotated[
        str | None,
        typer.Option(
            help="The large simulated cohort: tenth, full (10,503 slides) or none. Default: tenth, "
            "or none with --data."
        ),
    ] = None
    runs: Annotated[
        int | None, typer.Option(help="Runs of every method; default 5, with --quick 2.")
    ] = None
    folds: Annotated[int, typer.Option(help="Folds for a cohort without a split.")] = 5
    components: Annotated[
        int | None, typer.Option(help="Reduce features to this many PCA scores.")
    ] = None
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Networks choose learning rate, decay and epochs by cross-validation."
        ),
    ] = False
    seed: Annotated[int, typer.Option(help="Of the simulated cohorts.")] = 0
    jobs: Annotated[
        int, typer.Option(help="Parts computed at once; more than one blurs the times.")
    ] = 1
    device: Device = None

    @property
    def parts(self) -> Path:
        """Where finished parts are kept, beside the folder that is written."""
        return parts_beside(self.out)


@dataclass(frozen=True)
class ProofOptions:
    """What gpmil proof is asked for."""

    out: Annotated[
        Path, typer.Option(help="Folder to write; one that gpmil wrote is replaced.")
    ] = Path("proof")
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version of everything, in a few minutes.")
    ] = False
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="One of unit-tests, shifted-mean, posterior, promises, real-sets; can be given "
            "several times. Default: all, real-sets with --data."
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(help="Only models of this key (pr, attention, ...); several times."),
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="Folder of real sets, every .npz in it one.")
    ] = None
    seeds: Annotated[
        int | None, typer.Option(help="Seeds of models and bags; default 10, with --quick 2.")
    ] = None
    cohorts: Annotated[
        int, typer.Option(help="Cohorts drawn for every promise; five times as many for ranks.")
    ] = 100
    jobs: Annotated[int, typer.Option(help="Parts computed at once, one thread each.")] = 1
    minutes: Annotated[
        float | None,
        typer.Option(help="Write the page after so many, from what is finished by then."),
    ] = None

    @property
    def parts(self) -> Path:
        """Where finished parts are kept, beside the folder that is written."""
        return parts_beside(self.out)


# --- The words of the command line ----------------------------------------------------------------
def report_lines(report: Any) -> tuple[list[str], list[str]]:
    """What a reader found and what is alarming, in the words of the command line."""
    return [in_options(x) for x in report.lines()], [in_options(x) for x in report.warnings()]


# What messages call by the name of a Python argument; the last four are no options.
ARGUMENTS = ("cache", *(name for name, _, _ in _option_fields(Source)))
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


def labelled(bags: "Bags") -> "Bags":
    """The slides with a label; how many were left out is said."""
    from gpmil.data.checks import count

    known = bags.labels >= 0
    if not known.any():
        raise ValueError(
            f"none of the {len(bags)} slides has a label: name a table with one row per slide with "
            "--labels, and its columns with --slide and --label."
        )
    if not known.all():
        logger.warning("left out for want of a label: %s.", count(int((~known).sum()), "slide"))
    return bags if known.all() else bags[known]


def with_data(ctx: Context, source: Source, data: Path | None, config: Path | None) -> Source:
    """The source with its data, which are not said where --config names a run to repeat."""
    if config is None:
        return source.at(data)
    refuse_others(ctx)
    return source


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
