"""Models of the score stage that are the policy, now or before training, or its critic: what each worker loads of them.

adapters that travel      policy_snapshot = base + adapter, installed; reference = the same module, adapter off: one copy of the base
all weights travel        policy_snapshot is a whole model; the reference another
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from conveyor.config import OnlineRecipe
from conveyor.models.adapters import add_adapter
from conveyor.models.language_model import load_language_model
from conveyor.models.quantized import round_weights
from conveyor.models.routing import watch
from conveyor.models.scalar_model import load_critic


def shared_reference(recipe: OnlineRecipe, roles: Sequence[str]) -> bool:
    """Whether a worker of these roles needs no copy of the reference: it is its snapshot of the policy without the adapter."""
    return (
        {"reference", "policy_snapshot"} <= {*roles}
        and recipe.adapter_travels
        and not recipe.rollout.routing_replay
        and recipe.reference_is_model
        and recipe.algorithm.reference_refresh is None
    )


def load_policy(recipe: OnlineRecipe, role: str) -> PreTrainedModel:
    """The model of `reference`, `policy_snapshot` or `critic_snapshot`, as it is at the start."""
    lora = recipe.lora
    follows = role != "reference" or recipe.algorithm.reference_refresh is not None
    if role == "critic_snapshot":
        model = load_critic(recipe)
    elif role == "reference" and not recipe.reference_is_model:
        assert recipe.reference is not None
        return load_language_model(recipe.reference)
    else:
        model = load_language_model(recipe.model, lora if recipe.adapter_travels or not follows else None)
        if role == "policy_snapshot":
            watch(model, None, recipe.rollout.routing_replay)
    if lora is not None and follows:
        if role == "critic_snapshot" or recipe.adapter_travels:
            add_adapter(model, lora, recipe.seed)
        elif lora.quantization is not None:
            round_weights(model)  # what comes merged is of the same values
    return model
