"""The package as the cases see it: fit, its parts, sweeps. What changes inside is followed here."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from jaxtyping import Float

from bench import measure, naive
from gpmil.data.bags import Bags
from gpmil.inference import solvers as inference
from gpmil.inference import tuning
from gpmil.models.vgpmil_pr import VGPMILPRI

# The paper's settings, but for the solver: the default one unless said otherwise.
FIXED: dict[str, Any] = {
    "coupling": 0.5,
    "variance": 1.0,
    "lengthscale": "sqrt_dim",
    "mean": 0.0,
    "random_state": 0,
}
SWEEPS = 200
PARTS = ("features", "k-means", "settings", "Kzz", "prepare", "solve", "intervals", "novelty")
BEYOND_THE_TWIN = ("intervals", "novelty")
LEARNED: dict[str, Any] = {"random_state": 0}  # the model as it comes: everything is learned


def model(n_inducing: int, device: str, **changed: Any) -> VGPMILPRI:
    """The model that is measured, through its public interface."""
    return VGPMILPRI(**FIXED | {"n_inducing": n_inducing, "device": device} | changed)


def twin(n_features: int) -> naive.Setting:
    """The same numbers for the naive twin."""
    return naive.Setting(FIXED["coupling"], FIXED["variance"], n_features**0.5, FIXED["mean"])


class ByParts(VGPMILPRI):
    """The same model with a clock on the parts of its fit; it can keep the prepared problem.

    What is called inside of a part counts for that part.
    """

    clock: dict[str, float]
    kept: dict[str, Any] | None
    inside: bool = False

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        if self.inside:
            yield
            return
        self.inside = True
        measure.wait()
        start = time.perf_counter()
        yield
        measure.wait()
        self.clock[name] = self.clock.get(name, 0.0) + time.perf_counter() - start
        self.inside = False

    def _map_features(self, cohort: Any) -> None:
        _ = cohort.partition.rows  # the way to a GPU is no part of the fit
        with self._part("features"):
            super()._map_features(cohort)

    def _place_inducing(self, *args: Any) -> Any:
        with self._part("k-means"):
            return super()._place_inducing(*args)

    def _find_settings(self, *args: Any) -> None:
        with self._part("settings"):
            super()._find_settings(*args)

    def _learn_range(self, *args: Any) -> None:
        with self._part("novelty"):
            super()._learn_range(*args)

    def _keep_wide(self, *args: Any) -> None:
        with self._part("intervals"):
            super()._keep_wide(*args)

    def _left_out(self, *args: Any) -> Any:
        with self._part("leave out"):
            return super()._left_out(*args)

    def _gp(self, *args: Any) -> Any:
        with self._part("Kzz"):
            return super()._gp(*args)

    def _problem(self, *args: Any) -> Any:
        with self._part("prepare"):
            return super()._problem(*args)

    def _solve(self, problem: Any) -> Any:
        if self.kept is not None:
            self.kept["problem"] = problem
        with self._part("solve"):
            return super()._solve(problem)


def by_parts(bags: Bags, n_inducing: int, device: str, **changed: Any) -> dict[str, float]:
    """Seconds of every part of one fit, of the rest (checks, the way to a GPU), and of all."""
    return fit_with_clock(bags, n_inducing, device, None, changed)[1]


def learned_by_parts(bags: Bags, n_inducing: int, device: str) -> tuple[ByParts, dict[str, float]]:
    """The default fit, everything learned, and the seconds of its parts.

    Of the settings: `pilot` (starts and most steps, some of the bags) and `confirm` (all bags).
    """
    made = ByParts(**LEARNED, n_inducing=n_inducing, device=device)
    with _confirming() as took:
        made, parts = _clocked(made, bags, None, (*PARTS, "leave out"))
    settings = parts.pop("settings")
    return made, {"pilot": settings - sum(took), "confirm": sum(took), **parts}


@contextmanager
def _confirming() -> Iterator[list[float]]:
    """Seconds that learning spends on all bags, in a list that fills."""
    took: list[float] = []

    def clocked(step: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any) -> Any:
            start = time.perf_counter()
            found = step(*args)
            took.append(time.perf_counter() - start)
            return found

        return work

    with (
        mock.patch.object(tuning, "on_all", clocked(tuning.on_all)),
        mock.patch.object(tuning, "finished", clocked(tuning.finished)),
    ):
        yield took


def fit_with_clock(
    bags: Bags, n_inducing: int, device: str, kept: dict | None, changed: dict[str, Any]
) -> tuple[ByParts, dict[str, float]]:
    """A model fitted, and the seconds of its parts; `kept` takes the prepared problem."""
    made = ByParts(**FIXED | {"n_inducing": n_inducing, "device": device} | changed)
    return _clocked(made, bags, kept, PARTS)


def _clocked(
    made: ByParts, bags: Bags, kept: dict | None, names: tuple[str, ...]
) -> tuple[ByParts, dict[str, float]]:
    made.clock, made.kept = {}, kept
    total = measure.once(lambda: made.fit(bags))
    parts = {name: made.clock.get(name, 0.0) for name in names}
    return made, parts | {"rest": total - sum(parts.values()), "all": total}


class Sweeper:
    """A prepared cohort: H, sigma and R are there, sweeps are what is left to do."""

    def __init__(self, bags: Bags, inducing: np.ndarray, device: str, dtype: str, **changed: Any):
        kept: dict[str, Any] = {}
        given = {"inducing": inducing, "dtype": dtype, "solver": "sweeps", "max_iter": 1}
        made, self.parts = fit_with_clock(bags, len(inducing), device, kept, given | changed)
        self.problem = kept["problem"]
        self.gp, self.device = made._gp(torch.device(device)), device

    def sweeps(self, start: Float[np.ndarray, " N"], count: int) -> Float[np.ndarray, " M"]:
        """mu^u after `count` plain sweeps."""
        with torch.no_grad():
            E = torch.from_numpy(start).to(self.device)
            found = inference.sweeps(self.problem, E, count, 0.0)
            return (self.gp.L @ found.w).cpu().numpy()

    def time_one(self, start: Float[np.ndarray, " N"], repeats: int, plain: int) -> measure.Timing:
        """One sweep: what `plain` more take, by as many, so that what is around cancels."""
        first = measure.once(lambda: self.sweeps(start, 1))
        took = []
        for _ in range(repeats):
            few = measure.once(lambda: self.sweeps(start, 1))
            more = measure.once(lambda: self.sweeps(start, 1 + plain))
            took.append(max(more - few, 1e-9) / plain)
        return measure.Timing(statistics.median(took), first, repeats)
