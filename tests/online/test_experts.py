"""Mixtures of experts between trainer and vLLM: names and forms of weights differ, and what they say must not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conveyor.checks import check_online
from conveyor.pipeline.loop import run_placed
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt
from conveyor.workers.weight_sync import publish
from tests.conftest import rollout_engine
from tests.kept import KeptPlacement, KeptWorkers
from tests.online.conftest import Finished, Make
from tests.tiny import save_tiny_moe
from tests.workers.test_rollout import call, changed, prompt, transformers_logprobs

PROMPTS: list[Prompt] = [prompt(index, 6 + 3 * index) for index in range(4)]


def furthest(engine: Any, model: torch.nn.Module) -> float:
    """Largest difference of any token's log-prob between the engine that sampled it and transformers."""
    rollouts = call(engine.generate.remote(PROMPTS, 2))
    assert len(rollouts) == 8
    return max(float((rollout.logprobs - transformers_logprobs(model, rollout)).abs().max()) for rollout in rollouts)


@pytest.mark.slow
def test_engines_say_what_the_trainers_weights_say(ray_session: None, kept: KeptWorkers, make_recipe: Make, tmp_path: Path) -> None:
    """After every tensor was changed and installed, twice; and through a run, to its saved model."""
    folders = {kind: save_tiny_moe(tmp_path / kind, kind) for kind in ("qwen3_moe", "mixtral")}
    models = {kind: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for kind, folder in folders.items()}
    with rollout_engine(folders["qwen3_moe"]) as qwen, rollout_engine(folders["mixtral"]) as mixtral:
        for kind, engine in {"qwen3_moe": qwen, "mixtral": mixtral}.items():
            assert furthest(engine, models[kind]) < 1e-5, kind
            for version in (1, 2):
                model = changed(models[kind], version)
                report = call(engine.install.remote(publish(model.named_parameters(), version, "actor", verify=True)))
                assert report.mismatched == ()
                assert furthest(engine, model) < 1e-5, (kind, version)
        finished = go(make_recipe("grpo", "run", {
            "model.path": str(folders["qwen3_moe"]), "train.router_aux_loss_coef": 0.01, "train.train_batch_size": 12, "train.steps": 2,
            "rewards": make_recipe("grpo", "like").model_dump()["rewards"][:1], "pipeline.verify_sync": True,
        }), kept, qwen)  # fmt: skip
        for row in finished.rows:
            assert row["rollout_mismatch/max"] < 1e-4
            assert row["moe/expert_load_min"] < 1 < row["moe/expert_load_max"] and row["moe/aux_loss"] >= 0.9
        saved = AutoModelForCausalLM.from_pretrained(finished.folder.model, dtype=torch.float32).eval()
        assert furthest(qwen, saved) < 1e-5


def go(recipe: Any, kept: KeptWorkers, engine: Any) -> Finished:
    order = check_online(recipe)
    run_placed(recipe, order, KeptPlacement(kept, {"score": 1, "train": 1}), engines=[engine], gradient_folder=None)
    return Finished(RunFolder(recipe.output_dir))
