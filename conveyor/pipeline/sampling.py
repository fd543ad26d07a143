"""Prompts sampled and scored without training: what `conveyor evaluate`, `generate` and `score` and the methods in rounds stand on.

    prompts ──▶ engines ──▶ reward functions, reward models ──▶ on_prompt(Sampled)
       ▲                                                            │
       └──── room for another: few are in flight at a time ◀────────┘

It is an evaluation of one version by the scheduler of every run, so the first prompts are scored while the next are sampled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from safetensors import safe_open
from torch import Tensor

from conveyor.config import OnlineRecipe, RunError, UserError
from conveyor.pipeline.actions import Evaluate, EvaluationSampled, SampleJudged, ScoreEvaluation
from conveyor.pipeline.event_record import EventRecord
from conveyor.pipeline.held_out import OpenPrompt, deal_out, plain_score
from conveyor.pipeline.run_plan import EvaluationPlan, RunPlan, run_plan
from conveyor.pipeline.sampling_executor import SamplingExecutor
from conveyor.pipeline.scheduler import Scheduler
from conveyor.pipeline.stages import Stages
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt, Rollout, SampleId
from conveyor.workers.placement import Placement
from conveyor.workers.records import RolloutRef, fetch
from conveyor.workers.replay import ReplayWorker
from conveyor.workers.reports import EvaluationAborted, Judged, SampleDone
from conveyor.workers.start import start_workers
from conveyor.workers.team import members
from conveyor.workers.weight_sync import publish

VERSION = 0
"""Of all weights: nothing is trained, so there is no other to tell them from."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A prompt with all its samples, scored. One entry a sample everywhere, in order of sample number; the greedy one is last."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Mapping[str, float | None], ...]
    """Name → reward as it is, in the recipe's order; None: does not apply."""
    scores: tuple[float | None, ...]
    """Weighted sums, clipped where the recipe says so, without penalties; None: no reward applies."""


