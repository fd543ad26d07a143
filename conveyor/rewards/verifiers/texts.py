"""Verifiers that look at the text alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from conveyor.rewards.functions import text_of


def regex(prompts: Sequence[Any], completions: Sequence[Any], pattern: str, match: str = "search") -> list[float]:
    """1 where the completion has the pattern, else 0. A dot matches line ends, too.

    Args:
        match: `search`, anywhere; or `full`, the whole completion.

    Raises:
        ValueError: a pattern that is none, or another `match`.
    """
    compiled = _compiled(pattern, match)
    find = compiled.search if match == "search" else compiled.fullmatch
    return [float(find(text_of(completion)) is not None) for completion in completions]


def format(prompts: Sequence[Any], completions: Sequence[Any], tags: Sequence[str] = ("think", "answer")) -> list[float]:
    """1 where the completion is `<think>…</think> <answer>…</answer>`: each tag once, in their order, nothing but space around."""
    _check_tags(tags)
    whole = re.compile(r"\s*".join(["", *(f"<{tag}>.*?</{tag}>" for tag in tags), ""]), re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    texts = map(text_of, completions)
    return [float(all(text.count(mark) == 1 for mark in marks) and whole.fullmatch(text) is not None) for text in texts]


def exact_answer(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any],
    tag: str | None = None,
    ignore_case: bool = False,
) -> list[float | None]:
    """1 where the completion is the row's `answer`, space around them aside, else 0; None where the row has none.

    Args:
        tag: compare what stands in the last `<tag>…</tag>` only; without it the completion is wrong.
    """
    if tag is not None:
        _check_tags([tag])

    def plain(text: str) -> str:
        return text.strip().lower() if ignore_case else text.strip()

    def right(completion: Any, expected: Any) -> float | None:
        found = tagged(text_of(completion), tag) if tag is not None else text_of(completion)
        return None if expected is None else float(found is not None and plain(found) == plain(str(expected)))

    return [right(completion, expected) for completion, expected in zip(completions, answer, strict=True)]


def length_penalty(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], limit: int, buffer: int = 0
) -> list[float]:
    """0 up to limit − buffer tokens, then falling linearly to −1 at the limit, and −1 beyond: DAPO's soft penalty
    (Yu et al. 2025, eq. 13). Without a buffer: −1 from one token over the limit on.

    Raises:
        ValueError: not 0 ≤ buffer ≤ limit, or a limit of 0.
    """
    _check_limit(limit, buffer)
    overs = [len(ids) - (limit - buffer) for ids in completion_ids]
    return [-min(1.0, max(0, over) / max(buffer, 1)) if over > 0 else 0.0 for over in overs]


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last `<tag>…</tag>`; None: there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    if start < 0:
        return None
    return text[start + len(opening) : text.index(closing, start)]


def _compiled(pattern: Any = None, match: Any = "search") -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ValueError("pattern: give a regular expression in `arguments`")
    if match not in ("search", "full"):
        raise ValueError(f"match: {match!r} is neither search nor full")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern: {pattern!r} is no regular expression: {error}") from None


def _check_tags(tags: Any) -> None:
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and re.fullmatch(r"\w+", tag) for tag in tags):
        raise ValueError(f"tags are names such as think, not {tags!r}")


def _check_exact(tag: Any = None, ignore_case: Any = False, **_: Any) -> None:
    if tag is not None:
        _check_tags([tag])
    if not isinstance(ignore_case, bool):
        raise ValueError(f"ignore_case: {ignore_case!r} is neither true nor false")


def _check_limit(limit: Any = None, buffer: Any = 0) -> None:
    if not isinstance(limit, int) or not isinstance(buffer, int) or limit <= 0 or not 0 <= buffer <= limit:
        raise ValueError(f"limit, buffer: {limit}, {buffer}: tokens, 0 ≤ buffer ≤ limit and limit > 0")


def _check_format(tags: Any = ("think", "answer")) -> None:
    _check_tags(tags)


# `load_function` calls these when the recipe is loaded.
regex.check_arguments = _compiled  # type: ignore[attr-defined]
format.check_arguments = _check_format  # type: ignore[attr-defined]
exact_answer.check_arguments = _check_exact  # type: ignore[attr-defined]
length_penalty.check_arguments = _check_limit  # type: ignore[attr-defined]
