"""Reward function: sums such as `4 - 1 - 7`, scored by reasoning-gym. Rows need an `answer` column."""

import re

from reasoning_gym import get_score_answer_fn

score_answer = get_score_answer_fn("chain_sum")


def reward(prompts, completions, answer, **columns):
    """1 where the last number of the completion is the answer, else 0."""
    return [
        score_answer(last_number(text_of(completion)), {"answer": right}) for completion, right in zip(completions, answer, strict=True)
    ]


def text_of(completion):
    """A completion is text where the prompt was text, and messages where it was messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_number(text):
    """`the answer is 1,024.` → `1024`; None without a number."""
    numbers = re.findall(r"-?\d[\d,]*", text)
    return numbers[-1].replace(",", "") if numbers else None
