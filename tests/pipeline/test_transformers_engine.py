"""Whole runs with `rollout.engine: transformers`: samples join and leave its batches at any time, and nothing depends on that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conveyor.pipeline.parity import compare
from conveyor.report.progress import read_metrics
from tests.pipeline.test_exactness import CASES, models, recipe, run

__all__ = ["models"]  # the fixture
SAME_BITS = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Where it was seen that a row of a batch has the bits that it has alone; elsewhere log-probs may round otherwise, as metrics tell."""


def on_transformers(case: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    """Letters end a response: one token in ten."""
    settings = {"engine": "transformers", "max_response_length": 12, "stop": list("abcdefghijklmnopqrstuvwxyz")}
    return {**case, "rollout": {**settings, **case.get("rollout", {}), **rollout}}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo, snapshots", "grpo, several updates"])
def test_overlap_engines_and_batches_change_nothing(case: str, models: dict[str, str], tmp_path: Path) -> None:
    settings = on_transformers(CASES[case])
    off = run(recipe(models, tmp_path / "off", settings, overlap=False))
    on = run(recipe(models, tmp_path / "on", on_transformers(CASES[case], max_concurrent_requests=3)), seed=1, engines=2, score_workers=2)
    same = compare(off, on, 0.0 if SAME_BITS else 1e-6)
    assert same.holds and same.parameters.largest == same.gradient.largest == same.samples_differing == 0
    assert same.samples == 24 and (not SAME_BITS or not any(same.metrics.values()))
    rows = read_metrics(on.metrics)
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["rollout_mismatch/max"] < 1e-5 for row in rows), "the engine has the trainer's weights after every sync"
    lengths = [json.loads(line)["response_length"] for line in on.samples.read_text().splitlines()]
    assert len(set(lengths)) > 3, "samples leave at different steps"


@pytest.mark.slow
def test_requests_live_through_installs_at_staleness_1(models: dict[str, str], tmp_path: Path) -> None:
    made = recipe(models, tmp_path / "run", on_transformers(CASES["ppo, snapshots"]), max_staleness=1, order="completion")
    folder = run(made, seed=3, engines=2)
    rows = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert sorted((row["group"], row["sample"]) for row in rows) == [(group, k) for group in range(12) for k in range(2)]
    assert all(0 <= row["step"] - 1 - row["version"] <= 1 for row in rows)
    assert max(row["staleness/max"] for row in read_metrics(folder.metrics)) == 1
