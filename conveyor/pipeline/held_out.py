"""The executor's side of evaluation: held-out prompts go to engines, their samples to rewards, and the sums to a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conveyor.config import OnlineRecipe
from conveyor.pipeline.actions import Evaluate, EvaluationSampled, ScoreEvaluation
from conveyor.pipeline.run_plan import RunPlan
from conveyor.types import Prompt
from conveyor.workers.reports import EvaluationAborted, SampleDone


@dataclass(slots=True)
class _Sampled:
    """A prompt's samples under one version."""

    rollouts: dict[int, Any] = field(default_factory=dict)
    """Sample → reference of its rollout."""
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    rewards: list[dict[str, float | None]] = field(default_factory=list)
    """By sample, of the score parts that are done."""


class HeldOut:
    """The held-out prompts of a run, and what is known of their samples."""

    def __init__(self, recipe: OnlineRecipe, plan: RunPlan, prompts: Sequence[Prompt]) -> None:
        self.recipe, self.plan, self.prompts = recipe, plan, prompts
        self._versions: dict[int, dict[int, _Sampled]] = defaultdict(lambda: defaultdict(_Sampled))

    def submission(self, action: Evaluate) -> tuple[Prompt, int, int, float | None]:
        """Arguments of `RolloutWorker.evaluate`."""
        section = self.recipe.evaluate
        assert section is not None
        temperature = 0.0 if section.greedy else section.temperature
        return self.prompts[action.prompt], section.n_samples_per_prompt, action.version, temperature

    def sampled(self, engine: int, done: SampleDone, rollout: Any) -> EvaluationSampled:
        """Keep a sample; `rollout`: its reference."""
        prompt, version = -1 - done.id.group, done.oldest_version
        kept = self._versions[version][prompt]
        kept.rollouts[done.id.sample] = rollout
        kept.lengths.append(done.tokens)
        kept.truncated += done.truncated
        return EvaluationSampled(engine, prompt, version, aborted=False)

    def aborted(self, engine: int, sample: EvaluationAborted) -> EvaluationSampled:
        prompt = -1 - sample.id.group
        self._versions[sample.version].pop(prompt, None)
        return EvaluationSampled(engine, prompt, sample.version, aborted=True)

    def rollouts(self, action: ScoreEvaluation) -> list[Any]:
        """References to the samples to be scored, prompt by prompt."""
        kept = self._versions[action.version]
        return [reference for prompt in action.prompts for _, reference in sorted(kept[prompt].rollouts.items())]

    def scored(self, action: ScoreEvaluation, rewards: dict[str, tuple[float | None, ...]]) -> None:
        """`rewards`: name → one number a sample, in the order of `rollouts`."""
        first = 0
        for prompt in action.prompts:
            kept = self._versions[action.version][prompt]
            kept.rewards = kept.rewards or [{} for _ in kept.rollouts]
            for place, sample in enumerate(kept.rewards):
                sample.update({name: values[first + place] for name, values in rewards.items()})
            first += len(kept.rewards)

    def close(self, version: int) -> dict[str, Any]:
        """The version's line, over the prompts up to the first that was not finished: those are not chosen by their length."""
        sampled, section = self._versions.pop(version, {}), self.recipe.evaluate
        assert section is not None
        n = section.n_samples_per_prompt
        finished = (i in sampled and len(sampled[i].rewards) == n for i in range(len(self.prompts)))
        whole = next((i for i, all_there in enumerate(finished) if not all_there), len(self.prompts))
        kept = [sampled[i] for i in range(whole)]
        rewards = [sample for prompt in kept for sample in prompt.rewards]
        lengths = [length for prompt in kept for length in prompt.lengths]
        line: dict[str, Any] = {"step": version, "version": version, "eval/reward/mean": _mean([self._total(sample) for sample in rewards])}
        line |= {f"eval/reward/{reward.name}": _mean([sample[reward.name] for sample in rewards]) for reward in self.recipe.rewards}
        return line | {
            "eval/response_length/mean": _mean(lengths),
            "eval/truncated_fraction": sum(prompt.truncated for prompt in kept) / len(lengths) if lengths else None,
            "eval/prompts": whole,
            "eval/samples": len(rewards),
            "eval/coverage": whole / len(self.prompts),
        }

    def _total(self, sample: dict[str, float | None]) -> float | None:
        known = [reward.weight * value for reward in self.recipe.rewards if (value := sample[reward.name]) is not None]
        return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
