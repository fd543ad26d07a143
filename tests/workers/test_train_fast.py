"""Whole updates against a recomputation in plain torch: one unpadded sample at a time, token by token, no code of the package.

AdamW's step hardly depends on the gradient's scale, so gradient norms are compared besides weights, and the second of two
updates makes the first one's share of the moments visible. Gradients are clipped to so small a norm that rounding cannot turn
the sign of an element: next to AdamW's ε, such an element moves nothing.
"""

import copy
import json
import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from conveyor.algorithms.scores import RewardScale
from conveyor.config.presets import METHOD_DEFAULTS
from conveyor.types import PartialScores, Prompt, Rollout
from conveyor.workers.reports import StepSettings
from tests.tiny import save_tiny_policy, save_tiny_reward_model
from tests.workers.test_train import recipe, train, weights, worker

LENGTHS = (5, 2, 7, 3, 4, 1, 2, 3, 2, 3, 1, 2)
EXACT = (1.0, None, -0.5, 2.0, 0.25, -1.0, 1.0, 1.0, -1.0, 0.5, 0.5, 0.5)  # the second sample has no score at all
STYLE = (None, None, 1.0, 1.0, None, 0.5, *[None] * 6)
TRUNCATED = 3
HOLES = {0: (1, 2), 2: (0, 3), 3: (2,), 4: (1, 3)}
"""Of samples of several turns: places of tokens that the policy did not sample; sample 3 and 4 end with one."""
LONGEST = 8
SIX, WHOLE_GROUPS, TWELVE = ([0, 1, 2, 3], [4], [5]), ([0, 1, 2], [3, 4, 5]), ([*range(6)], [6, 7, 8], [9, 10, 11])

ALGORITHM = {"mask_truncated": True, "missing_eos_penalty": 0.3, "entropy_coef": 0.3, "kl_coef": 0.2, "importance_cap": 1.2}
GAE = {"gamma": 0.9, "lam": 0.8, "value_coef": 0.7, "value_clip": 0.2}
WITH_REFERENCE = {"kl_coef": 0.2, "kl_in": "reward"}
PAIRS = {"entropy_coef": 0.0, "kl_coef": 0.0, "importance_cap": None}


@dataclass(frozen=True)
class Case:
    """One of two updates by a recipe, and how its samples are made."""

    method: str
    algorithm: dict
    n: int = 1
    """Samples of a group that are trained."""
    snapshots: bool = False
    turns: bool = False
    splits: tuple = SIX
    rewards: tuple[dict, dict] = ({}, {})
    """Further keys of the two rewards."""
    settings: StepSettings | None = None
    clips: bool = False
    """Some token's gradient is cut off or down."""
    sections: tuple = ()


