"""From a file to the items a method trains on: the one way of all data forms.

A data form says what a row means: its drafts, which are tokenised together with those of many other rows, and how their
samples become the row's items. All else is the same for every form: places of errors, bad and over-long rows, the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.data.rows import BadRows, Row, RowError, chunks, read_rows
from conveyor.data.samples import Draft, Sample, TrainOn, tokenize

log = logging.getLogger(__name__)
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Meaning(Generic[Item]):
    """What a data form makes of a row."""

    drafts: tuple[Draft, ...]
    items: Callable[..., Sequence[Item]]
    """From one sample for each draft to the row's items; may raise RowError."""


def load_items(
    data: sections.Data,
    tokenizer: PreTrainedTokenizerBase,
    meaning: Callable[[Row], Meaning[Item]],
    *,
    path: str | None = None,
    key: str | None = None,
    train_on: TrainOn = "completion",
) -> list[Item]:
    """The items of `data.path` (or of `path`, in the same form, which the recipe names in `key`), in file order.

    A row with a sample of more than `data.max_length` tokens is dropped and counted in the log, or an error, as `data.on_long`
    says; one for which `meaning` raises RowError, or that cannot be tokenised, as `data.on_bad_row` says.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or no row is left.
    """
    source = path or data.path
    bad, kept, too_long, items = BadRows(data.on_bad_row), 0, 0, list[Item]()
    for rows in chunks(read_rows(source, data.split, bad, key or ("data.eval_path" if path else "data.path"))):
        meanings = [_of_row(meaning, row) for row in rows]
        drafts = [(row, draft) for row, meant in zip(rows, meanings, strict=True) if isinstance(meant, Meaning) for draft in meant.drafts]
        tokenized = iter(tokenize(tokenizer, drafts, train_on))
        for row, meant in zip(rows, meanings, strict=True):
            try:
                length, made = _made(meant, tokenized)
            except RowError as error:
                bad.reject(error)
                continue
            if length > data.max_length and data.on_long == "error":
                raise row.error(f"{length} tokens, data.max_length is {data.max_length}")
            if length > data.max_length:
                too_long += 1
            else:
                kept += 1
                items += made
    bad.report(kept + too_long, source)
    _report_long(source, too_long, kept, data.max_length)
    return items


def _of_row(meaning: Callable[[Row], Meaning[Item]], row: Row) -> Meaning[Item] | RowError:
    try:
        return meaning(row)
    except RowError as error:
        return error


def _made(meant: Meaning[Item] | RowError, tokenized: Iterator[Sample | RowError]) -> tuple[int, Sequence[Item]]:
    """Tokens of the row's longest sample, and its items. Takes all of the row's samples, whatever is wrong with some."""
    if isinstance(meant, RowError):
        raise meant
    samples = [next(tokenized) for _ in meant.drafts]
    for sample in samples:
        if isinstance(sample, RowError):
            raise sample
    return max(len(sample.ids) for sample in samples if isinstance(sample, Sample)), meant.items(*samples)


def _report_long(source: str, dropped: int, kept: int, max_length: int) -> None:
    if dropped:
        log.warning("%s: dropped %d of %d samples, longer than data.max_length (%d tokens)", source, dropped, dropped + kept, max_length)
    if not kept:
        raise UserError(f"{source}: every sample is longer than data.max_length ({max_length} tokens); none is left")
