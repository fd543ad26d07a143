"""Requests in a vLLM engine: token ids go in, what was sampled comes out, and weights are installed between two steps.

One thread calls everything here, so requests join and leave without locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from conveyor.config import sections
from conveyor.episodes.episode import Sampled
from conveyor.workers import engine_weights
from conveyor.workers.engine_adapter import EngineAdapter
from conveyor.workers.reports import Publication
from conveyor.workers.weight_stream import Transport
from conveyor.workers.weight_sync import Bucket, checked, read

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams


@dataclass(slots=True)
class _Request:
    done: Callable[[Sampled], None]
    version: int
    engine_id: str = ""
    installs: list[tuple[int, int]] = field(default_factory=list)
    """(tokens sampled so far, policy version of the following ones) for each install it lived through."""

    def versions(self, length: int) -> Tensor:
        """int32 [length]"""
        versions = torch.full((length,), self.version, dtype=torch.int32)
        for done, version in self.installs:
            versions[done:] = version
        return versions


class EngineRequests:
    """An engine and what it samples at the moment."""

    def __init__(self, engine: LLMEngine, settings: sections.Rollout, adapter: EngineAdapter | None = None) -> None:
        """Args:
        adapter: what `install` brings; None: it brings all weights.
        """
        self.version = 0
        """Of the weights."""
        self._engine: Any = engine
        self._one_process = engine.vllm_config.parallel_config.world_size == 1
        """vLLM's worker lives in this process, not in processes of its own."""
        self._on_gpu = engine.vllm_config.device_config.device_type != "cpu"
        self.asleep = False
        self._weights: Literal["here", "in host memory", "dropped", "nowhere"] = "here"
        """Dropped: there is no memory for them; nowhere: there is, without weights in it."""
        self._installed = False
        self._settings, self._adapter = settings, adapter
        self._running: dict[str, _Request] = {}
        self._count = 0

    def __bool__(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._running)

    def add(
        self, token_ids: Sequence[int], done: Callable[[Sampled], None], *, seed: int, temperature: float | None = None,
        max_tokens: int | None = None, stop: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Start a request, and call `done` at its end; returns its name. Arguments as of `Engine.add`."""
        assert not self.asleep, "a sample was submitted to a sleeping engine"
        assert self._weights == "here", "rollout.sleep 2 dropped the weights, and a sample was submitted before others were installed"
        request, name = _Request(done, self.version), str(self._count)
        self._count += 1
        params = self._params(temperature, seed, max_tokens, [*self._settings.stop, *stop])
        request.engine_id = self._engine.add_request(
            name, {"prompt_token_ids": list(token_ids)}, params, lora_request=self._adapter and self._adapter.request
        )
        self._running[name] = request
        return name

    def abort(self, name: str) -> Sampled | None:
        """End a request that has not ended, without a call of `done`. Returns what it has sampled, as cut; None: nothing yet."""
        request = self._running.pop(name)
        state = self._engine.output_processor.request_states[request.engine_id]
        sampled = _sampled(request, state.detokenizer.output_token_ids, state.logprobs_processor.logprobs, "length")
        self._engine.abort_request([name])
        return sampled if sampled.token_ids else None

    def step(self) -> None:
        """One step of the engine: a token for every request."""
        for output in self._engine.step():  # finished ones, as FINAL_ONLY gives no others
            completion = output.outputs[0]
            assert completion.finish_reason in ("stop", "length"), f"request ended with {completion.finish_reason}"
            reason: Literal["stop", "length"] = "stop" if completion.finish_reason == "stop" else "length"
            request = self._running.pop(output.request_id)
            experts = None if completion.routed_experts is None else torch.from_numpy(completion.routed_experts)
            request.done(replace(_sampled(request, completion.token_ids, completion.logprobs, reason), experts=experts))

    def install(self, publication: Publication) -> tuple[str, ...]:
        """New weights for every token from here on. Returns the names of tensors that were damaged on the way.

        An engine that sleeps goes on sleeping; only its weights have memory from now on.
        """
        if self.asleep and self._weights != "here":
            self._engine.wake_up(["weights"])
        self._weights, self._installed = "here", True
        mismatched = self._receive(publication) if publication.layout else self._load(publication)
        # Running requests are preempted and start again with a prefill of all their tokens so far.
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self.version = publication.version
        states = self._engine.output_processor.request_states
        for request in self._running.values():
            detokenizer = states[request.engine_id].detokenizer
            assert detokenizer is not None
            request.installs.append((detokenizer.num_output_tokens(), publication.version))
        return mismatched

    def open_stream(self, transport: Transport, address: str, port: int, size: int) -> None:
        """Have vLLM's processes meet the trainer's rank that serves this engine, which listens there. `size`: they and it."""
        self._engine.collective_rpc(engine_weights.open_stream, args=(transport, address, port, size))

    def _receive(self, publication: Publication) -> tuple[str, ...]:
        """Weights that the trainer sends meanwhile."""
        of_ranks = self._engine.collective_rpc(engine_weights.receive, args=(publication.layout, publication.checksums))
        return tuple(dict.fromkeys(name for of_rank in of_ranks for name in of_rank))

    def _load(self, publication: Publication) -> tuple[str, ...]:
        """Weights from the object store, a bucket at a time."""
        import ray

        if self._adapter is not None:
            return self._load_adapter(self._adapter, publication)
        call, came, mismatched = self._engine.collective_rpc, set[str](), dict[str, None]()
        call(engine_weights.begin_reload)
        for reference in publication.buckets:
            bucket: Bucket = ray.get(reference)
            came |= {place.name for place in bucket.places}
            with nullcontext(bucket) if self._one_process else engine_weights.bucket_file(bucket) as part:
                for of_rank in call(engine_weights.load_bucket, args=(part, publication.checksums)):
                    mismatched |= dict.fromkeys(of_rank)
        call(engine_weights.finish_reload)
        return (*mismatched, *(name for name in publication.checksums or () if name not in came))

    def _load_adapter(self, adapter: EngineAdapter, publication: Publication) -> tuple[str, ...]:
        assert adapter.request is not None or not self._running, "a request that names no adapter never gets one"
        mismatched: list[str] = []
        adapter.install(checked(read(publication), publication.checksums, mismatched))
        return tuple(mismatched)

    def sleep(self) -> None:
        """Give memory back until `wake`; nothing may be running. On a GPU `rollout.sleep` says what goes: the KV cache and, to host
        memory (1) or for good (2), the weights. On CPU the KV cache goes and the weights stay. 0: nothing goes."""
        assert not self._running, "an engine that samples was put to sleep"
        assert not self.asleep, "a sleeping engine was put to sleep"
        self.asleep = True
        if self._settings.sleep == 0:
            return
        if self._on_gpu:
            # Those that it began with come again only from disk.
            level = 2 if self._settings.sleep == 2 and self._installed else 1
            self._engine.sleep(level)
            self._weights = "dropped" if level == 2 else "in host memory"
        else:
            self._engine.reset_prefix_cache()
            self._engine.collective_rpc(engine_weights.release_kv_cache)

    def wake(self) -> None:
        """The memory back. What comes next is sampled as if there had been no sleep."""
        assert self.asleep, "an engine that is awake was woken"
        self.asleep = False
        if self._settings.sleep == 0:
            return
        if self._on_gpu:
            self._engine.wake_up(["kv_cache"] if self._weights == "here" else None)
            self._weights = "nowhere" if self._weights == "dropped" else "here"
        else:
            self._engine.collective_rpc(engine_weights.restore_kv_cache)

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    def _params(self, temperature: float | None, seed: int, max_tokens: int | None, stop: list[str]) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = self._settings
        return SamplingParams(
            temperature=settings.temperature if temperature is None else temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=seed,
            max_tokens=max_tokens or settings.max_response_length,
            stop=stop,
            detokenize=bool(stop),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _sampled(request: _Request, token_ids: Sequence[int], logprobs: Any, reason: Literal["stop", "length"]) -> Sampled:
    """`logprobs`: vLLM's FlatLogprobs, with one entry a token."""
    assert len(token_ids) == len(logprobs.logprobs)
    values = torch.tensor(logprobs.logprobs, dtype=torch.float32)
    return Sampled(list(token_ids), values, request.versions(len(values)), reason)
