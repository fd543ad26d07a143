"""Real runs that share one engine: started once, pinned to the first core; every run's trainer is pinned to the second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.forced_lengths import CAP
from benchmarks.sleeping_runs import local_ray
from conveyor.checks import check_online
from conveyor.config import OnlineRecipe
from conveyor.pipeline.loop import run_placed
from conveyor.report.events import Event, read_events
from conveyor.report.progress import read_metrics
from conveyor.report.timeline import Bound, Window, busy, busy_bound, step_windows
from conveyor.run_folder import RunFolder
from conveyor.workers.placement import Placement
from conveyor.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Finished:
    """A run that is over, looked at in its steady state."""

    recipe: OnlineRecipe
    skip: int
    """Steps at the start that are left out."""

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.recipe.output_dir)

    @cached_property
    def events(self) -> list[Event]:
        return read_events(self.folder.events)

    @cached_property
    def window(self) -> Window:
        """Of the steady state. The last step is left out too: with staleness nothing is sampled ahead in it."""
        windows = step_windows(self.events)
        return windows[self.skip + 1][0], windows[max(windows) - 1][1]

    @property
    def steps(self) -> int:
        return len(step_windows(self.events)) - self.skip - 1

    @property
    def step_seconds(self) -> float:
        return (self.window[1] - self.window[0]) / self.steps

    @property
    def bound(self) -> Bound:
        return busy_bound(self.events, self.window)

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Device group → seconds of a step in which it worked."""
        return {group: seconds / self.steps for group, seconds in busy(self.events, self.window).items()}

    @property
    def tokens(self) -> list[int]:
        """Sampled in each step."""
        return [row["tokens"] for row in read_metrics(self.folder.metrics)]

    @property
    def tokens_per_second(self) -> float:
        kept = self.tokens[self.skip : -1]
        return sum(kept) / len(kept) / self.step_seconds


class RealRuns:
    """`go(recipe)` runs it on the shared engine. Make one with `real_runs`."""

    def __init__(self, engine: Any, inputs: Path) -> None:
        self._engine, self.inputs = engine, inputs

    def go(self, recipe: OnlineRecipe) -> Finished:
        order = check_online(recipe)
        # The rollout slot stays empty: it keeps the run's trainer off the core of the shared engine.
        with Placement.create({"rollout": 1, "train": 1}, recipe.ray) as placement:
            run_placed(recipe, order, placement, engines=[self._engine])
        return Finished(recipe, skip=2)


@contextmanager
def real_runs(folder: Path) -> Iterator[RealRuns]:
    inputs = workload.make(folder / "inputs")
    settings = workload.recipe(inputs, folder / "none", "grpo", 1)
    with local_ray(), Placement.create({"rollout": 1}, settings.ray) as placement:
        engine = placement.actor(
            RolloutWorker, "rollout", 0, model=settings.model, rollout=settings.rollout, seed=settings.seed,
            cores=placement.cores("rollout", 0), max_model_len=workload.MAX_PROMPT + CAP,
        )  # fmt: skip
        yield RealRuns(engine, inputs)
