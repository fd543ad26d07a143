"""The engine of transformers where an executor expects a RolloutWorker: the same calls, without its thread."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import torch

from conveyor.config import OnlineRecipe
from conveyor.episodes.episode import Sampled
from conveyor.types import Prompt, Rollout
from conveyor.workers.engines import start
from conveyor.workers.reports import InstallReport, Publication, SampleDone, Span
from conveyor.workers.rollout import sample_seed


class StepEngine:
    """The part of RolloutWorker that the executor uses. Between other things happens a step or none, drawn from `order`."""

    def __init__(self, recipe: OnlineRecipe, order: int) -> None:
        self._recipe, self._random = recipe, random.Random(order)
        self._engine, self._tokenizer = start(recipe.model, recipe.rollout, None, cores=(0,))
        self._leaving: list[Rollout] = []

    def renew(self) -> None:
        assert not self._engine

    def submit(self, prompt: Prompt, n: int, greedy: bool = False) -> None:
        for number in range(n + greedy):
            seed, temperature = sample_seed(self._recipe.seed, prompt.index, number), 0.0 if number == n else None
            self._engine.add(prompt.token_ids, partial(self._finish, prompt, number), seed=seed, temperature=temperature)

    def install(self, publication: Publication) -> InstallReport:
        now = time.time()
        assert self._engine.install(publication) == ()
        return InstallReport(publication.version, publication.nbytes, Span(now, time.time()))

    async def items(self) -> AsyncIterator[Any]:
        while True:
            if self._engine and self._random.random() < 0.5:
                self._engine.step()
            if self._leaving:
                leaving, self._leaving = self._leaving, []
                yield tuple(_done(rollout) for rollout in leaving)
                yield tuple(leaving)
            await asyncio.sleep(0)

    def _finish(self, prompt: Prompt, number: int, sampled: Sampled) -> None:
        ids = torch.tensor(sampled.token_ids)
        text = "".join(chr(97 + i % 26) for i in sampled.token_ids)
        self._leaving.append(Rollout(prompt, number, ids, sampled.logprobs, sampled.versions, sampled.finish_reason, text))


def _done(rollout: Rollout) -> SampleDone:
    now, versions = time.time(), rollout.versions
    return SampleDone(rollout.id, len(versions), rollout.truncated, int(versions[0]), int(versions[-1]), Span(now, now))
