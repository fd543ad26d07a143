"""Costs fitted to what a run recorded, and how well they predict that run.

| cost                             | from                                                                                     |
|----------------------------------|------------------------------------------------------------------------------------------|
| score, prepare, train            | seconds against tokens (or samples) of each micro-batch, on its slowest rank             |
| update, publish, install, …      | mean seconds                                                                             |
| judge                            | all of them: each sample of a simulation takes one                                       |
| latency                          | gaps before updates and publishes                                                        |
| engine                           | a sample of R tokens stays for R iterations and the rest of the one it comes in; one     |
|                                  | with r samples running takes a + b · r                                                   |

The first step is left out where there are others: everything is slower the first time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from conveyor.config import OnlineRecipe, UserError
from conveyor.pipeline.run_plan import score_parts, train_groups
from conveyor.plan.costs import Linear, TaskCosts, TrainerCosts
from conveyor.plan.engines import Iterations
from conveyor.plan.lengths import LengthFacts
from conveyor.plan.memory import GroupMemory
from conveyor.plan.record import RunRecord
from conveyor.plan.simulate import Steady, simulate, steady
from conveyor.report.events import JUDGE, MOVES, Event

Array = NDArray[np.float64]
T = TypeVar("T")

SLOPE_ERRORS = 3.0
"""How many standard errors a slope must be from 0 to be believed."""


def fit(run: RunRecord) -> TaskCosts:
    """The costs of a run's tasks, at the run's own sizes: its ranks, its tensor parallel size, its micro-batches."""
    last = max(event.step for event in run.events)
    events = [event for event in run.events if event.step > 1 or last == 1]
    spans = _spans(events)
    scorers = {role: _linear(spans["score", role], run) for task, role in spans if task == "score"}
    trainers = {role: _trainer(role, spans, events, run) for task, role in spans if task == "train"}
    return TaskCosts(
        engine=fit_engine(run, events),
        scorers=scorers,
        trainers=trainers,
        engine_install=_a_step(event for event in events if event.task == "install" and event.role == "rollout"),
        snapshot_install=_a_step(event for event in events if event.task == "install" and event.role.endswith("_snapshot")),
        reference_install=_a_step(event for event in events if event.task == "install" and event.role == "reference"),
        latency=_latency(events),
        moves=_moves(events),
        judging=tuple(event.end - event.start for event in events if event.task == JUDGE),
    )


Occasion = tuple[int, int | None, int]
"""(step, micro-batch, how many times it was done before: with several passes a micro-batch is trained several times)."""
Spans = Mapping[tuple[str, str], dict[Occasion, float]]
"""(task, role) → each time it was done → seconds of the slowest worker that took part."""


def _spans(events: Iterable[Event]) -> Spans:
    spans: dict[tuple[str, str], dict[Occasion, float]] = defaultdict(dict)
    repeats: Counter[tuple[str, str, str, int, int | None]] = Counter()
    for event in events:
        own = (event.task, event.role, event.worker, event.step, event.micro_batch)
        key = (event.step, event.micro_batch, repeats[own])
        repeats[own] += 1
        done = spans[event.task, event.role]
        done[key] = max(done.get(key, 0.0), event.end - event.start)
    return spans


def _trainer(role: str, spans: Spans, events: Sequence[Event], run: RunRecord) -> TrainerCosts:
    updates = list(spans.get(("update", role), {}).values())
    publish, checkpoint = (
        _a_step(event for event in events if event.task == task and event.role == role) for task in ("publish", "checkpoint")
    )
    train, prepare = (_linear(spans.get((task, role), {}), run) for task in ("train", "prepare"))
    return TrainerCosts(train, prepare, float(np.mean(updates)) if updates else 0.0, publish, checkpoint)


def _a_step(events: Iterable[Event]) -> float:
    """Mean seconds of a worker in a step; several models are published, or installed, one after the other."""
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        sums[event.step, event.worker] += event.end - event.start
    return float(np.mean(list(sums.values()))) if sums else 0.0


def _moves(events: Sequence[Event]) -> dict[str, float]:
    """Stage → mean seconds in which one of its workers goes to sleep, or wakes."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.task in MOVES:
            seconds[event.role].append(event.end - event.start)
    return {stage: float(np.mean(found)) for stage, found in seconds.items()}


