"""Mixtures of experts through whole runs: the result depends on nothing but the recipe, and replayed experts are those of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conveyor.checks import check_online
from conveyor.config import OnlineRecipe, UserError, parse_recipe
from conveyor.pipeline.parity import compare
from conveyor.report.progress import read_metrics
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt, Rollout
from tests.pipeline import in_process
from tests.pipeline.in_process import TorchEngine, run_in_process
from tests.tiny import save_tiny_moe, save_tiny_policy

PROMPTS = [Prompt(i, i, (1, 40 + i, 41 + i % 3), f"p{i}", columns={"answer": i % 3}) for i in range(8)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo of a mixtral, several updates": ("mixtral", {"method": "grpo", "train": {"train_batch_size": 4}}),
    "ppo of a mixtral": ("mixtral", {"method": "ppo", "algorithm": {"loss_aggregation": "sequence_mean"}}),
    "ppo of a qwen3_moe, whitened while it streams": ("qwen3_moe", {"method": "ppo", "algorithm": {"normalize": "streaming_exact"}}),
    "online_dpo of a qwen3_moe": ("qwen3_moe", {"method": "online_dpo", "pipeline": {"micro_batch_size": 2}}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "rewards.py").write_text(
        "def vowels(prompts, completions, answer, **columns):\n"
        "    return [sum(c in 'aeiou' for c in text) / 10 + 0.01 * len(text) + 0.1 * wanted for text, wanted in zip(completions, answer)]\n"
    )
    for kind in ("qwen3_moe", "mixtral"):
        save_tiny_moe(folder / kind, kind)
    return folder


def recipe(models: Path, kind: str, folder: Path, settings: dict[str, Any], **pipeline: Any) -> OnlineRecipe:
    made = parse_recipe(
        {
            "output_dir": str(folder),
            "seed": 5,
            "model": {"path": str(models / kind)},
            "data": {"path": "unused", "max_prompt_length": 32, "apply_chat_template": False},
            "rewards": [{"name": "vowels", "function": f"{models / 'rewards.py'}:vowels"}],
            **settings,
            "rollout": {"n_samples_per_prompt": 2, "max_response_length": 6, "max_concurrent_requests": 4, **settings.get("rollout", {})},
            "train": {"rollout_batch_size": 4, "steps": 2, "learning_rate": 1e-3, "router_aux_loss_coef": 0.1, **settings.get("train", {})},
            "pipeline": {"micro_batch_size": 3, **settings.get("pipeline", {}), **pipeline},
        }
    )
    assert isinstance(made, OnlineRecipe)
    return made


def run(made: OnlineRecipe, **workers: int) -> RunFolder:
    run_in_process(made, PROMPTS, **workers)
    return RunFolder(made.output_dir)


@pytest.mark.parametrize("case", CASES)
def test_overlap_and_the_cut_into_micro_batches_change_nothing(case: str, models: Path, tmp_path: Path) -> None:
    kind, settings = CASES[case]
    off = run(recipe(models, kind, tmp_path / "off", settings, overlap=False))
    on = run(recipe(models, kind, tmp_path / "on", settings), seed=1, engines=2)
    same = compare(off, on, 0.0)
    assert same.holds and same.parameters.largest == same.gradient.largest == 0
    size = 4 if settings["method"] == "online_dpo" else 1
    cut = compare(off, run(recipe(models, kind, tmp_path / "cut", settings, micro_batch_size=size, order="completion"), seed=2), 1e-4)
    assert cut.gradient.relative < 1e-6 and cut.parameters.relative < 1e-4
    for one, other in zip(read_metrics(off.metrics), read_metrics(RunFolder(tmp_path / "cut").metrics), strict=True):
        assert one["moe/expert_load_max"] == other["moe/expert_load_max"] > 1 > one["moe/expert_load_min"]
        assert one["moe/expert_load_min"] == other["moe/expert_load_min"]
        assert one["moe/aux_loss"] == pytest.approx(other["moe/aux_loss"], rel=1e-5)


def test_the_balance_loss_moves_the_routers(models: Path, tmp_path: Path) -> None:
    of = [
        run(recipe(models, "mixtral", tmp_path / str(coef), {"method": "grpo", "train": {"router_aux_loss_coef": coef}}))
        for coef in (None, 0.1)
    ]
    assert compare(*of, 1e-4).gradient.relative > 1e-3
    assert "moe/aux_loss" not in read_metrics(of[0].metrics)[0] and "moe/expert_load_max" in read_metrics(of[0].metrics)[0]


def test_settings_of_experts_are_refused_before_a_model_is_loaded(models: Path, tmp_path: Path) -> None:
    save_tiny_policy(models / "dense")
    with pytest.raises(UserError, match=r"^train.router_aux_loss_coef: a llama model has no routers of experts"):
        check_online(recipe(models, "dense", tmp_path / "run", {"method": "grpo"}))
    with pytest.raises(UserError, match=r"^rollout.routing_replay: vLLM tells the experts of its tokens on GPUs only"):
        check_online(recipe(models, "mixtral", tmp_path / "run", {"method": "grpo", "rollout": {"routing_replay": True}}))


class Telling(TorchEngine):
    """Tells each token's experts, all of them moved by `shift`: another engine's router may choose others than the trainer's."""

    shift = 0

    @torch.no_grad()
    def _sample(self, prompt: Prompt, sample: int, version: int) -> Rollout:
        rollout = super()._sample(prompt, sample, version)
        ids = torch.tensor([[*prompt.token_ids, *rollout.response_ids.tolist()]])[:, :-1]
        layers = self._model(ids, output_router_logits=True).router_logits
        experts = torch.stack([(logits.topk(2).indices + self.shift) % logits.shape[1] for logits in layers], 1)
        return replace(rollout, experts=experts.to(torch.uint8))


@pytest.mark.parametrize("updates", [1, 2])
def test_experts_of_the_engine_are_replayed(models: Path, tmp_path: Path, updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own choice gives the same bits. Another one trains otherwise, with the same experts in the snapshot: the first ratio stays 1."""
    settings = {"method": "grpo", "train": {"train_batch_size": 8 // updates, "learning_rate": 1e-4}}
    replays = settings | {"rollout": {"routing_replay": True}}
    plain = run(recipe(models, "qwen3_moe", tmp_path / "plain", settings))
    monkeypatch.setattr(in_process, "TorchEngine", Telling)
    own = run(recipe(models, "qwen3_moe", tmp_path / "own", replays))
    ignored = run(recipe(models, "qwen3_moe", tmp_path / "ignored", settings))
    monkeypatch.setattr(Telling, "shift", 3)
    shifted = run(recipe(models, "qwen3_moe", tmp_path / "shifted", replays))
    assert compare(plain, ignored, 0.0).parameters.largest == 0, "experts that came along and were not asked for"
    if updates == 1:  # with several, an update replays what the router chose before the one before it
        assert compare(plain, own, 0.0).parameters.largest == 0
    assert compare(plain, own, 1e-4).gradient.largest == 0
    assert compare(plain, shifted, 1e-4).gradient.relative > 1e-2
    for row in read_metrics(shifted.metrics):
        assert row["ratio/max"] == pytest.approx(1.0, abs=0.05 if updates > 1 else 1e-6)
