"""Mixtures of experts in training: what the routers choose is seen, balanced, and replayed.

    tokens ──▶ layer ──▶ router ──▶ logits [N, E], weights [N, K], experts [N, K] ──▶ experts ──▶ layer …
                           │  ▲
                 recorded  ▼  │ replayed: the experts that the engine chose, weighted by the router as it is now
                        Routing

Hooks on the router modules serve all of it: they work in packed rows, with activations recomputed (the recomputation runs the hooks
again, when nothing is recorded, and replays the same experts), and inside the blocks that ZeRO-3 gathers as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conveyor.algorithms.expert_balance import RouterSums, Statistic, router_sums, weighted_balance
from conveyor.algorithms.metrics import Load, Mean, Metrics
from conveyor.errors import UserError
from conveyor.models.sequence_parallel import SequenceParallel
from conveyor.types import Tokens

if TYPE_CHECKING:
    from conveyor.config import sections


@dataclass(frozen=True, slots=True)
class Gating:
    """How a router makes weights of its logits."""

    softmax: bool
    """Over all experts; else the sigmoid of each."""
    renormalized: bool
    """The chosen experts' weights add up to `scale`."""
    scale: float

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32 [N, E] that add up to 1 for each token."""
        scores = self._scores(logits)
        return scores if self.softmax else scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """float32 [N, K]: of these experts, int64 [N, K]."""
        chosen = self._scores(logits).gather(-1, experts)
        if self.renormalized:
            chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-20)
        return chosen if self.scale == 1 else chosen * self.scale

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1) if self.softmax else logits.float().sigmoid()


class Routing:
    """The routers of one model. `read_states` has them watched; after it, `balance` tells of that pass.

    Args:
        train: None: nothing is recorded.
        replays: tokens that come with experts go to these.
    """

    def __init__(
        self, model: PreTrainedModel, routers: Sequence[tuple[int, nn.Module]], train: sections.Train | None, replays: bool
    ) -> None:
        self.coef = (train.router_aux_loss_coef or 0.0) if train is not None else 0.0
        self._statistic: Statistic = train.router_aux_loss if train is not None else "sequence"
        self._records, self._replays = train is not None, replays
        self.gating = gating_of(type(routers[0][1]), model.config.get_text_config())
        if self.coef and self.gating is None:
            raise UserError(f"train.router_aux_loss_coef: how routers of {model.config.model_type} models weigh experts is not known")
        if replays and self.gating is None:
            raise UserError(f"rollout.routing_replay: how routers of {model.config.model_type} models weigh experts is not known")
        self._replayed: Tensor | None = None
        self._open = False
        self._lengths, self._owners = torch.zeros(0), torch.zeros(0)
        self._parallel: SequenceParallel | None = None
        self._seen: list[tuple[Tensor | None, Tensor]] = []
        """Of each layer in turn, the logits [N, E], where a loss is made of them, and the experts [N, K]."""
        self._count = 0
        """E"""
        for layer, router in routers:
            router.register_forward_hook(_Hook(self, layer))

    @property
    def samples(self) -> int:
        """B of the pass that was watched last."""
        return len(self._lengths)

    @contextmanager
    def watched(self, tokens: Tokens, first: int, places: int, parallel: SequenceParallel | None) -> Iterator[None]:
        """The pass that is made inside is recorded, and replayed where the tokens come with experts.

        Args:
            tokens: of the whole pass; this rank computes `places` of its places, from `first` on.
        """
        owners = token_owners(tokens)
        mine = slice(first, first + places)
        self._owners, self._lengths, self._parallel = _padded(owners[mine], places), tokens.lengths, parallel
        told = tokens.experts if self._replays else None
        self._replayed = None if told is None else _padded(told[mine], places)  # stays until the next pass, for the recomputation
        self._seen, self._open = [], self._records
        try:
            yield
        finally:
            self._open = False

    def routed(self, layer: int, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """A router's logits [N, E], weights [N, K] and experts [N, K], with the experts replaced by those that are replayed."""
        logits, weights, experts = output
        if self._replayed is not None:
            assert self.gating is not None
            given = self._replayed[:, layer].to(experts.dtype)
            experts = torch.where(given >= 0, given, experts)
            weights = self.gating.weights(logits, experts).to(weights.dtype)
        if self._open:  # nothing is computed here: a recomputation would have to do the same
            self._seen.append((logits if self.coef else None, experts.detach()))
            self._count = logits.shape[1]
        return logits, weights, experts

    def balance(self, weights: Tensor) -> tuple[Tensor | None, Metrics]:
        """The auxiliary loss of the pass that was watched last, times its coefficient, as a sum; None: it is off. And what to log.

        Args:
            weights: float32 [B]: each sample's part of the denominator that the loss is divided by.
        """
        layers, self._seen = [self._over_ranks(self._sums(*seen)) for seen in self._seen], []
        counts = tuple(tuple(map(int, sums.chosen.sum(0).tolist())) for sums in layers)
        metrics: Metrics = {"moe/expert_load_max": Load(counts, "max"), "moe/expert_load_min": Load(counts, "min")}
        if not self.coef:
            return None, metrics
        weights = weights.to(self._lengths.device)
        total = weighted_balance(layers, self._lengths, weights, self._statistic)
        return self.coef * total, metrics | {"moe/aux_loss": Mean(total.item(), float(weights.sum()))}

    def _sums(self, logits: Tensor | None, experts: Tensor) -> RouterSums:
        if logits is None:
            probabilities = torch.zeros(len(experts), self._count, device=experts.device)
        else:
            assert self.gating is not None
            probabilities = self.gating.probabilities(logits)
        return router_sums(probabilities, experts, self._owners, len(self._lengths))

    def _over_ranks(self, sums: RouterSums) -> RouterSums:
        """Of whole samples, where ranks have parts of them. The gradient is that of this rank's tokens."""
        if self._parallel is None:
            return sums
        samples, experts = sums.chosen.shape
        everywhere = torch.arange(samples * experts, device=sums.chosen.device)
        chosen, probability = (
            self._parallel.gather(values.flatten(), everywhere, len(everywhere)).view(samples, experts)
            for values in (sums.chosen, sums.probability)
        )
        return RouterSums(chosen, probability)


