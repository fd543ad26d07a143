"""A train rank's share of a micro-batch: its samples as one batch, what the driver is told of them, and their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conveyor.algorithms.advantages import gae, returns_to_go, sample_moments
from conveyor.config import OnlineRecipe, sections
from conveyor.config.recipe import GROUP_ESTIMATORS
from conveyor.models.batch import empty_batch, is_baseline, make_train_batch, sample_report, token_rewards
from conveyor.types import SampleId, Scored, TrainBatch
from conveyor.workers.reports import SampleReport, SampleRow, StepSettings, UpdateContext


@dataclass(slots=True)
class Prepared:
    """Kept from `prepare` until the step is finished."""

    recipe: OnlineRecipe
    samples: list[Scored]
    """Those of `batch`, in its order."""
    everything: list[Scored]
    """The same, then greedy baselines, which are not trained; `reports` are of these."""
    reports: list[SampleReport]
    batch: TrainBatch
    settings: StepSettings
    advantages: dict[SampleId, float] = field(default_factory=dict)
    """Of samples in the loss, mean over their tokens, as last trained."""

    @classmethod
    def share_of(cls, recipe: OnlineRecipe, micro_batch: Sequence[Scored], settings: StepSettings, rank: int, world_size: int) -> Prepared:
        """A rank's share: every `world_size`-th sample, or with pairs group. Rank 0 reports the greedy baselines."""
        trained = [sample for sample in micro_batch if not is_baseline(sample.rollout, recipe)]
        if recipe.algorithm.policy_loss == "dpo":
            groups = list(dict.fromkeys(sample.rollout.id.group for sample in trained))[rank::world_size]
            samples = [sample for sample in trained if sample.rollout.id.group in groups]
        else:
            samples = trained[rank::world_size]
        baselines = [sample for sample in micro_batch if is_baseline(sample.rollout, recipe)] if rank == 0 else []
        batch = make_train_batch(samples, recipe, settings) if samples else empty_batch()
        everything = [*samples, *baselines]
        reports = [sample_report(sample, recipe, settings) for sample in everything]
        if samples and recipe.algorithm.advantage_estimator not in GROUP_ESTIMATORS and recipe.algorithm.normalize == "update":
            found = sample_moments(by_token(recipe.algorithm, batch, batch.values)[0], batch.loss_mask)
            reports[: len(samples)] = [replace(report, moments=one) for report, one in zip(reports, found, strict=False)]
        return cls(recipe, samples, everything, reports, batch, settings)

    @property
    def groups(self) -> Tensor:
        """int64 [B]: the prompt group of each row of the batch."""
        return torch.tensor([sample.rollout.id.group for sample in self.samples] or [0])

    def rescore(self, scores: Mapping[SampleId, float | None]) -> None:
        """Rewards normalised by batch: now that the update is whole, its samples' scores are known."""
        self.reports = [replace(report, score=scores[report.id]) for report in self.reports]
        if self.samples:
            known = [scores[sample.rollout.id] for sample in self.samples]
            rewards = token_rewards(self.samples, known, self.batch.response_mask, self.recipe, self.settings)
            self.batch = replace(self.batch, token_rewards=rewards)

    def advantages_of(self, batch: TrainBatch, shared: UpdateContext) -> Tensor:
        """Of estimators without a critic, [B, S]: the sample's on each of its tokens, or by token less the sample's baseline.

        `batch`: this one, on the device that trains.
        """
        mask = batch.response_mask
        by_sample = shared.outcome_advantages if shared.outcome_advantages is not None else shared.baselines
        numbers = [by_sample[sample.rollout.id] for sample in self.samples] if by_sample is not None else []
        column = torch.tensor(numbers or [0.0] * len(mask), device=mask.device)[:, None] * mask
        if shared.outcome_advantages is not None:
            return column
        return by_token(self.recipe.algorithm, batch, None)[0] - column

    def note(self, advantages: Tensor, mask: Tensor) -> None:
        """Keep each sample's mean advantage over its tokens in the loss, for its row."""
        counts = mask.sum(1)
        means = (advantages.masked_fill(~mask, 0).sum(1) / counts.clamp(min=1)).tolist()
        rows = zip(self.samples, means, counts.tolist(), strict=False)
        self.advantages = {sample.rollout.id: mean for sample, mean, count in rows if count}

    def rows(self) -> list[SampleRow]:
        """Lines of samples.jsonl."""
        return [
            SampleRow(
                id=report.id,
                prompt=sample.rollout.prompt.text,
                response=sample.rollout.text,
                rewards=report.rewards,
                score=report.score,
                advantage=self.advantages.get(report.id),
                version=report.oldest_version,
                finish_reason=sample.rollout.finish_reason,
                prompt_length=len(sample.rollout.prompt.token_ids),
                response_length=report.response_length,
            )
            for sample, report in zip(self.everything, self.reports, strict=True)
        ]


def by_token(algorithm: sections.Algorithm, batch: TrainBatch, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Advantages by token before a baseline is taken off, and the returns that a critic learns; both [B, S].

    values: [B, S], of gae only: a snapshot's, or the critic's own.
    """
    if algorithm.advantage_estimator != "gae":
        return returns_to_go(batch.token_rewards, batch.response_mask, algorithm.gamma), None
    assert values is not None, "gae needs values"
    return gae(batch.token_rewards, values, batch.response_mask, algorithm.gamma, algorithm.lam)