def _linear(spans: Mapping[Occasion, float], run: RunRecord) -> Linear:
    sizes = [run.micro_batches.get((step, number or 0), []) for step, number, _ in spans]
    tokens = np.array([sum(size.total for size in of_one) for of_one in sizes], dtype=float)
    return fit_linear(np.array([len(of_one) for of_one in sizes], dtype=float), tokens, np.array(list(spans.values())))


def fit_linear(samples: Array, tokens: Array, seconds: Array) -> Linear:
    """seconds ≈ constant + per_token · tokens by least squares, where both are positive and the slope shows.

    A slope that does not show (micro-batches of nearly equal size) is not taken for 0: that would make larger micro-batches free.
    Then seconds are taken as proportional to tokens, or to samples if that comes nearer; both are exact at the size measured.
    """
    if not len(seconds):
        return Linear()
    mean_tokens, mean_seconds = float(tokens.mean()), float(seconds.mean())
    if mean_tokens == 0:
        return Linear(constant=mean_seconds)
    spread = tokens - mean_tokens
    square = float(spread @ spread)
    if len(seconds) > 2 and square > 0:
        slope = float(spread @ seconds) / square
        constant = mean_seconds - slope * mean_tokens
        left = seconds - constant - slope * tokens
        error = np.sqrt(float(left @ left) / (len(seconds) - 2) / square)
        if slope > SLOPE_ERRORS * error and constant >= 0:
            return Linear(constant=constant, per_token=slope)
    a_token, a_sample = mean_seconds / mean_tokens, mean_seconds / float(samples.mean())
    by_tokens, by_samples = (float(np.square(seconds - cost).sum()) for cost in (a_token * tokens, a_sample * samples))
    return Linear(per_token=a_token) if by_tokens <= by_samples else Linear(per_sample=a_sample)


def _latency(events: Sequence[Event]) -> float:
    """Mean gap between tasks of a train group that follow one another by way of the driver: the update after the last train task,
    the publish after the update. (A train task is sent while the one before it runs.)"""
    gaps: list[float] = []
    ends: dict[tuple[str, int], float] = {}
    for event in sorted(events, key=lambda event: event.start):
        line = (event.worker, event.step)
        if event.task in ("update", "publish") and line in ends:
            gaps.append(max(0.0, event.start - ends[line]))
        if event.task in ("train", "update", "publish"):
            ends[line] = event.end
    return float(np.mean(gaps)) if gaps else 0.0


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


def fit_engine(run: RunRecord, events: Sequence[Event]) -> Iterations:
    """constant a and per_sample b of an iteration with r samples: a + b · r seconds.

    For a given q = b/a a sample's time in the engine, counted in iterations of one sample each lasting a, is
    ∫ dt / (1 + q r(t)) / a = R. That is linear in a, so only q has to be searched for: the one with the least squares.
    """
    engines: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.role == "rollout":
            engines[event.worker].append(event)
    spans = [_Residence(own, run) for own in engines.values()]
    best = min((_engine_error(spans, q) for q in (0.0, *np.geomspace(1e-4, 1e2, 61))), default=(0.0, 0.0, 0.0))
    for width in (0.1, 0.03, 0.01):
        near = best[1] * np.exp(np.linspace(-width, width, 9))
        best = min(best, *(_engine_error(spans, q) for q in near)) if best[1] else best
    return Iterations(constant=best[2], per_sample=best[2] * best[1])


class _Residence:
    """The samples of one engine: when each was there, and how many were at a time."""

    def __init__(self, events: Sequence[Event], run: RunRecord) -> None:
        samples = [event for event in events if event.task == "rollout"]
        installs = [event for event in events if event.task == "install"]
        self.tokens = np.array([sum(run.workload.at(*name).response for name in event.samples) for event in samples], dtype=float)
        self.start, self.end = (np.array([getattr(event, name) for event in samples]) for name in ("start", "end"))
        stops = [time for event in installs for time in (event.start, event.end)]
        self.times = np.unique(np.concatenate([self.start, self.end, stops]))
        middle = (self.times[1:] + self.times[:-1]) / 2
        self.running = np.searchsorted(np.sort(self.start), middle) - np.searchsorted(np.sort(self.end), middle)
        self.seconds = np.diff(self.times)
        for event in installs:
            self.seconds[(middle > event.start) & (middle < event.end)] = 0.0

    def weighted(self, q: float) -> Array:
        """Of each sample: seconds of its stay, each divided by 1 + q · (samples there then)."""
        summed = np.concatenate([[0.0], np.cumsum(self.seconds / (1 + q * self.running))])
        place = {name: np.searchsorted(self.times, getattr(self, name)) for name in ("start", "end")}
        return np.asarray(summed[place["end"]] - summed[place["start"]])


