"""Held-out prompts, sampled by the version that the engines hold, beside the training. Pure.

Every `every`-th version, and the last, is evaluated in a *round*. With `in_bubbles` only engines that have nothing else to do take
part, from the moment they run out of samples until the next weights are installed, which ends what is unfinished; else the prompts
come before those of the training, and an engine keeps its version until the round is sampled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from conveyor.pipeline.actions import CloseEvaluation, Evaluate, EvaluationSampled, Judge, SampleJudged, ScoreEvaluation
from conveyor.pipeline.run_plan import RunPlan
from conveyor.types import SampleId


@dataclass(slots=True)
class _Round:
    version: int
    next: int = 0
    """The next prompt to be sampled."""
    running: dict[int, int] = field(default_factory=dict)
    """Prompt → samples of it still in an engine."""
    lost: set[int] = field(default_factory=set)
    """Prompts with a sample that an install has ended."""
    scoring: Counter[int] = field(default_factory=Counter)
    """What is still at work on a prompt's samples: score parts, and the samples' functions and urls."""
    closing: bool = False


class Evaluation:
    """Rounds on their way; without an evaluation in the plan, none."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan, self.facts = plan, plan.evaluation
        self._rounds: dict[int, _Round] = {}
        self._parts = [number for number, part in enumerate(plan.parts) if part.rewards]
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in plan.parts]
        """For each score part, (version, prompt) to be scored."""
        self.to_judge: list[Judge] = []
        """Samples to be given to functions and urls."""

    @property
    def finished(self) -> bool:
        return not self._rounds

    def open(self, version: int) -> None:
        """A version has been published."""
        last = len(self.plan.step_groups)
        if self.facts is not None and (version % self.facts.every == 0 or version == last):
            self._rounds[version] = _Round(version)

    def next_prompt(self, version: int) -> int | None:
        """The prompt to sample next under a version, None if there is none."""
        found = self._rounds.get(version)
        if found is None or self.facts is None or not self._left(found):
            return None
        limit = self.facts.in_flight
        return found.next if limit is None or len(found.running) + len(found.scoring) < limit else None

    def _left(self, found: _Round) -> bool:
        """Whether a round has prompts left to sample."""
        return self.facts is not None and not found.closing and found.next < self.facts.prompts

    def sampling(self, version: int) -> bool:
        """Whether a round of this version still has prompts to sample, or samples in an engine."""
        found = self._rounds.get(version)
        return found is not None and (self._left(found) or bool(found.running))

    def start(self, action: Evaluate) -> None:
        found = self._rounds[action.version]
        assert self.facts is not None and found.next == action.prompt
        found.next += 1
        found.running[action.prompt] = self.facts.samples_per_prompt

    def sampled(self, event: EvaluationSampled) -> bool:
        """Note a sample that has left its engine; whether it was its prompt's last."""
        found = self._rounds[event.version]
        found.running[event.prompt] -= 1
        if event.aborted:
            found.lost.add(event.prompt)
        if found.running[event.prompt]:
            return False
        del found.running[event.prompt]
        if event.prompt not in found.lost:
            judged = self._samples(event.prompt) if self.plan.judged else []
            if awaited := len(self._parts) + len(judged):
                found.scoring[event.prompt] = awaited
            self.to_judge += [Judge(sample, event.version) for sample in judged]
            for part in self._parts:
                self._waiting[part].append((event.version, event.prompt))
        return True

    def take_unjudged(self) -> list[Judge]:
        taken, self.to_judge = self.to_judge, []
        return taken

    def to_score(self, part: int, worker: int) -> ScoreEvaluation | None:
        """The next micro-batch of a part: prompts of one version."""
        waiting = self._waiting[part]
        if not waiting or self.facts is None:
            return None
        version = waiting[0][0]
        prompts = [prompt for of, prompt in waiting if of == version]
        fit = max(1, self.plan.micro_batch_size // self.facts.samples_per_prompt)
        return ScoreEvaluation(part, worker, version, tuple(prompts[:fit]))

    def start_score(self, action: ScoreEvaluation) -> None:
        taken = {(action.version, prompt) for prompt in action.prompts}
        self._waiting[action.part] = [item for item in self._waiting[action.part] if item not in taken]

    def scored(self, action: ScoreEvaluation) -> None:
        for prompt in action.prompts:
            self._count_down(action.version, prompt)

    def judged(self, event: SampleJudged) -> None:
        assert event.version is not None
        self._count_down(event.version, -1 - event.id.group)

    def _count_down(self, version: int, prompt: int) -> None:
        scoring = self._rounds[version].scoring
        scoring[prompt] -= 1
        if not scoring[prompt]:
            del scoring[prompt]

    def _samples(self, prompt: int) -> list[SampleId]:
        """Those of a held-out prompt, whose groups count down from −1."""
        assert self.facts is not None
        return [SampleId(-1 - prompt, sample) for sample in range(self.facts.samples_per_prompt)]

    def to_close(self, held: set[int], published: int) -> CloseEvaluation | None:
        """A round that is over: sampled, or no engine will hold its version again; and everything sampled is scored.

        Args:
            held: versions that engines hold, or are about to.
        """
        for version, found in self._rounds.items():
            no_more = not self._left(found) or (version not in held and version < published)
            if no_more and not found.running and not found.scoring and not found.closing:
                return CloseEvaluation(version)
        return None

    def start_close(self, action: CloseEvaluation) -> None:
        self._rounds[action.version].closing = True

    def closed(self, action: CloseEvaluation) -> None:
        del self._rounds[action.version]
