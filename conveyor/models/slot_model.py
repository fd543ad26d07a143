"""A language model that continues sequences that come and go, each in a slot of its own, a token for all of them at a time.

    fill    the tokens of new sequences but the last ──▶ their keys and values, several sequences in one pass
    decode  the newest token of every sequence      ──▶ logits of the next, always all in one pass

A row of a matrix product is summed in the same order whatever the other rows are and wherever it stands, if there are `ROWS` of them or
a multiple. Attention sums in another order over another number of columns, masked or not, so sequences are filled together
only where they are padded to the same width; one query is indifferent to the number of columns, where that is a multiple of
`slot_cache.COLUMNS`. On one CPU core in float32 a sequence's logits are therefore the same bits whoever it shares its passes with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conveyor.errors import UserError
from conveyor.models import slot_attention
from conveyor.models.slot_cache import COLUMNS, SlotCache

ROWS = 4
"""Passes have a multiple of so many rows: MKL sums blocks of four in one order and what is left over in another."""
FILL_TOKENS = 4096
"""Of one pass, padding included, unless one sequence has more."""
_PROBE = ((3, 5, 4, 6, 3), (4, 6), (5, 3, 6, 4))
"""Token ids that every vocabulary has."""


class SlotModel:
    """A causal language model with caches. Slots are numbered from 0; those in use stand first.

    Raises:
        UserError: the model has layers that remember otherwise than by keys and values, or a mask that is not known here.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """`name`: of the model, for messages."""
        self.model = model
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self._kinds = dict.fromkeys(kinds or ["full_attention" if window is None else "sliding_attention"])
        other = [kind for kind in self._kinds if kind not in ("full_attention", "sliding_attention")]
        if other:
            raise UserError(f"rollout.engine: transformers serves no model with {other[0]} layers, as {name} has; use vllm")
        self._window = window
        if config._attn_implementation == "sdpa":
            model.set_attn_implementation(slot_attention.NAME)
        self._cache = SlotCache(config.num_hidden_layers)
        self._check(name)

    @torch.inference_mode()
    def fill(self, sequences: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Compute the keys and values of whole sequences, of one token or more, and put them into their slots."""
        widths: dict[int, list[int]] = {}
        for i, sequence in enumerate(sequences):
            widths.setdefault(_rounded(len(sequence)), []).append(i)
        for width, alike in widths.items():
            most = max(FILL_TOKENS // width, 1)
            for first in range(0, len(alike), most):
                group = alike[first : first + most]
                self._fill([sequences[i] for i in group], [slots[i] for i in group], width)

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The tokens of slots 0 … n − 1 that stand at these places of their sequences, all places before being filled.

        Returns:
            float32 [n, V]: logits of what follows.
        """
        n, device = len(tokens), self.model.device
        spare = -n % ROWS  # more rows, of token 0 alone
        columns = torch.tensor([*positions, *[0] * spare], device=device)
        places = self._cache.places
        places.slots, places.columns, places.in_use, places.width = None, columns, n + spare, _rounded(max(positions) + 1)
        logits = self._logits(torch.tensor([*tokens, *[0] * spare], device=device)[:, None], columns[:, None], self._masks(columns))
        return logits[:n]

    @torch.inference_mode()
    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """The first `columns` places of a slot, to other slots."""
        if targets and columns:
            self._cache.copy(source, targets, columns)

    def clear(self) -> None:
        """All slots are to be filled anew."""
        self._cache.reset()

    def _fill(self, sequences: Sequence[Sequence[int]], slots: Sequence[int], width: int) -> None:
        """Padded on the right: what stands there comes after the sequence, so it is not seen, and is overwritten as the sequence grows."""
        device = self.model.device
        ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        places = self._cache.places
        places.slots, places.columns = torch.tensor(slots, device=device), None
        places.in_use, places.width = max(slots) + 1, width
        self._logits(ids.to(device), torch.arange(width, device=device).expand(len(sequences), -1), None)

    def _logits(self, ids: Tensor, positions: Tensor, mask: object) -> Tensor:
        """ids, positions [n, Q] → float32 [n, V], of the last column."""
        outputs = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return outputs.logits[:, -1].float()

    def _masks(self, columns: Tensor) -> Tensor | dict[str, Tensor]:
        """[n, 1, 1, width]: places up to a row's own; one mask, or one for each kind of layer."""
        read = torch.arange(self._cache.places.width, device=columns.device)
        seen = (read <= columns[:, None])[:, None, None]
        masks = {}
        for kind in self._kinds:
            masks[kind] = seen
            if kind == "sliding_attention" and self._window is not None:
                masks[kind] = seen & (read > columns[:, None] - self._window)[:, None, None]
        if self.model.config.get_text_config()._attn_implementation == "eager":  # which adds its mask
            dtype = self.model.dtype
            masks = {kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min) for kind, mask in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def _check(self, name: str) -> None:
        """Logits of rows of several lengths are those of the sequences alone. Where a model makes its mask or its places in a way of its
        own, they are not, and nothing else would tell."""
        sequences = [list(sequence) for sequence in _PROBE]
        alone = [
            self.model(input_ids=torch.tensor([sequence], device=self.model.device), use_cache=False).logits[0, -1].float()
            for sequence in sequences
        ]
        right = torch.stack(alone)
        try:
            self.fill([sequence[:-2] or sequence[:1] for sequence in sequences], range(len(sequences)))
            for ahead in (2, 1):
                found = self.decode([sequence[-ahead] for sequence in sequences], [len(sequence) - ahead for sequence in sequences])
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"rollout.engine: transformers cannot continue {name} in batches ({reason}); use vllm") from error
        self.clear()
        wrong = (found - right).abs().max() / right.std().clamp(min=1e-6)
        if not wrong < (1e-3 if self.model.dtype == torch.float32 else 0.3):
            raise UserError(f"rollout.engine: transformers continues {name} wrongly in batches; use vllm")


def _rounded(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS
