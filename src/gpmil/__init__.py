"""Gaussian-process multiple instance learning with coupled neighbours."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpmil import simulate
    from gpmil.data.bags import Bags
    from gpmil.io import read
    from gpmil.models import (
        VGPMIL,
        VGPMILPR,
        VGPMILPRI,
        AttentionMIL,
        MaxPoolMIL,
        MeanPoolMIL,
        NominalMIL,
        OrdinalMIL,
        PseudoLabelMIL,
        load,
        paper_settings,
    )

__version__ = "0.1.0"

__all__ = [
    "VGPMIL",
    "VGPMILPR",
    "VGPMILPRI",
    "AttentionMIL",
    "Bags",
    "MaxPoolMIL",
    "MeanPoolMIL",
    "NominalMIL",
    "OrdinalMIL",
    "PseudoLabelMIL",
    "__version__",
    "load",
    "paper_settings",
    "read",
    "simulate",
]

# Names are imported when first used: `gpmil --version` need not wait for torch.
_HOME = {"Bags": "gpmil.data.bags", "read": "gpmil.io"}
_HOME |= dict.fromkeys(set(__all__) - {*_HOME, "__version__", "simulate"}, "gpmil.models")


def __getattr__(name: str) -> Any:
    if name == "simulate":
        return import_module("gpmil.simulate")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'gpmil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
