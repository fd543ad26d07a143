"""The reference is asked once: what is kept, what makes it another question, what a kill leaves behind."""

from pathlib import Path

import numpy as np
import pytest
import torch

from conveyor.config import UserError, sections
from conveyor.data.samples import Sample
from conveyor.offline import reference as reference_module
from conveyor.offline.reference import reference_logprobs
from conveyor.offline.run import read_task, run_offline
from conveyor.report.progress import read_metrics
from conveyor.run_folder import RunFolder
from conveyor.workers.fit import fit_here
from tests.models.ranks import one_rank
from tests.offline.conftest import Prepare, alone
from tests.tiny import save_tiny_policy

PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in [("1+1=", "2", "three"), ("a colour", "red", "7"), ("?", "yes indeed", "no"), ("end", ".", "!")]
]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the references that were loaded."""
    loaded: list[str] = []
    real = reference_module.load_language_model

    def counted(model: sections.Model):
        loaded.append(model.path)
        return real(model)

    monkeypatch.setattr(reference_module, "load_language_model", counted)
    return loaded


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_runs_with_one_cache_ask_once(prepare: Prepare, loads: list[str], reference: Path, tmp_path: Path) -> None:
    """Other losses, orders and learning rates ask the same."""
    settings = {"reference": {"path": str(reference)}, "reference_cache": str(tmp_path / "cache")}
    run_offline(prepare("dpo", PAIRS, train={"epochs": 3}, **settings))
    assert loads == [str(reference)], "once for three epochs"
    first = losses(tmp_path / "run")
    run_offline(prepare("dpo", PAIRS, train={"epochs": 3}, **settings))
    run_offline(prepare("dpo", PAIRS, dpo={"loss": "ipo"}, data={"shuffle": True}, train={"train_batch_size": 3}, **settings))
    assert len(loads) == 1
    run_offline(prepare("dpo", PAIRS, train={"epochs": 3}, **settings))
    assert losses(tmp_path / "run") == first
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".safetensors"]


def test_without_a_cache_it_is_kept_in_the_run_s_folder(prepare: Prepare, loads: list[str], policy: Path, tmp_path: Path) -> None:
    run_offline(prepare("kto", PAIRS))
    assert loads == [str(policy)], "the model as it is before training"
    assert len(list((tmp_path / "run/reference_logprobs").iterdir())) == 1
    run_offline(prepare("kto", PAIRS))
    assert len(loads) == 2, "overwritten runs begin anew"


def test_methods_without_a_reference_ask_none(prepare: Prepare, loads: list[str], tmp_path: Path) -> None:
    run_offline(prepare("dpo", PAIRS, dpo={"loss": "simpo"}))
    assert loads == [] and not (tmp_path / "run/reference_logprobs").exists()


def test_held_out_pairs_have_a_reference_too(prepare: Prepare, loads: list[str], reference: Path, tmp_path: Path) -> None:
    """Those of training, so that both losses are the same before any update."""
    settings = {"reference": {"path": str(reference)}, "train": {"learning_rate": 1e-9, "train_batch_size": 4}}
    last = run_offline(prepare("dpo", PAIRS, data={"eval_path": str(tmp_path / "rows.jsonl")}, **settings))
    assert last["eval/loss"] == pytest.approx(last["loss"], abs=1e-5) and last["eval/loss"] != pytest.approx(np.log(2), abs=1e-3)
    assert len(loads) == 1, "the same samples"


def test_a_resumed_run_uses_it(prepare: Prepare, loads: list[str], reference: Path) -> None:
    recipe = prepare("dpo", PAIRS, reference={"path": str(reference)}, train={"epochs": 3}, checkpoint={"every": 1, "resume": True})
    work = read_task(recipe)
    RunFolder.open(recipe)
    whole = [row["loss"] for row in fit_here((recipe, *work, 0))]
    assert len(loads) == 1
    assert [row["loss"] for row in fit_here((recipe, *work, 2))] == whole[2:]
    assert len(loads) == 1


# ── what makes it another question ───────────────────────────────────────────────────────────────────


def sample(ids: list[int], learnt: int) -> Sample:
    return Sample(np.array(ids, np.int32), np.arange(len(ids)) >= len(ids) - learnt, "row")


ASKED = [sample([1, 40, 50, 60], 2), sample([1, 41, 51], 1)]


def ask(model: Path | sections.Model, samples: list[Sample], folder: Path) -> torch.Tensor:
    one_rank()
    if isinstance(model, Path):
        model = sections.Model(path=str(model))
    return reference_logprobs(model, samples, folder, 2, "cpu", sections.Train())


def test_its_values_are_the_samples_log_probs(reference: Path, tmp_path: Path) -> None:
    """Asked in batches of two, by length, and given back in the samples' order."""
    asked = [*ASKED, sample([1, 9, 8, 7, 6, 5], 4)]
    found = ask(reference, asked, tmp_path)
    np.testing.assert_allclose(found, alone(reference, asked), atol=1e-5)
    assert torch.equal(ask(reference, asked, tmp_path), found), "from the file"


