"""Requests in a vLLM engine: token ids go in, what was sampled comes out, and weights are installed between two steps.

One thread calls everything here, so requests join and leave without locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from conveyor.config import sections
from conveyor.episodes.episode import Sampled
from conveyor.models.checkpoint_names import CheckpointNames
from conveyor.workers.reports import Publication
from conveyor.workers.vllm_engine import expect_experts, repack_tied_head
from conveyor.workers.weight_sync import checked, read

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

    def __init__(self, engine: LLMEngine, settings: sections.Rollout) -> None:
        self.version = 0
        """Of the weights."""
        self._engine: Any = engine
        self._settings = settings
        self._running: dict[str, _Request] = {}
        self._count = 0

    @cached_property
    def _names(self) -> CheckpointNames:
        """Published weights have transformers' own names, vLLM loads those of checkpoints."""
        return CheckpointNames.of(self._engine.model_config.model)

    def __bool__(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._running)

    def add(
        self, token_ids: Sequence[int], done: Callable[[Sampled], None], *, seed: int, temperature: float | None = None,
        max_tokens: int | None = None, stop: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Start a request, and call `done` at its end; returns its name.

        Args:
            temperature: default: the recipe's; 0 takes the likeliest tokens.
            max_tokens: default: the recipe's `max_response_length`.
            stop: strings that end it, beside the recipe's.
        """
        request, name = _Request(done, self.version), str(self._count)
        self._count += 1
        params = self._params(temperature, seed, max_tokens, [*self._settings.stop, *stop])
        request.engine_id = self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params)
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
        """New weights for every token from here on. Returns the names of tensors that were damaged on the way."""
        mismatched: list[str] = []
        weights = self._names.convert(checked(read(publication), publication.checksums, mismatched))
        self._engine.collective_rpc(expect_experts)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.collective_rpc(repack_tied_head)
        # Running requests are preempted and start again with a prefill of all their tokens so far.
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self.version = publication.version
        states = self._engine.output_processor.request_states
        for request in self._running.values():
            detokenizer = states[request.engine_id].detokenizer
            assert detokenizer is not None
            request.installs.append((detokenizer.num_output_tokens(), publication.version))
        return tuple(mismatched)

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
