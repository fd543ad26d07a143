"""The same tensors through TRL's own code (a test-only dependency) and through ours, within 1e-6.

* policy loss and KL loss: the real `GRPOTrainer._compute_loss`, on a trainer that was never initialised, whose forward
  pass is replaced by given log-probs. Its `bnpo` loss is PPO's token mean, `dapo` the same with the count of the whole update
  given, `grpo` the mean of sequence means, `dr_grpo` our `constant`; its `delta` is our dual clip; its GSPO is
  `importance_sampling_level: sequence` with `grpo`.
* pairs: the real `OnlineDPOTrainer.training_step`, on such a trainer too.
* group advantages: TRL computes them inside `_generate_and_score_completions`, which cannot be called without a model and
  data. Its `nanstd` is called here; the lines round it (TRL 1.16 trainer/grpo_trainer.py, "sum_then_normalize", and
  rloo_trainer.py, "RLOO advantages computation") are recomputed. So are those of its importance sampling modes.
* GAE and the value loss: TRL 1.16 has no PPO trainer any more. GAE is recomputed as TRL's last one did it: backwards
  over columns, padding zeroed beforehand, then masked whitening with the unbiased variance.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from conveyor.algorithms.advantages import gae, group_advantages, moments, normalize_group, whiten, whitening
from conveyor.algorithms.losses import kl_estimate, kl_loss
from conveyor.algorithms.mismatch import importance_weights
from conveyor.algorithms.policy_losses import policy_loss
from conveyor.algorithms.preferences import dpo_loss
from tests.algorithms.batches import CORRECTIONS

pytestmark = pytest.mark.slow  # importing TRL's trainer takes many seconds

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
LOW, HIGH = 0.2, 0.28
MAX_LENGTH = 9
LOSSES = [("bnpo", "token_mean", 16), ("dapo", "token_mean", 16), ("grpo", "sequence_mean", 4), ("dr_grpo", "constant", 4 * MAX_LENGTH)]
by_loss = pytest.mark.parametrize(("loss_type", "aggregation", "denominator"), LOSSES)


@pytest.fixture(scope="module")
def grpo_trainer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer")


class OneProcess:
    """Stands for accelerate's Accelerator."""

    num_processes = 1
    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)

    def reduce(self, tensor, reduction):
        return tensor

    def backward(self, loss, **kwargs):
        pass


@pytest.fixture(scope="module")
def compute_loss(grpo_trainer):
    """(inputs, log-probs [B, S], loss_type, …) → (TRL's loss, its metrics)."""

    class Bare(grpo_trainer.GRPOTrainer):
        def __init__(self, logprobs, loss_type, beta, use_weights, level, delta, high):
            self._logprobs = logprobs
            self.model = SimpleNamespace(training=True)
            self.args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
            self.accelerator = OneProcess()
            self.loss_type, self.beta, self.epsilon_low, self.epsilon_high = loss_type, beta, LOW, high
            self.importance_sampling_level, self.top_entropy_quantile, self.off_policy_mask_threshold = level, 1.0, None
            self.max_completion_length = MAX_LENGTH
            self.use_vllm = self.vllm_importance_sampling_correction = use_weights
            self.current_gradient_accumulation_steps = 1
            self.aux_loss_enabled = self._entropy_bonus_enabled = False
            self._metrics = {"train": defaultdict(list)}

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return self._logprobs, torch.zeros_like(self._logprobs), None

    def compute(inputs, logprobs, loss_type, beta=0.0, use_weights=False, level="token", delta=None, high=HIGH):
        trainer = Bare(logprobs, loss_type, beta, use_weights, level, delta, high)
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
        "completion_mask": batch.mask.long(), "advantages": batch.advantages, "old_per_token_logps": batch.old,
        "num_items_in_batch": batch.mask.sum(), **more,
    }  # fmt: skip


def ours(batch, aggregation, **more):
    advantages = batch.advantages[:, None].expand(-1, 7)
    clip = {"clip_low": LOW, "clip_high": HIGH}
    return policy_loss(batch.logprobs, batch.old, advantages, batch.mask, aggregation=aggregation, **(clip | more))


def same(batch, loss, trl_loss):
    torch.testing.assert_close(loss, trl_loss, **CLOSE)
    gradients = [torch.autograd.grad(value, batch.logprobs, retain_graph=True)[0] for value in (loss, trl_loss)]
    torch.testing.assert_close(*gradients, **CLOSE)


@by_loss
def test_policy_loss(compute_loss, batch, loss_type, aggregation, denominator):
    trl_loss, trl_metrics = compute_loss(trl_inputs(batch), batch.logprobs, loss_type)
    loss, metrics = ours(batch, aggregation)
    same(batch, loss / denominator, trl_loss)
    assert metrics["clip_fraction"].value == pytest.approx(trl_metrics["clip_ratio/region_mean"], abs=1e-6)
    assert metrics["clip_fraction"].value > 0


