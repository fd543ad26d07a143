"""Mathematical answers, compared as mathematics: ½ is 0.5."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

from conveyor.rewards.functions import text_of

SECONDS = 5
"""For reading one answer and for comparing two. A completion that takes longer is wrong."""

DELIMITERS = ("$", "\\(", "\\[", "\\boxed", "\\begin")

# Its warnings that time-outs are off would come for every sample.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the completion's last answer (LaTeX, or a plain number) equals the row's `answer` as math-verify sees it, else 0.

    None where the row has no answer, or one that math-verify cannot read.
    """
    return [_score(text_of(completion), expected) for completion, expected in zip(completions, answer, strict=True)]


def _score(text: str, expected: Any) -> float | None:
    if expected is None:
        return None
    # Its time limits are alarms, which only the main thread can set; elsewhere the reward's own time limit holds.
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    expected = str(expected)
    # A formula without delimiters would be searched for its last number.
    marked = expected if any(mark in expected for mark in DELIMITERS) else f"${expected}$"
    gold = parse(marked, parsing_timeout=seconds) or parse(expected, parsing_timeout=seconds)
    if not gold:
        return None
    return float(verify(gold, parse(text, parsing_timeout=seconds), timeout_seconds=seconds))
