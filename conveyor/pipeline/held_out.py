"""The executor's side of evaluation: held-out prompts go to engines, their samples to rewards, and the sums to a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conveyor.algorithms.pass_at_k import pass_at_k
from conveyor.algorithms.scores import sample_score
from conveyor.config import OnlineRecipe
from conveyor.pipeline.actions import Evaluate, EvaluationSampled, ScoreEvaluation
from conveyor.pipeline.run_plan import RunPlan
from conveyor.types import Prompt, SampleId
from conveyor.workers.records import fetch_rollouts
from conveyor.workers.reports import EvaluationAborted, Judged, SampleDone


@dataclass(slots=True)
class _Sampled:
    """A prompt's samples under one version."""

    rollouts: dict[int, Any] = field(default_factory=dict)
    """Sample → reference of its rollout."""
    done: dict[int, SampleDone] = field(default_factory=dict)
    rewards: dict[int, dict[str, float | None]] = field(default_factory=lambda: defaultdict(dict))
    """Sample → its rewards that are there."""


class HeldOut:
    """The held-out prompts of a run, and what is known of their samples."""

    def __init__(self, recipe: OnlineRecipe, plan: RunPlan, prompts: Sequence[Prompt]) -> None:
        self.recipe, self.plan, self.prompts = recipe, plan, prompts
        self._versions: dict[int, dict[int, _Sampled]] = defaultdict(lambda: defaultdict(_Sampled))

    def submission(self, action: Evaluate) -> tuple[Prompt, int, int, float | None, bool]:
        """Arguments of `RolloutWorker.evaluate`."""
        section = self.recipe.evaluate
        assert section is not None
        return self.prompts[action.prompt], section.n_samples_per_prompt, action.version, section.temperature, section.greedy

    def sampled(self, engine: int, done: SampleDone, rollout: Any) -> EvaluationSampled:
        """Keep a sample; `rollout`: its reference."""
        prompt, version = -1 - done.id.group, done.oldest_version
        kept = self._versions[version][prompt]
        kept.rollouts[done.id.sample] = rollout
        kept.done[done.id.sample] = done
        return EvaluationSampled(engine, prompt, version, aborted=False)

    def aborted(self, engine: int, sample: EvaluationAborted) -> EvaluationSampled:
        prompt = -1 - sample.id.group
        self._versions[sample.version].pop(prompt, None)
        return EvaluationSampled(engine, prompt, sample.version, aborted=True)

    def rollouts(self, action: ScoreEvaluation) -> list[Any]:
        """References to the samples to be scored, prompt by prompt."""
        kept = self._versions[action.version]
        return [reference for prompt in action.prompts for _, reference in sorted(kept[prompt].rollouts.items())]

    def rollout(self, version: int, sample: SampleId) -> Any:
        """The reference of one."""
        return self._versions[version][-1 - sample.group].rollouts[sample.sample]

    def judged(self, judged: Judged) -> None:
        """What functions and urls say of a sample."""
        self._versions[judged.version][-1 - judged.id.group].rewards[judged.id.sample].update(judged.rewards)

    def scored(self, action: ScoreEvaluation, rewards: dict[str, tuple[float | None, ...]]) -> None:
        """`rewards`: name → one number a sample, in the order of `rollouts`."""
        place = 0
        for prompt in action.prompts:
            kept = self._versions[action.version][prompt]
            for sample in sorted(kept.rollouts):
                kept.rewards[sample].update({name: values[place] for name, values in rewards.items()})
                place += 1

    def close(self, version: int) -> dict[str, Any]:
        """The version's line, over the prompts up to the first that was not finished: those are not chosen by their length."""
        sampled, section = self._versions.pop(version, {}), self.recipe.evaluate
        assert section is not None
        names = {reward.name for reward in self.recipe.rewards}
        whole = 0
        for prompt in range(len(self.prompts)):
            kept = sampled.get(prompt)
            finished = kept is not None and len(kept.rewards) == section.n_samples_per_prompt + section.greedy
            if kept is None or not finished or any(of_sample.keys() != names for of_sample in kept.rewards.values()):
                break
            whole += 1
        prompts = [self._answers(sampled[prompt], greedy=False) for prompt in range(whole)]
        line: dict[str, Any] = {"step": version, "version": version, **_summary(self.recipe, "eval", prompts)}
        line |= {f"eval/pass@{k}": self._pass_at(prompts, k) for k in section.pass_at}
        if section.greedy:
            greedy = [self._answers(sampled[prompt], greedy=True) for prompt in range(whole)]
            line |= _summary(self.recipe, "eval/greedy", greedy) | {"eval/greedy/pass@1": self._pass_at(greedy, 1)}
        samples = sum(map(len, prompts))
        return line | {"eval/prompts": whole, "eval/samples": samples, "eval/coverage": whole / len(self.prompts)}

    def rows(self, version: int) -> list[dict[str, Any]]:
        """A row for every sample that was judged. Fetches their rollouts."""
        section = self.recipe.evaluate
        assert section is not None
        found = []
        for _, kept in sorted(self._versions[version].items()):
            for rollout in fetch_rollouts([reference for _, reference in sorted(kept.rollouts.items())]):
                found.append(
                    {"row": rollout.prompt.row + 1, "sample": rollout.sample, "greedy": rollout.sample == section.n_samples_per_prompt,
                     "prompt": rollout.prompt.text, "response": rollout.text, "rewards": dict(kept.rewards[rollout.sample]),
                     "finish_reason": rollout.finish_reason, "response_length": int(rollout.sampled_mask.sum())}
                )  # fmt: skip
        return found

    def _answers(self, kept: _Sampled, greedy: bool) -> list[_Answer]:
        """Of one prompt: those that were sampled, or the greedy one, which comes after them."""
        n = self.recipe.evaluate.n_samples_per_prompt  # type: ignore[union-attr]
        answers = []
        for sample, rewards in sorted(kept.rewards.items()):
            if (sample == n) == greedy:
                done = kept.done[sample]
                answers.append(_Answer(rewards, self._total(rewards, done), done.tokens, done.truncated))
        return answers

    def _total(self, rewards: dict[str, float | None], done: SampleDone) -> float | None:
        """The weighted rewards as they are, clipped where the recipe says so; no penalties, no scales of the training."""
        plain = self.recipe.algorithm.model_copy(update={"missing_eos_penalty": 0.0, "overlong_buffer": None})
        return sample_score(rewards, self.recipe.rewards, {}, truncated=done.truncated, length=done.tokens, algorithm=plain,
                            max_response_length=self.recipe.rollout.max_response_length)  # fmt: skip

    def _pass_at(self, prompts: Sequence[Sequence[_Answer]], k: int) -> float | None:
        """Averaged over prompts. A sample that no reward applies to is not right."""
        section = self.recipe.evaluate
        assert section is not None
        named, least = section.success_reward, section.success_threshold

        def is_right(answer: _Answer) -> bool:
            value = answer.total if named is None else answer.rewards[named]
            return value is not None and value >= least

        right = [sum(map(is_right, answers)) for answers in prompts]
        return _mean([pass_at_k(len(answers), count, k) for answers, count in zip(prompts, right, strict=True)])


@dataclass(frozen=True, slots=True)
class _Answer:
    rewards: dict[str, float | None]
    total: float | None
    tokens: int
    truncated: bool


def _summary(recipe: OnlineRecipe, name: str, prompts: Sequence[Sequence[_Answer]]) -> dict[str, Any]:
    answers = [answer for of_prompt in prompts for answer in of_prompt]
    line = {f"{name}/reward/mean": _mean([answer.total for answer in answers])}
    line |= {f"{name}/reward/{reward.name}": _mean([answer.rewards[reward.name] for answer in answers]) for reward in recipe.rewards}
    line[f"{name}/response_length/mean"] = _mean([answer.tokens for answer in answers])
    return line | {f"{name}/truncated_fraction": _mean([float(answer.truncated) for answer in answers])}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
