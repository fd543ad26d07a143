"""The same tensors through TRL's own code (a test-only dependency) and through ours, within 1e-6.

* policy loss and KL loss: the real `GRPOTrainer._compute_loss`, on a trainer that was never initialised, whose forward
  pass is replaced by given log-probs. Its `bnpo` loss is PPO's token mean, its `grpo` loss the mean of sequence means.
* group advantages: TRL computes them inside `_generate_and_score_completions`, which cannot be called without a model and
  data. Its `nanstd` is called here; the lines round it (TRL 1.16 trainer/grpo_trainer.py, "sum_then_normalize", and
  rloo_trainer.py, "RLOO advantages computation") are recomputed.
* GAE and the value loss: TRL 1.16 has no PPO trainer any more. GAE is recomputed as TRL's last one did it: backwards
  over columns, padding zeroed beforehand, then masked whitening with the unbiased variance.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from conveyor.algorithms.advantages import gae, group_advantages, moments, whiten, whitening
from conveyor.algorithms.losses import importance_weights, kl_estimate, kl_loss, policy_loss

pytestmark = pytest.mark.slow  # importing TRL's trainer takes many seconds

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
LOW, HIGH = 0.2, 0.28


@pytest.fixture(scope="module")
def grpo_trainer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer")


@pytest.fixture(scope="module")
def compute_loss(grpo_trainer):
    """(inputs, log-probs [B, S], loss_type, beta, use_weights) → (TRL's loss, its metrics)."""

    class Bare(grpo_trainer.GRPOTrainer):
        def __init__(self, logprobs, loss_type, beta, use_weights):
            self._logprobs = logprobs
            self.model = SimpleNamespace(training=True)
            self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False)
            self.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
            self.loss_type, self.beta, self.epsilon_low, self.epsilon_high = loss_type, beta, LOW, HIGH
            self.importance_sampling_level, self.top_entropy_quantile, self.off_policy_mask_threshold = "token", 1.0, None
            self.use_vllm = self.vllm_importance_sampling_correction = use_weights
            self.current_gradient_accumulation_steps = 1
            self.aux_loss_enabled = self._entropy_bonus_enabled = False
            self._metrics = {"train": defaultdict(list)}

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return self._logprobs, torch.zeros_like(self._logprobs), None

    def compute(inputs, logprobs, loss_type, beta=0.0, use_weights=False):
        trainer = Bare(logprobs, loss_type, beta, use_weights)
        return trainer._compute_loss(None, inputs), {name: values[0] for name, values in trainer._metrics["train"].items()}

    return compute


@pytest.fixture
def batch():
    """Tensors [4, 7] of sampled tokens with wide ratios, so that both sides of the clip are met."""
    generator = torch.Generator().manual_seed(11)
    logprobs = -2 * torch.rand(4, 7, generator=generator)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [5]])
    noise = lambda scale: scale * torch.randn(4, 7, generator=generator)  # noqa: E731
    return SimpleNamespace(
        logprobs=logprobs.requires_grad_(),
        old=logprobs.detach() + noise(0.4),
        rollout=logprobs.detach() + noise(0.6),
        reference=logprobs.detach() + noise(0.8),
        advantages=torch.randn(4, generator=generator),
        mask=mask,
    )


def trl_inputs(batch, **more):
    prompt = torch.ones(4, 2, dtype=torch.long)
    return {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": torch.ones(4, 7, dtype=torch.long),
        "completion_mask": batch.mask.long(), "advantages": batch.advantages, "old_per_token_logps": batch.old, **more,
    }  # fmt: skip


def ours(batch, aggregation, **more):
    advantages = batch.advantages[:, None].expand(-1, 7)
    return policy_loss(batch.logprobs, batch.old, advantages, batch.mask, clip_low=LOW, clip_high=HIGH, aggregation=aggregation, **more)


def same(batch, loss, trl_loss):
    torch.testing.assert_close(loss, trl_loss, **CLOSE)
    gradients = [torch.autograd.grad(value, batch.logprobs, retain_graph=True)[0] for value in (loss, trl_loss)]
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize(("loss_type", "aggregation", "denominator"), [("bnpo", "token_mean", 16), ("grpo", "sequence_mean", 4)])
def test_policy_loss(compute_loss, batch, loss_type, aggregation, denominator):
    trl_loss, trl_metrics = compute_loss(trl_inputs(batch), batch.logprobs, loss_type)
    loss, metrics = ours(batch, aggregation)
    same(batch, loss / denominator, trl_loss)
    assert metrics["clip_fraction"].value == pytest.approx(trl_metrics["clip_ratio/region_mean"], abs=1e-6)
    assert metrics["clip_fraction"].value > 0


