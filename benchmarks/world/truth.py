"""The true reward: how much of the answer is right. Also a reward function, for rows with an `answer`: the judge of every method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def true_reward(response: str, answer: str) -> float:
    """Share of letters that stand where they should, of the longer of the two: in [0, 1].

    Example: `a c b d` for `a b c d` → 0.5; `a b c` → 0.75.
    """
    given, right = response.split(), answer.split()
    return sum(one == other for one, other in zip(given, right, strict=False)) / max(len(given), len(right), 1)


def reward(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """As a recipe names it: `benchmarks/world/truth.py:reward`."""
    return [true_reward(completion, right) for completion, right in zip(completions, answer, strict=True)]
