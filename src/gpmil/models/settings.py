"""The paper's settings of every Gaussian-process model."""

from typing import Any

from gpmil.models.vgpmil import VGPMIL
from gpmil.models.vgpmil_pr import VGPMILPR, VGPMILPRI

CLASSES = {"VGPMILPRI": VGPMILPRI, "VGPMILPR": VGPMILPR, "VGPMIL": VGPMIL}


def paper_settings(model: str = "VGPMILPRI") -> dict[str, Any]:
    """The paper's keyword arguments for a model, only those that its class takes.

    VGPMIL's own come from its original publication (H) and code (the update of q(h)).

    >>> paper_settings()["coupling"]
    0.5
    >>> "coupling" in paper_settings("VGPMILPR")
    False
    """
    if model not in CLASSES:
        raise ValueError(f"model must be one of {sorted(CLASSES)}, got {model!r}.")
    settings = {
        "coupling": 0.5,
        "variance": 1.0,
        "lengthscale": "sqrt_dim",
        "mean": 0.0,
        "n_inducing": 200,
        "solver": "sweeps",
        "moments": "diagonal",
        "slide_effect": 0.0,
        "slide_context": 0.0,
        "max_iter": 200,
        "H": 100.0,
        "expected_max": "largest",
    }
    taken = CLASSES[model]().get_params()
    return {k: v for k, v in settings.items() if k in taken}
