"""The ranks of the fit loop: this process for one, Ray actors for several."""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from conveyor.config import OfflineRecipe
from conveyor.models.collectives import nccl_environment
from conveyor.offline.fit import MetricsRow, fit
from conveyor.offline.task import Task
from conveyor.run_folder import RunFolder
from conveyor.workers.failures import LISTEN_SECONDS, Who, failure, is_lost, lost, stuck
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
    try:
        yield from fit(*work)
    except Exception as error:
        told = failure(Who("fit", "train", 0), error, RunFolder(work[0].output_dir).what_is_left())
        if told is error:
            raise
        raise told from error


def fit_on(placement: Placement, work: Work) -> Iterator[MetricsRow]:
    """Run the loop on every device of the placement's group `train`; yields rank 0's rows as they come.

    A rank that fails ends the run with its error, even while others wait for it in a collective; one that hangs does when the others
    have waited for `ray.timeout`.
    """
    import ray

    ranks, seconds = placement.slots("train"), work[0].ray.timeout
    environment = nccl_environment(seconds)
    workers = [
        placement.actor(FitWorker, "train", rank, rank=rank, ranks=ranks, cores=placement.cores("train", rank), env=environment)
        for rank in range(ranks)
    ]
    address, port = ray.get(workers[0].endpoint.remote())
    ray.get([worker.join.remote(address, port, seconds) for worker in workers])
    shared = ray.put(work)
    rows = workers[0].fit.options(num_returns="streaming").remote(shared)
    calls = [rows, *(worker.fit_silently.remote(shared) for worker in workers[1:])]
    running = {call: Who("fit", "train", rank) for rank, call in enumerate(calls)}
    yield from _rows(rows, running, seconds, RunFolder(work[0].output_dir))


def _rows(rows: Any, running: dict[Any, Who], seconds: float, folder: RunFolder) -> Iterator[MetricsRow]:
    """What rank 0 yields, until all ranks are done; raises what any of them raises, as soon as it does.

    Args:
        running: the call of each rank, which is taken out when it is done; rank 0's is `rows`.
    """
    import ray

    while running:
        ready: Any = ray.wait(list(running), num_returns=1)[0][0]
        try:
            row = ray.get(next(rows) if ready is rows else ready)
        except StopIteration:
            del running[rows]
        except Exception as error:
            raise _blame(running, ready, error, seconds, folder.what_is_left()) from None
        else:
            if ready is rows:
                yield row
            else:
                del running[ready]


def _blame(running: dict[Any, Who], failed: Any, error: Exception, seconds: float, left: str) -> BaseException:
    """What ends the run, when one rank has failed. One that says only that it has lost another is heard first, perhaps."""
    import ray

    if not is_lost(error):
        return failure(running[failed], error, left)
    everyone, silent = list(running.values()), dict(running)
    del silent[failed]
    until = time.monotonic() + LISTEN_SECONDS
    while silent and (ready := ray.wait(list(silent), num_returns=1, timeout=max(0.0, until - time.monotonic()))[0]):
        call = ready[0]
        try:
            ray.get(next(call) if isinstance(call, ray.ObjectRefGenerator) else call)
        except StopIteration:
            del silent[call]
        except Exception as other:
            if not is_lost(other):
                return failure(running[call], other, left)
            del silent[call]
        else:
            if not isinstance(call, ray.ObjectRefGenerator):
                del silent[call]
    task = "its part of an update"
    return stuck(everyone, list(silent.values()), task, seconds, left) if silent else lost(everyone, task, error, left)


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

    def join(self, address: str, port: int, seconds: float) -> None:
        """seconds: how long ranks wait for one another."""
        backend, wait = BACKEND if torch.cuda.is_available() else "gloo", timedelta(seconds=seconds)
        dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=self._rank, world_size=self._ranks, timeout=wait)

    def fit(self, work: Work) -> Iterator[MetricsRow]:
        yield from fit(*work)

    def fit_silently(self, work: Work) -> None:
        for _ in fit(*work):
            pass


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
