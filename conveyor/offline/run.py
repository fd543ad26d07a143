"""Run or check a recipe of a method that learns from a fixed dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from transformers import PreTrainedTokenizerBase

from conveyor.checks import read_model_config
from conveyor.config import OfflineRecipe, UserError
from conveyor.data.tokenizer import load_tokenizer
from conveyor.offline.fit import MetricsRow, epoch_order
from conveyor.offline.reward_model import RewardModelTask
from conveyor.offline.sft import SupervisedTask
from conveyor.report.progress import MetricsLog, RunProgress, read_metrics
from conveyor.run_folder import RunFolder

log = logging.getLogger(__name__)

TASKS: dict[str, type[SupervisedTask] | type[RewardModelTask]] = {"sft": SupervisedTask, "reward_model": RewardModelTask}


def check_offline(recipe: OfflineRecipe) -> dict[str, int]:
    """Validate settings, files and every row without loading a model; what the run would do, in numbers.

    Raises:
        UserError: see `run_offline`.
    """
    task, _, updates = _prepare(recipe)
    return {
        "samples": len(task.samples),
        "items": len(task.items),
        "eval_items": len(task.eval_items),
        "tokens": sum(len(sample.ids) for sample in task.samples),
        "updates": updates,
        "ranks": _ranks(recipe),
    }


def run_offline(recipe: OfflineRecipe) -> MetricsRow:
    """Train; returns the last metrics row. The trained model is in `output_dir`/model.

    Raises:
        UserError: bad settings, files, rows or devices; before any model is loaded or anything is written.
    """
    from conveyor.workers.fit import fit_here, fit_on
    from conveyor.workers.placement import Placement

    task, tokenizer, updates = _prepare(recipe)
    ranks = _ranks(recipe)
    with ExitStack() as stack:
        placement = stack.enter_context(Placement.create({"train": ranks}, recipe.ray, telemetry=recipe.telemetry)) if ranks > 1 else None
        folder = RunFolder.open(recipe)
        newest = folder.newest_checkpoint() if recipe.checkpoint.resume else None
        if recipe.checkpoint.resume and newest is None:
            log.warning("checkpoint.resume: %s has no checkpoint; starting from the beginning", folder.checkpoints)
        start = newest[0] if newest else 0
        rows = fit_on(placement, recipe, task, tokenizer, start) if placement else fit_here(recipe, task, tokenizer, start)
        return _record(recipe, folder, rows, updates, start)


def _prepare(recipe: OfflineRecipe) -> tuple[SupervisedTask | RewardModelTask, PreTrainedTokenizerBase, int]:
    """The data of a sound recipe, the tokenizer, and the number of updates."""
    RunFolder.check(recipe)
    _check_devices(recipe)
    tokenizer = load_tokenizer(recipe.model)
    config = read_model_config("model.path", recipe.model.path)
    task = TASKS[recipe.method].read(recipe, tokenizer)
    for sample in task.samples:
        if int(sample.ids.max()) >= config.vocab_size:
            raise UserError(f"model.tokenizer: {sample.place} has token {sample.ids.max()}, the model has {config.vocab_size} tokens")
    longest = max(task.samples, key=lambda sample: len(sample.ids))
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and len(longest.ids) > limit:
        raise UserError(f"data.max_length: {longest.place} has {len(longest.ids)} tokens, the model takes {limit}")
    return task, tokenizer, len(epoch_order(recipe, len(task.items)))


def _ranks(recipe: OfflineRecipe) -> int:
    """Named devices, else every GPU of this machine; on CPU one rank that computes on all cores."""
    if recipe.devices is not None:
        return max(1, int(recipe.devices["train"]))
    return max(1, torch.cuda.device_count())


def _check_devices(recipe: OfflineRecipe) -> None:
    if recipe.devices is not None and set(recipe.devices) != {"train"}:
        raise UserError(f"devices: {recipe.method} has one device group, train; not {', '.join(recipe.devices) or 'none'}")
    if recipe.devices is not None and recipe.devices["train"] > 1 and recipe.devices["train"] % 1:
        raise UserError(f"devices.train: {recipe.devices['train']:g}: must be a whole number, or less than 1")
    ranks, samples = _ranks(recipe), recipe.train.micro_batch_size
    if ranks > samples:
        raise UserError(f"train.micro_batch_size: {samples} samples over {ranks} ranks: some ranks would never have one; raise it")


def _record(recipe: OfflineRecipe, folder: RunFolder, rows: Iterator[MetricsRow], total: int, start: int) -> MetricsRow:
    """Write every row to metrics.jsonl as it comes, show it, and return the last."""
    if folder.metrics.exists():
        folder.rewind(start)
    row: MetricsRow = {}
    with MetricsLog(folder.metrics) as metrics, RunProgress(recipe.method, total=total, done=start) as progress:
        for row in rows:
            metrics.append(row)
            progress.step(row)
    return row or read_metrics(folder.metrics)[-1]
