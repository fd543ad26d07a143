"""Methods in rounds: sample ─▶ select ─▶ fit, again and again.

Every step of a round (`rounds.py`) leaves a file that is complete or absent, so a run goes on at the step where it stopped.
"""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from conveyor.checks import check_sampling, read_model_config
from conveyor.config import LoopRecipe, RunError, UserError
from conveyor.data.prompts import PromptOrder, load_prompts
from conveyor.data.tokenizer import load_tokenizer
from conveyor.loops.ahead import run_ahead
from conveyor.loops.engines import LoopEngines, as_sampling, engines_stay
from conveyor.loops.fitting import offline_recipe
from conveyor.loops.rounds import Loop
from conveyor.models.adapters import check_lora
from conveyor.models.routing import check_routers
from conveyor.offline.run import check_devices
from conveyor.report.progress import MetricsLog, RunProgress, read_metrics
from conveyor.run_folder import RunFolder, complete_or_absent
from conveyor.types import Prompt
from conveyor.workers.cluster import available, connect
from conveyor.workers.cluster import check_devices as check_asked

HELD_OUT_INDEX = 2**40
"""Held-out prompts' indices begin here, beyond those of any round."""


def check_loop(recipe: LoopRecipe) -> tuple[PromptOrder, list[Prompt]]:
    """Checks folders, files, rows, rewards and devices; changes nothing. Returns the prompts in the order of the run, and the held-out
    ones.

    Raises:
        UserError: the first thing that is wrong.
    """
    RunFolder.check(recipe)
    sampling = as_sampling(recipe)
    prompts = check_sampling(sampling)
    inner = offline_recipe(recipe, Path(recipe.data.path), recipe.model.path, recipe.model.path, Path(recipe.output_dir) / "rounds")
    check_devices(inner)
    if inner.lora is not None:
        check_lora(read_model_config("model.path", recipe.model.path), inner.lora)
    check_routers(read_model_config("model.path", recipe.model.path), inner.train)
    if recipe.devices is not None and engines_stay(recipe):
        check_asked(recipe.devices, available(recipe.ray), placement=recipe.ray.placement)
    if recipe.rounds.max_staleness and not engines_stay(recipe):
        raise UserError(
            "rounds.max_staleness: engines that sample while the policy is trained need devices of their own; name groups rollout and train"
        )
    held_out: list[Prompt] = []
    if recipe.data.eval_path is not None:
        read = load_prompts(recipe.data, load_tokenizer(recipe.model), path=recipe.data.eval_path, key="data.eval_path")
        held_out = [replace(prompt, index=HELD_OUT_INDEX + prompt.index) for prompt in read]
    order = PromptOrder(prompts, recipe.rounds.prompts or len(prompts), steps=recipe.rounds.count, shuffle=recipe.data.shuffle,
                        seed=recipe.seed, drop_last=recipe.data.drop_last)  # fmt: skip
    return order, held_out


def run_loop(recipe: LoopRecipe, engines: list[Any] | None = None) -> dict[str, Any]:
    """Train by a recipe; returns the last round's metrics. The trained model is in `output_dir`/model.

    Args:
        engines: rollout engines that run already, with whatever weights; default: new ones.

    Raises:
        UserError: bad settings, data or devices; before any model is loaded.
        RunError: nothing was selected in any round.
    """
    order, held_out = check_loop(recipe)
    if RunFolder(recipe.output_dir).rounds.is_dir() and recipe.checkpoint.resume:
        _check_count(recipe)
    folder = RunFolder.open(recipe)
    with ExitStack() as stack:
        if connect(recipe.ray, recipe.telemetry):
            stack.callback(ray.shutdown)
        sampling = stack.enter_context(LoopEngines(recipe, engines))
        loop = Loop(recipe, folder, sampling, held_out)
        logged = _logged(folder)
        done = next(step for step in itertools.count() if step + 1 not in logged)
        folder.rewind(done)
        if done < len(order):
            loop.policy(done)  # must be there: model/ may be its last copy
            _remove_published(folder)
        metrics = stack.enter_context(MetricsLog(folder.metrics))
        progress = stack.enter_context(RunProgress(recipe.method, total=len(order), done=done))
        if not logged and held_out:
            metrics.append({"step": 0, **loop.evaluate(0)})

        def record(row: dict[str, Any]) -> None:
            metrics.append(row)
            progress.step(row)

        if recipe.rounds.max_staleness:
            run_ahead(loop, [order[number] for number in range(len(order))], done, record)
        else:
            for number in range(done, len(order)):
                record(loop.round(number, order[number]))
    if not folder.model.exists():
        _publish(loop, max(done, len(order)), folder)
    return read_metrics(folder.metrics)[-1]


def _check_count(recipe: LoopRecipe) -> None:
    """A run that has more rounds is another one."""
    done = max(_logged(RunFolder(recipe.output_dir)), default=0)
    if recipe.rounds.count < done:
        raise UserError(f"rounds.count: {recipe.rounds.count}, but {done} rounds are done in {recipe.output_dir}")


def _logged(run: RunFolder) -> set[int]:
    """Rounds that have their line of metrics; 0 is the evaluation before the first."""
    try:
        return {row["step"] for row in read_metrics(run.metrics)} if run.metrics.exists() else set()
    except (ValueError, KeyError) as error:
        raise UserError(f"checkpoint.resume: {run.metrics} is damaged: {error}") from None


def _remove_published(run: RunFolder) -> None:
    """The run had fewer rounds and goes on; its rounds keep their models. So model/ is that of all rounds, or absent."""
    for folder in (run.model, run.adapter):
        if folder.exists():
            shutil.rmtree(folder)


def _publish(loop: Loop, rounds: int, run: RunFolder) -> None:
    """The newest model of these rounds as the run's; on one file system its weights are not stored twice."""
    last = loop.trained(rounds)
    if last is None:
        raise RunError(f"{run.rounds}: nothing was selected in any round, so nothing was learnt")
    for name, target in (("adapter", run.adapter), ("model", run.model)):
        if (last.train / name).exists():
            with complete_or_absent(target) as aside:
                shutil.copytree(last.train / name, aside, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
