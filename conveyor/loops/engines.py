"""Who samples in a loop: engines that live through it and take each round's weights, or new ones in every round.

Engines that stay keep their devices while the policy is trained. Where training is to have those too, they are ended first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conveyor.checks import devices_per_worker, planned_devices
from conveyor.config import LoopRecipe
from conveyor.pipeline.sampling import Sampled, Sampler
from conveyor.pipeline.sampling_recipe import sampling_recipe
from conveyor.types import Prompt
from conveyor.workers.cluster import available
from conveyor.workers.placement import Placement


class LoopEngines:
    """`sample` for one policy after another; a context manager."""

    def __init__(self, recipe: LoopRecipe, engines: list[Any] | None = None) -> None:
        """Args:
        engines: rollout engines that run already, with whatever weights.
        """
        self._recipe, self._given, self._stay = recipe, engines, engines is not None or engines_stay(recipe)
        self._running = ExitStack()
        self._sampler: Sampler | None = None
        self._policy: str | None = None
        """Whose weights the engines hold."""

    def sample(self, policy: str, prompts: Sequence[Prompt], on_prompt: Callable[[Sampled], None]) -> None:
        """See `Sampler.sample`.

        Args:
            policy: model folder or hub id. The engines start with the first one, and go on with those of folders.
        """
        sampler = self._with(policy)
        self.install(policy)
        sampler.sample(prompts, on_prompt)

    def sample_stages(
        self, first: str, prompts: Sequence[Prompt], on_prompt: Callable[[Sampled], None], sizes: Sequence[int],
        enter: Callable[[int], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Prompts in stages (`Stages`), whose `enter` calls `install`.

        Args:
            first: policy that new engines start with.
        """
        self._with(first).sample(prompts, on_prompt, stages=(sizes, enter))

    def install(self, policy: str) -> None:
        """The running engines take a policy's weights, if they hold others."""
        assert self._sampler is not None
        if self._policy != policy:
            self._sampler.install(Path(policy))
            self._policy = policy

    def _with(self, policy: str) -> Sampler:
        if self._sampler is None:
            self._start(policy)
        assert self._sampler is not None
        return self._sampler

    def rest(self) -> None:
        """The policy is to be trained: engines that do not stay end, and free their devices."""
        if not self._stay:
            self.close()

    def close(self) -> None:
        self._running.close()
        self._sampler = self._policy = None

    def _start(self, policy: str) -> None:
        recipe = as_sampling(self._recipe, policy)
        placement = Placement.create(
            planned_devices(recipe), recipe.ray, telemetry=recipe.telemetry, devices_per_worker=devices_per_worker(recipe)
        )
        self._running.callback(placement.close)
        self._sampler = self._running.enter_context(Sampler(recipe, placement, engines=self._given))
        self._policy = None if self._given else policy

    def __enter__(self) -> LoopEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_sampling(recipe: LoopRecipe, policy: str | None = None) -> Any:
    """The recipe of the loop's sampling: an OnlineRecipe."""
    raw = recipe.model_dump(mode="json", exclude_none=True)
    if policy is not None and policy != recipe.model.path:
        raw["model"] = {**raw["model"], "path": policy, "tokenizer": recipe.model.tokenizer or recipe.model.path}
    return sampling_recipe(raw, recipe.output_dir, source=recipe.method)


def engines_stay(recipe: LoopRecipe) -> bool:
    """Whether engines live through the training of a round."""
    if recipe.rounds.keep_engines is not None:
        return recipe.rounds.keep_engines
    return available(recipe.ray).kind == "CPU" or (recipe.devices is not None and "train" in recipe.devices)
