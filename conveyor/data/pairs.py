"""Preference pairs: `chosen` and `rejected` after the same prompt, stated or implied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from transformers import PreTrainedTokenizerBase

from conveyor.config import sections
from conveyor.data.loading import Meaning, load_items
from conveyor.data.rows import Row
from conveyor.data.samples import Content, Draft, Sample, TextDraft, as_messages, conversation, draft


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples with the same prompt; each mask is True on its completion."""

    chosen: Sample
    rejected: Sample
    margin: float | None = None
    """By how much the chosen one is better; None where the row has none, which counts as 0."""

    @property
    def tokens(self) -> int:
        return len(self.chosen.ids) + len(self.rejected.ids)


def load_pairs(data: sections.Data, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None, margins: bool = False) -> list[Pair]:
    """The pairs of `data.path` (or of `path`, in the same form), both sides of `data.max_length` tokens at most.

    Three layouts, the same ids and masks for the same content: prompt + `chosen` + `rejected` (texts, messages, or one message
    each), where `messages` or `conversations` may stand for the prompt; `chosen` and `rejected` as whole conversations, with or
    without the prompt beside them; both as whole texts, whose common beginning is the prompt. With `margins` a finite number
    under `data.margin_column` is the pair's margin.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or no pair is left.
    """

    def meaning(row: Row) -> Meaning[Pair]:
        margin = row.finite(data.margin_column) if margins and row.has(data.margin_column) else None

        def pair(chosen: Sample, rejected: Sample) -> list[Pair]:
            refuse_identical(row, chosen, rejected)
            return [Pair(chosen, rejected, margin)]

        return Meaning(pair_drafts(row, data), pair)

    return load_items(data, tokenizer, meaning, path=path)


def refuse_identical(row: Row, chosen: Sample, rejected: Sample) -> None:
    """Raises RowError where different texts have the same tokens."""
    if np.array_equal(chosen.ids, rejected.ids):
        raise row.error("chosen and rejected are identical")


def pair_drafts(row: Row, data: sections.Data) -> tuple[Draft, Draft]:
    """The drafts of `chosen` and `rejected`.

    Raises:
        RowError: one is missing, both are the same, there is no prompt or nothing follows it.
    """
    chosen, rejected = row.text_or_messages("chosen"), row.text_or_messages("rejected")
    if chosen == rejected:
        raise row.error("chosen and rejected are identical")
    prompt = _prompt(row, data)
    if prompt is not None:
        before = list(as_messages(prompt, "user"))
        whole = all(isinstance(side, list) and side[: len(before)] == before for side in (chosen, rejected))
        if whole:
            chosen, rejected, prompt = chosen[len(before) :], rejected[len(before) :], before
        for key, side in (("chosen", chosen), ("rejected", rejected)):
            if not side:
                raise row.error(f"{key}: nothing follows the prompt")
        return (draft(row, prompt, chosen, "chosen", data.apply_chat_template),
                draft(row, prompt, rejected, "rejected", data.apply_chat_template))  # fmt: skip
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _split_texts(row, chosen, rejected)
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = _shared(chosen, rejected)
        if any(side[shared:] and side[shared]["role"] != "assistant" for side in (chosen, rejected)):
            raise row.error("chosen and rejected do not answer the same prompt: they differ before an assistant message")
        if not shared:
            raise row.error("chosen and rejected have no beginning in common; give the prompt its own column")
        return conversation(row, chosen, shared, "chosen"), conversation(row, rejected, shared, "rejected")
    raise row.error("chosen and rejected must both be texts or both be messages")


def _prompt(row: Row, data: sections.Data) -> Content | None:
    """The prompt's own column, else the chat beside `chosen` and `rejected`."""
    if row.has(data.prompt_column):
        return row.text_or_messages(data.prompt_column)
    key = row.chat_key()
    if key is None:
        return None
    messages = row.messages(key)
    if messages[-1]["role"] == "assistant":
        raise row.error(f"{key}: beside chosen and rejected it is the prompt, but it ends with an assistant message")
    return messages


def _split_texts(row: Row, chosen: str, rejected: str) -> tuple[Draft, Draft]:
    shared = chosen[: _shared(chosen, rejected)]
    # A space before the answer belongs to it, as tokenizers join it to the word that follows.
    prompt = shared[:-1] if shared.endswith(" ") else shared
    if not prompt:
        raise row.error("chosen and rejected have no beginning in common; give the prompt its own column")
    for key, side in (("chosen", chosen), ("rejected", rejected)):
        if not side[len(prompt) :].strip():
            raise row.error(f"{key}: nothing follows the prompt")
    return TextDraft(prompt, chosen[len(prompt) :]), TextDraft(prompt, rejected[len(prompt) :])


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False)))
