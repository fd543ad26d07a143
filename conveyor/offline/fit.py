"""The fit loop: one for every method that learns from a fixed dataset, on any number of ranks.

An update takes the next `train_batch_size` items of the order and cuts them into micro-batches, which the ranks share: rank r has
items r, r + ranks, … of each. Every rank knows the whole order, so the update's denominator needs no communication, and a
rank left without an item of a micro-batch runs one of the others' with loss 0, as every rank must make the same calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Metrics, merge
from conveyor.config import OfflineRecipe, UserError
from conveyor.config.offline import ReferencedRecipe
from conveyor.data.order import EpochOrder
from conveyor.models.adapters import add_adapter, write_adapter
from conveyor.models.sample_logprobs import sample_logprobs
from conveyor.models.train_engine import TrainEngine
from conveyor.offline.reference import reference_logprobs, shared_out
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
    accelerator: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    task = _informed(task, updates, folder, accelerator)
    held_out = held_out and _informed(held_out, [range(len(held_out.items))], folder, accelerator)
    torch.manual_seed(recipe.seed)
    model = task.load_model()
    if recipe.lora is not None:
        add_adapter(model, recipe.lora)
    engine = TrainEngine(model, recipe.train, learning_rate=recipe.train.learning_rate, total_updates=len(order),
                         dtype=recipe.model.dtype, accelerator=accelerator)  # fmt: skip
    trainer = Trainer(engine, recipe.train.micro_batch_size)
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
    if recipe.lora is not None and (weights := engine.all_weights()) is not None:
        write_adapter(model, recipe.lora, weights, recipe.model.path, folder.adapter)


def _informed(task: Task, updates: Sequence[Sequence[int]], folder: RunFolder, accelerator: str) -> Task:
    """The task that knows what its reference says."""
    recipe, model = task.recipe, task.reference_model
    if model is None:
        return task
    assert isinstance(recipe, ReferencedRecipe)
    batch = max(1, 2 * recipe.train.micro_batch_size // dist.get_world_size())
    where = Path(recipe.reference_cache or folder.reference_logprobs)
    values = reference_logprobs(model, task.referenced(updates), where, batch, torch.device(accelerator))
    return task.informed(values, updates)


class Trainer:
    """An engine that makes updates of a task's items on this rank."""

    def __init__(self, engine: TrainEngine, micro_batch_size: int) -> None:
        self.engine, self.micro_batch_size = engine, micro_batch_size
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.state: State = {}

    def update(self, task: Task, numbers: Sequence[int]) -> MetricsRow:
        """One optimizer step over the items of these numbers."""
        began = time.perf_counter()
        metrics: list[Metrics] = []
        context, self.state = self._context(task, numbers)
        batches = list(self._micro_batches(task, numbers))
        for place, batch in enumerate(batches, start=1):
            mine = batch[self.rank :: self.ranks]
            loss, measured = self._loss(task, mine or batch[:1], context)
            self.engine.backward(loss if mine else loss * 0.0, last=place == len(batches))
            if mine:
                metrics.append(measured)
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
        for batch in self._micro_batches(task, numbers):
            mine = batch[self.rank :: self.ranks]
            measured = self._loss(task, mine or batch[:1], context)[1]
            if mine:
                metrics.append(measured)
        return _values(self._over_ranks(metrics))

    def save(self, folder: Path) -> None:
        self.engine.save(folder)
        if self.rank == 0:
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
        batch = max(1, self.micro_batch_size // self.ranks)
        logprobs = shared_out(partial(self.engine.forward, sample_logprobs), samples, batch) if samples else torch.zeros(0)
        return task.context(numbers, logprobs, self.state)

    def _loss(self, task: Task, numbers: Sequence[int], context: Any) -> tuple[torch.Tensor, Metrics]:
        return task.loss(self.engine.forward(task.outputs, numbers), numbers, context)

    def _micro_batches(self, task: Task, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Items of about one length side by side, so that little is padded."""
        by_length = sorted(numbers, key=task.tokens, reverse=True)
        for first in range(0, len(by_length), self.micro_batch_size):
            yield by_length[first : first + self.micro_batch_size]

    def _over_ranks(self, metrics: list[Metrics]) -> Metrics:
        parts: list[Metrics] = [merge(metrics)]
        if self.ranks > 1:
            parts = [{} for _ in range(self.ranks)]
            dist.all_gather_object(parts, merge(metrics))
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