CASES = {
    "ppo": Case("ppo", {**GAE, "loss_aggregation": "sequence_mean"}),
    "ppo against snapshots": Case(
        "ppo", {**GAE, "normalize": "update", "kl_in": "loss", "kl_estimator": "k2", "clip_ratio_high": 0.4}, snapshots=True, clips=True
    ),
    "ppo whitened while it streams": Case("ppo", {**GAE, "normalize": "streaming_exact"}),
    "grpo whitened while it streams": Case(
        "grpo", {"normalize": "streaming_exact", "loss_aggregation": "sequence_mean", "kl_in": "loss"}, n=3
    ),
    "grpo": Case("grpo", {"loss_aggregation": "sequence_mean"}, n=3),
    "grpo against snapshots": Case("grpo", {"kl_in": "reward", "kl_estimator": "k1"}, n=3, snapshots=True, clips=True),
    "rloo": Case("rloo", {}, n=3),
    "opo": Case("opo", WITH_REFERENCE, n=3, turns=True),
    "dr_grpo": Case("dr_grpo", {}, n=3, snapshots=True, clips=True),
    "dr_grpo, normalised by group, reference": Case("dr_grpo", {**WITH_REFERENCE, "normalize": "group"}, n=3),
    "rloo, whitened over the update": Case("rloo", {"normalize": "update"}, n=3),
    "reinforce": Case("reinforce", {"gamma": 0.9}),
    "reinforce_pp": Case("reinforce_pp", {"gamma": 0.9}),
    "reinforce_pp, k2": Case("reinforce_pp", {"gamma": 0.9, "kl_estimator": "k2"}, snapshots=True, clips=True),
    "reinforce_pp, k3, turns": Case("reinforce_pp", {"gamma": 0.9, "kl_estimator": "k3"}, turns=True),
    "reinforce_pp_baseline": Case("reinforce_pp_baseline", {}, n=3),
    "reinforce_pp_baseline, KL in the reward": Case("reinforce_pp_baseline", {**WITH_REFERENCE, "gamma": 0.8}, n=3),
    "remax": Case("remax", {"gamma": 0.9}),
    "remax, whitened while it streams": Case("remax", {"normalize": "streaming_exact"}, n=2),
    "dapo": Case("dapo", {"overlong_buffer": 4, "overlong_penalty": 0.7, "clip_ratio_high": 0.28}, n=3, snapshots=True, clips=True),
    "gspo": Case("gspo", {"clip_ratio": 0.1, "clip_ratio_high": 0.05}, n=3, snapshots=True, clips=True),
    "cispo": Case("cispo", {"clip_ratio": 0.1, "clip_ratio_high": 0.05}, n=3, snapshots=True, clips=True),
    "dual clip": Case("ppo", {**GAE, "dual_clip": 1.21, "clip_ratio_high": 0.2}, snapshots=True, clips=True),
    "constant": Case("ppo", {**GAE, "loss_aggregation": "constant", "kl_in": "loss", "kl_estimator": "k3"}),
    "distillation": Case("distillation", {}),
    "distillation, several turns": Case("distillation", {"kl_coef": 0.7}, turns=True, snapshots=True),
    "ppo, several turns": Case("ppo", GAE, turns=True),
    "ppo, several turns, snapshots": Case(
        "ppo", {**GAE, "normalize": "update", "kl_in": "loss", "kl_estimator": "k3"}, turns=True, snapshots=True, clips=True
    ),
    "gspo, several turns": Case("gspo", {"clip_ratio": 0.1}, n=3, turns=True, snapshots=True, clips=True),
    "online_dpo": Case("online_dpo", PAIRS, n=3, splits=TWELVE),
    "online_dpo, ipo": Case("online_dpo", {**PAIRS, "dpo_loss": "ipo", "dpo_beta": 0.4}, n=3, splits=TWELVE, turns=True),
    "rewards normalised by batch": Case("rloo", {}, n=3, rewards=({"normalize": "batch", "clip": 0.9}, {"normalize": "batch"})),
    "rewards normalised by batch, gae": Case("ppo", GAE, snapshots=True, rewards=({"normalize": "batch"}, {}), clips=True),
    "rewards normalised by batch, remax": Case("remax", {}, n=2, rewards=({"normalize": "batch"}, {"clip": 0.7})),
    "rewards normalised by earlier steps": Case(
        "reinforce", {}, rewards=({"normalize": "running", "clip": 0.8}, {}), settings=StepSettings(0.2, {"exact": RewardScale(0.3, 1.7)})
    ),
    "adaptive KL in the reward": Case("rloo", {"kl_target": 0.1}, n=3, settings=StepSettings(0.37)),
    "adaptive KL in the loss": Case("grpo", {"kl_target": 0.1}, n=3, settings=StepSettings(0.37)),
    "token_mask": Case("rloo", {"importance_correction": "token_mask"}, n=3),
    "sequence_truncate": Case("ppo", {**GAE, "importance_correction": "sequence_truncate"}, turns=True),
    "sequence_mask": Case("reinforce", {"importance_correction": "sequence_mask"}, snapshots=True),
}


