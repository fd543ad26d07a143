"""From logits to tokens, against hand computations."""

import math

import torch

from conveyor.models.sampling import Draws, log_distribution, sample

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0]])


def probabilities(temperature: float, top_k: int = -1, top_p: float = 1.0) -> list[float]:
    return log_distribution(LOGITS, torch.tensor([temperature]), top_k, top_p)[0].exp().tolist()


def by_hand(logits: list[float]) -> list[float]:
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def close(found: list[float], right: list[float]) -> bool:
    return all(abs(a - b) < 1e-6 for a, b in zip(found, right, strict=True))


def test_temperature() -> None:
    """Case 2: logits [2, 0] at temperature 0.5."""
    assert abs(float(log_distribution(torch.tensor([[2.0, 0.0]]), torch.tensor([0.5]), -1, 1.0)[0, 0]) + 0.0181) < 1e-4
    assert close(probabilities(0.5), by_hand([4.0, 0.0, 2.0, -2.0]))


def test_top_k_keeps_ties() -> None:
    kept = by_hand([2.0, 1.0])
    assert close(probabilities(1.0, top_k=2), [kept[0], 0, kept[1], 0])
    tied = log_distribution(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([1.0]), 1, 1.0)[0]
    assert tied.exp().tolist() == [0.5, 0, 0.5, 0]
    assert close(probabilities(1.0, top_k=9), probabilities(1.0)) and close(probabilities(1.0, top_k=0), probabilities(1.0))


def test_top_p_is_the_smallest_nucleus_after_temperature_and_top_k() -> None:
    """Probabilities are 0.644, 0.087, 0.237, 0.032."""
    two = by_hand([2.0, 1.0])
    assert close(probabilities(1.0, top_p=0.65), [two[0], 0, two[1], 0])
    assert close(probabilities(1.0, top_p=0.6), [1, 0, 0, 0])
    assert close(probabilities(1.0, top_p=1e-9), [1, 0, 0, 0])
    assert close(probabilities(0.5, top_p=0.65), [1, 0, 0, 0])  # 0.864 at this temperature
    assert close(probabilities(1.0, top_k=2, top_p=0.72), [1, 0, 0, 0])  # 0.731 of the two that are left


def test_greedy_rows_are_whole_and_at_temperature_1() -> None:
    logits = LOGITS.repeat(2, 1)
    tokens, logprobs = sample(logits, torch.tensor([0.0, 0.5]), torch.tensor([0.999, 0.999], dtype=torch.float64), top_k=1, top_p=0.5)
    assert tokens.tolist() == [0, 0]
    assert abs(float(logprobs[0]) - math.log(by_hand([2.0, 0.0, 1.0, -1.0])[0])) < 1e-6 and float(logprobs[1]) == 0


def test_a_draw_chooses_where_the_cumulative_distribution_passes_it() -> None:
    logits = torch.tensor([0.1, 0.2, 0.0, 0.7]).log().repeat(6, 1)
    draws = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.ones(6), draws)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.1, 0.1, 0.2, 0.2, 0.7, 0.7]))
    ended = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert sample(ended, torch.ones(1), torch.tensor([1 - 2**-53], dtype=torch.float64))[0].tolist() == [1], "not what has probability 0"


def test_samples_have_the_distribution() -> None:
    count = 20_000
    draws = Draws(3)
    logits = LOGITS.repeat(count, 1)
    tokens, _ = sample(logits, torch.full((count,), 0.7), torch.tensor([draws.next() for _ in range(count)], dtype=torch.float64), top_k=3)
    found = (tokens.bincount(minlength=4) / count).tolist()
    assert all(abs(a - b) < 0.015 for a, b in zip(found, probabilities(0.7, top_k=3), strict=True))


def test_draws_are_the_seeds_own() -> None:
    one, other = Draws(5), Draws(6)
    mixed = [(one.next(), other.next()) for _ in range(150)]
    alone = Draws(5)
    assert [alone.next() for _ in range(150)] == [first for first, _ in mixed]
    assert len({value for pair in mixed for value in pair}) == 300 and all(0 <= value < 1 for pair in mixed for value in pair)
