"""From a row to token ids and the mask of tokens to learn: one way for texts and chats of every layout.

A row becomes a `Draft` (what is said, and from where on it is to be learnt), a draft becomes *segments* of text,
each learnt or not, and every segment is tokenised alone and joined. That is how a policy meets its text too: the prompt is
tokenised first and sampled tokens follow, so no token ever straddles the border, and layouts that say the same give the
same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from conveyor.config import sections
from conveyor.data.rows import Row, RowError
from conveyor.data.tokenizer import Messages, begin, encode_texts, render_chats

TrainOn = Literal["completion", "assistant", "all"]
Content = str | Messages
"""A prompt or a completion: a text, or chat messages."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised sample. Ends with the end of its completion: the EOS token, once, or the chat template's own end."""

    ids: NDArray[np.int32]
    """[T]"""
    mask: NDArray[np.bool_]
    """[T]: True for tokens that enter the loss as targets; the first token never does, nothing predicts it."""
    place: str
    """File and line (or row) it comes from."""

    @property
    def loss_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that is learnt."""
        return int(self.mask.argmax())


@dataclass(frozen=True, slots=True)
class TextDraft:
    """Plain text that goes past the chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatDraft:
    """A conversation; assistant messages from `learn_from` on are learnt."""

    messages: Messages
    learn_from: int


@dataclass(frozen=True, slots=True)
class StepsDraft:
    """Steps after a prompt, each followed by the separator and by no other end; what is learnt are the separators' tokens."""

    prompt: Content
    """A text goes past the chat template, messages through it."""
    steps: tuple[str, ...]
    separator: str


Draft = TextDraft | ChatDraft | StepsDraft


def prompt_and_completion(row: Row, data: sections.Data) -> tuple[Content, Content, str]:
    """Both, with the key of the completion. Of a chat the last assistant message is the completion, all before it the prompt.

    Raises:
        RowError: one of the two is missing.
    """
    if key := row.chat_key():
        messages = row.messages(key)
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None:
            raise row.error(f"{key}: no assistant message to learn")
        if last == 0:
            raise row.error(f"{key}: nothing stands before the assistant's message, so there is no prompt")
        return messages[:last], messages[last : last + 1], key
    return row.text_or_messages(data.prompt_column), row.text_or_messages("completion"), "completion"


def draft(row: Row, prompt: Content, completion: Content, key: str, apply_chat_template: bool) -> Draft:
    """Join prompt and completion to one draft.

    Raises:
        RowError: there is nothing to learn under `key`, or it does not begin with an answer.
    """
    if isinstance(completion, str) and not completion.strip():
        raise row.error(f"{key}: empty")
    if isinstance(prompt, str) and isinstance(completion, str) and not apply_chat_template:
        return TextDraft(prompt, completion)
    before = as_messages(prompt, "user")
    after = as_messages(completion, "assistant")
    if after[0]["role"] in ("system", "user"):
        raise row.error(f"{key}: begins with a {after[0]['role']} message, where the assistant answers the prompt")
    return conversation(row, [*before, *after], len(before), key)


def as_messages(content: Content, role: str) -> Messages:
    """A text as one message of `role`; messages as they are."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def conversation(row: Row, messages: Messages, learn_from: int, key: str) -> ChatDraft:
    """A chat draft up to its last assistant message.

    Raises:
        RowError: no assistant message from `learn_from` on, or an empty one.
    """
    turns = [i for i in range(learn_from, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        raise row.error(f"{key}: no assistant message to learn")
    if any(not messages[i]["content"].strip() for i in turns):
        raise row.error(f"{key}: an assistant message is empty")
    return ChatDraft(messages[: turns[-1] + 1], learn_from)


@dataclass(frozen=True, slots=True)
class _Segments:
    """A rendered draft."""

    parts: tuple[tuple[str, bool], ...]
    """(text, learnt); the last one is learnt."""
    own_end: bool
    """The chat template closes the completion itself."""
    chat: bool


def tokenize(tokenizer: PreTrainedTokenizerBase, drafts: Sequence[tuple[Row, Draft]], train_on: TrainOn) -> list[Sample | RowError]:
    """A sample for each draft, or what is wrong with its row."""
    rendered = _render(tokenizer, drafts, train_on)
    texts = [text for item in rendered if isinstance(item, _Segments) for text, _ in item.parts]
    encoded = iter(encode_texts(tokenizer, texts))
    return [
        item if isinstance(item, RowError) else _join(tokenizer, row, item, [next(encoded) for _ in item.parts], train_on)
        for (row, _), item in zip(drafts, rendered, strict=True)
    ]


def _render(tokenizer: PreTrainedTokenizerBase, drafts: Sequence[tuple[Row, Draft]], train_on: TrainOn) -> list[_Segments | RowError]:
    """The segments of every draft. All chats are rendered in two calls, since a call's overhead is most of its time."""
    asked = [(row, chat) for row, item in drafts for chat in _asked(item, train_on)]
    told = [(row, chat) for row, item in drafts for chat in _told(item, train_on)]
    before, after = iter(render_rows(tokenizer, asked, True)), iter(render_rows(tokenizer, told, False))
    out: list[_Segments | RowError] = []
    for row, item in drafts:
        prompts, answers = [next(before) for _ in _asked(item, train_on)], [next(after) for _ in _told(item, train_on)]
        if isinstance(item, TextDraft):
            prompt = ((item.prompt, False),) if item.prompt else ()
            out.append(_Segments((*prompt, (item.completion, True)), own_end=False, chat=False))
        elif isinstance(item, StepsDraft):
            out.append(_steps(item, prompts))
        else:
            out.append(_cut(row, item.messages[-1], prompts, answers))
    return out


