"""How positive a text is, by a lexicon: VADER (Hutto and Gilbert 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from conveyor.rewards.functions import text_of


def sentiment(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
    """VADER's compound score of each completion: −1 most negative … 1 most positive."""
    return [_analyzer().polarity_scores(text_of(completion))["compound"] for completion in completions]


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()
