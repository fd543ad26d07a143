"""Solutions whose every step is labelled (process reward models: Uesato et al. 2022, arXiv 2211.14275)."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from conveyor.config import sections
from conveyor.data.loading import Meaning, load_items
from conveyor.data.rows import Row
from conveyor.data.samples import Sample, StepsDraft, as_messages


@dataclass(frozen=True, slots=True)
class StepSample:
    """A prompt and its K steps, each ended by the separator."""

    sample: Sample
    """Its mask is True on the separators' tokens."""
    ends: NDArray[np.int32]
    """[K]: position of each step's last token, that of its separator."""
    labels: NDArray[np.float32]
    """[K]: 1 right, 0 wrong, or the chance of being right."""


def load_steps(data: sections.Data, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None) -> list[StepSample]:
    """The solutions of `data.path` (or of `path`, in the same form), each of `data.max_length` tokens at most.

    A row has a prompt, `completions` (a list of step texts) and `labels` (true, false or a number from 0 to 1 for each step).
    Prompt, steps and separators (`data.step_separator`) are each tokenised alone and joined, without EOS. A step that holds the
    separator is malformed: when samples are scored it would count as several.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or none is left.
    """

    def meaning(row: Row) -> Meaning[StepSample]:
        prompt = row.text_or_messages(data.prompt_column)
        steps, labels = _steps(row, data.step_separator), np.array(_labels(row), dtype=np.float32)
        if len(labels) != len(steps):
            raise row.error(f"labels: {len(labels)} for {len(steps)} steps")
        chat = data.apply_chat_template or not isinstance(prompt, str)

        def solution(sample: Sample) -> list[StepSample]:
            last = sample.mask & ~np.append(sample.mask[1:], False)
            ends = np.flatnonzero(last).astype(np.int32)
            if len(ends) != len(steps):
                raise row.error("completions: a step has no tokens")
            return [StepSample(sample, ends, labels)]

        return Meaning((StepsDraft(as_messages(prompt, "user") if chat else prompt, steps, data.step_separator),), solution)

    return load_items(data, tokenizer, meaning, path=path)


def step_ends(ids: Sequence[int], separator_ids: Sequence[int]) -> list[int]:
    """Positions in a sampled response of its steps' last tokens: the last token of every separator, from left to right without
    overlap, and the response's last token if anything follows the last of them.

    A separator is found only as the tokens it has when tokenised alone: choose one that the tokenizer joins with no neighbour.

    Example: 7 5 8 9 5 6 with separator 5 → 1, 4, 5.
    """
    size, separator = len(separator_ids), list(separator_ids)
    assert size > 0
    ends: list[int] = []
    start = 0
    while start + size <= len(ids):
        if list(ids[start : start + size]) == separator:
            ends.append(start + size - 1)
            start += size
        else:
            start += 1
    if len(ids) > (ends[-1] + 1 if ends else 0):
        ends.append(len(ids) - 1)
    return ends


def _steps(row: Row, separator: str) -> tuple[str, ...]:
    steps = _list(row, "completions", "step texts")
    if not steps:
        raise row.error("completions: no steps")
    for i, step in enumerate(steps):
        if not isinstance(step, str):
            raise row.error(f"completions[{i}]: must be text, not {type(step).__name__}")
        if not step.strip():
            raise row.error(f"completions[{i}]: empty")
        if (step + separator).index(separator) < len(step):  # scoring, which looks for separators, would cut the step there
            raise row.error(f"completions[{i}]: holds data.step_separator {separator!r}, which would end the step there; choose another")
    return tuple(steps)


def _labels(row: Row) -> list[float]:
    labels = _list(row, "labels", "truth values or numbers from 0 to 1")
    for i, label in enumerate(labels):
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            raise row.error(f"labels[{i}]: must be true, false or a number from 0 to 1, not {reprlib.repr(label)}")
    return [float(label) for label in labels]


def _list(row: Row, key: str, of: str) -> list[Any]:
    value = row.values.get(key)
    if value is None:
        raise row.error(f"{key}: missing")
    if not isinstance(value, list):
        raise row.error(f"{key}: must be a list of {of}, not {type(value).__name__}")
    return value
