"""The train stage: one rank of a train group, with the actor, the critic, or both.

    rollouts, scores ──▶ prepare ──▶ TrainBatch ──▶ forward_backward ──▶ … ──▶ optim_step ──▶ publish
                           │ reports                 ▲ context            once an update, with
                           └──────▶ driver ──────────┘                    its denominators

Every rank of a group gets the same calls in the same order, and takes a share of each micro-batch: about as many tokens as the others,
in as many parts (`data/balance.py`). Neighbouring ranks that share rows of tokens (`train.sequence_parallel_size`) take the same.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import ray
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from conveyor.algorithms.advantages import moments, whiten
from conveyor.algorithms.expert_balance import sample_weights
from conveyor.algorithms.losses import value_loss
from conveyor.algorithms.metrics import Mean, Metrics, Moments, merge
from conveyor.algorithms.objective import ActorLosses, actor_losses, pair_losses, streaming_coefficients
from conveyor.config import OnlineRecipe, sections
from conveyor.data.tokenizer import load_tokenizer
from conveyor.models.adapters import add_adapter, merged
from conveyor.models.answering import WithoutAdapter
from conveyor.models.attention import packs
from conveyor.models.batch import merge_scores
from conveyor.models.collectives import limit_collectives
from conveyor.models.language_model import load_language_model, response_logprobs
from conveyor.models.routing import routing_of, watch
from conveyor.models.scalar_model import load_critic, response_values
from conveyor.models.sequence_parallel import parallelize
from conveyor.models.train_engine import TrainEngine
from conveyor.models.zero import loading
from conveyor.types import PartialScores, TrainBatch
from conveyor.workers.mixing import Mixing
from conveyor.workers.outgoing import Outgoing
from conveyor.workers.prepared import Part, Prepared, Share, by_token
from conveyor.workers.records import fetch, fetch_rollouts
from conveyor.workers.rendezvous import Membership, free_door
from conveyor.workers.reports import (
    Denominators,
    MicroBatchKey,
    OptimReport,
    PrepareReport,
    Publication,
    SampleRow,
    ScoreReport,
    Span,
    StepReport,
    StepSettings,
    TrainReport,
    UpdateContext,
    WorkerInfo,
)
from conveyor.workers.score import ScoreWorker
from conveyor.workers.sleeping import Sleeper
from conveyor.workers.weight_stream import Transport


class TrainWorker(Sleeper):
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
        self._recipe, self._rank, self._cores = recipe, rank, cores
        of_row = recipe.train.sequence_parallel_size
        self._place, self._places = rank // of_row, world_size // of_row
        """Among those that have samples of their own."""
        self._speaks = rank % of_row == 0
        """Tells the driver of its samples: one rank of those that share them."""
        self._prepared: dict[MicroBatchKey, Prepared] = {}
        self._in_update: list[Prepared] = []
        """Trained since the last optimizer step."""
        self._centre: float | None = None
        """`streaming_exact`: what this rank takes the advantages of an update relative to, the mean of its first micro-batch."""
        self._gradient_file: Path | None = None
        self._outgoing = Outgoing(rank, verify=recipe.pipeline.verify_sync)
        if cores is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        if not dist.is_initialized():
            backend = "gloo" if cores is not None else "cpu:gloo,cuda:nccl"
            wait = timedelta(seconds=recipe.ray.timeout)
            dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size, timeout=wait)
        self._tokenizer = load_tokenizer(recipe.model)
        self._engines = {role: self._engine(role, total_updates) for role in roles}
        limit_collectives(recipe.ray.timeout)
        mixes = recipe.ptx is not None and "actor" in roles
        self._mixing = Mixing(recipe, self._place, self._places) if mixes else None
        self._scorer = self._reference(rank, world_size, address, port) if recipe.trainer_answers and "actor" in roles else None
        self._warming = False
        """The update is one of those in which the critic is trained alone."""

    def _engine(self, role: str, total_updates: int) -> TrainEngine:
        recipe, train = self._recipe, self._recipe.train
        section: sections.Model = recipe.model if role == "actor" else recipe.critic or recipe.model
        if role == "actor":
            per_step = recipe.algorithm.update_epochs * (recipe.samples_per_step // recipe.samples_per_update)
            total_updates = max(1, total_updates - train.critic_warmup_steps * per_step)
        accelerator: Literal["cpu", "cuda"] = "cuda" if self._cores is None else "cpu"
        with loading(train, section.dtype, accelerator):
            model = load_language_model(section, recipe.lora) if role == "actor" else load_critic(recipe)
        parallelize(model, train.sequence_parallel_size)
        if role == "actor":
            watch(model, train, recipe.rollout.routing_replay)
        if recipe.lora is not None:
            add_adapter(model, recipe.lora, recipe.seed)
        return TrainEngine(
            model,
            train,
            learning_rate=train.learning_rate if role == "actor" else train.critic_learning_rate or train.learning_rate,
            total_updates=total_updates,
            dtype=section.dtype,
            accelerator=accelerator,
        )

    def _reference(self, rank: int, ranks: int, address: str, port: int) -> ScoreWorker:
        team = Membership(rank, ranks, address, port) if ranks > 1 else None
        scorer = ScoreWorker(self._recipe, ("reference",), cores=self._cores, team=team)
        scorer.hold("reference", WithoutAdapter(self._engines["actor"]))
        return scorer

    def score(self, roles: tuple[str, ...], rollouts: Sequence[Any]) -> tuple[ScoreReport, PartialScores | None]:
        """As `ScoreWorker.score`, where the reference is the actor without its adapter; every rank calls it, rank 0 knows the answer."""
        assert self._scorer is not None, "another worker scores"
        return self._scorer.score(roles, rollouts)

    def ready(self) -> WorkerInfo:
        device = torch.cuda.get_device_name() if self._cores is None else "cpu " + ",".join(map(str, self._cores))
        return WorkerInfo(f"train {self._rank}", socket.gethostname(), os.getpid(), device)

    def _memory(self) -> Any:
        """Weights, gradients and optimizers; micro-batches lie in host memory."""
        return self._engines

    # ── a micro-batch ────────────────────────────────────────────────────────────────────────────

    @ray.method(concurrency_group="prepare")
    def prepare(self, key: MicroBatchKey, rollouts: Sequence[Any], scores: Sequence[Any], settings: StepSettings) -> PrepareReport:
        """Make this rank's share of a micro-batch ready; it is kept until its step is finished.

        Args:
            rollouts: `Rollout`s of the whole micro-batch, or references to them.
            scores: `PartialScores` of its score parts, or references to them.
        """
        start = time.time()
        everything = merge_scores(fetch_rollouts(rollouts), fetch(scores))
        packed = all(packs(engine.model) for engine in self._engines.values())
        self._prepared[key] = prepared = Prepared.share_of(self._recipe, everything, settings, Share(self._place, self._places, packed))
        return PrepareReport(key, tuple(prepared.reports) if self._speaks else (), Span(start, time.time()))

    def forward_backward(self, key: MicroBatchKey, shared: UpdateContext, last: bool) -> TrainReport:
        """Add the micro-batch's gradient to the update's. `last`: no other micro-batch of this update follows."""
        start = time.time()
        prepared = self._prepared[key]
        self._warming = key.step < self._recipe.train.critic_warmup_steps
        if shared.scores is not None:
            prepared.rescore(shared.scores)
        metrics: list[Metrics] = []
        found: list[Moments] = []
        for place, part in enumerate(prepared.parts, start=1):
            measured, of_part = self._train_part(prepared, part, shared, last and place == len(prepared.parts))
            if part.samples and self._speaks:  # the others have nothing to report
                metrics.append(measured)
                found += [of_part] if of_part is not None else []
        self._in_update.append(prepared)
        return TrainReport(merge(metrics), Span(start, time.time()), sum(found, Moments(0, 0, 0)) if found else None)

    def _train_part(self, prepared: Prepared, part: Part, shared: UpdateContext, last: bool) -> tuple[Metrics, Moments | None]:
        """One forward and backward of each model; the moments of advantages are those that `streaming_exact` needs."""
        metrics: Metrics = {}
        batch = part.batch.to(next(iter(self._engines.values())).device)
        advantages = self._critic_pass(batch, last, metrics) if self._recipe.uses_critic else prepared.advantages_of(part, batch, shared)
        if shared.whiten is not None:
            advantages = whiten(advantages, batch.response_mask, *shared.whiten)
        if "actor" in self._engines and not self._warming:
            self._actor_pass(prepared, part, batch, advantages, last and self._mixing is None, metrics)
        prepared.note(part, advantages, batch.loss_mask)
        streaming = self._recipe.algorithm.normalize == "streaming_exact"
        return metrics, moments(advantages, batch.loss_mask) if streaming else None

    def _critic_pass(self, batch: TrainBatch, last: bool, metrics: Metrics) -> Tensor:
        """Advantages [B, S] by GAE; trains the critic if it lives here."""
        algorithm = self._recipe.algorithm
        values, engine = None, self._engines.get("critic")
        if engine is not None:
            values = engine.forward(response_values, batch.tokens, batch.prompt_lengths, batch.response_mask)
        old_values = batch.values if batch.values is not None or values is None else values.detach()
        advantages, returns = by_token(self._recipe.algorithm, batch, old_values)
        if engine is not None and values is not None:
            assert old_values is not None and returns is not None
            loss, found = value_loss(values, old_values, returns, batch.loss_mask, algorithm.value_clip)
            engine.backward(algorithm.value_coef * loss, last=last)
            metrics.update(found)
        return advantages

    def _actor_pass(
        self, prepared: Prepared, part: Part, batch: TrainBatch, advantages: Tensor, last: bool, metrics: Metrics
    ) -> None:  # fmt: skip
        """The policy gradient of a part. `advantages` of `best_worst` are the signs of pairs."""
        algorithm, engine = self._recipe.algorithm, self._engines["actor"]
        arguments = (batch.tokens, batch.prompt_lengths, batch.response_mask, self._recipe.rollout.temperature)
        settings = {"entropy_grad": algorithm.entropy_coef > 0}
        if algorithm.normalize == "streaming_exact":
            metrics.update(self._pass_apart(part, arguments, settings, batch, advantages, prepared.settings.kl_coef))
            return
        logprobs, entropy = engine.forward(response_logprobs, *arguments, **settings)
        signs = None
        if algorithm.policy_loss == "dpo":
            signs = torch.where(batch.response_mask, advantages, 0.0).sum(1).sign()
            losses = pair_losses(logprobs, entropy, batch, signs, part.groups.to(engine.device), algorithm)
        else:
            losses = actor_losses(logprobs, entropy, batch, advantages, algorithm, self._recipe.importance_cap, prepared.settings.kl_coef)
        engine.backward(losses.policy + self._other(losses, part, batch, signs), last=last)
        metrics.update(losses.metrics)

    def _pass_apart(self, part: Part, arguments: Any, settings: Any, batch: TrainBatch, advantages: Tensor, kl_coef: float) -> Metrics:
        """`streaming_exact`: the gradients of the parts of the loss are kept apart."""
        engine, algorithm, cap = self._engines["actor"], self._recipe.algorithm, self._recipe.importance_cap
        if self._centre is None and batch.loss_mask.any():
            self._centre = advantages[batch.loss_mask].mean().item()
        centre = self._centre or 0.0
        logprobs, entropy = engine.forward_apart(response_logprobs, *arguments, **settings)
        losses = actor_losses(logprobs, entropy, batch, advantages - centre, algorithm, cap, kl_coef)
        ones = actor_losses(logprobs, entropy, batch, torch.ones_like(advantages), algorithm, cap, kl_coef)
        other = self._other(losses, part, batch, None)
        apart = {"advantages": losses.policy, "ones": ones.policy} | ({"other": other} if other.requires_grad else {})
        engine.backward_apart(apart)
        policy, of_ones = losses.metrics["loss/policy"], ones.metrics["loss/policy"]
        assert isinstance(policy, Mean) and isinstance(of_ones, Mean)
        # Of the advantages as they are: the loss is linear in them too, and ranks have centres of their own.
        losses.metrics["loss/policy"] = Mean(policy.total + centre * of_ones.total, policy.count)
        return losses.metrics | {"loss/policy_ones": of_ones}

    def _other(self, losses: ActorLosses, part: Part, batch: TrainBatch, signs: Tensor | None) -> Tensor:
        """The losses beside the policy's, with that of the experts' balance; adds to the metrics. `signs`: of pairs."""
        recipe, routing = self._recipe, routing_of(self._engines["actor"].model)
        if routing is None:
            return losses.other
        weights = sample_weights(batch.loss_mask, recipe.algorithm.loss_aggregation, recipe.rollout.max_response_length, signs)
        balance, measured = routing.balance(weights if part.samples else torch.zeros_like(weights))
        losses.metrics.update(measured)
        return losses.other if balance is None else losses.other + balance

    # ── an update, a step ────────────────────────────────────────────────────────────────────────

    def optim_step(self, denominators: Denominators) -> OptimReport:
        """One optimizer step of each model here that is trained in this update. The denominator of the actor's losses goes by
        `loss_aggregation` (of dpo: pairs); the critic's is tokens."""
        start = time.time()
        engines = {role: engine for role, engine in self._engines.items() if role != "actor" or not self._warming}
        counts = {role: self._count(denominators, role) for role in engines}
        metrics: Metrics = {}
        if denominators.whiten is not None:
            self._whiten_apart(*denominators.whiten, actor="actor" in engines)
        if "actor" in engines and self._mixing is not None:
            # An update with nothing in the policy's loss still learns from the rows that are mixed in.
            counts["actor"] = max(1, counts["actor"])
            mixed = self._mixing.add(engines["actor"], counts["actor"])
            metrics = mixed if self._speaks else {}
        if self._gradient_file is not None and not self._warming:
            self._write_gradient(self._gradient_file, counts)
        self._in_update.clear()
        self._outgoing.changed()
        steps: dict[str, StepReport] = {role: engine.step(counts[role]) for role, engine in engines.items()}
        return OptimReport(steps, Span(start, time.time()), metrics)

    def _count(self, denominators: Denominators, role: str) -> int:
        recipe, aggregation = self._recipe, self._recipe.algorithm.loss_aggregation
        if role == "critic":
            return denominators.tokens
        if recipe.algorithm.policy_loss == "dpo":
            return denominators.pairs
        if not denominators.tokens:
            return 0
        constant = denominators.samples * recipe.rollout.max_response_length
        return {"token_mean": denominators.tokens, "sequence_mean": denominators.sequences, "constant": constant}[aggregation]

    def _whiten_apart(self, mean: float, std: float, actor: bool) -> None:
        """`streaming_exact`: the sums that were kept apart become the gradient of whitened advantages. `actor`: it is trained."""
        if actor:
            coefficients = streaming_coefficients(mean - (self._centre or 0.0), std)
            self._engines["actor"].mix_apart(coefficients, last=self._mixing is None)
        self._centre = None
        for prepared in self._in_update:
            whitened = {sample: (advantage - mean) / std if std else 0.0 for sample, advantage in prepared.advantages.items()}
            prepared.advantages = whitened

    def record_gradient(self, folder: str | Path) -> None:
        """Write the gradient of the next update, before clipping, to ROLES.safetensors in a folder; names are ROLE.NAME."""
        self._gradient_file = Path(folder) / f"{'+'.join(self._engines)}.safetensors"

    def _write_gradient(self, file: Path, counts: Mapping[str, int]) -> None:
        gradients: dict[str, Tensor] = {}
        for role, engine in self._engines.items():
            gradients |= {f"{role}.{name}": gradient for name, gradient in engine.gradient(max(1, counts[role]))}
        if self._rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(gradients, file)
        self._gradient_file = None

    def publish(self, version: int, role: str, stored: bool = True) -> Publication | None:
        """The weights of `actor` or `critic` as of `version`; every rank calls it, rank 0 returns them. Of a model with an adapter that is
        the adapter, and a critic's head, or everything merged (`lora.sync`). Not `stored`: they stay here until engines ask
        (`send_weights`), which is before the next `optim_step` or not at all."""
        return self._outgoing.publish(lambda: self._travelling(role), version, role, stored=stored)

    def _travelling(self, role: str, cpu: bool = True) -> Iterator[tuple[str, Tensor]]:
        engine, lora = self._engines[role], self._recipe.lora
        if lora is None:
            return engine.named_weights(cpu=cpu)
        if role == "critic" or self._recipe.adapter_travels:
            return engine.named_weights(trained=True, cpu=cpu)
        return merged(engine.model, engine.named_weights(cpu=cpu))

    def stream_door(self) -> tuple[str, int]:
        """(address, port) where an engine may meet this rank."""
        return free_door()

    def open_stream(self, transport: Transport, engine: int, address: str, port: int, size: int) -> None:
        """Meet the `size` − 1 processes of an engine, which this rank sends weights to from now on. Waits for them."""
        self._outgoing.open(transport, engine, address, port, size)

    def send_weights(self, version: int, engines: Sequence[int]) -> None:
        """The actor's weights to engines that install them meanwhile; every rank calls it."""
        self._outgoing.send(lambda: self._travelling("actor", cpu=self._cores is not None), version, "actor", engines)

    def finish_step(self, step: int) -> list[SampleRow]:
        """Forget a step's micro-batches; returns the rows of this rank's samples, in prompt order."""
        keys = [key for key in self._prepared if key.step == step]
        rows = [row for key in keys for row in self._prepared.pop(key).rows() if self._speaks]
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
        """The actor as a Hugging Face folder, adapter merged, with the adapter alone in adapter/ beside it; the critic too if it has a
        folder to go to."""
        for role, place in {"actor": folder, "critic": critic_folder}.items():
            if role in self._engines and place is not None:
                self._engines[role].save_pretrained(Path(place), self._tokenizer)
        if self._recipe.lora is not None and "actor" in self._engines:
            self._engines["actor"].save_adapter(Path(folder).with_name("adapter"), self._recipe.lora, self._recipe.model.path)
