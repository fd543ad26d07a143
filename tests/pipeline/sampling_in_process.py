"""A Sampler in this process: the real scheduler, executor and books, on stand-ins for engines and rewards.

`TextEngine` samples letters from the sample's seed, so that a sample depends on what it should and on nothing else; rewards count them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from conveyor.config import OnlineRecipe
from conveyor.pipeline.sampling import Sampler
from conveyor.rewards import load_function
from conveyor.rewards.functions import accepted
from conveyor.rewards.scorer import call_arguments
from conveyor.types import PartialScores, Prompt, Rollout
from conveyor.workers.clocks import Clocks
from conveyor.workers.records import fetch_rollouts
from conveyor.workers.replay import ReplayWorker
from conveyor.workers.reports import Judged, SampleDone, ScoreReport, Span
from conveyor.workers.rollout import sample_seed
from conveyor.workers.start import Workers
from tests.pipeline.in_process import Call, Delays, EngineActor


class TextEngine:
    """The part of RolloutWorker that a Sampler uses. Samples finish in an order drawn from `order`, several at a time."""

    def __init__(self, recipe: OnlineRecipe, order: int, weights: int = 0) -> None:
        self._recipe, self._random, self.weights = recipe, random.Random(order), weights
        self._running: list[tuple[Prompt, int, float]] = []
        self.most = 0
        """Samples it held at a time."""
        self.asked: list[int] = []
        """Groups, in order of arrival."""
        self.awake = True

    def sleep(self) -> None:
        assert self.awake and not self._running
        self.awake = False

    def wake(self) -> None:
        assert not self.awake
        self.awake = True

    def renew(self) -> None:
        self._running = []

    def evaluate(self, prompt: Prompt, n: int, version: int, temperature: float | None, greedy: bool) -> None:
        assert prompt.index < 0 and version == 0 and self.awake
        self.asked.append(prompt.index)
        self._running += [(prompt, sample, time.time()) for sample in range(n + greedy)]
        self.most = max(self.most, len(self._running))
        self._greedy = n if greedy else -1

    async def items(self) -> AsyncIterator[Any]:
        while True:
            leaving = [self._running.pop(self._random.randrange(len(self._running))) for _ in range(min(3, len(self._running)))]
            if leaving:
                rollouts = tuple(self._sample(prompt, sample) for prompt, sample, _ in leaving)
                spans = [Span(start, time.time()) for *_, start in leaving]
                yield tuple(SampleDone(r.id, len(r.response_ids), r.truncated, 0, 0, span) for r, span in zip(rollouts, spans, strict=True))
                yield rollouts
            await asyncio.sleep(0.001)

    def _sample(self, prompt: Prompt, sample: int) -> Rollout:
        seed = sample_seed(self._recipe.seed + self.weights, prompt.index, 0 if sample == self._greedy else sample)
        drawn = random.Random(seed)
        length = 1 + drawn.randrange(self._recipe.rollout.max_response_length)
        text = "a" * length if sample == self._greedy else "".join(drawn.choice("abcdef") for _ in range(length))
        ids = torch.tensor([ord(letter) for letter in text])
        full = length == self._recipe.rollout.max_response_length
        logprobs, versions = torch.full((length,), -1.5), torch.zeros(length, dtype=torch.int32)
        return Rollout(prompt, sample, ids, logprobs, versions, "length" if full else "stop", text)


class Judges:
    """The part of RewardWorker that a Sampler uses; each call takes `pause` seconds."""

    def __init__(self, recipe: OnlineRecipe, pause: float = 0.0) -> None:
        self._functions = [(reward.name, load_function(str(reward.function), reward.name)) for reward in recipe.judged_rewards]
        self._waiting: list[tuple[Rollout, float]] = []
        self._pause = pause

    def renew(self) -> None:
        self._waiting = []

    def judge(self, rollouts: list[Any], urgent: bool) -> None:
        assert not urgent
        self._waiting += [(rollout, time.time()) for rollout in fetch_rollouts(rollouts)]

    async def items(self) -> AsyncIterator[Any]:
        while True:
            if self._waiting:
                await asyncio.sleep(self._pause)
                rollout, start = self._waiting.pop()
                rewards = {name: function(**accepted(function, call_arguments([rollout])))[0] for name, function in self._functions}
                yield (Judged(rollout.id, 0, rewards, 0, 0, Span(start, time.time())),)
            await asyncio.sleep(0)


class LengthModel:
    """A score worker whose reward models say how long a response is."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.moves: list[str] = []

    def sleep(self) -> None:
        self.moves.append("sleep")

    def wake(self) -> None:
        self.moves.append("wake")

    def score(self, roles: tuple[str, ...], rollouts: list[Any]) -> tuple[ScoreReport, PartialScores]:
        assert not self.moves or self.moves[-1] == "wake"
        samples, now = fetch_rollouts(rollouts), time.time()
        self.batches.append(len(samples))
        return ScoreReport(Span(now, now)), PartialScores({role: tuple(float(len(s.response_ids)) for s in samples) for role in roles})


