"""`conveyor check RECIPE --cluster`: every recipe for GPUs fits the cluster it is made for; what does not fit is one line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from conveyor.cli import main
from tests.tiny import save_tiny_policy

ROOT = Path(__file__).parents[1]
LARGE = str(ROOT / "recipes" / "llama3_70b_ppo_32gpu.yaml")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_memory_page", ROOT / "docs" / "make_memory_page.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_recipe_for_gpus_fits_its_cluster_as_the_page_says(maker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    made = {path.stem for path in (ROOT / "recipes").glob("*gpu.yaml")}
    assert set(maker.CLUSTERS) == made
    for name, cluster in maker.CLUSTERS.items():
        nodes, gpus = map(int, cluster.split("x"))
        assert re.search(rf"_{nodes * gpus}gpu$", name)
        assert main(["check", str(ROOT / "recipes" / f"{name}.yaml"), "--cluster", cluster]) == 0
        printed = capsys.readouterr().out
        assert printed.partition("\n")[2].strip() in maker.PAGE.read_text(encoding="utf-8")
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run: PYTHONPATH=. python docs/make_memory_page.py"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "3x8"], r"devices: asked for 32 GPUs \(rollout: 8, score: 8, train: 16\), the cluster has 24 GPUs"),
        (["--cluster", "8x4"], r"rollout.tensor_parallel_size: 8: an engine's GPUs are of one node, and the largest has 4"),
        (["--cluster", "4x8:42"], r"devices.score: 43.0 GiB a GPU do not fit 42.0 .*; what would help: score.offload_parameters cpu"),
        (["--cluster", "4x8", "--score.zero_stage", "0"], r"devices.score: .* would help: score.zero_stage 3"),
        (
            ["--cluster", "4x8", "--train.offload_optimizer", "none"],
            r"devices.train: .*optimizer .*would help: train.offload_optimizer cpu",
        ),
        (["--cluster", "four"], r"--cluster: 'four': say nodes x GPUs"),
        (["--cluster", "4x8", "--model.path", "some/thing"], r"model.path: the shape of 'some/thing' is not known: .*say --model SIZE"),
        (["--model", "8b"], r"check: --model and --reward-model go with --cluster"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", LARGE, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"conveyor: {says}.*\n", printed.err)


def test_sizes_stand_for_models_that_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = ["--model.path", "some/thing", "--critic.path", "some/other", "--rewards.0.model", "some/other"]
    assert main(["check", LARGE, "--cluster", "4x8", *unknown, "--model", "70b", "--reward-model", "8b"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"preference weights +1\.7\b", printed)  # (8.03e9 − 0.53e9) · 2 / 8 bytes
    assert re.search(r"reference weights +16\.4\b", printed)


def test_a_folder_tells_its_own_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = save_tiny_policy(tmp_path / "policy")
    raw = {"method": "sft", "output_dir": str(tmp_path / "run"), "model": {"path": str(policy)}, "data": {"path": "nowhere.jsonl"}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(raw | {"devices": {"train": 4}}))
    assert main(["check", str(tmp_path / "sft.yaml"), "--cluster", "1x8"]) == 0
    assert "node 0: train 4" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "sft.yaml"), "--cluster", "1x8", "--model", "70b"]) == 2
    assert "devices.train" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_a_cluster_of_ray_is_looked_at(tmp_path: Path) -> None:
    """Four nodes with eight GPUs each, as far as Ray knows."""
    out = tmp_path / "said.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "tests.fake_cluster", LARGE, str(out)], cwd=ROOT, env=environment, timeout=150, check=True)
    fits, asked = json.loads(out.read_text())
    assert fits["status"] == 0
    assert "on 4 nodes × 8 GPUs of 80 GiB" in fits["out"]
    assert asked["status"] == 2
    assert asked["err"].startswith("conveyor: devices: asked for 48 GPUs (rollout: 8, score: 8, train: 32), the cluster has 32 GPUs")
    assert asked["err"].count("\n") == 1
    assert asked["seconds"] < 10
