"""Runs on Ray whose engine is transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest

from conveyor.checks import check_online
from conveyor.cli import main
from conveyor.pipeline.loop import run_placed
from conveyor.run_folder import RunFolder
from tests.conftest import rollout_engine
from tests.kept import KeptPlacement, KeptWorkers
from tests.online.conftest import Finished, Make

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_training_with_held_out_prompts_then_generate(
    ray_session: None, kept: KeptWorkers, make_recipe: Make, tiny_policy: Path, prompts_file: Path, tmp_path: Path, capsys: Any
) -> None:
    """Every step is sampled with the weights of the step before it, and the finished model by the command, in a worker of its own."""
    changes = {
        "rollout.engine": "transformers",
        "pipeline.verify_sync": True,
        "evaluate": {"path": str(prompts_file), "max_prompts": 4, "in_bubbles": False},
    }
    recipe = make_recipe("grpo", "run", changes)
    order = check_online(recipe)
    with (
        rollout_engine(tiny_policy, engine="transformers") as engine,
        KeptPlacement(kept, {"score": 1, "train": 1}) as placement,
    ):
        run_placed(recipe, order, placement, engines=[engine])
    finished = Finished(RunFolder(recipe.output_dir))
    assert [row["version"] for row in finished.rows] == [1, 2, 3]
    for row in finished.rows:
        assert row["ratio/max"] == 1.0 and row["staleness/max"] == 0 and row["rollout_mismatch/max"] < 1e-5
    held_out = [json.loads(line) for line in finished.folder.evaluations.read_text().splitlines()]
    assert [line["version"] for line in held_out] == [0, 1, 2, 3] and all(line["eval/coverage"] == 1 for line in held_out)

    out = tmp_path / "out"
    sizes = ["--n", "2", "--rollout.max_response_length", "8", "--data.max_prompt_length", "32", "--devices.rollout", "1"]
    arguments = ["generate", str(finished.folder.model), "--data", str(prompts_file), "--output-dir", str(out), *sizes]
    assert main([*arguments, "--rollout.engine", "transformers"]) == 0
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(row["row"], row["sample"]) for row in rows] == [(row, sample) for row in range(1, 19) for sample in range(2)]
    assert all(1 <= row["response_length"] <= 8 for row in rows)