def test_every_preset_is_recomputed():
    assert {case.method for case in CASES.values()} == set(METHOD_DEFAULTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Weights large enough for probabilities and values that differ from token to token."""
    folder = tmp_path_factory.mktemp("models")
    small = {"initializer_range": 0.15, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_hidden_layers": 1}
    return save_tiny_policy(folder / "policy", **small), save_tiny_reward_model(folder / "critic", **small)


@cache
def loaded(of, path):
    return of.from_pretrained(path)


@dataclass
class Sampled:
    """What is known of the sampled tokens of a sample; tensors [R] of those alone."""

    rollout: Rollout
    place: Tensor
    """int64 [R]: places in the response."""
    sampling: Tensor
    reference: Tensor
    rewards: dict[str, float | None]
    greedy: bool
    old: Tensor | None
    values: Tensor | None

    @property
    def in_loss(self) -> bool:
        return any(reward is not None for reward in self.rewards.values()) and not self.rollout.truncated and not self.greedy

    @property
    def group(self) -> int:
        return self.rollout.id.group


def samples_of(policy, made, case, seed):
    """Sampling log-probs, reference and snapshots lie around the policy's own, so that caps and clips cut some tokens."""
    model = loaded(AutoModelForCausalLM, policy)
    generator = torch.Generator().manual_seed(seed)
    samples, per_group = [], made.samples_per_group
    for i in range(max(map(max, case.splits)) + 1):
        length, group = LENGTHS[i], i // per_group
        prompt = Prompt(group, 0, tuple(range(5, 8 + group)), "")
        response = torch.randint(5, 264, (length,), generator=generator)
        place = torch.tensor([t for t in range(length) if not (case.turns and t in HOLES.get(i, ()))])
        with torch.no_grad():
            own = plain_logprobs(model, prompt, response, place, made.rollout.temperature)[0]
        sampling, reference, old, values = (spread * torch.randn(length, generator=generator)[place] for spread in (0.4, 0.5, 0.4, 0.6))
        sampled = torch.zeros(length, dtype=torch.bool).index_fill(0, place, True) if case.turns else None
        rollout = Rollout(
            prompt, i % per_group, response, spread_out(own + sampling, place, length, 0.0), torch.zeros(length, dtype=torch.int32),
            "length" if i == TRUNCATED else "stop", "", sampled,
        )  # fmt: skip
        samples.append(
            Sampled(
                rollout, place, own + sampling, own + reference, {"exact": EXACT[i], "style": STYLE[i]}, i % per_group >= case.n,
                own + old if case.snapshots else None, values if case.snapshots and made.uses_critic else None,
            )
        )  # fmt: skip
    return samples


def spread_out(values, place, length, between):
    """[R] of the sampled tokens → of all of the response."""
    return torch.full((length,), between).index_copy(0, place, values)


def score_parts(made, samples):
    def tokens(name):
        columns = [getattr(s, name) for s in samples]
        if columns[0] is None:
            return None
        # What stands at tokens that were not sampled must not matter.
        return tuple(spread_out(c, s.place, len(s.rollout.response_ids), math.nan) for c, s in zip(columns, samples, strict=True))

    names = [reward.name for reward in made.rewards]
    return [
        PartialScores(rewards={name: tuple(s.rewards[name] for s in samples) for name in names}),
        PartialScores(
            reference_logprobs=tokens("reference") if made.uses_reference else None, old_logprobs=tokens("old"), values=tokens("values")
        ),
    ]


def plain_logprobs(model, prompt, response, place, temperature):
    """Log-probs [R] of the sampled tokens of a response and the entropies [R] of their distributions."""
    ids = torch.cat((torch.tensor(prompt.token_ids), response))
    logits = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1][place] / temperature
    every = logits - logits.logsumexp(-1, keepdim=True)
    return every[torch.arange(len(place)), response[place]], -(every.exp() * every).sum(-1)


def plain_values(model, sample):
    prompt = sample.rollout.prompt.token_ids
    ids = torch.cat((torch.tensor(prompt), sample.rollout.response_ids))
    hidden = model.model(ids[None]).last_hidden_state[0]
    return (hidden @ model.score.weight[0])[len(prompt) - 1 : -1][sample.place]


def plain_gae(rewards, values, gamma, lam):
    """The sum of eq. 16, not its recursion → (advantages, returns)."""
    following = torch.cat((values[1:], values.new_zeros(1)))
    delta = rewards + gamma * following - values
    steps = range(len(delta))
    advantages = torch.stack([sum((gamma * lam) ** (k - t) * delta[k] for k in steps if k >= t) for t in steps])
    return advantages, advantages + values


def plain_kl(d, estimator):
    return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]


def plain_scores(made, samples, settings):
    """Of each sample, None where no reward applies."""
    scales = {name: (scale.mean, scale.std) for name, scale in settings.scales.items()}
    for reward in made.rewards:
        if reward.normalize == "batch":
            known = [s.rewards[reward.name] for s in samples if not s.greedy and s.rewards[reward.name] is not None]
            scales[reward.name] = mean(known), stdev(known)
    scores = []
    for sample in samples:
        total, known = 0.0, 0
        for reward in made.rewards:
            value = sample.rewards[reward.name]
            if value is None:
                continue
            if reward.name in scales:
                value = (value - scales[reward.name][0]) / scales[reward.name][1]
            if reward.clip is not None:
                value = max(-reward.clip, min(reward.clip, value))
            total, known = total + reward.weight * value, known + 1
        total -= made.algorithm.missing_eos_penalty * sample.rollout.truncated
        if made.algorithm.overlong_buffer:
            over = len(sample.place) - (LONGEST - made.algorithm.overlong_buffer)
            total -= made.algorithm.overlong_penalty * max(0, over) / made.algorithm.overlong_buffer
        scores.append(total if known or not made.rewards else None)
    return scores


