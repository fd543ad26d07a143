"""The order in which a run takes its data: a pure function of (seed, epoch), so a resumed run needs no state of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conveyor.config import UserError


class EpochOrder:
    """Which of `size` items step s takes.

    Every epoch holds every item once, shuffled anew from (seed, epoch) alone. An epoch's remainder is a short last step, or is left
    out with `drop_last`; it never joins the next epoch. With `steps` the run has exactly that many, over as many epochs
    as they need; else as many as `epochs` give.

    Example: 10 items, batches of 4 → steps of 4, 4, 2; with `drop_last` 4, 4.
    """

    def __init__(
        self, size: int, batch_size: int, *, epochs: int = 1, steps: int | None = None, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False,
    ) -> None:  # fmt: skip
        if drop_last and size < batch_size:
            raise UserError(f"data.drop_last: {size} rows do not fill one batch of {batch_size}, so nothing would be trained")
        assert size > 0 and batch_size > 0
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.steps_per_epoch = size // batch_size if drop_last else -(-size // batch_size)
        self.items_per_epoch = self.steps_per_epoch * batch_size if drop_last else size
        self._steps = steps if steps is not None else epochs * self.steps_per_epoch
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Steps of the run."""
        return self._steps

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.steps_per_epoch == 0

    def first_index(self, step: int) -> int:
        """How many items the steps before this one took."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.items_per_epoch + within * self.batch_size

    def item(self, index: int) -> int:
        """The item at a place of the run's order, also beyond the run's last step."""
        epoch, within = divmod(index, self.items_per_epoch)
        return int(self._permutation(epoch)[within])

    def items(self, step: int) -> list[int]:
        """Which items (0 … size − 1) a step takes, in order."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        return self._permutation(epoch)[start : start + self.batch_size].tolist()

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.size)
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = (epoch, np.random.default_rng([self.seed % 2**63, epoch]).permutation(self.size))
        return self._shuffled[1]
