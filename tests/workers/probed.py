"""A rollout worker that tests can look into."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from conveyor.types import Prompt, Rollout
from conveyor.workers.rollout import RolloutWorker


class ProbedRolloutWorker(RolloutWorker):
    def on_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each of vLLM's workers answers to `function(worker, *arguments)`."""
        return list(self._command(lambda: self._vllm.collective_rpc(function, args=arguments)).result())

    def cached_tokens(self, prompts: list[Prompt], n: int) -> tuple[list[Rollout], list[int]]:
        """As `generate`; and how many tokens of its prompt each sample found in the prefix cache, in order of finishing."""
        self.ready()
        step, found = self._vllm.step, list[int]()

        def counted() -> Any:
            outputs = step()
            found.extend(output.num_cached_tokens for output in outputs)
            return outputs

        self._vllm.step = counted
        rollouts = self.generate(prompts, n)
        self._vllm.step = step
        return rollouts, found

    def argument(self, name: str) -> Any:
        """Of vLLM's configuration, by a dotted name."""
        return self._command(lambda: attrgetter(name)(self._vllm.vllm_config)).result()

    @property
    def _vllm(self) -> Any:
        return self._engine._engine
