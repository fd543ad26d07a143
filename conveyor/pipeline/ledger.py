"""What the driver knows of samples on their way: references to their tensors, and small reports.

From the reports of an update come the things that need more than one micro-batch: group
advantages, baselines, whitening statistics and loss denominators. They are made here, once, and handed to
every rank, so that no statistic of a micro-batch is ever taken for the update's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conveyor.algorithms.advantages import group_advantages, group_baselines, normalize_group, whitening
from conveyor.algorithms.metrics import Moments
from conveyor.algorithms.scores import RewardScale, Running, sample_score
from conveyor.config import OnlineRecipe
from conveyor.config.recipe import GROUP_ESTIMATORS
from conveyor.pipeline.control import StepControl
from conveyor.types import PartialScores, SampleId
from conveyor.workers.reports import (
    Denominators,
    Judged,
    MicroBatchKey,
    PrepareReport,
    SampleReport,
    StepSettings,
    TrainReport,
    UpdateContext,
)


@dataclass(slots=True)
class _Update:
    """Reports of one update in one train group."""

    samples: dict[SampleId, SampleReport] = field(default_factory=dict)
    moments: Moments = field(default_factory=lambda: Moments(0, 0, 0))
    """Of advantages that are whitened while they stream."""
    rescored: dict[SampleId, SampleReport] | None = None
    """The same samples, with rewards normalised by batch."""


class Ledger:
    """Books of all open steps. References are whatever the executor uses for remote objects."""

    def __init__(self, recipe: OnlineRecipe, control: StepControl | None = None) -> None:
        self.recipe = recipe
        self.control = control or StepControl(recipe)
        self._members = recipe.samples_per_group
        self._estimator = recipe.algorithm.advantage_estimator
        self._by_group = self._estimator in GROUP_ESTIMATORS
        self._by_batch = [reward for reward in recipe.rewards if reward.normalize == "batch"]
        self._rollouts: dict[SampleId, Any] = {}
        self._scores: dict[MicroBatchKey, dict[int, Any]] = {}
        self._judged: dict[int, dict[int, Judged]] = defaultdict(dict)
        """Group → sample → what functions and urls say of it."""
        self._updates: dict[tuple[int, int, int], _Update] = {}

    # ── references ───────────────────────────────────────────────────────────────────────────────

    def add_rollout(self, sample: SampleId, reference: Any) -> None:
        self._rollouts[sample] = reference

    def add_score(self, key: MicroBatchKey, part: int, reference: Any) -> None:
        self._scores.setdefault(key, {})[part] = reference

    def rollouts(self, samples: Iterable[SampleId]) -> list[Any]:
        return [self._rollouts[sample] for sample in samples]

    def scores(self, key: MicroBatchKey, samples: Sequence[SampleId]) -> list[Any]:
        """The partial scores of a micro-batch: references in the order of the parts, then what functions and urls say."""
        of_parts = [reference for _, reference in sorted(self._scores.get(key, {}).items())]
        judged = [self._judged[sample.group][sample.sample] for sample in samples if self.recipe.judged_rewards]
        rewards = {reward.name: tuple(one.rewards[reward.name] for one in judged) for reward in self.recipe.judged_rewards}
        return [*of_parts, PartialScores(rewards=rewards)]

    def release(self, key: MicroBatchKey, samples: Iterable[SampleId]) -> None:
        """Every train group holds the micro-batch's tensors now."""
        self._scores.pop(key, None)
        for sample in samples:
            self._forget(sample)

    def drop(self, group: int) -> list[Judged]:
        """A group is not trained; returns what was said of it."""
        judged = list(self._judged[group].values())
        for member in self._group(group):
            self._forget(member)
        return judged

    def _forget(self, sample: SampleId) -> None:
        del self._rollouts[sample]
        of_group = self._judged.get(sample.group)
        if of_group is not None:
            of_group.pop(sample.sample, None)
            if not of_group:
                del self._judged[sample.group]

    # ── judging ──────────────────────────────────────────────────────────────────────────────────

    def add_judged(self, judged: Judged) -> bool:
        """Note what functions and urls say; whether the group is whole now and its rewards are all equal, penalties left out."""
        of_group = self._judged[judged.id.group]
        of_group[judged.id.sample] = judged
        if len(of_group) < self._members:
            return False
        weights = {reward.name: reward.weight for reward in self.recipe.judged_rewards}
        totals = [tuple(weights[name] * value for name, value in one.rewards.items() if value is not None) for one in of_group.values()]
        known = [math.fsum(total) for total in totals if total]
        return len(known) < 2 or min(known) == max(known)

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    def settings(self, step: int) -> StepSettings:
        """Of a step that may be prepared: the steps it rests on are trained, so their samples are all reported."""
        for earlier in self.control.rests_on(step):
            self.control.learn(earlier, self._reports(0, earlier))
        return self.control.settings(step)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps keeps of the settings of later ones."""
        for earlier in range(self.control.next, step):
            self.control.learn(earlier, self._reports(0, earlier))
        return self.control.state()

    def add_reports(self, train_group: int, reports: Iterable[PrepareReport]) -> None:
        for report in reports:
            self._update(train_group, report.key).samples.update({sample.id: sample for sample in report.samples})

    def context(self, train_group: int, key: MicroBatchKey, samples: Sequence[SampleId]) -> UpdateContext:
        """What a micro-batch needs from beyond itself; its groups, and with whitening its whole
        update, have been prepared."""
        update = self._update(train_group, key)
        reports = self._rescored(update, key.step) if self._by_batch else update.samples
        groups = {sample.group for sample in samples}
        advantages = self._group_advantages(reports, groups) if self._by_group else None
        baselines = self._baselines(reports, groups) if self.recipe.needs_group and not self._by_group else None
        scores = {sample: reports[sample].score for sample in samples} if self._by_batch else None
        whiten = whitening(self._moments(reports)) if self.recipe.algorithm.normalize == "update" else None
        return UpdateContext(advantages, baselines, scores, whiten)

    def _rescored(self, update: _Update, step: int) -> dict[SampleId, SampleReport]:
        """Samples of an update whose rewards are all there, with those rewards scaled that go by batch."""
        if update.rescored is None:
            scales = dict(self.control.settings(step).scales)
            in_order = [sample for _, sample in sorted(update.samples.items())]  # sums round the same whatever came first
            for reward in self._by_batch:
                running = Running()
                known = (sample.rewards.get(reward.name) for sample in in_order if not sample.baseline)
                running.add([value for value in known if value is not None])
                scales[reward.name] = running.scale() or RewardScale(0.0, 0.0)
            update.rescored = {sample: self._rescore(report, scales) for sample, report in update.samples.items()}
        return update.rescored

    def _rescore(self, report: SampleReport, scales: Mapping[str, RewardScale]) -> SampleReport:
        recipe = self.recipe
        if report.score is None:
            return report
        score = sample_score(
            report.rewards, recipe.rewards, scales, truncated=report.truncated, length=report.total_length,
            algorithm=recipe.algorithm, max_response_length=recipe.rollout.max_response_length,
        )  # fmt: skip
        return replace(report, score=score, outcome=None if score is None else score - report.kl_penalty)

    def _group(self, group: int) -> list[SampleId]:
        return [SampleId(group, sample) for sample in range(self._members)]

    def _group_advantages(self, reports: dict[SampleId, SampleReport], groups: Iterable[int]) -> dict[SampleId, float]:
        """A truncated sample that is masked from the loss still counts in its group's baseline, but in no pair."""
        algorithm, advantages = self.recipe.algorithm, dict[SampleId, float]()
        for group in sorted(groups):
            members = self._group(group)
            of_group = [reports[member] for member in members]
            paired = self._estimator == "best_worst"
            outcomes = [None if paired and not report.loss_tokens else report.outcome for report in of_group]
            found = group_advantages(outcomes, self._estimator, [report.response_length for report in of_group])  # type: ignore[arg-type]
            if algorithm.normalize == "group":
                found = normalize_group(found, outcomes)
            advantages.update(zip(members, found, strict=True))
        return advantages

    def _baselines(self, reports: dict[SampleId, SampleReport], groups: Iterable[int]) -> dict[SampleId, float]:
        baselines: dict[SampleId, float] = {}
        for group in groups:
            members = self._group(group)
            found = group_baselines([reports[member].score for member in members], self._estimator)  # type: ignore[arg-type]
            baselines.update(zip(members, found, strict=True))
        return baselines

    def _moments(self, reports: dict[SampleId, SampleReport]) -> Moments:
        """Of all advantages of an update, over its tokens in the loss."""
        groups, total = {sample.group for sample in reports}, Moments(0, 0, 0)
        if self._by_group:  # each token carries its sample's
            for sample, advantage in self._group_advantages(reports, groups).items():
                tokens = reports[sample].loss_tokens
                total += Moments(tokens, tokens * advantage, tokens * advantage**2)
            return total
        baselines = self._baselines(reports, groups) if self.recipe.needs_group else {}
        for sample, report in sorted(reports.items()):
            if report.moments is not None:
                total += report.moments.shifted(-baselines.get(sample, 0.0))
        return total

    def add_train_reports(self, train_group: int, key: MicroBatchKey, reports: Iterable[TrainReport]) -> None:
        """Moments of advantages that are whitened while they stream."""
        for report in reports:
            if report.moments is not None:
                self._update(train_group, key).moments += report.moments

    def denominators(self, train_group: int, step: int, update: int) -> Denominators:
        """Of a base update (a second pass over it has the same)."""
        books = self._updates[train_group, step, update]
        trained = [sample for sample in books.samples.values() if not sample.baseline]
        tokens = [sample.loss_tokens for sample in trained]
        pairs = 0
        if self._estimator == "best_worst":
            reports = self._rescored(books, step) if self._by_batch else books.samples
            signs = self._group_advantages(reports, {sample.group for sample in reports})
            pairs = sum(sign > 0 for sign in signs.values())
        streaming = self.recipe.algorithm.normalize == "streaming_exact"
        return Denominators(
            sum(tokens), sum(count > 0 for count in tokens), len(trained), pairs, whitening(books.moments) if streaming else None
        )

    def finish_step(self, train_group: int, step: int) -> list[SampleReport]:
        """Close the books of a step; returns its samples in prompt order."""
        if train_group == 0 and self.control.next == step:
            self.control.learn(step, self._reports(0, step))
        samples = self._reports(train_group, step)
        for key in [key for key in self._updates if key[:2] == (train_group, step)]:
            del self._updates[key]
        return samples

    def _reports(self, train_group: int, step: int) -> list[SampleReport]:
        """Of all samples of a step, in prompt order."""
        updates = [update for key, update in self._updates.items() if key[:2] == (train_group, step)]
        samples = [sample for update in updates for sample in (update.rescored or update.samples).values()]
        return sorted(samples, key=lambda sample: sample.id)

    def _update(self, train_group: int, key: MicroBatchKey) -> _Update:
        return self._updates.setdefault((train_group, key.step, key.update), _Update())
