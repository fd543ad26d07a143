"""Attention of one query a row without copies of the keys, for models whose query heads share key heads.

transformers repeats every key and value head for each of its query heads where there is a mask: most of the time and memory of a
decoding step. The query heads of one key head can stand as so many queries of it instead, as they see the same places.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_slots"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [n, heads, 1, D], key and value [n, heads / G, T, D], mask bool [n, 1, 1, T] → [n, 1, heads, D]; other shapes as `sdpa`."""
    rows, heads, queries, size = query.shape
    if queries > 1 or attention_mask is None or key.shape[1] == heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], size)
    attended = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
