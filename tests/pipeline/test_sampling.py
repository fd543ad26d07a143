"""Sampling without training: each prompt comes back once, with its own samples, as soon as it is scored."""

import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.config import OnlineRecipe, UserError
from conveyor.pipeline.sampling import Sampled, stored_weights
from conveyor.pipeline.sampling_recipe import sampling_recipe
from conveyor.types import Prompt
from tests.pipeline.sampling_in_process import LengthModel, TextEngine, sampler_in_process

COUNT = (
    "def count(prompts, completions, **columns):\n    return [None if 'f' in text else float(text.count('a')) for text in completions]\n"
)


def make_recipe(folder: Path, *, functions: bool = True, model: bool = False, n: int = 2, **rollout: Any) -> OnlineRecipe:
    file = folder / "rewards.py"
    file.write_text(COUNT)
    rewards: list[dict[str, Any]] = [{"name": "count", "function": f"{file}:count", "clip": 2}] if functions else []
    rewards += [{"name": "length", "model": "m", "weight": 0.5}] if model else []
    raw = {
        "model": {"path": "m"}, "data": {"path": "d"}, "rewards": rewards, "seed": 5,
        "rollout": {"n_samples_per_prompt": n, "max_response_length": 9, "max_concurrent_requests": 4, **rollout},
    }  # fmt: skip
    return sampling_recipe(raw, str(folder / "out"))


def prompts(indices: Sequence[int]) -> list[Prompt]:
    return [Prompt(index, index, (index,), f"p{index}", columns={"answer": index}) for index in indices]


def words(sampled: Sampled) -> list[str]:
    return [rollout.text for rollout in sampled.rollouts]


def collect(recipe: OnlineRecipe, asked: Sequence[Prompt], engines: list[TextEngine] | None = None, **how: Any) -> dict[int, Sampled]:
    found: dict[int, Sampled] = {}

    def keep(sampled: Sampled) -> None:
        assert sampled.prompt.index not in found, "each prompt once"
        found[sampled.prompt.index] = sampled

    greedy = how.pop("greedy", None)
    with sampler_in_process(recipe, engines, **how) as sampler:
        sampler.sample(asked, keep, greedy=greedy)
    return found


def test_each_sample_returns_to_its_own_prompt_with_two_engines(tmp_path: Path) -> None:
    """Case 22."""
    recipe = make_recipe(tmp_path, model=True)
    asked = prompts([3, 0, 7, 1, 12])
    engines = [TextEngine(recipe, 1), TextEngine(recipe, 2)]
    found = collect(recipe, asked, engines)
    assert sorted(found) == [0, 1, 3, 7, 12] and all(engine.asked for engine in engines)
    assert sorted(engines[0].asked + engines[1].asked) == [-13, -8, -4, -2, -1]
    alone = {prompt.index: collect(recipe, [prompt])[prompt.index] for prompt in asked}
    for index, sampled in found.items():
        assert sampled.prompt is next(prompt for prompt in asked if prompt.index == index)
        assert [rollout.sample for rollout in sampled.rollouts] == [0, 1] and all(r.prompt is sampled.prompt for r in sampled.rollouts)
        assert words(sampled) == words(alone[index]), "neither engine nor company changes a sample"
        for text, rewards, score in zip(words(sampled), sampled.rewards, sampled.scores, strict=True):
            count = None if "f" in text else float(text.count("a"))
            assert list(rewards.items()) == [("count", count), ("length", float(len(text)))]
            assert score == pytest.approx(min(count or 0.0, 2.0) + 0.5 * len(text)), "weighted, clipped, without what does not apply"


@settings(max_examples=15, deadline=None)
@given(indices=st.lists(st.integers(0, 30), unique=True, max_size=9), order=st.integers(0, 99), greedy=st.booleans(), data=st.data())
def test_any_part_in_any_order_gives_the_same_samples(
    tmp_path_factory: Any, indices: list[int], order: int, greedy: bool, data: Any
) -> None:
    recipe = make_recipe(tmp_path_factory.mktemp("sampling"), functions=data.draw(st.booleans()), model=data.draw(st.booleans()))
    whole = collect(recipe, prompts(range(31)), greedy=greedy)
    part = collect(recipe, prompts(indices), [TextEngine(recipe, order), TextEngine(recipe, order + 1)], greedy=greedy)
    assert sorted(part) == sorted(indices)
    for index, sampled in part.items():
        assert words(sampled) == words(whole[index]) and len(sampled.rollouts) == 2 + greedy
        assert sampled.scores == whole[index].scores and sampled.rewards == whole[index].rewards


def test_without_rewards_samples_are_all_there_is(tmp_path: Path) -> None:
    found = collect(make_recipe(tmp_path, functions=False), prompts(range(3)), greedy=True)
    assert all(sampled.rewards == ({}, {}, {}) and sampled.scores == (None, None, None) for sampled in found.values())
    assert all(set(sampled.rollouts[-1].text) == {"a"} for sampled in found.values()), "the greedy one is last"


def test_the_first_prompts_are_scored_while_the_next_are_sampled(tmp_path: Path) -> None:
    """From events.jsonl: judging begins long before sampling ends, and does not hold it up."""
    collect(make_recipe(tmp_path, n=1), prompts(range(30)), pause=0.002)
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    sampled, judged = ([event for event in events if event["task"] == task] for task in ("evaluate", "judge"))
    assert len(sampled) == len(judged) == 30
    assert min(event["end"] for event in judged) < sorted(event["end"] for event in sampled)[15]
    assert all(event["samples"][0][0] < 0 for event in judged), "reports take them for held-out ones"


