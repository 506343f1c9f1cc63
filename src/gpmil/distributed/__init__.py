"""One fit over several machines, by sums: features stay where they are.

A cohort is cut into partitions of whole bags. Each answers with sufficient statistics (feature
sums, k-means tallies, the M x M Gram matrix, log Z with gradient and Hessian), which the
coordinator adds and solves with the very same code as on one machine. Use `model.fit(bags,
client=client)` with Dask, or `gpmil.distributed.fit(model, my_bags)` in every process of torchrun.
"""

from collections.abc import Callable
from typing import Any

from gpmil.data.bags import Bags
from gpmil.distributed.cluster import Cluster, Local
from gpmil.distributed.cohort import Cohort, cut
from gpmil.distributed.dask_cluster import DaskCluster, check_client
from gpmil.distributed.facts import Facts
from gpmil.distributed.partition import BagSource, Partition, Plan, Predicted
from gpmil.distributed.torch_group import TorchGroup, default_group, together
from gpmil.distributed.whole import WholeCohort

__all__ = [
    "BagSource",
    "Cluster",
    "Cohort",
    "DaskCluster",
    "Facts",
    "Local",
    "Partition",
    "Plan",
    "Predicted",
    "TorchGroup",
    "WholeCohort",
    "cut",
    "fit",
    "predict",
    "run",
]


def fit(model: Any, bags: BagSource, y: Any = None, *, group: Any = None) -> Any:
    """Fit a model in every process of a torch.distributed group, each with its own bags.

    All processes return the same fitted model. Without `group`: all processes that torchrun
    started. `bags` may be a function that builds them.
    """
    return model.fit(bags, y, group=default_group() if group is None else group)


def predict(model: Any, bags: Any, *, client: Any = None, group: Any = None) -> Predicted:
    """What a fitted model says of bags in several places, in their order.

    `bags` as in fit: with `client` a Bags, or a list of Bags or of functions that build them; in
    a process group the bags of this process, and every process gets the predictions of all.
    """
    if not hasattr(model, "predict_all"):
        raise ValueError(
            f"{type(model).__name__} has no predict_all: expected a fitted model of gpmil."
        )
    if client is None and group is None:
        group = default_group()

    def work(cluster: Cluster, _: Any) -> Predicted:
        return Predicted.join(cluster.map("predict", model))

    return run(work, bags, client=client, group=group, device=getattr(model, "device", None))


def run(
    work: Callable[[Cluster, Any], Any],
    bags: Any,
    y: Any = None,
    *,
    client: Any = None,
    group: Any = None,
    device: str | None = None,
) -> Any:
    """work(cluster, y) over the partitions of `bags`; its result, in every process of a group.

    `client` may also be a function (sources, device) -> Cluster, such as `Local`.
    """
    if client is not None and group is not None:
        raise ValueError("give client (Dask) or group (torch.distributed), not both.")
    if group is not None:
        # the labels of a process stay with its bags; the coordinator joins them
        return together(lambda cluster: work(cluster, None), _own(bags, y, device), group)
    cluster = _cluster(client, bags, device)
    try:
        result = work(cluster, y)
    finally:
        cluster.close()
    cluster.traffic.log(cluster.size)
    return result


def _own(bags: Any, y: Any, device: str | None) -> Partition:
    """This process's partition; what is wrong with its bags is said when they are asked for."""
    return Partition(bags if callable(bags) else lambda: bags, y, device)


def _cluster(client: Any, bags: Any, device: str | None) -> Cluster:
    if isinstance(client, type) or not hasattr(client, "nthreads"):
        if not callable(client):
            check_client(client)
        return client(_sources(bags, 1), device)
    check_client(client)
    return DaskCluster(client, _sources(bags, max(1, len(client.nthreads()))), device)


def _sources(bags: Any, n: int) -> list[BagSource]:
    """The partitions as given, or whole bags cut into n."""
    if isinstance(bags, Bags):
        if not len(bags):
            raise ValueError("no bags: the cohort, or this part of it, is empty.")
        return list(cut(bags, n))
    if not isinstance(bags, list | tuple) or not bags:
        raise ValueError(
            f"expected gpmil.Bags, or a list of partitions, got {type(bags).__name__}. A partition "
            "is a Bags, or a function without arguments that builds one on its worker."
        )
    for k, source in enumerate(bags):
        if not isinstance(source, Bags) and not callable(source):
            raise ValueError(
                f"partition {k + 1} of {len(bags)} is a {type(source).__name__}: expected a Bags, "
                "or a function without arguments that builds one."
            )
    return list(bags)
