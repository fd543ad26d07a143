"""From a sample's rewards to its score: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conveyor.config import sections

STD_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class RewardScale:
    """What a reward is normalised with: mean and standard deviation (n − 1) of many."""

    mean: float
    std: float


@dataclass(slots=True)
class Running:
    """Mean and deviation of all values so far, without keeping them (Welford 1962): exact 0 deviation for equal values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.count += 1
            distance = value - self.mean
            self.mean += distance / self.count
            self.squares += distance * (value - self.mean)

    def scale(self) -> RewardScale | None:
        """None below two values."""
        return RewardScale(self.mean, math.sqrt(self.squares / (self.count - 1))) if self.count > 1 else None

    def state(self) -> dict[str, float]:
        """For `load`: plain numbers, the same after JSON."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def load(cls, state: Mapping[str, float]) -> Running:
        return cls(int(state["count"]), state["mean"], state["squares"])


def shaped(reward: float | None, section: sections.Reward, scale: RewardScale | None) -> float | None:
    """(r − mean) / (std + 1e-8) if there is a scale, 0 where its std is 0; then clipped to ± `section.clip`. None stays None.

    A reward that is to be normalised and has no scale yet stays as it is: the clip is meant for what is normalised.
    """
    if reward is None:
        return None
    if scale is not None:
        reward = (reward - scale.mean) / (scale.std + STD_EPSILON) if scale.std else 0.0
    elif section.normalize != "none":
        return reward
    return reward if section.clip is None else min(max(reward, -section.clip), section.clip)


def overlong_penalty(length: int, max_length: int, buffer: int, penalty: float) -> float:
    """What is taken from the score of a response of `length` tokens: 0 up to max_length − buffer, `penalty` at max_length, linear
    between (Yu et al. 2025, DAPO, eq. 13, where penalty is 1)."""
    return penalty * min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)


def sample_score(
    rewards: Mapping[str, float | None],
    sections_: Sequence[sections.Reward],
    scales: Mapping[str, RewardScale],
    *,
    truncated: bool,
    length: int,
    algorithm: sections.Algorithm,
    max_response_length: int,
) -> float | None:
    """Weighted sum of the `shaped` rewards that apply, less the penalties of a truncated and of an overlong response.

    None if there are rewards and none applies: the sample is to be left out of baseline and loss. Without any rewards in the
    recipe (distillation) what remains of 0 after the penalties. May be beyond float32; the caller looks.

    Args:
        rewards: by name. None, or no such name: the reward does not apply.
        scales: of the rewards that are normalised and have a scale yet.
        length: tokens of the response.
    """
    known = [
        section.weight * value
        for section in sections_
        if (value := shaped(rewards.get(section.name), section, scales.get(section.name))) is not None
    ]
    if sections_ and not known:
        return None
    score = sum(known, 0.0)
    if truncated:
        score -= algorithm.missing_eos_penalty
    if algorithm.overlong_buffer is not None:
        score -= overlong_penalty(length, max_response_length, algorithm.overlong_buffer, algorithm.overlong_penalty)
    return score
