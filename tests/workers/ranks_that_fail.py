"""Ranks of a fit that do nothing but meet, of which one hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist

from conveyor.workers.fit import FitWorker


class HangingRank(FitWorker):
    """Rank 1 comes to the first meeting only."""

    def fit(self, work: Any) -> Iterator[dict[str, float | int]]:
        for step in range(2):
            self._meet(step)
            yield {"step": step + 1}

    def fit_silently(self, work: Any) -> None:
        self._meet(0)
        time.sleep(600)

    def _meet(self, step: int) -> None:
        dist.all_reduce(torch.ones(1))
