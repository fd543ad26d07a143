"""A recipe: the sections, tied together by `method`, and the rules that span sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from conveyor.config import sections
from conveyor.config.sections import Section

GROUP_ESTIMATORS = ("group_norm", "dr_grpo", "rloo")

METHOD_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {},
    "grpo": {
        "algorithm": {"advantage_estimator": "group_norm", "kl_in": "loss", "kl_estimator": "k3"},
        "rollout": {"n_samples_per_prompt": 8},
    },
}
"""What a method's name sets before the recipe's own keys are laid over it."""


class Common(Section):
    seed: sections.Whole = Field(0, description="of everything random: order, sampling, initial heads")
    output_dir: str = Field(description="the run's folder")
    overwrite: sections.Flag = Field(False, description="replace a run that output_dir already holds")
    model: sections.Model
    data: sections.Data
    train: sections.Train = sections.Train()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    ray: sections.Ray = sections.Ray()
    devices: dict[str, Annotated[sections.Number, Field(ge=0.01)]] | None = Field(
        None, description="device groups: name → accelerators (CPU cores where there are none); default: what is there"
    )
    telemetry: sections.Flag = Field(False, description="let Ray, vLLM and the hub send usage statistics")


class OfflineRecipe(Common):
    """Methods that learn from a fixed dataset."""

    method: Literal["sft", "reward_model"]


class OnlineRecipe(Common):
    """Methods that sample: rollout → score → train."""

    method: Literal["ppo", "grpo"]
    reference: sections.Model | None = Field(None, description="default: model")
    critic: sections.Model | None = Field(None, description="sequence classifier the critic starts from; default: model with a new head")
    rewards: tuple[sections.Reward, ...] = Field(min_length=1, description="summed with their weights")
    roles: dict[str, str] = Field({}, description="role → device group; roles: rollout, actor, critic, reference, reward names, score")
    rollout: sections.Rollout = sections.Rollout()
    algorithm: sections.Algorithm = sections.Algorithm()
    pipeline: sections.Pipeline = sections.Pipeline()
    evaluate: sections.Evaluate | None = Field(None, description="held-out prompts, sampled and scored during training")

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.advantage_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.kl_coef > 0

    @property
    def samples_per_step(self) -> int:
        return self.train.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.train.train_batch_size or self.samples_per_step

    @property
    def uses_snapshots(self) -> bool:
        """Old log-probs and values come from snapshots when the trainer's own weights may have
        moved on before a micro-batch arrives, or are needed before its own pass over it."""
        several_updates = self.samples_per_update < self.samples_per_step or self.algorithm.update_epochs > 1
        return several_updates or self.needs_barrier or self.critic_apart

    @property
    def needs_barrier(self) -> bool:
        """Advantages need the whole update before any of it is trained."""
        return self.algorithm.normalize == "update"

    @property
    def critic_apart(self) -> bool:
        return self.uses_critic and self.role_group("critic") != self.role_group("actor")

    @property
    def importance_cap(self) -> float | None:
        if self.algorithm.importance_cap is None and self.pipeline.max_staleness > 0:
            return 2.0
        return self.algorithm.importance_cap

    def role_group(self, role: str) -> str:
        """The device group a role is placed on; score roles fall back on `score`."""
        fallback = {"actor": "train", "critic": self.roles.get("actor", "train"), "rollout": "rollout"}
        return self.roles.get(role) or fallback.get(role) or self.roles.get("score", "score")

    @property
    def score_roles(self) -> tuple[str, ...]:
        """Frozen roles of the score stage, in a fixed order."""
        reference = ("reference",) if self.uses_reference else ()
        return reference + tuple(reward.name for reward in self.rewards)

    @property
    def snapshot_roles(self) -> tuple[str, ...]:
        if not self.uses_snapshots:
            return ()
        return ("policy_snapshot", "critic_snapshot") if self.uses_critic else ("policy_snapshot",)

    @property
    def beside_rollout(self) -> tuple[str, ...]:
        """Other roles on rollout's device group."""
        group = self.role_group("rollout")
        return tuple(role for role in self.placed_roles if role != "rollout" and self.role_group(role) == group)

    @property
    def evaluates_in_bubbles(self) -> bool:
        given = None if self.evaluate is None else self.evaluate.in_bubbles
        return not self.beside_rollout if given is None else given

    @property
    def placed_roles(self) -> tuple[str, ...]:
        trained = ("actor", "critic") if self.uses_critic else ("actor",)
        return ("rollout", *self.score_roles, *self.snapshot_roles, *trained)

    @model_validator(mode="after")
    def _rules(self) -> OnlineRecipe:
        for key, message in broken_rules(self):
            raise ValueError(f"{key}: {message}")
        return self


