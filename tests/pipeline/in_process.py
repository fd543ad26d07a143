"""Whole runs in this process: the real scheduler, executor, recorder, score and train workers, on a tiny model.

Only two things are stood in for. Ray: a call of a worker is a plain call, answered after a delay drawn from a seed, so that things
happen in any order. vLLM: `TorchEngine` samples with the policy's own weights, one sample at a time, from the sample's seed. With
`rollout.engine: transformers` that engine is the real one (`step_engine.py`).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from conveyor.config import OnlineRecipe
from conveyor.data.prompts import PromptOrder
from conveyor.models.answering import WholeModel
from conveyor.models.parking import Parking
from conveyor.pipeline.executor import Executor
from conveyor.pipeline.loop import groups_of_steps
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.run_plan import RunPlan, run_plan
from conveyor.pipeline.scheduler import Scheduler
from conveyor.pipeline.streams import open_streams, transport_of
from conveyor.rewards import load_function
from conveyor.rewards.scorer import call_arguments
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt, Rollout
from conveyor.workers.policies import load_policy
from conveyor.workers.records import fetch_rollouts
from conveyor.workers.reports import InstallReport, Judged, Publication, SampleDone, Span
from conveyor.workers.rollout import sample_seed
from conveyor.workers.score import ScoreWorker
from conveyor.workers.start import Workers
from conveyor.workers.train import TrainWorker
from conveyor.workers.weight_stream import GROUPS, chunks, nbytes
from conveyor.workers.weight_sync import checked, read
from tests.models.ranks import one_rank
from tests.pipeline.step_engine import StepEngine


class Delays:
    """Answers come after some turns of the event loop, how many is drawn from a seed."""

    def __init__(self, seed: int, most: int = 6) -> None:
        self._random, self._most = random.Random(seed), most

    async def wait(self) -> None:
        for _ in range(self._random.randrange(self._most)):
            await asyncio.sleep(0)


class Call:
    """`worker.method.remote(…)`: an awaitable, or with `num_returns=2` an awaitable and a value."""

    def __init__(self, function: Callable[..., Any], delays: Delays, turn: asyncio.Lock, returns: int = 1) -> None:
        self._function, self._delays, self._turn, self._returns = function, delays, turn, returns

    def options(self, num_returns: int) -> Call:
        return Call(self._function, self._delays, self._turn, num_returns)

    def remote(self, *arguments: Any) -> Any:
        if self._returns == 1:
            return asyncio.ensure_future(self._answer(self._function, arguments))
        report, value = self._function(*arguments)
        return asyncio.ensure_future(self._answer(lambda: report, ())), value

    async def _answer(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        async with self._turn:
            await self._delays.wait()
            answer = function(*arguments)
            return await answer if inspect.isawaitable(answer) else answer


class Actor:
    """A worker whose methods are called through `Call`: one after the other as they were sent, as Ray does, but `prepare` beside them.

    `log`: (name, method) of the calls of all workers, as they are carried out."""

    log: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, worker: Any, delays: Delays, name: str = "") -> None:
        self._worker, self._delays, self._name = worker, delays, name
        self._turns = {"prepare": asyncio.Lock(), "": asyncio.Lock()}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)

        def logged(*arguments: Any) -> Any:
            Actor.log.append((self._name, name))
            return method(*arguments)

        return Call(logged, self._delays, self._turns.get(name, self._turns[""]))


class MemoryGroup:
    """Stands for NCCL: what rank 0 broadcasts, the engine that met it at the same port finds."""

    wires: ClassVar[dict[int, deque[torch.Tensor]]] = defaultdict(deque)

    def __init__(self, address: str, port: int, rank: int, size: int) -> None:
        assert size == 2
        self.chunks = self.wires[port]

    def broadcast(self, chunk: torch.Tensor) -> None:
        self.chunks.append(chunk.clone())

    def wait(self) -> None:
        pass


class TorchEngine:
    """The part of RolloutWorker that the executor uses. Samples finish in an order drawn from the seed."""

    def __init__(self, recipe: OnlineRecipe, seed: int) -> None:
        self._recipe, self._random = recipe, random.Random(seed)
        self._model = load_policy(recipe, "policy_snapshot").eval()
        self._parking = Parking()
        self._version = 0
        self._running: list[tuple[Prompt, int, int]] = []
        self._done: deque[Any] = deque()

    def renew(self) -> None:
        assert not self._running

    def submit(self, prompt: Prompt, n: int, greedy: bool = False) -> None:
        self._running += [(prompt, sample, self._version) for sample in range(n + greedy)]
        self._greedy = n if greedy else -1

    def open_stream(self, transport: str, address: str, port: int, size: int) -> None:
        self._wire = MemoryGroup(address, port, 1, size)

    def install(self, publication: Publication) -> Any:
        return self._receive(publication) if publication.layout else self._load(publication, read(publication, get=lambda bucket: bucket))

    async def _receive(self, publication: Publication) -> InstallReport:
        """Chunks come while others work."""
        tensors: list[tuple[str, torch.Tensor]] = []
        for places in chunks(publication.layout):
            while not self._wire.chunks:
                await asyncio.sleep(0)
            flat, used = self._wire.chunks.popleft(), 0
            for place in places:
                part = flat[used : used + nbytes(place)].clone()
                tensors.append((place.name, part.view(place.dtype).view(place.shape)))
                used += nbytes(place)
            assert used == len(flat)
        return self._load(publication, tensors)

    def _load(self, publication: Publication, weights: Iterable[tuple[str, torch.Tensor]]) -> InstallReport:
        now, mismatched = time.time(), list[str]()
        WholeModel(self._model, torch.device("cpu")).overwrite(checked(weights, publication.checksums, mismatched))
        self._version = publication.version
        return InstallReport(publication.version, publication.nbytes, Span(now, time.time()), tuple(mismatched))

    def sleep(self) -> None:
        assert not self._running, "samples are being made"
        self._parking.park(self._model)

    def wake(self) -> None:
        self._parking.unpark()

    async def items(self) -> AsyncIterator[Any]:
        while True:
            if self._running and self._random.random() < 0.5:
                rollout = self._sample(*self._running.pop(self._random.randrange(len(self._running))))
                versions = rollout.versions
                now = time.time()
                yield (SampleDone(rollout.id, len(versions), rollout.truncated, int(versions[0]), int(versions[-1]), Span(now, now)),)
                yield (rollout,)
            await asyncio.sleep(0)

    @torch.no_grad()
    def _sample(self, prompt: Prompt, sample: int, version: int) -> Rollout:
        """Ancestral sampling; the whole response has the weights of its end, and says so."""
        generator = torch.Generator().manual_seed(sample_seed(self._recipe.seed, prompt.index, sample))
        ids, logprobs = list(prompt.token_ids), list[float]()
        length = 1 + int(torch.randint(self._recipe.rollout.max_response_length, (1,), generator=generator))
        for _ in range(length):
            logits = self._model(torch.tensor([ids])).logits[0, -1] / self._recipe.rollout.temperature
            distribution = logits.log_softmax(-1)
            drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
            ids.append(int(distribution.argmax() if sample == self._greedy else drawn))
            logprobs.append(float(distribution[ids[-1]]))
        response = torch.tensor(ids[len(prompt.token_ids) :])
        versions = torch.full((length,), self._version, dtype=torch.int32)
        text = "".join(chr(97 + i % 26) for i in response.tolist())
        return Rollout(prompt, sample, response, torch.tensor(logprobs), versions, "stop", text)


class Rewarder:
    """The part of RewardWorker that the executor uses: functions are called here, one sample at a time, after a delay."""

    def __init__(self, recipe: OnlineRecipe, seed: int) -> None:
        self._functions = [(reward, load_function(reward.function, reward.name)) for reward in recipe.judged_rewards if reward.function]
        self._random, self._waiting = random.Random(seed), list[Rollout]()

    def renew(self) -> None:
        assert not self._waiting

    def judge(self, rollouts: list[Any], urgent: bool) -> None:
        self._waiting += fetch_rollouts(rollouts)

    async def items(self) -> AsyncIterator[Any]:
        while True:
            if self._waiting and self._random.random() < 0.5:
                rollout = self._waiting.pop(self._random.randrange(len(self._waiting)))
                arguments = call_arguments([rollout])
                rewards = {reward.name: function(**arguments, **reward.arguments)[0] for reward, function in self._functions}
                now = time.time()
                yield (Judged(rollout.id, int(rollout.versions[0]), rewards, 0, 0, Span(now, now)),)
            await asyncio.sleep(0)


class _Stream:
    """What a streaming method gives: awaitable references to its items; rollouts are kept as they are."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._items)
        if isinstance(item[0], Rollout):
            return item
        return asyncio.ensure_future(asyncio.sleep(0, item))


