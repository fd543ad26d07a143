"""The train stage: one rank of a train group, with the actor, the critic, or both.

    rollouts, scores ──▶ prepare ──▶ TrainBatch ──▶ forward_backward ──▶ … ──▶ optim_step ──▶ publish
                           │ reports                 ▲ context            once an update, with
                           └──────▶ driver ──────────┘                    its denominators

Every rank of a group gets the same calls in the same order, and takes `samples[rank::world_size]` of each micro-batch.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from conveyor.algorithms.advantages import gae, moments, whiten
from conveyor.algorithms.losses import value_loss
from conveyor.algorithms.metrics import Mean, Metrics, Moments
from conveyor.algorithms.objective import actor_losses, streaming_coefficients
from conveyor.config import OnlineRecipe, sections
from conveyor.data.tokenizer import load_tokenizer
from conveyor.models.batch import empty_batch, make_train_batch, merge_scores, sample_report
from conveyor.models.language_model import load_language_model, response_logprobs
from conveyor.models.scalar_model import load_critic, response_values
from conveyor.models.train_engine import TrainEngine
from conveyor.types import SampleId, Scored, TrainBatch
from conveyor.workers.records import fetch, fetch_rollouts
from conveyor.workers.reports import (
    Denominators,
    MicroBatchKey,
    OptimReport,
    PrepareReport,
    Publication,
    SampleReport,
    SampleRow,
    Span,
    StepReport,
    TrainReport,
    UpdateContext,
    WorkerInfo,
)
from conveyor.workers.weight_sync import BucketWriter, publish


@dataclass(slots=True)
class _Prepared:
    """This rank's share of a micro-batch."""

    samples: list[Scored]
    reports: list[SampleReport]
    batch: TrainBatch
    advantages: dict[SampleId, float]
    """Of samples in the loss, mean over their tokens, as last trained."""


