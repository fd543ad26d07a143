"""One update of each method against TRL's own trainers: the same token ids through the same weights, loss and whole gradient within 1e-5.

TRL is a test-only dependency. Its trainers are never initialised: they get the attributes that their loss functions read, and their own
collators make the batches, of our token ids. Theirs is one batch of the whole update; ours are micro-batches of two.

Where TRL computes another thing on purpose, it is said at the test.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.offline.conftest import EVEN, Prepare, Updates, same
from tests.tiny import CHAT_TEMPLATE

pytestmark = pytest.mark.slow  # importing TRL's trainers takes many seconds

PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin}
    for prompt, chosen, rejected, margin in [
        ("1+1=", "2", "three", 0.5),
        ("name a colour", "red", "7", 1.0),
        ("?", "yes indeed", "no", 0.25),
        ("say it twice", "it it", "it it it it", 2.0),
        ("end", ".", "!", 0.0),
    ]
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[("rejected", "chosen")[i % 2]], "label": bool(i % 2)} for i, row in enumerate(PAIRS)
]
CHATS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "first"},
                  {"role": "user", "content": "bc"}, {"role": "assistant", "content": "2nd"}]},
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a longer answer"}]},
]  # fmt: skip
COMPLETIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"dpo": "trl.trainer.dpo_trainer", "kto": "trl.trainer.kto_trainer", "sft": "trl.trainer.sft_trainer",
                 "reward": "trl.trainer.reward_trainer", "cpo": "trl.experimental.cpo.cpo_trainer",
                 "orpo": "trl.experimental.orpo.orpo_trainer", "utils": "trl.trainer.utils"}  # fmt: skip
        return SimpleNamespace(**{name: pytest.importorskip(module) for name, module in names.items()})


class Process:
    """Stands for accelerate's Accelerator."""

    device = "cpu"
    num_processes = 1
    parallelism_config = None
    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)


def bare(kind: type, model: Any, **attributes: Any) -> Any:
    """A trainer that was never initialised."""
    made = object.__new__(kind)
    common = {
        "model": model.train(), "accelerator": Process(), "aux_loss_enabled": False, "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0, "_tp_size": 1, "is_encoder_decoder": False,
    }  # fmt: skip
    vars(made).update(common | attributes)
    return made


def language_model(trl: SimpleNamespace, path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path)
    trl.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def gradient_of(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def split(sample: Any) -> tuple[list[int], list[int]]:
    """Prompt and completion ids; all of the completion is learnt."""
    start = sample.prompt_length
    assert sample.mask[start:].all() and not sample.mask[:start].any()
    return sample.ids[:start].tolist(), sample.ids[start:].tolist()


def pair_batch(trl: SimpleNamespace, task: Any) -> dict[str, torch.Tensor]:
    examples = []
    for pair in task.items:
        (prompt, chosen), (same_prompt, rejected) = split(pair.chosen), split(pair.rejected)
        assert prompt == same_prompt
        examples.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return trl.dpo.DataCollatorForPreference(pad_token_id=0)(examples)


# ── supervised ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("rows", "train_on"), [(COMPLETIONS, "completion"), (CHATS, "assistant")])
def test_sft(
    trl: SimpleNamespace, prepare: Prepare, updates: Updates, policy: Path, packing: bool, rows: list[dict], train_on: str
) -> None:
    (update,), task = updates(prepare("sft", rows, data={"packing": packing, "train_on": train_on}, train={"micro_batch_size": 1}))
    examples = []
    for row in task.items:
        ids = [token for weighted in row for token in weighted.sample.ids.tolist()]
        mask = [learnt for weighted in row for learnt in weighted.sample.mask.tolist()]
        labels = [token if learnt else -100 for token, learnt in zip(ids, mask, strict=True)]
        examples.append({"input_ids": ids, "labels": labels, "seq_lengths": [len(weighted.sample.ids) for weighted in row]})
    assert (len(examples) < len(rows)) == packing
    batch = trl.sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packing)(examples)
    if packing:
        assert (batch["position_ids"] == 0).sum() == len(rows)
        batch = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}  # the rest is for flash attention
    model = language_model(trl, policy)
    args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    trainer = bare(trl.sft.SFTTrainer, model, args=args, compute_loss_func=None, label_smoother=None)
    loss = trainer.compute_loss(model, batch)
    same(update, loss.item(), gradient_of(model, loss))