class EngineActor(Actor):
    @property
    def stream(self) -> Any:
        class Method:
            remote = staticmethod(lambda: _Stream(self._worker.items()))

        return Method


def run_in_process(recipe: OnlineRecipe, prompts: list[Prompt], *, seed: int = 0, engines: int = 1, score_workers: int = 1) -> RunPlan:
    """Train by a recipe; the run's folder is written, with the first gradient and the models.

    Answers come in an order drawn from `seed`.
    """
    one_rank()
    train = recipe.train
    order = PromptOrder(prompts, train.rollout_batch_size, epochs=train.epochs, steps=train.steps, shuffle=False, seed=recipe.seed)
    slots = {recipe.role_group(role): 1 for role in recipe.placed_roles}
    slots |= {recipe.role_group(role): score_workers for role in (*recipe.score_roles, *recipe.snapshot_roles)} | {"rollout": engines}
    slots |= {group: 1 for group in {recipe.role_group("actor"), recipe.role_group("critic")}}
    sleeping = recipe.sleeping_groups(gpus=False)
    plan = run_plan(recipe, groups_of_steps(recipe, order), slots, sleeping=sleeping)
    folder, delays = RunFolder(recipe.output_dir), Delays(seed)
    folder.path.mkdir(parents=True)
    workers, trainers = _workers(recipe, plan, slots, delays, seed)
    _put_to_sleep(workers, plan)
    Actor.log.clear()
    torch.set_num_threads(1)
    for trainer in trainers:
        trainer.record_gradient(folder.path / "gradient")
    recorder = Recorder(recipe, plan, folder, lambda row: None)
    with patch("ray.put", copy.deepcopy), patch("ray.get", lambda bucket: bucket), patch.dict(GROUPS, gloo=MemoryGroup):
        transport = transport_of(recipe, "CPU")
        streams = open_streams(recipe, transport, workers.trainers[0], workers.engines) if transport else None
        asyncio.run(Executor(Scheduler(plan), workers, order, recorder, folder, streams=streams).run())
    recorder.close()
    for trainer in trainers:
        trainer.save_model(folder.model, folder.critic)
    return plan


