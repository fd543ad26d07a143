"""Whole updates against a recomputation in plain torch: one unpadded sample at a time, token by token, no code of the package.

AdamW's step hardly depends on the gradient's scale, so gradient norms are compared besides weights, and the second of two
updates makes the first one's share of the moments visible. Gradients are clipped to so small a norm that rounding cannot turn
the sign of an element: next to AdamW's ε, such an element moves nothing.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from conveyor.types import PartialScores, Prompt, Rollout
from tests.tiny import save_tiny_policy, save_tiny_reward_model
from tests.workers.test_train import recipe, train, weights, worker

LENGTHS = (5, 2, 7, 3, 4, 1)
EXACT = (1.0, None, -0.5, 2.0, 0.25, -1.0)  # the second sample has no score at all
STYLE = (None, None, 1.0, 1.0, None, 0.5)
TRUNCATED = 3
SPLITS = ([0, 1, 2, 3], [4], [5])

ALGORITHM = {"mask_truncated": True, "missing_eos_penalty": 0.3, "entropy_coef": 0.3, "kl_coef": 0.2, "importance_cap": 1.2}
GAE = {"gamma": 0.9, "lam": 0.8, "value_coef": 0.7, "value_clip": 0.2}
CASES = {
    "ppo": ("ppo", {**GAE, "loss_aggregation": "sequence_mean"}),
    "ppo against snapshots": ("ppo", {**GAE, "normalize": "update", "kl_in": "loss", "kl_estimator": "k2", "clip_ratio_high": 0.4}),
    "ppo whitened while it streams": ("ppo", {**GAE, "normalize": "streaming_exact"}),
    "grpo whitened while it streams": ("grpo", {"normalize": "streaming_exact", "loss_aggregation": "sequence_mean", "kl_in": "loss"}),
    "grpo": ("grpo", {"loss_aggregation": "sequence_mean"}),
    "grpo against snapshots": ("grpo", {"kl_in": "reward", "kl_estimator": "k1"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Weights large enough for probabilities and values that differ from token to token."""
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_policy(folder / "policy", initializer_range=0.1), save_tiny_reward_model(folder / "critic", initializer_range=0.1)


@dataclass
class Sampled:
    rollout: Rollout
    reference: Tensor
    score: float | None
    old: Tensor | None
    values: Tensor | None

    @property
    def in_loss(self) -> bool:
        return self.score is not None and not self.rollout.truncated


def samples_of(policy, temperature, per_group, seed, snapshots):
    """Sampling log-probs, reference and snapshots lie around the policy's own, so that caps and clips cut some tokens."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, length in enumerate(LENGTHS):
        prompt = Prompt(i // per_group, 0, tuple(range(5, 8 + i // per_group)), "")
        response = torch.randint(5, 264, (length,), generator=generator)
        with torch.no_grad():
            own = plain_logprobs(model, prompt, response, temperature)[0]
        sampling, reference, old, values = (spread * torch.randn(length, generator=generator) for spread in (0.4, 0.5, 0.4, 0.6))
        finish = "length" if i == TRUNCATED else "stop"
        rollout = Rollout(prompt, i % per_group, response, own + sampling, torch.zeros(length, dtype=torch.int32), finish, "")
        score = None if EXACT[i] is None else EXACT[i] + 0.5 * (STYLE[i] or 0.0) - 0.3 * (i == TRUNCATED)
        made.append(Sampled(rollout, own + reference, score, own + old if snapshots else None, values if snapshots else None))
    return made


def score_parts(samples):
    snapshots = samples[0].old is not None
    return [
        PartialScores(rewards={"exact": EXACT, "style": STYLE}),
        PartialScores(
            reference_logprobs=tuple(s.reference for s in samples),
            old_logprobs=tuple(s.old for s in samples) if snapshots else None,
            values=tuple(s.values for s in samples) if snapshots else None,
        ),
    ]


def plain_logprobs(model, prompt, response, temperature):
    """Log-probs [R] of a response and the entropies [R] of its tokens' distributions."""
    ids = torch.cat((torch.tensor(prompt.token_ids), response))
    logits = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1] / temperature
    every = logits - logits.logsumexp(-1, keepdim=True)
    return every[torch.arange(len(response)), response], -(every.exp() * every).sum(-1)


def plain_values(model, prompt, response):
    ids = torch.cat((torch.tensor(prompt.token_ids), response))
    hidden = model.model(ids[None]).last_hidden_state[0]
    return (hidden @ model.score.weight[0])[len(prompt.token_ids) - 1 : -1]


def plain_gae(rewards, values, gamma, lam):
    """The sum of eq. 16, not its recursion → (advantages, returns)."""
    following = torch.cat((values[1:], values.new_zeros(1)))
    delta = rewards + gamma * following - values
    steps = range(len(delta))
    advantages = torch.stack([sum((gamma * lam) ** (k - t) * delta[k] for k in steps if k >= t) for t in steps])
    return advantages, advantages + values


def plain_group_advantages(samples, outcomes):
    advantages = []
    for sample, outcome in zip(samples, outcomes, strict=True):
        group = [o for s, o in zip(samples, outcomes, strict=True) if s.rollout.id.group == sample.rollout.id.group and o is not None]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((o - mean) ** 2 for o in group) / (len(group) - 1))
        advantages.append(None if outcome is None else torch.full(sample.reference.shape, (outcome - mean) / (std + 1e-4)))
    return advantages


