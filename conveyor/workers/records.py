"""Records on their way between workers: references to bundles of them, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from conveyor.types import Rollout


class RolloutRef(NamedTuple):
    """A sample in a bundle: what leaves an engine together travels together, as one object."""

    bundle: Any
    """Object reference of a tuple of `Rollout`s."""
    place: int


def fetch_rollouts(rollouts: Sequence[RolloutRef | Rollout]) -> list[Rollout]:
    """Rollouts themselves, or what their references stand for; each bundle is fetched once."""
    bundles = {id(item.bundle): item.bundle for item in rollouts if isinstance(item, RolloutRef)}
    fetched = dict(zip(bundles, fetch(list(bundles.values())), strict=True))
    return [fetched[id(item.bundle)][item.place] if isinstance(item, RolloutRef) else item for item in rollouts]


def fetch(items: Sequence[Any]) -> list[Any]:
    """Records themselves, or what their references stand for."""
    import ray

    references = [item for item in items if isinstance(item, ray.ObjectRef)]
    if not references:
        return list(items)
    fetched = iter(ray.get(references))
    return [next(fetched) if isinstance(item, ray.ObjectRef) else item for item in items]
