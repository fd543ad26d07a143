"""Where the engines of a loop live, and that each round is sampled with the right weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conveyor.config import UserError
from conveyor.loops import engines as engines_module
from conveyor.loops.engines import LoopEngines, as_sampling
from conveyor.loops.run import check_loop, run_loop
from conveyor.pipeline.sampling import Sampled
from conveyor.report.events import read_events
from conveyor.types import Prompt
from conveyor.workers.cluster import Devices
from tests.conftest import ENGINE_ROLLOUT
from tests.kept import KeptPlacement, KeptWorkers
from tests.loops.conftest import Finished, Make

PROMPT = [Prompt(0, 0, (1,), "p")]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is started and ended, in order."""
    said: list[str] = []

    class Place:
        @classmethod
        def create(cls, devices: Any, *_: Any, **__: Any) -> "Place":
            said.append(f"take {', '.join(devices)}")
            return cls()

        def close(self) -> None:
            said.append("free")

    class Engines:
        def __init__(self, recipe: Any, placement: Any, *, engines: Any) -> None:
            said.append("given" if engines else f"start {Path(recipe.model.path).name}")

        def install(self, policy: Path) -> None:
            said.append(f"install {policy.name}")

        def sample(self, prompts: Any, on_prompt: Any) -> None:
            said.append("sample")

        def __enter__(self) -> "Engines":
            return self

        def __exit__(self, *_: object) -> None:
            said.append("end")

    monkeypatch.setattr(engines_module, "Placement", Place)
    monkeypatch.setattr(engines_module, "Sampler", Engines)
    return said


def two_rounds(engines: LoopEngines, first: str) -> None:
    with engines:
        for policy in (first, "round_1"):
            engines.sample(policy, PROMPT, lambda sampled: None)
            engines.rest()
        engines.sample("round_2", PROMPT, lambda sampled: None)
        engines.sample("round_2", PROMPT, lambda sampled: None)


def test_engines_that_stay_take_each_policy_once(make_loop: Make, log: list[str]) -> None:
    recipe = make_loop("rso", Path("unused"), {"rounds.keep_engines": True})
    two_rounds(LoopEngines(recipe), recipe.model.path)
    assert log == [
        "take rollout", "start policy", "sample", "install round_1", "sample", "install round_2", "sample", "sample", "end", "free",
    ]  # fmt: skip


def test_engines_that_do_not_stay_free_their_devices_for_the_training(make_loop: Make, log: list[str]) -> None:
    recipe = make_loop("rso", Path("unused"), {"rounds.keep_engines": False})
    two_rounds(LoopEngines(recipe), recipe.model.path)
    around = ["end", "free", "take rollout"]
    assert log == ["take rollout", "start policy", "sample", *around, "start round_1", "sample", *around, "start round_2", "sample",
                   "sample", "end", "free"]  # fmt: skip


def test_given_engines_stay_and_hold_nobody_knows_what(make_loop: Make, log: list[str]) -> None:
    recipe = make_loop("rso", Path("unused"), {"rounds.keep_engines": False})
    two_rounds(LoopEngines(recipe, [object()]), recipe.model.path)
    assert log == ["take rollout", "given", "install policy", "sample", "install round_1", "sample", "install round_2", "sample", "sample",
                   "end", "free"]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "devices", "stay"),
    [("CPU", None, True), ("GPU", None, False), ("GPU", {"rollout": 1}, False), ("GPU", {"rollout": 1, "train": 1}, True)],
)
def test_by_default_engines_stay_where_training_has_other_devices(make_loop: Make, monkeypatch: Any, kind: Any, devices: Any, stay) -> None:
    monkeypatch.setattr(engines_module, "available", lambda _: Devices(kind, 2))
    assert engines_module.engines_stay(make_loop("rso", Path("unused"), {"devices": devices})) == stay


