"""What users know as `gpmil.qupath`; it lives in ``gpmil.show.qupath``."""

from gpmil.show.qupath import *  # noqa: F403
