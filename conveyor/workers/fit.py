"""The ranks of the fit loop: this process for one, Ray actors for several."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from conveyor.config import OfflineRecipe, UserError
from conveyor.offline.fit import MetricsRow, fit
from conveyor.offline.task import Task
from conveyor.workers.placement import Placement

BACKEND = "cpu:gloo,cuda:nccl"


Work = tuple[OfflineRecipe, Task, Task | None, PreTrainedTokenizerBase, int]
"""Arguments of `fit`."""


def fit_here(work: Work) -> Iterator[MetricsRow]:
    """Run the loop in this process, on all of its cores or its one GPU."""
    if not dist.is_initialized():
        # A group of one needs no port. It is left to the process: DeepSpeed keeps a reference and survives no second one.
        dist.init_process_group(BACKEND if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield from fit(*work)


def fit_on(placement: Placement, work: Work) -> Iterator[MetricsRow]:
    """Run the loop on every device of the placement's group `train`; yields rank 0's rows as they come.

    A rank that fails ends the run with its error, even while others wait for it in a collective.
    """
    import ray
    from ray.exceptions import RayTaskError

    ranks = placement.slots("train")
    workers = [
        placement.actor(FitWorker, "train", rank, rank=rank, ranks=ranks, cores=placement.cores("train", rank)) for rank in range(ranks)
    ]
    address, port = ray.get(workers[0].endpoint.remote())
    ray.get([worker.join.remote(address, port) for worker in workers])
    shared = ray.put(work)
    rows = workers[0].fit.options(num_returns="streaming").remote(shared)
    others = [worker.fit_silently.remote(shared) for worker in workers[1:]]
    try:
        yield from _rows(rows, others)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise


def _rows(rows: Any, others: list[Any]) -> Iterator[MetricsRow]:
    """What rank 0 yields, until all ranks are done; raises what any of them raises, as soon as it does."""
    import ray

    running: list[Any] = [rows, *others]
    while running:
        ready: Any = ray.wait(running, num_returns=1)[0][0]
        if ready is not rows:
            ray.get(ready)
            running.remove(ready)
            continue
        try:
            yield ray.get(next(rows))
        except StopIteration:
            running.remove(rows)


class FitWorker:
    """One rank, on its own device."""

    def __init__(self, rank: int, ranks: int, cores: tuple[int, ...] | None) -> None:
        """cores: core ids on CPU; None: GPU."""
        self._rank, self._ranks = rank, ranks
        if cores is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))

    def endpoint(self) -> tuple[str, int]:
        """Where the ranks can meet: an address of this node and a free port on it."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join(self, address: str, port: int) -> None:
        backend = BACKEND if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=self._rank, world_size=self._ranks)

    def fit(self, work: Work) -> Iterator[MetricsRow]:
        yield from fit(*work)

    def fit_silently(self, work: Work) -> None:
        for _ in fit(*work):
            pass


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