@by_loss
def test_dual_clip(compute_loss, batch, loss_type, aggregation, denominator):
    """TRL's `delta` cuts the ratio, ours the loss: the same for bounds beyond the upper clip, which a recipe must have."""
    trl_loss, _ = compute_loss(trl_inputs(batch), batch.logprobs, loss_type, delta=1.4)
    loss, _ = ours(batch, aggregation, dual_clip=1.4)
    same(batch, loss / denominator, trl_loss)
    assert loss.item() != ours(batch, aggregation)[0].item()


def test_gspo(compute_loss, batch):
    trl_loss, _ = compute_loss(trl_inputs(batch), batch.logprobs, "grpo", level="sequence")
    loss, _ = ours(batch, "sequence_mean", kind="gspo")
    same(batch, loss / 4, trl_loss)


def test_cispo(compute_loss, batch):
    """TRL has an upper bound only, and counts it from 0: ours with ε_low = 1, from 1."""
    trl_loss, _ = compute_loss(trl_inputs(batch), batch.logprobs, "cispo", high=1.2)
    loss, metrics = ours(batch, "token_mean", kind="cispo", clip_low=1.0, clip_high=0.2)
    same(batch, loss / 16, trl_loss)
    assert metrics["clip_fraction"].value > 0


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_importance_sampling_modes(compute_loss, batch, correction):
    difference = (batch.old - batch.rollout) * batch.mask
    if correction.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    ratio = ratio.clamp(max=1.3) if correction.endswith("truncate") else ratio.masked_fill(ratio > 1.3, 0.0)
    weights = importance_weights(batch.old, batch.rollout, batch.mask, 1.3, correction)
    torch.testing.assert_close(weights, ratio * batch.mask, **CLOSE)
    trl_loss, _ = compute_loss(trl_inputs(batch, importance_sampling_ratio=ratio), batch.logprobs, "grpo", use_weights=True)
    loss, _ = ours(batch, "sequence_mean", importance_weights=weights)
    same(batch, loss / 4, trl_loss)


@by_loss
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
        found = group_advantages(outcomes, estimator)
        assert found == pytest.approx(torch.nan_to_num(wanted, nan=0.0).tolist(), abs=1e-6)
        # `normalize_advantages` of TRL's RLOO trainer, for a batch of one group
        wanted = (wanted - torch.nanmean(wanted)) / (grpo_trainer.nanstd(wanted) + 1e-4)
        assert normalize_group(found, outcomes) == pytest.approx(torch.nan_to_num(wanted, nan=0.0).tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_online_dpo(batch, kind):
    """TRL's batch is all first answers, then all second ones; scores 1, 0 and 2, 5 make answers 0 and 3 the better ones."""
    module = pytest.importorskip("trl.experimental.online_dpo.online_dpo_trainer")
    models = {"policy": batch.logprobs, "reference": batch.reference}

    class Bare(module.OnlineDPOTrainer):
        beta = 0.3

        def __init__(self):
            self.args = SimpleNamespace(
                use_vllm=False, missing_eos_penalty=None, loss_type=kind, n_gpu=1, gradient_accumulation_steps=1, optim="adamw",
                torch_empty_cache_steps=None,
            )  # fmt: skip
            self.ref_model, self.eos_token_ids, self.reward_funcs = "reference", [0], [None]
            self.processing_class = SimpleNamespace(batch_decode=lambda ids, **kwargs: [""] * len(ids))
            self.accelerator, self.stats = OneProcess(), defaultdict(list)

        def _generate(self, model, prompts, images):
            ids = torch.ones(4, 7, dtype=torch.long)
            return ids, ids, ids, batch.mask.long(), None

        def _forward(self, model, *args):
            return models["reference" if model == "reference" else "policy"]

        def _calculate_rewards_from_functions(self, **kwargs):
            return torch.tensor([1.0, 2.0, 0.0, 5.0])

    trainer = Bare()
    trainer.accelerator.backward = lambda loss: setattr(trainer, "loss", loss)
    trainer.training_step(SimpleNamespace(train=lambda: None), {"prompt": ["a", "b"]})

    signs = [s for pair in ([1.0, 0.0], [2.0, 5.0]) for s in group_advantages(pair, "best_worst")]
    signs = torch.tensor(signs)[[0, 2, 1, 3]]
    loss, metrics = dpo_loss(batch.logprobs, batch.reference, batch.mask, signs, torch.tensor([0, 1, 0, 1]), beta=0.3, kind=kind)
    same(batch, loss / 2, trainer.loss)
    assert metrics["dpo/accuracy"].value == trainer.stats["rewards/accuracies"][0]
    assert metrics["dpo/margin"].value == pytest.approx(trainer.stats["rewards/margins"][0], abs=1e-6)


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