def plain_advantages(made, models, samples, scores, penalties):
    """Advantages [R] of each sample (of best_worst its sign), and the value loss."""
    algorithm, squares = made.algorithm, []
    members = {s.group: [i for i, other in enumerate(samples) if other.group == s.group] for s in samples}
    outcomes = [None if score is None else score + penalty.sum().item() for score, penalty in zip(scores, penalties, strict=True)]
    advantages = []
    for i, sample in enumerate(samples):
        rewards = penalties[i].clone()
        rewards[-1] += scores[i] or 0.0
        steps = range(len(rewards))
        returns = torch.stack([sum(algorithm.gamma ** (k - t) * rewards[k] for k in steps if k >= t) for t in steps])
        known = [j for j in members[sample.group] if outcomes[j] is not None]
        others = [outcomes[j] for j in known if j != i]
        of_group = [outcomes[j] for j in known]
        ones = torch.ones(len(rewards))
        match algorithm.advantage_estimator:
            case _ if outcomes[i] is None:
                advantage = 0 * ones
            case "group_norm":
                advantage = ones * (outcomes[i] - mean(of_group)) / (stdev(of_group) + 1e-4)
            case "dr_grpo":
                advantage = ones * (outcomes[i] - mean(of_group))
                if algorithm.normalize == "group":
                    advantage = advantage / (stdev(of_group) + 1e-4)
            case "rloo":
                advantage = ones * (outcomes[i] - mean(others))
            case "opo":
                lengths = [len(samples[j].place) for j in known]
                weighted = sum(length * outcomes[j] for length, j in zip(lengths, known, strict=True)) / sum(lengths)
                advantage = ones * (outcomes[i] - weighted)
            case "reinforce" | "reinforce_pp":
                advantage = returns
            case "reinforce_pp_baseline":
                advantage = returns - mean(scores[j] for j in known)
            case "remax":
                advantage = returns - (scores[members[sample.group][-1]] or 0.0)
            case "gae":
                values = plain_values(models["critic"], sample)
                old = values.detach() if sample.values is None else sample.values
                advantage, wanted = plain_gae(rewards, old, algorithm.gamma, algorithm.lam)
                near = old + (values - old).clamp(-algorithm.value_clip, algorithm.value_clip)
                if sample.in_loss:
                    squares.append(torch.maximum((values - wanted) ** 2, (near - wanted) ** 2))
        advantages.append(advantage)
    if algorithm.normalize in ("update", "streaming_exact"):
        trained = torch.cat([a for a, s in zip(advantages, samples, strict=True) if s.in_loss])
        advantages = [(a - trained.mean()) / trained.std() for a in advantages]
    return advantages, algorithm.value_coef * 0.5 * torch.cat(squares).mean() if squares else None


def plain_losses(made, models, samples, settings):
    """Role → loss of one update, divided."""
    algorithm = made.algorithm
    scores = plain_scores(made, samples, settings)
    for sample in samples:
        if not made.rewards:
            sample.rewards["none"] = 0.0
    penalties = [torch.zeros(len(s.place)) for s in samples]
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        for i, s in enumerate(samples):
            penalties[i] = -settings.kl_coef * plain_kl((s.sampling if s.old is None else s.old) - s.reference, algorithm.kl_estimator)
    if algorithm.policy_loss == "dpo":
        return {"actor": plain_pairs(made, models["actor"], samples, scores)}
    advantages, value = plain_advantages(made, models, samples, scores, penalties)
    losses = {"critic": value} if value is not None else {}
    pairs = zip(samples, advantages, strict=True)
    rows = [plain_actor_loss(made, models["actor"], s, a, settings.kl_coef) for s, a in pairs if s.in_loss]
    trained = [s for s in samples if not s.greedy]
    match algorithm.loss_aggregation:
        case "sequence_mean":
            losses["actor"] = torch.stack([row.mean() for row in rows]).mean()
        case "token_mean":
            losses["actor"] = torch.cat(rows).mean()
        case "constant":
            losses["actor"] = torch.cat(rows).sum() / (len(trained) * LONGEST)
    return losses


