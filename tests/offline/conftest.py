"""Recipes of one update over tiny models, and that update's gradient."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conveyor.config import OfflineRecipe, parse_recipe
from conveyor.data.samples import Sample
from conveyor.models.train_engine import TrainEngine
from conveyor.offline import fit as fit_module
from conveyor.offline.run import read_task
from conveyor.offline.task import Task
from conveyor.workers.fit import fit_here
from conveyor.workers.reports import StepReport
from tests.tiny import save_tiny_policy, save_tiny_reward_model

WIDE = {"initializer_range": 0.08}
"""Weights large enough for policy and reference to disagree by several nats a completion."""


EVEN = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in [
        ("2+3=", "5", "6"), ("sky", "blue", "grey"), ("up?", "up", "no"), ("?", "yes", "nay"), ("a b", "c d", "x y"), ("end", ".", "!"),
    ]
]  # fmt: skip
"""Pairs whose sides are of one length, so that policy and reference put them in different orders; else lengths decide."""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("offline") / "policy", seed=3, **WIDE)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("offline") / "reference", seed=4, **WIDE)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("offline") / "classifier", seed=5, **WIDE)


Prepare = Callable[..., OfflineRecipe]


@pytest.fixture
def prepare(tmp_path: Path, policy: Path) -> Prepare:
    """(method, rows, data=…, train=…, further sections) → a recipe without shuffling, of one update an epoch."""

    def make(method: str, rows: list[dict], data: dict | None = None, train: dict | None = None, **settings: Any) -> OfflineRecipe:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        raw: dict[str, Any] = dict(
            method=method,
            output_dir=str(tmp_path / "run"),
            overwrite=not settings.get("checkpoint", {}).get("resume"),
            model={"path": str(policy)},
            data={"path": str(file), "max_length": 64, "shuffle": False, **(data or {})},
            train={"train_batch_size": 2 * len(rows), "micro_batch_size": 2, "learning_rate": 1e-3, **(train or {})},
        )
        recipe = parse_recipe(raw | settings)
        assert isinstance(recipe, OfflineRecipe)
        return recipe

    return make


@dataclass(frozen=True)
class Update:
    row: dict[str, float]
    gradient: dict[str, Tensor]
    """Name → of the update's loss, before clipping."""
    weights: dict[str, Tensor]
    """Before the update."""

    @property
    def loss(self) -> float:
        return self.row["loss"]


class _Watched(TrainEngine):
    seen: ClassVar[list[tuple[dict[str, Tensor], dict[str, Tensor]]]]

    def step(self, denominator: float) -> StepReport:
        weights = {name: weight.clone() for name, weight in self.named_weights()}
        self.seen.append((dict(self.gradient(denominator)), weights))
        return super().step(denominator)


def first_updates(recipe: OfflineRecipe, count: int = 1) -> tuple[list[Update], Task]:
    """The first updates of a recipe's run on this rank, which then ends, and the task."""
    _Watched.seen = []
    fit_module.TrainEngine = _Watched  # type: ignore[misc]
    try:
        task, held_out, tokenizer = read_task(recipe)
        run = fit_here((recipe, task, held_out, tokenizer, 0))
        rows: list[Any] = [next(run) for _ in range(count)]
        run.close()
    finally:
        fit_module.TrainEngine = TrainEngine  # type: ignore[misc]
    return [Update(row, *kept) for row, kept in zip(rows, _Watched.seen, strict=True)], task


Updates = Callable[..., tuple[list[Update], Task]]


@pytest.fixture
def updates() -> Updates:
    return first_updates


@torch.no_grad()
def alone(model: Path | torch.nn.Module, samples: Iterable[Sample]) -> list[float]:
    """log π of each sample's learnt tokens, from the full logits of transformers' own model, one sample at a time."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model)
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.ids).long()
        logprobs = model(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(float(logprobs[torch.from_numpy(sample.mask[1:])].sum()))
    return found


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def same(update: Update, loss: float, gradient: dict[str, Tensor], within: float = 1e-5) -> None:
    """Loss and whole gradient, `within` of their own size where that is more than 1."""
    assert update.loss == pytest.approx(loss, abs=within, rel=within)
    assert update.gradient.keys() == gradient.keys()
    ours, theirs = flat(update.gradient), flat(gradient)
    assert theirs.abs().max() > 1e-3
    assert (ours - theirs).abs().max() <= within * max(1.0, float(theirs.abs().max()))
