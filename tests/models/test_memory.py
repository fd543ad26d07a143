import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.measured_memory import VOCAB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    command = [sys.executable, "-m", "tests.models.measured_memory", str(tmp_path_factory.mktemp("model"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_case_21_memory_does_not_grow_with_prompt_length_times_vocabulary(measured):
    logits = 4 * (2048 - 64) * VOCAB
    assert measured["textbook"] > logits, "what is measured would show it"
    assert measured["chunked"] < 0.2 * logits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_from_the_same_files_are_in_memory_once(measured, dtype):
    assert measured[dtype]["loaded"] < 1.2
    assert 0.95 < measured[dtype]["written"] < 1.2, "all of it is there now"
