"""A worker whose process imports nothing large."""

from __future__ import annotations

import os
import time


class Worker:
    max_concurrency = 2

    def __init__(self, cores: tuple[int, ...]) -> None:
        self.cores = cores

    def where(self) -> tuple[tuple[int, ...], dict[str, str], int]:
        return self.cores, dict(os.environ), os.getpid()

    def wait(self) -> None:
        time.sleep(60)

    def forward_backward(self) -> None:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB")

    def install(self) -> None:
        import torch

        torch.empty(2**60)