class _TwoAnswers(Call):
    """A call with `num_returns=2` whose answers both come later."""

    def options(self, num_returns: int) -> _TwoAnswers:
        return _TwoAnswers(self._function, self._delays, self._turn, num_returns)

    def remote(self, *arguments: Any) -> Any:
        report, value = super().remote(*arguments)
        return report, asyncio.ensure_future(asyncio.sleep(0, value))


class ScoreActor:
    def __init__(self, worker: LengthModel) -> None:
        self._worker = worker

    @property
    def score(self) -> _TwoAnswers:
        return _TwoAnswers(self._worker.score, Delays(0), asyncio.Lock())

    def __getattr__(self, name: str) -> Call:
        return Call(getattr(self._worker, name), Delays(0), asyncio.Lock())


class Stand(EngineActor):
    """An actor that is called from one event loop after the other."""

    def __getattr__(self, name: str) -> Any:
        loop = asyncio.get_running_loop()
        if self._turns.get("loop") is not loop:
            self._turns = {"loop": loop, "": asyncio.Lock()}
        return super().__getattr__(name)


class Replay(ReplayWorker):
    """Without the threads that a stream of an actor has."""

    async def items(self) -> AsyncIterator[Any]:
        while True:
            if not self._finished.empty():
                done, rollout = self._finished.get()  # type: ignore[misc]
                yield (done,)
                yield (rollout,)
            await asyncio.sleep(0)


class _Started(Workers):
    def ready(self, on_ready: Any = None) -> Clocks:
        return Clocks()


class Here:
    """A placement of this process: every group has one slot."""

    def __init__(self, recipe: OnlineRecipe | None = None, devices: Mapping[str, float] | None = None) -> None:
        self.kind = "CPU"
        self.devices = dict(devices or {}) if recipe is None else {recipe.role_group(role): 1.0 for role in recipe.placed_roles}

    @classmethod
    def create(cls, devices: Mapping[str, float], *_: Any, **how: Any) -> Here:
        return cls(None, devices)

    def slots(self, group: str) -> int:
        return 1

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def beside_driver(self, cls: type, **kwargs: Any) -> Any:
        return Stand(Replay(), Delays(0))


@contextmanager
def in_process(engines: list[TextEngine] | None = None, *, pause: float = 0.0, model: LengthModel | None = None) -> Iterator[None]:
    """Samplers start these workers.

    Args:
        engines: default: one.
        pause: seconds of one judgement.
    """

    def start(recipe: OnlineRecipe, placement: Any, trained: Any, updates: int, given: Any, sleeping: Mapping[str, str]) -> Workers:
        started = given or [Stand(engine, Delays(1)) for engine in engines or [TextEngine(recipe, 0)]]
        scorers = {recipe.role_group(reward.name): [ScoreActor(model or LengthModel())] for reward in recipe.model_rewards}
        for group in sleeping:
            for worker in scorers.get(group, []):
                worker._worker.sleep()
        judges = Stand(Judges(recipe, pause), Delays(2)) if recipe.judged_rewards else None
        return _Started(started, scorers, [], judges)

    with patch("conveyor.pipeline.sampling.start_workers", start), patch("ray.kill"):
        yield


@contextmanager
def sampler_in_process(recipe: OnlineRecipe, engines: list[TextEngine] | None = None, **how: Any) -> Iterator[Sampler]:
    with in_process(engines, **how), Sampler(recipe, Here(recipe)) as made:  # type: ignore[arg-type]
        yield made