def _engine_error(spans: Sequence[_Residence], q: float) -> tuple[float, float, float]:
    """(share of the squares that is left, q, the best a). A sample waits for the iteration that is going on when it comes: its stay
    is a · (R + w) with some w from 0 to 1."""
    stays, tokens = np.concatenate([span.weighted(q) for span in spans]), np.concatenate([span.tokens for span in spans])
    spread = tokens - tokens.mean()
    slope = float(spread @ stays) / float(spread @ spread) if spread.any() else 0.0
    wait = min(1.0, max(0.0, float(stays.mean()) / slope - float(tokens.mean()))) if slope > 0 else 0.0
    iterations = tokens + wait
    a = float(stays @ iterations) / float(iterations @ iterations)
    left = stays - a * iterations
    return float(left @ left) / float(stays @ stays), float(q), a


# ── use ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Validation:
    """Predicted against measured, for the run that the costs were fitted to."""

    measured: Steady
    predicted: Steady

    @property
    def step_error(self) -> float:
        """Predicted / measured − 1."""
        return self.predicted.step_seconds / self.measured.step_seconds - 1


def validate(run: RunRecord, costs: TaskCosts | None = None) -> Validation:
    """Simulate the run anew: its recipe, its devices, the lengths that it sampled; by default with the costs fitted to it."""
    plan = run.plan()
    simulated = simulate(plan, for_parts(costs or fit(run), run.recipe), run.workload, run.devices)
    first = plan.max_staleness + 1
    return Validation(steady(run.events, first), steady(simulated.events, first))


@dataclass(frozen=True)
class Profile:
    """Costs of a run, carried over to other placements of its roles: work on a micro-batch is shared out among the ranks there are,
    what does not depend on samples stays."""

    run: RunRecord
    fitted: TaskCosts

    @classmethod
    def of(cls, run: RunRecord, judge_seconds: float | None = None) -> Profile:
        """judge_seconds: what functions and urls take for a sample, if not as long as in the run."""
        fitted = fit(run)
        return cls(run, fitted if judge_seconds is None else replace(fitted, judging=(judge_seconds,)))

    def sleeping(self, recipe: OnlineRecipe) -> dict[str, str]:
        return recipe.sleeping_groups(gpus=bool(self.fitted.moves))

    def costs(self, recipe: OnlineRecipe) -> TaskCosts:
        """Raises UserError where the recipe has a role that the run had not."""
        assert recipe.devices is not None
        trainers = {}
        measured = {group.roles: self.run.devices[group.group] for group in train_groups(self.run.recipe)}
        for group in train_groups(recipe):
            name = "+".join(group.roles)
            ranks = measured.get(group.roles, 1) / max(1, int(recipe.devices[group.group]))
            trainers[name] = _known(self.fitted.trainers, name).on_ranks(ranks)
        return replace(for_parts(self.fitted, recipe), trainers=trainers)

    def shards(self, recipe: OnlineRecipe, group: str) -> int:
        return 1

    def memory(self, recipe: OnlineRecipe, lengths: LengthFacts) -> list[GroupMemory]:
        """Nothing is known of it."""
        return []


def for_parts(costs: TaskCosts, recipe: OnlineRecipe) -> TaskCosts:
    """With the score parts of a recipe, which may put roles together in another way than the run did: a part's cost is shared evenly
    among its roles. Raises UserError where the recipe has a role that the run had not."""
    roles: dict[str, Linear] = {}
    for joined, cost in costs.scorers.items():
        names = joined.split("+")
        roles |= {name: cost.times(1 / len(names)) for name in names}
    if recipe.judged_rewards and not costs.judging:
        raise UserError("--profile: the run tells nothing of rewards that are functions or urls; say how long they take (--judge-seconds)")
    parts = (part.roles for part in score_parts(recipe))
    return replace(costs, scorers={"+".join(names): _sum(_known(roles, name) for name in names) for names in parts})


def _known(costs: Mapping[str, T], role: str) -> T:
    if role not in costs:
        raise UserError(f"--profile: the run has no tasks of {role}; profile a run with the roles of the recipe")
    return costs[role]


def _sum(costs: Iterable[Linear]) -> Linear:
    found = list(costs)
    return Linear(sum(c.constant for c in found), sum(c.per_sample for c in found), sum(c.per_token for c in found))
