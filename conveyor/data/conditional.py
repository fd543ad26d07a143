"""Conditional SFT: samples whose prompt says how good the completion is, or from which class of sources it comes.

Conditioning on a reward: Decision Transformer (arXiv 2106.01345) and SteerLM (arXiv 2310.05344); on a class, with a weight for
each (C-RLFT): OpenChat (arXiv 2309.11235), loss −Σ w_c log π(y | x, c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.config.offline import Condition, spelled
from conveyor.data.conditions import apply_template
from conveyor.data.loading import Meaning, load_items
from conveyor.data.rows import BadRows, Row, RowError, read_rows
from conveyor.data.samples import Content, Sample, draft, prompt_and_completion


@dataclass(frozen=True, slots=True)
class Weighted:
    sample: Sample
    weight: float
    """Factor of its loss."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Rewards become (r − mean) / std."""

    mean: float
    std: float
    """0 where all rewards are equal, which `load_conditional` refuses."""

    def text(self, reward: float, decimals: int) -> str:
        """The normalised reward as the prompt spells it; minus zero is zero."""
        return spelled((reward - self.mean) / (self.std or 1.0), decimals)


def load_conditional(
    data: sections.Data, condition: Condition, tokenizer: PreTrainedTokenizerBase, *, path: str | None = None
) -> tuple[list[Weighted], Normalisation | None]:
    """The samples of `data.path` (or of `path`, in the same form) with their condition in the prompt, each of `data.max_length`
    tokens at most; and, of kind score, the normalisation: `condition`'s mean and std, which default to those of this file's rewards.
    For a held-out file put those of the training file into `condition`.

    A row has a prompt and a `completion`, or a chat whose last assistant message is the completion; beside it, by the
    condition's kind, a finite number under `data.reward_column` or one of `condition.classes` under `data.class_column`. The
    condition is put to a text prompt, or to the last user message.

    Raises:
        UserError: a malformed or over-long row where the recipe says so, no sample is left, or all rewards are equal.
    """
    normalisation = _fit(data, condition, path) if condition.kind == "score" else None

    def meaning(row: Row) -> Meaning[Weighted]:
        if normalisation is None:
            text, weight = _of_class(row, data, condition)
        else:
            text, weight = _of_score(row, data, condition, normalisation), 1.0
        prompt, completion, key = prompt_and_completion(row, data)
        conditioned = _conditioned(row, condition.template.replace("{condition}", text), prompt)
        return Meaning((draft(row, conditioned, completion, key, data.apply_chat_template),), lambda sample: [Weighted(sample, weight)])

    items = load_items(data, tokenizer, meaning, path=path, train_on=data.train_on)
    if normalisation is not None and not normalisation.std:
        told = f"{data.reward_column} is {normalisation.mean:g} in every row"
        raise UserError(f"{path or data.path}: {told}: there is nothing to condition on")
    return items, normalisation


def _fit(data: sections.Data, condition: Condition, path: str | None) -> Normalisation:
    """Mean and population deviation of the rewards that can be read; rows without one are malformed, as `load_items` finds."""
    if condition.mean is not None and condition.std is not None:
        return Normalisation(condition.mean, condition.std)
    source, rewards = path or data.path, list[float]()
    for row in read_rows(source, data.split, BadRows("drop"), "data.eval_path" if path else "data.path"):
        try:
            rewards.append(row.finite(data.reward_column))
        except RowError:
            continue
    if not rewards:
        return Normalisation(0.0, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):  # said below, in one line
        mean = float(np.mean(rewards)) if condition.mean is None else condition.mean
        std = condition.std
        if std is None:
            std = float(np.std(rewards)) if min(rewards) < max(rewards) else 0.0
    if not all(map(math.isfinite, (mean, std, (max(rewards) - mean) / (std or 1.0), (min(rewards) - mean) / (std or 1.0)))):
        raise UserError(f"{source}: {data.reward_column}: rewards of {min(rewards):g} to {max(rewards):g} cannot be normalised")
    return Normalisation(mean, std)


def _of_score(row: Row, data: sections.Data, condition: Condition, normalisation: Normalisation) -> str:
    reward = row.finite(data.reward_column)
    text = normalisation.text(reward, condition.decimals)
    if not math.isfinite(float(text)):
        raise row.error(f"{data.reward_column}: {reward:g} with mean {normalisation.mean:g} and std {normalisation.std:g} is not finite")
    return text


def _of_class(row: Row, data: sections.Data, condition: Condition) -> tuple[str, float]:
    name = row.values.get(data.class_column)
    if name is None:
        raise row.error(f"{data.class_column}: missing")
    if not isinstance(name, str):
        raise row.error(f"{data.class_column}: must be text, not {type(name).__name__}")
    known = condition.classes.get(name)
    if known is None:
        raise row.error(f"{data.class_column}: unknown class {name!r}; one of {', '.join(condition.classes)}")
    return known.text, known.weight


def _conditioned(row: Row, template: str, prompt: Content) -> Content:
    try:
        return apply_template(template, prompt)
    except ValueError as error:
        raise row.error(str(error)) from None
