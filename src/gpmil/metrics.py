"""What users know as `gpmil.metrics`; it lives in ``gpmil.decide.metrics``."""

from gpmil.decide.metrics import *  # noqa: F403
