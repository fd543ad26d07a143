"""Ranks that work as one: called as a single actor is, they all make the call, and rank 0 answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


class Team:
    """Actor handles of the ranks of a group. `team.method.remote(…)` is to be awaited; it raises what any rank raises."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = tuple(ranks)

    def __getattr__(self, method: str) -> _Method:
        return _Method([getattr(rank, method) for rank in self.ranks])


class _Method:
    def __init__(self, of_ranks: Sequence[Any], returns: int = 1) -> None:
        self._of_ranks, self._returns = of_ranks, returns

    def options(self, num_returns: int) -> _Method:
        return _Method([of_rank.options(num_returns=num_returns) for of_rank in self._of_ranks], num_returns)

    def remote(self, *arguments: Any) -> Any:
        """The answer to wait for; with two returns also rank 0's second object, by reference."""
        answers = [of_rank.remote(*arguments) for of_rank in self._of_ranks]
        if self._returns == 1:
            return _first(answers)
        return _first([first for first, _ in answers]), answers[0][1]


async def _first(answers: Sequence[Any]) -> Any:
    return (await asyncio.gather(*answers))[0]


def members(worker: Any) -> tuple[Any, ...]:
    """The actors behind a worker: a team's ranks, or itself."""
    return worker.ranks if isinstance(worker, Team) else (worker,)
