"""Methods in rounds: sample ─▶ select ─▶ fit, again and again. Everything of a run, on one screen.

    policy r ─▶ samples.jsonl ─▶ selected.jsonl ─▶ train/ ─▶ policy r + 1
                pipeline/sampling   selection.py     offline/

Every arrow is a file of rounds/round_N/ that is complete or absent, so a run goes on at the arrow where it stopped.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from conveyor.checks import check_sampling
from conveyor.config import LoopRecipe, UserError
from conveyor.data.prompts import PromptOrder, load_prompts
from conveyor.data.tokenizer import load_tokenizer
from conveyor.loops.engines import LoopEngines, as_sampling, engines_stay
from conveyor.loops.fitting import fit_round, offline_recipe
from conveyor.loops.round_metrics import round_metrics, samples_metrics
from conveyor.loops.samples_file import SamplesFile, read_lines
from conveyor.loops.selection import selected_rows
from conveyor.offline.run import check_devices
from conveyor.report.progress import MetricsLog, RunProgress, read_metrics
from conveyor.run_folder import RunFolder, complete_or_absent, write_lines
from conveyor.types import Prompt
from conveyor.workers.cluster import available, connect
from conveyor.workers.cluster import check_devices as check_asked

HELD_OUT_INDEX = 2**40
"""Held-out prompts' indices begin here, beyond those of any round."""


@dataclass(frozen=True, slots=True)
class RoundFolder:
    """Files of one round."""

    path: Path

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def held_out(self) -> Path:
        """Samples of the held-out prompts, by the policy that the round has trained; of round_0 by the first one."""
        return self.path / "held_out_samples.jsonl"

    @property
    def selected(self) -> Path:
        return self.path / "selected.jsonl"

    @property
    def train(self) -> Path:
        return self.path / "train"

    @property
    def model(self) -> Path:
        return self.train / "model"


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
    if recipe.devices is not None and engines_stay(recipe):
        check_asked(recipe.devices, available(recipe.ray))
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
    """
    order, held_out = check_loop(recipe)
    folder = RunFolder.open(recipe)
    with ExitStack() as stack:
        if connect(recipe.ray, recipe.telemetry):
            stack.callback(ray.shutdown)
        sampling = stack.enter_context(LoopEngines(recipe, engines))
        loop = _Loop(recipe, folder, sampling, held_out)
        done = max((row["step"] for row in read_metrics(folder.metrics)), default=0) if folder.metrics.exists() else 0
        folder.rewind(done)
        metrics = stack.enter_context(MetricsLog(folder.metrics))
        progress = stack.enter_context(RunProgress(recipe.method, total=len(order), done=done))
        if not done and held_out:
            metrics.append({"step": 0, **loop.evaluate(0)})
        for number in range(done, len(order)):
            row = loop.round(number, order[number])
            metrics.append(row)
            progress.step(row)
    if not folder.model.exists():
        _publish(loop.folder(len(order) - 1), folder)
    return read_metrics(folder.metrics)[-1]


@dataclass(frozen=True, slots=True)
class _Loop:
    recipe: LoopRecipe
    run: RunFolder
    engines: LoopEngines
    held_out: Sequence[Prompt]

    def folder(self, number: int) -> RoundFolder:
        return RoundFolder(self.run.rounds / f"round_{number + 1}")

    def policy(self, number: int) -> str:
        """The one that samples in round `number` (from 0)."""
        return str(self.folder(number - 1).model) if number else self.recipe.model.path

    def round(self, number: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """One round; returns its metrics."""
        folder, sampler = self.folder(number), self.policy(number)
        sampled = self._sample(folder.samples, sampler, prompts)
        if not folder.selected.exists():
            write_lines(folder.selected, selected_rows(self.recipe, number, read_lines(folder.samples)))
        files = [self.folder(earlier).selected for earlier in range(number + 1)] if self.recipe.accumulates else [folder.selected]
        files = [file for file in files if file.stat().st_size]
        if not files:
            raise UserError(f"{folder.selected}: nothing was selected from the round's samples, so there is nothing to learn")
        self.engines.rest()
        start = sampler if self.recipe.rounds.start_from == "previous" else self.recipe.model.path
        began = time.perf_counter()
        if not folder.model.exists():
            fit_round(self.recipe, files, start, sampler, folder.train)
        trained = time.perf_counter() - began
        row = round_metrics(self.recipe, number, folder.samples, files, folder.train)
        if self.held_out:
            row |= self.evaluate(number + 1)
        return row | {"time/sample": sampled, "time/train": trained}

    def evaluate(self, rounds: int) -> dict[str, Any]:
        """Held-out metrics of the policy after so many rounds."""
        file = self.folder(rounds - 1).held_out
        self._sample(file, self.policy(rounds), self.held_out)
        return {f"eval/{name}": value for name, value in samples_metrics(self.recipe, file).items()}

    def _sample(self, file: Path, policy: str, prompts: Sequence[Prompt]) -> float:
        """Sample what the file has not yet; returns the seconds that took."""
        began = time.perf_counter()
        if not file.exists():
            samples = SamplesFile(file)
            done = samples.done()
            with samples:
                self.engines.sample(policy, [prompt for prompt in prompts if prompt.index not in done], samples.append)
            samples.complete()
        return time.perf_counter() - began


def _publish(last: RoundFolder, run: RunFolder) -> None:
    """The last round's model as the run's; on one file system its weights are not stored twice."""
    for name, target in (("model", run.model), ("adapter", run.adapter)):
        if (last.train / name).exists():
            with complete_or_absent(target) as aside:
                shutil.copytree(last.train / name, aside, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
