"""Worker processes that outlive a run.

Most of a short run's time goes into importing torch, transformers and DeepSpeed in the processes of its workers. Here the
workers of every run are made anew, by their own constructors, with their own models, but in processes that have imported
everything. Nothing else is kept. Random states go on from run to run, so what depended on them would differ between runs
that have to be equal.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from conveyor.config import sections
from conveyor.workers.placement import Placement
from conveyor.workers.reward import RewardWorker
from conveyor.workers.score import ScoreWorker
from conveyor.workers.train import TrainWorker


class _Kept:
    """A worker class whose constructor is called by `begin`, any number of times."""

    def __init__(self) -> None:
        pass

    def begin(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def end(self) -> None:
        vars(self).clear()
        gc.collect()


class _KeptScoreWorker(_Kept, ScoreWorker):
    pass


class _KeptTrainWorker(_Kept, TrainWorker):
    """The only rank of its group, whose process group stays, as DeepSpeed keeps the one it first saw."""

    def begin(self, **kwargs: Any) -> None:
        assert kwargs["world_size"] == 1
        super().begin(**kwargs)


class _KeptRewardWorker(_Kept, RewardWorker):
    def end(self) -> None:
        self.close()
        super().end()


class KeptWorkers:
    """One process for each kind of worker; they start at once, and are imported by the time they are first asked."""

    def __init__(self) -> None:
        self.placement = Placement.create({"score": 1, "train": 1}, sections.Ray())
        self.workers: dict[type, Any] = {
            ScoreWorker: self.placement.actor(_KeptScoreWorker, "score", 0),
            TrainWorker: self.placement.actor(_KeptTrainWorker, "train", 0),
            RewardWorker: self.placement.beside_driver(_KeptRewardWorker),
        }

    def close(self) -> None:
        self.placement.close()


class KeptPlacement:
    """What a run needs of a `Placement`, of kept workers, each of which may be had once. A group of another size than the kept one
    has processes of its own."""

    kind: ClassVar[Literal["CPU"]] = "CPU"

    def __init__(self, kept: KeptWorkers, devices: Mapping[str, float]) -> None:
        self.devices, self.kind = devices, kept.placement.kind
        self._kept, self._begun = kept, list[Any]()
        own = {group: count for group, count in devices.items() if count != kept.placement.devices[group]}
        self._own = Placement.create(own, sections.Ray()) if own else None

    def slots(self, group: str) -> int:
        return self._of(group).slots(group)

    def cores(self, group: str, index: int) -> tuple[int, ...] | None:
        return self._of(group).cores(group, index)

    def actor(self, cls: type, group: str, index: int, *, share: float, **kwargs: Any) -> Any:
        of = self._of(group)
        if of is self._own:
            return of.actor(cls, group, index, share=share, **kwargs)
        kwargs.pop("env", None)  # of processes that have started
        return self._begin(cls, kwargs)

    def beside_driver(self, cls: type, **kwargs: Any) -> Any:
        return self._begin(cls, kwargs)

    def _of(self, group: str) -> Placement:
        return self._own if self._own is not None and group in self._own.devices else self._kept.placement

    def _begin(self, cls: type, kwargs: dict[str, Any]) -> Any:
        import ray

        worker = self._kept.workers[cls]
        assert worker not in self._begun
        self._begun.append(worker)
        ray.get(worker.begin.remote(**kwargs), timeout=120)  # some answer several calls at once, `ready` has to come after
        return worker

    def close(self) -> None:
        import ray

        ray.get([worker.end.remote() for worker in self._begun], timeout=120)

    def __enter__(self) -> KeptPlacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._own is not None:
            self._own.close()
