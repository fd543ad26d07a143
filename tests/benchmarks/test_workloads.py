"""Forced lengths and shapes are what the page says."""

import numpy as np
import pytest
import torch

from benchmarks.forced_lengths import CAP, MEAN, RowLengths, force, length_of
from benchmarks.sleeping_runs import Shape


def test_lengths_follow_from_the_seed_and_have_the_mean() -> None:
    lengths = [length_of(seed) for seed in range(4000)]
    assert lengths == [length_of(seed) for seed in range(4000)]
    assert min(lengths) >= 1 and max(lengths) == CAP
    assert np.mean(lengths) == pytest.approx(MEAN, rel=0.03)


def test_a_row_ends_with_the_end_token_at_its_length_and_not_before() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0], [0.0, 1.0, -torch.inf]])
    forced = force(logits, torch.tensor([False, True]), end_token=2)
    inf = torch.inf
    assert forced.tolist() == [[0.0, 1.0, -inf], [-inf, -inf, 0.0]]


def test_rows_count_their_tokens() -> None:
    rows = RowLengths([1, 3], end_token=0)
    ends = [rows(torch.zeros(2, 1), torch.zeros(2, 2)).argmax(1).tolist() for _ in range(3)]
    assert ends == [[0, 1], [0, 1], [0, 0]]


def test_a_shape_counts_micro_batches_and_waves() -> None:
    shape = Shape(steps=2, groups=32, group_size=4, micro_batch=8, slots=8)
    assert (shape.micro_batches, shape.waves) == (16, 2.0)
    assert set(shape.lengths(0.5, 0.0).values()) == {0.5} and len(shape.lengths(0.5, 0.0)) == 2 * 32 * 4
