"""KTO, its APO-zero form and BCO: hand-computed values, TRL's own code, mismatched rows (case 12)."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conveyor.algorithms.unpaired_losses import RewardShift, apo_zero_unpaired_losses, bco_losses, kto_kl, kto_losses, mismatched
from tests.algorithms.batches import mask, rows

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
LOGPROBS, REFERENCE, DESIRABLE = rows(-1.0, -2, -3, -4), rows(-2.0, -2, -1, -7), mask(1, 0, 1, 0)  # h: 1, 0, −2, 3
WEIGHTS = dict(desirable_weight=2.0, undesirable_weight=0.5)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_kto_by_hand():
    logprobs = LOGPROBS.clone().requires_grad_()
    losses = kto_losses(logprobs, REFERENCE, DESIRABLE, kl=torch.tensor(0.5), beta=0.4, **WEIGHTS)
    wanted = [2 * (1 - sigmoid(0.2)), 0.5 * (1 - sigmoid(0.2)), 2 * (1 - sigmoid(-1.0)), 0.5 * (1 - sigmoid(-1.0))]
    torch.testing.assert_close(losses, rows(*wanted), **CLOSE)
    losses.sum().backward()
    slope = [0.4 * sigmoid(x) * sigmoid(-x) for x in (0.2, 0.2, -1.0, -1.0)]
    torch.testing.assert_close(logprobs.grad, rows(-2 * slope[0], 0.5 * slope[1], -2 * slope[2], 0.5 * slope[3]), **CLOSE)


def test_the_kl_is_a_constant():
    logprobs = LOGPROBS.clone().requires_grad_()
    kl = (logprobs - REFERENCE).mean()
    (grad,) = torch.autograd.grad(kto_losses(logprobs, REFERENCE, DESIRABLE, kl=kl, beta=0.4).sum(), logprobs)
    fixed = kto_losses(logprobs, REFERENCE, DESIRABLE, kl=kl.detach(), beta=0.4).sum()
    assert torch.equal(grad, torch.autograd.grad(fixed, logprobs)[0])
    assert not kto_kl(logprobs, REFERENCE).requires_grad


def test_kl_is_a_mean_of_the_whole_and_never_negative():
    assert kto_kl(LOGPROBS, REFERENCE).item() == 0.5
    assert kto_kl(REFERENCE, LOGPROBS).item() == 0.0


def test_apo_zero_unpaired_by_hand():
    losses = apo_zero_unpaired_losses(LOGPROBS, REFERENCE, DESIRABLE, beta=0.4, **WEIGHTS)
    wanted = rows(2 * (1 - sigmoid(0.4)), 0.5 * sigmoid(0.0), 2 * (1 - sigmoid(-0.8)), 0.5 * sigmoid(1.2))
    torch.testing.assert_close(losses, wanted, **CLOSE)


def test_bco_by_hand():
    """Rewards 0.4, 0, −0.8, 1.2, shifted by 0.1."""
    losses = bco_losses(LOGPROBS, REFERENCE, DESIRABLE, delta=0.1, beta=0.4, **WEIGHTS)
    wanted = [-2 * math.log(sigmoid(0.3)), -0.5 * math.log(sigmoid(0.1)), -2 * math.log(sigmoid(-0.9)), -0.5 * math.log(sigmoid(-1.1))]
    torch.testing.assert_close(losses, rows(*wanted), **CLOSE)


def test_finite_at_extreme_log_ratios():
    for h in (1e4, -1e4):
        logprobs = rows(h, h).requires_grad_()
        reference, desirable = torch.zeros(2), mask(1, 0)
        losses = kto_losses(logprobs, reference, desirable, kl=torch.tensor(0.0), beta=1.0)
        losses = losses + apo_zero_unpaired_losses(logprobs, reference, desirable, beta=1.0)
        losses = losses + bco_losses(logprobs, reference, desirable, delta=0.0, beta=1.0)
        losses.sum().backward()
        assert torch.isfinite(losses).all() and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ("abc", [2, 0, 1]),  # case 12: n = 3
        ("ab", [1, 0]),
        ("aab", [2, 2, 1]),
        ("aabbc", [4, 4, 1, 1, 3]),
        ("aba", [1, 0, 1]),  # the row before the first one has its prompt
        ("baa", [2, 0, 0]),
        ("aaa", [2, 0, 1]),  # no other prompt: still never itself
    ],
)
def test_mismatched_rows(prompts, wanted):
    assert mismatched(list(prompts)) == wanted


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_mismatched_is_the_nearest_of_another_prompt(prompts):
    found, n = mismatched(prompts), len(prompts)
    for row, partner in enumerate(found):
        back = [(row - distance) % n for distance in range(1, n)]
        assert partner == next((other for other in back if prompts[other] != prompts[row]), back[0])
        assert partner != row


@pytest.mark.parametrize("prompts", [[], ["alone"]])
def test_fewer_than_two_rows_are_refused(prompts):
    with pytest.raises(ValueError, match="it needs 2"):
        mismatched(prompts)


def test_reward_shift_is_of_all_updates():
    empty = torch.zeros(0)
    shift = RewardShift()
    assert shift.delta == 0
    shift = shift.updated(rows(1.0, 3.0), empty)
    assert shift.delta == 2.0  # the one mean there is
    shift = shift.updated(rows(5.0), rows(-1.0, 0.0))
    assert shift.delta == pytest.approx((3.0 - 0.5) / 2)
    shift = shift.updated(empty, rows(-2.0))
    assert shift.delta == pytest.approx((3.0 - 1.0) / 2)
    assert RewardShift().updated(empty, rows(-2.0)).delta == -2.0


def test_reward_shift_goes_on_from_its_state():
    shift = RewardShift().updated(rows(0.1, 0.7), rows(-0.3))
    state = shift.state()
    assert all(isinstance(value, int | float) for value in state.values())
    assert RewardShift(**state) == shift


@pytest.mark.slow  # importing TRL's trainer takes many seconds
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_trl(loss_type):
    """The real `KTOTrainer._compute_loss` on a trainer that was never initialised, whose forward pass gives the log-probs."""
    module = pytest.importorskip("trl.trainer.kto_trainer")
    logprobs = LOGPROBS.clone().requires_grad_()
    kl_logprobs, kl_reference = rows(-3.0, -2, -4, -1), rows(-4.0, -2, -4, -3)
    calculate_kl = loss_type == "kto"

    class Bare(module.KTOTrainer):
        def __init__(self):
            self.model = SimpleNamespace(training=True)
            self.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda tensor: tensor)
            self.loss_type, self.beta, self.desirable_weight, self.undesirable_weight = loss_type, 0.4, 2.0, 0.5
            self.aux_loss_enabled, self.precompute_ref_logps, self.calculate_KL = False, True, calculate_kl
            self._metrics, self._total_train_tokens, self._tp_size = {"train": defaultdict(list)}, 0, 1

        def _compute_kl_logps(self, model, batch):
            return kl_logprobs if calculate_kl else None

    one_token = torch.tensor([[0, 1]] * 4)
    outputs = SimpleNamespace(log_probs=logprobs[:, None], entropy=torch.zeros(4, 1), mean_logits=torch.zeros(4, 1))
    inputs = {name: one_token for name in ("input_ids", "attention_mask", "completion_mask")}
    inputs |= {"label": DESIRABLE, "ref_logps": REFERENCE, "ref_KL_logps": kl_reference}
    theirs = Bare()._compute_loss(lambda **kwargs: outputs, inputs, return_outputs=False)

    if calculate_kl:
        kl = kto_kl(kl_logprobs, kl_reference)
        assert kl.item() == 0.75
        ours = kto_losses(logprobs, REFERENCE, DESIRABLE, kl=kl, beta=0.4, **WEIGHTS)
    else:
        ours = apo_zero_unpaired_losses(logprobs, REFERENCE, DESIRABLE, beta=0.4, **WEIGHTS)
    torch.testing.assert_close(ours.sum() / 4, theirs, **CLOSE)
    grads = [torch.autograd.grad(loss, logprobs)[0] for loss in (ours.sum() / 4, theirs)]
    torch.testing.assert_close(*grads, **CLOSE)
