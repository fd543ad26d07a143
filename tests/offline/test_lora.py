"""Runs that train an adapter: what they leave behind, what they freeze, that they resume."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from conveyor.config import UserError
from conveyor.models.language_model import load_language_model
from conveyor.offline import fit as fit_module
from conveyor.offline import reference as reference_module
from conveyor.offline.run import check_offline, read_task, run_offline
from conveyor.report.progress import read_metrics
from conveyor.run_folder import RunFolder
from conveyor.workers.fit import fit_here
from tests.offline.conftest import Prepare, Updates

PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in [("1+1=", "2", "three"), ("a colour", "red", "7"), ("?", "yes indeed", "no"), ("end", ".", "!")]
]
SUPERVISED = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
SOLUTIONS = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]], "labels": [True, False]} for row in PAIRS]
ROWS = {"sft": SUPERVISED, "dpo": PAIRS, "kto": PAIRS, "reward_model": PAIRS, "process_reward_model": SOLUTIONS}
LORA = {"rank": 4, "alpha": 8}
IDS = torch.tensor([[1, 40, 50, 60, 70, 80]])


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(IDS).logits


@pytest.mark.parametrize("method", ROWS)
def test_the_model_is_base_and_adapter_merged(prepare: Prepare, policy: Path, tmp_path: Path, method: str) -> None:
    run_offline(prepare(method, ROWS[method], train={"steps": 4, "learning_rate": 1e-2}, lora=LORA))
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    scalar = method.endswith("reward_model")
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    base = kind.from_pretrained(policy, **({"num_labels": 1} if scalar else {}))
    model = kind.from_pretrained(tmp_path / "run/model")
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, base.state_dict()[name])}
    assert {name.split(".")[-2].removesuffix("_proj") for name in changed} - {"score"} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert ("score.weight" in changed) == scalar, "the head is trained and saved"
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "run/adapter")
    torch.testing.assert_close(logits(model), logits(with_adapter), atol=1e-5, rtol=1e-5)


def test_the_base_is_frozen_to_the_last_bit(prepare: Prepare, updates: Updates, policy: Path) -> None:
    steps, _ = updates(prepare("dpo", PAIRS, train={"steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1}, lora=LORA), 4)
    base = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    kept = steps[-1].weights
    frozen = {name: weight for name, weight in kept.items() if ".lora_" not in name}
    assert len(frozen) == len(base)
    assert all(torch.equal(weight, base[name.replace(".base_layer.", ".")]) for name, weight in frozen.items())
    assert all(".lora_" in name for name in steps[-1].gradient)
    assert any(kept[name].abs().max() > 0 for name in kept if ".lora_B" in name)


@pytest.mark.parametrize(("method", "quantization"), [("dpo", None), ("kto", None), ("bco", None), ("dpo", "nf4")])
def test_the_reference_is_the_model_with_its_adapter_off(
    prepare: Prepare, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, quantization: str | None
) -> None:
    """None is loaded, and what is kept on disk is what a loaded one says, bit by bit."""
    train = {"steps": 2, "learning_rate": 1e-2}
    rows = PAIRS if method == "dpo" else [{**row, "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(PAIRS)]
    if quantization is None:
        run_offline(prepare(method, rows, train=train, reference_cache=str(tmp_path / "loaded")))
    monkeypatch.setattr(reference_module, "_load", None)
    lora = LORA | {"quantization": quantization}
    made = prepare(method, rows, train=train, lora=lora, reference_cache=str(tmp_path / "off"), overwrite=True)
    run_offline(made)
    (off,) = (tmp_path / "off").iterdir()
    if quantization is None:
        (loaded,) = (tmp_path / "loaded").iterdir()
        assert off.name == loaded.name and torch.equal(load_file(off)["logprobs"], load_file(loaded)["logprobs"])
        return
    base = load_language_model(made.model, made.lora)
    first = read_task(made)[0].samples[0]
    ids, mask = torch.tensor(first.ids)[None], torch.tensor(first.mask)[1:]
    with torch.no_grad():
        logprobs = base(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    distances = (load_file(off)["logprobs"] - logprobs[mask.bool()].sum()).abs()
    assert distances.min() < 1e-5, "of the values in 4 bits"
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "run/adapter")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")), logits(with_adapter), atol=1e-5, rtol=1e-5
    )


@pytest.mark.slow
def test_zero_3_on_one_rank_is_the_same(prepare: Prepare, policy: Path, tmp_path: Path) -> None:
    settings = {"steps": 3, "learning_rate": 1e-2}
    run_offline(prepare("dpo", PAIRS, train=settings, lora=LORA))
    plain, plain_rows = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model"), read_metrics(tmp_path / "run/metrics.jsonl")
    run_offline(prepare("dpo", PAIRS, train=settings | {"zero_stage": 3}, lora=LORA))
    parted, rows = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model"), read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in plain_rows], abs=1e-5)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(parted.state_dict()[name], weight, atol=1e-5, rtol=1e-5)
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy), tmp_path / "run/adapter")
    torch.testing.assert_close(logits(with_adapter), logits(parted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_is_one_that_never_stopped(prepare: Prepare, tmp_path: Path, zero_stage: int) -> None:
    """A checkpoint has the adapter and its optimizer; the reward model's head too."""
    recipe = prepare(
        "reward_model", PAIRS, lora=LORA, checkpoint={"every": 1, "keep": 9, "resume": True},
        train={"steps": 4, "learning_rate": 1e-2, "zero_stage": zero_stage},
    )  # fmt: skip
    work = read_task(recipe)
    folder = RunFolder.open(recipe)
    whole = [row["loss"] for row in fit_here((recipe, *work, 0))]
    weights = AutoModelForSequenceClassification.from_pretrained(folder.model).state_dict()
    assert [row["loss"] for row in fit_here((recipe, *work, 2))] == whole[2:]
    again = AutoModelForSequenceClassification.from_pretrained(folder.model).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_unknown_target_modules_are_one_line_before_a_model_is_loaded(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "TrainEngine", None)
    for act in (check_offline, run_offline):
        with pytest.raises(UserError, match=r"lora.target_modules: no linear layer is named qproj; the model has down_proj, ") as caught:
            act(prepare("reward_model", PAIRS, lora=LORA | {"target_modules": ["qproj"]}))
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
