"""What the actor minimises: settings reach the losses, streamed whitening mixes to the whole, distillation by hand."""

import dataclasses

import pytest
import torch

from conveyor.algorithms.advantages import kl_penalty, place_rewards, returns_to_go
from conveyor.algorithms.losses import sampled_logprobs
from conveyor.algorithms.metrics import Mean
from conveyor.algorithms.objective import actor_losses, pair_losses, streaming_coefficients
from conveyor.algorithms.policy_losses import policy_loss
from conveyor.config import sections
from conveyor.types import Tokens, TrainBatch
from tests.algorithms.batches import AGGREGATIONS, KINDS, mask, random_batch


def train_batch(seed=3, samples=4):
    """Random log-probs of every kind → (batch, log-probs that want a gradient, entropy, advantages of sequences)."""
    (logprobs, rollout, old, reference, entropy), kept = random_batch(seed, samples)
    kept[0, :2] = True
    nothing = torch.zeros(samples, 1, dtype=torch.int64)
    batch = TrainBatch(
        tokens=Tokens(nothing, nothing, nothing[:, 0], nothing[:, 0], packed=False), prompt_lengths=nothing[:, 0],
        response_mask=kept, loss_mask=kept,
        rollout_logprobs=rollout, token_rewards=torch.zeros_like(rollout), versions=kept.int(),
        reference_logprobs=reference, old_logprobs=old,
    )  # fmt: skip
    advantages = torch.randn(samples, 1, generator=torch.Generator().manual_seed(seed)).expand_as(rollout)
    return batch, logprobs.requires_grad_(), entropy, advantages


def gradient(loss, of):
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_settings_reach_the_policy_loss(kind):
    batch, logprobs, entropy, advantages = train_batch()
    dual = 3.0 if kind == "ppo_clip" else None
    algorithm = sections.Algorithm(
        policy_loss=kind, clip_ratio=0.1, clip_ratio_high=0.3, dual_clip=dual, importance_correction="sequence_mask", kl_coef=0.0
    )
    found = actor_losses(logprobs, entropy, batch, advantages, algorithm, cap=None)
    plain, _ = policy_loss(
        logprobs, batch.old_logprobs, advantages, batch.loss_mask, clip_low=0.1, clip_high=0.3, aggregation="token_mean", kind=kind,
        dual_clip=dual,
    )  # fmt: skip
    assert found.policy.item() == plain.item() and found.other.item() == 0
    assert "importance_weight/mean" not in found.metrics and "rollout_mismatch/kl" in found.metrics
    cut = actor_losses(logprobs, entropy, batch, advantages, algorithm, cap=1e-9)
    assert cut.policy.item() == 0 and cut.metrics["importance_weight/cut_fraction"].value == 1


def test_the_coefficient_of_the_kl_can_be_given():
    batch, logprobs, entropy, advantages = train_batch()
    algorithm = sections.Algorithm(kl_in="loss", kl_estimator="k2", kl_coef=0.5)
    own, given = (actor_losses(logprobs, entropy, batch, advantages, algorithm, None, kl_coef).other for kl_coef in (None, 2.0))
    assert own.item() > 0 and given.item() == pytest.approx(4 * own.item())
    assert actor_losses(logprobs, entropy, batch, advantages, algorithm, None, 0.0).other.item() == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_gradients_mix_to_that_of_whitened_advantages(kind, aggregation):
    batch, logprobs, entropy, advantages = train_batch()
    batch = dataclasses.replace(batch, old_logprobs=None)
    algorithm = sections.Algorithm(policy_loss=kind, loss_aggregation=aggregation, kl_coef=0.0)
    mean, std = 0.3, 1.7
    raw, ones, whitened = (
        gradient(actor_losses(logprobs, entropy, batch, given, algorithm, 2.0).policy, logprobs)
        for given in (advantages, torch.ones_like(advantages), (advantages - mean) / std)
    )
    mixed = streaming_coefficients(mean, std)
    torch.testing.assert_close(mixed["advantages"] * raw + mixed["ones"] * ones, whitened, atol=1e-6, rtol=1e-5)


def test_pair_losses():
    batch, logprobs, entropy, _ = train_batch(samples=4)
    batch = dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    signs, groups = torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.tensor([4, 4, 9, 9])
    algorithm = sections.Algorithm(policy_loss="dpo", dpo_beta=0.3, dpo_loss="ipo", kl_coef=0.0)
    found = pair_losses(logprobs, entropy, batch, signs, groups, algorithm)
    h = (logprobs - batch.reference_logprobs).sum(1)
    margins = torch.stack((h[0] - h[1], h[3] - h[2]))
    assert found.policy.item() == pytest.approx((margins - 1 / 0.6).square().sum().item(), rel=1e-5)
    assert found.other.item() == 0 and not found.other.requires_grad
    assert found.metrics["entropy"] == Mean(pytest.approx(entropy.sum().item(), abs=1e-5), 24)
    assert {"rollout_mismatch/max", "dpo/accuracy"} <= found.metrics.keys()


# distillation: the KL in the reward, discount 0, policy gradient ---------------------------------------------------


def distillation_gradient(logits, ids, teacher, kept):
    """d loss / d logits [B, S, V] as the pipeline makes it from sampled tokens [B, S], kl_coef 1."""
    logits = logits.clone().requires_grad_()
    logprobs = sampled_logprobs(logits, ids, 1.0)
    rewards = place_rewards(torch.zeros(len(ids)), kept) + kl_penalty(logprobs, sampled_logprobs(teacher, ids, 1.0), kept, 1.0)
    loss, _ = policy_loss(
        logprobs, logprobs.detach(), returns_to_go(rewards, kept, 0.0), kept, clip_low=0.2, clip_high=0.2, aggregation="token_mean",
        kind="policy_gradient",
    )  # fmt: skip
    return torch.autograd.grad(loss, logits)[0]


def test_distillation_by_hand():
    """Σ_t −(log π_T − log π_S)·∇ log π_S, with ∇ log softmax = one-hot − π."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 4, 5, generator=generator)
    ids, kept = torch.randint(0, 5, (2, 4), generator=generator), mask([1, 1, 0, 1], [1, 1, 0, 0])
    wanted = torch.zeros_like(student)
    for b, t in kept.nonzero().tolist():
        token = ids[b, t]
        s, log_teacher = student[b, t].softmax(0), teacher[b, t].log_softmax(0)[token]
        wanted[b, t] = -(log_teacher - s[token].log()) * (torch.nn.functional.one_hot(token, 5) - s)
    torch.testing.assert_close(distillation_gradient(student, ids, teacher, kept), wanted, atol=1e-6, rtol=1e-5)


def test_distillation_follows_the_reverse_kl():
    """Over every token with its probability, the sampled gradient is that of KL(π_S ‖ π_T)."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 1, 1, 6, generator=generator)
    expected = sum(
        student.softmax(-1)[0, 0, token] * distillation_gradient(student, torch.tensor([[token]]), teacher, mask([1])) for token in range(6)
    )
    student.requires_grad_()
    s = student.log_softmax(-1)
    kl = (s.exp() * (s - teacher.log_softmax(-1))).sum()
    torch.testing.assert_close(expected, torch.autograd.grad(kl, student)[0], atol=1e-6, rtol=1e-5)
