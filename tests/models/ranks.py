"""Train ranks for tests: this process as the only one, or fresh processes over gloo."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp


def one_rank() -> None:
    """Left to the process: DeepSpeed keeps the group it first saw."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def spawn(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """`function(rank, ranks, port, *args)` in `ranks` processes; theirs to meet at 127.0.0.1:port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Forks of one process that has imported all this and done nothing: what takes each fresh interpreter ten seconds.
    multiprocessing.set_forkserver_preload(["deepspeed", "conveyor.workers.train", function.__module__])
    mp.start_processes(_main, args=(function, ranks, port, args), nprocs=ranks, start_method="forkserver")


def _main(rank: int, function: Callable[..., None], ranks: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    function(rank, ranks, port, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
