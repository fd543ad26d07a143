"""The fit loop: one for every method that learns from a fixed dataset, on any number of ranks.

An update takes the next `train_batch_size` items of the order and cuts them into micro-batches, which the ranks share: each takes about
as many tokens as the others. Every rank knows the whole order, so the update's denominator needs no communication, and a rank left
without an item of a micro-batch runs another one with loss 0, as every rank must make the same calls. Neighbouring ranks that share
rows of tokens (`train.sequence_parallel_size`) take the same items.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Metrics, merge
from conveyor.config import OfflineRecipe, UserError, sections
from conveyor.config.offline import ReferencedRecipe
from conveyor.data.balance import micro_batches
from conveyor.data.order import EpochOrder
from conveyor.models.adapters import add_adapter
from conveyor.models.answering import WithoutAdapter
from conveyor.models.collectives import limit_collectives
from conveyor.models.routing import routing_of, watch
from conveyor.models.sample_logprobs import sample_logprobs
from conveyor.models.sequence_parallel import parallelize
from conveyor.models.train_engine import TrainEngine
from conveyor.models.zero import loading
from conveyor.offline.reference import Accelerator, reference_logprobs, shared_out
from conveyor.offline.task import State, Task
from conveyor.run_folder import RunFolder
from conveyor.workers.reports import StepReport

MetricsRow = dict[str, float | int]
"""A line of metrics.jsonl."""


def epoch_order(recipe: OfflineRecipe, size: int) -> EpochOrder:
    """The updates of a run over `size` items."""
    train = recipe.train
    return EpochOrder(size, train.train_batch_size or train.micro_batch_size, epochs=train.epochs, steps=train.steps,
                      shuffle=recipe.data.shuffle, seed=recipe.seed, drop_last=recipe.data.drop_last)  # fmt: skip


def fit(
    recipe: OfflineRecipe, task: Task, held_out: Task | None, tokenizer: PreTrainedTokenizerBase, start: int = 0
) -> Iterator[MetricsRow]:
    """Train on this rank from update `start` on; yields a metrics row after each update, the same on every rank.

    Writes checkpoints/step_N and, at the end, model/ into the run's folder (rank 0; with ZeRO every rank its part). `torch.distributed`
    is initialised.
    """
    folder = RunFolder(recipe.output_dir)
    order = epoch_order(recipe, len(task.items))
    updates = [order.items(step) for step in range(len(order))]
    accelerator: Accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    of_held_out = [range(len(held_out.items))] if held_out else []
    own = recipe.lora is not None and task.reference_model == recipe.model
    """The reference is the model with its adapter switched off."""
    if not own:
        task = _informed(task, updates, folder, accelerator)
        held_out = held_out and _informed(held_out, of_held_out, folder, accelerator)
    torch.manual_seed(recipe.seed)
    with loading(recipe.train, recipe.model.dtype, accelerator):
        model = task.load_model()
    parallelize(model, recipe.train.sequence_parallel_size)
    watch(model, recipe.train)
    if recipe.lora is not None:
        add_adapter(model, recipe.lora, recipe.seed)
    engine = TrainEngine(model, recipe.train, learning_rate=recipe.train.learning_rate, total_updates=len(order),
                         dtype=recipe.model.dtype, accelerator=accelerator)  # fmt: skip
    limit_collectives(recipe.ray.timeout)
    if own:
        task = _informed(task, updates, folder, accelerator, engine)
        held_out = held_out and _informed(held_out, of_held_out, folder, accelerator, engine)
    trainer = Trainer(engine, recipe.train)
    if start:
        trainer.load(folder.checkpoints / f"step_{start}")
    for step in range(start, len(order)):
        row = {"step": step + 1, "epoch": order.epoch(step), **trainer.update(task, updates[step])}
        if held_out is not None and (order.ends_epoch(step) or step + 1 == len(order)):
            row |= {f"eval/{name}": value for name, value in trainer.evaluate(held_out).items()}
        yield row
        if recipe.checkpoint.every and (step + 1) % recipe.checkpoint.every == 0:
            _save_checkpoint(trainer, folder, step + 1, recipe.checkpoint.keep)
    engine.save_pretrained(folder.model, tokenizer, task.model_files())
    if recipe.lora is not None:
        engine.save_adapter(folder.adapter, recipe.lora, recipe.model.path)


def _informed(
    task: Task, updates: Sequence[Sequence[int]], folder: RunFolder, accelerator: Accelerator, engine: TrainEngine | None = None
) -> Task:
    """The task that knows what its reference says. `engine`: of the model with an adapter that is asked, without it."""
    recipe, model = task.recipe, task.reference_model
    if model is None:
        return task
    assert isinstance(recipe, ReferencedRecipe)
    batch = max(1, 2 * recipe.train.micro_batch_size // dist.get_world_size())
    where = Path(recipe.reference_cache or folder.reference_logprobs)
    compute = None if engine is None else partial(WithoutAdapter(engine).forward, sample_logprobs)
    quantization = recipe.lora.quantization if recipe.lora is not None and engine is not None else None
    values = reference_logprobs(model, task.referenced(updates), where, batch, accelerator, recipe.train, compute, quantization)
    return task.informed(values, updates)


class Trainer:
    """An engine that makes updates of a task's items on this rank."""

    def __init__(self, engine: TrainEngine, train: sections.Train) -> None:
        self.engine, self.train = engine, train
        of_row = train.sequence_parallel_size
        self.place, self.places = dist.get_rank() // of_row, dist.get_world_size() // of_row
        """Among those that have items of their own."""
        self.speaks = dist.get_rank() % of_row == 0
        """Adds to what is measured: one rank of those that share items."""
        self.state: State = {}

    def update(self, task: Task, numbers: Sequence[int]) -> MetricsRow:
        """One optimizer step over the items of these numbers."""
        began = time.perf_counter()
        context, self.state = self._context(task, numbers)
        metrics: list[Metrics] = []
        shares = self._shares(task, numbers)
        for place, mine in enumerate(shares, start=1):
            loss, measured = self._loss(task, mine or numbers[:1], context)
            self.engine.backward(loss if mine else loss * 0.0, last=place == len(shares))
            metrics += [measured] if mine else []
        report = self.engine.step(task.denominator(numbers))
        merged = self._over_ranks(metrics)
        seconds = time.perf_counter() - began
        tokens = sum(task.tokens(number) for number in numbers)
        return {**_values(merged), **_values_of(report), "samples": len(numbers), "tokens": tokens,
                "tokens_per_second": tokens / seconds, "time/step": seconds}  # fmt: skip

    @torch.no_grad()
    def evaluate(self, task: Task) -> MetricsRow:
        """The task's metrics over all of its items."""
        metrics: list[Metrics] = []
        numbers = range(len(task.items))
        context, _ = self._context(task, numbers)
        for mine in self._shares(task, numbers):
            measured = self._loss(task, mine or numbers[:1], context)[1]
            metrics += [measured] if mine else []
        return _values(self._over_ranks(metrics))

    def save(self, folder: Path) -> None:
        self.engine.save(folder)
        if dist.get_rank() == 0:
            (folder / "task.json").write_text(json.dumps(self.state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        try:
            self.state = {str(name): float(value) for name, value in json.loads((folder / "task.json").read_text(encoding="utf-8")).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            raise UserError(f"checkpoint.resume: {folder / 'task.json'} cannot be read; resume from another checkpoint") from None
        self.engine.load(folder)

    @torch.no_grad()
    def _context(self, task: Task, numbers: Sequence[int]) -> tuple[Any, State]:
        """What the loss needs of the whole update: a pass without gradient over the samples that the task asks for."""
        samples = task.surveyed(numbers)
        batch = max(1, self.train.micro_batch_size // self.places)
        compute = partial(self.engine.forward, sample_logprobs)
        logprobs = shared_out(compute, samples, batch, self.train.sequence_parallel_size) if samples else torch.zeros(0)
        return task.context(numbers, logprobs, self.state)

    def _loss(self, task: Task, numbers: Sequence[int], context: Any) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = task.loss(self.engine.forward(task.outputs, numbers), numbers, context)
        routing = routing_of(self.engine.model)
        if routing is None:
            return loss, metrics
        balance, measured = routing.balance(task.sample_weights(numbers, routing.samples))
        return loss if balance is None else loss + balance, metrics | measured

    def _shares(self, task: Task, numbers: Sequence[int]) -> list[Sequence[int]]:
        """This rank's items of each micro-batch; of about one length, so that little is padded where there is padding."""
        by_length = sorted(numbers, key=task.tokens, reverse=True)
        size = len(by_length) if self.train.max_tokens_per_micro_batch else self.train.micro_batch_size
        shares: list[Sequence[int]] = []
        for first in range(0, len(by_length), size):
            batch = by_length[first : first + size]
            cut = micro_batches([task.tokens(number) for number in batch], self.places, self.train.row_tokens)
            shares += [[batch[item] for item in of_ranks[self.place]] for of_ranks in cut]
        return shares

    def _over_ranks(self, metrics: list[Metrics]) -> Metrics:
        mine: Metrics = merge(metrics) if self.speaks else {}
        parts = [mine]
        if dist.get_world_size() > 1:
            parts = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(parts, mine)
        return merge(parts)


def _values(metrics: Metrics) -> MetricsRow:
    return {name: metric.value for name, metric in metrics.items()}


def _values_of(report: StepReport) -> MetricsRow:
    return {"lr": report.lr, "grad_norm": report.grad_norm}


def _save_checkpoint(trainer: Trainer, folder: RunFolder, step: int, keep: int) -> None:
    trainer.save(folder.begin_checkpoint(step))
    dist.barrier()
    if dist.get_rank() == 0:
        folder.commit_checkpoint(step, keep)
    dist.barrier()
