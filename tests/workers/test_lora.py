"""Adapters in the stages of a run: updates against plain torch, what travels, references without a second copy."""

import copy
import os

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from conveyor.models.adapters import is_trained
from conveyor.models.answering import WholeModel
from conveyor.models.language_model import load_language_model
from conveyor.workers.policies import load_policy
from conveyor.workers.score import ScoreWorker
from conveyor.workers.weight_sync import publish
from tests.tiny import save_tiny_policy, save_tiny_reward_model
from tests.workers.test_score import MICRO_BATCH
from tests.workers.test_train import parts, recipe, samples, train, worker
from tests.workers.test_train_fast import GAE, Case, conveyed, plain_models, plain_training, recipe_of, samples_of, settings_of

SEVERAL = {"train": {"train_batch_size": 4, "learning_rate": 1e-2}, "pipeline": {"micro_batch_size": 4}}
"""Several updates a step: there are snapshots."""
SMALL = {"initializer_range": 0.15, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 1}


@pytest.fixture(scope="module", autouse=True)
def cores():
    """Workers pin the process they are in, here that of the tests."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_policy(folder / "policy", **SMALL), save_tiny_reward_model(folder / "critic", **SMALL)


class PlainLora(nn.Module):
    """x ↦ (W + s·BA)x by one product; with lengths m, its rows are brought to them, their norms taken as constants (DoRA, section 4.3)."""

    def __init__(self, weight, low, high, lengths, scaling):
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.low, self.high = nn.Parameter(low.clone()), nn.Parameter(high.clone())
        self.lengths = None if lengths is None else nn.Parameter(lengths.clone())
        self.scaling = scaling

    def forward(self, x):
        weight = self.weight + self.scaling * self.high @ self.low
        if self.lengths is not None:
            weight = weight * (self.lengths / weight.detach().norm(dim=1))[:, None]
        return F.linear(x, weight)


def plain_adapted(model, start, scaling):
    """The model with the adapters of a worker's weights, by hand → what of it is trained, by the worker's names."""
    model.requires_grad_(False)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    for name in [name.removesuffix(".base_layer.weight") for name in start if name.endswith(".base_layer.weight")]:
        above, _, last = name.rpartition(".")
        tensors = [start.get(f"{name}.lora_{part}.default.weight") for part in ("A", "B", "magnitude_vector")]
        setattr(model.get_submodule(above), last, PlainLora(start[f"{name}.base_layer.weight"], *tensors, scaling))
    part = {"low": "lora_A.default.weight", "high": "lora_B.default.weight", "lengths": "lora_magnitude_vector.default.weight"}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {f"{'.'.join(split[:-1])}.{part.get(split[-1], split[-1])}": p for name, p in trained.items() if (split := name.split("."))}


UPDATES = {
    "ppo": (Case("ppo", {**GAE, "loss_aggregation": "sequence_mean"}), {"rank": 3, "alpha": 6.0}, 2.0),
    "grpo, rank-stabilised": (Case("grpo", {"loss_aggregation": "sequence_mean"}, n=3), {"rank": 4, "alpha": 3.0, "use_rslora": True}, 1.5),
    "grpo, DoRA": (Case("grpo", {"loss_aggregation": "sequence_mean"}, n=3), {"rank": 2, "alpha": 4.0, "use_dora": True}, 2.0),
    "ppo, 4 bits": (Case("ppo", {**GAE, "loss_aggregation": "sequence_mean"}), {"rank": 3, "alpha": 6.0, "quantization": "nf4"}, 2.0),
}


@pytest.mark.parametrize("name", UPDATES)
def test_two_updates_equal_plain_torch(models, name):
    """From B = 0 only B has a gradient in the first update; A (and DoRA's lengths) show in the second."""
    case, lora, scaling = UPDATES[name]
    made = recipe_of(models, Case(**(vars(case) | {"sections": (("lora", lora),)})))
    trained = worker(made)
    plain = plain_models(models, made)
    start = {role: {n: w.clone() for n, w in engine.named_weights()} for role, engine in trained._engines.items()}
    by_hand = {role: plain_adapted(model, start[role], scaling) for role, model in plain.items()}
    assert all(n.endswith(("A.default.weight", "B.default.weight", "vector.default.weight", "score.weight")) for n in by_hand["actor"])
    updates = [samples_of(models[0], made, case, seed) for seed in (1, 2)]
    norms = plain_training(made, plain, updates, settings_of(made, case))
    reports, _ = conveyed(trained, made, case, updates)
    for role, wanted in by_hand.items():
        assert [report.steps[role].grad_norm for report in reports] == pytest.approx([norm[role] for norm in norms], rel=1e-4)
        found = dict(trained._engines[role].named_weights())
        assert {n for n in found if is_trained(n)} == wanted.keys() and ("score.weight" in wanted) == (role == "critic")
        for n, weight in wanted.items():
            assert (found[n] - weight.detach()).norm() < 1e-5 * weight.norm() + 1e-7, n
            assert not torch.equal(found[n], start[role][n]), n
        assert all(torch.equal(weight, start[role][n]) for n, weight in found.items() if not is_trained(n)), "frozen to the last bit"


def trained_once(made):
    trained = worker(made)
    rollouts = samples(8, made.rollout.n_samples_per_prompt)
    train(trained, made, rollouts, parts(rollouts), [[0, 1, 2, 3], [4, 5, 6, 7]])
    return trained


def sent(trained, role, version=1):
    """(name, tensor) of what `publish` would send."""
    publication = publish(trained._travelling(role), version, role, verify=True, put=copy.deepcopy)
    return publication, {name: tensor.clone() for name, tensor in trained._travelling(role)}


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_only_the_adapter_travels_and_snapshots_follow_it(models, quantization):
    made = recipe(models[0], "ppo", lora={"rank": 4, "quantization": quantization}, **SEVERAL)
    trained = trained_once(made)
    publication, of_actor = sent(trained, "actor")
    _, of_critic = sent(trained, "critic")
    assert all(".lora_" in name for name in of_actor) and {n for n in of_critic if ".lora_" not in n} == {"score.weight"}
    whole = sum(weight.nbytes for _, weight in trained._engines["actor"].named_weights())
    assert publication.nbytes == sum(weight.nbytes for weight in of_actor.values()) < whole / 3
    scorer = ScoreWorker(made, ("reference", "policy_snapshot", "critic_snapshot"), cores=(0,))
    scorer.ready()
    assert set(scorer._models) == {"policy_snapshot", "critic_snapshot"}, "the reference is no copy of its own"
    before = scorer.score(("reference", "policy_snapshot"), MICRO_BATCH)[1]
    base = {n: w.clone() for n, w in scorer._models["policy_snapshot"].model.named_parameters() if not is_trained(n)}
    assert scorer.install("policy_snapshot", publication, get=lambda bucket: bucket).mismatched == ()
    after = scorer.score(("reference", "policy_snapshot"), MICRO_BATCH)[1]
    alone = ScoreWorker(made, ("reference",), cores=(0,))
    alone.ready()
    loaded = alone.score(("reference",), MICRO_BATCH)[1]
    for number, reference in enumerate(after.reference_logprobs):
        assert torch.equal(reference, before.reference_logprobs[number]) and torch.equal(reference, before.old_logprobs[number])
        assert torch.equal(reference, loaded.reference_logprobs[number]), "as a model that is loaded for it, bit by bit"
        assert not torch.equal(reference, after.old_logprobs[number])
    kept = dict(scorer._models["policy_snapshot"].model.named_parameters())
    assert all(torch.equal(kept[name], weight) for name, weight in base.items())
    tampered = copy.deepcopy(publication)
    next(iter(tampered.buckets)).data[5] ^= 1
    assert len(scorer.install("policy_snapshot", tampered, get=lambda bucket: bucket).mismatched) == 1


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"sync": "merged"}, {"sync": "merged", "quantization": "nf4"}], ids=str)
def test_all_weights_travel_merged(models, lora):
    """For DoRA, which vLLM does not serve: the engine's plain model computes what the trainer does."""
    made = recipe(models[0], "ppo", lora={"rank": 4, **lora}, **SEVERAL)
    trained = trained_once(made)
    publication, weights = sent(trained, "actor")
    plain = AutoModelForCausalLM.from_pretrained(models[0])
    assert weights.keys() == dict(plain.named_parameters()).keys()
    base = load_policy(made, "reference")
    WholeModel(plain, torch.device("cpu")).overwrite(weights.items())
    snapshot = ScoreWorker(made, ("policy_snapshot", "reference"), cores=(0,))
    snapshot.ready()
    snapshot.install("policy_snapshot", publication, get=lambda bucket: bucket)
    ids = torch.tensor([[1, 40, 50, 60, 70]])
    with torch.no_grad():
        wanted = trained._engines["actor"].forward(lambda model: model(ids).logits)
        torch.testing.assert_close(plain(ids).logits, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(snapshot._models["policy_snapshot"].model(ids).logits, wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(snapshot._models["reference"].model(ids).logits, base(ids).logits)
        assert (base(ids).logits - wanted).abs().max() > 1e-3


def test_a_reference_that_is_refreshed_follows_by_adapter_and_is_restored(models, tmp_path):
    made = recipe(models[0], "grpo", lora={"rank": 4, "quantization": "nf4"}, algorithm={"kl_coef": 0.1, "reference_refresh": 2})
    publication, _ = sent(trained_once(made), "actor", version=2)
    first, second = (ScoreWorker(made, ("reference",), cores=(0,)) for _ in range(2))
    first.ready(), second.ready()
    before = first.score(("reference",), MICRO_BATCH)[1].reference_logprobs
    first.install("reference", publication, get=lambda bucket: bucket)
    first.save_weights("reference", tmp_path)
    second.load_weights("reference", tmp_path)
    assert (tmp_path / "reference.safetensors").stat().st_size < 1.5 * publication.nbytes
    after, restored = (scorer.score(("reference",), MICRO_BATCH)[1].reference_logprobs for scorer in (first, second))
    assert all(map(torch.equal, after, restored)) and not any(map(torch.equal, before, after))


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_checkpoint_holds_what_is_trained_and_resume_is_exact(models, tmp_path, quantization, zero_stage):
    made = recipe(models[0], "ppo", lora={"rank": 4, "quantization": quantization}, train={"learning_rate": 1e-2, "zero_stage": zero_stage})
    rollouts, splits = samples(8), [[0, 1, 2, 3], [4, 5, 6, 7]]
    first = trained_once(made)
    first.save_checkpoint(tmp_path)
    train(first, made, rollouts, parts(rollouts), splits, step=1)
    second = worker(made)
    second.load_checkpoint(tmp_path)
    train(second, made, rollouts, parts(rollouts), splits, step=1)
    for role, engine in first._engines.items():
        again = dict(second._engines[role].named_weights())
        assert all(torch.equal(weight, again[name]) for name, weight in engine.named_weights())
    (states, *_) = (tmp_path / "actor" / "state").glob("*model_states.pt")
    module = torch.load(states, weights_only=False)["module"]
    assert all(".lora_" in name or ".quant" in name or ".absmax" in name for name in module)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_the_saved_model_is_the_policy_and_so_are_base_and_adapter(models, tmp_path, quantization):
    made = recipe(models[0], "grpo", lora={"rank": 4, "quantization": quantization}, train={"learning_rate": 1e-2})
    trained = trained_once(made)
    trained.save_model(tmp_path / "model", tmp_path / "critic")
    ids = torch.tensor([[1, 40, 50, 60, 70]])
    with torch.no_grad():
        wanted = trained._engines["actor"].forward(lambda model: model(ids).logits)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        torch.testing.assert_close(saved(ids).logits, wanted, atol=1e-5, rtol=1e-5)
        base = load_language_model(made.model, made.lora)
        torch.testing.assert_close(PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits, wanted, atol=1e-5, rtol=1e-5)
    assert getattr(saved.config, "quantization_config", None) is None


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"quantization": "nf4"}], ids=str)
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_the_trainer_is_the_reference_in_the_middle_of_an_update(models, kind, zero_stage):
    """Asked between two micro-batches it answers as a reference of its own would, bit by bit, and the update is what it would have been."""
    sections = {"lora": {"rank": 4, **kind}, "algorithm": {"kl_coef": 0.1}, "train": {"learning_rate": 1e-2, "zero_stage": zero_stage}}
    made = recipe(models[0], "grpo", roles={"reference": "train"}, **sections)
    assert made.trainer_answers and not recipe(models[0], "grpo", **sections).trainer_answers
    assert made.score_workers("train", 2) == 1
    alone = ScoreWorker(made, ("reference",), cores=(0,))
    alone.ready()
    wanted = alone.score(("reference",), MICRO_BATCH)[1].reference_logprobs
    rollouts, splits = samples(8, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]
    undisturbed, trained = worker(made), worker(made)
    for step in range(2):
        train(undisturbed, made, rollouts, parts(rollouts), splits, step=step)
    forward_backward = trained.forward_backward

    def asked(*arguments, **settings):
        report = forward_backward(*arguments, **settings)
        assert all(map(torch.equal, trained.score(("reference",), MICRO_BATCH)[1].reference_logprobs, wanted))
        return report

    trained.forward_backward = asked
    for step in range(2):
        train(trained, made, rollouts, parts(rollouts), splits, step=step)
    again = dict(trained._engines["actor"].named_weights())
    assert all(torch.equal(weight, again[name]) for name, weight in undisturbed._engines["actor"].named_weights())
