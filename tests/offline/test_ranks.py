"""One update is the same on one rank and on two, whatever a method needs of the whole of it; cases 1 and 16."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.config import OfflineRecipe, parse_recipe, sections
from conveyor.data.samples import Sample
from conveyor.models.train_engine import TrainEngine
from conveyor.offline.fit import Trainer
from conveyor.offline.task import Task
from tests.models.ranks import one_rank, spawn
from tests.offline.conftest import EVEN, first_updates, same

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "three"},
    {"prompt": "name a colour", "chosen": "red", "rejected": "7"},
    {"prompt": "?", "chosen": "yes indeed", "rejected": "no"},
    {"prompt": "say it twice", "chosen": "it it", "rejected": "it it it it"},
    {"prompt": "end", "chosen": ".", "rejected": "!"},
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[("rejected", "chosen")[i % 2]], "label": bool(i % 2)} for i, row in enumerate(PAIRS)
]
SOLUTIONS = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]], "labels": [1, 0]} for row in PAIRS]
DPO: dict[str, Any] = {"method": "dpo", "dpo": {"beta": 0.4, "nll_coef": 0.5}}
AOT: dict[str, Any] = {"method": "dpo", "dpo": {"loss": "aot", "beta": 0.4}}
CUT: dict[str, Any] = {"train": {"sequence_parallel_size": 2}}
BY_TOKENS: dict[str, Any] = {"train": {"max_tokens_per_micro_batch": 80}, "data": {"max_length": 40}}
CASES: dict[str, tuple[list[dict], dict[str, Any], int]] = {
    "dpo": (PAIRS, DPO, 0),
    "dpo, ZeRO-1": (PAIRS, DPO, 1),
    "dpo, ZeRO-2": (PAIRS, DPO, 2),
    "dpo, ZeRO-3": (PAIRS, DPO, 3),
    "dpo, ZeRO-3, LoRA": (PAIRS, DPO | {"lora": {"rank": 4}}, 3),
    "aot": (EVEN[:5], AOT, 0),
    "kto": (LABELLED, {"method": "kto", "kto": {"beta": 0.4}}, 0),
    "bco": (LABELLED, {"method": "bco", "bco": {"beta": 0.4}}, 0),
    "process_reward_model": (SOLUTIONS, {"method": "process_reward_model"}, 2),
    "dpo by tokens": (PAIRS, DPO | BY_TOKENS, 1),
    "dpo, rows cut over ranks": (PAIRS, DPO | CUT, 0),
    "aot, rows cut over ranks": (EVEN[:5], AOT | CUT, 2),
    "sft, rows cut over ranks": (LABELLED, {"method": "sft"} | CUT, 3),
    "reward_model, rows cut over ranks": (PAIRS, {"method": "reward_model"} | CUT, 3),
}
"""Rows, settings and ZeRO stage. Five items in micro-batches of two leave rank 1 without one in the last. On one rank with padding."""
REFERENCE_FREE_METHODS = ("process_reward_model", "sft", "reward_model")


def prepared(name: str, folder: Path, ranks: int, policy: Path, reference: Path) -> OfflineRecipe:
    rows, settings, stage = CASES[name]
    file = folder / f"{name}.jsonl"
    if ranks == 1:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(settings)
    train, data = settings.pop("train", {}), settings.pop("data", {})
    recipe = parse_recipe(
        dict(
            output_dir=str(folder / f"{name} on {ranks}"), devices={"train": ranks},
            model={"path": str(policy), "remove_padding": ranks > 1},
            data={"path": str(file), "shuffle": False, "packing": False, **data},
            train={"train_batch_size": 5, "micro_batch_size": 2, "epochs": 2, "learning_rate": 1e-3,
                   **({"zero_stage": stage, **train} if ranks > 1 else {})},
            **settings, **({} if settings["method"] in REFERENCE_FREE_METHODS else {"reference": {"path": str(reference)}}),
        )
    )  # fmt: skip
    assert isinstance(recipe, OfflineRecipe)
    return recipe


def on_two(rank: int, ranks: int, port: int, folder: Path, policy: Path, reference: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found = {name: first_updates(prepared(name, folder, ranks, policy, reference), 2)[0] for name in CASES}
    toy = case_1(micro_batch_size=2)
    if rank == 0:
        torch.save((found, toy), folder / "found.pt")


# ── case 1 to the letter ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Given(Task):
    """Items are lists of token losses, times the model's one weight, which is 1."""

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> "Given":
        raise AssertionError

    @property
    def samples(self) -> Iterable[Sample]:
        return ()

    def denominator(self, numbers: Sequence[int]) -> int:
        return sum(len(self.items[number]) for number in numbers)

    def tokens(self, number: int) -> int:
        return len(self.items[number])

    def outputs(self, model: Any, numbers: Sequence[int]) -> Tensor:
        return model.weight * torch.tensor([loss for number in numbers for loss in self.items[number]])

    def loss(self, outputs: Tensor, numbers: Sequence[int], context: Any) -> tuple[Tensor, Metrics]:
        return outputs.sum(), {"loss": Mean(outputs.sum().item(), len(outputs))}


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


def case_1(micro_batch_size: int) -> tuple[float, float, float]:
    """(loss, gradient of the one weight, held-out loss) of token losses 1, 1, 1, 1 and 5."""
    train = sections.Train(max_grad_norm=1e9, micro_batch_size=micro_batch_size)
    engine = TrainEngine(One(), train, learning_rate=0.1, total_updates=1, dtype="float32", accelerator="cpu")
    task = Given(None, [[1.0, 1.0, 1.0, 1.0], [5.0]])  # type: ignore[arg-type]
    trainer = Trainer(engine, train)
    held_out = trainer.evaluate(task)["loss"]
    row = trainer.update(task, [0, 1])
    return row["loss"], row["grad_norm"], held_out


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_case_1_the_mean_is_over_the_tokens_of_the_update(micro_batch_size: int) -> None:
    one_rank()
    assert case_1(micro_batch_size) == pytest.approx((1.8, 1.8, 1.8))


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one(policy: Path, reference: Path, tmp_path: Path) -> None:
    """Losses, whole gradients and all metrics that no clock decides, of two updates."""
    one_rank()
    wanted = {name: first_updates(prepared(name, tmp_path, 1, policy, reference), 2)[0] for name in CASES}
    spawn(on_two, 2, tmp_path, policy, reference)
    found, toy = torch.load(tmp_path / "found.pt", weights_only=False)
    assert toy == pytest.approx((1.8, 1.8, 1.8)), "case 1 over two ranks, an item each"
    for name, updates in wanted.items():
        for one, two in zip(updates, found[name], strict=True):
            assert one.row.keys() == two.row.keys()
            for key in one.row.keys() - {"time/step", "tokens_per_second"}:
                assert two.row[key] == pytest.approx(one.row[key], rel=2e-5, abs=1e-5), (name, key)
            assert one.row["samples"] == 5, "case 16: all five, once"
            same(two, one.loss, one.gradient)