def test_other_samples_masks_weights_and_types_are_other_questions(loads: list[str], tmp_path: Path) -> None:
    model, folder = save_tiny_policy(tmp_path / "model", seed=8), tmp_path / "cache"
    ask(model, ASKED, folder)
    others = [
        ASKED[::-1],
        ASKED[:1],
        [ASKED[0], sample([1, 41, 52], 1)],
        [ASKED[0], sample([1, 41, 51], 2)],
        [sample([1, 40, 50], 1), sample([60, 1, 41, 51], 1)],  # the same tokens in a row
    ]
    for number, samples in enumerate(others, start=2):
        ask(model, samples, folder)
        assert len(loads) == len(list(folder.iterdir())) == number
    ask(sections.Model(path=str(model), dtype="bfloat16"), ASKED, folder)
    assert len(loads) == len(list(folder.iterdir())) == 7
    before = ask(model, ASKED, folder)
    assert len(loads) == 7
    save_tiny_policy(model, seed=9)  # in the place of the other
    assert not torch.equal(ask(model, ASKED, folder), before)
    assert len(loads) == len(list(folder.iterdir())) == 8


def test_a_kill_while_it_is_written_is_harmless(monkeypatch: pytest.MonkeyPatch, loads: list[str], reference: Path, tmp_path: Path) -> None:
    def killed(tensors: object, path: str) -> None:
        Path(path).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reference_module, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            ask(reference, ASKED, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    np.testing.assert_allclose(ask(reference, ASKED, tmp_path / "cache"), alone(reference, ASKED), atol=1e-5)
    assert len(loads) == 2
    ask(reference, ASKED, tmp_path / "cache")
    assert len(loads) == 2 and [file.suffix for file in (tmp_path / "cache").iterdir()] == [".safetensors"]


@pytest.mark.parametrize("damage", ["cut", "empty", "another size", "not finite"])
def test_a_damaged_cache_is_asked_anew(prepare: Prepare, loads: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str):
    from safetensors.torch import save_file

    settings = {"reference_cache": str(tmp_path / "cache")}
    run_offline(prepare("dpo", PAIRS, **settings))
    first, (file,) = losses(tmp_path / "run"), (tmp_path / "cache").iterdir()
    match damage:
        case "cut":
            file.write_bytes(file.read_bytes()[:-5])
        case "empty":
            file.write_bytes(b"")
        case "another size":
            save_file({"logprobs": torch.zeros(3)}, str(file))
        case "not finite":
            save_file({"logprobs": torch.full((8,), torch.nan)}, str(file))
    run_offline(prepare("dpo", PAIRS, **settings))
    assert losses(tmp_path / "run") == first and len(loads) == 2
    assert "is damaged" in caplog.text and "so the reference is asked anew" in caplog.text


def test_a_reference_that_cannot_be_asked_stops_the_run_before_anything_is_written(
    prepare: Prepare, loads: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    other = save_tiny_policy(tmp_path / "small", vocab_size=100)
    for settings, message in [
        ({"reference": {"path": str(tmp_path / "absent")}}, r"reference.path: .*absent: no such model folder"),
        ({"reference": {"path": str(other)}}, r"reference.path: .* has token \d+, the model has 100 tokens"),
        ({"reference_cache": str(tmp_path / "file")}, r"reference_cache: .*file is a file"),
    ]:
        with pytest.raises(UserError, match=message):
            run_offline(prepare("dpo", PAIRS, overwrite=True, **settings))
    assert not loads and not (tmp_path / "run").exists()


def test_a_single_held_out_row_has_no_kl_term(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    with pytest.raises(UserError, match=r"data.eval_path: an update would have one row"):
        read_task(prepare("kto", PAIRS, data={"eval_path": str(tmp_path / "one.jsonl")}))