class Sampler:
    """Engines, score workers and reward functions of a recipe. Legal order: `install` and `sample`, any number of times, then `close`.

    Example: `with Sampler(recipe, placement) as sampler: sampler.sample(prompts, lambda sampled: print(sampled.scores))`
    """

    def __init__(
        self,
        recipe: OnlineRecipe,
        placement: Placement,
        *,
        engines: list[Any] | None = None,
        replay: bool = False,
        on_ready: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Starts the workers and waits until they are ready. Events go to events.jsonl in the recipe's output_dir.

        Args:
            recipe: see `sampling_recipe`; rewards may be missing.
            engines: rollout engines that run already, with whatever weights: `install` comes before the first `sample`.
            replay: start no engines; samples are the completions of the prompts, which are `Completed`.
            on_ready: called with the name of each worker that is ready.

        Raises:
            UserError: a model or a reward function cannot be loaded.
        """
        self.recipe = recipe
        self._given = engines is not None
        self._knows_weights = engines is None
        if replay:
            engines = [placement.beside_driver(ReplayWorker)]
        folder = RunFolder(recipe.output_dir)
        folder.path.mkdir(parents=True, exist_ok=True)
        slots = {group: placement.slots(group) for group in placement.devices}
        sleeping = {} if replay else recipe.sleeping_groups(gpus=placement.kind == "GPU", trains=False)
        with own_errors():
            self._workers = start_workers(recipe, placement, [], 1, engines, sleeping)
            clocks = self._workers.ready(on_ready)
        # Without steps there is no sync before the first sample.
        self._plan = replace(run_plan(recipe, [], slots, engines=len(self._workers.engines), sleeping=sleeping), initial_sync=False)
        self._record = EventRecord(self._plan, folder, clocks)

    def install(self, model: Path | str) -> None:
        """The engines take the weights of a model folder (*.safetensors under Hugging Face names, tied weights under one name).

        Raises:
            UserError: the folder holds no such files.
        """
        with own_errors():
            publication = publish(stored_weights(Path(model)), VERSION, "actor", verify=self.recipe.pipeline.verify_sync)
            installs = [engine.install.remote(publication) for engine in self._workers.engines]
            try:
                reports = ray.get(installs, timeout=self.recipe.ray.timeout)
            except GetTimeoutError:
                raise RunError(f"a rollout engine has not finished install within {self.recipe.ray.timeout:g} s (ray.timeout)") from None
        for report in reports:
            assert not report.mismatched, f"weights were damaged on their way: {report.mismatched[:5]}"
        self._knows_weights = True

    def sample(
        self,
        prompts: Sequence[Prompt],
        on_prompt: Callable[[Sampled], None],
        *,
        greedy: bool | None = None,
        stages: tuple[Sequence[int], Callable[[int], Awaitable[None]]] | None = None,
    ) -> None:
        """`rollout.n_samples_per_prompt` samples of each prompt; returns when all are sampled and scored.

        Prompts are asked for one by one and a bounded number is in flight, so there may be any number of them. A sample depends on the
        weights, the recipe's seed and rollout settings, the prompt's tokens, its `index` and the sample's number, on nothing else.

        Args:
            prompts: their indices are ≥ 0, each once.
            on_prompt: called with each prompt as soon as its samples are scored; what it does not keep is dropped.
            greedy: one more sample, of likeliest tokens; default: the recipe's `evaluate.greedy`.
            stages: arguments of `Stages`, whose `enter` may `install`: weights change in the course of the prompts.

        Raises:
            UserError: a reward function failed, or the engine's settings are wrong.
            RunError: a worker died.
        """
        assert self._knows_weights, "engines that ran already hold other weights: install some first"
        if not len(prompts):
            return
        if greedy is None:
            greedy = self.recipe.evaluate is not None and self.recipe.evaluate.greedy
        samples = self.recipe.rollout.n_samples_per_prompt + greedy
        evaluation = EvaluationPlan(len(prompts), samples, in_bubbles=False, in_flight=_in_flight(self.recipe, self._plan, samples))
        plan = replace(self._plan, evaluation=evaluation)
        with own_errors():
            asyncio.run(self._run(plan, prompts, greedy, on_prompt, stages))
        self._record.flush()

    async def _run(
        self,
        plan: RunPlan,
        prompts: Sequence[Prompt],
        greedy: bool,
        on_prompt: Callable[[Sampled], None],
        stages: tuple[Sequence[int], Callable[[int], Awaitable[None]]] | None,
    ) -> None:
        books = _InFlight(self.recipe, prompts, greedy, on_prompt, Stages(*stages) if stages else None)
        await SamplingExecutor(Scheduler(plan), self._workers, books, self._record, self.recipe.ray.timeout).run()

    def close(self) -> None:
        """Ends the workers that were started here, so that others can have their devices."""
        self._record.close()
        workers = [member for of_group in self._workers.scorers.values() for worker in of_group for member in members(worker)]
        workers += [] if self._given else self._workers.engines
        workers += [self._workers.rewarder] if self._workers.rewarder is not None else []
        for worker in workers:
            ray.kill(worker)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def own_errors() -> Iterator[None]:
    """A worker's own exception where it says it all; Ray's wraps it in a page of trace."""
    try:
        yield
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, UserError | RunError) else error) from None


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in a folder's *.safetensors, one tensor at a time.

    Raises:
        UserError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, opened.get_tensor(name)


def _in_flight(recipe: OnlineRecipe, plan: RunPlan, samples: int) -> int:
    """Prompts at a time: what engines hold, and as much again, or what keeps all that score at work, twice over."""
    sampled = plan.engines * plan.engine_slots
    scored = plan.micro_batch_size * sum(plan.part_workers)
    judged = sum(reward.workers * reward.batch_size for reward in recipe.judged_rewards)
    return -(-(sampled + max(sampled, 2 * scored, 2 * judged)) // samples)


class _InFlight:
    """The books of one `sample`: prompts on their way, which are named by their place, and by −1 − index on workers."""

    def __init__(
        self,
        recipe: OnlineRecipe,
        prompts: Sequence[Prompt],
        greedy: bool,
        on_prompt: Callable[[Sampled], None],
        stages: Stages | None = None,
    ) -> None:
        self._stages = stages
        self._recipe, self._prompts, self._greedy, self._on_prompt = recipe, prompts, greedy, on_prompt
        self._samples = recipe.rollout.n_samples_per_prompt + greedy
        self._names = [reward.name for reward in recipe.rewards]
        self._places: dict[int, int] = {}
        """Group → place."""
        self._open: dict[int, tuple[Prompt, OpenPrompt]] = {}
        self._bundles = _Bundles()

    async def admitted(self, action: Evaluate) -> None:
        if self._stages is not None:
            await self._stages.admit(action.prompt)

    def submission(self, action: Evaluate) -> tuple[Prompt, int, int, float | None, bool]:
        prompt = self._prompts[action.prompt]
        group = -1 - prompt.index
        assert prompt.index >= 0 and group not in self._places, f"prompt {prompt.index} is asked for twice"
        self._places[group] = action.prompt
        self._open[action.prompt] = prompt, OpenPrompt()
        rollout = self._recipe.rollout
        return replace(prompt, index=group), rollout.n_samples_per_prompt, VERSION, rollout.temperature, self._greedy

    def sampled(self, engine: int, done: SampleDone, rollout: Any) -> EvaluationSampled:
        place = self._places[done.id.group]
        self._open[place][1].add(done, rollout)
        if self._stages is not None and len(self._open[place][1].rollouts) == self._samples:
            self._stages.left(place)
        self._look_at(place)
        return EvaluationSampled(engine, place, VERSION, aborted=False)

    def aborted(self, engine: int, sample: EvaluationAborted) -> EvaluationSampled:
        raise AssertionError(f"engine {engine} holds other weights than were installed")

    def rollouts(self, action: ScoreEvaluation) -> list[Any]:
        return [reference for place in action.prompts for reference in self._open[place][1].in_order()]

    def rollout(self, version: int, sample: SampleId) -> Any:
        return self._open[-1 - sample.group][1].rollouts[sample.sample]

    def judged(self, judged: Judged) -> SampleJudged:
        place = self._places[judged.id.group]
        self._open[place][1].rewards[judged.id.sample].update(judged.rewards)
        self._look_at(place)
        return SampleJudged(SampleId(-1 - place, judged.id.sample), VERSION)

    def scored(self, action: ScoreEvaluation, rewards: Mapping[str, Sequence[float | None]]) -> None:
        deal_out([self._open[place][1] for place in action.prompts], rewards)
        for place in action.prompts:
            self._look_at(place)

    def _look_at(self, place: int) -> None:
        """Hand a prompt on and forget it, if it is complete."""
        prompt, found = self._open[place]
        if not found.is_complete(self._samples, set(self._names)):
            return
        del self._open[place], self._places[-1 - prompt.index]
        rollouts = [replace(self._bundles.take(reference), prompt=prompt) for reference in found.in_order()]
        rewards = [{name: of_sample[name] for name in self._names} for _, of_sample in sorted(found.rewards.items())]
        scores = [
            plain_score(self._recipe, known, rollout.truncated, len(rollout.response_ids)) if known else None
            for rollout, known in zip(rollouts, rewards, strict=True)
        ]
        if any(score is not None and not math.isfinite(score) for score in scores):
            raise RunError(f"row {prompt.row + 1} of the data: the weighted sum of its rewards is not finite")
        self._on_prompt(Sampled(prompt, tuple(rollouts), tuple(rewards), tuple(scores)))


class _Bundles:
    """Rollouts that left an engine together are fetched together, once, and each is let go of when it is taken."""

    def __init__(self) -> None:
        self._fetched: dict[Any, dict[int, Rollout]] = {}

    def take(self, reference: RolloutRef) -> Rollout:
        key = reference.bundle if isinstance(reference.bundle, ray.ObjectRef) else id(reference.bundle)
        if key not in self._fetched:
            (rollouts,) = fetch([reference.bundle])
            self._fetched[key] = dict(enumerate(rollouts))
        left = self._fetched[key]
        rollout = left.pop(reference.place)
        if not left:
            del self._fetched[key]
        return rollout
