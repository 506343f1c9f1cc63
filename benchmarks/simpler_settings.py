"""Are coupling and slide effect needed? The best settings with and without, every bag left out.

    python benchmarks/simpler_settings.py --data FOLDER [--inducing 80] [--budget 40]
        [--sets colon sicapv2 musk1 elephant glas simulated]

Per cohort: a search with everything free, one with lambda = 0 and one with tau = 0 (each with the
whole budget), the mean difference of their scores per bag and its standard error. What a fit keeps
follows from them by `simpler.NEEDED`: lambda of bags with positions, tau of bags without. Without
--sets the five real cohorts, some four minutes of one core; the simulated slides take as long.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from real_data import DATA, SETS, read

import gpmil
from gpmil.inference import folded_cohort, leave_groups, objective, tuning

CPU = torch.device("cpu")


def ready(bags: gpmil.Bags, n_inducing: int, extra: dict) -> tuple[objective.Cohort, float]:
    """The bags as tuning takes them, and the root of the number of inputs."""
    numbers = {"variance": 9.0, "lengthscale": 10.0, "mean": -4.0, "coupling": 0.5}
    model = gpmil.VGPMILPRI(**numbers, n_inducing=n_inducing, random_state=0, **extra).fit(bags)
    made = folded_cohort.folded(
        bags, np.arange(bags.n_instances), bags.labels == 1, lambda x: model._inputs(x, CPU),
        model._inputs(model.inducing_points_, CPU), "rbf", bags.groups,
    )  # fmt: skip
    return made, float(np.sqrt(made.inputs.shape[1]))


def main() -> None:
    """Print a line per cohort and search."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=[*SETS, "simulated"])
    parser.add_argument("--inducing", type=int, default=80)
    parser.add_argument("--budget", type=int, default=40)
    args = parser.parse_args()
    for name in args.sets:
        simulated = name == "simulated"
        bags = gpmil.simulate.cohort(150, seed=1) if simulated else read(args.data, name)
        extra = {"n_components": 64} if name == "colon" else {}
        made, root = ready(bags, args.inducing, extra)
        base = {} if bags.adjacency.nnz else {"coupling": 0.0}
        spaces = {"free": base, "tau = 0": base | {"slide_effect": 0.0}}
        spaces |= {"lambda = 0": {"coupling": 0.0}} if not base else {}
        scores = {}
        for case, fixed in spaces.items():
            found = tuning.search(made, tuning.Space(fixed, root, None, True), args.budget)
            scores[case] = objective.left_out(made, found.best.settings, found.w)[0].numpy()
            gain = scores["free"] - scores[case]
            error = leave_groups.standard_error(gain, made.groups)
            words = tuning.in_words(found.best.settings)
            print(
                f"{name:10} {case:10} {words}: {scores[case].mean():.4f}, free better by", end=" "
            )
            print(f"{gain.mean():.4f} (standard error {error:.4f})", flush=True)


if __name__ == "__main__":
    main()
