"""Gaussian-process multiple instance learning with coupled neighbours."""

__version__ = "0.1.0"

from gpmil import simulate
from gpmil.bags import Bags
from gpmil.models import VGPMILPR, VGPMILPRI, load, paper_settings

__all__ = ["VGPMILPR", "VGPMILPRI", "Bags", "__version__", "load", "paper_settings", "simulate"]
