"""What tasks cost: the seconds the simulator gives to each action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from conveyor.pipeline.run_plan import ScorePart, TrainGroup
from conveyor.plan.engines import EngineModel
from conveyor.plan.lengths import Size, drawn_for
from conveyor.types import SampleId


def installed_roles(part: ScorePart) -> tuple[str, ...]:
    """Roles of a part that take published weights: snapshots, and a reference that is refreshed."""
    return tuple(role for role in part.roles if role.endswith("_snapshot") or (role == "reference" and part.refresh is not None))


class CostModel(Protocol):
    """Seconds of every task. A train group's ranks work as one: its costs are those of the slowest rank."""

    @property
    def engine(self) -> EngineModel: ...

    @property
    def latency(self) -> float:
        """From the end of a task to the start of the one that the driver sends for it."""

    def score(self, part: ScorePart, samples: Sequence[Size]) -> float: ...

    def judge(self, sample: SampleId) -> float:
        """From when functions and urls get a sample until the last has answered."""

    def prepare(self, group: TrainGroup, samples: Sequence[Size]) -> float: ...

    def train(self, group: TrainGroup, samples: Sequence[Size]) -> float: ...

    def update(self, group: TrainGroup) -> float: ...

    def publish(self, group: TrainGroup) -> float: ...

    def install_engine(self) -> float: ...

    def install_snapshot(self, part: ScorePart) -> float: ...

    def checkpoint(self, group: TrainGroup) -> float: ...

    def finish(self, group: TrainGroup) -> float: ...

    def move(self, group: str, stage: str) -> float:
        """A stage's workers leave the memory of a device group, or come back to it."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Seconds of a task over samples: constant + per_sample · samples + per_token · tokens (prompt and response)."""

    constant: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0

    def __call__(self, samples: Sequence[Size]) -> float:
        tokens = sum(size.total for size in samples) if self.per_token else 0
        return self.constant + self.per_sample * len(samples) + self.per_token * tokens

    def times(self, share: float) -> Linear:
        return Linear(self.constant * share, self.per_sample * share, self.per_token * share)


@dataclass(frozen=True, slots=True)
class TrainerCosts:
    """Seconds of the tasks of one train group."""

    train: Linear
    prepare: Linear = Linear()
    update: float = 0.0
    publish: float = 0.0
    checkpoint: float = 0.0
    finish: float = 0.0

    def on_ranks(self, share: float) -> TrainerCosts:
        """With the samples of a micro-batch shared out to so many times fewer ranks."""
        train, prepare = (Linear(cost.constant, cost.per_sample * share, cost.per_token * share) for cost in (self.train, self.prepare))
        return replace(self, train=train, prepare=prepare)


@dataclass(frozen=True)
class TaskCosts:
    """A cost model of plain numbers: measured, fitted or made up.

    Example: `TaskCosts(FixedDurations(seconds), {"reward": Linear(0.15)}, {"actor": TrainerCosts(Linear(0.25))})`.
    """

    engine: EngineModel
    scorers: Mapping[str, Linear]
    """By the roles of a part, joined by + as in events."""
    trainers: Mapping[str, TrainerCosts]
    """By the roles of a train group, joined by +."""
    engine_install: float = 0.0
    snapshot_install: float = 0.0
    """Of all snapshots of a part together."""
    latency: float = 0.0
    reference_install: float = 0.0
    """Of a reference that is refreshed."""
    judging: Sequence[float] = (0.0,)
    """Of functions and urls: each sample takes one of these, drawn by its name."""
    moves: Mapping[str, float] = field(default_factory=dict)
    """Stage → seconds in which its workers go to sleep, or wake."""

    def score(self, part: ScorePart, samples: Sequence[Size]) -> float:
        return self.scorers["+".join(part.roles)](samples)

    def judge(self, sample: SampleId) -> float:
        return self.judging[int(drawn_for(*sample) * len(self.judging))]

    def prepare(self, group: TrainGroup, samples: Sequence[Size]) -> float:
        return self._trainer(group).prepare(samples)

    def train(self, group: TrainGroup, samples: Sequence[Size]) -> float:
        return self._trainer(group).train(samples)

    def update(self, group: TrainGroup) -> float:
        return self._trainer(group).update

    def publish(self, group: TrainGroup) -> float:
        return self._trainer(group).publish

    def install_engine(self) -> float:
        return self.engine_install

    def install_snapshot(self, part: ScorePart) -> float:
        return self.snapshot_install if part.refresh is None else self.reference_install

    def checkpoint(self, group: TrainGroup) -> float:
        return self._trainer(group).checkpoint

    def finish(self, group: TrainGroup) -> float:
        return self._trainer(group).finish

    def move(self, group: str, stage: str) -> float:
        return self.moves.get(stage, 0.0)

    def _trainer(self, group: TrainGroup) -> TrainerCosts:
        return self.trainers["+".join(group.roles)]
