import math

import pytest
import torch
from torch import distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

from conveyor.config.sections import Train
from conveyor.models.train_engine import TrainEngine, _buckets, schedule_factor
from tests.models.ranks import one_rank, spawn
from tests.tiny import tiny_config, tiny_tokenizer

SETTINGS = dict(weight_decay=0.1, adam_betas=(0.9, 0.95), max_grad_norm=1.0)
DENOMINATOR = 45.0
FLOAT32 = [(stage, False, "float32") for stage in (0, 1, 2, 3)]
CASES = {
    1: [*FLOAT32, (2, True, "bfloat16")],
    2: [
        *FLOAT32,
        (1, True, "float32"),
        (2, True, "float32"),
        (3, True, "float32"),
        (0, False, "bfloat16"),
        (2, False, "bfloat16"),
        (3, False, "bfloat16"),
    ],
}
"""Ranks → (ZeRO stage, optimizer offload, dtype)."""


def tiny_model(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes))


def ids(rank, number):
    return torch.randint(5, 264, (2, 16), generator=torch.Generator().manual_seed(100 * rank + number))


def nll(model, tokens):
    """Sum over tokens."""
    logprobs = model(input_ids=tokens).logits.float().log_softmax(-1)
    return -logprobs[:, :-1].gather(-1, tokens[:, 1:, None]).sum()


def engine(model=None, **changes):
    settings = dict(learning_rate=1e-3, total_updates=8, dtype="float32", accelerator="cpu")
    train = SETTINGS | {key: value for key, value in changes.items() if key not in settings}
    return TrainEngine(model or tiny_model(), Train(**train), **settings | {k: v for k, v in changes.items() if k in settings})


def update(trained, rank, number, micro_batches=2, denominator=DENOMINATOR):
    for k in range(micro_batches):
        trained.backward(trained.forward(nll, ids(rank, number * 10 + k)), last=k == micro_batches - 1)
    return trained.step(denominator)


def weights(trained):
    return {name: weight.clone() for name, weight in trained.named_weights()}


def plain_pytorch(ranks, updates=3, micro_batches=2):
    """AdamW on the gradient summed over all ranks' micro-batches → weights, norms of the mean gradient."""
    model, norms = tiny_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for number in range(updates):
        optimizer.zero_grad()
        for rank in range(ranks):
            for k in range(micro_batches):
                (nll(model, ids(rank, number * 10 + k)) / DENOMINATOR).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name].detach().float() - b[name].detach().float()).abs().max().item() for name in a)


# ── in this process, ZeRO 0 ──────────────────────────────────────────────────────────────────────────


def test_three_clipped_updates_equal_plain_pytorch():
    one_rank()
    want, norms = plain_pytorch(ranks=1)
    trained = engine()
    reports = [update(trained, 0, number) for number in range(3)]
    assert all(norm > 1 for norm in norms), "the clip is to matter"
    assert [report.grad_norm for report in reports] == pytest.approx(norms, abs=1e-5)
    assert [report.skipped for report in reports] == [False] * 3
    assert largest_difference(weights(trained), want) < 1e-5


def test_nothing_in_the_loss_changes_nothing():
    one_rank()
    trained = engine()
    update(trained, 0, 0)
    before = weights(trained)
    trained.backward(trained.forward(nll, ids(0, 5)) * 0, last=True)
    report = trained.step(0)
    assert report.skipped and report.grad_norm == 0
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trained).items())


def test_the_schedule_reaches_the_optimizer():
    one_rank()
    trained = engine(lr_schedule="linear", warmup_ratio=0.5, total_updates=4)
    assert [update(trained, 0, number).lr for number in range(4)] == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])


