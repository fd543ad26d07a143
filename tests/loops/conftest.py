"""Runs of loops in this process: a tiny model is sampled with transformers and really trained; no Ray, no engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conveyor.config import LoopRecipe, OnlineRecipe, parse_recipe
from conveyor.loops import run as run_module
from conveyor.loops.engines import as_sampling
from conveyor.loops.run import run_loop
from conveyor.pipeline.held_out import plain_score
from conveyor.pipeline.sampling import Sampled
from conveyor.report.progress import read_metrics
from conveyor.rewards import load_function
from conveyor.rewards.scorer import call_arguments
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt, Rollout
from tests.tiny import save_tiny_policy

REWARDS = """
def low(prompts, completions, completion_ids, **columns):
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]

def even(prompts, completions, completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

def same(prompts, completions, **columns):
    return [1.0 for _ in completions]

def nothing(prompts, completions, **columns):
    return [None for _ in completions]
"""
PROMPTS = [{"prompt": f"p{row}"} for row in range(10)]

Make = Callable[..., LoopRecipe]


@pytest.fixture(scope="session")
def loop_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide weights, so that samples and log-probs differ well; the end of a response is as likely as any token."""
    return save_tiny_policy(tmp_path_factory.mktemp("loops") / "policy", seed=6, initializer_range=0.08)


@pytest.fixture(scope="session")
def loop_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """prompts.jsonl and rewards.py."""
    folder = tmp_path_factory.mktemp("loop_data")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "held_out.jsonl").write_text("".join(json.dumps({"prompt": f"held out {row}"}) + "\n" for row in range(2)))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="session")
def make_loop(loop_policy: Path, loop_data: Path) -> Make:
    """(method, output_dir, {dotted key: value}) → a recipe of two rounds of four prompts."""

    def make(method: str, output_dir: Path, changes: dict[str, Any] | None = None) -> LoopRecipe:
        raw: dict[str, Any] = {
            "method": method, "seed": 3, "output_dir": str(output_dir),
            "model": {"path": str(loop_policy)},
            "data": {"path": str(loop_data / "prompts.jsonl"), "max_prompt_length": 16, "max_length": 24},
            "rewards": [{"name": "low", "function": f"{loop_data / 'rewards.py'}:low"}],
            "rollout": {"n_samples_per_prompt": 4, "max_response_length": 6},
            "rounds": {"count": 2, "prompts": 4},
            "train": {"train_batch_size": 2, "micro_batch_size": 2, "learning_rate": 1e-3},
        }  # fmt: skip
        for key, value in (changes or {}).items():
            *above, last = key.split(".")
            place = raw
            for name in above:
                place = place.setdefault(name, {})
            place[last] = value
        recipe = parse_recipe(raw)
        assert isinstance(recipe, LoopRecipe)
        return recipe

    return make


