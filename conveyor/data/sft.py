"""Supervised samples: rows of `messages`, of prompt + `completion`, or of `text`."""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.data.rows import BadRows, Row, RowError, chunks, read_rows
from conveyor.data.samples import Draft, Sample, TextDraft, conversation, draft, tokenize

log = logging.getLogger(__name__)


def load_sft(data: sections.Data, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None, key: str | None = None) -> list[Sample]:
    """The samples of `data.path` (or of `path`, in the same form, which the recipe names in `key`), each of
    `data.max_length` tokens at most.

    | row | learnt with `train_on: completion` |
    |---|---|
    | `messages` | every assistant message with its end |
    | prompt + `completion` (texts or messages) | the completion with its end |
    | `text` | all of it |

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or no sample is left.
    """
    source = path or data.path
    bad, too_long, samples = BadRows(data.on_bad_row), 0, list[Sample]()
    for rows in chunks(read_rows(source, data.split, bad, key or ("data.eval_path" if path else "data.path"))):
        drafts: list[tuple[Row, Draft]] = []
        for row in rows:
            try:
                drafts.append((row, _draft(row, data)))
            except RowError as error:
                bad.reject(error)
        for sample in tokenize(tokenizer, drafts, data.train_on, bad):
            if sample is None:
                continue
            if len(sample.ids) <= data.max_length:
                samples.append(sample)
                continue
            too_long += 1
            if data.on_long == "error":
                raise RowError(sample.place, f"{len(sample.ids)} tokens, data.max_length is {data.max_length}")
    bad.report(len(samples) + too_long, source)
    report_long(source, too_long, len(samples), data.max_length)
    return samples


def report_long(source: str, dropped: int, kept: int, max_length: int) -> None:
    """Log the samples dropped for their length.

    Raises:
        UserError: none is left.
    """
    if dropped:
        log.warning("%s: dropped %d of %d samples, longer than data.max_length (%d tokens)", source, dropped, dropped + kept, max_length)
    if not kept:
        raise UserError(f"{source}: every sample is longer than data.max_length ({max_length} tokens); none is left")


def _draft(row: Row, data: sections.Data) -> Draft:
    if row.has("messages"):
        return conversation(row, row.messages("messages"), 0, "messages")
    if row.has(data.prompt_column) or row.has("completion"):
        prompt = row.text_or_messages(data.prompt_column)
        return draft(row, prompt, row.text_or_messages("completion"), "completion", data.apply_chat_template)
    if row.has("text"):
        text = row.text_or_messages("text")
        if not isinstance(text, str):
            raise row.error("text: must be text; a list of messages belongs under `messages`")
        return TextDraft("", text)
    raise row.error(f"needs `messages`, `{data.prompt_column}` and `completion`, or `text`; has {', '.join(row.values) or 'nothing'}")