def plain_actor_loss(made, model, sample, advantage, kl_coef):
    """[R]: every term of the actor's loss, token by token."""
    algorithm, rollout = made.algorithm, sample.rollout
    logprobs, entropy = plain_logprobs(model, rollout.prompt, rollout.response_ids, sample.place, made.rollout.temperature)
    old = logprobs.detach() if sample.old is None else sample.old
    low, high = 1 - algorithm.clip_ratio, 1 + (algorithm.clip_ratio_high or algorithm.clip_ratio)
    ratio = (logprobs - old).exp()
    if algorithm.policy_loss == "gspo":
        ratio = (logprobs - old).mean().exp().expand(len(old))
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if algorithm.dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, algorithm.dual_clip * advantage), gain)
    if algorithm.policy_loss == "cispo":
        gain = ratio.clamp(low, high).detach() * advantage * logprobs
    if algorithm.policy_loss == "policy_gradient":
        gain = advantage * logprobs
    mode, _, cut = algorithm.importance_correction.partition("_")
    gaps = (old - sample.sampling).detach()
    importance = (gaps.sum() if mode == "sequence" else gaps).exp()
    cap = algorithm.importance_cap
    importance = importance.clamp(max=cap) if cut == "truncate" else importance * (importance <= cap)
    loss = -importance * gain - algorithm.entropy_coef * entropy
    if algorithm.kl_in == "loss" and algorithm.kl_coef:
        loss = loss + kl_coef * plain_kl(logprobs - sample.reference, algorithm.kl_estimator)
    return loss


def plain_pairs(made, model, samples, scores):
    """The mean over pairs of the best and the worst answer of a group."""
    losses = []
    for group in sorted({s.group for s in samples}):
        members = [i for i, s in enumerate(samples) if s.group == group and s.in_loss]
        best = max(members, key=lambda i: scores[i], default=None)
        worst = min(members, key=lambda i: scores[i], default=None)
        if best is None or scores[best] == scores[worst]:
            continue
        h = []
        for i in (best, worst):
            rollout, place = samples[i].rollout, samples[i].place
            logprobs, _ = plain_logprobs(model, rollout.prompt, rollout.response_ids, place, made.rollout.temperature)
            h.append((logprobs - samples[i].reference).sum())
        beta, margin = made.algorithm.dpo_beta, h[0] - h[1]
        losses.append((margin - 1 / (2 * beta)) ** 2 if made.algorithm.dpo_loss == "ipo" else -(1 / (1 + (-beta * margin).exp())).log())
    assert len(losses) == 3 and len({s.group for s in samples}) == 4
    return torch.stack(losses).mean()


def plain_training(made, models, updates, settings, mixed=None, rates=None):
    """Trains the models in place → for each update, role → gradient norm.

    mixed: update → loss that is added to the actor's. rates: role → learning rates, None where it is not trained.
    """
    optimizers = {
        role: torch.optim.AdamW(model.parameters(), rate, betas=made.train.adam_betas, weight_decay=made.train.weight_decay)
        for role, model in models.items()
        for rate in [made.train.learning_rate if role == "actor" else made.train.critic_learning_rate]
    }
    norms = []
    for number, samples in enumerate(updates):
        losses = plain_losses(made, models, samples, settings)
        if mixed is not None:
            losses["actor"] = losses["actor"] + mixed(models["actor"], number)
        norms.append({})
        for role, optimizer in optimizers.items():
            if rates is not None:
                if rates[role][number] is None:
                    continue
                optimizer.param_groups[0]["lr"] = rates[role][number]
            optimizer.zero_grad()
            losses[role].backward()
            norms[-1][role] = torch.nn.utils.clip_grad_norm_(models[role].parameters(), made.train.max_grad_norm).item()
            optimizer.step()
    return norms


