"""What the scheduler knows of the rollout engines: their versions, and what they hold. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from conveyor.pipeline.run_plan import RunPlan


class EnginePool:
    """All engines of a run. Each holds whole groups of samples, and samples of held-out prompts."""

    def __init__(self, plan: RunPlan, version: int) -> None:
        """version: that all engines hold."""
        self._plan = plan
        self.versions = [version] * plan.engines
        self._load: list[Counter[int]] = [Counter() for _ in range(plan.engines)]
        self._samples = [0] * plan.engines
        self._held_out = [0] * plan.engines
        self._installing: dict[int, int] = {}
        """Engine → the version on its way in."""
        self._old: set[int] = set()
        """Those that hold an older version than the newest."""
        self._maybe_able = set(range(plan.engines))
        """Those that something has happened to since they were last found unable to take a group: the others still are."""

    # ── what may be asked of an engine ───────────────────────────────────────────────────────────

    def to_install(self, keeps_version: Callable[[int], bool]) -> int | None:
        """An engine that may take the newest weights now; `keeps_version(version)`: one that holds that version may not."""
        for engine in sorted(self._old - self._installing.keys()) if self._old else ():
            drained = self._plan.in_flight_update or not self._load[engine]
            if drained and not keeps_version(self.versions[engine]):
                return engine
        return None

    def able(self, may_admit: Callable[[int], bool]) -> int | None:
        """The emptiest engine that can take a group; `may_admit(version)`: whether the next group may be of that version."""
        self._maybe_able = {engine for engine in self._maybe_able if self._takes_group(engine) and may_admit(self.versions[engine])}
        return min(self._maybe_able, key=lambda engine: (self._samples[engine], engine), default=None)

    def _takes_group(self, engine: int) -> bool:
        draining = engine in self._installing or (engine in self._old and not self._plan.in_flight_update)
        return not draining and self.has_room(engine, self._plan.samples_per_group) and self.versions[engine] >= self._plan.start_step

    def has_room(self, engine: int, samples: int) -> bool:
        return self._samples[engine] + self._held_out[engine] + samples <= self._plan.engine_slots

    def installing(self, engine: int) -> bool:
        return engine in self._installing

    def idle(self, engine: int) -> bool:
        """Holds the newest weights and no sample of the training."""
        return not self._load[engine] and engine not in self._old and engine not in self._installing

    @property
    def held(self) -> set[int]:
        """Versions that engines hold, or will when an install that runs has ended."""
        return {*self.versions, *self._installing.values()}

    @property
    def sampling(self) -> bool:
        """Whether any engine holds a sample of the training."""
        return any(self._samples)

    # ── what happens to it ───────────────────────────────────────────────────────────────────────

    def admit(self, engine: int, group: int) -> None:
        self._load[engine][group] = self._plan.samples_per_group
        self._samples[engine] += self._plan.samples_per_group

    def sample_finished(self, engine: int, group: int) -> bool:
        """Whether it was the group's last."""
        load = self._load[engine]
        assert load[group] > 0, f"a sample of group {group} came from engine {engine}, which does not hold its group"
        load[group] -= 1
        self._samples[engine] -= 1
        self._maybe_able.add(engine)
        if load[group]:
            return False
        del load[group]
        return True

    def group_dropped(self) -> None:
        """Dynamic sampling: there is room for another group, so an engine may be able that nothing has happened to."""
        self._maybe_able = set(range(self._plan.engines))

    def evaluate(self, engine: int, samples: int) -> None:
        """Samples of a held-out prompt enter an engine."""
        self._held_out[engine] += samples

    def evaluated(self, engine: int, version: int) -> None:
        """A sample of a held-out prompt has left, whose prompt went in under `version`."""
        if version == self.versions[engine]:  # an install has emptied it of older ones, whenever the news of them come
            self._held_out[engine] -= 1
            self._maybe_able.add(engine)

    def published(self) -> None:
        """There is a newer version."""
        self._old = set(range(self._plan.engines))

    def install(self, engine: int, version: int) -> None:
        self._installing[engine] = version

    def installed(self, engine: int, version: int, newest: int) -> None:
        del self._installing[engine]
        self.versions[engine] = version
        self._held_out[engine] = 0
        self._maybe_able.add(engine)
        if version == newest:
            self._old.discard(engine)