def test_the_assistants_tokens_are_those_that_the_template_marks(prepare: Prepare, updates: Updates, policy: Path) -> None:
    """TRL learns what lies between a template's generation marks."""
    marked = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}",
    )
    assert marked != CHAT_TEMPLATE
    _, task = updates(prepare("sft", CHATS, data={"packing": False, "train_on": "assistant"}))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for sample, row in zip(task.samples, CHATS, strict=True):
        wanted = tokenizer.apply_chat_template(
            row["messages"], chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
        )  # fmt: skip
        assert sample.ids.tolist() == wanted["input_ids"]
        assert sample.mask.tolist() == [bool(learnt) for learnt in wanted["assistant_masks"]]


# ── reward models ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("centre", [0.0, 0.01])
@pytest.mark.parametrize("margins", [True, False])
def test_reward_model(trl: SimpleNamespace, prepare: Prepare, updates: Updates, classifier: Path, margins: bool, centre: float) -> None:
    rows = PAIRS if margins else [{key: value for key, value in row.items() if key != "margin"} for row in PAIRS]
    recipe = prepare("reward_model", rows, model={"path": str(classifier)}, reward_model={"centre_coef": centre})
    (update,), task = updates(recipe)
    examples = [
        {"chosen_ids": pair.chosen.ids.tolist(), "rejected_ids": pair.rejected.ids.tolist()}
        | ({"margin": pair.margin} if margins else {})
        for pair in task.items
    ]  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    args = SimpleNamespace(center_rewards_coefficient=centre or None)
    batch = trl.reward.DataCollatorForPreference(pad_token_id=0)(examples)
    loss = bare(trl.reward.RewardTrainer, model, args=args).compute_loss(model, batch)
    same(update, loss.item(), gradient_of(model, loss))


# ── pairs ────────────────────────────────────────────────────────────────────────────────────────────

DPO: dict[str, dict[str, Any]] = {
    loss: {"loss": loss}
    for loss in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
} | {
    loss: {"loss": loss, "label_smoothing": 0.1} for loss in ("exo_pair", "robust", "aot", "aot_unpaired")
} | {
    "sigmoid_norm": {"loss": "sigmoid", "length_normalize": True},
    "sigmoid + sft": {"loss": "sigmoid", "nll_coef": 0.3},
    "aot + sft": {"loss": "aot", "label_smoothing": 0.1, "nll_coef": 0.3},
}  # fmt: skip
"""TRL's loss types → our settings. `sft` alone is no preference loss: it is our nll_coef."""


@pytest.mark.parametrize("types", DPO)
def test_dpo(trl: SimpleNamespace, prepare: Prepare, updates: Updates, policy: Path, reference: Path, types: str) -> None:
    rows = EVEN if types.startswith("aot") else PAIRS
    recipe = prepare("dpo", rows, dpo=DPO[types] | {"beta": 0.4, "discopop_tau": 0.7}, reference={"path": str(reference)})
    (update,), task = updates(recipe)
    model, ref_model = language_model(trl, policy), language_model(trl, reference)
    loss_types = types.split(" + ")
    trainer = bare(
        trl.dpo.DPOTrainer, model, ref_model=ref_model.eval(), args=SimpleNamespace(discopop_tau=0.7, gradient_checkpointing_kwargs=None),
        beta=0.4, label_smoothing=0.1, loss_types=loss_types, loss_weights=[1.0, 0.3][: len(loss_types)], f_divergence_type="reverse_kl",
        ld_alpha=None, precompute_ref_logps=False, use_weighting=False,
    )  # fmt: skip
    loss = trainer._compute_loss(model, pair_batch(trl, task), return_outputs=False)
    same(update, loss.item(), gradient_of(model, loss))
    told = trainer._metrics["train"]
    assert update.row["logprobs/chosen"] == pytest.approx(told["logps/chosen"][0], abs=1e-4)
    if "norm" not in types and types != "ipo":
        assert update.row["rewards/margin"] == pytest.approx(told["rewards/margins"][0], abs=1e-4)
        assert update.row["rewards/accuracy"] == pytest.approx(told["rewards/accuracies"][0])


def labelled_batch(task: Any) -> dict[str, torch.Tensor]:
    """What TRL's CPO and ORPO trainers call `concatenated_inputs` with: labels on the completions."""
    batch: dict[str, torch.Tensor] = {}
    for side in ("chosen", "rejected"):
        samples = [getattr(pair, side) for pair in task.items]
        width = max(len(sample.ids) for sample in samples)
        padded = lambda rows, value: torch.tensor([list(row) + [value] * (width - len(row)) for row in rows])  # noqa: B023, E731
        batch[f"{side}_input_ids"] = padded([sample.ids.tolist() for sample in samples], 0)
        batch[f"{side}_attention_mask"] = padded([[1] * len(sample.ids) for sample in samples], 0)
        batch[f"{side}_labels"] = torch.where(padded([sample.mask.tolist() for sample in samples], False), batch[f"{side}_input_ids"], -100)
    return batch


