"""Prompts of the methods that sample: read, tokenised, held to their limit, and put in the order of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.data.conditions import apply_template
from conveyor.data.order import EpochOrder
from conveyor.data.rows import BadRows, Row, RowError, chunks, read_rows
from conveyor.data.samples import Content, render_rows
from conveyor.data.tokenizer import Messages, begin, encode_texts
from conveyor.types import Prompt

log = logging.getLogger(__name__)
Made = TypeVar("Made", bound=Prompt)


def load_prompts(
    data: sections.Data, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None, key: str = "data.path", template: str | None = None
) -> list[Prompt]:
    """The usable prompts of `data.path` (or of `path`, in the same form, which the recipe names in `key`), `index` counting
    them in file order.

    All of them have the same `columns`: one that a row lacks is None there.
    With a `template` (see `apply_template`) that is what engines read, and nobody else.
    A prompt of `data.max_prompt_length` tokens or more is dropped and counted in the log, or an error, as `data.on_long` says.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or no prompt is left.
    """
    source = path or data.path
    bad, too_long, prompts = BadRows(data.on_bad_row), 0, list[Prompt]()
    for rows in chunks(read_rows(source, data.split, bad, key)):
        for row, prompt in zip(rows, encode_prompts(rows, data, tokenizer, bad, template), strict=True):
            if prompt is None:
                continue
            size = len(prompt.sampling_ids or prompt.token_ids)
            if size < data.max_prompt_length:
                prompts.append(replace(prompt, index=len(prompts)))
                continue
            too_long += 1
            if data.on_long == "error":
                raise row.error(f"{data.prompt_column}: {size} tokens, data.max_prompt_length is {data.max_prompt_length}")
    bad.report(len(prompts) + too_long, source)
    if too_long:
        log.warning("%s: dropped %d of %d prompts, of data.max_prompt_length (%d) tokens or more",
                    source, too_long, too_long + len(prompts), data.max_prompt_length)  # fmt: skip
    if not prompts:
        raise UserError(f"{source}: every prompt has data.max_prompt_length ({data.max_prompt_length}) tokens or more; none is left")
    return same_columns(prompts)


def same_columns(prompts: Sequence[Made]) -> list[Made]:
    """Columns that only some have are None in the others."""
    absent: dict[str, None] = {name: None for prompt in prompts for name in prompt.columns}
    return [prompt if len(prompt.columns) == len(absent) else replace(prompt, columns=absent | dict(prompt.columns)) for prompt in prompts]


def encode_prompts(
    rows: Sequence[Row], data: sections.Data, tokenizer: PreTrainedTokenizerBase, bad: BadRows, template: str | None = None
) -> list[Prompt | None]:
    """One prompt a row, None where it was rejected. A text goes through the chat template as one user message."""
    told: dict[int, Content] = {}
    for i, row in enumerate(rows):
        try:
            told[i] = row.text_or_messages(data.prompt_column)
        except RowError as error:
            bad.reject(error)
    prompts = _encoded(rows, told, data, tokenizer, bad)
    if template is not None:
        conditioned: dict[int, Content] = {}
        for i, said in told.items():
            if prompts[i] is None:
                continue
            try:
                conditioned[i] = apply_template(template, said)
            except ValueError as error:
                bad.reject(rows[i].error(str(error)))
        under = _encoded(rows, conditioned, data, tokenizer, bad)
        prompts = [prompt and other and replace(prompt, sampling_ids=other.token_ids) for prompt, other in zip(prompts, under, strict=True)]
    return prompts


def _encoded(
    rows: Sequence[Row], told: Mapping[int, Content], data: sections.Data, tokenizer: PreTrainedTokenizerBase,
    bad: BadRows,
) -> list[Prompt | None]:  # fmt: skip
    """`told`: prompts of the rows that have a sound one."""
    chats: dict[int, Messages] = {
        i: [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for i, prompt in told.items()
        if data.apply_chat_template or not isinstance(prompt, str)
    }
    rendered = dict(zip(chats, render_rows(tokenizer, [(rows[i], chat) for i, chat in chats.items()], True), strict=True))
    texts: dict[int, str] = {}
    for i, prompt in told.items():
        text = rendered.get(i, prompt)
        if isinstance(text, RowError):
            bad.reject(text)
        else:
            texts[i] = str(text)
    encoded = dict(zip(texts, encode_texts(tokenizer, list(texts.values())), strict=True))
    return [_prompt(row, told.get(i), texts.get(i), begin(tokenizer, encoded[i], add=i not in chats), data) if i in encoded else None
            for i, row in enumerate(rows)]  # fmt: skip


def _prompt(row: Row, told: object, rendered: str | None, ids: list[int], data: sections.Data) -> Prompt:
    return Prompt(
        index=row.number,
        row=row.number,
        token_ids=tuple(ids),
        text=told if isinstance(told, str) else str(rendered),
        messages=tuple(told) if isinstance(told, list) else None,
        columns={name: value for name, value in row.values.items() if name != data.prompt_column},
    )


class PromptOrder:
    """The prompts of step s, in the order of the run (see `EpochOrder`).

    `Prompt.index` counts on over epochs without gaps, so it names one group of the run; nothing else depends on what was trained
    before, so a run goes on at any step.
    """

    def __init__(
        self, prompts: Sequence[Prompt], rollout_batch_size: int, *, epochs: int = 1, steps: int | None = None, shuffle: bool = True,
        seed: int = 0, drop_last: bool = False,
    ) -> None:  # fmt: skip
        self._prompts = prompts
        self.order = EpochOrder(len(prompts), rollout_batch_size, epochs=epochs, steps=steps, shuffle=shuffle, seed=seed,
                                drop_last=drop_last)  # fmt: skip

    def __len__(self) -> int:
        """Steps of the run."""
        return len(self.order)

    def prompt(self, index: int) -> Prompt:
        """The prompt of a group, also beyond the run's last step: dynamic sampling goes on there."""
        return replace(self._prompts[self.order.item(index)], index=index)

    def __getitem__(self, step: int) -> tuple[Prompt, ...]:
        first = self.order.first_index(step)
        return tuple(replace(self._prompts[item], index=first + k) for k, item in enumerate(self.order.items(step)))
