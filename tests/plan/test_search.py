import argparse
from pathlib import Path

import pytest
import yaml

from conveyor.config import UserError, load_recipe, parse_recipe
from conveyor.config.rules import broken_rules
from conveyor.plan.candidates import candidates
from conveyor.plan.command import add_arguments, changed_recipe, run
from conveyor.plan.estimate import StageSeconds
from conveyor.plan.hardware import GPUS
from conveyor.plan.known_models import NAMED
from conveyor.plan.lengths import Workload
from conveyor.plan.memory import Shapes
from conveyor.plan.predict import predict, simulated_steps
from conveyor.plan.roofline import Roofline
from conveyor.plan.search import Found, search
from tests.plan.recipes import raw, recipe
from tests.plan.test_fit import write_run

pytestmark = pytest.mark.slow

SOURCE = Roofline(Shapes(NAMED["1b"], NAMED["1b"]), GPUS["h100"])
WORKLOAD = Workload.draw("lognormal:mean=300,sigma=0.8,cap=1024", 32 * simulated_steps(4), 1, prompt=100)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(recipe(), SOURCE, WORKLOAD, 8, (1, 2))


def test_the_best_come_first_and_every_one_can_be_run(found: Found) -> None:
    seconds = [prediction.step_seconds for prediction in found.best]
    assert seconds == sorted(seconds)
    assert 2 <= len(seconds) <= 5
    assert found.candidates >= found.fitting >= found.simulated >= len(seconds)
    for prediction in found.best:
        made = parse_recipe(changed_recipe(raw(), prediction))
        assert made.devices == prediction.recipe.devices
        assert sum(made.devices.values()) == 8
        assert made.pipeline.max_staleness == 0
        assert all(table.fits for table in prediction.memory)


def test_splits_are_shown_once(found: Found) -> None:
    shown = [(tuple(sorted(p.recipe.devices.items())), p.recipe.rollout.tensor_parallel_size) for p in found.best]
    assert len(set(shown)) == len(shown)


def test_alternatives_have_more_staleness_and_the_first_is_faster(found: Found) -> None:
    assert list(found.staler) == [1, 2, 3, 4]
    assert [prediction.recipe.pipeline.max_staleness for prediction in found.staler.values()] == [1, 2, 3, 4]
    assert found.staler[1].step_seconds < found.best[0].step_seconds


@pytest.mark.slow
def test_a_search_gives_the_same_answer_again(found: Found) -> None:
    again = search(recipe(), SOURCE, WORKLOAD, 8, (1, 2))
    assert again.best == found.best
    assert again.staler == found.staler


def test_the_best_is_no_slower_than_a_placement_by_hand(found: Found) -> None:
    by_hand = recipe(devices={"rollout": 3, "score": 1, "train": 4}, roles={}, pipeline={"micro_batch_size": 8})
    assert found.best[0].step_seconds <= predict(by_hand, SOURCE, WORKLOAD).step_seconds


def test_device_hours_count_idle_devices_too(found: Found) -> None:
    best = found.best[0]
    assert best.device_hours_per_1000 == pytest.approx(best.step_seconds / 3600 * 8 / 32 * 1000)


def test_what_cannot_fit_is_refused_with_the_ratio() -> None:
    large = Roofline(Shapes(NAMED["70b"], NAMED["70b"]), GPUS["h100"])
    with pytest.raises(UserError, match=r"none of \d+ placements fits; the nearest needs \d+\.\d × the memory"):
        search(recipe(), large, WORKLOAD, 8, (1, 2, 4, 8))


def test_one_device_holds_everything() -> None:
    small = search(recipe(train={"rollout_batch_size": 8}), SOURCE, WORKLOAD, 1)
    assert small.best[0].recipe.roles == {"rollout": "train", "score": "train"}


@pytest.mark.parametrize(
    ("streams", "overlap", "staleness", "expected"),
    [(True, True, 0, 1.6 + 0.9 * 8 + 1), (True, True, 1, 6 + 1), (False, True, 0, 16 + 1),
     (False, True, 2, 6 + 1), (False, False, 3, 16 + 1)],
)  # fmt: skip
def test_the_estimate_is_the_flow_shop(streams: bool, overlap: bool, staleness: int, expected: float) -> None:
    stages = StageSeconds({"score": 2, "train": 6}, "rollout", 5, 8, 1, 10, streams=streams, overlap=overlap)
    assert stages.step(staleness) == pytest.approx(expected)


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def plan(*arguments: str, **overrides: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments), overrides)


@pytest.fixture
def recipe_file(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw(train={"rollout_batch_size": 8})))
    return str(path)


def test_a_plan_from_the_data_sheet_writes_a_recipe(recipe_file: str, tmp_path: Path, capsys) -> None:
    written = tmp_path / "placed.yaml"
    assert (
        plan(recipe_file, "--model", "1b", "--gpus", "4", "--lengths", "300", "--write", str(written), **{"train.learning_rate": "1e-5"})
        == 0
    )
    made = load_recipe(written)
    assert sum(made.devices.values()) == 4
    assert (made.data.max_prompt_length, made.train.learning_rate) == (512, 1e-5)
    shown = capsys.readouterr().out
    assert "4 devices, 8 samples a step, responses 300" in shown
    assert "Best placements" in shown


