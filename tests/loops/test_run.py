"""Whole runs of loops: which policy samples, what is learnt from what, and what a run leaves behind."""

import json
import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from conveyor.config import RunError, UserError
from conveyor.config.loops import LoopRecipe
from conveyor.loops import fitting
from conveyor.loops.run import check_loop
from conveyor.loops.selection import selected_rows
from conveyor.offline.task import Task
from tests.loops.conftest import Finished, Make, Run, TinyEngines, distance, untimed
from tests.offline.conftest import alone

WHOLE = {"train.train_batch_size": 64, "train.micro_batch_size": 4}
"""A round is one update, so train/loss is the loss before it."""


@pytest.fixture(scope="module")
def finished(make_loop: Make, run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoopRecipe, Finished, list[Task]]:
    """Two rounds of iterative DPO by its defaults, with held-out prompts, and what each round has trained on."""
    tasks: list[Task] = []
    folder, train = tmp_path_factory.mktemp("loop") / "run", fitting.run_task
    recipe = make_loop("iterative_dpo", folder, WHOLE)
    recipe = make_loop("iterative_dpo", folder, WHOLE | {"data.eval_path": str(Path(recipe.data.path).with_name("held_out.jsonl"))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "run_task", lambda inner, task, *more: tasks.append(task) or train(inner, task, *more))
        return recipe, run(recipe), tasks


def test_a_round_is_sampled_by_the_policy_of_the_one_before(finished) -> None:
    recipe, done, _ = finished
    held_out = [2**40, 2**40 + 1]
    assert done.calls == [
        ("sample", (recipe.model.path, held_out)),
        ("sample", (recipe.model.path, [0, 1, 2, 3])),
        ("rest", None),
        ("sample", (str(done.model(1)), held_out)),
        ("sample", (str(done.model(1)), [4, 5, 6, 7])),
        ("rest", None),
        ("sample", (str(done.model(2)), held_out)),
        ("close", None),
    ]  # fmt: skip
    assert distance(done.model(1), Path(recipe.model.path)) > 1e-4 < distance(done.model(1), done.model(2))


def test_what_a_run_leaves(finished) -> None:
    _, done, _ = finished
    assert sorted(path.name for path in done.path.iterdir()) == ["config.yaml", "data.json", "metrics.jsonl", "model", "rounds"]
    assert sorted(path.name for path in (done.path / "rounds").iterdir()) == ["reference_logprobs", "round_0", "round_1", "round_2"]
    for number in (1, 2):
        folder = done.path / "rounds" / f"round_{number}"
        assert sorted(path.name for path in folder.iterdir()) == ["held_out_samples.jsonl", "samples.jsonl", "selected.jsonl", "train"]
        assert sorted(path.name for path in (folder / "train").iterdir()) == ["config.yaml", "data.json", "metrics.jsonl", "model"]
    assert distance(done.path / "model", done.model(2)) == 0.0
    assert (done.path / "model/model.safetensors").samefile(done.model(2) / "model.safetensors"), "stored once"
    AutoTokenizer.from_pretrained(done.path / "model")


def test_samples_are_in_prompt_order_with_their_own_scores(finished) -> None:
    recipe, done, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    order, _ = check_loop(recipe.model_copy(update={"overwrite": True}))
    for number in (1, 2):
        lines = done.lines("samples", number)
        assert [line["index"] for line in lines] == [4 * number - 4 + k for k in range(4)]
        for line, prompt in zip(lines, order[number - 1], strict=True):
            assert line.keys() == {"index", "row", "prompt", "prompt_ids", "samples"}
            assert (line["row"], line["prompt"], line["prompt_ids"]) == (prompt.row + 1, prompt.text, list(prompt.token_ids))
            assert line["prompt"] == f"p{line['row'] - 1}" and len(line["samples"]) == 4
            for sample in line["samples"]:
                ids = sample["response_ids"]
                low = sum(token < 130 for token in ids) / len(ids)
                assert sample["score"] == sample["rewards"]["low"] == pytest.approx(low)
                assert sample["response"] == tokenizer.decode(ids, skip_special_tokens=True)
                assert (sample["finish_reason"] == "stop") == (ids[-1] == tokenizer.eos_token_id)


def test_selected_is_the_choice_of_the_rule_from_the_samples(finished) -> None:
    recipe, done, _ = finished
    for number in (1, 2):
        lines = done.lines("samples", number)
        assert done.lines("selected", number) == list(selected_rows(recipe, number - 1, lines))
        expected = []
        for line in lines:
            by_score = sorted(line["samples"], key=lambda sample: sample["score"])
            best, worst = by_score[-1]["score"], by_score[0]["score"]
            if best > worst:
                expected.append((line["row"], best, worst))
        assert [(row["row"], row["chosen_score"], row["rejected_score"]) for row in done.lines("selected", number)] == expected


def test_the_sampled_tokens_are_learnt_themselves(finished) -> None:
    """No text is tokenised again, which would change many of these, and no end is put to a sample that was cut."""
    recipe, done, tasks = finished
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    rows = [*done.lines("selected", 1), *done.lines("selected", 2)]
    assert len(tasks[1].items) == len(rows), "accumulated"
    otherwise, cut = 0, 0
    for row, pair in zip(rows, tasks[1].items, strict=True):
        for side, sample in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            ids, prompt = row[f"{side}_ids"], row["prompt_ids"]
            assert sample.ids.tolist() == prompt + ids
            assert sample.mask.tolist() == [False] * len(prompt) + [True] * len(ids)
            otherwise += tokenizer.encode(row[side], add_special_tokens=False) not in (ids, ids[:-1])
            cut += ids[-1] != tokenizer.eos_token_id
    assert otherwise and cut
    assert str(tasks[1].items[-1].chosen.place).endswith(f"round_2/selected.jsonl:{len(done.lines('selected', 2))}")


def test_metrics_of_a_round(finished) -> None:
    _, done, _ = finished
    assert [row["step"] for row in done.rows] == [0, 1, 2]
    assert all(name == "step" or name.startswith("eval/") for name in done.rows[0])
    learnt = 0
    for number in (1, 2):
        row, selected = done.rows[number], done.lines("selected", number)
        samples = [sample for line in done.lines("samples", number) for sample in line["samples"]]
        learnt += len(selected)
        assert (row["prompts"], row["samples"], row["selected"], row["learnt"]) == (4, 16, len(selected), learnt)
        assert row["reward/mean"] == row["reward/low"] == pytest.approx(np.mean([one["score"] for one in samples]))
        best = [max(one["score"] for one in line["samples"]) for line in done.lines("samples", number)]
        assert row["reward/best"] == pytest.approx(np.mean(best))
        assert row["selected/margin"] == pytest.approx(np.mean([one["chosen_score"] - one["rejected_score"] for one in selected]))
        assert row["response_length/mean"] == pytest.approx(np.mean([len(one["response_ids"]) for one in samples]))
        assert row["truncated_fraction"] == pytest.approx(np.mean([one["finish_reason"] == "length" for one in samples]))
        held_out = [sample["score"] for line in done.lines("held_out_samples", number) for sample in line["samples"]]
        assert row["eval/reward/mean"] == pytest.approx(np.mean(held_out)) and row["eval/samples"] == 8
    assert done.lines("held_out_samples", 0) != done.lines("held_out_samples", 2)


def dpo_loss(rows: list[dict], start: Path, reference: Path, beta: float = 0.1) -> float:
    """Mean of −log σ(β·(Δ chosen − Δ rejected)), from full logits of transformers' own models."""
    samples = [fitting.as_pairs([row], Path("rows"))[0] for row in rows]
    sides = [side for pair in samples for side in (pair.chosen, pair.rejected)]
    ratios = np.array(alone(start, sides)) - np.array(alone(reference, sides))
    return float(np.logaddexp(0, -beta * (ratios[::2] - ratios[1::2])).mean())


def test_by_default_pairs_accumulate_and_the_first_policy_is_the_reference(finished) -> None:
    recipe, done, _ = finished
    rows = [*done.lines("selected", 1), *done.lines("selected", 2)]
    wanted = dpo_loss(rows, done.model(1), Path(recipe.model.path))
    assert done.rows[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-6), "the reference is the policy itself"
    assert done.rows[2]["train/loss"] == pytest.approx(wanted, abs=1e-5) and abs(wanted - np.log(2)) > 1e-3


@pytest.mark.parametrize(
    ("rounds", "start", "reference"),
    [
        ({"start_from": "first", "reference": "previous", "accumulate": False}, 0, 1),
        ({"start_from": "previous", "reference": "previous", "accumulate": True}, 1, 1),
    ],
)
def test_start_and_reference_are_what_the_recipe_says(make_loop: Make, run: Run, tmp_path: Path, rounds, start, reference) -> None:
    recipe = make_loop("iterative_dpo", tmp_path / "run", WHOLE | {f"rounds.{key}": value for key, value in rounds.items()})
    done = run(recipe)
    policies = [Path(recipe.model.path), done.model(1)]
    rows = [*(done.lines("selected", 1) if rounds["accumulate"] else []), *done.lines("selected", 2)]
    assert done.rows[1]["learnt"] == len(rows)
    assert done.rows[1]["train/loss"] == pytest.approx(dpo_loss(rows, policies[start], policies[reference]), abs=1e-5)
    assert (abs(done.rows[1]["train/loss"] - np.log(2)) > 1e-3) == (start != reference)


@pytest.mark.parametrize("method", ["rejection_sampling", "rso"])
def test_the_other_methods_learn_from_the_last_round(make_loop: Make, run: Run, tmp_path: Path, method: str) -> None:
    recipe = make_loop(method, tmp_path / "run", WHOLE | {"data.packing": False})
    done = run(recipe)
    rows, last = done.lines("selected", 2), done.rows[1]
    assert last["learnt"] == last["selected"] == len(rows)
    if method == "rso":
        assert last["train/loss"] == pytest.approx(np.log(2), abs=1e-6), "the reference is the policy that sampled"
        return
    items = [item.sample for item in fitting.as_completions(rows, Path("rows"))]
    assert [sample.ids.tolist() for sample in items] == [row["prompt_ids"] + row["completion_ids"] for row in rows]
    tokens = sum(len(row["completion_ids"]) for row in rows)
    assert last["train/loss"] == pytest.approx(-sum(alone(done.model(1), items)) / tokens, abs=1e-5)
    assert last["selected/score"] == pytest.approx(np.mean([row["score"] for row in rows]))


def test_lora_is_merged_and_trained_anew(make_loop: Make, run: Run, tmp_path: Path) -> None:
    recipe = make_loop("iterative_dpo", tmp_path / "run", WHOLE | {"lora.rank": 2})
    done = run(recipe)
    assert distance(done.model(1), done.model(2)) > 0 < distance(done.model(1), Path(recipe.model.path))
    adapter = json.loads((done.path / "adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(done.model(1)), "of the last round, on the policy it started from"
    assert distance(done.path / "model", done.model(2)) == 0.0


class _Cut(TinyEngines):
    """Says of every sample that all score alike after its first call."""

    def _sampled(self, model, prompt):
        sampled = super()._sampled(model, prompt)
        first = prompt.index < 4
        return sampled if first else type(sampled)(sampled.prompt, sampled.rollouts, sampled.rewards, (1.0, None, 1.0, 1.0))


def test_a_round_that_selects_nothing_leaves_the_policy(make_loop: Make, run: Run, tmp_path: Path, caplog) -> None:
    changes = WHOLE | {"rounds.accumulate": False, "rounds.count": 3}
    with caplog.at_level(logging.WARNING, "conveyor"):
        done = run(make_loop("iterative_dpo", tmp_path / "run", changes), _Cut)
    (first, second) = [record.getMessage() for record in caplog.records if "nothing was selected" in record.getMessage()]
    assert first == f"round 2: nothing was selected of {done.path}/rounds/round_2/samples.jsonl, so the policy stays as it is"
    assert second.startswith("round 3")
    assert [(row["selected"], row["learnt"]) for row in done.rows[1:]] == [(0, 0), (0, 0)]
    assert "train/loss" not in done.rows[2] and done.rows[2]["selected/margin"] is None
    assert [call[1][0] for call in done.calls if call[0] == "sample"][1:] == [str(done.model(1))] * 2
    assert [call[0] for call in done.calls].count("rest") == 1, "engines do not rest where nothing is trained"
    assert distance(done.path / "model", done.model(1)) == 0.0


def test_accumulated_pairs_are_learnt_even_if_a_round_adds_none(make_loop: Make, run: Run, tmp_path: Path) -> None:
    done = run(make_loop("iterative_dpo", tmp_path / "run", WHOLE), _Cut)
    assert done.rows[1]["selected"] == 0 and done.rows[1]["learnt"] == done.rows[0]["selected"] > 0
    assert distance(done.model(2), done.model(1)) > 0


@pytest.mark.parametrize("function", ["same", "nothing"])
def test_a_run_that_selects_nothing_at_all_ends_in_one_line(make_loop: Make, run: Run, tmp_path: Path, loop_data: Path, function) -> None:
    rewards = [{"name": "flat", "function": f"{loop_data / 'rewards.py'}:{function}"}]
    recipe = make_loop("iterative_dpo", tmp_path / "run", {"rewards": rewards, "checkpoint.resume": True})
    for _ in range(2):  # resumed, it has nothing left to do and says so again
        with pytest.raises(RunError, match=r"run/rounds: nothing was selected in any round, so nothing was learnt$"):
            run(recipe)
    assert not (tmp_path / "run/model").exists()
    assert [row["learnt"] for row in Finished(tmp_path / "run").rows] == [0, 0]


def test_how_prompts_are_spread_over_rounds(make_loop: Make, tmp_path: Path) -> None:
    """Case 23: 10 prompts in fours are rounds of 4, 4, 2, then a new epoch. The index goes on, so no sample's seed comes twice."""

    def rounds(changes: dict) -> list[list[tuple[int, int]]]:
        order, _ = check_loop(make_loop("rso", tmp_path / "run", changes))
        return [[(prompt.index, prompt.row) for prompt in order[number]] for number in range(len(order))]

    spread = rounds({"rounds.count": 5})
    assert [len(prompts) for prompts in spread] == [4, 4, 2, 4, 4]
    assert [index for prompts in spread for index, _ in prompts] == list(range(18))
    assert sorted(row for prompts in spread[:3] for _, row in prompts) == list(range(10))
    assert [len(prompts) for prompts in rounds({"rounds.count": 3, "data.drop_last": True})] == [4, 4, 4]
    for whole in (rounds({"rounds.prompts": None}), rounds({"rounds.prompts": 64})):
        assert [sorted(row for _, row in prompts) for prompts in whole] == [list(range(10))] * 2
        assert [index for prompts in whole for index, _ in prompts] == list(range(20))


def test_prompts_over_the_limit_are_never_sampled(make_loop: Make, run: Run, tmp_path: Path) -> None:
    """Case 13."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("short", "far too long " * 9, "brief")))
    recipe = make_loop("rejection_sampling", tmp_path / "run", {"data.path": str(file), "rounds.count": 1, "rounds.prompts": None})
    done = run(recipe)
    assert sorted(line["row"] for line in done.lines("samples")) == [1, 3] == sorted(row["row"] for row in done.lines("selected"))
    with pytest.raises(UserError, match=r"data.max_prompt_length|prompts.jsonl:2"):
        check_loop(make_loop("rso", tmp_path / "other", {"data.path": str(file), "data.on_long": "error"}))


def test_at_staleness_1_a_round_is_sampled_by_the_policy_before_the_newest(make_loop: Make, run: Run, tmp_path: Path) -> None:
    changes = WHOLE | {"rounds.count": 3, "rounds.max_staleness": 1, "rounds.reference": "previous"}
    recipe = make_loop("iterative_dpo", tmp_path / "run", changes)
    done = run(recipe)
    assert [call[1][0] for call in done.calls if call[0] == "sample"] == [recipe.model.path, recipe.model.path, str(done.model(1))]
    policies = [Path(recipe.model.path), Path(recipe.model.path), done.model(1), done.model(2)]
    rows: list[dict] = []
    for number, (sampler, start) in enumerate(pairwise(policies), start=1):
        rows += done.lines("selected", number)
        assert done.rows[number - 1]["train/loss"] == pytest.approx(dpo_loss(rows, start, sampler), abs=1e-5)
    resumed = run(make_loop("iterative_dpo", tmp_path / "run", changes | {"checkpoint.resume": True}))
    assert [untimed(row) for row in resumed.rows] == done.rows and AutoModelForCausalLM.from_pretrained(done.path / "model")


def test_at_staleness_1_a_skipped_round_leaves_the_policy_too(make_loop: Make, run: Run, tmp_path: Path) -> None:
    changes = WHOLE | {"rounds.count": 4, "rounds.max_staleness": 1, "rounds.accumulate": False}
    done = run(make_loop("iterative_dpo", tmp_path / "run", changes), _Cut)
    samplers = [call[1][0] for call in done.calls if call[0] == "sample"]
    assert samplers[1] == samplers[0] and samplers[2:] == [str(done.model(1))] * 2
    assert [row["learnt"] > 0 for row in done.rows] == [True, False, False, False]
    assert distance(done.path / "model", done.model(1)) == 0.0
