"""Score workers that hold one copy of each model together say what whole ones say; case 16 for scoring."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.models.inference_engine import InferenceEngine
from conveyor.types import PartialScores, Prompt, Rollout
from conveyor.workers.rendezvous import Membership
from conveyor.workers.score import ScoreWorker
from conveyor.workers.weight_sync import publish
from tests.models.ranks import spawn
from tests.tiny import save_tiny_policy, save_tiny_reward_model

ROLES = ("reference", "quality", "policy_snapshot", "critic_snapshot")


def recipe_of(folder: Path, **train: int) -> OnlineRecipe:
    made = parse_recipe({
        "method": "ppo", "output_dir": str(folder / "run"), "model": {"path": str(folder / "policy")},
        "rewards": [{"name": "quality", "model": str(folder / "reward")}], "rollout": {"max_response_length": 16},
        "data": {"path": "unused", "max_prompt_length": 8}, "score": {"zero_stage": 3},
        "train": {"rollout_batch_size": 8, "train_batch_size": 4, **train}, "pipeline": {"micro_batch_size": 4},
    })  # fmt: skip
    assert isinstance(made, OnlineRecipe)
    return made


def samples(count: int) -> list[Rollout]:
    found = []
    for i in range(count):
        ids = torch.arange(10 + i, 10 + i + 3 + 4 * (i % 3))
        found.append(Rollout(Prompt(i, i, (1, 20 + i), ""), 0, ids, torch.zeros(len(ids)), torch.zeros(len(ids)).int(), "stop", ""))
    return found


def perturbed(folder: Path) -> list[tuple[str, Tensor]]:
    weights = load_file(folder / "policy" / "model.safetensors")
    return [(name, weight * 1.25) for name, weight in weights.items()]


def everything(worker: ScoreWorker, folder: Path) -> list[PartialScores | None]:
    """Of five samples, of one, and of five again when the policy snapshot has other weights."""
    found = [worker.score(ROLES, samples(5))[1], worker.score(ROLES, samples(1))[1]]
    publication = publish(perturbed(folder), 1, "actor", verify=True, put=lambda bucket: bucket)
    assert publication is not None
    assert worker.install("policy_snapshot", publication, get=lambda bucket: bucket).mismatched == ()
    found.append(worker.score(ROLES, samples(5))[1])
    worker.save_weights("policy_snapshot", folder / f"saved{0 if worker._team is None else 2}")
    worker.load_weights("policy_snapshot", folder / f"saved{0 if worker._team is None else 2}")
    return [*found, worker.score(("policy_snapshot",), samples(3))[1]]


def on_two(rank: int, ranks: int, port: int, folder: Path) -> None:
    worker = ScoreWorker(
        recipe_of(folder, max_tokens_per_micro_batch=24), ROLES, cores=(0,), team=Membership(rank, ranks, "127.0.0.1", port)
    )
    worker.ready()
    assert all(isinstance(model, InferenceEngine) for model in worker._models.values())
    found = everything(worker, folder)
    assert all((one is None) == (rank > 0) for one in found)
    if rank == 0:
        torch.save(found, folder / "found.pt")


@pytest.mark.slow
def test_a_team_says_what_a_whole_worker_says(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy")
    save_tiny_reward_model(tmp_path / "reward")
    for name in ("saved0", "saved2"):
        (tmp_path / name).mkdir()
    spawn(on_two, 2, tmp_path)
    alone = ScoreWorker(recipe_of(tmp_path), ROLES, cores=(0,))
    alone.ready()
    wanted = everything(alone, tmp_path)
    for found, right in zip(torch.load(tmp_path / "found.pt", weights_only=False), wanted, strict=True):
        assert right is not None and found.rewards.keys() == right.rewards.keys()
        for name, scores in right.rewards.items():
            assert found.rewards[name] == pytest.approx(scores, abs=1e-5)
        for column in ("reference_logprobs", "old_logprobs", "values"):
            assert (getattr(found, column) is None) == (getattr(right, column) is None)
            for one, other in zip(getattr(found, column) or (), getattr(right, column) or (), strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert not torch.equal(wanted[0].old_logprobs[0], wanted[2].old_logprobs[0])  # type: ignore[union-attr,index]
    for name, weight in load_file(tmp_path / "saved0" / "policy_snapshot.safetensors").items():
        assert torch.equal(weight, load_file(tmp_path / "saved2" / "policy_snapshot.safetensors")[name])
