"""Models that are partitioned over two ranks from the moment they are loaded."""

import contextlib

import pytest
import torch
from torch import distributed as dist
from transformers import LlamaForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from conveyor.checks import check_offload
from conveyor.config import UserError, parse_recipe, sections
from conveyor.config.sections import Lora
from conveyor.data.packing import lay_out
from conveyor.models import zero
from conveyor.models.adapters import add_adapter
from conveyor.models.inference_engine import InferenceEngine
from conveyor.models.language_model import load_language_model, response_logprobs
from conveyor.models.scalar_model import load_scalar_model, score_head, sequence_scores
from conveyor.models.train_engine import TrainEngine
from tests.models.ranks import spawn
from tests.models.test_train_engine import SETTINGS, largest_difference, meet, update
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_config


class Materialised:
    """The most elements of weights that were whole at a time on this rank, counted at every weight that becomes so."""

    def __init__(self, monkeypatch):
        from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

        self.most, self._known = 0, {}
        plain = Init._convert_to_deepspeed_param

        def convert(init, param):
            plain(init, param)
            self._known[id(param)] = param

        monkeypatch.setattr(Init, "_convert_to_deepspeed_param", convert)
        self._whole = ZeroParamStatus.AVAILABLE
        # Every gathering ends in an autograd-free copy: look whenever torch is asked for a collective.
        for name in ("all_gather_into_tensor", "broadcast"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch, name):
        plain = getattr(dist, name)

        def watched(*args, **kwargs):
            self.look()
            return plain(*args, **kwargs)

        monkeypatch.setattr(dist, name, watched)

    def look(self):
        known = self._known.values()
        self.most = max(self.most, sum(p.ds_numel for p in known if p.ds_status == self._whole))


def samples():
    generator = torch.Generator().manual_seed(3)
    tokens = lay_out([torch.randint(5, 264, (length,), generator=generator) for length in (9, 5, 12)], True)
    return tokens, torch.tensor([4, 2, 7]), torch.arange(5) < torch.tensor([5, 3, 5])[:, None]


def check_inference(rank, ranks, port, folder, dtype, offload):
    meet(rank, ranks, port)
    with pytest.MonkeyPatch.context() as patch:
        found = Materialised(patch)
        for name, tied in (("policy", False), ("tied", True)):
            section = sections.Model(path=str(folder / name), dtype=dtype)
            plain = load_language_model(section)
            total = sum(p.numel() for p in plain.parameters())
            found.most = 0
            with zero.partitioning(dtype, "cpu", zero.offloading("cpu", parameters=offload)):
                model = load_language_model(section)
            assert all(zero.is_partitioned(p) and p.numel() == 0 for p in model.parameters())
            assert sum(zero.full_size(p) for p in model.parameters()) == total
            assert 0 < found.most < total / 2, (found.most, total)
            engine = InferenceEngine(model, accelerator="cpu", offload_parameters=offload, bucket_bytes=70_000)
            with torch.inference_mode():
                want = response_logprobs(plain, *samples(), 1.0)
                for _ in range(2):  # the second pass fetches ahead what the first has seen
                    got = engine.forward(response_logprobs, *samples(), 1.0)
                    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
            if tied:
                assert "lm_head.weight" not in dict(engine.named_weights())
            check_overwrite(engine, plain, want, tied)
        check_scalar(folder, dtype, offload)
    if dtype == "float32":
        check_mixture(folder)


def check_mixture(folder):
    """Experts come one by one out of the files and are one tensor a layer in the model."""
    from transformers.integrations import deepspeed as integration

    layers = []
    with pytest.MonkeyPatch.context() as patch:
        convert = integration._apply_weight_conversions_to_state_dict
        patch.setattr(
            integration, "_apply_weight_conversions_to_state_dict",
            lambda model, state, mapping: layers.append({*state}) or convert(model, state, mapping),
        )  # fmt: skip
        section = sections.Model(path=str(folder / "mixture"))
        with zero.partitioning("float32", "cpu", {}):
            model = load_language_model(section)
    assert sorted("".join({name.partition(".layers.")[2][:1] for name in of}) for of in layers) == ["", "0", "1"]
    plain = load_language_model(section)
    engine = InferenceEngine(model, accelerator="cpu")
    found = {name: weight.clone() for name, weight in engine.named_weights()}
    assert found.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(weight, found[name]) for name, weight in plain.named_parameters())


def check_overwrite(engine, plain, before, tied):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    engine.overwrite(plain.named_parameters())
    got, want = engine.forward(response_logprobs, *samples(), 1.0), response_logprobs(plain, *samples(), 1.0)
    assert torch.equal(got[0], want[0]) and not torch.equal(got[0], before[0])
    installed = {name: weight.clone() for name, weight in engine.named_weights()}
    assert installed.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(weight, installed[name]) for name, weight in plain.named_parameters())
    with pytest.raises(RuntimeError, match=r"weights never came: model.layers.0"):
        engine.overwrite([pair for pair in plain.named_parameters() if "layers.0" not in pair[0]])
    with pytest.raises(RuntimeError, match="the model has no weight wte"):
        engine.overwrite([("wte", torch.zeros(1))])


