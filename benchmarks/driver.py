"""What the driver itself costs: the scheduler alone, and the driver's process in a run of sleepers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from benchmarks import sleepers
from benchmarks.orchestration import RATIOS, sleeps_of
from benchmarks.results import Result, Say, median
from benchmarks.sleeping_runs import ENGINES, RANKS, SCORERS, Shape, local_ray, measured
from conveyor.pipeline.actions import Admit, Done, Event, SampleFinished
from conveyor.pipeline.run_plan import RunPlan
from conveyor.pipeline.scheduler import Scheduler
from conveyor.types import SampleId

STEPS, GROUPS, GROUP_SIZE, MICRO_BATCH = 4, 512, 8, 8
REPETITIONS = 5
RATE = 10
"""Micro-batches a second of the run whose driver is measured."""


def run(folder: Path, say: Say) -> list[Result]:
    return [_scheduler(say), _cpu(folder, say)]


def _scheduler(say: Say) -> Result:
    """Every action is answered at once, first come, first served; time is the process's CPU time."""
    rates: dict[str, list[float]] = {"staleness 0": [], "staleness 1": []}
    for _ in range(REPETITIONS):
        for staleness in (0, 1):
            plan = RunPlan(
                step_groups=(GROUPS,) * STEPS, samples_per_group=GROUP_SIZE, samples_per_update=GROUPS * GROUP_SIZE,
                micro_batch_size=MICRO_BATCH, engines=ENGINES, engine_slots=64, part_workers=(SCORERS,), waits_for_group=True,
                max_staleness=staleness,
            )  # fmt: skip
            rates[f"staleness {staleness}"].append(STEPS * GROUPS * GROUP_SIZE / MICRO_BATCH / _drive(plan))
    medians = {name: median(found) for name, found in rates.items()}
    say(", ".join(f"scheduler, {name}: {rate:,.0f} micro-batches/s" for name, rate in medians.items()))
    return Result("scheduler", "micro-batches/s through the scheduler", min(medians.values()), 2000, details={"rates": rates})


def _drive(plan: RunPlan) -> float:
    """CPU seconds of a whole run of the scheduler."""
    start = time.process_time()
    scheduler, events = Scheduler(plan), deque[Event]()
    while not scheduler.finished:
        for action in scheduler.actions():
            if isinstance(action, Admit):
                samples = (SampleId(action.group, k) for k in range(plan.samples_per_group))
                version = max(0, action.step - plan.max_staleness)
                events.extend(SampleFinished(action.engine, sample, version) for sample in samples)
            else:
                events.append(Done(action))
        scheduler.handle(events.popleft())
    return time.process_time() - start


def _cpu(folder: Path, say: Say) -> Result:
    """CPU time of this process, with all threads of Ray's in it, over the time of a run at `RATE` micro-batches/s."""
    shape = Shape(steps=3, groups=128)
    seconds = shape.micro_batches / RATE
    # Rollout is the slow stage, so a step takes its time and little more.
    sleeps = sleeps_of(RATIOS["60:15:25"], 0.5, shape, seconds / RATIOS["60:15:25"][0] * 0.9)
    shares, rates = [], []
    with local_ray():
        bare = _bare_ray()
        say(", ".join(f"bare Ray: {name} {seconds * 1000:.2f} ms of the driver's CPU" for name, seconds in bare.items()))
        workers = sleepers.start(ENGINES, SCORERS, RANKS)
        small = Shape(1, 8)
        measured(workers, small, sleeps_of(RATIOS["1:1:1"], 0.0, small, 1.0), folder / "sleepers")
        for _ in range(3):
            wall, cpu = time.monotonic(), time.process_time()
            measured(workers, shape, sleeps, folder / "sleepers")
            wall, cpu = time.monotonic() - wall, time.process_time() - cpu
            rates.append(shape.steps * shape.micro_batches / wall)
            shares.append(cpu / wall / rates[-1] * RATE)
            say(f"driver: {cpu / wall:.1%} of a core at {rates[-1]:.1f} micro-batches/s")
    what = f"driver's CPU at {RATE} micro-batches/s, of a core"
    details = {
        "share_at_rate": shares,
        "micro_batches_per_second": rates,
        "samples_in_micro_batch": shape.micro_batch,
        "bare_ray_cpu_seconds": bare,
    }
    return Result("driver_cpu", what, median(shares), 0.05, at_most=True, details=details)


class _Nothing:
    def call(self) -> None:
        pass

    @ray.method(num_returns="streaming")
    def stream(self, count: int) -> Iterator[int]:
        for number in range(count):
            time.sleep(0.01)
            yield number


def _bare_ray(count: int = 300) -> dict[str, float]:
    """CPU seconds that Ray alone takes of a driver for an awaited call of an empty method, and for a streamed item: the floor of any
    driver that makes such calls."""
    actor: Any = ray.remote(_Nothing).options(num_cpus=0).remote()
    ray.get(actor.call.remote())

    async def calls() -> None:
        for _ in range(count):
            await actor.call.remote()
            await asyncio.sleep(0.005)

    async def items() -> None:
        async for reference in actor.stream.remote(count):
            await reference

    found = {}
    for name, work in {"call": calls, "streamed item": items}.items():
        start = time.process_time()
        asyncio.run(work())
        found[name] = (time.process_time() - start) / count
    ray.kill(actor)
    return found
