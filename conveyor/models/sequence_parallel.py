"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509): a row of tokens is cut over ranks.

    rank 0   tokens 0 … W/2   all layers on its own tokens ──▶ attention: all tokens, half of the heads ──▶ its own tokens again
    rank 1   tokens W/2 … W                                    all-to-all by DeepSpeed's UlyssesSPAttentionHF

Ranks of one group hold the same samples. Every rank has the numbers of all tokens in the end, and computes the same loss from them; only
its own tokens' numbers carry its gradient, so the sum over all ranks is the gradient, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from transformers import PreTrainedModel

from conveyor.errors import UserError
from conveyor.models import attention
from conveyor.models.attention import Sequences
from conveyor.types import Tokens


class SequenceParallel:
    """The group of ranks that shares this rank's rows.

    Args:
        size: ranks of a group; they are neighbours: 0 … size − 1 are the first group. Every rank of the world makes one at once.
    """

    def __init__(self, size: int) -> None:
        world = dist.get_world_size()
        assert world % size == 0, f"{world} ranks in groups of {size}"
        groups = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
        self.size, self.rank = size, dist.get_rank() % size
        self.group: Any = groups[dist.get_rank() // size]
        self._ulysses: dict[tuple[int, int, int], Any] = {}

    def cut(self, tokens: Tokens) -> tuple[Tokens, int]:
        """This rank's part of a packed row, as long as every other's, and the place in the whole row where it begins.

        The last sample is followed by padding, a sample of its own.
        """
        assert tokens.packed, "rows that are cut over ranks have no padding"
        missing = -tokens.input_ids.shape[1] % self.size
        input_ids = F.pad(tokens.input_ids, (0, missing))
        position_ids = torch.cat((tokens.position_ids, torch.arange(missing, device=input_ids.device)[None]), 1)
        lengths = torch.cat((tokens.lengths, tokens.lengths.new_full((1 if missing else 0,), missing)))
        width = input_ids.shape[1] // self.size
        mine = slice(self.rank * width, (self.rank + 1) * width)
        return Tokens(input_ids[:, mine], position_ids[:, mine], tokens.starts, lengths, True), mine.start

    def gather(self, values: Tensor, which: Tensor, total: int) -> Tensor:
        """[total]: every rank's values [n] at the places `which` [n] that it has; other ranks' carry no gradient."""
        gathered: Tensor = _Gather.apply(values, which, total, self.group)
        return gathered

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, sequences: Sequences
    ) -> Tensor:
        """[1, W/size, heads, D] of attention over the whole row; arguments as of `packed_attention`, of this rank's tokens."""
        heads, of_keys, size = query.shape[1], key.shape[1], query.shape[3]
        ulysses = self._ulysses.get((heads, of_keys, size))
        if ulysses is None:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            def core(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, __: Any, *, of: Any, **others: Any) -> tuple[Tensor, None]:
                return attention.attend(q, k, v, *of), None

            ulysses = UlyssesSPAttentionHF(
                core, batch_size=1, attn_head_count=heads, attn_head_size=size, kv_head_count=of_keys, num_hidden_layers=1,
                process_group=self.group, seq_length_is_variable=True,
            )  # fmt: skip
            self._ulysses[heads, of_keys, size] = ulysses
        places = torch.zeros(1, query.shape[2], dtype=torch.int64, device=query.device)  # gathered, and not used by `core`
        out: Tensor = ulysses(module, query, key, value, None, position_ids=places, of=(scaling, window, sequences))[0]
        return out.unflatten(-1, (heads, size))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, which: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(which)
        whole = values.new_zeros(total).index_copy(0, which, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (which,) = ctx.saved_tensors
        return gradients[0].index_select(0, which), None, None, None


def parallelize(model: PreTrainedModel, size: int) -> None:
    """Have a model's rows cut over groups of `size` neighbouring ranks. Every rank of the world calls it, in the same order of models.

    Raises:
        UserError: its attention cannot be shared out.
    """
    if size == 1:
        return
    config = model.config.get_text_config()
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if model.config._attn_implementation != attention.PACKED:
        raise UserError("train.sequence_parallel_size: needs model.attention sdpa and model.remove_padding, of a model that allows them")
    if heads % size or (keys % size and size % keys):
        raise UserError(f"train.sequence_parallel_size: {size} ranks cannot share {heads} attention heads and {keys} of keys")
    vars(model)["sequence_parallel"] = SequenceParallel(size)


def parallel_of(model: PreTrainedModel) -> SequenceParallel | None:
    """The group that a model's rows are cut over."""
    return vars(model).get("sequence_parallel")
