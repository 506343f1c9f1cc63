"""config.json of a run: all that was said and read, by which the run can be repeated."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpmil.cli.options import Source
from gpmil.data.bags import Bags
from gpmil.models.base import package_versions
from gpmil.runs.data_card import cache_of, data_card
from gpmil.runs.files import read_config
from gpmil.runs.predict import PredictionOptions

logger = logging.getLogger("gpmil")


def run_config(
    command: str,
    options: Mapping[str, Any],
    model: Mapping[str, Any],
    bags: Bags,
    lines: Sequence[str],
    cache: Path | None,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the run is made of; `before` is the configuration of a run that is repeated."""
    config = {
        "command": command,
        "options": options,
        "model": model,
        "versions": package_versions(),
        "data": data_card(bags, before),
        "cache": None if cache is None else str(cache),
        "read": lines,
    }
    if before is not None:
        check_repeated(before, config)
    return config


class Repeat(NamedTuple):
    """What a config.json says of the run that is to be repeated."""

    card: dict[str, Any]  # all of it
    source: Source
    asked: PredictionOptions
    options: dict[str, Any]  # those of the command alone
    cache: Path | None


def repeated(file: Path, command: str, cache: Path | None) -> Repeat:
    """Read the configuration; `cache` is the folder said now, if any."""
    card = read_config(file)
    if card["command"] != command:
        raise ValueError(
            f"{file} is the configuration of gpmil {card['command']}: repeat it with gpmil "
            f"{card['command']} --config."
        )
    options = dict(card["options"])
    source, asked = (
        Source.from_card(options.pop("source")),
        PredictionOptions(**options.pop("asked")),
    )
    return Repeat(card, source, asked, options, cache or cache_of(card))


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