class _Hook:
    """One router's."""

    def __init__(self, routing: Routing, layer: int) -> None:
        self._routing, self._layer = routing, layer

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return self._routing.routed(self._layer, output)


def watch(model: PreTrainedModel, train: sections.Train | None, replays: bool = False) -> None:
    """Give a mixture of experts its `Routing`; a model without experts stays as it is. Before its weights are partitioned.

    Args:
        train: settings of its training; None: it is not trained.
        replays: its tokens will come with experts.

    Raises:
        UserError: a setting asks for routers, and the model has none that are known.
    """
    routers, kind = find_routers(model), model.config.model_type
    asked = "rollout.routing_replay" if replays else "train.router_aux_loss_coef" if train and train.router_aux_loss_coef else None
    if asked and not routers:
        raise UserError(f"{asked}: a {kind} model has no routers of experts that are known here")
    if routers and (train is not None or replays):
        vars(model)["routing"] = Routing(model, routers, train, replays)


def check_routers(config: PretrainedConfig, train: sections.Train, replays: bool = False) -> None:
    """What `watch` raises of a language model of this config, without its weights."""
    if train.router_aux_loss_coef or replays:
        with torch.device("meta"):
            watch(AutoModelForCausalLM.from_config(config), train, replays)


def routing_of(model: PreTrainedModel) -> Routing | None:
    """What `watch` gave a model."""
    return vars(model).get("routing")


def find_routers(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """(layer, router) of a model whose routers give logits, weights and experts, as most of transformers' do; empty: of any other."""
    backbone: Any = getattr(model, "base_model", None)
    recorder: Any = (getattr(backbone, "_can_record_outputs", None) or {}).get("router_logits")
    if not hasattr(recorder, "target_class") or recorder.index != 0:
        return []
    found = [(name, module) for name, module in backbone.named_modules() if isinstance(module, recorder.target_class)]
    layers = [re.search(r"layers\.(\d+)\.", name) for name, _ in found]
    return [(int(layer[1]), module) for layer, (_, module) in zip(layers, found, strict=True) if layer is not None]


def expert_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a router and its experts."""
    routers = {id(router) for _, router in find_routers(model)}
    return [module for module in model.modules() if any(id(child) in routers for child in module.children())]


def token_owners(tokens: Tokens) -> Tensor:
    """int64 [rows · W]: the sample of the token at each place, −1 for padding."""
    owners = torch.full_like(tokens.input_ids.flatten(), -1)
    numbers = torch.arange(len(tokens.lengths), device=owners.device).repeat_interleave(tokens.lengths)
    before = (tokens.lengths.cumsum(0) - tokens.lengths).repeat_interleave(tokens.lengths)
    inside = torch.arange(len(numbers), device=owners.device) - before
    return owners.index_copy(0, tokens.starts[numbers] + inside, numbers)


def place_experts(tokens: Tokens, experts: Sequence[Tensor | None]) -> Tensor | None:
    """int16 [rows · W, L, K]: each sample's experts [≤ T, L, K] at its places, −1 where none are given; None: no sample has any."""
    known = [found for found in experts if found is not None]
    if not known:
        return None
    placed = torch.full((tokens.input_ids.numel(), *known[0].shape[1:]), -1, dtype=torch.int16)
    for start, found in zip(tokens.starts.tolist(), experts, strict=True):
        if found is not None:
            placed[start : start + len(found)] = found.to(torch.int16)
    return placed


def _padded(values: Tensor, places: int) -> Tensor:
    """[places, …]: followed by −1 where a row was filled up to be cut over ranks."""
    return torch.cat((values, values.new_full((places - len(values), *values.shape[1:]), -1)))


@torch.no_grad()
def gating_of(router_class: Callable[[Any], nn.Module], config: PretrainedConfig) -> Gating | None:
    """How routers of this class weigh experts, found by asking one of random weights; None: in no known way."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        router: Any = router_class(config).eval().float()
        nn.init.normal_(router.weight)
        output = router(torch.randn(16, router.weight.shape[-1]))
    if not (isinstance(output, tuple) and len(output) == 3 and output[1].shape == output[2].shape):
        return None
    logits, weights, experts = output
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    for candidate in (Gating(softmax, renormalized, scale) for softmax in (True, False) for renormalized in (True, False)):
        if torch.allclose(candidate.weights(logits, experts), weights.float(), rtol=1e-4, atol=1e-6):
            return candidate
    return None
