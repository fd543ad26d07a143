"""Preference pairs: `chosen` and `rejected` after the same prompt, stated or implied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from transformers import PreTrainedTokenizerBase

from conveyor.config import sections
from conveyor.data.rows import BadRows, Row, RowError, chunks, read_rows
from conveyor.data.samples import Draft, Sample, TextDraft, conversation, draft, tokenize
from conveyor.data.sft import report_long


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples with the same prompt; each mask is True on its completion."""

    chosen: Sample
    rejected: Sample

    @property
    def tokens(self) -> int:
        return len(self.chosen.ids) + len(self.rejected.ids)


def load_pairs(data: sections.Data, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None) -> list[Pair]:
    """The pairs of `data.path` (or of `path`, in the same form), both sides of `data.max_length` tokens at most.

    Three layouts, the same ids and masks for the same content: prompt + `chosen` + `rejected` (texts or messages);
    `chosen` and `rejected` as whole conversations, with or without the prompt beside them; both as whole texts, whose common
    beginning is the prompt.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or no pair is left.
    """
    source = path or data.path
    bad, too_long, pairs = BadRows(data.on_bad_row), 0, list[Pair]()
    for rows in chunks(read_rows(source, data.split, bad, "data.eval_path" if path else "data.path")):
        drafts: list[tuple[Row, Draft]] = []
        for row in rows:
            try:
                drafts += [(row, side) for side in _drafts(row, data)]
            except RowError as error:
                bad.reject(error)
        samples = tokenize(tokenizer, drafts, "completion", bad)
        for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
            if chosen is None or rejected is None:
                continue
            if np.array_equal(chosen.ids, rejected.ids):
                bad.reject(RowError(chosen.place, "chosen and rejected are identical"))
            elif max(len(chosen.ids), len(rejected.ids)) <= data.max_length:
                pairs.append(Pair(chosen, rejected))
            else:
                too_long += 1
                if data.on_long == "error":
                    longest = max(len(chosen.ids), len(rejected.ids))
                    raise RowError(chosen.place, f"{longest} tokens, data.max_length is {data.max_length}")
    bad.report(len(pairs) + too_long, source)
    report_long(source, too_long, len(pairs), data.max_length)
    return pairs


def _drafts(row: Row, data: sections.Data) -> tuple[Draft, Draft]:
    chosen, rejected = row.text_or_messages("chosen"), row.text_or_messages("rejected")
    if chosen == rejected:
        raise row.error("chosen and rejected are identical")
    if row.has(data.prompt_column):
        prompt = row.text_or_messages(data.prompt_column)
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        whole = all(isinstance(side, list) and side[: len(before)] == before for side in (chosen, rejected))
        if whole:
            chosen, rejected, prompt = chosen[len(before) :], rejected[len(before) :], before
        return (draft(row, prompt, chosen, "chosen", data.apply_chat_template),
                draft(row, prompt, rejected, "rejected", data.apply_chat_template))  # fmt: skip
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _split_texts(row, chosen, rejected)
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = _shared(chosen, rejected)
        return conversation(row, chosen, shared, "chosen"), conversation(row, rejected, shared, "rejected")
    raise row.error("chosen and rejected must both be texts or both be messages")


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
