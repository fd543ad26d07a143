"""The executor's side of evaluation: held-out prompts go to engines, their samples to rewards, and the sums to a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conveyor.algorithms.pass_at_k import pass_at_k
from conveyor.algorithms.scores import sample_score
from conveyor.config import OnlineRecipe
from conveyor.pipeline.actions import Evaluate, EvaluationSampled, SampleJudged, ScoreEvaluation
from conveyor.pipeline.run_plan import RunPlan
from conveyor.types import Prompt, SampleId
from conveyor.workers.reports import EvaluationAborted, Judged, SampleDone


@dataclass(slots=True)
class OpenPrompt:
    """What is known of a prompt's samples."""

    rollouts: dict[int, Any] = field(default_factory=dict)
    """Sample → reference of its rollout."""
    done: dict[int, SampleDone] = field(default_factory=dict)
    rewards: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """Sample → its rewards that are there."""

    def add(self, done: SampleDone, rollout: Any) -> None:
        """A sample has left its engine; `rollout`: its reference."""
        number = done.id.sample
        self.rollouts[number], self.done[number], self.rewards[number] = rollout, done, {}

    def in_order(self) -> list[Any]:
        """References of the rollouts, by sample."""
        return [reference for _, reference in sorted(self.rollouts.items())]

    def scored(self, name: str, values: Sequence[float | None]) -> None:
        """A reward of every sample."""
        for sample, value in zip(sorted(self.rollouts), values, strict=True):
            self.rewards[sample][name] = value

    def is_complete(self, samples: int, names: set[str]) -> bool:
        """Whether all samples have come and every reward of them."""
        return len(self.rewards) == samples and all(rewards.keys() == names for rewards in self.rewards.values())


def deal_out(prompts: Sequence[OpenPrompt], rewards: Mapping[str, Sequence[float | None]]) -> None:
    """Give each prompt its part of what a score part says: reward → one number a sample, prompt by prompt."""
    place = 0
    for prompt in prompts:
        end = place + len(prompt.rollouts)
        for name, values in rewards.items():
            prompt.scored(name, values[place:end])
        place = end


class HeldOut:
    """The held-out prompts of a training run, which keeps what is known of their samples until a version's line is written."""

    def __init__(self, recipe: OnlineRecipe, plan: RunPlan, prompts: Sequence[Prompt]) -> None:
        """prompts: their indices count down from −1."""
        self.recipe, self.plan, self.prompts = recipe, plan, prompts
        self._versions: dict[int, dict[int, OpenPrompt]] = defaultdict(lambda: defaultdict(OpenPrompt))

    async def admitted(self, action: Evaluate) -> None:
        """At once: the scheduler has seen to it that the engine holds the version."""

    def submission(self, action: Evaluate) -> tuple[Prompt, int, int, float | None, bool]:
        """Arguments of `RolloutWorker.evaluate`."""
        section = self.recipe.evaluate
        assert section is not None
        return self.prompts[action.prompt], section.n_samples_per_prompt, action.version, section.temperature, section.greedy

    def sampled(self, engine: int, done: SampleDone, rollout: Any) -> EvaluationSampled:
        """Keep a sample; `rollout`: its reference."""
        prompt, version = -1 - done.id.group, done.oldest_version
        self._versions[version][prompt].add(done, rollout)
        return EvaluationSampled(engine, prompt, version, aborted=False)

    def aborted(self, engine: int, sample: EvaluationAborted) -> EvaluationSampled:
        prompt = -1 - sample.id.group
        self._versions[sample.version].pop(prompt, None)
        return EvaluationSampled(engine, prompt, sample.version, aborted=True)

    def rollouts(self, action: ScoreEvaluation) -> list[Any]:
        """References to the samples to be scored, prompt by prompt."""
        kept = self._versions[action.version]
        return [reference for prompt in action.prompts for reference in kept[prompt].in_order()]

    def rollout(self, version: int, sample: SampleId) -> Any:
        """The reference of one."""
        return self._versions[version][-1 - sample.group].rollouts[sample.sample]

    def judged(self, judged: Judged) -> SampleJudged:
        """What functions and urls say of a sample."""
        self._versions[judged.version][-1 - judged.id.group].rewards[judged.id.sample].update(judged.rewards)
        return SampleJudged(judged.id, judged.version)

    def scored(self, action: ScoreEvaluation, rewards: Mapping[str, Sequence[float | None]]) -> None:
        """`rewards`: name → one number a sample, in the order of `rollouts`."""
        deal_out([self._versions[action.version][prompt] for prompt in action.prompts], rewards)

    def close(self, version: int) -> dict[str, Any]:
        """The version's line, over the prompts up to the first that was not finished: those are not chosen by their length."""
        sampled, section = self._versions.pop(version, {}), self.recipe.evaluate
        assert section is not None
        names = {reward.name for reward in self.recipe.rewards}
        whole: list[list[Answer]] = []
        for prompt in range(len(self.prompts)):
            kept = sampled.get(prompt)
            if kept is None or not kept.is_complete(section.n_samples_per_prompt + section.greedy, names):
                break
            whole.append([self._answer(rewards, kept.done[sample]) for sample, rewards in sorted(kept.rewards.items())])
        line = {"step": version, "version": version, **held_out_line(self.recipe, whole)}
        return line | {"eval/coverage": len(whole) / len(self.prompts)}

    def _answer(self, rewards: Mapping[str, float | None], done: SampleDone) -> Answer:
        return Answer(rewards, plain_score(self.recipe, rewards, done.truncated, done.tokens), done.tokens, done.truncated)


