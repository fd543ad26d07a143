"""The loss of pairs: known right values (hand-computed)."""

import math

import pytest
import torch

from conveyor.algorithms.metrics import Mean
from conveyor.algorithms.preferences import dpo_loss
from tests.algorithms.batches import NAN, mask, rows


def test_pairs_by_hand():
    """h: 0.5 and −1 (margin 1.5, group 7); 0.2 (group 3, alone); −0.3 and 0.1 with an idle third (margin −0.4, group 5)."""
    logprobs = rows([-1.0, -1.0], [-2.0, -2.0], [-1.0, NAN], [-1.3, NAN], [-4.0, NAN], [-0.9, NAN]).requires_grad_()
    reference = rows([-1.2, -1.3], [-1.5, -1.5], [-1.2, NAN], [-1.0, NAN], [-1.0, NAN], [-1.0, NAN])
    kept = mask([1, 1], [1, 1], [1, 0], [1, 0], [1, 0], [1, 0])
    signs, groups = torch.tensor([1.0, -1, 1, 1, 0, -1]), torch.tensor([7, 7, 3, 5, 5, 5])
    loss, metrics = dpo_loss(logprobs, reference, kept, signs, groups, beta=0.5, kind="sigmoid")
    (grad,) = torch.autograd.grad(loss, logprobs)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert loss.item() == pytest.approx(-math.log(sigmoid(0.75)) - math.log(sigmoid(-0.2)), rel=1e-6)
    first, second = 0.5 * sigmoid(-0.75), 0.5 * sigmoid(0.2)  # −d loss / d margin
    torch.testing.assert_close(grad, rows([-first] * 2, [first] * 2, [0, 0], [-second, 0], [0, 0], [second, 0]))
    assert metrics["loss/policy"] == Mean(pytest.approx(loss.item()), 2)
    assert metrics["dpo/accuracy"] == Mean(1.0, 2)
    assert metrics["dpo/margin"] == Mean(pytest.approx(0.5 * (1.5 - 0.4), rel=1e-5), 2)

    loss, _ = dpo_loss(logprobs, reference, kept, signs, groups, beta=0.5, kind="ipo")
    assert loss.item() == pytest.approx((1.5 - 1) ** 2 + (-0.4 - 1) ** 2, rel=1e-5)


def test_equal_policies_give_log_two():
    logprobs = torch.randn(4, 3)
    loss, metrics = dpo_loss(
        logprobs, logprobs, mask(*[[1, 1, 1]] * 4), rows(1, -1, -1, 1), torch.tensor([0, 0, 1, 1]), beta=0.1, kind="sigmoid"
    )
    assert loss.item() == pytest.approx(2 * math.log(2))
    assert metrics["dpo/accuracy"] == Mean(0.0, 2) and metrics["dpo/margin"] == Mean(0.0, 2)


def test_an_answer_that_is_left_out_of_the_loss_makes_no_pair():
    """As a truncated one, where those are masked."""
    logprobs = torch.zeros(2, 2, requires_grad=True)
    loss, metrics = dpo_loss(logprobs, torch.ones(2, 2), mask([1, 1], [0, 0]), rows(1, -1), torch.tensor([0, 0]), beta=0.1, kind="sigmoid")
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all() and metrics["loss/policy"] == Mean(0.0, 0)
