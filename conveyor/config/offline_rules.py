"""The rules that span sections of recipes without a pipeline: offline methods and loops."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.config.engine_rules import broken_engine_rules
from conveyor.config.loops import IterativeDpoRecipe, LoopRecipe, RejectionSamplingRecipe, RsoRecipe
from conveyor.config.lora_rules import broken_lora_rules
from conveyor.config.offline import Condition, ConditionalSftRecipe, Dpo, DpoRecipe, KtoRecipe, OfflineRecipe, RewardModelRecipe
from conveyor.config.reward_rules import broken_reward_rules
from conveyor.config.train_rules import broken_score_rules, broken_train_rules

Broken = Iterator[tuple[str, str]]
"""(key, reason) of every rule that is broken."""

SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo")
"""Losses of pairs that allow for wrong labels."""


def broken_offline_rules(recipe: OfflineRecipe | LoopRecipe) -> list[tuple[str, str]]:
    """(key, reason) for every rule between sections that the recipe breaks."""
    broken = [*_train(recipe), *_nodes(recipe)]
    if isinstance(recipe, DpoRecipe | RsoRecipe | IterativeDpoRecipe):
        broken += _dpo(recipe.dpo)
    if isinstance(recipe, DpoRecipe):
        broken += _reference(recipe)
    if isinstance(recipe, KtoRecipe):
        broken += _kto(recipe)
    if isinstance(recipe, ConditionalSftRecipe):
        broken += _condition(recipe.condition)
    if isinstance(recipe, LoopRecipe):
        broken += _loop(recipe)
    return broken


def _train(recipe: OfflineRecipe | LoopRecipe) -> Broken:
    train = recipe.train
    longest = recipe.longest_sample if isinstance(recipe, LoopRecipe) else recipe.data.max_length
    pairs = isinstance(recipe, DpoRecipe | RewardModelRecipe | RsoRecipe | IterativeDpoRecipe)
    yield from broken_lora_rules(recipe)
    yield from broken_train_rules(recipe, longest, 2 if pairs else 1)
    for key in ("critic_learning_rate", "critic_warmup_steps"):
        if getattr(train, key):
            yield f"train.{key}", f"{recipe.method} has no critic"


def _nodes(recipe: OfflineRecipe | LoopRecipe) -> Broken:
    groups = {"train", *(recipe.devices or ()), *(("rollout", "score", *recipe.roles.values()) if isinstance(recipe, LoopRecipe) else ())}
    for group in recipe.ray.placement:
        if group not in groups:
            yield f"ray.placement.{group}", f"no device group {group}; there is {', '.join(sorted(groups))}"


def _dpo(dpo: Dpo) -> Broken:
    if dpo.length_normalize is False and dpo.loss in ("simpo", "orpo"):
        yield "dpo.length_normalize", f"{dpo.loss} is defined on length-averaged log-probs"
    if dpo.label_smoothing and dpo.loss not in SMOOTHED:
        yield "dpo.label_smoothing", f"{dpo.loss} knows no wrong labels; only {', '.join(SMOOTHED)} do"
    if dpo.label_smoothing == 0 and dpo.loss == "exo_pair":
        yield "dpo.label_smoothing", "exo_pair takes the logarithm of it, so it must be more than 0 (its paper: 0.001)"
    if dpo.margin is not None and dpo.loss not in ("simpo", "slic"):
        yield "dpo.margin", f"{dpo.loss} has none; only simpo and slic do"


def _reference(recipe: DpoRecipe) -> Broken:
    if recipe.reference is not None and not recipe.dpo.needs_reference:
        yield "reference", f"{recipe.dpo.loss} asks no reference"


def _kto(recipe: KtoRecipe) -> Broken:
    if recipe.kto.loss == "kto" and recipe.updated_rows < 2:
        yield "train.train_batch_size", "the KL term pairs a prompt with another row's completion, so an update needs 2 rows"


def _condition(condition: Condition) -> Broken:
    for mark in ("{prompt}", "{condition}"):
        if condition.template.count(mark) != 1:
            yield "condition.template", f"must hold {mark} once"
    if condition.kind == "class":
        for name, of_class in condition.classes.items():
            if "{prompt}" in of_class.text:
                yield f"condition.classes.{name}.text", "must not hold {prompt}: the prompt would stand there twice"
        if not condition.classes:
            yield "condition.classes", "name the classes, each with its text: {expert: {text: Expert, weight: 1.0}, …}"
        elif condition.target_class not in condition.classes:
            yield "condition.target", f"no class is named {condition.target_class}; there are {', '.join(condition.classes)}"
        for key in ("mean", "std"):
            if getattr(condition, key) is not None:
                yield f"condition.{key}", "is of kind score"
    else:
        if condition.classes:
            yield "condition.classes", "are of kind class"
        if isinstance(condition.target, str):
            yield "condition.target", f"must be a number of standard deviations above the mean, not {condition.target!r}"


def _loop(recipe: LoopRecipe) -> Broken:
    n, rounds = recipe.rollout.n_samples_per_prompt, recipe.rounds.count
    if not recipe.rewards:
        yield "rewards", f"{recipe.method} needs at least one"
    yield from broken_engine_rules(recipe.rollout)
    yield from broken_reward_rules(recipe.rewards)
    yield from broken_score_rules(recipe.score)
    for reward in recipe.rewards:
        if reward.normalize != "none":
            yield f"rewards.{reward.name}.normalize", f"{recipe.method} compares the samples of one prompt; use none"
    if n < 2:
        yield "rollout.n_samples_per_prompt", f"{recipe.method} chooses among the samples of a prompt, so it needs 2 or more"
    if n > recipe.rollout.max_concurrent_requests:
        yield "rollout.max_concurrent_requests", f"a group of {n} samples does not fit"
    if recipe.rounds.max_staleness and recipe.rounds.keep_engines is False:
        yield "rounds.keep_engines", "with max_staleness 1 engines sample while the policy is trained, so they must stay"
    if recipe.rounds.max_staleness and recipe.data.eval_path is not None:
        yield "data.eval_path", "with rounds.max_staleness 1 engines have no pause for it; evaluate rounds/round_N/train/model afterwards"
    if recipe.rollout.dynamic_sampling:
        yield "rollout.dynamic_sampling", "is of online methods"
    if recipe.rollout.routing_replay:
        yield "rollout.routing_replay", f"is of online methods: {recipe.method} trains on rows"
    if isinstance(recipe, RejectionSamplingRecipe) and recipe.select.keep > n:
        yield "select.keep", f"more than the {n} samples of a prompt"
    if isinstance(recipe, RsoRecipe) and not 2 <= recipe.select.accept <= n:
        yield "select.accept", f"pairs are made of the accepted: between 2 and the {n} samples of a prompt"
    if isinstance(recipe, IterativeDpoRecipe):
        yield from _pairs(recipe, rounds)
    if isinstance(recipe, RejectionSamplingRecipe) and recipe.rounds.reference is not None:
        yield "rounds.reference", "rejection_sampling has none"
    if isinstance(recipe, RsoRecipe | IterativeDpoRecipe) and recipe.rounds.reference is not None and not recipe.dpo.needs_reference:
        yield "rounds.reference", f"{recipe.dpo.loss} asks no reference"


def _pairs(recipe: IterativeDpoRecipe, rounds: int) -> Broken:
    select = recipe.select
    if select.max_pairs is not None and select.pairs != "all":
        yield "select.max_pairs", f"{select.pairs} makes one pair of a prompt"
    if select.pairs == "max_uncertainty" and len(recipe.rewards) < 2:
        yield "select.pairs", "max_uncertainty compares the rewards of an ensemble; name two or more"
    if select.etas and len(select.etas) != rounds:
        yield "select.etas", f"{len(select.etas)} values for {rounds} rounds"
    if any(later >= earlier for earlier, later in zip(select.etas, select.etas[1:], strict=False)):
        yield "select.etas", "must fall from round to round"
