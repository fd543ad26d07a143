"""Shapes, memory and costs against numbers that are known."""

import json
from pathlib import Path

import pytest

from conveyor.config import UserError
from conveyor.pipeline.run_plan import score_parts, train_groups
from conveyor.plan.hardware import GPUS, gpu
from conveyor.plan.known_models import NAMED, model_shape
from conveyor.plan.lengths import LengthFacts, Size
from conveyor.plan.memory import GroupMemory, Shapes, group_memory
from conveyor.plan.models import shape_from_config
from conveyor.plan.roofline import Roofline
from conveyor.types import SampleId
from tests.plan.recipes import recipe

H100 = GPUS["h100"]
LENGTHS = LengthFacts(prompt=200, response=300, resident=500, longest=1000)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("7b", 6_738_415_616), ("8b", 8_030_261_248),
     ("13b", 13_015_864_320), ("70b", 70_553_706_496)],
)  # fmt: skip
def test_named_models_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    assert NAMED[name].parameters == parameters


def test_weights_and_cache_of_known_models() -> None:
    assert NAMED["70b"].parameters * 2 / 1e9 == pytest.approx(141.1, abs=0.05)
    assert NAMED["8b"].cache_bytes() == 131_072
    assert NAMED["7b"].cache_bytes() == 524_288