def plain_losses(made, models, samples):
    """Role → loss of one update, divided."""
    algorithm = made.algorithm
    penalties = [
        -algorithm.kl_coef * ((s.rollout.logprobs if s.old is None else s.old) - s.reference)
        if algorithm.kl_in == "reward"
        else torch.zeros_like(s.reference)
        for s in samples
    ]
    losses = {}
    if "critic" not in models:
        outcomes = [None if s.score is None else s.score + p.sum().item() for s, p in zip(samples, penalties, strict=True)]
        advantages = plain_group_advantages(samples, outcomes)
    else:
        advantages, squares = [], []
        for sample, penalty in zip(samples, penalties, strict=True):
            rewards = penalty.clone()
            rewards[-1] += sample.score or 0.0
            values = plain_values(models["critic"], sample.rollout.prompt, sample.rollout.response_ids)
            old = values.detach() if sample.values is None else sample.values
            advantage, returns = plain_gae(rewards, old, algorithm.gamma, algorithm.lam)
            advantages.append(advantage)
            near = old + (values - old).clamp(-algorithm.value_clip, algorithm.value_clip)
            if sample.in_loss:
                squares.append(torch.maximum((values - returns) ** 2, (near - returns) ** 2))
        losses["critic"] = algorithm.value_coef * 0.5 * torch.cat(squares).mean()
    if algorithm.normalize != "none":
        trained = torch.cat([a for a, s in zip(advantages, samples, strict=True) if s.in_loss])
        advantages = [None if a is None else (a - trained.mean()) / trained.std() for a in advantages]
    rows = [plain_actor_loss(made, models["actor"], s, a) for s, a in zip(samples, advantages, strict=True) if s.in_loss]
    by_sequence = algorithm.loss_aggregation == "sequence_mean"
    losses["actor"] = torch.stack([row.mean() for row in rows]).mean() if by_sequence else torch.cat(rows).mean()
    return losses


def plain_actor_loss(made, model, sample, advantage):
    """[R]: every term of the actor's loss, token by token."""
    algorithm, rollout = made.algorithm, sample.rollout
    logprobs, entropy = plain_logprobs(model, rollout.prompt, rollout.response_ids, made.rollout.temperature)
    old = logprobs.detach() if sample.old is None else sample.old
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - algorithm.clip_ratio, 1 + (algorithm.clip_ratio_high or algorithm.clip_ratio))
    importance = (old - rollout.logprobs).exp().clamp(max=algorithm.importance_cap)
    loss = -importance * torch.minimum(ratio * advantage, clipped * advantage) - algorithm.entropy_coef * entropy
    if algorithm.kl_in == "loss":
        d = logprobs - sample.reference
        loss = loss + algorithm.kl_coef * (d**2 / 2 if algorithm.kl_estimator == "k2" else (-d).exp() - 1 + d)
    return loss


def plain_training(made, models, updates):
    """Trains the models in place → for each update, role → gradient norm."""
    rates = {"actor": made.train.learning_rate, "critic": made.train.critic_learning_rate}
    optimizers = {
        role: torch.optim.AdamW(model.parameters(), rates[role], betas=made.train.adam_betas, weight_decay=made.train.weight_decay)
        for role, model in models.items()
    }
    norms = []
    for samples in updates:
        losses = plain_losses(made, models, samples)
        norms.append({})
        for role, optimizer in optimizers.items():
            optimizer.zero_grad()
            losses[role].backward()
            norms[-1][role] = torch.nn.utils.clip_grad_norm_(models[role].parameters(), made.train.max_grad_norm).item()
            optimizer.step()
    return norms


@pytest.mark.parametrize("case", CASES)
def test_case_1_two_updates_equal_plain_torch(models, case):
    policy, critic = models
    method, algorithm = CASES[case]
    made = recipe(
        policy, method, critic={"path": str(critic)}, algorithm={**ALGORITHM, **algorithm},
        rollout={"temperature": 0.7, "n_samples_per_prompt": 3 if method == "grpo" else 1},
        train={"learning_rate": 1e-3, "critic_learning_rate": 2e-3, "weight_decay": 0.1, "max_grad_norm": 1e-3},
    )  # fmt: skip
    updates = [samples_of(policy, 0.7, made.rollout.n_samples_per_prompt, seed, snapshots="snapshots" in case) for seed in (1, 2)]

    trained = worker(made)
    before = {role: weights(trained, role) for role in trained._engines}
    steps = [train(trained, made, [s.rollout for s in u], score_parts(u), SPLITS, step=i)[2].steps for i, u in enumerate(updates)]

    plain = {"actor": AutoModelForCausalLM.from_pretrained(policy)}
    if made.uses_critic:
        plain["critic"] = AutoModelForSequenceClassification.from_pretrained(critic)
    norms = plain_training(made, plain, updates)

    assert set(plain) == set(before)
    for role, model in plain.items():
        assert [step[role].grad_norm for step in steps] == pytest.approx([norm[role] for norm in norms], rel=1e-5), role
        found, wanted = weights(trained, role), dict(model.named_parameters())
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            assert distance(found[name], weight) < 1e-5 * weight.norm(), (role, name)
            assert distance(before[role][name], weight) > 1e-3 * weight.norm(), (role, name)


def distance(a, b):
    return (a - b.detach()).norm()
