"""Starts the workers of a recipe on its device groups, all at once, and waits until each is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from conveyor.config import OnlineRecipe, RunError
from conveyor.run_folder import RunFolder
from conveyor.workers.clocks import Clocks, clock_offset
from conveyor.workers.placement import Placement
from conveyor.workers.rendezvous import Membership, rendezvous
from conveyor.workers.reward import RewardWorker
from conveyor.workers.rollout import RolloutWorker
from conveyor.workers.score import ScoreWorker
from conveyor.workers.team import Team
from conveyor.workers.train import TrainWorker


@dataclass(frozen=True, slots=True)
class Workers:
    """Handles of all actors of a run."""

    engines: list[Any]
    scorers: dict[str, list[Any]]
    """Device group → one worker a slot, holding all score roles of the group; or one team of all slots."""
    trainers: list[list[Any]]
    """Ranks of each train group, in the order of the plan."""
    rewarder: Any = None
    """Asks the rewards that are functions or urls; None: the recipe has none."""

    def ready(self, on_ready: Callable[[str], None] = lambda name: None) -> Clocks:
        """Block until every worker has loaded its models, then compare clocks; a worker's exception is raised here."""
        named = [(f"rollout {i}", engine) for i, engine in enumerate(self.engines)]
        named += [(f"score {group} {i}", worker) for group, workers in self.scorers.items() for i, worker in enumerate(workers)]
        named += [(f"train {i}.{rank}", worker) for i, ranks in enumerate(self.trainers) for rank, worker in enumerate(ranks)]
        named += [("rewards", self.rewarder)] if self.rewarder is not None else []
        asyncio.run(_all_ready(named, on_ready))
        return asyncio.run(_clocks(self))


async def _all_ready(named: list[tuple[str, Any]], on_ready: Callable[[str], None]) -> None:
    async def one(name: str, worker: Any) -> None:
        try:
            await worker.ready.remote()
        except RayActorError as error:
            raise RunError(f"{name} died while it started, killed or out of memory: {_last_line(error)}") from error
        on_ready(name)

    await asyncio.gather(*(one(name, worker) for name, worker in named))


async def _clocks(workers: Workers) -> Clocks:
    async def offset(worker: Any) -> float:
        async def read() -> float:
            return float((await worker.ready.remote()).time)  # once ready, it answers at once

        return await clock_offset(read)

    async def offsets(some: list[Any]) -> tuple[float, ...]:
        return tuple(await asyncio.gather(*(offset(worker) for worker in some)))

    scorers = {group: await offsets(some) for group, some in workers.scorers.items()}
    return Clocks(await offsets(workers.engines), scorers, tuple([await offsets(ranks) for ranks in workers.trainers]))


def _last_line(error: Exception) -> str:
    """What a constructor raised stands last in Ray's report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def start_workers(
    recipe: OnlineRecipe,
    placement: Placement,
    trained: list[tuple[str, tuple[str, ...]]],
    total_updates: int,
    engines: list[Any] | None = None,
) -> Workers:
    """Start every worker; returns at once (see `Workers.ready`).

    Args:
        trained: (device group, roles) of each train group.
        total_updates: optimizer steps of the whole run, for the learning rate schedules.
        engines: rollout engines that run already, to be used instead of new ones.
    """
    scored = _score_roles(recipe)
    rollout_group = recipe.role_group("rollout")
    kinds = [rollout_group, *scored, *(group for group, _ in trained)]

    def start(cls: type, group: str, index: int, **kwargs: Any) -> Any:
        return placement.actor(cls, group, index, share=1 / kinds.count(group), cores=placement.cores(group, index), **kwargs)

    limit = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    engines = engines or [
        start(RolloutWorker, rollout_group, i, model=recipe.model, rollout=recipe.rollout, seed=recipe.seed, max_model_len=limit)
        for i in range(placement.slots(rollout_group))
    ]
    scorers = {}
    for group, roles in scored.items():
        size = placement.slots(group)
        teams: list[Membership | None] = [None] * size
        if recipe.score.zero_stage == 3:
            address, port = rendezvous(placement, group)
            teams = [Membership(rank, size, address, port) for rank in range(size)]
        alone = [start(ScoreWorker, group, i, recipe=recipe, roles=roles, team=team) for i, team in enumerate(teams)]
        scorers[group] = [Team(alone)] if recipe.score.zero_stage == 3 else alone
    trainers = []
    for group, roles in trained:
        address, port = rendezvous(placement, group)
        size = placement.slots(group)
        meeting = {"address": address, "port": port, "world_size": size}
        ranks = [
            start(TrainWorker, group, rank, recipe=recipe, roles=roles, rank=rank, total_updates=total_updates, **meeting)
            for rank in range(size)
        ]
        trainers.append(ranks)
    judged = recipe.judged_rewards
    log = RunFolder(recipe.output_dir).rewards_log
    tokens = {reward.name: os.environ[reward.token_variable] for reward in judged if reward.token_variable is not None}
    rewarder = placement.beside_driver(RewardWorker, rewards=judged, log=log.absolute(), tokens=tokens) if judged else None
    return Workers(engines, scorers, trainers, rewarder)


def _score_roles(recipe: OnlineRecipe) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for role in (*recipe.score_roles, *recipe.snapshot_roles):
        group = recipe.role_group(role)
        groups[group] = (*groups.get(group, ()), role)
    return groups
