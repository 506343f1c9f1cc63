"""The models, and reading a saved one back."""

import os

from gpmil.files import persistence
from gpmil.models.attention import AttentionMIL
from gpmil.models.base import BagClassifier, InstancePredictions
from gpmil.models.concepts import AllConceptsMIL
from gpmil.models.nominal import NominalMIL
from gpmil.models.ordinal import OrdinalMIL
from gpmil.models.ordinal_networks import OrdinalAttentionMIL, OrdinalMeanPoolMIL
from gpmil.models.pooling import MaxPoolMIL, MeanPoolMIL
from gpmil.models.pseudo_label import PseudoLabelMIL
from gpmil.models.saved_checks import Damaged
from gpmil.models.screened import ScreenedMIL
from gpmil.models.settings import paper_settings
from gpmil.models.vgpmil import VGPMIL
from gpmil.models.vgpmil_pr import VGPMILPR, VGPMILPRI

__all__ = [
    "VGPMIL",
    "VGPMILPR",
    "VGPMILPRI",
    "AllConceptsMIL",
    "AttentionMIL",
    "BagClassifier",
    "InstancePredictions",
    "MaxPoolMIL",
    "MeanPoolMIL",
    "NominalMIL",
    "OrdinalAttentionMIL",
    "OrdinalMIL",
    "OrdinalMeanPoolMIL",
    "PseudoLabelMIL",
    "ScreenedMIL",
    "load",
    "paper_settings",
]

MODELS = (
    *(VGPMIL, VGPMILPR, VGPMILPRI, AttentionMIL, MeanPoolMIL, MaxPoolMIL, PseudoLabelMIL),
    *(OrdinalMIL, OrdinalAttentionMIL, OrdinalMeanPoolMIL, NominalMIL),
)
CLASSES = {cls.__name__: cls for cls in MODELS}


def load(path: str | os.PathLike, kernel=None) -> BagClassifier:
    """Read a model that `save` wrote; nothing in the files is executed.

    A model fitted with a kernel object needs a new object of that class as `kernel`.
    """
    arrays, card = persistence.read(path)
    found = CLASSES.get(str(card.get("class")))
    if found is None:
        raise ValueError(
            f"{path} holds a model of class {card.get('class')!r}; this gpmil knows "
            f"{sorted(CLASSES)}. Upgrade gpmil, or check the folder."
        )
    try:
        return found._from_saved(arrays, card, kernel)
    except Damaged as error:
        raise ValueError(f"{path} is corrupted: {error}. {persistence.ADVICE}") from error
