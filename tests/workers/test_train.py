import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from conveyor.algorithms.metrics import merge
from conveyor.config import parse_recipe
from conveyor.pipeline.control import StepControl
from conveyor.pipeline.ledger import Ledger
from conveyor.types import PartialScores, Prompt, Rollout
from conveyor.workers.reports import MicroBatchKey, StepSettings, UpdateContext
from conveyor.workers.score import ScoreWorker
from conveyor.workers.train import TrainWorker
from tests.models.ranks import one_rank, spawn
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def recipe(policy, method="ppo", **sections):
    raw = {
        "method": method,
        "output_dir": "unused",
        "model": {"path": str(policy)},
        "data": {"path": "unused"},
        "rewards": [{"name": "exact", "function": "unused.py:reward"}, {"name": "style", "function": "unused.py:reward", "weight": 0.5}],
        "rollout": ({"n_samples_per_prompt": 2} if method == "grpo" else {}) | sections.pop("rollout", {}),
        "train": {"rollout_batch_size": 8, "learning_rate": 1e-3, **sections.pop("train", {})},
        **sections,
    }
    return parse_recipe(raw)


def worker(made, roles=None, rank=0, ranks=1, port=0):
    if ranks == 1:
        one_rank()
    roles = roles or (("actor", "critic") if made.uses_critic else ("actor",))
    cores = tuple(os.sched_getaffinity(0))
    built = TrainWorker(made, roles, rank=rank, world_size=ranks, address="127.0.0.1", port=port, total_updates=10, cores=cores)
    torch.set_num_threads(1)
    return built


