"""Supervised samples: rows of a chat, of prompt + `completion`, or of `text`."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from conveyor.config import sections
from conveyor.data.loading import Meaning, load_items
from conveyor.data.rows import Row
from conveyor.data.samples import Draft, Sample, TextDraft, conversation, draft


def load_sft(data: sections.Data, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None, key: str | None = None) -> list[Sample]:
    """The samples of `data.path` (or of `path`, in the same form, which the recipe names in `key`), each of
    `data.max_length` tokens at most.

    | row | learnt with `train_on: completion` | with `assistant` |
    |---|---|---|
    | `messages` or `conversations` | every assistant message with its end | the same |
    | prompt + `completion` (texts or messages) | the completion with its end | also every assistant message of the prompt |
    | `text` | all of it | all of it |

    With `train_on: all` everything is learnt but the first token, which nothing predicts.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or no sample is left.
    """
    return load_items(data, tokenizer, lambda row: Meaning((_draft(row, data),), lambda sample: [sample]),
                      path=path, key=key, train_on=data.train_on)  # fmt: skip


def _draft(row: Row, data: sections.Data) -> Draft:
    if chat := row.chat_key():
        return conversation(row, row.messages(chat), 0, chat)
    if row.has(data.prompt_column) or row.has("completion"):
        prompt = row.text_or_messages(data.prompt_column)
        return draft(row, prompt, row.text_or_messages("completion"), "completion", data.apply_chat_template)
    if row.has("text"):
        text = row.text_or_messages("text")
        if not isinstance(text, str):
            raise row.error("text: must be text; a list of messages belongs under `messages`")
        if not text.strip():
            raise row.error("text: empty")
        return TextDraft("", text)
    raise row.error(f"needs `messages`, `{data.prompt_column}` and `completion`, or `text`; has {', '.join(row.values) or 'nothing'}")
