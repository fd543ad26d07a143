"""Importance weights and the divergence of the policy that sampled: known right values (hand-computed)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.algorithms.metrics import Max, Mean
from conveyor.algorithms.mismatch import importance_weights, mismatch_metrics
from tests.algorithms.batches import CORRECTIONS, NAN, mask, random_batch, rows

E = math.exp


@pytest.mark.parametrize(
    ("correction", "first", "second"),
    [  # gaps −0.5, 0.5, 200 in the first row, 0.4 and 0.2 in the second: W = e^200 and e^0.6 = 1.82
        ("token_truncate", [E(-0.5), 1.5, 1.5, 0], [E(0.4), E(0.2), 0, 0]),
        ("token_mask", [E(-0.5), 0, 0, 0], [E(0.4), E(0.2), 0, 0]),
        ("sequence_truncate", [1.5, 1.5, 1.5, 0], [1.5, 1.5, 0, 0]),
        ("sequence_mask", [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_weights_by_hand(correction, first, second):
    old = rows([0.0, 0.0, 0.0, 5.0], [-1.0, -1.0, 0.0, 0.0]).requires_grad_()
    rollout, kept = rows([0.5, -0.5, -200.0, NAN], [-1.4, -1.2, NAN, 5.0]), mask([1, 1, 1, 0], [1, 1, 0, 0])
    weights = importance_weights(old, rollout, kept, 1.5, correction)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, rows(first, second))


def test_weights_within_the_cap_are_exact():
    """Gaps 1.4, −0.2 and 0.1: all three have the weight e^1.3, and by token their own."""
    arguments = rows([-1.0, -1.0, -1.0]), rows([-2.4, -0.8, -1.1]), mask([1, 1, 1]), 5.0
    for correction in ("sequence_truncate", "sequence_mask"):
        torch.testing.assert_close(importance_weights(*arguments, correction), rows([E(1.3)] * 3))
    for correction in ("token_truncate", "token_mask"):
        torch.testing.assert_close(importance_weights(*arguments, correction), rows([E(1.4), E(-0.2), E(0.1)]))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_without_a_gap_every_weight_is_one(correction):
    logprobs, kept = torch.randn(3, 4), mask([1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0])
    assert torch.equal(importance_weights(logprobs, logprobs, kept, 2.0, correction), kept.float())
    metrics = mismatch_metrics(logprobs, logprobs, kept, 2.0, correction)
    assert metrics == {
        "rollout_mismatch/max": Max(0.0),
        "rollout_mismatch/mean": Mean(0.0, 6),
        "rollout_mismatch/kl": Mean(0.0, 6),
        "importance_weight/mean": Mean(6.0, 6),
        "importance_weight/cut_fraction": Mean(0.0, 6),
    }


def test_metrics_by_hand():
    """Gaps 0.5 and −1: KL by k3, w − 1 − log w with w = π_old/π_rollout."""
    metrics = mismatch_metrics(rows([-1.0, -3.0, NAN]), rows([-1.5, -2.0, 0.0]), mask([1, 1, 0]), 1.2, "token_mask")
    assert metrics["rollout_mismatch/max"] == Max(1.0)
    assert metrics["rollout_mismatch/mean"] == Mean(1.5, 2)
    assert metrics["rollout_mismatch/kl"].total == pytest.approx((E(0.5) - 1 - 0.5) + (E(-1) - 1 + 1))
    assert metrics["importance_weight/mean"].total == pytest.approx(E(-1))
    assert metrics["importance_weight/cut_fraction"] == Mean(1.0, 2)
    assert not any(name.startswith("importance") for name in mismatch_metrics(rows([0.0]), rows([0.0]), mask([1])))


def test_the_kl_is_that_of_the_policies():
    """Expectation over tokens of the policy that samples, taken exactly."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    rollout, old = torch.log_softmax(logits, 1)
    kl = (rollout.exp() * (rollout - old)).sum().item()
    estimates = [
        mismatch_metrics(o.view(1, 1), r.view(1, 1), mask([1]))["rollout_mismatch/kl"].total for o, r in zip(old, rollout, strict=True)
    ]
    assert (rollout.exp() * torch.tensor(estimates)).sum().item() == pytest.approx(kl, rel=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), correction=st.sampled_from(CORRECTIONS), cap=st.sampled_from([0.5, 1.0, 2.0]))
def test_weights_lie_within_the_cap_and_do_not_depend_on_the_other_samples(seed, correction, cap):
    (old, rollout, *_), kept = random_batch(seed)
    weights = importance_weights(old, rollout, kept, cap, correction)
    assert (weights >= 0).all() and (weights <= cap).all() and (weights[~kept] == 0).all()
    for i in range(len(old)):
        alone = importance_weights(old[i : i + 1], rollout[i : i + 1], kept[i : i + 1], cap, correction)
        torch.testing.assert_close(alone[0], weights[i], atol=0, rtol=0)
