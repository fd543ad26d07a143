"""Mixtures of experts in methods that train on rows: the same on one rank and on two, which send their tokens to other experts."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from deepspeed.utils import z3_leaf_module
from peft import PeftModel
from safetensors.torch import load_file
from torch import distributed as dist
from transformers import AutoModelForCausalLM

from conveyor.config import OfflineRecipe, parse_recipe, sections
from conveyor.config.sections import Lora
from conveyor.models.language_model import load_language_model
from conveyor.models.routing import expert_blocks
from conveyor.models.train_engine import TrainEngine
from conveyor.models.zero import loading
from conveyor.offline.run import read_task
from conveyor.run_folder import RunFolder
from conveyor.workers.fit import fit_here
from tests.models.ranks import one_rank, spawn
from tests.offline.conftest import first_updates, same
from tests.tiny import save_tiny_moe, tiny_tokenizer

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "three"},
    {"prompt": "name a colour", "chosen": "red", "rejected": "7"},
    {"prompt": "?", "chosen": "yes indeed", "rejected": "no"},
    {"prompt": "say it twice", "chosen": "it it", "rejected": "it it it it"},
    {"prompt": "end", "chosen": ".", "rejected": "!"},
]
DEMONSTRATIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
SFT: dict[str, Any] = {"method": "sft"}
DPO: dict[str, Any] = {"method": "dpo", "dpo": {"beta": 0.4}}
CASES: dict[str, tuple[str, list[dict], dict[str, Any], dict[str, Any]]] = {
    "sft, ZeRO-3": ("qwen3_moe", DEMONSTRATIONS, SFT, {"zero_stage": 3}),
    "sft of a mixtral, ZeRO-3": ("mixtral", DEMONSTRATIONS, SFT, {"zero_stage": 3}),
    "sft, rows cut over ranks": ("qwen3_moe", DEMONSTRATIONS, SFT, {"sequence_parallel_size": 2}),
    "dpo, ZeRO-1": ("mixtral", PAIRS, DPO, {"zero_stage": 1}),
    "dpo, ZeRO-3": ("qwen3_moe", PAIRS, DPO, {"zero_stage": 3}),
}
"""Kind, rows, settings, and those of two ranks. Five items in micro-batches of two leave rank 1 without one in the last."""


def prepared(name: str, folder: Path, ranks: int) -> OfflineRecipe:
    kind, rows, settings, of_two = CASES[name]
    file, policy = folder / f"{settings['method']}.jsonl", folder / kind
    if ranks == 1:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = parse_recipe(
        dict(
            output_dir=str(folder / f"{name} on {ranks}"), devices={"train": ranks},
            model={"path": str(policy), "gradient_checkpointing": ranks > 1},
            data={"path": str(file), "shuffle": False, "packing": False},
            train={"train_batch_size": 5, "micro_batch_size": 2, "epochs": 2, "learning_rate": 1e-3, "router_aux_loss_coef": 0.3,
                   **(of_two if ranks > 1 else {})},
            **settings, **({"reference": {"path": str(folder / "reference")}} if settings is DPO else {}),
        )
    )  # fmt: skip
    assert isinstance(recipe, OfflineRecipe)
    return recipe


def on_two(rank: int, ranks: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found = {name: first_updates(prepared(name, folder, ranks), 2)[0] for name in CASES}
    if rank == 0:
        torch.save(found, folder / "found.pt")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for kind in ("qwen3_moe", "mixtral"):
        save_tiny_moe(tmp_path / kind, kind)
    save_tiny_moe(tmp_path / "reference", seed=4)
    return tmp_path


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one(models: Path) -> None:
    """Losses, loads, whole gradients, of two updates; the balance loss is in the gradient, and activations are recomputed."""
    one_rank()
    wanted = {name: first_updates(prepared(name, models, 1), 2)[0] for name in CASES}
    spawn(on_two, 2, models)
    found = torch.load(models / "found.pt", weights_only=False)
    for name, updates in wanted.items():
        for one, two in zip(updates, found[name], strict=True):
            assert one.row.keys() == two.row.keys() >= {"moe/aux_loss", "moe/expert_load_max", "moe/expert_load_min"}
            for key in one.row.keys() - {"time/step", "tokens_per_second"}:
                assert two.row[key] == pytest.approx(one.row[key], rel=2e-5, abs=1e-5), (name, key)
            same(two, one.loss, one.gradient)


def test_an_update_of_sft_equals_one_made_with_transformers(models: Path) -> None:
    """Σ −log p + 0.3 · Σ_samples (its tokens in the loss) · (its balance), over the tokens in the loss."""
    one_rank()
    (update,), task = first_updates(prepared("sft, ZeRO-3", models, 1))
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3_moe")
    total, tokens, weighted = torch.zeros(()), 0, 0.0
    for sample in task.samples:
        ids, learnt = torch.from_numpy(sample.ids).long()[None], torch.from_numpy(sample.mask[1:])
        outputs = model(ids, output_router_logits=True)
        logprobs = outputs.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        balances = []
        for logits in outputs.router_logits:
            probabilities = logits.softmax(-1)
            counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=8)
            balances.append(8 / (2 * len(logits)) * counts @ probabilities.mean(0))
        balance = torch.stack(balances).mean()
        total = total - logprobs[learnt].sum() + 0.3 * learnt.sum() * balance
        tokens, weighted = tokens + int(learnt.sum()), weighted + float(learnt.sum() * balance.detach())
    (total / tokens).backward()
    gradient = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert update.row["moe/aux_loss"] == pytest.approx(weighted / tokens, rel=1e-5)
    same(update, update.loss, gradient)


def test_adapters_go_into_attention_and_merge(models: Path) -> None:
    one_rank()
    recipe = prepared("sft, ZeRO-3", models, 1)
    recipe = recipe.model_copy(update={"lora": Lora(rank=2), "train": recipe.train.model_copy(update={"epochs": 1})})
    task, held_out, tokenizer = read_task(recipe)
    (row,) = fit_here((recipe, task, held_out, tokenizer, 0))
    assert row["moe/aux_loss"] > 0
    folder = RunFolder(recipe.output_dir)
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in load_file(folder.adapter / "adapter_model.safetensors")} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    ids = torch.arange(5, 25)[None]
    base = AutoModelForCausalLM.from_pretrained(models / "qwen3_moe")
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(folder.adapter))(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(folder.model)(ids).logits
    assert (adapted - plain).abs().max() > 1e-3
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=1e-5)


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_saved_models_load_with_equal_outputs(models: Path, kind: str, stage: Literal[0, 3]) -> None:
    """Under the names that checkpoints have, which vLLM loads too. ZeRO-3 gathers blocks of experts as a whole."""
    one_rank()
    train, ids = sections.Train(zero_stage=stage), torch.arange(5, 25)[None]
    with loading(train, "float32", "cpu"):
        model = load_language_model(sections.Model(path=str(models / kind)))
    engine = TrainEngine(model, train, learning_rate=0.1, total_updates=1, dtype="float32", accelerator="cpu")
    assert len(expert_blocks(model)) == 2 and all(map(z3_leaf_module, expert_blocks(model)))
    before = engine.forward(logits_of, ids)
    engine.backward(before.log_softmax(-1)[..., 7].sum(), last=True)
    engine.step(1)
    engine.save_pretrained(models / "saved", tiny_tokenizer())
    after = AutoModelForCausalLM.from_pretrained(models / "saved")(ids).logits
    assert torch.equal(after, engine.forward(logits_of, ids)) and not torch.allclose(after, before, atol=1e-2)
    assert load_file(models / "saved" / "model.safetensors").keys() == load_file(models / kind / "model.safetensors").keys()
