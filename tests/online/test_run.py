"""What a run leaves behind, and how it ends when something goes wrong."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.online.conftest import Make, Run


@pytest.mark.slow
def test_the_run_folder_is_complete(make_recipe: Make, run: Run) -> None:
    """18 prompts in steps of 8: the third is short and nothing of it leaks anywhere."""
    finished = run(make_recipe("grpo", "run", {"train.rollout_batch_size": 8, "train.steps": None, "checkpoint.every": 2}))
    folder = finished.folder
    assert [row["samples"] for row in finished.rows] == [32, 32, 8]
    samples = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert [(s["group"], s["sample"]) for s in samples] == [(g, k) for g in range(18) for k in range(4)]
    for sample in samples:
        assert sample["score"] == pytest.approx(sample["rewards"]["vowels"] + 0.5 * sample["rewards"]["judge"], abs=1e-5)
        assert sample["finish_reason"] in ("stop", "length")
    for group in range(18):
        assert abs(sum(s["advantage"] for s in samples if s["group"] == group)) < 1e-3
    model = AutoModelForCausalLM.from_pretrained(folder.model)
    assert AutoTokenizer.from_pretrained(folder.model).chat_template and model.num_parameters() > 0
    assert {path.name for path in folder.path.iterdir()} >= {"config.yaml", "metrics.jsonl", "events.jsonl", "samples.jsonl", "trace.json",
                                                             "report.html", "model", "checkpoints"}  # fmt: skip
    assert json.loads(folder.trace.read_text())["traceEvents"]


@pytest.mark.slow
def test_a_reward_function_that_raises_ends_the_run_and_names_the_row(make_recipe: Make, run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def reward(prompts, completions, **columns):\n    raise KeyError('no such column')\n")
    recipe = make_recipe("grpo", "broken", {"rewards": [{"name": "broken", "function": f"{tmp_path / 'broken.py'}:reward"}]})
    with pytest.raises(Exception, match="no such column") as caught:
        run(recipe, cold=True)
    assert "row" in str(caught.value)
    assert not (Path(recipe.output_dir) / "model").exists()
