"""The training of a round: a run of an offline method, in a folder of its own, on the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conveyor.config import LoopRecipe, OfflineRecipe, parse_recipe
from conveyor.config.loops import RejectionSamplingRecipe
from conveyor.config.offline import REFERENCE_FREE
from conveyor.data.tokenizer import load_tokenizer
from conveyor.loops.samples_file import read_lines
from conveyor.loops.selection import as_completions, as_pairs
from conveyor.offline.dpo import DpoTask
from conveyor.offline.fit import MetricsRow
from conveyor.offline.run import run_task
from conveyor.offline.sft import SupervisedTask
from conveyor.offline.task import Task
from conveyor.run_folder import RunFolder


def fit_round(recipe: LoopRecipe, files: Sequence[Path], start: str, sampler: str, folder: Path) -> MetricsRow:
    """Train a model on what rounds have selected; it is in `folder`/model. Goes on where an earlier try has stopped.

    Args:
        files: selected.jsonl of each round that is learnt from.
        start: the policy that training starts from; `sampler`: the one that sampled the newest round.
    """
    inner = offline_recipe(recipe, files[-1], start, sampler, folder)
    return run_task(inner, _task(inner, files), None, load_tokenizer(recipe.model))


def offline_recipe(recipe: LoopRecipe, data: Path, start: str, sampler: str, folder: Path) -> OfflineRecipe:
    """The recipe of a round's training."""
    raw = recipe.model_dump(mode="json", exclude_none=True)
    kept: dict[str, Any] = {key: raw[key] for key in ("seed", "data", "train", "checkpoint", "ray", "telemetry", "lora") if key in raw}
    tokenizer = recipe.model.tokenizer or recipe.model.path
    models = {path: {**raw["model"], "path": path, "tokenizer": tokenizer} for path in (recipe.model.path, start, sampler)}
    kept["data"] |= {"path": str(data), "eval_path": None, "max_length": recipe.longest_sample, "drop_last": False}
    kept["checkpoint"] |= {"resume": RunFolder(folder).newest_checkpoint() is not None}
    kept |= {"output_dir": str(folder), "overwrite": True, "model": models[start]}
    kept["ray"] |= {"placement": {group: strategy for group, strategy in recipe.ray.placement.items() if group == "train"}}
    if recipe.devices is not None and "train" in recipe.devices:
        kept["devices"] = {"train": recipe.devices["train"]}
    if isinstance(recipe, RejectionSamplingRecipe):
        kept["method"] = "sft"
    else:
        reference = sampler if recipe.reference_is_sampler else recipe.model.path
        kept |= {"method": "dpo", "dpo": raw["dpo"]}
        if raw["dpo"].get("loss") not in REFERENCE_FREE:
            kept |= {"reference": models[reference], "reference_cache": str(folder.parent.parent / "reference_logprobs")}
    made = parse_recipe(kept, source=recipe.method)
    assert isinstance(made, OfflineRecipe)
    return made


def _task(inner: OfflineRecipe, files: Sequence[Path]) -> Task:
    items: list[Any] = []
    make: Any = as_completions if inner.method == "sft" else as_pairs
    for file in files:
        items += make(read_lines(file), file)
    return SupervisedTask.of(inner, items) if inner.method == "sft" else DpoTask(inner, items)
