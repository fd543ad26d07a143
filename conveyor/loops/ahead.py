"""Rounds at staleness 1: round r + 1 is sampled, by policy r, while round r is scored and policy r + 1 is trained.

    engines   round 0, policy 0 │ round 1, policy 0 │ round 2, policy 1 │ round 3, policy 2
    training                    │ policy 1          │ policy 2          │ policy 3          │ policy 4

All rounds are one run of the scheduler, each a stage that waits for its policy; so the first prompts of a round are sampled while the
last of the one before are scored. Which policy samples a round does not depend on time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from conveyor.loops.rounds import Loop
from conveyor.loops.samples_file import SamplesFile
from conveyor.pipeline.sampling import Sampled
from conveyor.types import Prompt


def run_ahead(loop: Loop, rounds: Sequence[Sequence[Prompt]], done: int, record: Callable[[dict[str, Any]], None]) -> None:
    """Every round from `done` on; `record` is called with each one's metrics, in order."""
    with ExitStack() as stack:
        run = _Run(loop, rounds, done, record, stack)
        run.train_complete()
        prompts = [prompt for number in run.numbers for prompt in run.unsampled[number].values()]
        if prompts:
            sizes = [len(run.unsampled[number]) for number in run.numbers]
            loop.engines.sample_stages(loop.sampler(done), prompts, run.sampled, sizes, run.enter)
    for trained in run.trained.values():
        trained.result()


class _Run:
    """What is sampled, and what is trained, of the rounds that are left."""

    def __init__(
        self, loop: Loop, rounds: Sequence[Sequence[Prompt]], done: int, record: Callable[[dict[str, Any]], None], stack: ExitStack
    ) -> None:
        self._loop, self._record = loop, record
        self.numbers = range(done, len(rounds))
        self.unsampled: dict[int, dict[int, Prompt]] = {}
        """Round → prompts, by index, whose samples are not in its file."""
        self.trained: dict[int, Future[None]] = {}
        """Round → its training, from the moment its samples are there."""
        self._files: dict[int, SamplesFile] = {}
        self._round_of = {prompt.index: number for number in self.numbers for prompt in rounds[number]}
        self._began: dict[int, float] = {}
        self._learnt: dict[int, Future[None]] = {number: Future() for number in self.numbers}
        """Round → that its policy is there."""
        for number in self.numbers:
            file = loop.folder(number).samples
            self.unsampled[number] = {}
            if not file.exists():
                self._files[number] = samples = SamplesFile(file)
                there = samples.done()
                self.unsampled[number] = {prompt.index: prompt for prompt in rounds[number] if prompt.index not in there}
                stack.enter_context(samples)
        self._trainer = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="training"))

    async def enter(self, stage: int) -> None:
        """The policy of a round is there, and in the engines."""
        number = self.numbers[stage]
        before = number - 1 - self._loop.recipe.rounds.max_staleness
        if before in self._learnt:
            await asyncio.wrap_future(self._learnt[before])
        await asyncio.to_thread(self._loop.engines.install, self._loop.sampler(number))
        self._began[number] = time.perf_counter()

    def sampled(self, sampled: Sampled) -> None:
        number = self._round_of[sampled.prompt.index]
        self._files[number].append(sampled)
        del self.unsampled[number][sampled.prompt.index]
        self.train_complete()

    def train_complete(self) -> None:
        """Start the training of rounds whose samples are all there, in order."""
        for number in self.numbers[len(self.trained) :]:
            if self.unsampled[number]:
                break
            self.trained[number] = self._trainer.submit(self._train, number, time.perf_counter())

    def _train(self, number: int, sampled: float) -> None:
        try:
            if number - 1 in self._learnt:
                self._learnt[number - 1].result()  # no round is trained, or logged, past one that failed
            if number in self._files:
                self._files[number].complete()
            row = self._loop.learn(number)
            self._record(row | {"time/sample": sampled - self._began.get(number, sampled)})
        except BaseException as error:
            self._learnt[number].set_exception(error)
            raise
        self._learnt[number].set_result(None)
