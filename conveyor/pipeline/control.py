"""What a step learns from the steps before it: the KL coefficient of the adaptive controller, and the scales of rewards.

With staleness bound k the first sample of step s is sampled when step s − k − 1 is trained, so the settings of step s come from the
steps up to that one: whenever its micro-batches arrive, with overlap or without, they are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from conveyor.algorithms.kl_control import adapted
from conveyor.algorithms.scores import RewardScale, Running
from conveyor.config import OnlineRecipe, UserError
from conveyor.workers.reports import SampleReport, StepSettings


class StepControl:
    """Legal order: `learn` of steps one after the other; `settings` of a step once all it rests on are learnt from."""

    def __init__(self, recipe: OnlineRecipe, start_step: int = 0, state: dict[str, Any] | None = None) -> None:
        """state: what a checkpoint after `start_step` steps says (`state`).

        Raises:
            UserError: it says something else.
        """
        self._algorithm, self._lag = recipe.algorithm, recipe.pipeline.max_staleness + 1
        self.next = start_step
        """The first step that has not been learnt from."""
        self._running = {reward.name: Running() for reward in recipe.rewards if reward.normalize == "running"}
        first = StepSettings(recipe.algorithm.kl_coef)
        self._settings = {start_step + ahead: first for ahead in range(self._lag)}
        if state is not None:
            try:
                self._load(start_step, state)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise UserError(
                    "checkpoint.resume: control.json does not say how the KL coefficient and the rewards' scales stood; "
                    "resume from another checkpoint"
                ) from None

    def _load(self, start_step: int, state: dict[str, Any]) -> None:
        known = state["settings"]
        if len(known) != self._lag or state["running"].keys() != self._running.keys():
            raise ValueError("of another recipe")
        self._running = {name: Running.load(kept) for name, kept in state["running"].items()}
        for ahead, of_step in enumerate(known):
            numbers = [of_step["kl_coef"], *(number for scale in of_step["scales"].values() for number in scale.values())]
            if not all(isinstance(number, float | int) and math.isfinite(number) for number in numbers):
                raise ValueError("no finite numbers")
            scales = {name: RewardScale(**scale) for name, scale in of_step["scales"].items()}
            self._settings[start_step + ahead] = StepSettings(of_step["kl_coef"], scales)

    def settings(self, step: int) -> StepSettings:
        return self._settings[step]

    def rests_on(self, step: int) -> range:
        """Steps that are still to be learnt from before the settings of `step` are known."""
        return range(self.next, step - self._lag + 1)

    def learn(self, step: int, samples: Sequence[SampleReport]) -> None:
        """All samples of a step are prepared."""
        assert step == self.next, f"step {step} after {self.next - 1}"
        self.next += 1
        newest = self._settings[step + self._lag - 1]
        trained = [sample for sample in samples if not sample.baseline]
        for name, running in self._running.items():
            running.add([reward for sample in trained if (reward := sample.rewards.get(name)) is not None])
        # Rewards that have all been equal so far tell no scale: the first that differs is to count.
        scales = {name: scale for name, running in self._running.items() if (scale := running.scale()) is not None and scale.std > 0}
        self._settings[step + self._lag] = StepSettings(self._next_coef(newest.kl_coef, trained), scales)
        self._settings.pop(step - 1, None)

    def _next_coef(self, kl_coef: float, samples: Sequence[SampleReport]) -> float:
        target, tokens = self._algorithm.kl_target, sum(sample.response_length for sample in samples)
        if target is None or not tokens:
            return kl_coef
        kl = sum(sample.kl or 0.0 for sample in samples) / tokens
        return adapted(kl_coef, kl, target, len(samples), self._algorithm.kl_horizon)

    def state(self) -> dict[str, Any]:
        """For a checkpoint after `next` steps."""
        ahead = [self._settings[self.next + i] for i in range(self._lag)]
        return {
            "settings": [{"kl_coef": s.kl_coef, "scales": {name: asdict(scale) for name, scale in s.scales.items()}} for s in ahead],
            "running": {name: running.state() for name, running in self._running.items()},
        }
