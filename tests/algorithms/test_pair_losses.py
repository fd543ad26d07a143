"""Losses of pairs: hand-computed values, TRL's own code, finite extremes, and aot's quantiles over micro-batches."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.algorithms.metrics import Mean
from conveyor.algorithms.pair_losses import QUANTILES, PairLogprobs, aot_matched, pair_losses, pair_metrics
from conveyor.config.offline import REFERENCE_FREE, PairLoss
from tests.algorithms.batches import rows

KINDS = get_args(PairLoss)
CLOSE = {"atol": 1e-6, "rtol": 1e-6}
SMOOTHING = {"exo_pair": 0.1, "robust": 0.1}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def nls(x):
    """−log σ(x)."""
    return math.log1p(math.exp(-x))


def one_pair(chosen, rejected, reference_chosen=0.0, reference_rejected=0.0, tokens=(1, 1)):
    sums = [rows(value).requires_grad_() for value in (chosen, rejected)]
    return PairLogprobs(*sums, rows(reference_chosen), rows(reference_rejected), rows(tokens[0]), rows(tokens[1]))


def part(pairs, kept):
    return PairLogprobs(*(tensor[kept] for tensor in fields(pairs)))


def fields(pairs):
    return [getattr(pairs, name) for name in PairLogprobs.__slots__]


def drawn(seed, pairs=6):
    generator = torch.Generator().manual_seed(seed)
    sums = [-6 * torch.rand(pairs, generator=generator) - 0.1 for _ in range(4)]
    tokens = [torch.randint(1, 9, (pairs,), generator=generator) for _ in range(2)]
    return PairLogprobs(sums[0].requires_grad_(), sums[1].requires_grad_(), *sums[2:], *tokens)


def matched_of(kind, pairs, length_normalize=False):
    return {"matched": aot_matched(kind, pairs, length_normalize)} if kind in QUANTILES else {}


# One pair: h_w = −2 − (−3.5) = 1.5, h_l = −4 − (−3.5) = −0.5, Δ = 2; π alone: −2 and −4; tokens 4 and 2, so averages −0.5 and −2.
BY_HAND = {
    "sigmoid": (dict(beta=0.5), nls(1.0)),
    "sigmoid, cDPO": (dict(beta=0.5, label_smoothing=0.1), 0.9 * nls(1.0) + 0.1 * nls(-1.0)),
    "sigmoid, averages": (dict(beta=0.5, length_normalize=True), nls(0.5 * (1.5 / 4 + 0.5 / 2))),
    "sigmoid, RSO's sigmoid-norm, γ = 0.3": (dict(beta=0.3), nls(0.6)),
    "ipo": (dict(beta=0.5), (2 - 1) ** 2),
    "ipo, averages": (dict(beta=0.5, length_normalize=True), (1.5 / 4 + 0.5 / 2 - 1) ** 2),
    "hinge, RSO's hinge-norm, γ = 0.3": (dict(beta=0.3), 1 - 0.6),
    "hinge, on the right side": (dict(beta=0.5), 0.0),
    "robust": (dict(beta=0.5, label_smoothing=0.2), (0.8 * nls(1.0) - 0.2 * nls(-1.0)) / 0.6),
    "robust, no wrong labels": (dict(beta=0.5), nls(1.0)),
    "exo_pair": (
        dict(beta=0.5, label_smoothing=0.1),
        sigmoid(1) * math.log(sigmoid(1) / 0.9) + sigmoid(-1) * math.log(sigmoid(-1) / 0.1),
    ),
    "nca_pair": (dict(beta=0.5), nls(0.75) + 0.5 * nls(-0.75) + 0.5 * nls(0.25)),
    "bco_pair": (dict(beta=0.5), nls(0.75) + nls(0.25)),
    "sppo_hard": (dict(beta=0.5), (1.5 - 1) ** 2 + (-0.5 + 1) ** 2),
    "aot, alone in its update": (dict(beta=0.5), nls(1.0)),
    "aot, smoothed": (dict(beta=0.5, label_smoothing=0.1), 0.9 * nls(1.0) + 0.1 * nls(-1.0)),
    "aot, averages": (dict(beta=0.5, length_normalize=True), nls(0.5 * (1.5 / 4 + 0.5 / 2))),
    "aot_unpaired, alone": (dict(beta=0.5), nls(1.0)),
    "apo_zero": (dict(beta=0.5), 1 - sigmoid(0.75) + sigmoid(-0.25)),
    "apo_down": (dict(beta=0.5), sigmoid(0.75) + 1 - sigmoid(1.0)),
    "discopop": (dict(beta=0.5, discopop_tau=0.4), nls(1.0) * (1 - sigmoid(2.5)) + math.exp(-1.0) * sigmoid(2.5)),
    "simpo": (dict(beta=2.0, margin=1.0), nls(2 * (-0.5 + 2) - 1)),
    "simpo, smoothed": (dict(beta=2.0, margin=1.0, label_smoothing=0.1), 0.9 * nls(2.0) + 0.1 * nls(-2.0)),
    "orpo": (dict(beta=0.2), 0.2 * nls(math.log(math.exp(-0.5) / (1 - math.exp(-0.5))) - math.log(math.exp(-2) / (1 - math.exp(-2))))),
    "cpo": (dict(beta=0.5), nls(1.0)),
    "cpo, smoothed": (dict(beta=0.5, label_smoothing=0.1), 0.9 * nls(1.0) + 0.1 * nls(-1.0)),
    "slic": (dict(beta=0.5, margin=3.0), 3.0 - 2.0),
    "slic, far enough apart": (dict(beta=0.5, margin=1.0), 0.0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    kind, (choices, wanted) = name.split(",")[0], BY_HAND[name]
    pairs = one_pair(-2.0, -4.0, -3.5, -3.5, tokens=(4, 2))
    matched = matched_of(kind, pairs, choices.get("length_normalize", False))
    losses = pair_losses(kind, pairs, **choices, **matched)
    assert losses.shape == (1,) and losses.dtype == torch.float32
    assert losses.item() == pytest.approx(wanted, abs=1e-6)


def test_every_loss_is_here():
    assert {name.split(",")[0] for name in BY_HAND} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_micro_batches_are_those_of_the_update(kind):
    pairs = drawn(3)
    options = dict(beta=0.3, label_smoothing=0.1, margin=0.5)
    matched = matched_of(kind, pairs).get("matched")
    whole = pair_losses(kind, pairs, **options, matched=matched)
    parts = [
        pair_losses(kind, part(pairs, kept), **options, matched=None if matched is None else matched[kept])
        for kept in ([4, 0], [1, 2, 3, 5])
    ]
    torch.testing.assert_close(torch.cat(parts), whole[[4, 0, 1, 2, 3, 5]], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_smoothing_is_read_where_the_recipe_allows_it(kind):
    pairs = drawn(4)
    options = dict(beta=0.3, margin=0.5, **matched_of(kind, pairs))
    one, other = (pair_losses(kind, pairs, label_smoothing=share, **options) for share in (0.1, 0.3))
    reads = kind in ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo")
    assert torch.equal(one, other) != reads


@pytest.mark.parametrize("kind", KINDS)
def test_reference_free_losses_need_no_reference(kind):
    pairs = drawn(5)
    bare = PairLogprobs(pairs.chosen, pairs.rejected, None, None, pairs.chosen_tokens, pairs.rejected_tokens)
    if kind in REFERENCE_FREE:
        torch.testing.assert_close(pair_losses(kind, bare, beta=0.3), pair_losses(kind, pairs, beta=0.3))
    else:
        with pytest.raises(AssertionError, match=r"reference"):
            pair_losses(kind, bare, beta=0.3, label_smoothing=0.1, **matched_of(kind, bare))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen, rejected", [(-1e4, -1e-3), (-1e-3, -1e4), (-1e4, -1e4)])
def test_finite_at_extreme_log_ratios(kind, chosen, rejected):
    """Reference −1e4 and −1e-3 by turns: log-ratios up to ±1e4; and completions that are certain."""
    for reference in ((-1e4, -1e-3), (-1e-3, -1e4)):
        pairs = one_pair(chosen, rejected, *reference)
        options = dict(beta=1.0, label_smoothing=SMOOTHING.get(kind, 0.0), margin=1.0)
        loss = pair_losses(kind, pairs, **options, **matched_of(kind, pairs))
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(pairs.chosen.grad).all() and torch.isfinite(pairs.rejected.grad).all()


def test_discopop_far_on_the_wrong_side_is_linear():
    pairs = one_pair(-1e4, 0.0)
    loss = pair_losses("discopop", pairs, beta=1.0)
    loss.sum().backward()
    assert loss.item() == 1e4 and pairs.chosen.grad.item() == -1 and pairs.rejected.grad.item() == 1


@pytest.mark.parametrize("average", [-30.0, -3.0, -0.7, -1e-3, -1e-6])
def test_orpo_is_as_good_as_in_float64(average):
    found, wanted = [], []
    for into, dtype in ((found, torch.float32), (wanted, torch.float64)):
        chosen = torch.tensor([average, -1.0], dtype=dtype, requires_grad=True)
        rejected = torch.tensor([-1.0, average], dtype=dtype, requires_grad=True)
        pairs = PairLogprobs(chosen, rejected, None, None, torch.ones(2), torch.ones(2))
        losses = pair_losses("orpo", pairs, beta=1.0)
        losses.sum().backward()
        into += [losses.detach(), chosen.grad, rejected.grad]
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=1e-6)


def test_orpo_of_a_certain_completion_is_finite():
    for chosen, rejected in ((0.0, -1.0), (-1.0, 0.0)):
        pairs = one_pair(chosen, rejected)
        loss = pair_losses("orpo", pairs, beta=1.0)
        loss.sum().backward()
        assert math.isfinite(loss.item()) and math.isfinite(pairs.chosen.grad.item()) and math.isfinite(pairs.rejected.grad.item())


@pytest.mark.parametrize("share", [-0.1, 0.5, 1.0])
def test_refused_smoothing(share):
    with pytest.raises(ValueError, match="label_smoothing must be"):
        pair_losses("sigmoid", drawn(0), beta=0.1, label_smoothing=share)


def test_exo_pair_without_smoothing_is_refused():
    with pytest.raises(ValueError, match="exo_pair loss is infinite"):
        pair_losses("exo_pair", drawn(0), beta=0.1)


def whole_batch_aot(kind, pairs, beta, smoothing, length_normalize):
    """aot as it is written down: both sides sorted, the gradient through the sort."""
    chosen, rejected, reference_chosen, reference_rejected, *tokens = fields(pairs)
    chosen_tokens, rejected_tokens = tokens if length_normalize else (1, 1)
    if kind == "aot":
        one = chosen / chosen_tokens - rejected / rejected_tokens
        other = reference_chosen / chosen_tokens - reference_rejected / rejected_tokens
    else:
        one, other = (chosen - reference_chosen) / chosen_tokens, (rejected - reference_rejected) / rejected_tokens
    scores = beta * (one.sort(stable=True).values - other.sort(stable=True).values)
    return (-(1 - smoothing) * torch.log(torch.sigmoid(scores)) - smoothing * torch.log(torch.sigmoid(-scores))).sum()


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(QUANTILES),
    values=st.lists(st.tuples(*[st.integers(-8, 0)] * 4), min_size=1, max_size=9),  # halves: many ties
    length_normalize=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.2]),
    cut=st.integers(1, 4),
    data=st.data(),
)
def test_aot_of_micro_batches_is_aot_of_the_whole(kind, values, length_normalize, smoothing, cut, data):
    sums = [torch.tensor(side, dtype=torch.float64) / 2 for side in zip(*values, strict=True)]
    tokens = [torch.tensor(data.draw(st.lists(st.integers(1, 4), min_size=len(values), max_size=len(values)))) for _ in range(2)]
    pairs = PairLogprobs(sums[0].requires_grad_(), sums[1].requires_grad_(), *sums[2:], *tokens)
    wanted = whole_batch_aot(kind, pairs, 0.7, smoothing, length_normalize)
    wanted_grads = torch.autograd.grad(wanted, [pairs.chosen, pairs.rejected])

    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    matched = aot_matched(kind, pairs, length_normalize)
    assert not matched.requires_grad
    found = sum(
        pair_losses(
            kind, part(pairs, kept), beta=0.7, label_smoothing=smoothing, length_normalize=length_normalize, matched=matched[kept]
        ).sum()
        for kept in order.split(cut)
    )
    torch.testing.assert_close(found, wanted, **CLOSE)
    for ours, exact in zip(torch.autograd.grad(found, [pairs.chosen, pairs.rejected]), wanted_grads, strict=True):
        torch.testing.assert_close(ours, exact, **CLOSE)


def test_aot_by_hand():
    """Policy differences 3, 1, 2 against reference ones 0, 5, −1: sorted (1, 2, 3) − (−1, 0, 5)."""
    zeros, ones = torch.zeros(3), torch.ones(3)
    pairs = PairLogprobs(rows(3.0, 1, 2), zeros, rows(0.0, 5, -1), zeros, ones, ones)
    assert aot_matched("aot", pairs).tolist() == [5, -1, 0]
    # h_w: 3, −4, 3; h_l: 0, 0, 0
    assert aot_matched("aot_unpaired", pairs).tolist() == [[0, -4], [0, 3], [0, 3]]


def test_metrics():
    pairs = PairLogprobs(rows(-2.0, -4), rows(-4.0, -1), rows(-3.5, -4), rows(-3.5, -2), rows(4, 4), rows(2, 1))
    metrics = pair_metrics("sigmoid", pairs, beta=0.5)  # h_w 1.5 and 0, h_l −0.5 and 1
    assert metrics == {
        "rewards/chosen": Mean(0.75, 2),
        "rewards/rejected": Mean(0.25, 2),
        "rewards/margin": Mean(0.5, 2),
        "rewards/accuracy": Mean(1.0, 2),
    }
    assert pair_metrics("aot", pairs, beta=0.5) == metrics
    assert pair_metrics("simpo", pairs, beta=2.0)["rewards/chosen"] == Mean(2 * (-2 / 4 - 4 / 4), 2)
    assert pair_metrics("cpo", pairs, beta=2.0)["rewards/rejected"] == Mean(2 * (-4.0 - 1), 2)
    assert pair_metrics("sigmoid", pairs, beta=1.0, length_normalize=True)["rewards/rejected"] == Mean(-0.5 / 2 + 1, 2)


def same_gradient(pairs, ours, theirs):
    """Ours is a sum, TRL's a mean."""
    number = len(pairs.chosen)
    torch.testing.assert_close(ours.sum() / number, theirs, **CLOSE)
    grads = [torch.autograd.grad(loss, [pairs.chosen, pairs.rejected]) for loss in (ours.sum() / number, theirs)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


class Process:
    """Stands for accelerate's Accelerator."""

    device = "cpu"
    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)


