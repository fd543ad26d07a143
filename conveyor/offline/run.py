"""Run or check a recipe of a method that learns from a fixed dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from conveyor.checks import check_offload, read_model_config
from conveyor.config import OfflineRecipe, UserError, sections
from conveyor.config.offline import ReferencedRecipe
from conveyor.data.samples import Sample
from conveyor.data.tokenizer import check_folder_or_hub_id, load_tokenizer
from conveyor.models.adapters import check_lora
from conveyor.models.rope import longest_positions
from conveyor.models.routing import check_routers
from conveyor.offline.dpo import DpoTask
from conveyor.offline.fit import MetricsRow, epoch_order
from conveyor.offline.reward_model import ProcessRewardModelTask, RewardModelTask
from conveyor.offline.sft import ConditionalTask, SupervisedTask
from conveyor.offline.task import Task
from conveyor.offline.unpaired import BcoTask, KtoTask
from conveyor.report.progress import MetricsLog, RunProgress, read_metrics
from conveyor.run_folder import RunFolder, check_writable

log = logging.getLogger(__name__)

TASKS: dict[str, type[Task]] = {
    "sft": SupervisedTask,
    "conditional_sft": ConditionalTask,
    "reward_model": RewardModelTask,
    "process_reward_model": ProcessRewardModelTask,
    "dpo": DpoTask,
    "kto": KtoTask,
    "bco": BcoTask,
}


def check_offline(recipe: OfflineRecipe) -> dict[str, int]:
    """Validate settings, files and every row without loading a model; what the run would do, in numbers.

    Raises:
        UserError: see `run_offline`.
    """
    task, held_out, _ = read_task(recipe)
    samples = [*task.samples, *(held_out.samples if held_out else ())]
    return {
        "samples": len(samples),
        "items": len(task.items),
        "eval_items": len(held_out.items) if held_out else 0,
        "tokens": sum(len(sample.ids) for sample in samples),
        "updates": len(epoch_order(recipe, len(task.items))),
        "ranks": _ranks(recipe),
    }


def run_offline(recipe: OfflineRecipe) -> MetricsRow:
    """Train; returns the last metrics row. The trained model is in `output_dir`/model.

    Raises:
        UserError: bad settings, files, rows or devices; before any model is loaded or anything is written.
    """
    return run_task(recipe, *read_task(recipe))


def read_task(recipe: OfflineRecipe) -> tuple[Task, Task | None, PreTrainedTokenizerBase]:
    """The data of a sound recipe, its held-out data, and the tokenizer.

    Raises:
        UserError: see `run_offline`.
    """
    RunFolder.check(recipe)
    check_devices(recipe)
    check_offload(recipe)
    if recipe.lora is not None:
        check_lora(read_model_config("model.path", recipe.model.path), recipe.lora)
    tokenizer = load_tokenizer(recipe.model)
    kind = TASKS[recipe.method]
    task = kind.read(recipe, tokenizer)
    held_out = kind.read(task.recipe, tokenizer, recipe.data.eval_path) if recipe.data.eval_path else None
    _check_samples("model.path", recipe.model, [*task.samples, *(held_out.samples if held_out else ())])
    check_routers(read_model_config("model.path", recipe.model.path), recipe.train)
    _check_losses(recipe, task, held_out)
    return task, held_out, tokenizer


def run_task(recipe: OfflineRecipe, task: Task, held_out: Task | None, tokenizer: PreTrainedTokenizerBase) -> MetricsRow:
    """`run_offline` with data that is there already."""
    from conveyor.workers.fit import fit_here, fit_on
    from conveyor.workers.placement import Placement

    ranks = _ranks(recipe)
    with ExitStack() as stack:
        placement = stack.enter_context(Placement.create({"train": ranks}, recipe.ray, telemetry=recipe.telemetry)) if ranks > 1 else None
        folder = RunFolder.open(recipe)
        newest = folder.newest_checkpoint() if recipe.checkpoint.resume else None
        if recipe.checkpoint.resume and newest is None:
            log.warning("checkpoint.resume: %s has no checkpoint; starting from the beginning", folder.checkpoints)
        start = newest[0] if newest else 0
        work = (recipe, task, held_out, tokenizer, start)
        rows = fit_on(placement, work) if placement else fit_here(work)
        return _record(recipe, folder, rows, len(epoch_order(recipe, len(task.items))), start)


def _check_losses(recipe: OfflineRecipe, task: Task, held_out: Task | None) -> None:
    """Every update has a loss, and its reference can be asked."""
    order = epoch_order(recipe, len(task.items))
    reason = task.broken([order.items(step) for step in range(len(order))])
    if reason is not None:
        raise UserError(f"train.train_batch_size: {reason}; choose another, or set data.drop_last")
    reason = held_out.broken([range(len(held_out.items))]) if held_out else None
    if reason is not None:
        raise UserError(f"data.eval_path: {reason}")
    reference = task.reference_model
    if isinstance(recipe, ReferencedRecipe) and reference is not None:
        if recipe.reference_cache is not None:
            check_writable(Path(recipe.reference_cache), recipe.reference_cache, "reference_cache")
        if recipe.reference is not None:
            check_folder_or_hub_id("reference.path", reference.path)
            _check_samples("reference.path", reference, [*task.samples, *(held_out.samples if held_out else ())])


def _check_samples(key: str, model: sections.Model, samples: Iterable[Sample]) -> None:
    """The model knows their tokens and takes their lengths."""
    config = read_model_config(key, model.path)
    tokens = "model.tokenizer" if key == "model.path" else key
    limit = longest_positions(config, model.rope_scaling)
    for sample in samples:
        if int(sample.ids.max()) >= config.vocab_size:
            raise UserError(f"{tokens}: {sample.place} has token {sample.ids.max()}, the model has {config.vocab_size} tokens")
        if limit is not None and len(sample.ids) > limit:
            raise UserError(f"data.max_length: {sample.place} has {len(sample.ids)} tokens, the model takes {limit}")


def _ranks(recipe: OfflineRecipe) -> int:
    """Named devices, else every GPU of this machine; on CPU one rank that computes on all cores."""
    if recipe.devices is not None:
        return max(1, int(recipe.devices["train"]))
    return max(1, torch.cuda.device_count())


def check_devices(recipe: OfflineRecipe) -> None:
    """The devices are those of a method without a pipeline."""
    if recipe.devices is not None and set(recipe.devices) != {"train"}:
        raise UserError(f"devices: {recipe.method} has one device group, train; not {', '.join(recipe.devices) or 'none'}")
    if recipe.devices is not None and recipe.devices["train"] > 1 and recipe.devices["train"] % 1:
        raise UserError(f"devices.train: {recipe.devices['train']:g}: must be a whole number, or less than 1")
    ranks, samples, of_row = _ranks(recipe), recipe.train.micro_batch_size, recipe.train.sequence_parallel_size
    if ranks % of_row:
        raise UserError(f"train.sequence_parallel_size: {of_row} does not divide the {ranks} ranks")
    if ranks // of_row > samples and recipe.train.max_tokens_per_micro_batch is None:
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
    return row or next(reversed(read_metrics(folder.metrics)), {"step": start})