def _put_to_sleep(workers: Workers, plan: RunPlan) -> None:
    """As `start_workers` does."""
    for group, awake in plan.sleeping:
        if group == plan.rollout_group and awake != "rollout":
            for engine in workers.engines:
                engine._worker.sleep()
        for worker in workers.scorers.get(group, []):
            worker._worker.sleep()


def _workers(recipe: OnlineRecipe, plan: RunPlan, slots: dict[str, int], delays: Delays, seed: int) -> tuple[Workers, list[TrainWorker]]:
    cores = tuple(os.sched_getaffinity(0))
    total = len(plan.step_groups) * plan.update_epochs * max(1, recipe.samples_per_step // recipe.samples_per_update)
    trainers = [
        TrainWorker(recipe, group.roles, rank=0, world_size=1, address="", port=0, total_updates=total, cores=cores)
        for group in plan.train_groups
    ]
    roles: dict[str, tuple[str, ...]] = {}
    for part in plan.parts:
        roles[part.group] = (*roles.get(part.group, ()), *part.roles)
    ranks = [[Actor(trainer, delays, "train")] for trainer in trainers]
    scorers: dict[str, list[Any]] = {group: [] for group in roles}
    if recipe.trainer_answers:
        scorers[recipe.role_group("actor")] = ranks[0]
        del roles[recipe.role_group("actor")]
    for group, of_group in roles.items():
        for _ in range(slots[group]):
            worker = ScoreWorker(recipe, of_group, cores=cores)
            worker.ready()
            scorers[group].append(Actor(worker, delays, "score"))
    engine = StepEngine if recipe.rollout.engine == "transformers" else TorchEngine
    engines = [EngineActor(engine(recipe, seed + number), delays, "rollout") for number in range(plan.engines)]
    rewarder = EngineActor(Rewarder(recipe, seed), delays) if recipe.judged_rewards else None
    return Workers(engines, scorers, ranks, rewarder), trainers