def recipe_of(models, case):
    policy, critic = models
    rewards = [
        {"name": "exact", "function": "unused.py:reward", **case.rewards[0]},
        {"name": "style", "function": "unused.py:reward", "weight": 0.5, **case.rewards[1]},
    ]
    algorithm = {**ALGORITHM, **case.algorithm}
    if METHOD_DEFAULTS[case.method].get("algorithm", {}).get("kl_coef") == 0.0 and "kl_coef" not in case.algorithm:
        algorithm["kl_coef"] = 0.0  # as the preset has it: no reference
    further = dict(case.sections)
    train_keys = further.pop("train", {})
    if {**METHOD_DEFAULTS[case.method].get("algorithm", {}), **algorithm}.get("advantage_estimator", "gae") == "gae":
        further["critic"] = {"path": str(critic)}
    return recipe(
        policy, case.method, reference={"path": str(policy)}, algorithm=algorithm,
        rewards=[] if case.method == "distillation" else rewards, pipeline={"micro_batch_size": 3},
        rollout={"temperature": 0.7, "n_samples_per_prompt": case.n, "max_response_length": LONGEST},
        train={"learning_rate": 1e-3, "critic_learning_rate": 2e-3, "weight_decay": 0.1, "max_grad_norm": 1e-3, **train_keys},
        **further,
    )  # fmt: skip


def plain_models(models, made):
    policy, critic = models
    plain = {"actor": copy.deepcopy(loaded(AutoModelForCausalLM, policy))}
    if made.uses_critic:
        plain["critic"] = copy.deepcopy(loaded(AutoModelForSequenceClassification, critic))
    return plain


def settings_of(made, case):
    return case.settings or StepSettings(made.algorithm.kl_coef)


def conveyed(trained, made, case, updates, first_step=0):
    """The worker's and the ledger's way → optim reports, and the metrics of the updates."""
    reports, metrics = [], []
    for step, samples in enumerate(updates, first_step):
        rollouts = [s.rollout for s in samples]
        _, found, report = train(
            trained, made, rollouts, score_parts(made, samples), case.splits, step=step, settings=settings_of(made, case)
        )
        reports.append(report)
        metrics.append(found)
    return reports, metrics


def assert_same_weights(trained, plain, before):
    assert set(plain) == set(before)
    for role, model in plain.items():
        found, wanted = weights(trained, role), dict(model.named_parameters())
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            assert distance(found[name], weight) < 1e-5 * weight.norm(), (role, name)
            assert distance(before[role][name], weight) > 1e-3 * weight.norm(), (role, name)


def distance(a, b):
    return (a - b.detach()).norm()


