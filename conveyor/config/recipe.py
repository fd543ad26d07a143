"""A recipe: the sections, tied together by `method`, and what follows from them. The rules between them are in `rules.py`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field

from conveyor.config import sections
from conveyor.config.common import Common
from conveyor.config.loops import LOOP_RECIPES, LoopRecipe
from conveyor.config.offline import OFFLINE_RECIPES, OfflineRecipe

GROUP_ESTIMATORS = ("group_norm", "dr_grpo", "rloo", "opo", "best_worst")
"""One advantage a sample, from the outcomes of its group."""
RETURN_ESTIMATORS = ("reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax")
"""Advantages by token: the return from there on, less a baseline of the sample."""
OnlineMethod = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "opo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "dapo", "gspo", "cispo",
    "distillation", "online_dpo",
]  # fmt: skip


class OnlineRecipe(Common):
    """Methods that sample: rollout → score → train."""

    method: OnlineMethod
    reference: sections.Model | None = Field(None, description="default: model; of distillation the teacher")
    critic: sections.Model | None = Field(None, description="sequence classifier the critic starts from; default: model with a new head")
    rewards: tuple[sections.Reward, ...] = Field((), description="summed with their weights")
    roles: dict[str, str] = Field(
        {}, description="role → device group; roles: rollout, actor, critic, reference, names of reward models, score"
    )
    rollout: sections.Rollout = sections.Rollout()
    algorithm: sections.Algorithm = sections.Algorithm()
    score: sections.Score = sections.Score()
    ptx: sections.Ptx | None = Field(None, description="a supervised loss mixed into every update (PPO-ptx)")
    pipeline: sections.Pipeline = sections.Pipeline()
    evaluate: sections.Evaluate | None = Field(None, description="held-out prompts, sampled and scored during training")

    # ── what takes part ──────────────────────────────────────────────────────────────────────────

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.advantage_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.kl_coef > 0 or self.algorithm.policy_loss == "dpo"

    @property
    def judged_rewards(self) -> tuple[sections.Reward, ...]:
        """Functions and urls: scored sample by sample, on no device."""
        return tuple(reward for reward in self.rewards if reward.judged)

    @property
    def model_rewards(self) -> tuple[sections.Reward, ...]:
        return tuple(reward for reward in self.rewards if not reward.judged)

    # ── sizes ────────────────────────────────────────────────────────────────────────────────────

    @property
    def greedy_baseline(self) -> bool:
        """Each group has one more sample, of likeliest tokens, which is scored and not trained (ReMax)."""
        return self.algorithm.advantage_estimator == "remax"

    @property
    def samples_per_group(self) -> int:
        return self.rollout.n_samples_per_prompt + self.greedy_baseline

    @property
    def samples_per_step(self) -> int:
        return self.train.rollout_batch_size * self.samples_per_group

    @property
    def samples_per_update(self) -> int:
        """Greedy baselines included, which `train.train_batch_size` does not count."""
        given, n = self.train.train_batch_size, self.rollout.n_samples_per_prompt
        return self.samples_per_step if given is None else given // n * self.samples_per_group

    # ── what waits for what ──────────────────────────────────────────────────────────────────────

    @property
    def needs_group(self) -> bool:
        """Advantages compare the samples of a group."""
        return self.algorithm.advantage_estimator in (*GROUP_ESTIMATORS, "reinforce_pp_baseline", "remax")

    @property
    def needs_barrier(self) -> bool:
        """Advantages need the whole update before any of it is trained."""
        return self.algorithm.normalize == "update" or any(reward.normalize == "batch" for reward in self.rewards)

    @property
    def uses_snapshots(self) -> bool:
        """Old log-probs and values come from snapshots when the trainer's own weights may have
        moved on before a micro-batch arrives, or are needed before its own pass over it."""
        several_updates = self.samples_per_update < self.samples_per_step or self.algorithm.update_epochs > 1
        return (several_updates and self._needs_old_policy) or (
            self.uses_critic and (several_updates or self.needs_barrier or self.critic_apart)
        )

    @property
    def _needs_old_policy(self) -> bool:
        """Losses without a ratio need no old log-probs, but the weights against another sampling policy do."""
        return self.algorithm.policy_loss not in ("policy_gradient", "dpo") or self.importance_cap is not None

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
        return reference + tuple(reward.name for reward in self.model_rewards)

    @property
    def snapshot_roles(self) -> tuple[str, ...]:
        if not self.uses_snapshots:
            return ()
        return ("policy_snapshot", "critic_snapshot") if self.uses_critic else ("policy_snapshot",)

    @property
    def reference_is_model(self) -> bool:
        """The reference is the model as it is before training, not one of its own."""
        return self.reference is None or self.reference == self.model

    @property
    def adapter_travels(self) -> bool:
        """Engines and policy snapshots get the adapter, and keep a base of their own; else all weights, merged."""
        return self.lora is not None and self.lora.travels and self.rollout.engine == "vllm"

    @property
    def trainer_answers(self) -> bool:
        """The reference is on the actor's devices, alone of the score stage, and the actor without its adapter: the trainer computes it."""
        group = self.role_group("actor")
        there = [role for role in (*self.score_roles, *self.snapshot_roles) if self.role_group(role) == group]
        same = self.lora is not None and self.reference_is_model and self.algorithm.reference_refresh is None
        alone = there == ["reference"] and group != self.role_group("rollout")
        return same and alone and self.train.sequence_parallel_size == 1 and not self.rollout.routing_replay

    def score_workers(self, group: str, slots: int) -> int:
        """Workers of a score group of so many devices, as the scheduler counts them."""
        together = self.score.zero_stage == 3 or (self.trainer_answers and group == self.role_group("actor"))
        return 1 if together else slots

    @property
    def beside_rollout(self) -> tuple[str, ...]:
        """Other roles on rollout's device group."""
        group = self.role_group("rollout")
        return tuple(role for role in self.placed_roles if role != "rollout" and self.role_group(role) == group)

    @property
    def stages_of_groups(self) -> dict[str, tuple[str, ...]]:
        """Device group → the stages that have workers on it: rollout, score, train. Of those of one group, one runs at a time."""
        stages = {"rollout": "rollout", "actor": "train", "critic": "train"} | ({"reference": "train"} if self.trainer_answers else {})
        of: dict[str, dict[str, None]] = {}
        for role in self.placed_roles:
            of.setdefault(self.role_group(role), {})[stages.get(role, "score")] = None
        return {group: tuple(found) for group, found in of.items()}

    def sleeping_groups(self, gpus: bool, trains: bool = True) -> dict[str, str]:
        """Device groups whose stages leave the memory to one another (`pipeline.sleep`) → the stage that is awake before and after a
        run: the trainer, which loads and saves, else the engines. `trains`: off where nothing is trained."""
        if not (gpus if self.pipeline.sleep is None else self.pipeline.sleep):
            return {}
        stages = {group: [stage for stage in found if trains or stage != "train"] for group, found in self.stages_of_groups.items()}
        return {group: "train" if "train" in found else "rollout" for group, found in stages.items() if len(found) > 1}

    @property
    def evaluates_in_bubbles(self) -> bool:
        given = None if self.evaluate is None else self.evaluate.in_bubbles
        return not self.beside_rollout if given is None else given

    @property
    def placed_roles(self) -> tuple[str, ...]:
        trained = ("actor", "critic") if self.uses_critic else ("actor",)
        return ("rollout", *self.score_roles, *self.snapshot_roles, *trained)


Recipe = OnlineRecipe | OfflineRecipe | LoopRecipe
_CLASSES: tuple[type[Any], ...] = (*OFFLINE_RECIPES, *LOOP_RECIPES, OnlineRecipe)
CLASS_OF: dict[str, type[Any]] = {method: made for made in _CLASSES for method in get_args(made.model_fields["method"].annotation)}
"""Method → its recipe's class."""
METHODS = tuple(CLASS_OF)
