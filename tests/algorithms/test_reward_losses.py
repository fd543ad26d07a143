"""Losses of reward models: hand-computed values, and TRL's own code."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from conveyor.algorithms.reward_losses import bradley_terry, step_losses
from tests.algorithms.batches import rows

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
CHOSEN, REJECTED, MARGINS = rows(1.0, -0.5), rows(0.2, 1.0), rows(0.3, 1.0)  # differences 0.8 and −1.5


def nls(x):
    """−log σ(x)."""
    return math.log1p(math.exp(-x))


def test_bradley_terry_by_hand():
    torch.testing.assert_close(bradley_terry(CHOSEN, REJECTED), rows(nls(0.8), nls(-1.5)), **CLOSE)
    torch.testing.assert_close(bradley_terry(CHOSEN, REJECTED, margins=MARGINS), rows(nls(0.5), nls(-2.5)), **CLOSE)
    smoothed = rows(0.9 * nls(0.8) + 0.1 * nls(-0.8), 0.9 * nls(-1.5) + 0.1 * nls(1.5))
    torch.testing.assert_close(bradley_terry(CHOSEN, REJECTED, label_smoothing=0.1), smoothed, **CLOSE)
    centred = rows(nls(0.8) + 0.01 * 1.2**2, nls(-1.5) + 0.01 * 0.5**2)
    torch.testing.assert_close(bradley_terry(CHOSEN, REJECTED, centre_coef=0.01), centred, **CLOSE)


def test_only_the_centring_sees_the_level_of_the_scores():
    plain = bradley_terry(CHOSEN, REJECTED, margins=MARGINS, label_smoothing=0.1)
    torch.testing.assert_close(bradley_terry(CHOSEN + 7, REJECTED + 7, margins=MARGINS, label_smoothing=0.1), plain, atol=1e-5, rtol=1e-5)
    assert (bradley_terry(CHOSEN + 7, REJECTED + 7, centre_coef=0.01) > bradley_terry(CHOSEN, REJECTED, centre_coef=0.01)).all()


def test_steps_by_hand():
    losses = step_losses(rows(0.5, 0.5, -2.0), rows(1, 0, 0.25))
    torch.testing.assert_close(losses, rows(nls(0.5), nls(-0.5), 0.25 * nls(-2.0) + 0.75 * nls(2.0)), **CLOSE)


def test_finite_at_extreme_scores():
    scores = rows(1e4, -1e4).requires_grad_()
    losses = bradley_terry(scores, -scores, label_smoothing=0.1) + step_losses(scores, rows(0, 1))
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(scores.grad).all()


@pytest.mark.slow  # importing TRL's trainer takes many seconds
@pytest.mark.parametrize("margins", [None, MARGINS])
def test_trl(margins):
    """The real `RewardTrainer.compute_loss` on a trainer that was never initialised, whose forward pass gives the scores."""
    module = pytest.importorskip("trl.trainer.reward_trainer")
    scores = torch.cat([CHOSEN, REJECTED]).requires_grad_()

    class Bare(module.RewardTrainer):
        def __init__(self):
            self.model, self.args = SimpleNamespace(training=True), SimpleNamespace(center_rewards_coefficient=0.01)
            self.accelerator = SimpleNamespace(gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor)
            self._metrics, self._total_train_tokens, self._tp_size = {"train": defaultdict(list)}, 0, 1

    inputs = {"attention_mask": torch.ones(4, 3)} | ({} if margins is None else {"margin": margins})
    theirs = Bare().compute_loss(lambda **kwargs: SimpleNamespace(logits=scores[:, None]), inputs)
    ours = bradley_terry(scores[:2], scores[2:], margins=margins, centre_coef=0.01).sum() / 2
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(ours, scores)[0], torch.autograd.grad(theirs, scores)[0], **CLOSE)