def test_tied_weights_are_named_once():
    one_rank()
    names = [name for name, _ in engine(tiny_model(tie_word_embeddings=True)).named_weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names and len(set(names)) == len(names)


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_loads_with_transformers(tmp_path, tied):
    one_rank()
    trained = engine(tiny_model(tie_word_embeddings=tied))
    for _ in range(2):  # the second replaces the first
        update(trained, 0, 0)
        trained.save_pretrained(tmp_path / "model", tiny_tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (tmp_path / "model" / "tokenizer.json").is_file()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert largest_difference(dict(loaded.named_parameters()), weights(trained)) == 0


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    one_rank()
    with pytest.raises(ValueError, match="no training checkpoint"):
        engine().load(tmp_path)


@pytest.mark.parametrize(
    ("schedule", "warmup", "want"),
    [
        ("constant", 0.0, [1, 1, 1, 1]),
        ("constant", 0.5, [0.5, 1, 1, 1]),
        ("linear", 0.0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 0.0, [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]),
        ("linear", 1.0, [0.25, 0.5, 0.75, 1]),
    ],
)
def test_schedules(schedule, warmup, want):
    assert [schedule_factor(i, 4, warmup, schedule) for i in range(4)] == pytest.approx(want)


def test_buckets_keep_the_order_and_the_limit():
    named = [(name, nn.Parameter(torch.zeros(size))) for name, size in (("a", 10), ("b", 20), ("c", 100), ("d", 5))]
    assert [[name for name, _ in bucket] for bucket in _buckets(named, limit=4 * 30)] == [["a", "b"], ["c"], ["d"]]


# ── every ZeRO stage, on 1 and 2 ranks ───────────────────────────────────────────────────────────────


def meet(rank, ranks, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)


def check_stages(rank, ranks, port, folder):
    meet(rank, ranks, port)
    want, norms = plain_pytorch(ranks)
    for stage, offload, dtype in CASES[ranks]:
        case = f"ZeRO {stage}, offload {offload}, {dtype}, {ranks} ranks"
        make = lambda s=stage, o=offload, d=dtype: engine(zero_stage=s, offload_optimizer=o, dtype=d)  # noqa: E731
        trained = make()
        reports = [update(trained, rank, number) for number in range(3)]
        exact = dtype == "float32"
        assert [report.grad_norm for report in reports] == pytest.approx(norms, abs=1e-5 if exact else 0.05), case
        assert largest_difference(weights(trained), want) < (1e-5 if exact else 0.02), case
        check_skips(trained, rank, case)
        check_resume(trained, make(), rank, folder / f"{ranks}-{stage}-{offload}-{dtype}", case)
    trained.save_pretrained(folder / f"model-{ranks}", tiny_tokenizer())
    loaded = dict(LlamaForCausalLM.from_pretrained(folder / f"model-{ranks}").named_parameters())
    assert largest_difference(loaded, weights(trained)) == 0


def check_skips(trained, rank, case):
    """Neither an empty update nor one with NaN (of the last rank only) changes a weight or hurts the next update."""
    before = weights(trained)
    trained.backward(trained.forward(nll, ids(rank, 90)), last=True)
    assert trained.step(0).skipped, case
    trained.backward(trained.forward(nll, ids(rank, 91)), last=False)
    bad = math.nan if rank == dist.get_world_size() - 1 else 1.0
    trained.backward(trained.forward(nll, ids(rank, 92)) * bad, last=True)
    report = trained.step(DENOMINATOR)
    assert report.skipped and not math.isfinite(report.grad_norm), case
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trained).items()), case
    report = update(trained, rank, 0)
    assert not report.skipped and math.isfinite(report.grad_norm), case


def check_resume(trained, fresh, rank, folder, case):
    """From its checkpoint, a fresh engine goes on bit for bit as the one that never stopped."""
    trained.save(folder)
    fresh.load(folder)
    for number in (4, 5):
        assert update(trained, rank, number) == update(fresh, rank, number), case
    resumed = weights(fresh)
    assert all(torch.equal(weight, resumed[name]) for name, weight in weights(trained).items()), case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_stage_equals_plain_pytorch_skips_and_resumes(ranks, tmp_path):
    spawn(check_stages, ranks, tmp_path)