class TrainWorker:
    """Trains the models of one train group, on one rank.

    `prepare` has a thread of its own: it touches nothing but the books of its micro-batch, and the device goes on meanwhile.
    """

    concurrency_groups: ClassVar = {"prepare": 1}

    def __init__(
        self,
        recipe: OnlineRecipe,
        roles: tuple[str, ...],
        *,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        total_updates: int,
        cores: tuple[int, ...] | None,
    ) -> None:
        """Args:
        roles: `actor`, `critic` or both.
        address, port: where the ranks meet; rank 0 listens there.
        total_updates: of the whole run, for the learning rate schedule.
        cores: core ids on CPU; None: GPU.
        """
        self._recipe, self._rank, self._world_size, self._cores = recipe, rank, world_size, cores
        self._weights = {reward.name: reward.weight for reward in recipe.rewards}
        self._prepared: dict[MicroBatchKey, _Prepared] = {}
        self._in_update: list[_Prepared] = []
        """Trained since the last optimizer step."""
        self._centre: float | None = None
        """`streaming_exact`: what this rank takes the advantages of an update relative to, the mean of its first micro-batch."""
        self._gradient_file: Path | None = None
        self._bucket_writer = BucketWriter()
        if cores is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        if not dist.is_initialized():
            backend = "gloo" if cores is not None else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size)
        self._tokenizer = load_tokenizer(recipe.model)
        self._engines = {role: self._engine(role, total_updates) for role in roles}

    def _engine(self, role: str, total_updates: int) -> TrainEngine:
        recipe, train = self._recipe, self._recipe.train
        section: sections.Model = recipe.model if role == "actor" else recipe.critic or recipe.model
        return TrainEngine(
            load_language_model(section) if role == "actor" else load_critic(recipe),
            train,
            learning_rate=train.learning_rate if role == "actor" else train.critic_learning_rate or train.learning_rate,
            total_updates=total_updates,
            dtype=section.dtype,
            accelerator="cuda" if self._cores is None else "cpu",
        )

    def ready(self) -> WorkerInfo:
        device = torch.cuda.get_device_name() if self._cores is None else "cpu " + ",".join(map(str, self._cores))
        return WorkerInfo(f"train {self._rank}", socket.gethostname(), os.getpid(), device)

    # ── a micro-batch ────────────────────────────────────────────────────────────────────────────

    @ray.method(concurrency_group="prepare")
    def prepare(self, key: MicroBatchKey, rollouts: Sequence[Any], scores: Sequence[Any]) -> PrepareReport:
        """Make this rank's share of a micro-batch ready; it is kept until its step is finished.

        Args:
            rollouts: `Rollout`s of the whole micro-batch, or references to them.
            scores: `PartialScores` of its score parts, or references to them.
        """
        start = time.time()
        algorithm = self._recipe.algorithm
        on_policy = self._recipe.pipeline.max_staleness == 0
        samples = merge_scores(fetch_rollouts(rollouts), fetch(scores))[self._rank :: self._world_size]
        batch = make_train_batch(samples, self._weights, algorithm, on_policy) if samples else empty_batch()
        reports = [sample_report(sample, self._weights, algorithm, on_policy) for sample in samples]
        found: Moments | None = None
        if self._recipe.uses_critic and algorithm.normalize == "update":
            assert batch.values is not None, "whitening over the update needs the values of a snapshot"
            advantages, _ = gae(batch.token_rewards, batch.values, batch.response_mask, algorithm.gamma, algorithm.lam)
            found = moments(advantages, batch.loss_mask)
        self._prepared[key] = _Prepared(samples, reports, batch, {})
        return PrepareReport(key, tuple(reports), found, Span(start, time.time()))

    def forward_backward(self, key: MicroBatchKey, shared: UpdateContext, last: bool) -> TrainReport:
        """Add the micro-batch's gradient to the update's. `last`: no other micro-batch of this update follows."""
        start = time.time()
        prepared = self._prepared[key]
        metrics: Metrics = {}
        batch = _to(prepared.batch, next(iter(self._engines.values())).device)
        advantages = self._given_advantages(prepared, shared, batch.response_mask)
        if self._recipe.uses_critic:
            advantages = self._critic_pass(batch, last, metrics)
        assert advantages is not None
        if shared.whiten is not None:
            advantages = whiten(advantages, batch.response_mask, *shared.whiten)
        if "actor" in self._engines:
            self._actor_pass(batch, advantages, last, metrics)
        prepared.advantages = _means(prepared.samples, advantages, batch.loss_mask)
        self._in_update.append(prepared)
        streaming = self._recipe.algorithm.normalize == "streaming_exact"
        found = moments(advantages, batch.loss_mask) if streaming else None
        # A rank without samples has nothing to report.
        return TrainReport(metrics if prepared.samples else {}, Span(start, time.time()), found)

    def _given_advantages(self, prepared: _Prepared, shared: UpdateContext, mask: Tensor) -> Tensor | None:
        """Group estimators: the sample's advantage on each of its tokens [B, S]."""
        if self._recipe.uses_critic:
            return None
        assert shared.outcome_advantages is not None
        outcomes = [shared.outcome_advantages[sample.rollout.id] for sample in prepared.samples] or [0.0]
        return torch.tensor(outcomes, device=mask.device)[:, None] * mask

    def _critic_pass(self, batch: TrainBatch, last: bool, metrics: Metrics) -> Tensor:
        """Advantages [B, S] by GAE; trains the critic if it lives here."""
        algorithm = self._recipe.algorithm
        values, engine = None, self._engines.get("critic")
        if engine is not None:
            values = engine.forward(response_values, batch.input_ids, batch.attention_mask, batch.prompt_lengths, batch.response_mask)
        old_values = batch.values if batch.values is not None or values is None else values.detach()
        assert old_values is not None, "an actor without its critic needs the values of a snapshot"
        advantages, returns = gae(batch.token_rewards, old_values, batch.response_mask, algorithm.gamma, algorithm.lam)
        if engine is not None and values is not None:
            loss, found = value_loss(values, old_values, returns, batch.loss_mask, algorithm.value_clip)
            engine.backward(algorithm.value_coef * loss, last=last)
            metrics.update(found)
        return advantages

    def _actor_pass(self, batch: TrainBatch, advantages: Tensor, last: bool, metrics: Metrics) -> None:
        """The policy gradient of a micro-batch."""
        algorithm, engine = self._recipe.algorithm, self._engines["actor"]
        arguments = (batch.input_ids, batch.attention_mask, batch.prompt_lengths, batch.response_mask, self._recipe.rollout.temperature)
        settings = {"entropy_grad": algorithm.entropy_coef > 0}
        if algorithm.normalize != "streaming_exact":
            logprobs, entropy = engine.forward(response_logprobs, *arguments, **settings)
            losses = actor_losses(logprobs, entropy, batch, advantages, algorithm, self._recipe.importance_cap)
            engine.backward(losses.policy + losses.other, last=last)
        else:
            if self._centre is None and batch.loss_mask.any():
                self._centre = advantages[batch.loss_mask].mean().item()
            centre, cap = self._centre or 0.0, self._recipe.importance_cap
            logprobs, entropy = engine.forward_apart(response_logprobs, *arguments, **settings)
            losses = actor_losses(logprobs, entropy, batch, advantages - centre, algorithm, cap)
            ones = actor_losses(logprobs, entropy, batch, torch.ones_like(advantages), algorithm, cap)
            apart = {"advantages": losses.policy, "ones": ones.policy} | ({"other": losses.other} if losses.other.requires_grad else {})
            engine.backward_apart(apart)
            policy, of_ones = losses.metrics["loss/policy"], ones.metrics["loss/policy"]
            assert isinstance(policy, Mean) and isinstance(of_ones, Mean)
            # Of the advantages as they are: the loss is linear in them too, and ranks have centres of their own.
            losses.metrics["loss/policy"] = Mean(policy.total + centre * of_ones.total, policy.count)
            metrics["loss/policy_ones"] = of_ones
        metrics.update(losses.metrics)

    # ── an update, a step ────────────────────────────────────────────────────────────────────────

    def optim_step(self, denominators: Denominators) -> OptimReport:
        """One optimizer step of each model here. The actor's losses have one denominator, tokens or sequences by
        `loss_aggregation`; the critic's is tokens."""
        start = time.time()
        if denominators.whiten is not None:
            self._whiten_apart(*denominators.whiten)
        if self._gradient_file is not None:
            self._write_gradient(self._gradient_file, denominators)
        self._in_update.clear()
        steps: dict[str, StepReport] = {role: engine.step(self._count(denominators, role)) for role, engine in self._engines.items()}
        return OptimReport(steps, Span(start, time.time()))

    def _count(self, denominators: Denominators, role: str) -> int:
        by_tokens = role == "critic" or self._recipe.algorithm.loss_aggregation == "token_mean"
        return denominators.tokens if by_tokens else denominators.sequences

    def _whiten_apart(self, mean: float, std: float) -> None:
        """`streaming_exact`: the sums that were kept apart become the gradient of whitened advantages."""
        if "actor" in self._engines:
            self._engines["actor"].mix_apart(streaming_coefficients(mean - (self._centre or 0.0), std))
        self._centre = None
        for prepared in self._in_update:
            whitened = {sample: (advantage - mean) / std if std else 0.0 for sample, advantage in prepared.advantages.items()}
            prepared.advantages = whitened

    def record_gradient(self, folder: str | Path) -> None:
        """Write the gradient of the next update, before clipping, to ROLES.safetensors in a folder; names are ROLE.NAME."""
        self._gradient_file = Path(folder) / f"{'+'.join(self._engines)}.safetensors"

    def _write_gradient(self, file: Path, denominators: Denominators) -> None:
        gradients: dict[str, Tensor] = {}
        for role, engine in self._engines.items():
            gradients |= {f"{role}.{name}": gradient for name, gradient in engine.gradient(max(1, self._count(denominators, role)))}
        if self._rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(gradients, file)
        self._gradient_file = None

    def publish(self, version: int, role: str) -> Publication | None:
        """The weights of `actor` or `critic` as of `version`; every rank calls it, rank 0 returns them."""
        verify = self._recipe.pipeline.verify_sync
        return publish(self._engines[role].named_weights(), version, role, verify=verify, keep=self._rank == 0, writer=self._bucket_writer)

    def finish_step(self, step: int) -> list[SampleRow]:
        """Forget a step's micro-batches; returns the rows of this rank's samples, in prompt order."""
        keys = [key for key in self._prepared if key.step == step]
        rows = [row for key in keys for row in _rows(self._prepared.pop(key))]
        return sorted(rows, key=lambda row: row.id)

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def save_checkpoint(self, folder: str | Path) -> None:
        """Every rank calls it; each model goes to a folder of its own."""
        for role, engine in self._engines.items():
            engine.save(Path(folder) / role)

    def load_checkpoint(self, folder: str | Path) -> None:
        for role, engine in self._engines.items():
            engine.load(Path(folder) / role)

    def save_model(self, folder: str | Path, critic_folder: str | Path | None = None) -> None:
        """The actor as a Hugging Face folder, and the critic too if it has one to go to."""
        for role, place in {"actor": folder, "critic": critic_folder}.items():
            if role in self._engines and place is not None:
                self._engines[role].save_pretrained(Path(place), self._tokenizer)


def _to(batch: TrainBatch, device: torch.device) -> TrainBatch:
    moved = {f.name: value.to(device) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)}
    return replace(batch, **moved)


def _means(samples: Sequence[Scored], advantages: Tensor, mask: Tensor) -> dict[SampleId, float]:
    """Mean advantage over the tokens in the loss, of samples that have any."""
    counts = mask.sum(1)
    means = (advantages.masked_fill(~mask, 0).sum(1) / counts.clamp(min=1)).tolist()
    return {s.rollout.id: mean for s, mean, count in zip(samples, means, counts.tolist(), strict=False) if count}


def _rows(prepared: _Prepared) -> list[SampleRow]:
    return [
        SampleRow(
            id=report.id,
            prompt=sample.rollout.prompt.text,
            response=sample.rollout.text,
            rewards=report.rewards,
            score=report.score,
            advantage=prepared.advantages.get(report.id),
            version=report.oldest_version,
            finish_reason=sample.rollout.finish_reason,
            prompt_length=len(sample.rollout.prompt.token_ids),
            response_length=len(sample.rollout.response_ids),
        )
        for sample, report in zip(prepared.samples, prepared.reports, strict=True)
    ]
