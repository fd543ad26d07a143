"""Score workers: what each role says, alone and in a batch, and snapshots that follow the policy."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from conveyor.config import OnlineRecipe, UserError, parse_recipe
from conveyor.types import PartialScores, Prompt, Rollout
from conveyor.workers.score import ScoreWorker, reencode
from conveyor.workers.weight_sync import publish
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

SAMPLES = Path(__file__).parents[1] / "rewards" / "samples.py"
TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def cores():
    """Workers pin the process they are in, here that of the tests."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    other = save_tiny_reward_model(root / "other", seed=3)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["4!"])  # one token more: another vocabulary
    tokenizer.save_pretrained(other)
    return {"policy": save_tiny_policy(root / "policy"), "reward": save_tiny_reward_model(root / "reward"), "other": other}


def recipe_of(folders: dict[str, Path], rewards: list[dict], **sections) -> OnlineRecipe:
    raw = {
        "method": "ppo", "output_dir": str(folders["policy"].parent / "run"),
        "model": {"path": str(folders["policy"])}, "data": {"path": "unused"},
        "rewards": rewards, "rollout": {"temperature": TEMPERATURE, "n_samples_per_prompt": 2},
        "train": {"rollout_batch_size": 4, "train_batch_size": 4}, "pipeline": {"micro_batch_size": 4},
    }  # fmt: skip
    recipe = parse_recipe(raw | sections)
    assert isinstance(recipe, OnlineRecipe)
    return recipe


def rollout(prompt: str, response: str, sample: int = 0, stopped: bool = True, **columns) -> Rollout:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [2] * stopped
    told = Prompt(index=0, row=0, token_ids=tuple(tokenizer(prompt)["input_ids"]), text=prompt, columns=columns)
    zeros = torch.zeros(len(ids))
    return Rollout(told, sample, torch.tensor(ids), zeros, zeros.int(), "stop" if stopped else "length", response)


MICRO_BATCH = [rollout("2+2=", "4"), rollout("what is 12+7?", "nineteen", 1, stopped=False), rollout("a", "")]


def whole(sample: Rollout) -> torch.Tensor:
    """int64 [1, T]"""
    return torch.cat([torch.tensor(sample.prompt.token_ids), sample.response_ids])[None]


@pytest.fixture(scope="module")
def worker(folders):
    rewards = [
        {"name": "preference", "model": str(folders["reward"])},
        {"name": "other", "model": str(folders["other"])},
        {"name": "length", "function": f"{SAMPLES}:length"},  # judged elsewhere: no role of this stage
    ]
    recipe = recipe_of(folders, rewards)
    assert recipe.snapshot_roles == ("policy_snapshot", "critic_snapshot")
    worker = ScoreWorker(recipe, recipe.score_roles + recipe.snapshot_roles, cores=(0,))
    assert worker.ready().device == "cpu 0"
    return worker


@pytest.fixture(scope="module")
def scores(worker) -> PartialScores:
    roles = ("reference", "preference", "other", "policy_snapshot", "critic_snapshot")
    assert worker._roles == roles
    report, scores = worker.score(roles, MICRO_BATCH)
    assert report.span.end >= report.span.start
    return scores


def test_reference_logprobs_are_those_at_the_rollout_temperature(folders, scores):
    model = AutoModelForCausalLM.from_pretrained(folders["policy"])
    for sample, logprobs in zip(MICRO_BATCH, scores.reference_logprobs, strict=True):
        ids, length = whole(sample), len(sample.response_ids)
        expected = torch.log_softmax(model(ids).logits[0, :-1].float() / TEMPERATURE, -1).gather(1, ids[0, 1:, None])[-length:, 0]
        assert logprobs.shape == (length,) and logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=0)


def test_a_snapshot_starts_as_the_policy_and_values_as_zero(scores):
    for reference, old, values in zip(scores.reference_logprobs, scores.old_logprobs, scores.values, strict=True):
        assert torch.equal(reference, old)
        assert torch.equal(values, torch.zeros_like(old))


def test_a_reward_in_a_batch_is_that_of_the_row_alone(folders, scores):
    """Case 11."""
    model = AutoModelForSequenceClassification.from_pretrained(folders["reward"])
    for sample, score in zip(MICRO_BATCH, scores.rewards["preference"], strict=True):
        assert score == pytest.approx(model(whole(sample)).logits.item(), abs=1e-5)


