"""What the scheduler says (actions) and hears (events). Plain values: they can be logged, compared
and replayed, and mean the same to the executor on Ray and to the simulator on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey


@dataclass(frozen=True, slots=True)
class Admit:
    """Sample a group on an engine. Answered by one `SampleFinished` for each of its samples."""

    engine: int
    group: int
    step: int


@dataclass(frozen=True, slots=True)
class Score:
    """Run a score part on a micro-batch."""

    part: int
    worker: int
    key: MicroBatchKey
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Judge:
    """Give a sample to the rewards that are functions or urls. Answered by a `SampleJudged`."""

    sample: SampleId
    version: int | None = None
    """Of a held-out sample: the version that is evaluated."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A group is left out, because its rewards are all equal. Nothing answers."""

    group: int
    step: int
    """That it would have been trained in."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Give a scored micro-batch to the ranks of a train group. Needs no device, so it may be
    sent while they train."""

    train_group: int
    key: MicroBatchKey
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Forward and backward over a prepared micro-batch."""

    train_group: int
    key: MicroBatchKey
    samples: tuple[SampleId, ...]
    update: int
    """Number of the update within the step, counting all passes."""
    last: bool
    """The last micro-batch of its update."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    train_group: int
    step: int
    update: int
    """Counting all passes."""
    base: int
    """The same within one pass: which samples it is over."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Gather the trained weights as version `version`."""

    train_group: int
    version: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save the state after `step` steps."""

    train_group: int
    step: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A step's samples are no longer needed: free them, write their rows."""

    train_group: int
    step: int


@dataclass(frozen=True, slots=True)
class InstallEngine:
    engine: int
    version: int


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """Load a version into the snapshots of a worker of a score part."""

    part: int
    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Sample a held-out prompt on an engine. Answered by one `EvaluationSampled` for each of its samples."""

    engine: int
    prompt: int
    """Its place in the evaluation's file."""
    version: int


@dataclass(frozen=True, slots=True)
class ScoreEvaluation:
    """Run a score part's rewards on the samples of held-out prompts."""

    part: int
    worker: int
    version: int
    prompts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseEvaluation:
    """A version's evaluation is over: write its line."""

    version: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """The workers of a stage leave the memory of a device group, then those of another come back to it."""

    group: str
    leaving: str
    """rollout, score or train; so is `coming`."""
    coming: str

    def step(self, version: int) -> int:
        """From 0, the step it is done for, when `version` is the newest published: on the way back to the engines that of the weights
        which they are about to take."""
        back = self.leaving == "train" or self.coming == "rollout"
        return max(0, version - 1) if back else version


Action = (
    Admit
    | HandOver
    | Judge
    | Drop
    | Score
    | Prepare
    | Train
    | Update
    | Publish
    | Checkpoint
    | Finish
    | InstallEngine
    | InstallSnapshot
    | Evaluate
    | ScoreEvaluation
    | CloseEvaluation
)


@dataclass(frozen=True, slots=True)
class EvaluationSampled:
    """A sample of a held-out prompt has left its engine."""

    engine: int
    prompt: int
    version: int
    aborted: bool
    """It made room for new weights and is lost."""


@dataclass(frozen=True, slots=True)
class SampleFinished:
    engine: int
    id: SampleId
    oldest_version: int
    """Version that sampled its first token."""


@dataclass(frozen=True, slots=True)
class SampleJudged:
    """The rewards that are functions or urls have answered."""

    id: SampleId
    version: int | None = None
    """Of a held-out sample: the version that is evaluated."""
    equal: bool = False
    """Dynamic sampling; said with the last sample of a group: its rewards are all equal."""


@dataclass(frozen=True, slots=True)
class Done:
    """Any action that is not answered by news of samples has been carried out."""

    action: Action


Event = SampleFinished | SampleJudged | EvaluationSampled | Done