def test_an_engine_of_transformers_stays_on_one_device(recipe_file: str, tmp_path: Path) -> None:
    """Of one GPU for everything vLLM's engine would be told its share, and of four it may have two."""
    for gpus in (1, 4):
        written = tmp_path / f"{gpus}.yaml"
        engine = {"rollout.engine": "transformers"}
        assert plan(recipe_file, "--model", "1b", "--gpus", str(gpus), "--lengths", "300", "--write", str(written), **engine) == 0
        rollout = load_recipe(written).rollout
        assert (rollout.engine, rollout.tensor_parallel_size, rollout.gpu_memory_utilization) == ("transformers", 1, 0.85)


def test_a_recipe_without_models_to_score_with_has_no_score_devices(tmp_path: Path, capsys) -> None:
    made = raw("dapo", rewards=[{"name": "f", "function": "f.py:f"}], rollout={"n_samples_per_prompt": 2, "max_response_length": 64},
               train={"rollout_batch_size": 4})  # fmt: skip
    path, written = tmp_path / "recipe.yaml", tmp_path / "placed.yaml"
    path.write_text(yaml.safe_dump(made))
    arguments = [str(path), "--model", "1b", "--gpus", "2", "--write", str(written)]
    seconds = []
    for more in ([], ["--judge-seconds", "9"], ["--equal-groups", "0.5"]):
        written.unlink(missing_ok=True)
        assert plan(*arguments, *more) == 0
        assert set(load_recipe(written).devices) <= {"rollout", "train"}
        seconds.append(float(written.read_text().splitlines()[0].split("step ")[1].split()[0]))
    assert seconds[1] == pytest.approx(seconds[0] + 9, rel=0.01), "on-policy, the last sample is judged by itself"
    assert seconds[2] > 1.2 * seconds[0]


def test_judging_and_equal_groups_are_for_recipes_that_have_them(recipe_file: str) -> None:
    for option, value, message in (
        ("--judge-seconds", "1", "the recipe has no reward that is a function or url"),
        ("--equal-groups", "0.5", r"the recipe has no rollout\.dynamic_sampling"),
    ):
        with pytest.raises(UserError, match=f"{option}: {message}"):
            plan(recipe_file, "--model", "1b", "--gpus", "4", option, value)


def test_a_plan_from_a_run_and_its_validation(recipe_file: str, tmp_path: Path, capsys) -> None:
    folder = str(write_run(tmp_path / "run"))
    assert plan("--validate", folder) == 0
    assert "Predicted against measured" in capsys.readouterr().out
    assert plan(recipe_file, "--profile", folder) == 0
    assert "5 devices, 8 samples a step, responses drawn from the run's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"--profile RUN \(fits a run's events\) or --model 70b"),
        (["--model", "8b", "--profile", "x"], "give one of them, not both"),
        (["--model", "8b"], "--gpus: none given"),
        (["--model", "8b", "--gpus", "-3"], "--gpus: -3; name 1 to"),
        (["--model", "8b", "--gpus", "0"], "--gpus: 0; name 1 to"),
        (["--model", "8b", "--gpus", "4", "--gpu", "abacus"], "abacus"),
        (["--model", "8b", "--gpus", "4", "--reward-model", "abacus"], "--reward-model: the shape of 'abacus' is not known"),
        (["--model", "8b", "--gpus", "4", "--lengths", ""], "--lengths: '': no such law"),
        (["--model", "8b", "--gpus", "4", "--lengths", "constant:value=1,value=2"], "--lengths: value is given twice"),
        (["--model", "8b", "--gpus", "4", "--write", "/nowhere/at/all.yaml"], "--write: /nowhere/at is no folder"),
        (["--model", "8b", "--gpus", "4", "--lengths", "gauss"], "no such law"),
        (["--model", "8b", "--gpus", "4", "--prompt", "-1"], "--prompt: -1"),
        (["--profile", "nowhere"], "holds no config.yaml"),
    ],
)
def test_bad_input_is_one_clear_line(recipe_file: str, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        plan(recipe_file, *arguments)
    assert "\n" not in str(error.value)


def test_a_file_that_is_there_is_not_written_over(recipe_file: str) -> None:
    with pytest.raises(UserError, match=r"--write: .* exists; name a new file"):
        plan(recipe_file, "--model", "8b", "--gpus", "4", "--write", recipe_file)


def test_a_damaged_run_is_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join(whole[:1]) + "\n")
    with pytest.raises(UserError, match="nothing happened on the device group"):
        plan("--validate", str(folder))
    (folder / "metrics.jsonl").write_text('{"tokens": 3}\n')
    with pytest.raises(UserError, match="run"):
        plan("--validate", str(folder))


def test_every_placement_is_one_that_a_recipe_may_have() -> None:
    """Merging rollout with others leaves no bubbles to evaluate in, which the recipe does not insist on."""
    evaluated = recipe(devices={"rollout": 2, "score": 1, "train": 2}, evaluate={"path": "e", "n_samples_per_prompt": 24})
    made = list(candidates(evaluated, SOURCE, WORKLOAD.facts, 4, (1, 2)))
    assert any(one.role_group("rollout") == "train" for one in made)
    assert all(not broken_rules(one) and one.rollout.max_concurrent_requests >= 24 for one in made)


def test_an_offline_recipe_has_no_stages(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump({"method": "sft", "output_dir": "runs/x", "model": {"path": "m"}, "data": {"path": "d"}}))
    with pytest.raises(UserError, match="no stages to plan"):
        plan(str(path), "--model", "8b")