def test_sampling_ahead_needs_engines_that_stay(make_loop: Make, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(engines_module, "available", lambda _: Devices("GPU", 2))
    with pytest.raises(UserError, match=r"rounds.max_staleness: engines that sample while the policy is trained need devices of their own"):
        check_loop(make_loop("rso", tmp_path / "run", {"rounds.max_staleness": 1}))


def test_later_policies_are_read_with_the_first_ones_tokenizer(make_loop: Make) -> None:
    recipe = make_loop("rso", Path("out"), {"devices": {"rollout": 1, "train": 1}})
    later = as_sampling(recipe, "out/rounds/round_1/train/model")
    assert (later.model.path, later.model.tokenizer) == ("out/rounds/round_1/train/model", recipe.model.path)
    assert later.rollout.n_samples_per_prompt == 4 and dict(later.devices) == {"rollout": 1} and later.seed == recipe.seed
    assert [reward.name for reward in later.rewards] == ["low"] and later.output_dir == "out"


@torch.no_grad()
def logprobs(model: Path, sampled: Sampled) -> list[float]:
    """Largest difference of a sample's log-probs from those of transformers' own model."""
    fresh, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), []
    for rollout in sampled.rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt.token_ids), rollout.response_ids])
        start = len(rollout.prompt.token_ids)
        own = fresh(ids[None]).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[start:, None])[:, 0]
        found.append(float((own - rollout.logprobs).abs().max()))
    return found


@pytest.mark.slow
def test_real_engines_and_a_reward_model(
    make_loop: Make, engine: Any, restored: None, kept: KeptWorkers, tiny_policy: Path, tiny_reward_model: Path, tmp_path: Path,
    monkeypatch: Any,
) -> None:  # fmt: skip
    """Round 2 is sampled with round 1's weights; scores come from a score worker, which is at work while engines sample."""
    seen: list[Sampled] = []
    sample = LoopEngines.sample

    def watched(self: LoopEngines, policy: str, prompts: Any, on_prompt: Any) -> None:
        sample(self, policy, prompts, lambda sampled: (seen.append(sampled), on_prompt(sampled)))

    monkeypatch.setattr(LoopEngines, "sample", watched)
    monkeypatch.setattr("ray.kill", lambda worker: None)  # others use it, too
    monkeypatch.setattr(engines_module.Placement, "create", lambda *_, **__: KeptPlacement(kept, {"score": 1}))
    recipe = make_loop("iterative_dpo", tmp_path / "run", {
        "model.path": str(tiny_policy), "seed": 7, "rounds.prompts": 9,
        "rewards": [{"name": "judge", "model": str(tiny_reward_model)}],
        "rollout": {**ENGINE_ROLLOUT.model_dump(include={"max_response_length", "max_concurrent_requests"}), "n_samples_per_prompt": 4},
        "train": {"train_batch_size": 16, "micro_batch_size": 8, "learning_rate": 1e-2},
        "devices": {"rollout": 1, "score": 1},
    })  # fmt: skip
    run_loop(recipe, [engine])
    done = Finished(tmp_path / "run")
    assert [sum(len(line["samples"]) for line in done.lines("samples", number)) for number in (1, 2)] == [36, 4]
    assert [row["samples"] for row in done.rows] == [36, 4], "a remainder of one prompt"
    first, last = (next(one for one in seen if one.prompt.index == index) for index in (0, 9))
    assert max(logprobs(tiny_policy, first)) < 1e-4 > max(logprobs(done.model(1), last))
    assert max(logprobs(tiny_policy, last)) > 1e-2, "the training has changed something"
    scores = [sample["rewards"]["judge"] for line in done.lines("samples", 1) for sample in line["samples"]]
    assert len(set(scores)) > 30
    events = read_events(done.run.events)
    sampling, scoring = ([event for event in events if event.worker.startswith(stage)] for stage in ("rollout", "score"))
    assert min(event.start for event in scoring) < sorted(event.end for event in sampling)[35]
