"""What a method's name sets before the recipe's own keys are laid over it: docs/methods.md says where each comes from."""

from __future__ import annotations

from typing import Any


def _group(**algorithm: Any) -> dict[str, dict[str, Any]]:
    return {"rollout": {"n_samples_per_prompt": 8}, **({"algorithm": algorithm} if algorithm else {})}


METHOD_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {},
    "grpo": _group(advantage_estimator="group_norm", kl_in="loss", kl_estimator="k3"),
    "dr_grpo": _group(advantage_estimator="dr_grpo", loss_aggregation="constant", kl_coef=0.0),
    "rloo": _group(advantage_estimator="rloo"),
    "opo": _group(advantage_estimator="opo", policy_loss="policy_gradient", kl_coef=0.0),
    "reinforce": {"algorithm": {"advantage_estimator": "reinforce", "policy_loss": "policy_gradient"}},
    "reinforce_pp": {"algorithm": {"advantage_estimator": "reinforce_pp", "normalize": "update"}},
    "reinforce_pp_baseline": _group(
        advantage_estimator="reinforce_pp_baseline", normalize="update", kl_in="loss", kl_estimator="k2", kl_coef=0.01
    ),
    "remax": {"algorithm": {"advantage_estimator": "remax", "policy_loss": "policy_gradient"}},
    "dapo": {
        "rollout": {"n_samples_per_prompt": 8, "dynamic_sampling": True},
        "algorithm": {"advantage_estimator": "group_norm", "clip_ratio": 0.2, "clip_ratio_high": 0.28, "kl_coef": 0.0},
    },
    "gspo": _group(
        advantage_estimator="group_norm", policy_loss="gspo", clip_ratio=3e-4, clip_ratio_high=4e-4,
        loss_aggregation="sequence_mean", kl_coef=0.0,
    ),
    "cispo": _group(advantage_estimator="group_norm", policy_loss="cispo", clip_ratio=1.0, clip_ratio_high=4.0, kl_coef=0.0),
    "distillation": {"algorithm": {"advantage_estimator": "reinforce", "policy_loss": "policy_gradient", "gamma": 0.0, "kl_coef": 1.0}},
    "online_dpo": {
        "rollout": {"n_samples_per_prompt": 2},
        "algorithm": {"advantage_estimator": "best_worst", "policy_loss": "dpo", "kl_coef": 0.0},
    },
}  # fmt: skip
"""Of the online methods."""

LOOP_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = dict.fromkeys(("rejection_sampling", "rso", "iterative_dpo"), _group())
"""Of the methods in rounds."""
DEFAULTS = METHOD_DEFAULTS | LOOP_DEFAULTS
