"""A whole run over two nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file


@pytest.mark.long
@pytest.mark.slow
def test_grpo_over_two_nodes(tmp_path: Path, tiny_policy: Path) -> None:
    """Ranks that meet across nodes, weights that travel to an engine by both object stores, reward functions beside the driver."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tests.online.two_nodes", str(tmp_path), str(tiny_policy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    places = json.loads(done.stdout.splitlines()[-1])
    assert sorted(places["train"]) == [0, 1] and len(places["rollout"]) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2] and all(row["rollout_mismatch/max"] < 1e-5 for row in rows)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_policy, tmp_path / "run" / "model"))
    assert any((before[name] - after[name]).abs().max() > 1e-4 for name in after)
