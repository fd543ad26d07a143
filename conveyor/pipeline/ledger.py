"""What the driver knows of samples on their way: references to their tensors, and small reports.

From the reports of an update come the things that need more than one micro-batch: group
advantages, whitening statistics and loss denominators. They are made here, once, and handed to
every rank, so that no statistic of a micro-batch is ever taken for the update's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conveyor.algorithms.advantages import group_advantages, whitening
from conveyor.algorithms.metrics import Moments
from conveyor.config import OnlineRecipe
from conveyor.config.recipe import GROUP_ESTIMATORS
from conveyor.types import SampleId
from conveyor.workers.reports import Denominators, MicroBatchKey, PrepareReport, SampleReport, TrainReport, UpdateContext


@dataclass(slots=True)
class _Update:
    """Reports of one update in one train group."""

    samples: dict[SampleId, SampleReport] = field(default_factory=dict)
    moments: Moments = field(default_factory=lambda: Moments(0, 0, 0))


class Ledger:
    """Books of all open steps. References are whatever the executor uses for remote objects."""

    def __init__(self, recipe: OnlineRecipe) -> None:
        self.recipe = recipe
        self._rollouts: dict[SampleId, Any] = {}
        self._scores: dict[MicroBatchKey, dict[int, Any]] = {}
        self._updates: dict[tuple[int, int, int], _Update] = {}

    # ── references ───────────────────────────────────────────────────────────────────────────────

    def add_rollout(self, sample: SampleId, reference: Any) -> None:
        self._rollouts[sample] = reference

    def add_score(self, key: MicroBatchKey, part: int, reference: Any) -> None:
        self._scores.setdefault(key, {})[part] = reference

    def rollouts(self, samples: Iterable[SampleId]) -> list[Any]:
        return [self._rollouts[sample] for sample in samples]

    def scores(self, key: MicroBatchKey) -> list[Any]:
        """References to the partial scores of a micro-batch, in the order of the parts."""
        return [reference for _, reference in sorted(self._scores[key].items())]

    def release(self, key: MicroBatchKey, samples: Iterable[SampleId]) -> None:
        """Every train group holds the micro-batch's tensors now."""
        del self._scores[key]
        for sample in samples:
            del self._rollouts[sample]

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    def add_reports(self, train_group: int, reports: Iterable[PrepareReport]) -> None:
        for report in reports:
            update = self._update(train_group, report.key)
            update.samples.update({sample.id: sample for sample in report.samples})
            if report.moments is not None:
                update.moments += report.moments

    def context(self, train_group: int, key: MicroBatchKey, samples: Sequence[SampleId]) -> UpdateContext:
        """What a micro-batch needs from beyond itself; its groups, and with whitening its whole
        update, have been prepared."""
        update = self._update(train_group, key)
        algorithm = self.recipe.algorithm
        by_group = algorithm.advantage_estimator in GROUP_ESTIMATORS
        advantages = self._group_advantages(update, {sample.group for sample in samples}) if by_group else None
        if algorithm.normalize != "update":
            return UpdateContext(advantages)
        moments = self._outcome_moments(update) if by_group else update.moments
        return UpdateContext(advantages, whitening(moments))

    def _group_advantages(self, update: _Update, groups: Iterable[int]) -> dict[SampleId, float]:
        """A truncated sample that is masked from the loss still counts in its group's baseline."""
        advantages: dict[SampleId, float] = {}
        for group in sorted(groups):
            members = [SampleId(group, k) for k in range(self.recipe.rollout.n_samples_per_prompt)]
            outcomes = [update.samples[member].outcome for member in members]
            advantages.update(zip(members, group_advantages(outcomes, self.recipe.algorithm.advantage_estimator), strict=True))  # type: ignore[arg-type]
        return advantages

    def _outcome_moments(self, update: _Update) -> Moments:
        """Over the tokens in the loss, each of which carries its sample's advantage."""
        advantages = self._group_advantages(update, {sample.group for sample in update.samples})
        total = Moments(0, 0, 0)
        for sample, advantage in advantages.items():
            tokens = update.samples[sample].loss_tokens
            total += Moments(tokens, tokens * advantage, tokens * advantage**2)
        return total

    def add_train_reports(self, train_group: int, key: MicroBatchKey, reports: Iterable[TrainReport]) -> None:
        """Moments of advantages that are whitened while they stream."""
        for report in reports:
            if report.moments is not None:
                self._update(train_group, key).moments += report.moments

    def denominators(self, train_group: int, step: int, update: int) -> Denominators:
        """Of a base update (a second pass over it has the same)."""
        books = self._updates[train_group, step, update]
        tokens = [sample.loss_tokens for sample in books.samples.values()]
        streaming = self.recipe.algorithm.normalize == "streaming_exact"
        return Denominators(sum(tokens), sum(count > 0 for count in tokens), whitening(books.moments) if streaming else None)

    def finish_step(self, train_group: int, step: int) -> list[SampleReport]:
        """Close the books of a step; returns its samples in prompt order."""
        keys = [key for key in self._updates if key[:2] == (train_group, step)]
        samples = [sample for key in keys for sample in self._updates.pop(key).samples.values()]
        return sorted(samples, key=lambda sample: sample.id)

    def _update(self, train_group: int, key: MicroBatchKey) -> _Update:
        return self._updates.setdefault((train_group, key.step, key.update), _Update())