def test_a_shape_from_a_configuration(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
              "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
    assert shape_from_config(config) == NAMED["8b"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert model_shape(str(tmp_path)) == NAMED["8b"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    with pytest.raises(UserError, match="num_experts_per_tok"):
        model_shape(str(tmp_path))
    with pytest.raises(UserError, match="neither a folder"):
        model_shape("9000b")
    with pytest.raises(UserError, match="one of a100"):
        gpu("tpu")


def tables(made, name: str = "8b") -> dict[str, GroupMemory]:
    shapes = Shapes(NAMED[name], NAMED[name])
    return {table.group: table for table in group_memory(made, shapes, H100, LENGTHS)}


def test_gradients_kept_apart_take_memory_and_time() -> None:
    plain = recipe("grpo", devices={"rollout": 1, "score": 1, "train": 4}, roles={})
    kept = recipe(
        "grpo",
        devices={"rollout": 1, "score": 1, "train": 4},
        roles={},
        algorithm={"normalize": "streaming_exact"},
        train={"zero_stage": 2},
    )
    # GRPO has its KL in the loss: three sums of 4 bytes, and passes 1 + 3 · 2 instead of 1 + 2.
    assert tables(kept)["train"].items["gradients kept apart"] == 3 * 4 * NAMED["8b"].parameters
    assert "gradients kept apart" not in tables(plain)["train"].items


def test_engines_share_weights_and_cache_as_far_as_there_are_heads() -> None:
    made = recipe("grpo", devices={"rollout": 16, "score": 1, "train": 1}, roles={}, rollout={"max_concurrent_requests": 64})
    single = tables(made)["rollout"].items
    assert single["engine weights"] == NAMED["8b"].parameters * 2
    assert single["KV cache"] == pytest.approx(64 * 500 * 131_072 * 1.1)
    wide = recipe(
        "grpo",
        devices={"rollout": 16, "score": 1, "train": 1},
        roles={},
        rollout={"max_concurrent_requests": 64, "tensor_parallel_size": 16},
    )
    assert tables(wide)["rollout"].items["engine weights"] == NAMED["8b"].parameters * 2 / 16
    assert tables(wide)["rollout"].items["KV cache"] == single["KV cache"] / 8


def test_what_does_not_fit_is_seen() -> None:
    """70B: one H100 holds neither the engine nor the trained model; 8 of them hold the engine, 32 the trained model."""
    small = tables(recipe("grpo", devices={"rollout": 1, "score": 4, "train": 8}, roles={}), "70b")
    assert not small["rollout"].fits
    assert not small["train"].fits
    large = recipe("grpo", devices={"rollout": 8, "score": 8, "train": 32}, roles={}, rollout={"tensor_parallel_size": 8},
                   model={"gradient_checkpointing": True}, pipeline={"micro_batch_size": 32}, score={"zero_stage": 3})  # fmt: skip
    assert all(table.fits for table in tables(large, "70b").values())


def costs(name: str = "8b", **sections):
    made = recipe("grpo", devices={"rollout": 4, "score": 2, "train": 4}, roles={}, **sections)
    return made, Roofline(Shapes(NAMED[name], NAMED[name]), H100).costs(made)


def test_decoding_one_sample_takes_as_long_as_reading_the_weights() -> None:
    _, model = costs()
    # 8B without the embedding, which is looked up: 7.5e9 × 2 bytes at ¾ of 3.35 TB/s.
    assert model.engine.weights == pytest.approx(7.505e9 * 2 / (0.75 * 3.35e12), rel=1e-3)
    # Arithmetic catches up at a batch of hundreds.
    assert 100 < model.engine.weights / model.engine.compute < 400
    assert model.engine.per_cached_token == pytest.approx(131_072 / (0.75 * 3.35e12))


def test_training_does_six_operations_a_parameter_and_token() -> None:
    made, model = costs(train={"zero_stage": 0})
    (group,) = train_groups(made)
    short, long = ([Size(0, length)] * 4 for length in (500, 1000))
    seconds = model.train(group, long) - model.train(group, short)
    # One sample a rank; attention adds a little.
    expected = 6 * 7.505e9 * 500 / (0.4 * 989e12)
    assert expected < seconds < 1.1 * expected
    made, recomputing = costs(train={"zero_stage": 0}, model={"gradient_checkpointing": True})
    again = recomputing.train(group, long) - recomputing.train(group, short)
    assert again == pytest.approx(4 / 3 * seconds)


def test_the_slowest_rank_counts() -> None:
    """With padding a rank's samples cost what its longest does; without it the ranks share the tokens out evenly."""
    uneven = [Size(100, 400)] + [Size(100, 200)] * 7
    for padded in (True, False):
        made, model = costs(train={"zero_stage": 0}, model={"path": "m", "dtype": "bfloat16", "remove_padding": not padded})
        (group,) = train_groups(made)
        ranks = model.devices[group.group]
        assert ranks == 4, "two samples each"
        whole, short = model.train(group, [Size(100, 400)] * 8), model.train(group, [Size(100, 200)] * 8)
        found = model.train(group, uneven)
        assert found == pytest.approx(whole) if padded else short < found < 0.9 * whole


def test_a_budget_of_tokens_costs_passes() -> None:
    samples = [Size(100, 400)] * 8
    seconds = []
    for budget in (None, 2000, 1000):
        made, model = costs(train={"zero_stage": 3, "max_tokens_per_micro_batch": budget}, rollout={"max_response_length": 400},
                            data={"path": "d", "max_prompt_length": 100})  # fmt: skip
        (group,) = train_groups(made)
        seconds.append(model.train(group, samples))
    assert seconds[0] == seconds[1] == seconds[2], "four ranks have 1000 tokens each"
    made, model = costs(train={"zero_stage": 3, "max_tokens_per_micro_batch": 500}, rollout={"max_response_length": 400},
                        data={"path": "d", "max_prompt_length": 100})  # fmt: skip
    (group,) = train_groups(made)
    assert model.train(group, samples) > seconds[0], "ZeRO-3 fetches the weights for every pass"


def test_scoring_is_a_forward_pass_of_each_model() -> None:
    made, model = costs()
    (part,) = score_parts(made)
    samples = [Size(200, 800)] * 8
    seconds = model.score(part, samples)
    expected = 2 * 2 * 7.2e9 * 8000 / (0.5 * 989e12)
    assert expected < seconds < 1.2 * expected


def test_functions_are_no_part_of_scoring_and_take_the_time_they_are_told() -> None:
    made = recipe("grpo", devices={"rollout": 4, "score": 2, "train": 4}, roles={},
                  rewards=[{"name": "f", "function": "f.py:f"}, {"name": "m", "model": "m"}])  # fmt: skip
    assert {role for part in score_parts(made) for role in part.roles} == {"reference", "m"}
    assert set(tables(made)["score"].items) == {"reserved", "reference weights", "m weights", "score activations"}
    shapes = Shapes(NAMED["8b"], NAMED["8b"])
    assert Roofline(shapes, H100).costs(made).judge(SampleId(0, 0)) == 0
    assert Roofline(shapes, H100, judge_seconds=2.5).costs(made).judge(SampleId(0, 0)) == 2.5


def test_a_reference_that_is_refreshed_is_broadcast_to_its_workers() -> None:
    refreshed, model = costs(algorithm={"reference_refresh": 2})
    (reference,) = (part for part in score_parts(refreshed) if part.roles == ("reference",))
    (judge,) = (part for part in score_parts(refreshed) if part.roles == ("judge",))
    assert model.install_snapshot(reference) == model.install_engine()
    assert model.install_snapshot(judge) == 0


def test_zero_3_pays_for_fetching_weights_and_saves_on_the_update() -> None:
    made, plain = costs(train={"zero_stage": 0})
    _, sharded = costs(train={"zero_stage": 3})
    (group,) = train_groups(made)
    samples = [Size(100, 400)] * 4
    assert sharded.train(group, samples) > plain.train(group, samples)
    assert sharded.update(group) < plain.update(group)
    _, offloaded = costs(train={"zero_stage": 3, "offload_optimizer": True})
    assert offloaded.update(group) > 10 * sharded.update(group)