@pytest.mark.parametrize(
    ("loss_type", "settings", "scale"),
    [
        ("sigmoid", {"loss": "cpo", "label_smoothing": 0.1, "nll_coef": 0.5}, 1.0),
        ("simpo", {"loss": "simpo", "label_smoothing": 0.1, "margin": 0.6, "nll_coef": 0.5}, 1.0),
        # CPO's hinge, max(0, 1 − β·Δ), is β times SLiC's max(0, δ − Δ) with δ = 1/β.
        ("hinge", {"loss": "slic", "margin": 1 / 0.4, "nll_coef": 0.5 / 0.4}, 0.4),
    ],
)
def test_cpo(trl: SimpleNamespace, prepare: Prepare, updates: Updates, policy: Path, loss_type: str, settings: dict, scale: float) -> None:
    (update,), task = updates(prepare("dpo", PAIRS, dpo=settings | {"beta": 0.4}))
    model = language_model(trl, policy)
    trainer = bare(
        trl.cpo.CPOTrainer, model, pad_token_id=0, cpo_alpha=0.5, alpha=0.0, beta=0.4, label_smoothing=0.1, loss_type=loss_type,
        simpo_gamma=0.6,
    )  # fmt: skip
    loss, _ = trainer.get_batch_loss_metrics(model, labelled_batch(task))
    loss = loss / scale
    same(update, loss.item(), gradient_of(model, loss))


@pytest.mark.parametrize("nll_coef", [0.0, 1.0])
def test_orpo(trl: SimpleNamespace, prepare: Prepare, updates: Updates, policy: Path, nll_coef: float) -> None:
    """The odds ratios are TRL's. Its NLL is not ours: TRL takes it over prompt and completion, the paper's L_SFT (and ours, and that of
    TRL's CPO) over the completion alone; so the completion's is put in its place."""
    (update,), task = updates(prepare("dpo", PAIRS, dpo={"loss": "orpo", "beta": 0.4, "nll_coef": nll_coef}))
    model, batch = language_model(trl, policy), labelled_batch(task)
    trainer = bare(trl.orpo.ORPOTrainer, model, padding_value=0, beta=0.4)
    chosen, rejected, logits, *_ = trainer.concatenated_forward(model, batch)
    labels = torch.nn.functional.pad(batch["chosen_labels"], (0, logits.shape[1] + 1 - batch["chosen_labels"].shape[1]), value=-100)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss = nll_coef * nll - trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    same(update, loss.item(), gradient_of(model, loss))


# ── unpaired ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("swapped", [False, True], ids=["kl positive", "kl clamped"])
def test_kto(
    trl: SimpleNamespace, prepare: Prepare, updates: Updates, policy: Path, reference: Path, loss_type: str, swapped: bool
) -> None:
    """Where all prompts differ, our mismatched rows are TRL's: each prompt with the completion of the row before it. The models are
    swapped so that the mean of the log-ratios is once above 0 and once below, where it is clamped."""
    first, second = (reference, policy) if swapped else (policy, reference)
    settings = {"loss": loss_type, "beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    recipe = prepare("kto", LABELLED, kto=settings, model={"path": str(first)}, reference={"path": str(second)})
    (update,), task = updates(recipe)
    examples = []
    for item, before in zip(task.items, [task.items[-1], *task.items[:-1]], strict=True):
        prompt, completion = split(item.sample)
        extra = {"KL_completion_ids": split(before.sample)[1]} if loss_type == "kto" else {}
        examples.append({"prompt_ids": prompt, "completion_ids": completion, "label": item.label, **extra})
    model, ref_model = language_model(trl, first), language_model(trl, second)
    trainer = bare(
        trl.kto.KTOTrainer, model, ref_model=ref_model.eval(), args=SimpleNamespace(gradient_checkpointing_kwargs=None), beta=0.4,
        loss_type=loss_type, desirable_weight=1.5, undesirable_weight=0.7, precompute_ref_logps=False, calculate_KL=loss_type == "kto",
    )  # fmt: skip
    batch = trl.kto.DataCollatorForUnpairedPreference(pad_token_id=0)(examples)
    loss = trainer._compute_loss(model, batch, return_outputs=False)
    same(update, loss.item(), gradient_of(model, loss))
    if loss_type == "kto":
        assert update.row["kl"] == pytest.approx(trainer._metrics["train"]["kl"][0], abs=1e-4)
        assert (update.row["kl"] == 0) == swapped
