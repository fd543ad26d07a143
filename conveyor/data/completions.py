"""Responses that are there already: rows of prompt + `completion`, to be scored as if they were sampled."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.data.prompts import encode_prompts, same_columns
from conveyor.data.rows import BadRows, Row, RowError, chunks, read_rows
from conveyor.data.tokenizer import Messages, encode_texts
from conveyor.types import FinishReason, Prompt

log = logging.getLogger(__name__)
CUT: tuple[FinishReason, ...] = ("length", "turns", "time")
WRITTEN = ("row", "sample", "greedy", "completion", "finish_reason", "response_length", "logprob", "prompt_ids", "response_ids", "logprobs",
           "rewards", "score", "columns")  # fmt: skip
"""Columns that `conveyor generate` and `score` write themselves; what the dataset had besides its prompt lies under `columns`."""


@dataclass(frozen=True, slots=True)
class Completed(Prompt):
    """A prompt with a response to it."""

    completion: str = ""
    response_ids: tuple[int, ...] = ()
    """[R], R ≥ 1; ends with EOS unless the response was cut."""
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True, slots=True)
class _Told:
    """A row as it is read. `prompt` has all messages before the last one, which is the response."""

    row: Row
    prompt: str | Messages
    completion: str


def load_completions(data: sections.Data, tokenizer: PreTrainedTokenizerBase | None, *, limit: int | None = None) -> list[Completed]:
    """The rows of `data.path`, `index` counting them in file order. All have the same columns: one that a row lacks is None there.

    `completion` is text, which may be empty, or messages: of several the last one is the response, those before it are of the prompt.
    A row whose `finish_reason` (as `conveyor generate` writes it) is another than `stop` ends without EOS. Columns under `columns` are
    columns as any other.

    Args:
        tokenizer: None: nobody reads tokens; they are the bytes of the text.
        limit: longest prompt and response in tokens; longer rows are dropped or an error, as `data.on_long` says.

    Raises:
        UserError: a malformed row where the recipe says so, or none is left.
    """
    bad, found, too_long = BadRows(data.on_bad_row), list[Completed](), 0
    for rows in chunks(read_rows(data.path, data.split, bad, "data.path")):
        told = [one for row in rows if (one := _read(row, data, bad)) is not None]
        for one, made in zip(told, _encoded(told, data, tokenizer, bad), strict=True):
            if made is None:
                continue
            size = len(made.token_ids) + len(made.response_ids)
            if limit is None or size <= limit:
                found.append(replace(made, index=len(found)))
                continue
            too_long += 1
            if data.on_long == "error":
                raise one.row.error(f"{size} tokens, a reward model takes {limit}")
    bad.report(len(found) + too_long, data.path)
    if too_long:
        log.warning("%s: dropped %d of %d rows, longer than a reward model takes (%s tokens)",
                    data.path, too_long, too_long + len(found), limit)  # fmt: skip
    if not found:
        raise UserError(f"{data.path}: every row is longer than a reward model takes ({limit} tokens); none is left")
    return same_columns(found)


def _read(row: Row, data: sections.Data, bad: BadRows) -> _Told | None:
    try:
        return _told(row, data)
    except RowError as error:
        bad.reject(error)
        return None


def _told(row: Row, data: sections.Data) -> _Told:
    chat = row.chat_key()
    if chat is not None and not row.has("completion"):
        return _last_turn(row, [], row.messages(chat), chat)
    prompt, completion = row.text_or_messages(data.prompt_column), row.values.get("completion")
    if isinstance(completion, str):
        return _Told(row, prompt, completion)
    messages = row.messages("completion")
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        return _Told(row, prompt, messages[0]["content"])
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return _last_turn(row, before, messages, "completion")


def _last_turn(row: Row, before: Messages, messages: Messages, key: str) -> _Told:
    *earlier, last = [*before, *messages]
    if last["role"] != "assistant":
        raise row.error(f"{key}: the last message is the response, so it must be the assistant's")
    if not earlier:
        raise row.error(f"{key}: no message before the response")
    return _Told(row, earlier, last["content"])


def _encoded(told: Sequence[_Told], data: sections.Data, tokenizer: PreTrainedTokenizerBase | None, bad: BadRows) -> list[Completed | None]:
    """One a row, None where the chat template refuses it."""
    rows = [Row(one.row.place, one.row.number, {**_columns(one.row, data), data.prompt_column: one.prompt}) for one in told]
    prompts = [_in_bytes(row, data) for row in rows] if tokenizer is None else encode_prompts(rows, data, tokenizer, bad)
    texts = [one.completion for one in told]
    responses = [list(text.encode()) for text in texts] if tokenizer is None else encode_texts(tokenizer, texts)
    end = 0 if tokenizer is None else tokenizer.eos_token_id
    made: list[Completed | None] = []
    for one, prompt, response in zip(told, prompts, responses, strict=True):
        reason = _finish_reason(one, response)
        ended = response if reason != "stop" or response[-1:] == [end] else [*response, end]
        parts = {} if prompt is None else {field.name: getattr(prompt, field.name) for field in fields(prompt)}
        found = Completed(**parts, completion=one.completion, response_ids=tuple(ended), finish_reason=reason)
        made.append(None if prompt is None else found)
    return made


def _finish_reason(one: _Told, response: list[int]) -> FinishReason:
    said = one.row.values.get("finish_reason")
    return next((reason for reason in CUT if reason == said and response), "stop")


def _columns(row: Row, data: sections.Data) -> dict[str, Any]:
    """What reward functions are told besides prompt and response."""
    given = row.values.get("columns", ())
    if given is None or isinstance(given, Mapping):  # None: in Parquet, of a dataset of prompts alone
        return {**{name: value for name, value in row.values.items() if name not in WRITTEN}, **(given or {})}
    return {name: value for name, value in row.values.items() if name not in ("completion", "finish_reason")}


def _in_bytes(row: Row, data: sections.Data) -> Prompt:
    told = row.values[data.prompt_column]
    messages = None if isinstance(told, str) else tuple(told)
    text = told if messages is None else "\n".join(message["content"] for message in messages)
    columns = {name: value for name, value in row.values.items() if name != data.prompt_column}
    return Prompt(row.number, row.number, tuple(text.encode()) or (0,), text, messages, columns)
