import pytest
import torch

from conveyor.config.sections import Model
from conveyor.models import float32_head
from conveyor.models.float32_head import float32_logits
from conveyor.models.language_model import TokenHead, load_language_model, response_logprobs
from tests.models.test_language_model import batch
from tests.tiny import tiny_config


@pytest.mark.parametrize("slice_elements", [2**24, 7 * 64])
def test_logits_are_the_exact_products_of_bfloat16_numbers(monkeypatch, slice_elements):
    monkeypatch.setattr(float32_head, "SLICE", slice_elements)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 5, 64).bfloat16(), torch.randn(50, 64).bfloat16(), torch.randn(50).bfloat16()
    want = hidden.double() @ weight.double().T + bias.double()
    got = float32_logits(hidden, weight, bias)
    assert got.dtype == torch.float32 and got.shape == (2, 5, 50)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-6)
    assert (torch.nn.functional.linear(hidden, weight, bias).double() - want).abs().max() > 0.02


def test_gradients_are_a_plain_layers():
    torch.manual_seed(0)
    found = []
    for layer in (torch.nn.functional.linear, float32_logits):
        torch.manual_seed(0)
        hidden, weight = torch.randn(5, 64).bfloat16().requires_grad_(), torch.randn(50, 64).bfloat16().requires_grad_()
        (layer(hidden, weight, None).float() * torch.linspace(-1, 1, 50)).sum().backward()
        found.append((hidden.grad, weight.grad))
    assert all(a.dtype == torch.bfloat16 and torch.equal(a, b) for a, b in zip(*found, strict=True))


def head_error(head, hidden, ids, exact):
    return (head(hidden, ids)[0] - exact).abs().mean().item()


def test_rounding_of_the_head_is_gone(tiny_policy):
    """Of bfloat16 states and weights, log-probs are off by what logits are rounded by; with a float32 head by a thousandth of it."""
    torch.manual_seed(0)
    hidden, ids = 4 * torch.randn(200, 64).bfloat16(), torch.randint(0, 264, (200,))
    plain = torch.nn.Linear(64, 264, bias=False, dtype=torch.bfloat16)
    exact = torch.log_softmax(hidden.double() @ plain.weight.double().T, -1).gather(-1, ids[:, None])[:, 0].float()
    without, with_it = (head_error(TokenHead.over(plain, tiny_config(), float32), hidden, ids, exact) for float32 in (False, True))
    assert without > 1e-3 and with_it < without / 1000


def test_the_setting_reaches_the_model_and_brings_it_nearer_to_float32(tmp_path):
    from tests.tiny import save_tiny_policy

    # Logits of a trained model are large; those of a fresh one would hardly be rounded.
    folder = save_tiny_policy(tmp_path / "policy", initializer_range=0.3)
    exact = response_logprobs(load_language_model(Model(path=str(folder))), *batch(), 1.0)[0]
    errors = []
    for fp32_head in (False, True):
        model = load_language_model(Model(path=str(folder), dtype="bfloat16", fp32_head=fp32_head))
        logprobs = response_logprobs(model, *batch(), 1.0, chunk=3)[0]
        errors.append((logprobs - exact).abs().mean().item())
        assert model(input_ids=torch.tensor([[5, 6]])).logits.dtype == (torch.float32 if fp32_head else torch.bfloat16)
    assert errors[1] < errors[0]
