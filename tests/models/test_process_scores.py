"""Rewards of a process reward model, recomputed step by step from prefixes."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from conveyor.config.sections import Model, Steps
from conveyor.models.process_scores import process_scores
from conveyor.models.scalar_model import load_scalar_model
from tests.tiny import save_tiny_reward_model

PROMPT, SEPARATOR, END = [1, 30, 31], [15, 16], 2
RESPONSES = {
    "two whole steps": ([40, 41, 15, 16, 42, 15, 16], [4, 7]),
    "the end is no step": ([40, 41, 15, 16, 42, 15, 16, END], [4, 7]),
    "a step without separator": ([40, 15, 16, 43, 44], [3, 5]),
    "cut within a separator": ([40, 15, 16, 43, 15], [3, 5]),
    "nothing but the end": ([END], [1]),
}
"""Response → length of the prefix that ends with each step."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_reward_model(tmp_path_factory.mktemp("process") / "model")


@torch.no_grad()
@pytest.mark.parametrize("aggregate", ["min", "mean", "product", "last"])
def test_a_steps_probability_is_that_of_the_prefix_it_ends(model_path, aggregate):
    plain = AutoModelForSequenceClassification.from_pretrained(model_path)
    expected = []
    for response, prefixes in RESPONSES.values():
        steps = [torch.sigmoid(plain(torch.tensor([PROMPT + response[:length]])).logits).item() for length in prefixes]
        expected.append({"min": min(steps), "mean": sum(steps) / len(steps), "product": steps[0] * (steps[-1] if steps[1:] else 1),
                         "last": steps[-1]}[aggregate])  # fmt: skip
    model = load_scalar_model(Model(path=str(model_path)))
    samples = [(PROMPT, response) for response, _ in RESPONSES.values()]
    found = process_scores(model, samples, Steps(separator="x", aggregate=aggregate), SEPARATOR, END)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
