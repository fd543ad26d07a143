"""The fit loop: one for every method that learns from a fixed dataset, on any number of ranks.

An update takes the next `train_batch_size` items of the order and cuts them into micro-batches, which the ranks share: rank r has
items r, r + ranks, … of each. Every rank knows the whole order, so the update's denominator needs no communication, and a
rank left without an item of a micro-batch runs one of the others' with loss 0, as every rank must make the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Metrics, merge
from conveyor.config import OfflineRecipe
from conveyor.data.order import EpochOrder
from conveyor.models.train_engine import TrainEngine
from conveyor.offline.task import Item, Task
from conveyor.run_folder import RunFolder
from conveyor.workers.reports import StepReport

MetricsRow = dict[str, float | int]
"""A line of metrics.jsonl."""


def epoch_order(recipe: OfflineRecipe, size: int) -> EpochOrder:
    """The updates of a run over `size` items."""
    train = recipe.train
    return EpochOrder(size, train.train_batch_size or train.micro_batch_size, epochs=train.epochs, steps=train.steps,
                      shuffle=recipe.data.shuffle, seed=recipe.seed, drop_last=recipe.data.drop_last)  # fmt: skip


def fit(recipe: OfflineRecipe, task: Task[Any], tokenizer: PreTrainedTokenizerBase, start: int = 0) -> Iterator[MetricsRow]:
    """Train on this rank from update `start` on; yields a metrics row after each update, the same on every rank.

    Writes checkpoints/step_N and, at the end, model/ into the run's folder (rank 0; with ZeRO every rank its part). `torch.distributed`
    is initialised.
    """
    folder = RunFolder(recipe.output_dir)
    order = epoch_order(recipe, len(task.items))
    accelerator: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe.seed)
    engine = TrainEngine(task.load_model(), recipe.train, learning_rate=recipe.train.learning_rate, total_updates=len(order),
                         dtype=recipe.model.dtype, accelerator=accelerator)  # fmt: skip
    if start:
        engine.load(folder.checkpoints / f"step_{start}")
    trainer = _Trainer(task, engine, recipe.train.micro_batch_size, dist.get_rank(), dist.get_world_size())
    for step in range(start, len(order)):
        row = {"step": step + 1, "epoch": order.epoch(step), **trainer.update([task.items[i] for i in order.items(step)])}
        if task.eval_items and (order.ends_epoch(step) or step + 1 == len(order)):
            row |= {f"eval/{name}": value for name, value in trainer.evaluate(task.eval_items).items()}
        yield row
        if recipe.checkpoint.every and (step + 1) % recipe.checkpoint.every == 0:
            _save_checkpoint(engine, folder, step + 1, recipe.checkpoint.keep)
    engine.save_pretrained(folder.model, tokenizer)


@dataclass(frozen=True)
class _Trainer(Generic[Item]):
    task: Task[Item]
    engine: TrainEngine
    micro_batch_size: int
    rank: int
    ranks: int

    def update(self, items: Sequence[Item]) -> MetricsRow:
        """One optimizer step over `items`."""
        began = time.perf_counter()
        metrics: list[Metrics] = []
        batches = list(self._micro_batches(items))
        for number, batch in enumerate(batches, start=1):
            mine = batch[self.rank :: self.ranks]
            loss, measured = self._loss(mine or batch[:1])
            self.engine.backward(loss if mine else loss * 0.0, last=number == len(batches))
            if mine:
                metrics.append(measured)
        report = self.engine.step(sum(self.task.denominator(item) for item in items))
        merged = self._over_ranks(metrics)
        seconds = time.perf_counter() - began
        tokens = sum(self.task.tokens(item) for item in items)
        return {**_values(merged), **_values_of(report), "samples": len(items), "tokens": tokens,
                "tokens_per_second": tokens / seconds, "time/step": seconds}  # fmt: skip

    @torch.no_grad()
    def evaluate(self, items: Sequence[Item]) -> MetricsRow:
        """The task's metrics over all of `items`."""
        metrics: list[Metrics] = []
        for batch in self._micro_batches(items):
            mine = batch[self.rank :: self.ranks]
            measured = self._loss(mine or batch[:1])[1]
            if mine:
                metrics.append(measured)
        return _values(self._over_ranks(metrics))

    def _loss(self, items: Sequence[Item]) -> tuple[torch.Tensor, Metrics]:
        return self.task.loss(self.engine.forward(self.task.outputs, items), items)

    def _micro_batches(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Items of about one length side by side, so that little is padded."""
        by_length = sorted(items, key=self.task.tokens, reverse=True)
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


def _save_checkpoint(engine: TrainEngine, folder: RunFolder, step: int, keep: int) -> None:
    engine.save(folder.begin_checkpoint(step))
    dist.barrier()
    if dist.get_rank() == 0:
        folder.commit_checkpoint(step, keep)
    dist.barrier()