class Lazy(Sequence[Prompt]):
    """Prompts that are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.made = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: Any) -> Any:
        self.made += 1
        return Prompt(place, place, (1,), f"p{place}")


def test_few_prompts_are_in_flight_and_nothing_is_kept(tmp_path: Path) -> None:
    """4 slots of 2 samples: 2 prompts in the engine, and as many more as keep a reward with batches of 2 at work twice over."""
    recipe = make_recipe(tmp_path)
    recipe = recipe.model_copy(update={"rewards": tuple(reward.model_copy(update={"batch_size": 2}) for reward in recipe.rewards)})
    lazy, finished, alive = Lazy(30), 0, list[weakref.ref[Any]]()

    def on_prompt(sampled: Sampled) -> None:
        nonlocal finished
        finished += 1
        assert lazy.made - finished <= 4
        alive.extend(weakref.ref(rollout.response_ids) for rollout in sampled.rollouts)

    engine = TextEngine(recipe, 3)
    with sampler_in_process(recipe, [engine], pause=0.001) as sampler:
        sampler.sample(lazy, on_prompt)
        gc.collect()
        assert finished == 30 and engine.most <= 4
        assert sum(reference() is not None for reference in alive) <= 2, "rollouts that were handed on are gone"


def test_reward_models_score_whole_prompts_in_micro_batches(tmp_path: Path) -> None:
    model, recipe = LengthModel(), make_recipe(tmp_path, functions=False, model=True, n=4)
    collect(recipe, prompts(range(6)), model=model)
    assert sum(model.batches) == 24 and set(model.batches) <= {4, 8}, "of pipeline.micro_batch_size 8 at most"


def test_a_sampler_is_used_again_and_again(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    seen: list[int] = []
    with sampler_in_process(recipe) as sampler:
        for round_ in range(3):
            sampler.sample(prompts(range(4 * round_, 4 * round_ + 4)), lambda sampled: seen.append(sampled.prompt.index))
        sampler.sample([], lambda sampled: seen.append(-1))
    assert sorted(seen) == list(range(12))


def test_engines_and_a_reward_model_on_one_device_take_turns(tmp_path: Path) -> None:
    recipe, asleep = make_recipe(tmp_path, functions=False, model=True), LengthModel()
    apart = collect(recipe, prompts(range(6)))
    changes = {"roles": {"score": "rollout"}, "pipeline": {"micro_batch_size": 8, "sleep": True}}
    merged = sampling_recipe(recipe.model_dump(mode="json", exclude_none=True) | {"devices": None} | changes, str(tmp_path / "merged"))
    assert merged.sleeping_groups(gpus=False, trains=False) == {"rollout": "rollout"}
    engine, found = TextEngine(merged, 0), dict[int, Sampled]()
    with sampler_in_process(merged, [engine], model=asleep) as sampler:
        for some in (range(4), range(4, 6)):
            sampler.sample(prompts(some), lambda sampled: found.__setitem__(sampled.prompt.index, sampled))
            assert engine.awake, "for the weights that may be installed now"
    assert {index: words(sampled) for index, sampled in found.items()} == {index: words(sampled) for index, sampled in apart.items()}
    assert {index: sampled.scores for index, sampled in found.items()} == {index: sampled.scores for index, sampled in apart.items()}
    assert asleep.moves == ["sleep", *["wake", "sleep"] * (len(asleep.moves) // 2)] and len(asleep.moves) >= 5


def test_what_on_prompt_raises_ends_it(tmp_path: Path) -> None:
    def on_prompt(sampled: Sampled) -> None:
        raise OSError("disk full")

    with sampler_in_process(make_recipe(tmp_path)) as sampler, pytest.raises(OSError, match="disk full"):
        sampler.sample(prompts(range(3)), on_prompt)


def test_stored_weights_are_those_of_the_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    parts = [{"a.weight": torch.arange(6.0).view(2, 3)}, {"b.weight": torch.ones(2, dtype=torch.bfloat16)}]
    for number, part in enumerate(parts):
        save_file(part, tmp_path / f"model-0000{number}.safetensors")
    found = dict(stored_weights(tmp_path))
    assert found.keys() == {"a.weight", "b.weight"} and torch.equal(found["a.weight"], parts[0]["a.weight"])
    assert found["b.weight"].dtype == torch.bfloat16
    with pytest.raises(UserError, match="holds no weights"):
        list(stored_weights(tmp_path / "nothing"))


def test_sampling_recipes_may_cut_the_distribution_and_have_no_rewards() -> None:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"top_p": 0.9, "top_k": 5, "n_samples_per_prompt": 8,
           "max_concurrent_requests": 4}, "train": {"steps": 3}, "pipeline": {"max_staleness": 1, "micro_batch_size": 16}}  # fmt: skip
    recipe = sampling_recipe(raw, "out")
    assert (recipe.rollout.top_p, recipe.rollout.top_k, recipe.rollout.max_concurrent_requests) == (0.9, 5, 8)
    assert recipe.rewards == () and recipe.train.steps is None and recipe.pipeline.max_staleness == 0
    assert recipe.pipeline.micro_batch_size == 16
    with pytest.raises(UserError, match=r"sampling: rollout\.top_p"):
        sampling_recipe({**raw, "rollout": {"top_p": 2}}, "out")
