"""Starts the workers of a recipe on its device groups, all at once, and waits until each is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from conveyor.config import OnlineRecipe, RunError, sections
from conveyor.models.collectives import nccl_environment
from conveyor.run_folder import RunFolder
from conveyor.workers.clocks import Clocks, clock_offset
from conveyor.workers.failures import Who, failure, is_out_of_memory, last_line
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
        named = [("rollout", f"rollout {i}", engine) for i, engine in enumerate(self.engines)]
        named += [("score", f"score {group} {i}", worker) for group, workers in self.scorers.items() for i, worker in enumerate(workers)]
        named += [("train", f"train {i}.{rank}", worker) for i, ranks in enumerate(self.trainers) for rank, worker in enumerate(ranks)]
        named += [("rewards", "rewards", self.rewarder)] if self.rewarder is not None else []
        asyncio.run(_all_ready(named, on_ready))
        return asyncio.run(_clocks(self))


async def _all_ready(named: list[tuple[str, str, Any]], on_ready: Callable[[str], None]) -> None:
    async def one(stage: str, name: str, worker: Any) -> None:
        try:
            await worker.ready.remote()
        except Exception as error:
            if is_out_of_memory(error):
                raise RunError(f"{name}, while it started: {failure(Who(stage, '', 0), error)}") from error
            if isinstance(error, RayActorError):
                raise RunError(f"{name} died while it started, killed or out of memory: {last_line(error)}") from error
            raise
        on_ready(name)

    await asyncio.gather(*(one(*worker) for worker in named))


async def _all_asleep(workers: list[Any]) -> None:
    await asyncio.gather(*(worker.sleep.remote() for worker in workers))


async def _clocks(workers: Workers) -> Clocks:
    async def offset(worker: Any) -> float:
        async def read() -> float:
            return float((await worker.ready.remote()).time)  # once ready, it answers at once

        return await clock_offset(read)

    async def offsets(some: list[Any]) -> tuple[float, ...]:
        return tuple(await asyncio.gather(*(offset(worker) for worker in some)))

    scorers = {group: await offsets(some) for group, some in workers.scorers.items()}
    return Clocks(await offsets(workers.engines), scorers, tuple([await offsets(ranks) for ranks in workers.trainers]))


def start_workers(
    recipe: OnlineRecipe,
    placement: Placement,
    trained: list[tuple[str, tuple[str, ...]]],
    total_updates: int,
    engines: list[Any] | None = None,
    sleeping: Mapping[str, str] | None = None,
) -> Workers:
    """Start every worker; returns at once (see `Workers.ready`), unless some are to sleep.

    Args:
        trained: (device group, roles) of each train group.
        total_updates: optimizer steps of the whole run, for the learning rate schedules.
        engines: rollout engines that run already, to be used instead of new ones.
        sleeping: device group → its stage that is awake first. The others of the group start before it, one stage after the other, and
            sleep as soon as they are ready: so nobody finds the memory taken that it is to have in its turn.
    """
    starting = _Starting(recipe, placement, [group for group, _ in trained], sleeping or {})
    rollout_first = (sleeping or {}).get(recipe.role_group("rollout")) != "rollout"
    if rollout_first:
        engines = starting.engines(engines)
    scorers = starting.scorers()
    if not rollout_first:
        engines = starting.engines(engines)
    trainers = [starting.trainers(group, roles, total_updates) for group, roles in trained]
    if recipe.trainer_answers:
        scorers[recipe.role_group("actor")] = [Team(trainers[0])]  # the actor's group comes first
    judged = recipe.judged_rewards
    log = RunFolder(recipe.output_dir).rewards_log
    tokens = {reward.name: os.environ[reward.token_variable] for reward in judged if reward.token_variable is not None}
    rewarder = placement.beside_driver(RewardWorker, rewards=judged, log=log.absolute(), tokens=tokens) if judged else None
    return Workers(engines or [], scorers, trainers, rewarder)


class _Starting:
    """Starts the workers of a recipe, stage by stage."""

    def __init__(self, recipe: OnlineRecipe, placement: Placement, trained: list[str], sleeping: Mapping[str, str]) -> None:
        self._recipe, self._placement, self._sleeping = recipe, placement, sleeping
        answered = {recipe.role_group("actor")} if recipe.trainer_answers else set()
        self._scored = {group: roles for group, roles in _score_roles(recipe).items() if group not in answered}
        self._rollout_group = recipe.role_group("rollout")
        self._kinds = [self._rollout_group, *self._scored, *trained]

    def engines(self, running: list[Any] | None) -> list[Any]:
        recipe, group = self._recipe, self._rollout_group
        if running:
            ray.get([engine.wake.remote() for engine in running])  # the run before may have ended while they slept
            return self._put_to_sleep("rollout", group, running)
        limit = recipe.data.max_prompt_length + recipe.rollout.max_response_length
        rollout = engine_settings(recipe, self._placement.devices[group], sleeps=group in self._sleeping)
        settings = {"model": recipe.model, "rollout": rollout, "seed": recipe.seed, "max_model_len": limit, "lora": recipe.lora}
        engines = [self._start(RolloutWorker, group, i, **settings) for i in range(self._placement.slots(group))]
        return self._put_to_sleep("rollout", group, engines)

    def scorers(self) -> dict[str, list[Any]]:
        started = {group: self._score_workers(group, roles) for group, roles in self._scored.items()}
        return {group: self._put_to_sleep("score", group, workers) for group, workers in started.items()}

    def _score_workers(self, group: str, roles: tuple[str, ...]) -> list[Any]:
        """One a slot, or one team of all slots."""
        size, together = self._placement.slots(group), self._recipe.score.zero_stage == 3
        teams: list[Membership | None] = [None] * size
        if together:
            address, port = rendezvous(self._placement, group)
            teams = [Membership(rank, size, address, port) for rank in range(size)]
        environment = {"env": nccl_environment(self._recipe.ray.timeout)} if together else {}
        workers = [
            self._start(ScoreWorker, group, i, recipe=self._recipe, roles=roles, team=team, **environment) for i, team in enumerate(teams)
        ]
        return [Team(workers)] if together else workers

    def trainers(self, group: str, roles: tuple[str, ...], total_updates: int) -> list[Any]:
        recipe, size = self._recipe, self._placement.slots(group)
        address, port = rendezvous(self._placement, group)
        meeting = {"address": address, "port": port, "world_size": size, "env": nccl_environment(recipe.ray.timeout)}
        return [
            self._start(TrainWorker, group, rank, recipe=recipe, roles=roles, rank=rank, total_updates=total_updates, **meeting)
            for rank in range(size)
        ]

    def _start(self, cls: type, group: str, index: int, **kwargs: Any) -> Any:
        share = 1 / self._kinds.count(group)
        return self._placement.actor(cls, group, index, share=share, cores=self._placement.cores(group, index), **kwargs)

    def _put_to_sleep(self, stage: str, group: str, workers: list[Any]) -> list[Any]:
        """Waits until they sleep, where another stage of their group is the first that is awake."""
        if self._sleeping.get(group, stage) != stage:
            asyncio.run(_all_ready([(stage, f"{stage} {group} {i}", worker) for i, worker in enumerate(workers)], lambda name: None))
            asyncio.run(_all_asleep(workers))
        return workers


def engine_settings(recipe: OnlineRecipe, devices: float, *, sleeps: bool) -> sections.Rollout:
    """The section `rollout` as an engine gets it, with what its device group decides.

    An engine that shares its GPU with other groups (`devices` below 1) has its share of that part of the memory. One that shares its
    group with other roles has the share that is set, unscaled: it sleeps while they work, and where it is told not to, only the
    recipe (or `conveyor plan --write`) knows what the others leave.
    """
    rollout = recipe.rollout
    sleep = rollout.sleep if rollout.sleep is not None else int(sleeps)
    return rollout.model_copy(update={"sleep": sleep, "gpu_memory_utilization": rollout.gpu_memory_utilization * min(1.0, devices)})


def _score_roles(recipe: OnlineRecipe) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for role in (*recipe.score_roles, *recipe.snapshot_roles):
        group = recipe.role_group(role)
        groups[group] = (*groups.get(group, ()), role)
    return groups
