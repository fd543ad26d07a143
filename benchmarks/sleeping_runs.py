"""Runs of the real driver on sleepers, and the same runs on the simulator's clock."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks import sleepers
from benchmarks.sleepers import Sleeps
from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.data.prompts import PromptOrder
from conveyor.pipeline.executor import Executor
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.run_plan import RunPlan, run_plan
from conveyor.pipeline.scheduler import Scheduler
from conveyor.plan.costs import Linear, TaskCosts, TrainerCosts
from conveyor.plan.engines import FixedDurations
from conveyor.plan.lengths import Workload
from conveyor.plan.simulate import simulate
from conveyor.report.events import read_events
from conveyor.report.timeline import step_windows
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt, SampleId
from conveyor.workers import cluster
from conveyor.workers.start import Workers

ENGINES, SCORERS, RANKS = 8, 4, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """How a step is cut."""

    steps: int
    groups: int
    """Of a step."""
    group_size: int = 4
    micro_batch: int = 8
    slots: int = 8
    """Samples in an engine at a time."""

    @property
    def micro_batches(self) -> int:
        return self.groups * self.group_size // self.micro_batch

    @property
    def waves(self) -> float:
        """How often all engines are filled in a step."""
        return self.groups * self.group_size / (ENGINES * self.slots)

    def lengths(self, mean: float, sigma: float, seed: int = 0) -> dict[SampleId, float]:
        """Seconds of every sample: lognormal with this mean; sigma 0: all equal."""
        count = self.steps * self.groups
        drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, size=(count, self.group_size))
        return {SampleId(group, k): float(drawn[group, k]) for group in range(count) for k in range(self.group_size)}


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of our own in this process, with the switches of a run."""
    os.environ.pop("RAY_ADDRESS", None)
    cluster.set_environment(telemetry=False)
    ray.init(
        address="local", num_cpus=8, num_gpus=0, include_dashboard=False, object_store_memory=2 * 2**30,
        log_to_driver=False, logging_level=logging.ERROR,
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def recipe_of(shape: Shape, folder: Path, staleness: int = 0) -> OnlineRecipe:
    raw: dict[str, Any] = {
        "method": "grpo",
        "output_dir": str(folder),
        "model": {"path": "none"},
        "data": {"path": "none"},
        "rewards": [{"name": "r", "model": "none"}],
        "rollout": {"n_samples_per_prompt": shape.group_size, "max_concurrent_requests": shape.slots},
        "algorithm": {"kl_coef": 0.0},
        "train": {"rollout_batch_size": shape.groups},
        "pipeline": {"micro_batch_size": shape.micro_batch, "max_staleness": staleness},
    }
    recipe = parse_recipe(raw)
    assert isinstance(recipe, OnlineRecipe)
    return recipe


def plan_of(recipe: OnlineRecipe, shape: Shape) -> RunPlan:
    return run_plan(recipe, [shape.groups] * shape.steps, {"rollout": ENGINES, "score": SCORERS, "train": RANKS})


def measured(workers: Workers, shape: Shape, sleeps: Sleeps, folder: Path, staleness: int = 0) -> dict[int, float]:
    """Run it; step (from 1) → seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sleepers.set_sleeps(workers, sleeps)
    recipe = recipe_of(shape, folder, staleness)
    order = PromptOrder([Prompt(i, i, tuple(range(32)), "prompt") for i in range(shape.steps * shape.groups)], shape.groups)
    files = RunFolder(folder)
    plan = plan_of(recipe, shape)
    recorder = Recorder(recipe, plan, files, lambda row: None)
    try:
        asyncio.run(Executor(Scheduler(plan), workers, order, recorder, files).run())
    finally:
        recorder.close()
    return {step: end - begin for step, (begin, end) in step_windows(read_events(files.events)).items()}


def ideal(shape: Shape, sleeps: Sleeps, folder: Path, staleness: int = 0) -> dict[int, float]:
    """What the simulator makes of the same times, with nothing between tasks."""
    recipe = recipe_of(shape, folder, staleness)
    workload = Workload.draw("1", shape.steps * shape.groups, shape.group_size)
    trainer = TrainerCosts(Linear(sleeps.train), update=sleeps.update, publish=sleeps.publish)
    costs = TaskCosts(FixedDurations(sleeps.rollout), {"r": Linear(sleeps.score)}, {"actor": trainer}, engine_install=sleeps.install)
    return simulate(plan_of(recipe, shape), costs, workload).step_seconds
