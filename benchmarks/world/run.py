"""One seed of the world: make it, train every method, measure every policy. One engine samples all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.world.measure import Measured, measure, trained_tokens
from benchmarks.world.methods import CONDITION, METHODS, TARGET, model_of, offline_data
from benchmarks.world.world import MAX_PROMPT, MAX_RESPONSE, SAMPLES, World, make_policy
from conveyor.config.sections import Model, Rollout
from conveyor.data.prompts import load_prompts
from conveyor.data.tokenizer import load_tokenizer
from conveyor.pipeline.sampling import Sampled, Sampler
from conveyor.pipeline.sampling_recipe import sampling_recipe
from conveyor.workers.placement import Placement
from conveyor.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Run:
    method: str
    """`start`: the SFT policy, before any of them."""
    seed: int
    measured: Measured
    seconds: float
    trained_tokens: int


class Seed:
    """The world of a seed, with an engine."""

    def __init__(self, world: World, engine: Any, placement: Placement) -> None:
        self.world = world
        self._engine, self._placement = engine, placement

    def sample(self, policy: Path, data: str, n: int, template: str | None = None) -> list[Sampled]:
        """`n` samples of every prompt of a file, in its order."""
        recipe = sampling_recipe({
            "seed": self.world.seed, "model": {"path": str(self.world.sft)},
            "data": {"path": str(self.world.data(data)), "max_prompt_length": MAX_PROMPT},
            "rollout": {"n_samples_per_prompt": n, "max_response_length": MAX_RESPONSE}, "devices": {"rollout": 1},
        }, str(self.world.path / "sampling"))  # fmt: skip
        prompts = load_prompts(recipe.data, load_tokenizer(recipe.model), template=template)
        found: list[Sampled] = []
        with Sampler(recipe, self._placement, engines=[self._engine]) as sampler:
            sampler.install(policy)
            sampler.sample(prompts, found.append)
        return sorted(found, key=lambda sampled: sampled.prompt.index)

    def prepare(self) -> None:
        """The offline methods' data."""
        offline_data(self.world, self.sample(self.world.sft, "prompts", SAMPLES))

    def start(self) -> Run:
        return Run("start", self.world.seed, self._measured(self.world.sft), 0.0, 0)

    def run(self, method: str) -> Run:
        train, folder = METHODS[method]
        began = time.monotonic()
        train(self.world, self._engine)
        seconds = time.monotonic() - began
        template = CONDITION.replace("{condition}", f"{TARGET:.0f}") if method == "conditional_sft" else None
        measured = self._measured(model_of(self.world, method), template)
        return Run(method, self.world.seed, measured, seconds, trained_tokens(self.world.path / folder))

    def _measured(self, policy: Path, template: str | None = None) -> Measured:
        return measure(policy, self.world.sft, self.sample(policy, "heldout", 4, template))


@contextmanager
def seed_of(folder: Path, seed: int) -> Iterator[Seed]:
    """Makes the policy if need be, and starts an engine."""
    world = World(folder / f"seed_{seed}", seed)
    if not world.sft.exists():
        make_policy(world)
    ray_section = sampling_recipe({"model": {"path": str(world.sft)}, "data": {"path": "-"}}, "-").ray
    with Placement.create({"rollout": 1}, ray_section) as placement:
        engine = placement.actor(
            RolloutWorker, "rollout", 0, model=Model(path=str(world.sft)), rollout=Rollout(max_response_length=MAX_RESPONSE), seed=seed,
            cores=placement.cores("rollout", 0), max_model_len=MAX_PROMPT + MAX_RESPONSE + 16,
        )  # fmt: skip
        yield Seed(world, engine, placement)


def as_row(run: Run) -> dict[str, Any]:
    return {"method": run.method, "seed": run.seed, **asdict(run.measured), "seconds": round(run.seconds, 1),
            "trained_tokens": run.trained_tokens}  # fmt: skip


def from_row(row: dict[str, Any]) -> Run:
    fields = {name: row[name] for name in Measured.__dataclass_fields__}
    return Run(row["method"], row["seed"], Measured(**fields), row["seconds"], row["trained_tokens"])


def last_of(runs: Sequence[Run], run: Run) -> list[Run]:
    """The runs with this one, in the place of an earlier one of its method and seed."""
    return [*(other for other in runs if (other.method, other.seed) != (run.method, run.seed)), replace(run)]