TRL_DPO = {kind: (kind, False) for kind in KINDS if kind not in (*REFERENCE_FREE, "ipo")} | {
    "ipo": ("ipo", True),
    "sigmoid_norm": ("sigmoid", True),
}


@pytest.mark.slow  # importing TRL's trainers takes many seconds
@pytest.mark.parametrize("loss_type", TRL_DPO)
def test_trl_dpo(loss_type):
    """The real `DPOTrainer._compute_loss` on a trainer that was never initialised, whose forward pass gives the log-probs."""
    module = pytest.importorskip("trl.trainer.dpo_trainer")
    pairs = drawn(7)
    smoothing = 0.1

    class Bare(module.DPOTrainer):
        def __init__(self):
            self.model = SimpleNamespace(training=True)
            self.args = SimpleNamespace(discopop_tau=0.4)
            self.accelerator, self.beta, self.label_smoothing = Process(), 0.3, smoothing
            self.loss_types, self.loss_weights = [loss_type], [1.0]
            self.f_divergence_type, self.ld_alpha, self.precompute_ref_logps = "reverse_kl", None, True
            self.aux_loss_enabled = self.use_weighting = False
            self._metrics, self._total_train_tokens, self._tp_size = {"train": defaultdict(list)}, 0, 1

    tokens = torch.cat([pairs.chosen_tokens, pairs.rejected_tokens])
    mask = torch.arange(9) < tokens[:, None]  # the prompt's one token comes before
    per_token = torch.cat([pairs.chosen, pairs.rejected])[:, None] / tokens[:, None] * mask
    completion_mask = torch.cat([torch.zeros(len(tokens), 1), mask], dim=1).long()
    outputs = SimpleNamespace(log_probs=per_token, entropy=per_token, mean_logits=per_token, is_top1=mask)
    inputs = {
        "input_ids": completion_mask,
        "attention_mask": completion_mask,
        "completion_mask": completion_mask,
        "ref_chosen_logps": pairs.reference_chosen,
        "ref_rejected_logps": pairs.reference_rejected,
    }
    trainer = Bare()
    theirs = trainer._compute_loss(lambda **kwargs: outputs, inputs, return_outputs=False)

    kind, length_normalize = TRL_DPO[loss_type]
    options = dict(beta=0.3, length_normalize=length_normalize, discopop_tau=0.4)
    # TRL leaves label smoothing out of the others, sigmoid too
    options["label_smoothing"] = smoothing if kind in ("aot", "aot_unpaired", "robust", "exo_pair") else 0.0
    ours = pair_losses(kind, pairs, **options, **matched_of(kind, pairs, length_normalize))
    same_gradient(pairs, ours, theirs)
    if not length_normalize:
        metrics = pair_metrics(kind, pairs, beta=0.3)
        for ours_name, their_name in (("chosen", "chosen"), ("rejected", "rejected"), ("accuracy", "accuracies"), ("margin", "margins")):
            assert metrics[f"rewards/{ours_name}"].value == pytest.approx(trainer._metrics["train"][f"rewards/{their_name}"][0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpo", "simpo"])
def test_trl_cpo(kind):
    module = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    pairs = drawn(8)
    trainer = SimpleNamespace(
        alpha=0.0, beta=0.7, label_smoothing=0.1, loss_type={"cpo": "sigmoid"}.get(kind, kind), simpo_gamma=0.5, accelerator=Process()
    )
    averaged = kind == "simpo"  # TRL divides before
    chosen = pairs.chosen / pairs.chosen_tokens if averaged else pairs.chosen
    rejected = pairs.rejected / pairs.rejected_tokens if averaged else pairs.rejected
    theirs, *_ = module.CPOTrainer.cpo_loss(trainer, chosen, rejected)
    same_gradient(pairs, pair_losses(kind, pairs, beta=0.7, label_smoothing=0.1, margin=0.5), theirs.mean())


@pytest.mark.slow
def test_trl_orpo():
    module = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    pairs = drawn(9)
    averages = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    ratios, *_ = module.ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=0.7, accelerator=Process()), *averages)
    same_gradient(pairs, pair_losses("orpo", pairs, beta=0.7), -ratios.mean())  # TRL subtracts it from the loss
