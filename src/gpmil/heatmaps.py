"""What users know as `gpmil.heatmaps`; it lives in ``gpmil.show.heatmaps``."""

from gpmil.show.heatmaps import *  # noqa: F403
