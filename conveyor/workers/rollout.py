"""A rollout engine, vLLM or another (`engines.py`), inside a Ray actor, stepped by one thread.

    submit ──▶┐                    ┌──▶ stream: reports, rollouts · reports, rollouts · …
    install ─▶┤ commands ─▶ engine thread: commands, one engine step, commands, one step, …
    generate ▶┤                    └──▶ generate: list of Rollout
    turns ───▶┘                    └──▶ turns, to the process of the function that plays them (episodes/)

Only the engine thread touches the engine, so requests join and leave and weights are installed
**between two steps**, without locks. When it fails, every call and the stream raise its error.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import ray
import torch
import xxhash

from conveyor.config import UserError, sections
from conveyor.data.tokenizer import load_tokenizer
from conveyor.episodes.episode import Sampled
from conveyor.episodes.episodes import Episodes
from conveyor.episodes.process import EpisodeProcess, Message
from conveyor.types import Prompt, Rollout, SampleId
from conveyor.workers.engine_requests import EngineRequests
from conveyor.workers.engines import prepare_process, start
from conveyor.workers.reports import EvaluationAborted, InstallReport, Publication, SampleDone, Span, WorkerInfo
from conveyor.workers.weight_stream import Transport


class RolloutError(RuntimeError):
    """The engine thread has ended with an error, which is the cause of this one."""


_Leaving = tuple[SampleDone | EvaluationAborted, Rollout | None]
"""A report and, of a finished sample, its rollout."""


@dataclass(slots=True, eq=False)
class _Sample:
    """A sample that has not left."""

    prompt: Prompt
    number: int
    deliver: Callable[[Rollout, Span], None]
    start: float
    version: int
    """When it was admitted."""
    evaluation: bool
    """Gives way to an install."""
    drop: Callable[[], object] = lambda: None
    """Ends it where it is made."""

    @property
    def id(self) -> SampleId:
        return SampleId(self.prompt.index, self.number)


class RolloutWorker:
    """Samples responses. Start it as an actor whose calls run in threads (`max_concurrency`); calls
    that do not wait for each other may then be carried out in any order."""

    max_concurrency: ClassVar[int] = 8
    """`stream` holds one thread for good; submit, install and generate need others."""

    def __init__(
        self,
        model: sections.Model,
        rollout: sections.Rollout,
        *,
        seed: int,
        cores: tuple[int, ...] | None,
        max_model_len: int | None = None,
        lora: sections.Lora | None = None,
    ) -> None:
        """Returns at once; the engine starts in its thread (see `ready`).

        Args:
            seed: of the sampling, with the prompt's index and the sample's number.
            cores: core ids on CPU, shared out among the tensor-parallel ranks; None: GPU.
            max_model_len: longest prompt + response in tokens; default: the model's own limit.
            lora: the policy is the model with such an adapter, which `install` brings.
        """
        prepare_process(rollout, cores)
        self._model, self._rollout, self._seed, self._cores = model, rollout, seed, cores
        self._max_model_len, self._lora = max_model_len, lora
        self._samples: dict[int, _Sample] = {}
        self._process: EpisodeProcess | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._leaving: list[_Leaving] = []
        """What has left the engine since it was last handed on."""
        self._finished: queue.SimpleQueue[list[_Leaving] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _ended against _commands
        self._ended = False
        self._failure: BaseException | None = None
        self._waiting: list[Future[Any]] = []
        self._closing = False
        self._ready: Future[None] = Future()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def ready(self) -> WorkerInfo:
        """Waits until the engine can take requests."""
        self._ready.result()
        device = "cpu " + ",".join(map(str, self._cores)) if self._cores is not None else torch.cuda.get_device_name()
        return WorkerInfo("rollout", socket.gethostname(), os.getpid(), device)

    def submit(self, prompt: Prompt, n: int, greedy: bool = False) -> None:
        """Start `n` samples of a prompt; they leave through `stream` as they finish, in any order.

        Args:
            greedy: and one more, number n, of likeliest tokens.
        """
        self._command(partial(self._add, prompt, n, greedy, None, self._to_stream))

    def evaluate(self, prompt: Prompt, n: int, version: int, temperature: float | None = None, greedy: bool = False) -> None:
        """Like `submit`, but the samples are of this version or none: an install ends those that are not finished, and an
        EvaluationAborted leaves through `stream` in the place of each. Temperature 0 takes the likeliest token."""
        self._command(partial(self._add_evaluation, prompt, n, version, temperature, greedy))

    @ray.method(num_returns="streaming")
    def stream(self) -> Iterator[tuple[SampleDone | EvaluationAborted, ...] | tuple[Rollout, ...]]:
        """What has left the engine since the last item, in two: a tuple of reports, one for each sample of `submit` and `evaluate`,
        and a tuple of the rollouts of those that are SampleDone. Until `close` or `renew`.

        Samples that finish in one engine step travel as one object, for every object costs the driver about a millisecond.

        Raises:
            RolloutError: the engine has failed.
        """
        finished = self._finished
        while (leaving := finished.get()) is not None:
            while not finished.empty():
                if (more := finished.get()) is None:
                    finished.put(None)
                    break
                leaving = leaving + more
            yield tuple(report for report, _ in leaving)
            yield tuple(rollout for _, rollout in leaving if rollout is not None)
        finished.put(None)  # for a reader who comes after the end
        self._raise_failure()

    def renew(self) -> None:
        """Another run begins: samples of `submit` that are not finished are dropped, and their stream ends."""
        self._command(self._renew).result()

    def generate(self, prompts: list[Prompt], n: int, *, temperature: float | None = None, greedy: bool = False) -> list[Rollout]:
        """`n` samples of each prompt, in prompt order; waits for them. For evaluation."""
        futures: list[list[Future[Rollout]]] = [[Future() for _ in range(n)] for _ in prompts]

        def deliver(samples: list[Future[Rollout]], rollout: Rollout, _: Span) -> None:
            self._waiting.remove(samples[rollout.sample])
            samples[rollout.sample].set_result(rollout)

        def add() -> None:
            for prompt, samples in zip(prompts, futures, strict=True):
                self._waiting.extend(samples)
                self._add(prompt, n, False, 0.0 if greedy else temperature, partial(deliver, samples))

        self._command(add).result()
        return [future.result() for samples in futures for future in samples]

    def install(self, publication: Publication) -> InstallReport:
        """Load published weights between two steps; waits for it.

        Running requests are kept. Their KV cache is computed anew, so every later token and its
        log-prob come from the new weights alone; no cached prefix of the old weights survives.
        """
        return self._command(partial(self._install, publication)).result()

    def open_stream(self, transport: Transport, address: str, port: int, size: int) -> None:
        """Meet the trainer's rank that listens there and will send weights to this engine. Waits for it.

        Args:
            size: processes of the engine, and that rank.
        """
        self._command(partial(self._open_stream, transport, address, port, size)).result()

    def sleep(self) -> Span:
        """Give memory back between two steps, when no sample is in the engine; see `rollout.sleep`. Waits for it.

        Until `wake` the engine takes new weights, which may come before it wakes, but no samples: that would be a second owner of the
        device, and ends the engine with an error.
        """
        return self._command(self._sleep).result()

    def wake(self) -> Span:
        """The memory back, if it was given. Prompts are computed anew; otherwise the engine samples as if it had not slept."""
        return self._command(self._wake).result()

    def close(self) -> None:
        """Ends the stream and the engine thread; unfinished samples are dropped."""
        with self._lock:
            if self._ended:
                return
            self._commands.put((self._close, Future()))

    def _command(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the engine thread call a function between two steps."""
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                self._raise_failure()
                raise RolloutError("the engine is closed")
            self._commands.put((function, future))
        return future

    def _raise_failure(self) -> None:
        if isinstance(self._failure, UserError):  # one line for the user, who can do something about it
            raise self._failure
        if self._failure is not None:
            raise RolloutError(f"the rollout engine failed: {self._failure!r}") from self._failure

    # Everything below runs in the engine thread.

    def _run(self) -> None:
        try:
            self._start()
            self._ready.set_result(None)
            while not self._closing:
                self._obey()
                if self._engine:
                    self._engine.step()
                    self._hand_on()
            self._engine.shutdown()
        except BaseException as error:
            self._failure = error
        self._end()

    def _start(self) -> None:
        if self._rollout.multi_turn is not None:  # first, as its errors are quickly found
            self._process = EpisodeProcess(self._rollout.multi_turn, self._hear)
            self._process.begin()
        self._engine, self._tokenizer = start(self._model, self._rollout, self._max_model_len, self._cores, self._lora)
        if self._process is not None:
            seed = partial(sample_seed, self._seed)
            self._episodes = Episodes(self._rollout, load_tokenizer(self._model), self._engine, seed, self._process.send)

    def _hear(self, message: Message) -> None:
        """Called by the threads of the function's process."""
        with suppress(RolloutError, UserError):  # the engine has ended, and needs no messages
            self._command(lambda: self._episodes.hear(message))

    def _obey(self) -> None:
        """Carry out the commands that came in; where there is nothing to sample, wait for one."""
        while not self._closing and not (self._engine and self._commands.empty()):
            function, future = self._commands.get()
            self._waiting.append(future)
            future.set_result(function())
            self._waiting.remove(future)
            self._hand_on()

    def _hand_on(self) -> None:
        if self._leaving:
            self._finished.put(self._leaving)
            self._leaving = []

    def _end(self) -> None:
        """Nobody waits in vain: whoever waits for the engine gets its error."""
        with self._lock:
            self._ended = True
            while not self._commands.empty():
                self._waiting.append(self._commands.get()[1])
        error: Exception = RolloutError(
            "the engine is closed" if self._failure is None else f"the rollout engine failed: {self._failure!r}"
        )
        error.__cause__ = self._failure
        if isinstance(self._failure, UserError):  # one line for the user, who can do something about it
            error = self._failure
        for future in (self._ready, *self._waiting):
            if not future.done():
                future.set_exception(error)
        self._finished.put(None)
        if self._process is not None:
            self._process.end()

    def _renew(self) -> None:
        self._drop(lambda sample: sample.deliver == self._to_stream)
        self._leaving = []
        self._finished.put(None)
        self._finished = queue.SimpleQueue()

    def _drop(self, which: Callable[[_Sample], bool]) -> list[_Sample]:
        """Drop the samples of that kind; returns them."""
        dropped = {key: sample for key, sample in self._samples.items() if which(sample)}
        for key, sample in dropped.items():
            sample.drop()
            del self._samples[key]
        return list(dropped.values())

    def _close(self) -> None:
        self._closing = True

    def _add(
        self, prompt: Prompt, n: int, greedy: bool, temperature: float | None, deliver: Callable[[Rollout, Span], None],
        evaluation: bool = False,
    ) -> None:  # fmt: skip
        play = self._one_turn if self._process is None else self._episodes.begin
        for number in range(n + greedy):
            sample = _Sample(prompt, number, deliver, time.time(), self._engine.version, evaluation)
            self._samples[id(sample)] = sample
            sample.drop = play(prompt, number, temperature if number < n else 0.0, partial(self._finish, sample))

    def _one_turn(self, prompt: Prompt, sample: int, temperature: float | None, done: Callable[[Rollout], None]) -> Callable[[], object]:
        """A sample without a function that plays it."""

        def finished(turn: Sampled) -> None:
            text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            ids = torch.tensor(turn.token_ids, dtype=torch.int64)
            done(Rollout(prompt, sample, ids, turn.logprobs, turn.versions, turn.finish_reason, text, experts=turn.experts))

        seed = sample_seed(self._seed, prompt.index, sample)
        ids = prompt.sampling_ids or prompt.token_ids
        return partial(self._engine.abort, self._engine.add(ids, finished, seed=seed, temperature=temperature))

    def _add_evaluation(self, prompt: Prompt, n: int, version: int, temperature: float | None, greedy: bool) -> None:
        if version == self._engine.version:
            self._add(prompt, n, greedy, temperature, self._to_stream, evaluation=True)
            return
        now = time.time()  # an install that was called later came first
        for number in range(n + greedy):
            self._leaving.append((EvaluationAborted(SampleId(prompt.index, number), version, Span(now, now)), None))

    def _finish(self, sample: _Sample, rollout: Rollout) -> None:
        del self._samples[id(sample)]
        sample.deliver(rollout, Span(sample.start, time.time()))

    def _to_stream(self, rollout: Rollout, span: Span) -> None:
        versions = rollout.versions
        done = SampleDone(rollout.id, len(versions), rollout.truncated, int(versions[0]), int(versions[-1]), span)
        self._leaving.append((done, rollout))

    def _install(self, publication: Publication) -> InstallReport:
        start = time.time()
        for sample in self._drop(lambda sample: sample.evaluation):
            self._leaving.append((EvaluationAborted(sample.id, sample.version, Span(sample.start, time.time())), None))
        mismatched = self._engine.install(publication)
        return InstallReport(publication.version, publication.nbytes, Span(start, time.time()), mismatched)

    def _open_stream(self, transport: Transport, address: str, port: int, size: int) -> None:
        assert isinstance(self._engine, EngineRequests), "only vLLM's processes are sent weights"
        self._engine.open_stream(transport, address, port, size)

    def _sleep(self) -> Span:
        assert not self._samples, "an engine that has samples was put to sleep"
        start = time.time()
        self._engine.sleep()
        return Span(start, time.time())

    def _wake(self) -> Span:
        start = time.time()
        if self._engine.asleep:
            self._engine.wake()
        return Span(start, time.time())


def sample_seed(seed: int, group: int, sample: int, turn: int = 0) -> int:
    """Seed of one turn of a sample, in [0, 2⁶³): the same whichever engine draws it, and when. A sample without turns is turn 0."""
    name = f"{seed} {group} {sample}" + (f" {turn}" if turn else "")
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1
