"""Labelled completions: each alone is desirable or not (KTO, BCO)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from conveyor.config import sections
from conveyor.data.loading import Meaning, load_items
from conveyor.data.pairs import pair_drafts, refuse_identical
from conveyor.data.rows import Row
from conveyor.data.samples import Sample, draft, prompt_and_completion

log = logging.getLogger(__name__)
_Judged = tuple[Sample, bool]


@dataclass(frozen=True, slots=True)
class Labelled:
    sample: Sample
    """Its mask is True on the completion."""
    label: bool
    """Desirable."""
    prompt: int
    """The same for rows whose prompts have the same tokens; counts up from 0 by first appearance."""


def load_unpaired(data: sections.Data, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None) -> list[Labelled]:
    """The labelled samples of `data.path` (or of `path`, in the same form), each of `data.max_length` tokens at most.

    | row | gives |
    |---|---|
    | prompt + `completion` + `data.label_column` | one sample |
    | `messages` or `conversations` + `data.label_column` | the last assistant message after all before it |
    | `chosen` + `rejected`, as `load_pairs` takes them | a desirable sample and an undesirable one |

    A label is true or false, in CSV as text. A file with one kind only is warned of.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, or no sample is left.
    """
    judged = load_items(data, tokenizer, lambda row: _meaning(row, data), path=path)
    labels = {label for _, label in judged}
    if len(labels) == 1:
        log.warning("%s: every sample is labelled %s", path or data.path, str(labels.pop()).lower())
    prompts: dict[bytes, int] = {}
    return [
        Labelled(sample, label, prompts.setdefault(sample.ids[: sample.prompt_length].tobytes(), len(prompts))) for sample, label in judged
    ]


def mismatch(prompt_of: Sample, completion_of: Sample) -> Sample:
    """The completion of one sample after the prompt of another, for the KL term of KTO (arXiv 2402.01306, section 4.1).

    Each prompt is what stands before the first learnt token. The result may be longer than `data.max_length`.
    """
    before, start = prompt_of.prompt_length, completion_of.prompt_length
    return Sample(
        np.concatenate([prompt_of.ids[:before], completion_of.ids[start:]]),
        np.concatenate([np.zeros(before, np.bool_), completion_of.mask[start:]]),
        completion_of.place,
    )


def _meaning(row: Row, data: sections.Data) -> Meaning[_Judged]:
    if row.has("chosen") or row.has("rejected"):
        return Meaning(pair_drafts(row, data), _both(row))
    prompt, completion, key = prompt_and_completion(row, data)
    label = row.boolean(data.label_column)
    return Meaning((draft(row, prompt, completion, key, data.apply_chat_template),), lambda sample: [(sample, label)])


def _both(row: Row) -> Callable[[Sample, Sample], list[_Judged]]:
    def judged(chosen: Sample, rejected: Sample) -> list[_Judged]:
        refuse_identical(row, chosen, rejected)
        return [(chosen, True), (rejected, False)]

    return judged
