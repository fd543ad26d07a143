import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from conveyor.config import UserError
from conveyor.config.sections import Model
from conveyor.models.language_model import load_language_model, response_logprobs
from conveyor.models.rope import longest_positions, rope_parameters
from conveyor.models.scalar_model import load_scalar_model
from conveyor.workers.vllm_engine import config_overrides
from tests.models.test_language_model import batch, full_logprobs
from tests.tiny import save_tiny_policy, tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def with_yarn(folder, tmp_path_factory):
    """transformers' own model whose configuration has YaRN."""
    saved = tmp_path_factory.mktemp("yarn")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.rope_parameters = {"rope_theta": model.config.rope_parameters["rope_theta"], **YARN}
    model.save_pretrained(saved)
    return saved


def test_logprobs_are_those_of_a_model_whose_configuration_has_yarn(folder, with_yarn):
    lengths = ((30, 12), (20, 9))  # beyond the 16 tokens of the original
    want, _ = full_logprobs(AutoModelForCausalLM.from_pretrained(with_yarn, dtype=torch.float32), *batch(*lengths), 1.0)
    plain, _ = response_logprobs(load_language_model(Model(path=str(folder))), *batch(*lengths), 1.0)
    got, _ = response_logprobs(load_language_model(Model(path=str(folder), rope_scaling=YARN)), *batch(*lengths), 1.0)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert (plain - want).abs().max() > 1e-3


def test_yarn_frequencies_are_those_of_its_paper(folder):
    """Slow rotations are stretched by the factor, fast ones stay; attention is sharpened by 0.1 ln s + 1 (eq. 22, 23)."""
    model = load_scalar_model(Model(path=str(folder), rope_scaling=YARN), new_head=True)
    rotary = model.base_model.rotary_emb
    own = 1 / 10_000.0 ** (torch.arange(0, 32, 2) / 32)
    assert rotary.inv_freq[0] == pytest.approx(own[0].item()) and rotary.inv_freq[-1] == pytest.approx(own[-1].item() / 4)
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


def test_the_engine_is_told_the_same(folder, with_yarn):
    told = config_overrides(Model(path=str(folder), rope_scaling=YARN, fp32_head=True))
    assert told == {"rope_parameters": LlamaConfig.from_pretrained(with_yarn).rope_parameters, "head_dtype": "float32"}
    assert config_overrides(Model(path=str(folder))) == {}


def test_what_is_trained_with_it_keeps_it(folder, tmp_path):
    load_language_model(Model(path=str(folder), rope_scaling=YARN)).save_pretrained(tmp_path)
    assert LlamaConfig.from_pretrained(tmp_path).rope_parameters["factor"] == 4.0


def test_the_models_own_theta_stays(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    assert rope_parameters(Model(path=str(folder), rope_scaling=YARN)) == {"rope_theta": 500.0, **YARN}


@pytest.mark.parametrize(
    ("own", "scaling", "tokens"),
    [
        ({}, None, 512),
        ({}, {"rope_type": "yarn", "factor": 4.0}, 2048),
        ({}, YARN, 512),  # 4 · 16 is less than the model takes anyway
        ({"rope_parameters": {"rope_theta": 1e4, **YARN, "original_max_position_embeddings": 256}}, None, 1024),
        ({}, {"rope_type": "linear", "factor": 2.0}, 1024),
    ],
)
def test_a_model_takes_as_many_tokens_as_its_scaling_says(own, scaling, tokens):
    assert longest_positions(tiny_config(**own), scaling) == tokens


@pytest.mark.parametrize(
    ("scaling", "line"),
    [
        ({"rope_type": "yarn"}, "model.rope_scaling: yarn needs factor"),
        ({"rope_type": "yearn", "factor": 2.0}, "model.rope_scaling: rope_type 'yearn': one of default, linear"),
        ({"factor": 2.0}, "model.rope_scaling: rope_type None: one of"),
    ],
)
def test_bad_scalings_are_one_line(folder, scaling, line):
    with pytest.raises(UserError) as caught:
        rope_parameters(Model(path=str(folder), rope_scaling=scaling))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_layers_of_several_kinds_are_named():
    config = tiny_config()
    config.rope_parameters = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    with pytest.raises(UserError, match="give it by kind: full_attention, sliding_attention"):
        longest_positions(config, YARN)
