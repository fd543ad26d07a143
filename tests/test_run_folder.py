"""A run's folder: never two runs in one, never half a checkpoint or model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conveyor.config import OfflineRecipe, UserError, parse_recipe
from conveyor.run_folder import RunFolder, complete_or_absent


def recipe(folder: Path, **changes: object) -> OfflineRecipe:
    made = parse_recipe({"method": "sft", "output_dir": str(folder), "model": {"path": "m"}, "data": {"path": "d"}, **changes})
    assert isinstance(made, OfflineRecipe)
    return made


def test_a_folder_with_a_run_is_refused_unless_resumed_or_overwritten(tmp_path: Path) -> None:
    folder = RunFolder.open(recipe(tmp_path / "run"))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    folder.metrics.write_text("{}\n")
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder.open(recipe(tmp_path / "run"))
    RunFolder.open(recipe(tmp_path / "run", checkpoint={"resume": True}))
    assert folder.metrics.exists()
    RunFolder.open(recipe(tmp_path / "run", overwrite=True))
    assert not folder.metrics.exists() and (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("output_dir", ["", " ", ".", "..", "/"])
def test_a_folder_that_is_not_the_runs_own_is_refused(output_dir: str) -> None:
    with pytest.raises(UserError, match="output_dir"):
        RunFolder.check(recipe(Path("x"), output_dir=output_dir))


def test_what_is_no_run_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "mine").touch()
    with pytest.raises(UserError, match="already holds model"):
        RunFolder.open(recipe(tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "mine").is_file()


def test_a_run_that_ended_before_its_first_step_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = RunFolder.open(recipe(tmp_path / "run"))
    for file in (folder.metrics, folder.samples):
        file.touch()
    folder.events.write_text('{"step": 1}\n')
    RunFolder.open(recipe(tmp_path / "run"))
    assert not folder.events.exists()


def test_two_runs_never_write_to_one_folder(tmp_path: Path) -> None:
    code = "import sys; from tests.test_run_folder import *; RunFolder.open(recipe(Path(sys.argv[1]))); print('mine', flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match="another run is writing"):
            RunFolder.open(recipe(tmp_path / "run", overwrite=True))
        other.communicate("\n")
    RunFolder.open(recipe(tmp_path / "run", overwrite=True))


def test_an_input_where_the_run_writes_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    with pytest.raises(UserError, match=r"model\.path: .* lies where the run writes"):
        RunFolder.open(recipe(tmp_path / "run", overwrite=True, model={"path": str(model)}))
    assert model.is_dir()


def test_only_the_same_recipe_is_resumed(tmp_path: Path) -> None:
    folder = RunFolder.open(recipe(tmp_path / "run"))
    folder.begin_checkpoint(1)
    folder.commit_checkpoint(1, keep=1)
    RunFolder.open(recipe(tmp_path / "run", checkpoint={"resume": True}, train={"steps": 9}))
    with pytest.raises(UserError, match="seed: 5, but the run to resume"):
        RunFolder.open(recipe(tmp_path / "run", checkpoint={"resume": True}, seed=5))


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder.check(recipe(tmp_path / "run"))


def test_checkpoints_are_complete_or_absent_and_the_newest_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 10):
        (folder.begin_checkpoint(step) / "weights").write_text(str(step))
        assert step not in [folder.newest_checkpoint() and folder.newest_checkpoint()[0]]
        folder.commit_checkpoint(step, keep=2)
    newest = folder.newest_checkpoint()
    assert newest is not None and newest[0] == 10 and (newest[1] / "weights").read_text() == "10"
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_10", "step_2"]
    (folder.checkpoints / "step_11").mkdir()  # torn: not one of ours, or half copied
    assert folder.newest_checkpoint() == newest


def test_a_failed_write_leaves_the_older_folder(tmp_path: Path) -> None:
    with complete_or_absent(tmp_path / "model") as aside:
        (aside / "weights").write_text("old")
    with pytest.raises(RuntimeError), complete_or_absent(tmp_path / "model") as aside:
        (aside / "weights").write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (tmp_path / "model" / "weights").read_text() == "old"


def test_rewind_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "rew')
    folder.events.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    folder.samples.write_bytes('{"step": 1, "response": "a\u2028b\x85"}\n{"step": 2, "response": "ü'.encode()[:-1])
    folder.rewind(2)
    assert json.loads(folder.samples.read_text())["response"] == "a\u2028b\x85"
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]
    assert [json.loads(line)["step"] for line in folder.events.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"", "config.yaml is damaged: it holds no recipe"),
        ("config.yaml", b"a: [", "config.yaml is damaged"),
        ("config.yaml", b"\xff", "config.yaml is damaged"),
        ("data.json", b"[1", "data.json is damaged"),
    ],
)  # fmt: skip
def test_what_a_damaged_file_of_a_run_to_resume_is_told(tmp_path, name, content, message):
    first = recipe(tmp_path / "run")
    checkpointed(RunFolder.open(first))
    (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        RunFolder.check(recipe(tmp_path / "run", checkpoint={"resume": True}))


def test_data_that_changed_under_its_name_is_not_trained_on_resume(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    settings = {"data": {"path": str(data)}}
    checkpointed(RunFolder.open(recipe(tmp_path / "run", **settings)))
    resumed = recipe(tmp_path / "run", checkpoint={"resume": True}, **settings)
    RunFolder.check(resumed)
    data.write_text('{"text": "b"}\n')
    with pytest.raises(UserError, match=r"data.path: the file is not what it was when the run in .*run began"):
        RunFolder.check(resumed)


def checkpointed(folder):
    folder.begin_checkpoint(1)
    folder.commit_checkpoint(1, 2)
