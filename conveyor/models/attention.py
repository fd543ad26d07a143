"""Attention of samples that stand in one row, without padding: each token sees its own sample only.

    row      a a a a b b c c c          [1, ΣT]: what every other layer computes on
    buckets  a a a a · c c c ·  |  b b  samples of about one length, padded on the right, attend causally without a mask

A causal mask keeps real tokens from padding that follows them, so nothing has to be masked, and attention costs Σ T² instead of
(Σ T)². On GPUs in half precision torch's varlen attention (FlashAttention-2's kernel) does the same without buckets. transformers
calls this function by its name, `PACKED`; it makes no mask for names it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

PACKED = "packed"
"""Name of this attention."""
FULLEST = 0.75
"""A bucket's shortest sample is at least this share of its longest."""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers whose tokens meet in attention only."""


@dataclass(frozen=True)
class Sequences:
    """Where samples begin and end in a row [1, ΣT]; made once a forward, for all layers."""

    lengths: tuple[int, ...]
    device: torch.device
    parallel: Any = None
    """`models.sequence_parallel.SequenceParallel` of a row that is cut over ranks."""

    @cached_property
    def cumulative(self) -> Tensor:
        """int32 [n + 1]: 0, and the end of each sample."""
        return F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0)).int().to(self.device)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def buckets(self) -> tuple[list[Tensor], Tensor]:
        """Samples of about one length side by side, and the way back.

        Returns:
            int64 [b, L] each: places in the row, a sample's last one again where it has ended; int64 [ΣT]: where each token of the row
            is among the buckets' tokens, laid one after another.
        """
        starts = [0, *np.cumsum(self.lengths).tolist()]
        grouped: list[list[int]] = []
        for number in sorted(range(len(self.lengths)), key=lambda item: -self.lengths[item]):
            if not grouped or self.lengths[number] < FULLEST * self.lengths[grouped[-1][0]]:
                grouped.append([])
            grouped[-1].append(number)
        places, back, before = [], np.empty(starts[-1], dtype=np.int64), 0
        for numbers in grouped:
            longest = np.arange(self.lengths[numbers[0]])
            places.append(np.stack([starts[number] + np.minimum(longest, self.lengths[number] - 1) for number in numbers]))
            for number in numbers:
                back[starts[number] : starts[number + 1]] = before + longest[: self.lengths[number]]
                before += len(longest)
        return [torch.from_numpy(place).to(self.device) for place in places], torch.from_numpy(back).to(self.device)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *, scaling: float | None = None,
    sliding_window: int | None = None, sequences: Sequences | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention, as transformers calls it.

    Args:
        query: [B, heads, T, D]; key, value: [B, key heads, T, D].
        sliding_window: tokens that a token sees, itself included.
        sequences: samples of the one row (B = 1); None: every row is a sample, padded on the right.

    Returns:
        [B, T, heads, D], and nothing for the weights.
    """
    assert attention_mask is None and softcap is None and s_aux is None, f"{type(module).__name__}: not an attention that packs"
    if sequences is not None and sequences.parallel is not None:
        attended: Tensor = sequences.parallel.attend(module, query, key, value, scaling, sliding_window, sequences)
        return attended, None
    return attend(query, key, value, scaling, sliding_window, sequences), None


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, sequences: Sequences | None) -> Tensor:
    """[B, T, heads, D]; arguments as of `packed_attention`."""
    if sequences is None:
        return _causal(query, key, value, scaling, window).transpose(1, 2).contiguous()
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(query, key, value, scaling, window, sequences)
    if len(sequences.lengths) == 1:
        return _causal(query, key, value, scaling, window).transpose(1, 2).contiguous()
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, D]
    buckets, back = sequences.buckets
    found = []
    for bucket in buckets:
        q, k, v = (row.index_select(0, bucket.flatten()).unflatten(0, bucket.shape).transpose(1, 2) for row in rows)  # [b, heads, L, D]
        found.append(_causal(q, k, v, scaling, window).transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, back)[None]


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[b, heads, L, D]"""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True)
    ago = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(ago >= 0) & (ago < window), scale=scaling)


def _varlen(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, sequences: Sequences) -> Tensor:
    """[1, T, heads, D] by one kernel over all samples."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    ends, longest = sequences.cumulative, sequences.longest
    sees = (-1 if window is None else window - 1, 0)
    grouped = query.shape[1] != key.shape[1]
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=sees, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out[None]


def can_pack(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether the model's tokens meet in causal attention only, and that goes through transformers' interface."""
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or LAYERS)
    plain = getattr(text, "attn_logit_softcapping", None) is None and text.model_type != "gpt_oss"  # those have sinks
    return bool(getattr(model_class, "_supports_attention_backend", False)) and layers <= LAYERS and plain


def packs(model: PreTrainedModel) -> bool:
    """Whether its samples may stand in one row."""
    return model.config._attn_implementation in (PACKED, "flash_attention_2")


def attention_arguments(model: PreTrainedModel, lengths: Sequence[int], device: torch.device, parallel: Any = None) -> dict[str, Any]:
    """What the forward of a model that packs is told of a row's samples."""
    sequences = Sequences(tuple(lengths), device, parallel)
    if model.config._attn_implementation == PACKED:
        return {"sequences": sequences}
    ends, longest = sequences.cumulative, sequences.longest
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


AttentionInterface.register(PACKED, packed_attention)
