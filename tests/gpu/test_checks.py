"""The script of GPU checks: on a GPU where there is one, and everywhere on the CPU, with nothing installed but what it promises to need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "checks.py"
WITHOUT = ("ray", "vllm", "deepspeed", "datasets", "trl", "pydantic", "xxhash")
BLOCKED = f"""
import runpy, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {WITHOUT!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
sys.argv = [{str(SCRIPT)!r}, *sys.argv[1:]]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
"""Runs the script in a Python that does not find them."""


def run_script(tmp_path, *start, device):
    file = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, *start, "--device", device, "--json", str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_check_runs_with_torch_transformers_and_peft_alone(tmp_path):
    found = run_script(tmp_path, "-c", BLOCKED, device="cpu")
    assert found["passed"] and found["device"] == "cpu"
    assert {row["check"] for row in found["rows"]} >= {"training step", "packed attention", "chunked head", "float32 head"}
    assert set(found["skipped"]) <= {"nf4_adapter", "liger_kernels"}


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    assert run_script(tmp_path, str(SCRIPT), device="cuda")["passed"]
