"""One fit over two processes: what a round costs beyond the work, and a worker that dies.

    python benchmarks/distributed_fit.py [--json FILE] [--instances 161.7]

At the numbers of the SICAPv2 experiment (95 slides, about 15 thousand patches,
`gpmil.simulate.sicapv2_like`), 200 inducing points, the paper's kernel settings and coupling:

* one process;
* two processes of torchrun over gloo, each simulating its own half;
* a Dask LocalCluster of two workers, each building its own half;
* the same, with one worker killed (SIGKILL) in the middle of the solver.

Overhead of a round: its wall time less the work of the slower partition. Differences to one
process: the largest in posterior mean, covariance and inducing points, and the largest in what is
predicted of the patches of 31 other slides, relative to the largest number in each.
"""

import argparse
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import gpmil
from gpmil import distributed

NAMES = ("posterior_mean_", "posterior_covariance_", "inducing_points_")
BAR = 1e-10


def model():
    settings = gpmil.paper_settings("VGPMILPRI") | {"solver": "direct"}
    return gpmil.VGPMILPRI(**settings, random_state=0, device="cpu")


@functools.cache
def cohort(mean_size):
    return gpmil.simulate.sicapv2_like(seed=0, mean_size=mean_size)[0]


def half(mean_size, k):
    """What a process builds by itself."""
    return distributed.cut(cohort(mean_size), 2)[k]


def costs(line):
    """The numbers of the line that a fit over partitions ends with."""
    _, rounds, megabytes, ms, overhead = line.args
    return {"rounds": rounds, "MB": megabytes, "round_ms": ms, "overhead_ms": overhead}


class Lines(logging.Handler):
    """Keeps the log lines that tell of rounds."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if "rounds" in record.msg:
            self.found.append(record)


def fitted(*args, **kwargs):
    """A fit, its seconds and what its rounds cost."""
    lines, logger = Lines(), logging.getLogger("gpmil")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    begin = time.perf_counter()
    made = model().fit(*args, **kwargs)
    seconds = time.perf_counter() - begin
    logger.removeHandler(lines)
    return made, {"seconds": seconds} | (costs(lines.found[-1]) if lines.found else {})


def seen(made, mean_size):
    """What is compared of a fitted model."""
    test = gpmil.simulate.sicapv2_like(seed=0, mean_size=mean_size)[1]
    return {name: getattr(made, name) for name in NAMES} | {
        "predicted": made.predict_instances(test).mean
    }


def differ(arrays, whole):
    """The largest relative differences to the fit of one process."""
    found = {n: float(abs(arrays[n] - x).max() / abs(x).max()) for n, x in whole.items()}
    return {
        "difference": max(found[name] for name in NAMES),
        "difference_predicted": found["predicted"],
    }


def as_rank(mean_size, folder):
    """A process of torchrun: fits twice, the second time is the one measured."""
    torch.set_num_threads(1)
    group = distributed.torch_group.default_group()
    rank = torch.distributed.get_rank()
    mine = half(mean_size, rank)
    for _ in range(2):
        made, cost = fitted(mine, group=group)
    np.savez(Path(folder) / f"{rank}.npz", **seen(made, mean_size))
    if rank == 0:
        (Path(folder) / "cost.json").write_text(json.dumps(cost))
    torch.distributed.destroy_process_group()


def torchrun(mean_size, whole):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             __file__, "--instances", str(mean_size), "--as-rank", folder],
            check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        ranks = [np.load(Path(folder) / f"{rank}.npz") for rank in (0, 1)]
        same = all(np.array_equal(ranks[0][name], ranks[1][name]) for name in NAMES)
        cost = json.loads((Path(folder) / "cost.json").read_text())
        return cost | differ(ranks[0], whole) | {"ranks_identical": same}


class Deadly(distributed.DaskCluster):
    """Kills the worker of the second partition at the third step of the solver."""

    steps = 0

    def _ask(self, calls):
        step = calls[0].args[-1:] == ("bound",)
        self.steps += step
        if step and self.steps == 3:
            home = self._homes[1]
            os.kill(self.client.run(os.getpid, workers=[home])[home], signal.SIGKILL)
        return super()._ask(calls)


def dask(mean_size, whole):
    from dask.distributed import Client, LocalCluster

    found = {}
    sources = [functools.partial(half, mean_size, k) for k in (0, 1)]
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        fitted(sources, client=client)  # to warm up
        made, cost = fitted(sources, client=client)
        found["dask"] = cost | differ(seen(made, mean_size), whole)
        killed = []

        def deadly(sources, device):
            killed.append(Deadly(client, sources, device))
            return killed[0]

        made, cost = fitted(sources, client=deadly)
        found["dask, a worker killed"] = (
            cost | differ(seen(made, mean_size), whole) | {"partitions_lost": killed[0].losses}
        )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--instances", type=float, default=161.7, help="instances per slide")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        as_rank(args.instances, args.as_rank)
        return
    torch.set_num_threads(1)
    bags = cohort(args.instances)
    print(bags)
    fitted(bags)  # to warm up
    made, cost = fitted(bags)
    whole = seen(made, args.instances)
    found = {"one process": cost, "torchrun, gloo": torchrun(args.instances, whole)}
    found |= dask(args.instances, whole)
    for name, row in found.items():
        print(f"{name:24}", ", ".join(f"{k} {v:.3g}" for k, v in row.items()))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    differences = [v for row in found.values() for k, v in row.items() if "difference" in k]
    if max(differences) > BAR:
        sys.exit(f"a fit differs from that of one process by more than {BAR}")


if __name__ == "__main__":
    main()
