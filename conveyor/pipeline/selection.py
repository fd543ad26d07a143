"""Dynamic sampling: which groups stay in, and in which step. Pure.

A group whose rewards are all equal tells a group estimator nothing. It is left out and the next prompt is sampled in its place, until a
step has sampled as many groups as it may: then such groups stay in, so that no step waits for ever (DAPO; Yu et al. 2025, §3.2).

Steps are made of the groups that stay, in the order they were admitted. So which groups make a step does not depend on which
was finished first: it is the shortest beginning of the prompt order that has enough of them.
"""

from __future__ import annotations

from collections import deque


class Selection:
    """Groups in the order they were admitted, until it is certain whether they stay."""

    def __init__(self, step: int, groups_per_step: int, sampled_at_most: int) -> None:
        """step: the first to be filled."""
        self.step = step
        """The step that is being filled."""
        self._size, self._spare = groups_per_step, sampled_at_most - groups_per_step
        self._undecided: deque[int] = deque()
        self._equal: dict[int, bool] = {}
        """Groups that are judged, and wait for those before them: whether their rewards are all equal."""
        self._kept = self._dropped = 0
        """Of the step that is being filled."""
        self._gone: set[int] = set()
        """Groups that are certain to be left out, and still wait for those before them."""

    @property
    def holds(self) -> int:
        """Groups that stay, or may, from `step` on."""
        return self._kept + len(self._undecided) - len(self._gone)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Groups that may still stay, and whose step is not certain."""
        return tuple(group for group in self._undecided if group not in self._gone)

    def admit(self, group: int) -> None:
        self._undecided.append(group)

    def judged(self, group: int, equal: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """A group's rewards are there; returns what is certain now: (group, step) of those that stay, and of those that are dropped."""
        self._equal[group] = equal
        if equal and self._surely_dropped(group):
            self._gone.add(group)  # the next may come in its place; which step it would have been of, those before it tell
        kept, dropped = [], []
        while self._undecided and self._undecided[0] in self._equal:
            first = self._undecided.popleft()
            if self._equal.pop(first) and self._dropped < self._spare:
                self._dropped += 1
                self._gone.discard(first)
                dropped.append((first, self.step))
                continue
            kept.append((first, self.step))
            self._kept += 1
            if self._kept == self._size:
                self.step, self._kept, self._dropped = self.step + 1, 0, 0
        return kept, dropped

    def _surely_dropped(self, group: int) -> bool:
        """Even if all groups before it are dropped too. Should a step end between, the count begins anew, which leaves more room."""
        before = 0
        for other in self._undecided:
            if other == group:
                break
            before += self._equal.get(other, True)
        return self._dropped + before < self._spare
