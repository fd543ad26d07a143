"""Tasks of reasoning-gym, judged by the task's own scorer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.factory import DATASETS

from conveyor.rewards.functions import text_of
from conveyor.rewards.verifiers.texts import tagged


def reasoning_gym(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    metadata: Sequence[Any] | None = None,
    dataset: str | Sequence[str] | None = None,
    tag: str | None = "answer",
) -> list[float]:
    """The task's own score of what stands in the last `<answer>…</answer>`, or of the whole completion where there is no such tag.

    Rows are entries of a reasoning-gym dataset: `answer`, and `metadata` as an object or as JSON text.

    Args:
        dataset: the task's name, of all rows (an argument) or row by row (a column); default: `metadata["source_dataset"]`.
        tag: null: always the whole completion.

    Raises:
        ValueError: a row names no task.
    """
    count = len(completions)
    names = [dataset] * count if dataset is None or isinstance(dataset, str) else list(dataset)
    told = [_object(entry) for entry in (metadata or [None] * count)]
    answers = answer or [None] * count
    return [
        _score(text_of(completion), {"answer": right, "metadata": entry}, name or entry.get("source_dataset"), tag)
        for completion, right, entry, name in zip(completions, answers, told, names, strict=True)
    ]


def _score(text: str, entry: dict[str, Any], name: str | None, tag: str | None) -> float:
    found = None if tag is None else tagged(text, tag)
    return float(_scorer(name)((text if found is None else found).strip(), entry))


def _object(metadata: Any) -> dict[str, Any]:
    return json.loads(metadata) if isinstance(metadata, str) else dict(metadata or {})


@cache
def _scorer(name: str | None) -> Callable[[str, dict[str, Any]], float]:
    """A dataset of the task is made for it, which takes a moment."""
    if name is None:
        raise ValueError("name the reasoning-gym dataset: an argument or column `dataset`, or source_dataset in the column `metadata`")
    _check(name)
    return get_score_answer_fn(name)


def _check(dataset: Any = None, **_: Any) -> None:
    if dataset is not None and dataset not in DATASETS:
        raise ValueError(f"dataset: reasoning-gym has no {dataset!r}")


reasoning_gym.check_arguments = _check  # type: ignore[attr-defined]
