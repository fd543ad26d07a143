"""PPO-ptx on one rank: a supervised loss is added to an update's gradient, just before its optimizer step.

    γ · mean over the update's mixed-in tokens of −log π        (Ouyang et al. 2022, eq. 2)

The optimizer step divides the gradient by the policy loss's denominator, so the sum is multiplied by it here; both are known by then.
"""

from __future__ import annotations

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.config import OnlineRecipe
from conveyor.data.mixture import Mixture
from conveyor.data.tokenizer import load_tokenizer
from conveyor.models.sample_logprobs import completion_logprobs
from conveyor.models.train_engine import TrainEngine


class Mixing:
    """Adds the supervised gradient of one update at a time."""

    def __init__(self, recipe: OnlineRecipe, rank: int, world_size: int) -> None:
        assert recipe.ptx is not None
        tokenizer = load_tokenizer(recipe.model)
        self._mixture, self._coef = Mixture.read(recipe, tokenizer), recipe.ptx.coef
        self._rank, self._world_size = rank, world_size
        self._at_once = max(1, recipe.pipeline.micro_batch_size // world_size)

    def add(self, engine: TrainEngine, denominator: int) -> Metrics:
        """The last `backward` calls of the update. `denominator`: of the policy loss, over all ranks.

        Every rank makes the same number of passes; one that has no rows left runs a row whose loss counts 0.
        """
        rows = self._mixture.rows(engine.updates)
        tokens = sum(row.loss_tokens for row in rows)
        factor = self._coef * denominator / tokens
        total, count = 0.0, 0
        starts = range(0, -(-len(rows) // self._world_size), self._at_once)
        for first in starts:
            share = rows[self._rank :: self._world_size][first : first + self._at_once]
            logprobs, _ = engine.forward(completion_logprobs, share or rows[:1])
            loss = -logprobs.sum()
            engine.backward(factor * loss if share else 0.0 * loss, last=first == starts[-1])
            if share:
                total, count = total + loss.item(), count + logprobs.numel()
        return {"loss/ptx": Mean(total, count)}
