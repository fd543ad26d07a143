"""The rules of the rewards section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conveyor.config.sections import Reward

TAKEN = (
    "reference", "actor", "critic", "rollout", "score", "policy_snapshot", "critic_snapshot", "mean", "timeouts", "errors", "rewards",
)  # fmt: skip
"""Names of roles and metrics."""


def broken_reward_rules(rewards: Sequence[Reward]) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule that the rewards of a recipe break."""
    for reward in rewards:
        if sum(source is not None for source in (reward.model, reward.function, reward.url)) != 1:
            yield f"rewards.{reward.name}", "give exactly one of model, function and url"
        if reward.url is not None and not reward.url.startswith(("http://", "https://")):
            yield f"rewards.{reward.name}.url", f"{reward.url!r} does not begin with http:// or https://"
        if reward.arguments and reward.model is not None:
            yield f"rewards.{reward.name}.arguments", "a reward model takes none"
        if reward.steps is not None and reward.model is None:
            yield f"rewards.{reward.name}.steps", "belongs to a model"
        if reward.token_variable is not None and reward.url is None:
            yield f"rewards.{reward.name}.token_variable", "belongs to a url"
    names = [reward.name for reward in rewards]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield "rewards", f"two rewards are named {name}"
        if name in TAKEN:
            yield "rewards", f"{name} is the name of a role or metric, choose another"
