"""Settings of a model on the command line: `--coupling 0.5`, and back from a config.json."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from gpmil.models import BagClassifier

SETTINGS = "settings"
TASKS = {"binary": None, "ordinal": "OrdinalMIL", "nominal": "NominalMIL"}


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


def model_for(task: str, model: str) -> str:
    """The class that a task asks for.

    >>> model_for("ordinal", "VGPMILPRI"), model_for("binary", "VGPMIL")
    ('OrdinalMIL', 'VGPMIL')
    """
    if task not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}; got {task!r}.")
    own = TASKS[task]
    if model == "VGPMILPRI":  # the default
        return own or model
    if own and not model.startswith(own.removesuffix("MIL")):
        raise ValueError(f"--task {task} is for {own}; got --model {model}. Leave one out.")
    return model


def build_model(
    name: str, given: Mapping[str, str | None], patch_labels: bool = False
) -> "BagClassifier":
    """The model with the settings of the command line; random_state is 0 unless said otherwise.

    With `patch_labels` it learns from them, unless --instance-labels says otherwise.
    """
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
    if patch_labels and "instance_labels" not in defaults:
        raise ValueError(
            f"--patch-labels: a {found.__name__} cannot learn from labels of patches. Use --model "
            "VGPMILPRI or VGPMILPR."
        )
    learn = {"instance_labels": "use"} if patch_labels else {}
    return found(**{"random_state": 0, **learn, **settings})


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
