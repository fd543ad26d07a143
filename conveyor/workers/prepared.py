"""A train rank's share of a micro-batch: its samples in batches, what the driver is told of them, and their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conveyor.algorithms.advantages import gae, returns_to_go, sample_moments
from conveyor.config import OnlineRecipe, sections
from conveyor.config.recipe import GROUP_ESTIMATORS
from conveyor.data.balance import micro_batches
from conveyor.models.batch import empty_batch, is_baseline, make_train_batch, sample_report, token_rewards
from conveyor.types import SampleId, Scored, TrainBatch
from conveyor.workers.reports import SampleReport, SampleRow, StepSettings, UpdateContext


@dataclass(slots=True)
class Part:
    """Samples that go through one forward and backward."""

    samples: list[Scored]
    batch: TrainBatch

    @property
    def groups(self) -> Tensor:
        """int64 [B]: the prompt group of each row of the batch."""
        return torch.tensor([sample.rollout.id.group for sample in self.samples] or [0])


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the shares of a micro-batch a rank takes, and how."""

    rank: int
    ranks: int
    """Ranks that have a row of tokens together count as one."""
    packed: bool
    """Samples stand in one row."""


@dataclass(slots=True)
class Prepared:
    """Kept from `prepare` until the step is finished."""

    recipe: OnlineRecipe
    parts: list[Part]
    """As many on every rank; a part without samples has an empty batch."""
    everything: list[Scored]
    """The samples of all parts, then greedy baselines, which are not trained; `reports` are of these."""
    reports: list[SampleReport]
    settings: StepSettings
    advantages: dict[SampleId, float] = field(default_factory=dict)
    """Of samples in the loss, mean over their tokens, as last trained."""

    @classmethod
    def share_of(cls, recipe: OnlineRecipe, micro_batch: Sequence[Scored], settings: StepSettings, share: Share) -> Prepared:
        """A rank's share: about as many tokens as every other's. Rank 0 reports the greedy baselines."""
        parts = []
        for samples in _shared_out(recipe, micro_batch, share):
            batch = make_train_batch(samples, recipe, settings, share.packed) if samples else empty_batch(share.packed)
            parts.append(Part(samples, batch))
        baselines = [sample for sample in micro_batch if is_baseline(sample.rollout, recipe)] if share.rank == 0 else []
        reports = [report for part in parts for report in _reports(recipe, part, settings)]
        reports += [sample_report(sample, recipe, settings) for sample in baselines]
        return cls(recipe, parts, [*(sample for part in parts for sample in part.samples), *baselines], reports, settings)

    @property
    def samples(self) -> list[Scored]:
        """Those that are trained."""
        return [sample for part in self.parts for sample in part.samples]

    def rescore(self, scores: Mapping[SampleId, float | None]) -> None:
        """Rewards normalised by batch: now that the update is whole, its samples' scores are known."""
        self.reports = [replace(report, score=scores[report.id]) for report in self.reports]
        for part in self.parts:
            if part.samples:
                known = [scores[sample.rollout.id] for sample in part.samples]
                rewards = token_rewards(part.samples, known, part.batch.response_mask, self.recipe, self.settings)
                part.batch = replace(part.batch, token_rewards=rewards)

    def advantages_of(self, part: Part, batch: TrainBatch, shared: UpdateContext) -> Tensor:
        """Of estimators without a critic, [B, S]: the sample's on each of its tokens, or by token less the sample's baseline.

        `batch`: the part's, on the device that trains.
        """
        mask = batch.response_mask
        by_sample = shared.outcome_advantages if shared.outcome_advantages is not None else shared.baselines
        numbers = [by_sample[sample.rollout.id] for sample in part.samples] if by_sample is not None else []
        column = torch.tensor(numbers or [0.0] * len(mask), device=mask.device)[:, None] * mask
        if shared.outcome_advantages is not None:
            return column
        return by_token(self.recipe.algorithm, batch, None)[0] - column

    def note(self, part: Part, advantages: Tensor, mask: Tensor) -> None:
        """Keep each sample's mean advantage over its tokens in the loss, for its row."""
        counts = mask.sum(1)
        means = (advantages.masked_fill(~mask, 0).sum(1) / counts.clamp(min=1)).tolist()
        rows = zip(part.samples, means, counts.tolist(), strict=False)
        self.advantages |= {sample.rollout.id: mean for sample, mean, count in rows if count}

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


def _shared_out(recipe: OnlineRecipe, micro_batch: Sequence[Scored], share: Share) -> list[list[Scored]]:
    """The samples of a rank's parts, each in prompt order; of a loss of pairs a group stays whole."""
    trained = [sample for sample in micro_batch if not is_baseline(sample.rollout, recipe)]
    units: dict[Any, list[Scored]] = {}
    for sample in trained:
        name = sample.rollout.id
        units.setdefault(name.group if recipe.algorithm.policy_loss == "dpo" else name, []).append(sample)
    whole = list(units.values())
    lengths = [sum(len(sample.rollout.prompt.token_ids) + len(sample.rollout.response_ids) for sample in unit) for unit in whole]
    cut = micro_batches(lengths, share.ranks, recipe.train.row_tokens)
    return [[sample for number in shares[share.rank] for sample in whole[number]] for shares in cut]


def _reports(recipe: OnlineRecipe, part: Part, settings: StepSettings) -> list[SampleReport]:
    reports = [sample_report(sample, recipe, settings) for sample in part.samples]
    if part.samples and recipe.algorithm.advantage_estimator not in GROUP_ESTIMATORS and recipe.algorithm.normalize == "update":
        found = sample_moments(by_token(recipe.algorithm, part.batch, part.batch.values)[0], part.batch.loss_mask)
        return [replace(report, moments=one) for report, one in zip(reports, found, strict=True)]
    return reports


def by_token(algorithm: sections.Algorithm, batch: TrainBatch, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Advantages by token before a baseline is taken off, and the returns that a critic learns; both [B, S].

    values: [B, S], of gae only: a snapshot's, or the critic's own.
    """
    if algorithm.advantage_estimator != "gae":
        return returns_to_go(batch.token_rewards, batch.response_mask, algorithm.gamma), None
    assert values is not None, "gae needs values"
    return gae(batch.token_rewards, values, batch.response_mask, algorithm.gamma, algorithm.lam)