def samples(count, per_group=1):
    """Rollouts of different lengths and their scores, the same each time."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for i in range(count):
        length = 2 + (5 * i) % 7
        prompt = Prompt(index=i // per_group, row=0, token_ids=tuple(range(5, 9 + i // per_group % 3)), text=f"prompt {i}")
        response = torch.randint(5, 264, (length,), generator=generator)
        logprobs = -torch.rand(length, generator=generator) - 5
        versions = torch.zeros(length, dtype=torch.int32)
        finish = "length" if i == 2 else "stop"
        rollouts.append(Rollout(prompt, i % per_group, response, logprobs, versions, finish, text=f"response {i}"))
    return rollouts


def parts(rollouts, seed=4, **columns):
    """Two score parts: one with rewards, one with the reference."""
    generator = torch.Generator().manual_seed(seed)
    rewards = tuple(torch.rand(len(rollouts), generator=generator).tolist())
    style = tuple(None if rollout.id.group == 1 else 1.0 for rollout in rollouts)
    shifted = tuple(rollout.logprobs + 0.1 for rollout in rollouts)
    return [PartialScores(rewards={"exact": rewards, "style": style}), PartialScores(reference_logprobs=shifted, **columns)]


def part_of(scores, chosen):
    """The scores of some samples of a micro-batch."""

    def pick(column):
        return None if column is None else tuple(column[i] for i in chosen)

    return [
        PartialScores(
            {name: pick(column) for name, column in part.rewards.items()},
            pick(part.reference_logprobs), pick(part.old_logprobs), pick(part.values),
        )
        for part in scores
    ]  # fmt: skip


def train(trained, made, rollouts, scores, splits, update=0, step=0, settings=None):
    """One update over micro-batches, given as lists of places in `rollouts` → (prepare reports, metrics, optim report).

    The driver's part is the ledger's. `settings`: of the step; default: the recipe's.
    """
    keys = [MicroBatchKey(step, update, number) for number in range(len(splits))]
    settings = settings or StepSettings(made.algorithm.kl_coef)
    control = StepControl(made, step)
    control._settings[step] = settings
    books, prepared, done = Ledger(made, control), [], []
    for key, split in zip(keys, splits, strict=True):
        prepared.append(trained.prepare(key, [rollouts[i] for i in split], part_of(scores, split), settings))
        books.add_reports(0, gather(prepared[-1:]))
    for key, split in zip(keys, splits, strict=True):
        shared = books.context(0, key, [rollouts[i].id for i in split])
        done.append(trained.forward_backward(key, shared, last=key is keys[-1]))
        books.add_train_reports(0, key, gather(done[-1:]))
    return prepared, merge(report.metrics for report in done), trained.optim_step(books.denominators(0, step, update))


def gather(reports):
    if dist.get_world_size() == 1:
        return reports
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, reports)
    return [report for part in parts for report in part]


def weights(trained, role="actor"):
    return {name: weight.clone() for name, weight in trained._engines[role].named_weights()}


def difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_case_3_the_first_pass_has_ratio_exactly_one(policy, method):
    made = recipe(policy, method)
    rollouts = samples(8, made.rollout.n_samples_per_prompt)
    trained = worker(made)
    before = weights(trained)
    _, metrics, report = train(trained, made, rollouts, parts(rollouts), [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert metrics["ratio/max"].value == 1.0 and metrics["clip_fraction"].value == 0.0
    assert metrics["entropy"].count == sum(len(rollout.response_ids) for rollout in rollouts)
    assert not report.steps["actor"].skipped and difference(before, weights(trained)) > 0
    assert set(report.steps) == ({"actor", "critic"} if method == "ppo" else {"actor"})


@pytest.mark.parametrize(("method", "aggregation"), [("ppo", "token_mean"), ("grpo", "token_mean"), ("grpo", "sequence_mean")])
def test_case_1_the_split_into_micro_batches_changes_nothing(policy, method, aggregation):
    made = recipe(policy, method, algorithm={"loss_aggregation": aggregation, "entropy_coef": 0.01, "mask_truncated": True})
    rollouts = samples(8, made.rollout.n_samples_per_prompt)
    found = []
    for splits in ([[*range(8)]], [[0, 1], [2, 3, 4, 5, 6], [7]]):
        trained = worker(made)
        _, metrics, report = train(trained, made, rollouts, parts(rollouts), splits)
        found.append((weights(trained), metrics, report))
    assert difference(found[0][0], found[1][0]) < 1e-5
    for role, step in found[0][2].steps.items():
        assert step.grad_norm == pytest.approx(found[1][2].steps[role].grad_norm, rel=1e-5)
    for name in ("loss/policy", "entropy"):
        assert found[0][1][name].value == pytest.approx(found[1][1][name].value, abs=1e-5)


def test_prepare_tells_the_driver_what_it_needs(policy):
    made = recipe(policy, algorithm={"kl_coef": 0.5, "missing_eos_penalty": 2.0, "mask_truncated": True})
    rollouts = samples(3)
    (report,), _, _ = train(worker(made), made, rollouts, parts(rollouts), [[0, 1, 2]])
    first, second, cut = report.samples
    exact = parts(rollouts)[0].rewards["exact"]
    assert first.score == pytest.approx(exact[0] + 0.5)
    assert second.score == pytest.approx(exact[1]), "style does not apply to it"
    assert cut.score == pytest.approx(exact[2] + 0.5 - 2.0) and cut.truncated and cut.loss_tokens == 0
    assert first.kl == pytest.approx(-0.1 * first.response_length, abs=1e-5)
    assert first.outcome == pytest.approx(first.score + 0.05 * first.response_length, abs=1e-5)
    assert all(sample.moments is None for sample in report.samples)


def test_the_greedy_sample_is_reported_and_written_but_not_trained(policy):
    made = recipe(policy, "remax")
    rollouts = samples(4, 2)  # sample 1 of each group is the greedy one
    trained = worker(made)
    (report,), metrics, _ = train(trained, made, rollouts, parts(rollouts), [[0, 1, 2, 3]])
    found = {sample.id.sample: (sample.baseline, sample.loss_tokens > 0) for sample in report.samples}
    assert found == {0: (False, True), 1: (True, False)} and len(report.samples) == 4
    assert metrics["loss/policy"].count == sum(len(rollout.response_ids) for rollout in rollouts if rollout.sample == 0)
    rows = trained.finish_step(0)
    assert [(row.id, row.advantage is None) for row in rows] == [(rollout.id, rollout.sample == 1) for rollout in rollouts]
    assert all(row.score is not None for row in rows)


def test_whitening_while_streaming_is_exact_far_from_zero(policy, tmp_path):
    """With γ = λ = 1 a constant added to all scores is added to all advantages, and whitening takes it away again."""
    made = recipe(policy, algorithm={"normalize": "streaming_exact", "kl_coef": 0, "gamma": 1.0, "lam": 1.0})
    rollouts = samples(8)
    rewards = parts(rollouts)[0].rewards["exact"]
    gradients, losses = [], []
    for shift in (0.0, 100.0):
        trained = worker(made)
        trained.record_gradient(tmp_path / str(shift))
        shifted = [PartialScores(rewards={"exact": tuple(reward + shift for reward in rewards)})]
        _, metrics, _ = train(trained, made, rollouts, shifted, [[0, 1, 2], [3, 4, 5, 6], [7]])
        found = load_file(tmp_path / str(shift) / "actor+critic.safetensors")
        gradients.append(torch.cat([tensor.flatten().double() for name, tensor in found.items() if name.startswith("actor")]))
        losses.append(metrics["loss/policy"].value - shift * metrics["loss/policy_ones"].value)
    assert (gradients[0] - gradients[1]).norm() < 2e-5 * gradients[0].norm()
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_sample_without_any_reward_is_left_out(policy):
    made = recipe(policy)
    rollouts = samples(2)
    rewards, reference = parts(rollouts)
    without = [PartialScores({"exact": (None, 0.5), "style": (None, None)}), reference]
    found = []
    for splits, scores in (([[0, 1]], without), ([[1]], [rewards, reference])):
        scores = [replace(scores[0], rewards={"exact": (None, 0.5), "style": (None, None)}), scores[1]]
        trained = worker(made)
        (report,), _, _ = train(trained, made, rollouts, scores, splits)
        found.append((weights(trained), report))
    assert found[0][1].samples[0].score is None and found[0][1].samples[0].loss_tokens == 0
    assert difference(found[0][0], found[1][0]) < 1e-6


def test_everything_truncated_and_masked_skips_the_update(policy):
    made = recipe(policy, algorithm={"mask_truncated": True})
    rollouts = [replace(rollout, finish_reason="length") for rollout in samples(4)]
    trained = worker(made)
    before = weights(trained), weights(trained, "critic")
    _, metrics, report = train(trained, made, rollouts, parts(rollouts), [[0, 1], [2, 3]])
    assert all(step.skipped for step in report.steps.values())
    assert metrics["loss/policy"].value == 0.0
    assert difference(before[0], weights(trained)) == 0 and difference(before[1], weights(trained, "critic")) == 0


def test_later_passes_are_taken_against_the_snapshots(policy):
    made = recipe(policy, algorithm={"update_epochs": 2, "normalize": "update"})
    rollouts = samples(4)
    snapshots = dict(
        old_logprobs=tuple(rollout.logprobs for rollout in rollouts),
        values=tuple(torch.full_like(rollout.logprobs, 0.25) for rollout in rollouts),
    )
    trained = worker(made)
    keys = [MicroBatchKey(0, 0, 0)]
    report = trained.prepare(keys[0], rollouts, parts(rollouts, **snapshots), StepSettings(0.05))
    assert sum(sample.moments.count for sample in report.samples) == sum(len(rollout.response_ids) for rollout in rollouts)
    books = Ledger(made)
    books.add_reports(0, [report])
    shared = UpdateContext(whiten=(0.1, 2.0))
    ratios = []
    for _ in range(2):
        ratios.append(trained.forward_backward(keys[0], shared, last=True).metrics["ratio/max"].value)
        assert not trained.optim_step(books.denominators(0, 0, 0)).steps["actor"].skipped
    assert ratios[0] != 1.0 and ratios[1] != ratios[0]


def test_importance_weights_are_capped_and_reported(policy):
    made = recipe(policy, algorithm={"importance_cap": 2.0})
    rollouts = [replace(rollout, logprobs=rollout.logprobs - 100) for rollout in samples(4)]
    _, metrics, _ = train(worker(made), made, rollouts, parts(rollouts), [[0, 1, 2, 3]])
    assert metrics["importance_weight/mean"].value == 2.0


def test_finish_step_returns_the_rows_and_forgets_the_batches(policy):
    made = recipe(policy, "grpo", algorithm={"mask_truncated": True})
    rollouts = samples(4, 2)
    trained = worker(made)
    train(trained, made, rollouts, parts(rollouts), [[2, 3], [0, 1]])
    train(trained, made, rollouts, parts(rollouts), [[0, 1]], step=1)
    rows = trained.finish_step(0)
    assert [row.id for row in rows] == [rollout.id for rollout in rollouts]
    assert rows[0].response == "response 0" and rows[0].advantage == pytest.approx(-rows[1].advantage, abs=1e-5)
    assert rows[2].advantage is None and rows[2].finish_reason == "length"
    assert trained.finish_step(0) == [] and len(trained.finish_step(1)) == 2


def test_a_checkpoint_goes_on_bit_for_bit_and_models_load(policy, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    made = recipe(policy)
    rollouts = samples(4)
    first = worker(made)
    train(first, made, rollouts, parts(rollouts), [[0, 1, 2, 3]])
    first.save_checkpoint(str(tmp_path / "step_1"))
    second = worker(made)
    second.load_checkpoint(str(tmp_path / "step_1"))
    for trained in (first, second):
        train(trained, made, rollouts, parts(rollouts), [[0, 1, 2, 3]], step=1)
    assert all(difference(weights(first, role), weights(second, role)) == 0 for role in ("actor", "critic"))
    first.save_model(str(tmp_path / "model"), tmp_path / "critic")
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert difference(dict(actor.named_parameters()), weights(first)) == 0
    assert difference(dict(critic.named_parameters()), weights(first, "critic")) == 0


SHORT = {"data": {"path": "unused", "max_prompt_length": 8}, "rollout": {"max_response_length": 8}}
TWO_RANKS = {
    "ppo": ("ppo", {"train": {"zero_stage": 3}}),
    "grpo": ("grpo", {}),
    "streaming": ("grpo", {"train": {"zero_stage": 2}, "algorithm": {"normalize": "streaming_exact"}}),
    "pairs": ("online_dpo", {"pipeline": {"micro_batch_size": 2}}),
    "remax": ("remax", {}),
    "mixed": ("grpo", {"train": {"zero_stage": 1}, "ptx": {"batch_size": 3, "coef": 0.5}}),
    "mixed, fewer rows than ranks": ("grpo", {"train": {"zero_stage": 3}, "ptx": {"batch_size": 1}}),
    "by tokens": ("ppo", {"train": {"zero_stage": 2, "max_tokens_per_micro_batch": 16}} | SHORT),
    "pairs by tokens": ("online_dpo", {"pipeline": {"micro_batch_size": 2}, "train": {"max_tokens_per_micro_batch": 32}} | SHORT),
    "adapters": ("ppo", {"train": {"zero_stage": 3}, "lora": {"rank": 4}}),
    "adapters, DoRA": ("grpo", {"train": {"zero_stage": 2}, "lora": {"rank": 4, "use_dora": True}}),
    "adapters on 4 bits": (
        "grpo", {"train": {"zero_stage": 2}, "lora": {"rank": 4, "quantization": "nf4"}, "roles": {"reference": "train"}},
    ),
    "rows cut over ranks": ("ppo", {"train": {"zero_stage": 3, "sequence_parallel_size": 2}}),
    "rows cut over ranks, by tokens": ("grpo", {"train": {"sequence_parallel_size": 2, "max_tokens_per_micro_batch": 9}} | SHORT),
    "rows cut over ranks, mixed": ("grpo", {"train": {"zero_stage": 1, "sequence_parallel_size": 2}, "ptx": {"batch_size": 3}}),
    "rows cut over ranks, streaming": (
        "grpo", {"train": {"zero_stage": 2, "sequence_parallel_size": 2}, "algorithm": {"normalize": "streaming_exact"}},
    ),
}  # fmt: skip
"""Method and sections; on one rank without ZeRO, and with padding."""


def two_ranks_recipe(policy, texts, case, one_rank=False):
    method, sections = TWO_RANKS[case]
    sections = {name: dict(section) for name, section in sections.items()}
    if one_rank:
        sections.pop("train", None)
        sections["model"] = {"path": str(policy), "remove_padding": False}
    if "ptx" in sections:
        sections["ptx"]["path"] = str(texts)
    return recipe(policy, method, **sections)


def on_two_ranks(rank, ranks, port, policy, texts, want):
    """Uneven shares: 5 samples are 3 and 2, 1 sample is 1 and 0; of 3 pairs one rank has 2."""
    want = torch.load(want, weights_only=False)
    for case in TWO_RANKS:
        made = two_ranks_recipe(policy, texts, case)
        trained = worker(made, rank=rank, ranks=ranks, port=port)
        rollouts, splits = work(made)
        _, metrics, report = train(trained, made, rollouts, parts(rollouts), splits)
        assert difference(weights(trained), want[case][0]) < 1e-5, case
        if made.uses_critic:
            assert difference(weights(trained, "critic"), want[case][1]) < 1e-5
        if made.trainer_answers:
            compare_references(trained, made, rollouts)
        for found, wanted in ((metrics, want[case][2]), (report.metrics, want[case][3])):
            for name in ("loss/policy", "loss/ptx", "dpo/margin"):
                if name in wanted:
                    together = merge(gather([{name: found[name]} if name in found else {}]))[name]
                    assert (together.total, together.count) == pytest.approx((wanted[name].total, wanted[name].count), abs=1e-4), (
                        case,
                        name,
                    )
        rows = [row for part in gather([trained.finish_step(0)]) for row in part]
        assert sorted(row.id for row in rows) == sorted(rollout.id for rollout in rollouts)
        assert case != "remax" or all((row.advantage is None) == (row.id.sample == 1) for row in rows)


def compare_references(trained, made, rollouts):
    """The ranks answer together; rank 0 says it."""
    answer = trained.score(("reference",), rollouts)[1]
    assert (answer is None) == (dist.get_rank() > 0)
    if answer is not None:
        alone = ScoreWorker(made, ("reference",), cores=trained._cores)
        alone.ready()
        wanted = alone.score(("reference",), rollouts)[1]
        for found, right in zip(answer.reference_logprobs, wanted.reference_logprobs, strict=True):
            torch.testing.assert_close(found, right, atol=1e-5, rtol=0)


def work(made):
    if made.uses_critic:
        return samples(5), [[0, 1, 2], [3], [4]]
    if made.algorithm.policy_loss == "dpo":
        return samples(8, 2), [[0, 1, 2, 3, 4, 5], [6, 7]]
    return samples(8, 2), [[0, 1, 2, 3, 4], [5], [6, 7]]


@pytest.mark.slow
def test_case_16_uneven_ranks_finish_and_equal_one_rank(policy, tmp_path):
    texts, want = tmp_path / "texts.jsonl", {}
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two and more", "three", "four")))
    for case in TWO_RANKS:
        made = two_ranks_recipe(policy, texts, case, one_rank=True)
        trained = worker(made)
        rollouts, splits = work(made)
        _, metrics, report = train(trained, made, rollouts, parts(rollouts), splits)
        want[case] = (weights(trained), weights(trained, "critic") if made.uses_critic else None, metrics, report.metrics)
    torch.save(want, tmp_path / "want.pt")
    spawn(on_two_ranks, 2, policy, texts, tmp_path / "want.pt")