def _asked(item: Draft, train_on: TrainOn) -> list[Messages]:
    """Chats to be rendered up to the assistant's turn."""
    if isinstance(item, ChatDraft):
        return [item.messages[:i] for i in _turns(item, train_on)]
    return [item.prompt] if isinstance(item, StepsDraft) and not isinstance(item.prompt, str) else []


def _told(item: Draft, train_on: TrainOn) -> list[Messages]:
    """Chats to be rendered with the assistant's turn."""
    return [item.messages[: i + 1] for i in _turns(item, train_on)] if isinstance(item, ChatDraft) else []


def _turns(item: ChatDraft, train_on: TrainOn) -> list[int]:
    """The messages to learn. Those without text (calls of tools, say), which only a prompt may have, are not."""
    first = 0 if train_on == "assistant" else item.learn_from
    return [i for i, message in enumerate(item.messages) if i >= first and message["role"] == "assistant" and message["content"].strip()]


def _steps(item: StepsDraft, rendered: list[str | RowError]) -> _Segments | RowError:
    prompt = rendered[0] if rendered else item.prompt
    if isinstance(prompt, RowError):
        return prompt
    assert isinstance(prompt, str)
    steps = [part for step in item.steps for part in ((step, False), (item.separator, True))]
    return _Segments(((prompt, False), *steps), own_end=True, chat=bool(rendered))


def _cut(row: Row, last: Any, before: list[str | RowError], after: list[str | RowError]) -> _Segments | RowError:
    """Cut the whole conversation's text at the borders of its learnt messages."""
    full = after[-1]
    parts: list[tuple[str, bool]] = []
    position = 0
    for asked, told in zip(before, after, strict=True):
        for text in (asked, told, full):
            if isinstance(text, RowError):
                return text
        assert isinstance(asked, str) and isinstance(told, str) and isinstance(full, str)
        if not (full.startswith(asked) and full.startswith(told) and position <= len(asked) < len(told)):
            return row.error(
                "the chat template renders an assistant message differently once others follow, so its tokens cannot be told apart; "
                "give one row a turn, as prompt and completion"
            )
        if asked[position:]:
            parts.append((asked[position:], False))
        parts.append((told[len(asked) :], True))
        position = len(told)
    own_end = not parts[-1][0].rstrip().endswith(last["content"].rstrip())
    return _Segments(tuple(parts), own_end, chat=True)


def _join(
    tokenizer: PreTrainedTokenizerBase, row: Row, segments: _Segments, encoded: list[list[int]], train_on: TrainOn
) -> Sample | RowError:
    end = tokenizer.eos_token_id
    ids: list[int] = []
    mask: list[bool] = []
    for number, ((_, learnt), part) in enumerate(zip(segments.parts, encoded, strict=True)):
        last = number == len(segments.parts) - 1
        upto = part.index(end) + 1 if learnt and end in part else len(part)
        if upto < len(part) and str(tokenizer.decode([token for token in part[upto:] if token != end])).strip():
            return row.error("text follows an end-of-sequence token within a completion")
        if last:
            # What a template writes after the EOS (a newline, say) is never sampled, so it is not learnt either.
            part = part[:upto] if end in part or segments.own_end else [*part, end]
            upto = len(part)
        ids += part
        mask += [learnt] * upto + [False] * (len(part) - upto)
    begun = begin(tokenizer, ids, add=not segments.chat)
    mask = [False] * max(0, len(begun) - len(ids)) + mask[max(0, len(ids) - len(begun)) :]
    array = np.array([True] * len(begun) if train_on == "all" else mask, dtype=np.bool_)
    array[:1] = False
    if not array.any():
        return row.error("no token to learn: every token is masked")
    return Sample(np.array(begun, dtype=np.int32), array, row.place)


def render_rows(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[tuple[Row, Messages]], add_generation_prompt: bool
) -> list[str | RowError]:
    """`render_chats` that finds the row at fault when the template refuses one."""
    try:
        return list(render_chats(tokenizer, [chat for _, chat in chats], add_generation_prompt=add_generation_prompt))
    except ValueError:
        out: list[str | RowError] = []
        for row, chat in chats:
            try:
                out += render_chats(tokenizer, [chat], add_generation_prompt=add_generation_prompt)
            except ValueError as error:
                out.append(row.error(str(error)))
        return out
