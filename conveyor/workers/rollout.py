"""A rollout engine: vLLM inside a Ray actor, stepped by one thread.

    submit ──▶┐                    ┌──▶ stream: reports, rollouts · reports, rollouts · …
    install ─▶┤ commands ─▶ engine thread: commands, one engine step, commands, one step, …
    generate ▶┘                    └──▶ generate: list of Rollout

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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
import xxhash
from torch import Tensor

from conveyor.config import UserError, sections
from conveyor.types import FinishReason, Prompt, Rollout, SampleId
from conveyor.workers.reports import EvaluationAborted, InstallReport, Publication, SampleDone, Span, WorkerInfo
from conveyor.workers.vllm_engine import repack_tied_head, set_environment, start_engine
from conveyor.workers.weight_sync import checked, read

if TYPE_CHECKING:
    from vllm import SamplingParams


class RolloutError(RuntimeError):
    """The engine thread has ended with an error, which is the cause of this one."""


_Leaving = tuple[SampleDone | EvaluationAborted, Rollout | None]
"""A report and, of a finished sample, its rollout."""


@dataclass(slots=True)
class _Request:
    """A sample in the engine."""

    prompt: Prompt
    sample: int
    deliver: Callable[[Rollout, Span], None]
    start: float
    version: int
    evaluation: bool = False
    """Gives way to an install."""
    engine_id: str = ""
    installs: list[tuple[int, int]] = field(default_factory=list)
    """(tokens sampled so far, policy version of the following ones) for each install it lived through."""

    def versions(self, length: int) -> Tensor:
        """int32 [length]"""
        versions = torch.full((length,), self.version, dtype=torch.int32)
        for done, version in self.installs:
            versions[done:] = version
        return versions


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
    ) -> None:
        """Returns at once; the engine starts in its thread (see `ready`).

        Args:
            seed: of the sampling, with the prompt's index and the sample's number.
            cores: core ids on CPU, shared out among the tensor-parallel ranks; None: GPU.
            max_model_len: longest prompt + response in tokens; default: the model's own limit.
        """
        set_environment(rollout, cores)
        self._model, self._rollout, self._seed, self._cores = model, rollout, seed, cores
        self._max_model_len = max_model_len
        self._version = 0
        self._requests: dict[str, _Request] = {}
        self._count = 0
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

    def submit(self, prompt: Prompt, n: int) -> None:
        """Start `n` samples of a prompt; they leave through `stream` as they finish, in any order."""
        self._command(partial(self._add, prompt, n, None, self._to_stream))

    def evaluate(self, prompt: Prompt, n: int, version: int, temperature: float | None = None) -> None:
        """Like `submit`, but the samples are of this version or none: an install ends those that are not finished, and an
        EvaluationAborted leaves through `stream` in the place of each. Temperature 0 takes the likeliest token."""
        self._command(partial(self._add_evaluation, prompt, n, version, temperature))

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
                self._add(prompt, n, 0.0 if greedy else temperature, partial(deliver, samples))

        self._command(add).result()
        return [future.result() for samples in futures for future in samples]

    def install(self, publication: Publication) -> InstallReport:
        """Load published weights between two steps; waits for it.

        Running requests are kept. Their KV cache is computed anew, so every later token and its
        log-prob come from the new weights alone; no cached prefix of the old weights survives.
        """
        return self._command(partial(self._install, publication)).result()

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
        if self._failure is not None:
            raise RolloutError(f"the rollout engine failed: {self._failure!r}") from self._failure

    # Everything below runs in the engine thread.

    def _run(self) -> None:
        try:
            self._engine, self._tokenizer = start_engine(self._model, self._rollout, self._max_model_len)
            self._ready.set_result(None)
            while not self._closing:
                self._obey()
                if self._requests:
                    for output in self._engine.step():
                        self._finish(output)
                    self._hand_on()
            self._engine.engine_core.shutdown()
        except BaseException as error:
            self._failure = error
        self._end()

    def _obey(self) -> None:
        """Carry out the commands that came in; where there is nothing to sample, wait for one."""
        while not self._closing and not (self._requests and self._commands.empty()):
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

    def _renew(self) -> None:
        dropped = [name for name, request in self._requests.items() if request.deliver == self._to_stream]
        self._engine.abort_request(dropped)
        for name in dropped:
            del self._requests[name]
        self._leaving = []
        self._finished.put(None)
        self._finished = queue.SimpleQueue()

    def _close(self) -> None:
        self._closing = True

    def _params(self, temperature: float | None, seed: int) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = self._rollout
        return SamplingParams(
            temperature=settings.temperature if temperature is None else temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=seed,
            max_tokens=settings.max_response_length,
            stop=list(settings.stop),
            detokenize=bool(settings.stop),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _add(
        self, prompt: Prompt, n: int, temperature: float | None, deliver: Callable[[Rollout, Span], None], evaluation: bool = False
    ) -> None:
        for sample in range(n):
            request = _Request(prompt, sample, deliver, time.time(), self._version, evaluation)
            params = self._params(temperature, sample_seed(self._seed, prompt.index, sample))
            name = str(self._count)
            self._count += 1
            request.engine_id = self._engine.add_request(name, {"prompt_token_ids": list(prompt.token_ids)}, params)
            self._requests[name] = request

    def _add_evaluation(self, prompt: Prompt, n: int, version: int, temperature: float | None) -> None:
        if version == self._version:
            self._add(prompt, n, temperature, self._to_stream, evaluation=True)
            return
        now = time.time()  # an install that was called later came first
        for sample in range(n):
            self._leaving.append((EvaluationAborted(SampleId(prompt.index, sample), version, Span(now, now)), None))

    def _abort_evaluations(self) -> None:
        for name, request in [(name, request) for name, request in self._requests.items() if request.evaluation]:
            self._engine.abort_request([name])
            del self._requests[name]
            span = Span(request.start, time.time())
            self._leaving.append((EvaluationAborted(SampleId(request.prompt.index, request.sample), request.version, span), None))

    def _finish(self, output: Any) -> None:
        """`output`: a finished vLLM RequestOutput, as FINAL_ONLY gives no others."""
        request = self._requests.pop(output.request_id)
        completion = output.outputs[0]
        reason = completion.finish_reason
        assert reason in ("stop", "length"), f"request ended with {reason}"
        finish: FinishReason = "stop" if reason == "stop" else "length"
        ids = torch.tensor(completion.token_ids, dtype=torch.int64)
        logprobs = torch.tensor(completion.logprobs.logprobs, dtype=torch.float32)
        assert len(ids) == len(logprobs) > 0
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        rollout = Rollout(request.prompt, request.sample, ids, logprobs, request.versions(len(ids)), finish, text)
        request.deliver(rollout, Span(request.start, time.time()))

    def _to_stream(self, rollout: Rollout, span: Span) -> None:
        versions = rollout.versions
        done = SampleDone(rollout.id, len(versions), rollout.truncated, int(versions[0]), int(versions[-1]), span)
        self._leaving.append((done, rollout))

    def _install(self, publication: Publication) -> InstallReport:
        start = time.time()
        self._abort_evaluations()
        mismatched: list[str] = []
        weights = checked(read(publication), publication.checksums, mismatched)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.collective_rpc(repack_tied_head)
        # Running requests are preempted and start again with a prefill of all their tokens so far.
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._version = publication.version
        states = self._engine.output_processor.request_states
        for request in self._requests.values():
            detokenizer = states[request.engine_id].detokenizer
            assert detokenizer is not None
            request.installs.append((detokenizer.num_output_tokens(), publication.version))
        return InstallReport(publication.version, publication.nbytes, Span(start, time.time()), tuple(mismatched))


def sample_seed(seed: int, group: int, sample: int) -> int:
    """Seed of one sample's generator, in [0, 2⁶³): the same whichever engine draws it, and when."""
    return xxhash.xxh3_64_intdigest(f"{seed} {group} {sample}".encode()) >> 1