@pytest.mark.parametrize("name", CASES)
def test_case_1_two_updates_equal_plain_torch(models, name):
    case = CASES[name]
    made = recipe_of(models, case)
    updates = [samples_of(models[0], made, case, seed) for seed in (1, 2)]

    trained = worker(made)
    before = {role: weights(trained, role) for role in trained._engines}
    reports, metrics = conveyed(trained, made, case, updates)

    plain = plain_models(models, made)
    norms = plain_training(made, plain, updates, settings_of(made, case))

    for role in plain:
        assert [report.steps[role].grad_norm for report in reports] == pytest.approx([norm[role] for norm in norms], rel=1e-5), role
    assert_same_weights(trained, plain, before)
    if made.algorithm.policy_loss != "dpo":
        assert any(found["clip_fraction"].value > 0 for found in metrics) == case.clips


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three rows of text: fewer than an update mixes in."""
    file = tmp_path_factory.mktemp("ptx") / "texts.jsonl"
    rows = [{"prompt": "ab", "completion": "cde"}, {"text": "some more"}, {"prompt": "x", "completion": "y"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def mixing(models, case, texts):
    sections = {
        "ptx": {"path": str(texts), "coef": 0.6, "batch_size": 4},
        "data": {"path": "unused", "shuffle": False, "apply_chat_template": False},
    }
    return recipe_of(models, replace(case, sections=tuple(sections.items())))


def plain_mixed_loss(models, made):
    """Update → the mixed-in loss: rows 0, 1, 2, 0, then 1, 2, 0, 1, …"""
    tokenizer = AutoTokenizer.from_pretrained(models[0])

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rows = [([1, *ids("ab")], [*ids("cde"), 2]), ([1], [*ids("some more"), 2]), ([1, *ids("x")], [*ids("y"), 2])]

    def loss(model, update):
        losses = []
        for place in range(4 * update, 4 * update + 4):
            before, learnt = rows[place % 3]
            row = torch.tensor(before + learnt)
            every = model(row[None]).logits[0, len(before) - 1 : -1].log_softmax(-1)
            losses.append(-every[torch.arange(len(learnt)), torch.tensor(learnt)])
        return made.ptx.coef * torch.cat(losses).mean()

    return loss


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "online_dpo", "ppo", "grpo whitened while it streams"])
def test_case_26_a_supervised_loss_is_mixed_in(models, texts, name):
    case = CASES[name]
    mixes = {
        "ptx": {"path": str(texts), "coef": 0.6, "batch_size": 4},
        "data": {"path": "unused", "shuffle": False, "apply_chat_template": False},
    }
    made = recipe_of(models, Case(**(vars(case) | {"sections": tuple(mixes.items())})))
    updates = [samples_of(models[0], made, case, seed) for seed in (1, 2)]
    trained = worker(made)
    before = {role: weights(trained, role) for role in trained._engines}
    reports, _ = conveyed(trained, made, case, updates)

    plain, mixed = plain_models(models, made), plain_mixed_loss(models, made)
    with torch.no_grad():
        first = mixed(plain["actor"], 0).item() / 0.6
    norms = plain_training(made, plain, updates, settings_of(made, case), mixed)
    assert [report.steps["actor"].grad_norm for report in reports] == pytest.approx([norm["actor"] for norm in norms], rel=1e-5)
    assert_same_weights(trained, plain, before)
    assert reports[0].metrics["loss/ptx"].value == pytest.approx(first, rel=1e-5)
    assert [report.metrics["loss/ptx"].count for report in reports] == [4 + 10 + 2 + 4, 10 + 2 + 4 + 10]


def test_an_update_with_nothing_in_its_policy_loss_learns_from_what_is_mixed_in(models, texts):
    case = Case("grpo", {"kl_in": "loss"}, n=3)
    mixes = {
        "ptx": {"path": str(texts), "coef": 0.6, "batch_size": 4},
        "data": {"path": "unused", "shuffle": False, "apply_chat_template": False},
    }
    made = recipe_of(models, Case(**(vars(case) | {"sections": tuple(mixes.items())})))
    samples = samples_of(models[0], made, case, 1)
    for sample in samples:
        sample.rewards.update(exact=None, style=None)
    trained = worker(made)
    reports, metrics = conveyed(trained, made, case, [samples])
    model, mixed = plain_models(models, made)["actor"], plain_mixed_loss(models, made)
    mixed(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert metrics[0]["loss/policy"].count == 0 and not reports[0].steps["actor"].skipped
    assert reports[0].steps["actor"].grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_the_critic_is_trained_alone_while_it_warms_up(models, apart):
    """The actor's schedule begins when it does: 9 of the run's 10 updates are its own."""
    case = Case("ppo", GAE, snapshots=apart, sections=(("train", {"critic_warmup_steps": 1, "lr_schedule": "linear"}),))
    made = recipe_of(models, case)
    assert made.train.rollout_batch_size == made.samples_per_step == made.samples_per_update
    updates = [samples_of(models[0], made, case, seed) for seed in (1, 2, 3)]
    workers = [worker(made, ("actor",)), worker(made, ("critic",))] if apart else [worker(made)]
    before = {role: weights(one, role) for one in workers for role in one._engines}
    found = []
    for one in workers:
        first, _ = conveyed(one, made, case, updates[:1])
        if "actor" in one._engines:
            assert all(torch.equal(weight, before["actor"][name]) for name, weight in weights(one).items())
        rest, _ = conveyed(one, made, case, updates[1:], first_step=1)
        found.append([*first, *rest])
    plain = plain_models(models, made)
    rates = {"actor": [None, 1e-3, 1e-3 * 8 / 9], "critic": [2e-3, 2e-3 * 9 / 10, 2e-3 * 8 / 10]}
    norms = plain_training(made, plain, updates, settings_of(made, case), rates=rates)
    actor, critic = found[0], found[-1]
    assert "actor" not in actor[0].steps
    for role, reports in (("actor", actor[1:]), ("critic", critic)):
        assert [report.steps[role].lr for report in reports] == pytest.approx([rate for rate in rates[role] if rate is not None])
        assert [report.steps[role].grad_norm for report in reports] == pytest.approx([n[role] for n in norms if role in n], rel=1e-5)
    for one in workers:
        assert_same_weights(one, {role: plain[role] for role in one._engines}, {role: before[role] for role in one._engines})
