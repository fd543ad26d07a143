"""Reward function: the completion is the answer, letter for letter. Rows need an `answer` column."""


def reward(prompts, completions, answer, **columns):
    """1 where a completion (text, or messages where the prompt was messages) is its row's answer, else 0."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]
