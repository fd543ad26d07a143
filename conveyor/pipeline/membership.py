"""Which groups a step is made of, and when the next one may be admitted. Pure.

`order: prompt`, and on-policy runs: the groups of a step are those of its prompts, known before anything is sampled.

`order: completion` with `max_staleness` k ≥ 1: a step is made of the groups that finish first. A group admitted under version v may be
trained in step v + k at the latest, its *deadline*; so a step keeps room for the unfinished groups whose deadline it is, and a
group is admitted only while all deadlines can be kept: for every step u, the room in steps ≤ u is at least the number of groups in
flight with a deadline ≤ u. That is checked when a group comes in and when one is placed, and so holds always.

Dynamic sampling leaves groups out once they are judged (`judged` instead of `finish`), and others come in their place. Then a step of
`order: prompt` is made of the groups that stay, in prompt order (`selection.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from itertools import accumulate

from conveyor.pipeline.run_plan import RunPlan
from conveyor.pipeline.selection import Selection
from conveyor.types import SampleId


class Membership:
    """Groups on their way into steps. Legal order for a group: `admit`, `finish` or `judged`, `forget` of its step."""

    def __init__(self, plan: RunPlan) -> None:
        self._bound, self._per_group = plan.max_staleness, plan.samples_per_group
        self._starts = (0, *accumulate(plan.step_groups))
        self._steps = len(plan.step_groups)
        self.by_completion = plan.order == "completion" and plan.max_staleness > 0
        self._carried = deque(plan.carried)
        self._next = self._starts[plan.start_step] if plan.next_group is None else plan.next_group
        self._room = {step: plan.step_groups[step] for step in range(plan.start_step, self._steps)}
        """Groups that a step still lacks; steps that lack none are left out."""
        self._deadlines: dict[int, int] = {}
        """Groups in flight → the last step they may be trained in."""
        self._due: Counter[int] = Counter()
        """Deadline → groups in flight."""
        self._step_of: dict[int, int] = {}
        most, size = plan.groups_sampled_at_most, max(plan.step_groups, default=0)
        self.dynamic = most is not None
        """Which groups a step has is known only when they are judged."""
        self._size, self._spare, self._dropped = size, (most or size) - size, 0
        self._selection = Selection(plan.start_step, size, most) if most is not None and not self.by_completion else None
        self._ends = {plan.start_step: self._next}
        """Of dynamic sampling in prompt order: steps done → the first group that none of them has looked at."""

    @property
    def next_group(self) -> int | None:
        """The next group in prompt order; None when all are admitted."""
        if self._selection is not None and self._latest_step >= self._steps:
            return None
        if self._carried:
            return self._carried[0]
        return self._next if self.dynamic or self._next < self._starts[-1] else None

    @property
    def _latest_step(self) -> int:
        """Dynamic sampling in prompt order: the step of the next group, if all before it stay."""
        assert self._selection is not None
        return self._selection.step + self._selection.holds // self._size

    @property
    def expected_step(self) -> int:
        """The step of the next group, as far as can be told."""
        group = self.next_group
        assert group is not None
        if self._selection is not None:
            return self._latest_step
        return min(self._room) if self.dynamic else self.prompt_step(group)

    def prompt_step(self, group: int) -> int:
        """The step whose prompts the group is of."""
        return bisect_right(self._starts, group) - 1

    def samples(self, step: int) -> tuple[SampleId, ...]:
        """Those of a step's prompts, in prompt order."""
        groups = range(self._starts[step], self._starts[step + 1])
        return tuple(SampleId(group, sample) for group in groups for sample in range(self._per_group))

    def place(self, sample: SampleId) -> int:
        """A sample's place among `samples` of its prompt's step."""
        return (sample.group - self._starts[self.prompt_step(sample.group)]) * self._per_group + sample.sample

    def may_admit(self, version: int) -> bool:
        """Whether the next group may be sampled under this version."""
        group = self.next_group
        if group is None:
            return False
        if not self.by_completion:
            return self.expected_step - version <= self._bound
        return self._feasible(self._deadline(version), 1)

    def admit(self, version: int) -> int:
        """Take the next group; returns it."""
        group = self.next_group
        assert group is not None
        if self._carried:
            self._carried.popleft()
        else:
            self._next += 1
        if self.by_completion:
            self._deadlines[group] = self._deadline(version)
            self._due[self._deadlines[group]] += 1
        elif self._selection is not None:
            self._selection.admit(group)
        else:
            self._step_of[group] = self.prompt_step(group)
        return group

    def finish(self, group: int) -> int:
        """All samples of a group are there; returns the step it is trained in: the first that has room for it."""
        if self.by_completion:
            deadline = self._deadlines.pop(group)
            self._due[deadline] -= 1
            step = next(step for step in self._room if self._feasible(step, 1))
            assert step <= deadline, f"group {group} misses its deadline: step {step}, not {deadline}"
            self._room[step] -= 1
            if not self._room[step]:
                del self._room[step]
            self._step_of[group] = step
        return self._step_of[group]

    def judged(self, group: int, equal: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Dynamic sampling: a group's rewards are there. Returns (group, step) of those that are certain to stay now, in the order in
        which they are trained, and of those that are left out."""
        if self._selection is None:
            return self._judged_by_completion(group, equal)
        kept, dropped = self._selection.judged(group, equal)
        self._step_of.update(kept)
        for of_step, step in kept:
            self._ends[step + 1] = max(self._ends.get(step + 1, 0), of_step + 1)
        return kept, dropped

    def _judged_by_completion(self, group: int, equal: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        if equal and self._dropped < self._spare:
            self._dropped += 1
            self._due[self._deadlines.pop(group)] -= 1
            return [], [(group, min(self._room))]
        step = self.finish(group)
        if step not in self._room:
            self._dropped = 0
        return [(group, step)], []

    def step_of(self, group: int) -> int | None:
        """The step of a group, None while that is open."""
        return self._step_of.get(group)

    def forget(self, step: int) -> None:
        """A step is trained."""
        for group in [group for group, of in self._step_of.items() if of == step]:
            del self._step_of[group]

    def untrained(self, step: int) -> tuple[tuple[int, ...], int]:
        """After `step` steps: groups that were admitted and belong to none of them, in prompt order, and the next group."""
        if not self.by_completion and not self.dynamic:
            return (), self._starts[step]
        if self._selection is not None and self._bound == 0:
            return (), self._ends[step]  # all later ones are judged anew, by the same policy
        later = [group for group, of in self._step_of.items() if of >= step]
        in_flight = self._deadlines if self._selection is None else self._selection.waiting
        return tuple(sorted((*self._carried, *in_flight, *later))), self._next

    def _deadline(self, version: int) -> int:
        return min(version + self._bound, self._steps - 1)

    def _feasible(self, first: int, more: int) -> bool:
        """Whether every deadline is kept if steps ≤ u had to take `more` other groups, for each u ≥ first."""
        last = max((deadline for deadline, count in self._due.items() if count), default=first)
        spare = 0
        for step in range(min((*self._room, first)), max(first, last) + 1):
            spare += self._room.get(step, 0) - self._due[step]
            if step >= first and spare < more:
                return False
        return True
