"""Runs that are killed, and go on."""

import json
from pathlib import Path
from typing import Any

import pytest

from conveyor.config import UserError
from conveyor.loops import rounds as rounds_module
from conveyor.loops import run as run_module
from conveyor.models.train_engine import TrainEngine
from conveyor.report.progress import MetricsLog
from tests.loops.conftest import Finished, Make, Run, TinyEngines, distance, untimed

CHANGES = {"train.epochs": 2, "checkpoint.every": 1, "checkpoint.keep": 1}


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def kill(*_, **__):
    raise Killed


def contents(folder: Path) -> dict[str, object]:
    """Every file of the rounds with what it says, times and places left out; weights are compared apart."""
    found: dict[str, object] = {}
    for path in sorted((folder / "rounds").rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl":
            found[name] = [untimed(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        elif path.is_file() and "reference_logprobs" not in name:  # named by the path of the reference's weights
            found[name] = None
    return found


@pytest.fixture(scope="module")
def whole(make_loop: Make, run: Run, tmp_path_factory: pytest.TempPathFactory, loop_data: Path) -> Finished:
    """Two rounds in one go."""
    changes = CHANGES | {"data.eval_path": str(loop_data / "held_out.jsonl")}
    return run(make_loop("iterative_dpo", tmp_path_factory.mktemp("whole") / "run", changes))


class _CutSampling(TinyEngines):
    """Is killed in its second call of a round, after one prompt and in the middle of the next one's line."""

    def sample(self, policy, prompts, on_prompt):
        if len(prompts) < 4:
            return super().sample(policy, prompts, on_prompt)
        super().sample(policy, prompts[:1], on_prompt)
        (growing,) = Path(self.folder).glob("rounds/*/.samples.jsonl.growing")
        with growing.open("ab") as file:
            file.write('{"index": 1, "row": 3, "prompt": "é'.encode()[:-1])  # in the middle of a letter, too
        raise Killed

    def __init__(self, recipe, engines=None):
        super().__init__(recipe, engines)
        self.folder = recipe.output_dir


class _Nothing(TinyEngines):
    def sample(self, policy, prompts, on_prompt):
        raise AssertionError("everything was sampled before")


class _HeldOut(TinyEngines):
    """Is killed after the first held-out prompt."""

    def sample(self, policy, prompts, on_prompt):
        if prompts[0].index < 2**40:
            return super().sample(policy, prompts, on_prompt)
        super().sample(policy, prompts[:1], on_prompt)
        raise Killed


@pytest.mark.slow
def test_a_run_killed_at_every_step_of_every_round_ends_as_one_that_was_not(
    make_loop: Make, run: Run, tmp_path: Path, loop_data: Path, whole: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = CHANGES | {"data.eval_path": str(loop_data / "held_out.jsonl"), "checkpoint.resume": True}
    recipe = make_loop("iterative_dpo", tmp_path / "run", changes)
    folder, killed = tmp_path / "run", Finished(tmp_path / "run")

    def end(where: object, name: str, replacement: object = kill, engines: type[TinyEngines] = TinyEngines) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, replacement)
            with pytest.raises(Killed):
                run(recipe, engines)

    def goes_on(name: str, calls: int):
        """A function that is killed in its call number `calls` + 1."""
        original, seen = getattr(TrainEngine, name), [0]

        def called(*given, **more):
            seen[0] += 1
            return kill() if seen[0] > calls else original(*given, **more)

        return called

    with pytest.raises(Killed):
        run(recipe, _HeldOut)
    assert not (folder / "rounds/round_0/held_out_samples.jsonl").exists() and not killed.rows
    for number in (1, 2):
        path = folder / "rounds" / f"round_{number}"
        with pytest.raises(Killed):
            run(recipe, _CutSampling)
        assert not (path / "samples.jsonl").exists()
        if number == 1:
            assert [row["step"] for row in killed.rows] == [0]
        end(rounds_module.SamplesFile, "complete")
        assert not (path / "samples.jsonl").exists()
        end(rounds_module, "selected_rows", engines=_Nothing)
        assert (path / "samples.jsonl").exists() and not (path / "selected.jsonl").exists()
        end(rounds_module, "fit_round", engines=_Nothing)
        assert (path / "selected.jsonl").exists() and not (path / "train").exists()
        end(TrainEngine, "step", goes_on("step", 1), engines=_Nothing)  # the first update is in a checkpoint
        assert (path / "train/checkpoints/step_1/complete").exists() and not (path / "train/model").exists()
        end(TrainEngine, "save_pretrained", engines=_Nothing)
        assert not (path / "train/model").exists()
        end(rounds_module, "round_metrics", engines=_Nothing)
        assert (path / "train/model").exists() and not (path / "train/checkpoints").exists()
        with pytest.raises(Killed):
            run(recipe, _HeldOut)
        assert not (path / "held_out_samples.jsonl").exists()
        end(MetricsLog, "append")
        assert (path / "held_out_samples.jsonl").exists() and [row["step"] for row in killed.rows] == list(range(number))
        with killed.run.metrics.open("a") as file:
            file.write('{"step": ')
    end(run_module, "_publish", engines=_Nothing)
    assert [row["step"] for row in killed.rows] == [0, 1, 2] and not (folder / "model").exists()
    end(run_module, "_link", engines=_Nothing)
    assert not (folder / "model").exists()
    run(recipe, _Nothing)

    assert killed.rows == whole.rows
    assert contents(folder) == contents(whole.path)
    for number in (1, 2):
        assert distance(killed.model(number), whole.model(number)) == 0.0
    assert distance(folder / "model", whole.path / "model") == 0.0


def test_more_rounds_on_resume_go_on(make_loop: Make, run: Run, tmp_path: Path, loop_data: Path, whole: Finished) -> None:
    changes = CHANGES | {"data.eval_path": str(loop_data / "held_out.jsonl")}
    first = run(make_loop("iterative_dpo", tmp_path / "run", changes | {"rounds.count": 1}))
    assert distance(first.path / "model", whole.model(1)) == 0.0
    run(make_loop("iterative_dpo", tmp_path / "run", changes | {"checkpoint.resume": True}))
    assert first.rows == whole.rows and contents(first.path) == contents(whole.path)
    assert distance(first.path / "model", whole.path / "model") == 0.0


def test_a_finished_run_resumed_has_nothing_to_do(make_loop: Make, run: Run, whole: Finished, loop_data: Path) -> None:
    changes = CHANGES | {"data.eval_path": str(loop_data / "held_out.jsonl"), "checkpoint.resume": True}
    before = whole.rows
    assert run(make_loop("iterative_dpo", whole.path, changes), _Nothing).rows == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("select.pairs", "all", r"select.pairs: 'all', but the run to resume in .* has 'best_worst'"),
        ("rollout.n_samples_per_prompt", 5, r"rollout.n_samples_per_prompt: 5, but the run to resume in .* has 4"),
        ("train.epochs", 3, r"train.epochs: 3, but the run to resume in .* has 2"),
        ("rounds.accumulate", False, r"rounds.accumulate: False, but the run to resume in .* has None"),
        ("seed", 4, r"seed: 4, but the run to resume in .* has 3"),
    ],
)
def test_another_run_is_not_resumed(make_loop: Make, run: Run, whole: Finished, loop_data: Path, key: str, value, message: str) -> None:
    changes = CHANGES | {"data.eval_path": str(loop_data / "held_out.jsonl"), "checkpoint.resume": True, key: value}
    with pytest.raises(UserError, match=message):
        run(make_loop("iterative_dpo", whole.path, changes))


def test_a_run_is_not_replaced_unasked(make_loop: Make, run: Run, whole: Finished) -> None:
    with pytest.raises(UserError, match=r"output_dir: .*run already holds a run; set checkpoint.resume or overwrite"):
        run(make_loop("iterative_dpo", whole.path))


def test_a_missing_model_of_a_round_is_named(make_loop: Make, run: Run, tmp_path: Path) -> None:
    """Whoever removed it to save space could not go on from the first policy without noticing."""
    done = run(make_loop("rejection_sampling", tmp_path / "run", {"rounds.count": 1}))
    done.model(1).rename(tmp_path / "moved")
    changes = {"rounds.count": 2, "checkpoint.resume": True}
    with pytest.raises(UserError, match=r"checkpoint.resume: .*round_1/train/model is gone, and the rounds after it need it"):
        run(make_loop("rejection_sampling", tmp_path / "run", changes))
    assert (done.path / "model").exists()


@pytest.mark.slow
def test_a_run_that_samples_ahead_is_killed_and_goes_on(make_loop: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At staleness 1, while round 2 is trained, and round 3 sampled or about to be."""
    changes = {"rounds.count": 3, "rounds.max_staleness": 1, "train.train_batch_size": 8, "checkpoint.resume": True}
    done = run(make_loop("iterative_dpo", tmp_path / "whole", changes))
    recipe, fit, seen = make_loop("iterative_dpo", tmp_path / "run", changes), rounds_module.fit_round, []
    with monkeypatch.context() as patch:
        patch.setattr(rounds_module, "fit_round", lambda *given: kill() if seen else seen.append(given) or fit(*given))
        with pytest.raises(Killed):
            run(recipe)
    killed = Finished(tmp_path / "run")
    assert [row["step"] for row in killed.rows] == [1] and not killed.model(2).exists()
    run(recipe)
    assert killed.rows == done.rows and contents(killed.path) == contents(done.path)
    assert distance(killed.path / "model", done.path / "model") == 0.0


@pytest.mark.slow
def test_no_round_is_trained_past_one_that_failed(make_loop: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With start_from: first the next round would not need its policy; a run that goes on still has to find every round."""
    changes = {"rounds.count": 2, "rounds.max_staleness": 1, "rounds.start_from": "first", "checkpoint.resume": True}
    done = run(make_loop("iterative_dpo", tmp_path / "whole", changes))
    recipe, fit, seen = make_loop("iterative_dpo", tmp_path / "run", changes), rounds_module.fit_round, []

    def full_once(*given: Any) -> Any:
        if not seen:
            seen.append(given)
            raise OSError("no space left")
        return fit(*given)

    with monkeypatch.context() as patch:
        patch.setattr(rounds_module, "fit_round", full_once)
        with pytest.raises(OSError, match="no space left"):
            run(recipe)
    failed = Finished(tmp_path / "run")
    assert failed.rows == [] and not failed.model(2).exists()
    run(recipe)
    assert failed.rows == done.rows and distance(failed.path / "model", done.path / "model") == 0.0