def broken_rules(recipe: OnlineRecipe) -> list[tuple[str, str]]:
    """(key, reason) for every rule between sections that the recipe breaks."""
    found: list[tuple[str, str]] = []
    algorithm, rollout, train, pipeline = recipe.algorithm, recipe.rollout, recipe.train, recipe.pipeline
    n = rollout.n_samples_per_prompt
    if algorithm.advantage_estimator in GROUP_ESTIMATORS and n == 1:
        found.append(
            ("rollout.n_samples_per_prompt", f"{algorithm.advantage_estimator} compares the samples of a group, so it needs 2 or more")
        )
    if rollout.top_p < 1 or rollout.top_k not in (-1, 0):
        key = "rollout.top_p" if rollout.top_p < 1 else "rollout.top_k"
        found.append(
            (
                key,
                "samples would come from a truncated distribution, but the trainer computes log-probs of the full one; use 1.0 and -1",
            )
        )
    if recipe.samples_per_update % n:
        found.append(("train.train_batch_size", f"must be a multiple of rollout.n_samples_per_prompt ({n}), so that groups stay whole"))
    if recipe.samples_per_update > recipe.samples_per_step:
        found.append(
            ("train.train_batch_size", f"{recipe.samples_per_update} samples are more than a step has ({recipe.samples_per_step})")
        )
    if recipe.samples_per_step % recipe.samples_per_update:
        found.append(("train.train_batch_size", f"must divide the {recipe.samples_per_step} samples of a step"))
    if n > rollout.max_concurrent_requests:
        found.append(("rollout.max_concurrent_requests", f"a group of {n} samples does not fit"))
    if train.offload_optimizer and train.zero_stage == 0:
        found.append(("train.offload_optimizer", "needs train.zero_stage 1, 2 or 3"))
    if algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1" and algorithm.kl_coef > 0:
        found.append(("algorithm.kl_estimator", "in the reward only k1 has the right gradient in expectation; use k1, or kl_in: loss"))
    if algorithm.normalize == "streaming_exact":
        if recipe.samples_per_update < recipe.samples_per_step or algorithm.update_epochs > 1:
            found.append(("algorithm.normalize", "streaming_exact is exact at ratio 1, so with one update a step only; use update"))
        if train.zero_stage == 3:
            found.append(("algorithm.normalize", "streaming_exact keeps a full gradient on every rank; with zero_stage 3 use update"))
    for reward in recipe.rewards:
        if (reward.model is None) == (reward.function is None):
            found.append((f"rewards.{reward.name}", "give exactly one of model and function"))
    names = [reward.name for reward in recipe.rewards]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            found.append(("rewards", f"two rewards are named {name}"))
        if name in ("reference", "actor", "critic", "rollout", "score", "policy_snapshot", "critic_snapshot", "mean", "timeouts", "errors"):
            found.append(("rewards", f"{name} is the name of a role or metric, choose another"))
    known = {*recipe.placed_roles, "score", "reference", "policy_snapshot", "critic_snapshot", "critic"}
    for role, group in recipe.roles.items():
        if role not in known:
            found.append((f"roles.{role}", f"no such role; the recipe has {', '.join(sorted(known))}"))
        elif recipe.devices is not None and group not in recipe.devices:
            found.append((f"roles.{role}", f"no device group {group}; devices has {', '.join(recipe.devices)}"))
    if recipe.devices is not None:
        for role in recipe.placed_roles:
            if recipe.role_group(role) not in recipe.devices:
                found.append(("devices", _unplaced(recipe, role)))
        used = {recipe.role_group(role) for role in recipe.placed_roles}
        found += [(f"devices.{group}", "no role is placed on this group") for group in recipe.devices if group not in used]
    if recipe.data.eval_path is not None:
        found.append(("data.eval_path", f"{recipe.method} evaluates by sampling: name the held-out prompts in evaluate.path"))
    if recipe.evaluate is not None:
        if recipe.evaluate.in_bubbles and recipe.beside_rollout:
            found.append(("evaluate.in_bubbles", f"rollout shares its devices with {recipe.beside_rollout[0]}, so there are no bubbles"))
        if recipe.evaluate.n_samples_per_prompt > rollout.max_concurrent_requests:
            found.append(
                ("evaluate.n_samples_per_prompt", f"more than rollout.max_concurrent_requests ({rollout.max_concurrent_requests})")
            )
    if pipeline.micro_batch_size > recipe.samples_per_update:
        found.append(("pipeline.micro_batch_size", f"larger than an update ({recipe.samples_per_update} samples)"))
    return found


def _unplaced(recipe: OnlineRecipe, role: str) -> str:
    """No group for a role, and the setting that would give it one."""
    assert recipe.devices is not None
    groups = list(recipe.devices)
    key = "score" if role in (*recipe.score_roles, *recipe.snapshot_roles) and role not in recipe.roles else role
    group = "train" if "train" in groups else groups[-1] if groups else "GROUP"
    return f"role {role} is on {recipe.role_group(role)}, which devices has not ({', '.join(groups)}); place it: roles: {{{key}: {group}}}"


Recipe = Annotated[OnlineRecipe | OfflineRecipe, Field(discriminator="method")]
RECIPE: TypeAdapter[OnlineRecipe | OfflineRecipe] = TypeAdapter(Recipe)
METHODS = ("sft", "reward_model", "ppo", "grpo")
