"""The fixed facts a schedule rests on: how large steps are, what runs where, what waits for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from conveyor.config import OnlineRecipe


@dataclass(frozen=True, slots=True)
class ScorePart:
    """Score roles of one device group that are computed in one task."""

    group: str
    roles: tuple[str, ...]
    versioned: bool
    """Holds snapshots: step s is scored with version s exactly, the policy its training starts from."""
    rewards: tuple[str, ...] = ()
    """Those of `roles` that are rewards."""
    refresh: int | None = None
    """Holds a reference that becomes the policy anew every so many steps."""

    def version(self, step: int) -> int | None:
        """The version that scores a step; None: its weights never change."""
        if self.refresh is not None:
            return step // self.refresh * self.refresh
        return step if self.versioned else None

    def takes(self, version: int) -> bool:
        """Whether a version that is published is to be installed. A reference starts with weights of its own."""
        return self.versioned or (self.refresh is not None and version > 0 and version % self.refresh == 0)


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """Trained roles of one device group; its ranks work as one."""

    group: str
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What is sampled to evaluate a version, and when."""

    prompts: int
    samples_per_prompt: int = 1
    every: int = 1
    """Versions from one evaluation to the next; the last is always evaluated."""
    in_bubbles: bool = True
    in_flight: int | None = None
    """Prompts that are sampled or scored at a time, at most; None: as many as engines take."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything the scheduler needs to know. Sizes are in samples unless they say groups."""

    step_groups: tuple[int, ...]
    """Prompt groups of each step; group indices run through all steps."""
    samples_per_group: int
    samples_per_update: int
    micro_batch_size: int
    update_epochs: int = 1
    engines: int = 1
    engine_slots: int = 64
    """Samples an engine holds at a time."""
    rollout_group: str = "rollout"
    parts: tuple[ScorePart, ...] = (ScorePart("score", ("reward",), False),)
    part_workers: tuple[int, ...] = (1,)
    """Workers of each part's device group; parts of one group share them."""
    judged: bool = False
    """There are rewards that are functions or urls: every sample goes to them by itself, as soon as it is there."""
    train_groups: tuple[TrainGroup, ...] = (TrainGroup("train", ("actor",)),)
    overlap: bool = True
    max_staleness: int = 0
    order: Literal["prompt", "completion"] = "prompt"
    in_flight_update: bool = True
    waits_for_group: bool = False
    """Advantages compare the samples of a group."""
    waits_for_update: bool = False
    """Advantages are whitened over the update."""
    groups_sampled_at_most: int | None = None
    """Dynamic sampling: groups whose rewards are all equal are replaced, until a step has sampled so many; None: off."""
    start_step: int = 0
    carried: tuple[int, ...] = ()
    """Groups that an earlier run had admitted and not trained when it was saved: they come first."""
    next_group: int | None = None
    """The first group after those; default: the first of `start_step`."""
    initial_sync: bool = False
    """Publish the trainer's weights before the first rollout: after a resume, for snapshots, adapters, for engines that held others."""
    checkpoint_every: int | None = None
    evaluation: EvaluationPlan | None = None
    sleeping: tuple[tuple[str, str], ...] = ()
    """(device group, the stage that is awake first) of groups whose stages leave the memory to one another (`awake.py`)."""

    def resource(self, group: str) -> str:
        """What tasks on a device group exclude one another by: without overlap, everything."""
        return group if self.overlap else "*"


def run_plan(
    recipe: OnlineRecipe,
    step_groups: Sequence[int],
    slots: dict[str, int],
    start_step: int = 0,
    engines: int | None = None,
    evaluation_prompts: int = 0,
    untrained: tuple[tuple[int, ...], int] | None = None,
    sleeping: Mapping[str, str] | None = None,
) -> RunPlan:
    """The plan of a recipe.

    Args:
        slots: device group → workers of one kind that it has room for.
        engines: rollout engines that run already and hold other weights; default: one a slot, freshly loaded.
        evaluation_prompts: held-out prompts.
        untrained: what a checkpoint says of groups in flight (`Membership.untrained`).
        sleeping: `recipe.sleeping_groups`; default: none.
    """
    parts = score_parts(recipe)
    trained = train_groups(recipe)
    return RunPlan(
        step_groups=tuple(step_groups),
        samples_per_group=recipe.samples_per_group,
        samples_per_update=recipe.samples_per_update,
        micro_batch_size=recipe.pipeline.micro_batch_size,
        update_epochs=recipe.algorithm.update_epochs,
        engines=engines or slots[recipe.role_group("rollout")],
        engine_slots=recipe.rollout.max_concurrent_requests,
        rollout_group=recipe.role_group("rollout"),
        parts=parts,
        part_workers=tuple(recipe.score_workers(part.group, slots[part.group]) for part in parts),
        train_groups=trained,
        overlap=recipe.pipeline.overlap,
        max_staleness=recipe.pipeline.max_staleness,
        order=recipe.pipeline.order,
        in_flight_update=recipe.pipeline.in_flight_update,
        judged=bool(recipe.judged_rewards),
        groups_sampled_at_most=groups_sampled_at_most(recipe),
        waits_for_group=recipe.needs_group,
        waits_for_update=recipe.needs_barrier,
        start_step=start_step,
        initial_sync=start_step > 0 or engines is not None or bool(recipe.snapshot_roles) or recipe.lora is not None,
        checkpoint_every=recipe.checkpoint.every,
        evaluation=_evaluation_plan(recipe, evaluation_prompts),
        carried=untrained[0] if untrained else (),
        next_group=untrained[1] if untrained else None,
        sleeping=tuple((sleeping or {}).items()),
    )


def _evaluation_plan(recipe: OnlineRecipe, prompts: int) -> EvaluationPlan | None:
    section = recipe.evaluate
    if section is None:
        return None
    return EvaluationPlan(prompts, section.n_samples_per_prompt + section.greedy, section.every, recipe.evaluates_in_bubbles)


def groups_sampled_at_most(recipe: OnlineRecipe) -> int | None:
    rollout = recipe.rollout
    return int(rollout.dynamic_sampling_limit * recipe.train.rollout_batch_size) if rollout.dynamic_sampling else None


def score_parts(recipe: OnlineRecipe) -> tuple[ScorePart, ...]:
    """One part a device group; with staleness, snapshots stand apart so that rewards need not wait for them. So does a reference
    that is refreshed: it has a version of its own."""
    split, refresh = recipe.pipeline.max_staleness > 0, recipe.algorithm.reference_refresh
    parts: dict[tuple[str, int], list[str]] = {}
    for role in (*recipe.score_roles, *recipe.snapshot_roles):
        renewed = role == "reference" and refresh is not None
        apart = 2 if renewed else int(role in recipe.snapshot_roles and split)
        parts.setdefault((recipe.role_group(role), apart), []).append(role)
    return tuple(
        ScorePart(
            group,
            tuple(roles),
            versioned=any(role in recipe.snapshot_roles for role in roles),
            rewards=tuple(reward.name for reward in recipe.model_rewards if reward.name in roles),
            refresh=refresh if apart == 2 else None,
        )
        for (group, apart), roles in sorted(parts.items())
    )


def train_groups(recipe: OnlineRecipe) -> tuple[TrainGroup, ...]:
    """The actor's group first; the critic's, when it is another."""
    actor = recipe.role_group("actor")
    if not recipe.uses_critic:
        return (TrainGroup(actor, ("actor",)),)
    if not recipe.critic_apart:
        return (TrainGroup(actor, ("actor", "critic")),)
    return (TrainGroup(actor, ("actor",)), TrainGroup(recipe.role_group("critic"), ("critic",)))