@pytest.mark.parametrize(("loss_type", "aggregation", "denominator"), [("bnpo", "token_mean", 16), ("grpo", "sequence_mean", 4)])
def test_grpo_loss_with_kl_and_importance_weights(compute_loss, batch, loss_type, aggregation, denominator):
    weights = importance_weights(batch.old, batch.rollout, batch.mask, cap=2.0)
    trl_weights = torch.exp(batch.old - batch.rollout).clamp(max=2.0)
    inputs = trl_inputs(batch, ref_per_token_logps=batch.reference, importance_sampling_ratio=trl_weights)
    trl_loss, trl_metrics = compute_loss(inputs, batch.logprobs, loss_type, beta=0.04, use_weights=True)
    loss, _ = ours(batch, aggregation, importance_weights=weights)
    kl, metrics = kl_loss(batch.logprobs, batch.reference, batch.mask, estimator="k3", aggregation=aggregation)
    same(batch, (loss + 0.04 * kl) / denominator, trl_loss)
    assert metrics["kl"].value == pytest.approx(trl_metrics["kl"], abs=1e-6)


def test_on_policy_grpo_loss_when_old_logprobs_are_the_pass_s_own(compute_loss, batch):
    inputs = trl_inputs(batch)
    del inputs["old_per_token_logps"]
    trl_loss, _ = compute_loss(inputs, batch.logprobs, "grpo")
    batch.old = batch.logprobs.detach()
    loss, metrics = ours(batch, "sequence_mean")
    same(batch, loss / 4, trl_loss)
    assert metrics["ratio/max"].value == 1


def test_kl_estimate_is_the_kl_term_of_the_loss(compute_loss, batch):
    """KL alone, token by token: the gradient of TRL's loss without advantages."""
    batch.advantages = torch.zeros(4)
    trl_loss, _ = compute_loss(trl_inputs(batch, ref_per_token_logps=batch.reference), batch.logprobs, "bnpo", beta=1.0)
    estimates = kl_estimate(batch.logprobs, batch.reference, "k3")
    same(batch, estimates[batch.mask].mean(), trl_loss)


@pytest.mark.parametrize("outcomes", [[1.0, 3.0, 4.0, 0.5], [0.0, 0.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [1.0, None, -3.0, 0.25]])
def test_group_advantages(grpo_trainer, outcomes):
    rewards = torch.tensor([float("nan") if outcome is None else outcome for outcome in outcomes])
    centred = rewards - torch.nanmean(rewards)
    known = (~rewards.isnan()).sum()
    baselines = (rewards.nansum() - rewards) / (known - 1)
    expected = {
        "group_norm": centred / (grpo_trainer.nanstd(rewards.view(1, -1), dim=1) + 1e-4),
        "dr_grpo": centred,
        "rloo": rewards - baselines,
    }
    for estimator, wanted in expected.items():
        assert group_advantages(outcomes, estimator) == pytest.approx(torch.nan_to_num(wanted, nan=0.0).tolist(), abs=1e-6)


def test_gae_and_whitening():
    generator = torch.Generator().manual_seed(5)
    rewards, values = torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    padded_rewards, padded_values = rewards * mask, values * mask
    last, columns = torch.zeros(3), []
    for t in reversed(range(6)):
        following = padded_values[:, t + 1] if t < 5 else 0.0
        last = padded_rewards[:, t] + 0.99 * following - padded_values[:, t] + 0.99 * 0.95 * last
        columns.append(last)
    wanted = torch.stack(columns[::-1], dim=1)
    advantages, returns = gae(rewards, values, mask, 0.99, 0.95)
    torch.testing.assert_close(advantages[mask], wanted[mask], **CLOSE)
    torch.testing.assert_close(returns[mask], (wanted + padded_values)[mask], **CLOSE)

    kept = wanted[mask]
    white = (kept - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)
    torch.testing.assert_close(whiten(advantages, mask, *whitening(moments(advantages, mask)))[mask], white, **CLOSE)
