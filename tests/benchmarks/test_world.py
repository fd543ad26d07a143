"""The world of `make world`: its reward, its data, its page."""

import json
import statistics

import pytest
import torch

from benchmarks.world.__main__ import clear
from benchmarks.world.measure import Measured, measure, trained_tokens
from benchmarks.world.methods import METHODS, offline_data
from benchmarks.world.page import markdown
from benchmarks.world.run import Run, as_row, from_row
from benchmarks.world.truth import reward, true_reward
from benchmarks.world.world import World
from conveyor.pipeline.sampling import Sampled
from conveyor.types import Prompt, Rollout
from tests.tiny import save_tiny_policy


@pytest.mark.parametrize(
    ("response", "expected"),
    [("a b c d", 1.0), ("a c b d", 0.5), ("a b c", 0.75), ("a b c d e", 0.8), ("", 0.0), ("abcd", 0.0)],
)
def test_true_reward_is_the_share_of_letters_in_their_places(response, expected):
    assert true_reward(response, "a b c d") == expected
    assert reward(["p"], [response], ["a b c d"]) == [expected]


def sampled(index, answer, texts):
    rollouts = [
        Rollout(prompt := Prompt(index, index, (1, 5), f"p{index}", columns={"answer": answer}), i, torch.tensor([7 + i, 2]),
                torch.zeros(2), torch.zeros(2).int(), "stop", text)
        for i, text in enumerate(texts)
    ]  # fmt: skip
    return Sampled(prompt, tuple(rollouts), ({},) * len(texts), (None,) * len(texts))


def test_offline_methods_share_one_set_of_samples(tmp_path):
    world = World(tmp_path, 0)
    offline_data(world, [sampled(0, "a b", ["a b", "b a", "a b", "a b", "a c", "a b", "c", "d"])])
    pairs = [tuple(row.values()) for row in rows(world, "pairs")]
    assert pairs == [("p0", "a b", "b a"), ("p0", "a b", "a c")], "those of equal reward are none"
    assert [row["completion"] for row in rows(world, "chosen")] == ["a b", "a b"]
    judged = rows(world, "judged")
    assert [row["reward"] for row in judged] == [1, 0, 1, 1, 0.5, 1, 0, 0]
    assert [row["label"] for row in judged] == [True, False, True, True, False, True, False, False], "against the mean of 4.5/8"


def rows(world, name):
    return [json.loads(line) for line in world.data(name).read_text().splitlines()]


def test_measured_kl_is_the_mean_log_ratio_of_the_samples(tmp_path):
    one, other = save_tiny_policy(tmp_path / "one", seed=0), save_tiny_policy(tmp_path / "other", seed=1)
    samples = [sampled(0, "a b", ["a b", "b a"]), sampled(1, "c d", ["c d", "c"])]
    found = measure(one, other, samples)
    from transformers import AutoModelForCausalLM

    total = 0.0
    for path, sign in ((one, 1), (other, -1)):
        model = AutoModelForCausalLM.from_pretrained(path)
        for token in (7, 8):
            logprobs = model(torch.tensor([[1, 5, token, 2]])).logits.detach().log_softmax(-1)[0]
            total += sign * float(logprobs[1, token] + logprobs[2, 2]) / 2
    assert found.kl == pytest.approx(total, abs=1e-5)
    assert found.error == pytest.approx(statistics.stdev([0.5, 0.75]) / 2**0.5)
    assert found.true_reward == (1 + 0 + 1 + 0.5) / 4 and found.exact == 0.5
    assert measure(one, one, samples).kl == 0


def test_the_table_has_every_method_and_a_run_survives_its_file():
    runs = [
        Run(method, seed, Measured(0.5 + seed / 10, 0.01, 0.25, 1.5), 12.3, 1000) for method in ("start", *METHODS) for seed in (0, 1, 2)
    ]
    table = markdown(runs)
    assert "| `dpo` | 0.500 · 0.600 · 0.700 | 0.600 | 0.250 | 1.50 | 1,000 | 12 |" in table
    assert "| `iterative_dpo` − `ppo` | +0.000 · +0.000 · +0.000 | +0.000 | 0.014 |" in table
    assert all(f"`{method}`" in table for method in METHODS)
    assert [from_row(as_row(run)) for run in runs] == runs


def test_a_right_answer_is_desirable_though_all_of_its_prompt_are(tmp_path):
    world = World(tmp_path, 0)
    offline_data(world, [sampled(0, "a b", ["a b"] * 8), sampled(1, "a b", ["b a"] * 8)])
    assert [row["label"] for row in rows(world, "judged")] == [True] * 8 + [False] * 8


def test_tokens_of_an_online_run_count_its_prompts_as_those_of_others_do(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 5}\n')
    assert trained_tokens(tmp_path) == 5
    (tmp_path / "samples.jsonl").write_text('{"prompt_length": 9, "response_length": 5}\n')
    assert trained_tokens(tmp_path) == 14


def test_only_what_it_made_itself_is_removed(tmp_path):
    for name in ("seed_0/data", "mine"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "summary.json").write_text("{}")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
