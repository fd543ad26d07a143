"""The pure parts import without the heavy frameworks, so they can be read, tested and simulated anywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = [
    "conveyor.types",
    "conveyor.config",
    "conveyor.config.load",
    "conveyor.algorithms.losses",
    "conveyor.algorithms.advantages",
    "conveyor.workers.reports",
    "conveyor.pipeline.scheduler",
    "conveyor.plan",
    "conveyor.report.timeline",
]
HEAVY = ("ray", "vllm", "deepspeed", "transformers", "matplotlib")


def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or path.joinpath("__init__.py").exists()


@pytest.fixture(scope="module")
def heavy_imports():
    """Pure module → the heavy packages loaded once it is imported, all in one fresh interpreter."""
    present = [module for module in PURE if exists(module)]
    code = f"""
import importlib, json, sys
found = {{}}
for module in {present!r}:
    importlib.import_module(module)
    found[module] = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps(found))
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("module", PURE)
def test_imports_no_heavy_framework(module, heavy_imports):
    if module not in heavy_imports:
        pytest.skip(f"{module} is not written yet")
    assert heavy_imports[module] == []