def check_scalar(folder, dtype, offload):
    tokens = samples()[0]
    for name, new_head in (("reward", False), ("policy", True), ("labels", True)):
        section = sections.Model(path=str(folder / name), dtype=dtype)
        plain = load_scalar_model(section, new_head)
        with zero.partitioning(dtype, "cpu", zero.offloading("cpu", parameters=offload)):
            model = load_scalar_model(section, new_head)
        engine = InferenceEngine(model, accelerator="cpu", offload_parameters=offload)
        scores = engine.forward(sequence_scores, tokens)
        assert torch.equal(scores, sequence_scores(plain, tokens)), name
        assert new_head == bool((scores == 0).all())
        with zero.whole([score_head(model).weight]):
            assert torch.equal(score_head(model).weight, score_head(plain).weight)


def trained(folder, dtype, rank, partitioned, lora=False, fp32_head=False, **train):
    """Weights after two updates on a model that was cut when it was loaded, or only by its engine."""
    settings = sections.Train(**{"zero_stage": 3} | SETTINGS | train)
    with zero.loading(settings, dtype, "cpu") if partitioned else contextlib.nullcontext():
        model = load_language_model(sections.Model(path=str(folder / "tied"), dtype=dtype, fp32_head=fp32_head))
    assert zero.is_partitioned(model.get_input_embeddings().weight) == partitioned
    if lora:
        torch.manual_seed(rank)  # the first rank's adapter counts, wherever it is cut
        add_adapter(model, Lora(rank=4))
    engine = TrainEngine(model, settings, learning_rate=1e-3, total_updates=2, dtype=dtype, accelerator="cpu")
    reports = [update(engine, rank, number) for number in range(2)]
    return {name: weight.clone() for name, weight in engine.named_weights()}, [report.grad_norm for report in reports]


def check_training(rank, ranks, port, folder):
    meet(rank, ranks, port)
    want, norms = trained(folder, "float32", rank, False)
    got, found = trained(folder, "float32", rank, True)
    assert found == norms and largest_difference(got, want) == 0
    got, _ = trained(folder, "float32", rank, True, offload_optimizer="cpu", offload_parameters="cpu")
    assert largest_difference(got, want) < 1e-5
    want, norms = trained(folder, "bfloat16", rank, False, fp32_head=True, zero_stage=2)
    got, found = trained(folder, "bfloat16", rank, True, fp32_head=True)
    assert found == pytest.approx(norms, rel=1e-3) and largest_difference(got, want) < 1e-3
    want, norms = trained(folder, "float32", rank, False, lora=True)
    got, found = trained(folder, "float32", rank, True, lora=True)
    assert found == norms and norms[0] > 0 and largest_difference(got, want) == 0


@pytest.mark.slow
def test_training_goes_the_same_way_from_a_model_cut_when_it_was_loaded(tmp_path):
    save_tiny_policy(tmp_path / "tied", tie_word_embeddings=True)
    spawn(check_training, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "offload"), [("float32", "none"), ("bfloat16", "cpu")])
def test_models_cut_over_two_ranks_answer_bit_for_bit(tmp_path, dtype, offload):
    save_tiny_policy(tmp_path / "policy", num_hidden_layers=4)
    save_tiny_policy(tmp_path / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    save_tiny_reward_model(tmp_path / "reward")
    LlamaForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(tmp_path / "labels")
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
    settings = {name: value for name, value in tiny_config().to_dict().items() if name not in ("model_type", "architectures")}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | experts)).save_pretrained(tmp_path / "mixture")
    spawn(check_inference, 2, tmp_path, dtype, offload)


# ── offloading ───────────────────────────────────────────────────────────────────────────────────────


def test_deepspeed_is_told_where_to_keep_what():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert zero.offloading("cuda") == {}
    parsed = DeepSpeedZeroConfig(stage=3, **zero.offloading("cuda", "nvme", "cpu", "/scratch"))
    optimizer, parameters = parsed.offload_optimizer, parsed.offload_param
    assert (optimizer.device, str(optimizer.nvme_path), optimizer.pin_memory) == ("nvme", "/scratch", True)
    assert (parameters.device, parameters.nvme_path, parameters.pin_memory) == ("cpu", None, True)
    assert zero.offloading("cpu", "cpu")["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_nvme_without_libaio_is_said_in_one_line_when_the_recipe_is_checked(tmp_path, monkeypatch):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    recipe = {"method": "sft", "output_dir": "o", "model": {"path": "m"}, "data": {"path": "d"}}
    train = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": "nvme"}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def check(folder, able, **changes):
        monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: able)
        check_offload(parse_recipe(recipe | {"train": train | {"nvme_path": str(folder)}} | changes))

    check(tmp_path, able=True)
    check(tmp_path, able=False, ray={"address": "10.0.0.1:6379"})  # its machines will say
    with pytest.raises(UserError, match=r"^train\.offload_parameters: nvme needs libaio with its headers") as caught:
        check(tmp_path, able=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"^train\.nvme_path: .*/none: no such folder on"):
        check(tmp_path / "none", able=True)
