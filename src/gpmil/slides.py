"""What users know as `gpmil.slides`; it lives in ``gpmil.show.slides``."""

from gpmil.show.slides import *  # noqa: F403