@dataclass(frozen=True, slots=True)
class Answer:
    """A sample of a held-out prompt, as its line counts it."""

    rewards: Mapping[str, float | None]
    total: float | None
    """`plain_score`"""
    tokens: int
    truncated: bool


def plain_score(recipe: OnlineRecipe, rewards: Mapping[str, float | None], truncated: bool, tokens: int) -> float | None:
    """The weighted rewards as they are, clipped where the recipe says so; no penalties, no scales of the training. None: none applies."""
    plain = recipe.algorithm.model_copy(update={"missing_eos_penalty": 0.0, "overlong_buffer": None})
    return sample_score(rewards, recipe.rewards, {}, truncated=truncated, length=tokens, algorithm=plain,
                        max_response_length=recipe.rollout.max_response_length)  # fmt: skip


def held_out_line(recipe: OnlineRecipe, prompts: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Means over prompts whose answers are all there: `evaluate.n_samples_per_prompt` that were sampled, then the greedy one if asked."""
    section = recipe.evaluate
    assert section is not None
    n = section.n_samples_per_prompt
    sampled = [answers[:n] for answers in prompts]
    line = _summary(recipe, "eval", sampled)
    line |= {f"eval/pass@{k}": _pass_at(recipe, sampled, k) for k in section.pass_at}
    if section.greedy:
        greedy = [answers[n:] for answers in prompts]
        line |= _summary(recipe, "eval/greedy", greedy) | {"eval/greedy/pass@1": _pass_at(recipe, greedy, 1)}
    return line | {"eval/prompts": len(prompts), "eval/samples": sum(map(len, sampled))}


def _pass_at(recipe: OnlineRecipe, prompts: Sequence[Sequence[Answer]], k: int) -> float | None:
    """Averaged over prompts. A sample that no reward applies to is not right."""
    section = recipe.evaluate
    assert section is not None
    named, least = section.success_reward, section.success_threshold

    def is_right(answer: Answer) -> bool:
        value = answer.total if named is None else answer.rewards[named]
        return value is not None and value >= least

    right = [sum(map(is_right, answers)) for answers in prompts]
    return _mean([pass_at_k(len(answers), count, k) for answers, count in zip(prompts, right, strict=True)])


def _summary(recipe: OnlineRecipe, name: str, prompts: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    answers = [answer for of_prompt in prompts for answer in of_prompt]
    line = {f"{name}/reward/mean": _mean([answer.total for answer in answers])}
    line |= {f"{name}/reward/{reward.name}": _mean([answer.rewards[reward.name] for answer in answers]) for reward in recipe.rewards}
    line[f"{name}/response_length/mean"] = _mean([answer.tokens for answer in answers])
    return line | {f"{name}/truncated_fraction": _mean([float(answer.truncated) for answer in answers])}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