class TinyEngines:
    """In the place of `LoopEngines`: a sample depends on the policy's weights, the prompt, its index, the sample's number and the seed."""

    def __init__(self, recipe: LoopRecipe, engines: object = None) -> None:
        self.recipe: OnlineRecipe = as_sampling(recipe)
        self._functions = [(reward.name, load_function(str(reward.function), reward.name)) for reward in recipe.rewards]
        self._tokenizer = AutoTokenizer.from_pretrained(recipe.model.tokenizer or recipe.model.path)
        self.calls: list[tuple[str, Any]] = []
        """("sample", (policy, indices)), ("rest", None), ("close", None)"""

    def sample(self, policy: str, prompts: Sequence[Prompt], on_prompt: Callable[[Sampled], None]) -> None:
        self.calls.append(("sample", (policy, [prompt.index for prompt in prompts])))
        model = AutoModelForCausalLM.from_pretrained(policy)
        for prompt in sorted(prompts, key=lambda prompt: prompt.index * 7 % 5):  # not in their order
            on_prompt(self._sampled(model, prompt))

    def install(self, policy: str) -> None:
        self._installed = policy

    def sample_stages(
        self, first: str, prompts: Sequence[Prompt], on_prompt: Callable[[Sampled], None], sizes: Sequence[int],
        enter: Callable[[int], Awaitable[None]],
    ) -> None:  # fmt: skip
        """See `LoopEngines`."""

        async def stages() -> None:
            left = list(prompts)
            for stage, size in enumerate(sizes):
                await enter(stage)
                self.sample(self._installed, left[:size], on_prompt)
                del left[:size]

        asyncio.run(stages())

    def rest(self) -> None:
        self.calls.append(("rest", None))

    def close(self) -> None:
        self.calls.append(("close", None))

    def __enter__(self) -> TinyEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sampled(self, model: Any, prompt: Prompt) -> Sampled:
        rollouts = self._rollouts(model, prompt)
        rewards = [{name: function(**call_arguments([rollout]))[0] for name, function in self._functions} for rollout in rollouts]
        scores = [plain_score(self.recipe, *one, 0) for one in zip(rewards, [r.truncated for r in rollouts], strict=True)]
        return Sampled(prompt, tuple(rollouts), tuple(rewards), tuple(scores))

    @torch.no_grad()
    def _rollouts(self, model: Any, prompt: Prompt) -> list[Rollout]:
        n, end, start = self.recipe.rollout.n_samples_per_prompt, self._tokenizer.eos_token_id, len(prompt.token_ids)
        seed = (self.recipe.seed * 1009 + prompt.index % 10007) * 1009
        drawn = [torch.Generator().manual_seed(seed + sample) for sample in range(n)]
        ids = torch.tensor([prompt.token_ids] * n)
        for _ in range(self.recipe.rollout.max_response_length):
            weights = model(ids).logits[:, -1].softmax(-1)
            weights[:, end] += 0.15
            following = [torch.multinomial(row, 1, generator=generator) for row, generator in zip(weights, drawn, strict=True)]
            ids = torch.cat([ids, torch.stack(following)], 1)
        return [self._rollout(prompt, sample, row[start:].tolist(), end) for sample, row in enumerate(ids)]

    def _rollout(self, prompt: Prompt, sample: int, response: list[int], end: int) -> Rollout:
        response = response[: response.index(end) + 1] if end in response else response
        text = self._tokenizer.decode(response, skip_special_tokens=True)
        none = torch.zeros(len(response))
        return Rollout(prompt, sample, torch.tensor(response), none, none.int(), "stop" if response[-1] == end else "length", text)


class Finished:
    """What a run leaves."""

    def __init__(self, folder: Path, engines: TinyEngines | None = None) -> None:
        self.path, self.run = folder, RunFolder(folder)
        self.calls = engines.calls if engines else []

    def lines(self, name: str, number: int = 1) -> list[dict[str, Any]]:
        """Of a file of round `number`, from 1."""
        return read_metrics(self.path / "rounds" / f"round_{number}" / f"{name}.jsonl")

    def model(self, number: int) -> Path:
        return self.path / "rounds" / f"round_{number}" / "train" / "model"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics without what depends on the clock."""
        return [untimed(row) for row in read_metrics(self.run.metrics)]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("time/") and name != "tokens_per_second"}


Run = Callable[..., Finished]


@pytest.fixture(scope="session")
def run() -> Run:
    """(recipe) → the run, finished; `engines`: the class of what samples."""

    def go(recipe: LoopRecipe, engines: type[TinyEngines] = TinyEngines) -> Finished:
        made: list[TinyEngines] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "connect", lambda *_: False)
            patch.setattr(run_module, "LoopEngines", lambda *given: made.append(engines(*given)) or made[0])
            run_loop(recipe)
        return Finished(Path(recipe.output_dir), made[0])

    return go


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def distance(one: Path, other: Path) -> float:
    """Largest difference of a weight."""
    first, second = weights(one), weights(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)