def test_a_reward_model_with_its_own_tokenizer_reads_the_text(folders, scores):
    """`4` and the assistant's mark are encoded anew, with that model's chat template and end token."""
    tokenizer = AutoTokenizer.from_pretrained(folders["other"])
    sample = rollout("2+2=", "4!")
    assert reencode(sample, tokenizer, True)[1][-2:] == [tokenizer.convert_tokens_to_ids("4!"), tokenizer.eos_token_id]
    model = AutoModelForSequenceClassification.from_pretrained(folders["other"])
    for sample, score in zip(MICRO_BATCH, scores.rewards["other"], strict=True):
        text = f"<s><|user|>{sample.prompt.text}<|assistant|>{sample.text}" + ("" if sample.truncated else "</s>")
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert score == pytest.approx(model(ids).logits.item(), abs=1e-5)


def test_each_reward_is_reported_under_its_name(scores):
    """Case 25."""
    assert list(scores.rewards) == ["preference", "other"]
    assert scores.rewards["preference"] != scores.rewards["other"]


def test_only_the_roles_asked_for_are_computed(worker):
    _, scores = worker.score(("other",), MICRO_BATCH)
    assert list(scores.rewards) == ["other"]
    assert scores.reference_logprobs is scores.old_logprobs is scores.values is None


def test_the_same_micro_batch_gives_the_same_bits_and_small_messages(worker, scores):
    _, again = worker.score(("reference",), MICRO_BATCH)
    assert all(torch.equal(a, b) for a, b in zip(scores.reference_logprobs, again.reference_logprobs, strict=True))
    one = pickle.dumps(again.reference_logprobs[0])
    assert len(one) < len(pickle.dumps(torch.zeros(2))) + 64  # its own tokens, not its batch's storage


def test_a_snapshot_takes_new_weights_in_place(worker, folders):
    policy = AutoModelForCausalLM.from_pretrained(folders["policy"])
    with torch.no_grad():
        policy.lm_head.weight.mul_(2)
    sent = publish(policy.named_parameters(), 1, "actor", verify=True, put=lambda bucket: bucket)
    report = worker.install("policy_snapshot", sent, get=lambda bucket: bucket)
    assert (report.version, report.mismatched) == (1, ())
    _, scores = worker.score(("reference", "policy_snapshot"), MICRO_BATCH[:1])
    ids = whole(MICRO_BATCH[0])
    expected = torch.log_softmax(policy(ids).logits[0, :-1] / TEMPERATURE, -1).gather(1, ids[0, 1:, None])[-2:, 0]
    torch.testing.assert_close(scores.old_logprobs[0], expected.detach(), atol=1e-5, rtol=0)
    assert not torch.allclose(scores.reference_logprobs[0], scores.old_logprobs[0])


def test_a_snapshot_refuses_a_part_of_the_weights(worker, folders):
    policy = AutoModelForCausalLM.from_pretrained(folders["policy"])
    named = list(policy.named_parameters())
    sent = publish(named[1:], 2, "actor", verify=False, put=lambda bucket: bucket)
    with pytest.raises(RuntimeError, match=f"weights never came: {named[0][0]}"):
        worker.install("policy_snapshot", sent, get=lambda bucket: bucket)
    sent = publish([*named, ("more", torch.zeros(1))], 2, "actor", verify=False, put=lambda bucket: bucket)
    with pytest.raises(RuntimeError, match="has no weight more"):
        worker.install("policy_snapshot", sent, get=lambda bucket: bucket)


def test_a_reference_that_was_refreshed_comes_back_from_a_checkpoint(worker, folders, tmp_path):
    worker.save_weights("policy_snapshot", tmp_path)
    _, before = worker.score(("policy_snapshot",), MICRO_BATCH)
    policy = AutoModelForCausalLM.from_pretrained(folders["policy"])
    torch.nn.init.normal_(policy.lm_head.weight)
    sent = publish(policy.named_parameters(), 3, "actor", verify=False, put=lambda bucket: bucket)
    worker.install("policy_snapshot", sent, get=lambda bucket: bucket)
    worker.load_weights("policy_snapshot", tmp_path)
    _, after = worker.score(("policy_snapshot",), MICRO_BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before.old_logprobs, after.old_logprobs, strict=True))
    with pytest.raises(UserError, match=r"checkpoint.resume: .*reference.safetensors cannot be read"):
        worker.load_weights("reference", tmp_path)


def test_a_reward_model_without_its_head_is_refused(folders):
    """Case 10."""
    worker = ScoreWorker(recipe_of(folders, [{"name": "preference", "model": str(folders["policy"])}]), ("preference",), cores=(0,))
    with pytest.raises(UserError, match="its scores would be random"):
        worker.ready()
