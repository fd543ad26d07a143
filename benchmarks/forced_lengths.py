"""Responses whose lengths are drawn from a law, the same ones whoever samples them.

An untrained model ends its responses anywhere, so the end is forced: the end token is forbidden before a sample's length is reached and
is the only one allowed there. Nothing else about sampling or training changes. A sample's length depends on its seed alone, which
vLLM's requests carry; TRL's rows get the lengths of the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm import SamplingParams

MEAN, SIGMA, CAP = 96.0, 0.6, 384
"""Lognormal, in tokens with the end token: most responses are short and a few are four times the mean, as a chat model's are."""


def length_of(seed: int) -> int:
    """Tokens of the sample with this seed."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA)
    return int(np.clip(round(drawn), 1, CAP))


def force(logits: Tensor, ends: Tensor, end_token: int) -> Tensor:
    """logits [rows, vocabulary], in place; ends bool [rows]: the row's response ends with this token."""
    others = logits[ends, end_token]
    logits[:, end_token] = -torch.inf
    logits[ends] = -torch.inf
    logits[ends, end_token] = torch.where(others.isfinite(), others, 0.0)
    return logits


class Lengths:
    """A vLLM logits processor, as `engine_lengths.EngineLengths`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._end_token: int = vllm_config.model_config.hf_config.eos_token_id
        self._requests: dict[int, tuple[int, Sequence[int]]] = {}
        """Row → (length, tokens sampled so far; vLLM's own list, which grows)."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        assert sampling_params.seed is not None, "a sample's length is made from its seed"

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        from vllm.v1.sample.logits_processor.builtin import process_dict_updates

        process_dict_updates(self._requests, batch_update, _request)

    def apply(self, logits: Tensor) -> Tensor:
        ends = torch.zeros(len(logits), dtype=torch.bool)
        for row, (length, output) in self._requests.items():
            ends[row] = len(output) + 1 >= length
        return force(logits, ends, self._end_token)


def _request(params: Any, prompt: Sequence[int] | None, output: Sequence[int]) -> tuple[int, Sequence[int]]:
    return length_of(params.seed), output


class RowLengths:
    """A transformers logits processor for one call of `generate`, of rows with these lengths."""

    def __init__(self, lengths: Sequence[int], end_token: int) -> None:
        self._lengths, self._end_token = torch.tensor(lengths), end_token
        self._done = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._done += 1
        return force(scores.clone(), self._lengths <= self._done, self._end_token)
