"""The rules that span sections of a recipe, each with the reason that a user is given."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.config import sections
from conveyor.config.engine_rules import broken_engine_rules
from conveyor.config.recipe import GROUP_ESTIMATORS, RETURN_ESTIMATORS, OnlineRecipe
from conveyor.config.reward_rules import broken_reward_rules
from conveyor.config.train_rules import broken_score_rules, broken_train_rules

Broken = Iterator[tuple[str, str]]
"""(key, reason) of every rule that is broken."""


def broken_rules(recipe: OnlineRecipe, trains: bool = True) -> list[tuple[str, str]]:
    """(key, reason) for every rule between sections that the recipe breaks; of one that only samples, those that matter then."""
    training = (_method, _rollout, _estimator, _sizes, _loss, _kl, _streaming, _dynamic_sampling, _multi_turn, _replay, _nodes)
    of = (*(training if trains else ()), _group_fits, _placement, _weight_transfer, _evaluate)
    alike = (*broken_engine_rules(recipe.rollout), *broken_reward_rules(recipe.rewards), *broken_score_rules(recipe.score))
    return [*(broken for rules in of for broken in rules(recipe)), *alike]


def _method(recipe: OnlineRecipe) -> Broken:
    algorithm = recipe.algorithm
    if recipe.method == "distillation":
        if recipe.reference is None:
            yield "reference", "distillation learns from the teacher that is named here: reference: {path: TEACHER}"
        if algorithm.kl_coef == 0:
            yield "algorithm.kl_coef", "0 would leave nothing to learn from the teacher"
        if algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1":
            yield "algorithm.kl_estimator", "in the reward only k1 leads to the teacher; use k1, or kl_in: loss with k2"
    elif not recipe.rewards:
        yield "rewards", f"{recipe.method} needs at least one"
    if (algorithm.policy_loss == "dpo") != (algorithm.advantage_estimator == "best_worst"):
        yield (
            "algorithm.advantage_estimator" if algorithm.policy_loss == "dpo" else "algorithm.policy_loss",
            "dpo and advantage_estimator best_worst go together: the best and the worst sample of a group are a pair",
        )
    if not recipe.uses_critic:
        given = {"train.critic_warmup_steps": recipe.train.critic_warmup_steps, "critic": recipe.critic}
        yield from ((key, f"{algorithm.advantage_estimator} has no critic; only gae does") for key, value in given.items() if value)
    elif recipe.train.steps is not None and recipe.train.critic_warmup_steps >= recipe.train.steps:
        yield "train.critic_warmup_steps", f"the actor would not be trained in any of the {recipe.train.steps} steps"
    together = recipe.rollout.n_samples_per_prompt if algorithm.policy_loss == "dpo" else 1
    yield from broken_train_rules(recipe, recipe.data.max_prompt_length + recipe.rollout.max_response_length, together)
    if recipe.train.micro_batch_size != sections.Train().micro_batch_size:
        yield "train.micro_batch_size", f"is of offline methods; of {recipe.method} it is pipeline.micro_batch_size"
    if recipe.data.eval_path is not None:
        yield "data.eval_path", f"{recipe.method} evaluates by sampling: name the held-out prompts in evaluate.path"


def _rollout(recipe: OnlineRecipe) -> Broken:
    rollout = recipe.rollout
    if rollout.top_p < 1 or rollout.top_k not in (-1, 0):
        key = "rollout.top_p" if rollout.top_p < 1 else "rollout.top_k"
        yield key, "samples would come from a truncated distribution, but the trainer computes log-probs of the full one; use 1.0 and -1"


def _replay(recipe: OnlineRecipe) -> Broken:
    if recipe.rollout.routing_replay:
        if recipe.rollout.multi_turn is not None:
            yield "rollout.routing_replay", "each turn of a sample is routed by itself; multi_turn samples cannot be replayed"
        if recipe.pipeline.max_staleness and recipe.pipeline.in_flight_update:
            yield "rollout.routing_replay", "a sample must see one version of the routers: use pipeline.in_flight_update: false"


def _group_fits(recipe: OnlineRecipe) -> Broken:
    if recipe.samples_per_group > recipe.rollout.max_concurrent_requests:
        yield "rollout.max_concurrent_requests", f"a group of {recipe.samples_per_group} samples does not fit"


def _sizes(recipe: OnlineRecipe) -> Broken:
    n, given = recipe.rollout.n_samples_per_prompt, recipe.train.train_batch_size
    whole = recipe.train.rollout_batch_size * n
    if given is not None:
        if given % n:
            yield "train.train_batch_size", f"must be a multiple of rollout.n_samples_per_prompt ({n}), so that groups stay whole"
        if given > whole:
            yield "train.train_batch_size", f"{given} samples are more than a step has ({whole})"
        if whole % given:
            yield "train.train_batch_size", f"must divide the {whole} samples of a step"
    if recipe.pipeline.micro_batch_size > recipe.samples_per_update:
        yield "pipeline.micro_batch_size", f"larger than an update ({recipe.samples_per_update} samples)"
    if recipe.algorithm.policy_loss == "dpo" and recipe.pipeline.micro_batch_size % n:
        yield (
            "pipeline.micro_batch_size",
            f"must be a multiple of rollout.n_samples_per_prompt ({n}): the loss of a pair needs both at once",
        )


def _estimator(recipe: OnlineRecipe) -> Broken:
    algorithm, n = recipe.algorithm, recipe.rollout.n_samples_per_prompt
    estimator = algorithm.advantage_estimator
    if n == 1 and estimator in (*GROUP_ESTIMATORS, "reinforce_pp_baseline"):
        yield "rollout.n_samples_per_prompt", f"{estimator} compares the samples of a group, so it needs 2 or more"
    if algorithm.normalize == "group":
        if estimator not in GROUP_ESTIMATORS or estimator == "best_worst":
            yield "algorithm.normalize", f"group is for estimators with one advantage a sample, not {estimator}"
        elif estimator == "group_norm":
            yield "algorithm.normalize", "group_norm is normalised by group already; use none, or advantage_estimator dr_grpo with group"
    if algorithm.policy_loss == "dpo" and algorithm.normalize != "none":
        yield "algorithm.normalize", "the dpo loss has no advantages to whiten; use none"
    by_token = estimator == "gae" or estimator in RETURN_ESTIMATORS
    batch = [reward.name for reward in recipe.rewards if reward.normalize == "batch"]
    if batch and by_token and algorithm.normalize != "none":
        yield (
            f"rewards.{batch[0]}.normalize",
            f"batch statistics and whitened advantages by token ({estimator}) would wait for each other; use running, or normalize: none",
        )


def _loss(recipe: OnlineRecipe) -> Broken:
    algorithm = recipe.algorithm
    if algorithm.dual_clip is not None and algorithm.policy_loss != "ppo_clip":
        yield "algorithm.dual_clip", f"belongs to policy_loss ppo_clip, not {algorithm.policy_loss}"
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + (algorithm.clip_ratio_high or algorithm.clip_ratio):
        yield "algorithm.dual_clip", "must be more than 1 + the upper clip ratio, or it would cut what the clip leaves"
    several = recipe.samples_per_update < recipe.samples_per_step or algorithm.update_epochs > 1
    if algorithm.policy_loss == "policy_gradient" and several and recipe.importance_cap is None:
        yield (
            "algorithm.policy_loss",
            "policy_gradient has no ratio, so it is for one update a step; with several use ppo_clip, or set importance_cap",
        )
    if algorithm.importance_correction != "token_truncate" and recipe.importance_cap is None:
        yield "algorithm.importance_correction", "has no effect without algorithm.importance_cap"
    if algorithm.overlong_buffer is not None and algorithm.overlong_buffer > recipe.rollout.max_response_length:
        yield "algorithm.overlong_buffer", f"more than rollout.max_response_length ({recipe.rollout.max_response_length})"
    if algorithm.policy_loss == "dpo" and algorithm.entropy_coef:
        yield "algorithm.entropy_coef", "the dpo loss has no entropy bonus"
    if algorithm.policy_loss == "dpo" and (algorithm.importance_cap is not None or recipe.pipeline.max_staleness):
        key = "algorithm.importance_cap" if algorithm.importance_cap is not None else "pipeline.max_staleness"
        yield key, "the dpo loss asks which of two answers is better, whoever sampled them: no weights, and staleness 0"


def _kl(recipe: OnlineRecipe) -> Broken:
    algorithm = recipe.algorithm
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield "algorithm.kl_estimator", "k1 in the loss has no gradient in expectation; use k2 or k3, or kl_in: reward"
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield "algorithm.kl_target", "the controller moves kl_coef by a factor, so that must not start at 0"
    if algorithm.kl_target is not None and recipe.method == "distillation":
        yield "algorithm.kl_target", "distillation makes the KL to the teacher as small as it can"
    if algorithm.reference_refresh is not None:
        if not recipe.uses_reference:
            yield "algorithm.reference_refresh", "there is no reference at kl_coef 0"
        if recipe.method == "distillation":
            yield "algorithm.reference_refresh", "would replace the teacher"
    if algorithm.policy_loss == "dpo" and algorithm.kl_coef:
        yield "algorithm.kl_coef", "the dpo loss holds the policy near the reference itself (dpo_beta); use 0"


def _streaming(recipe: OnlineRecipe) -> Broken:
    algorithm = recipe.algorithm
    if algorithm.normalize != "streaming_exact":
        return
    if recipe.samples_per_update < recipe.samples_per_step or algorithm.update_epochs > 1:
        yield "algorithm.normalize", "streaming_exact is exact at ratio 1, so with one update a step only; use update"
    if recipe.train.zero_stage == 3:
        yield "algorithm.normalize", "streaming_exact keeps a full gradient on every rank; with zero_stage 3 use update"
    if recipe.needs_barrier:
        yield "algorithm.normalize", "rewards normalised by batch wait for the whole update anyway; use update"


def _dynamic_sampling(recipe: OnlineRecipe) -> Broken:
    if not recipe.rollout.dynamic_sampling:
        return
    if recipe.algorithm.advantage_estimator not in (*GROUP_ESTIMATORS, "reinforce_pp_baseline"):
        yield (
            "rollout.dynamic_sampling",
            f"equal rewards in a group tell {recipe.algorithm.advantage_estimator} something; it is for estimators that compare the group",
        )
    if not any(reward.weight for reward in recipe.judged_rewards):
        yield (
            "rollout.dynamic_sampling",
            "goes by rewards that are functions or urls; a reward model hardly ever scores a whole group equally",
        )


def _multi_turn(recipe: OnlineRecipe) -> Broken:
    if recipe.rollout.multi_turn is not None and recipe.greedy_baseline:
        yield "rollout.multi_turn", "the greedy baseline of remax is one answer to a prompt, not a conversation"


def _placement(recipe: OnlineRecipe) -> Broken:
    known = {*recipe.placed_roles, "score", "reference", "policy_snapshot", "critic_snapshot", "critic"}
    judged = {reward.name for reward in recipe.judged_rewards}
    for role, group in recipe.roles.items():
        if role in judged:
            yield f"roles.{role}", "a function or url needs no device, so it has no place"
        elif role not in known:
            yield f"roles.{role}", f"no such role; the recipe has {', '.join(sorted(known))}"
        elif recipe.devices is not None and group not in recipe.devices:
            yield f"roles.{role}", f"no device group {group}; devices has {', '.join(recipe.devices)}"
    if recipe.devices is not None:
        for role in recipe.placed_roles:
            if recipe.role_group(role) not in recipe.devices:
                yield "devices", _unplaced(recipe, role)
        used = {recipe.role_group(role) for role in recipe.placed_roles}
        yield from ((f"devices.{group}", "no role is placed on this group") for group in recipe.devices if group not in used)
    if recipe.devices is not None and "rewards" in recipe.devices:
        yield "devices.rewards", "this name stands for reward functions, which need no device; choose another"


def _nodes(recipe: OnlineRecipe) -> Broken:
    if recipe.pipeline.sleep and not recipe.sleeping_groups(gpus=True):
        yield "pipeline.sleep", "no two stages share a device group, so nothing has to make room; name one group for several roles"
    groups = recipe.devices or {recipe.role_group(role) for role in recipe.placed_roles}
    for group in recipe.ray.placement:
        if group not in groups:
            yield f"ray.placement.{group}", f"no device group {group}; there is {', '.join(sorted(groups))}"


def _weight_transfer(recipe: OnlineRecipe) -> Broken:
    given, group = recipe.pipeline.weight_transfer, recipe.role_group("actor")
    if given not in ("nccl", "gloo"):
        return
    if given == "nccl" and group == recipe.role_group("rollout"):
        yield "pipeline.weight_transfer", "engines on the actor's GPUs: one GPU cannot be two members of an NCCL group; use object_store"
    elif group in recipe.sleeping_groups(gpus=given == "nccl"):
        yield "pipeline.weight_transfer", f"the actor sleeps between its turns on {group}, and engines may ask then; use object_store"
    if recipe.rollout.engine != "vllm":
        yield "pipeline.weight_transfer", f"{given} sends to vLLM's processes; of another engine use object_store"


def _evaluate(recipe: OnlineRecipe) -> Broken:
    section, slots = recipe.evaluate, recipe.rollout.max_concurrent_requests
    if section is None:
        return
    if not recipe.rewards:
        yield "evaluate", "held-out answers are judged by rewards, and the recipe has none"
    if section.in_bubbles and recipe.beside_rollout:
        yield "evaluate.in_bubbles", f"rollout shares its devices with {recipe.beside_rollout[0]}, so there are no bubbles"
    if section.n_samples_per_prompt + section.greedy > slots:
        yield "evaluate.n_samples_per_prompt", f"more than rollout.max_concurrent_requests ({slots})"
    if section.success_reward is not None and section.success_reward not in [reward.name for reward in recipe.rewards]:
        names = ", ".join(reward.name for reward in recipe.rewards)
        yield "evaluate.success_reward", f"no reward is named {section.success_reward}; the recipe has {names}"
    if max(section.pass_at, default=1) > section.n_samples_per_prompt:
        yield (
            "evaluate.pass_at",
            f"pass@{max(section.pass_at)} needs as many samples; n_samples_per_prompt is {section.n_samples_per_prompt}",
        )


def _unplaced(recipe: OnlineRecipe, role: str) -> str:
    """No group for a role, and the setting that would give it one."""
    assert recipe.devices is not None
    groups = list(recipe.devices)
    key = "score" if role in (*recipe.score_roles, *recipe.snapshot_roles) and role not in recipe.roles else role
    group = "train" if "train" in groups else groups[-1] if groups else "GROUP"
    return f"role {role} is on {recipe.role_group(role)}, which devices has not ({', '.join(groups)}); place it: roles: {{{key}: {group}}}"
