"""What users know as `gpmil.plots`; it lives in ``gpmil.show.plots``."""

from gpmil.show.plots import *  # noqa: F403
