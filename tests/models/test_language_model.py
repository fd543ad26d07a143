import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from conveyor.config import UserError
from conveyor.config.sections import Model
from conveyor.data.packing import lay_out
from conveyor.models.language_model import TokenHead, load_language_model, response_logprobs
from tests.tiny import save_tiny_policy, save_tiny_reward_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def model(folder):
    return load_language_model(Model(path=str(folder)))


def batch(prompts=(5, 2, 9), responses=(4, 7, 1), vocab=264, packed=True):
    """Tokens, prompt lengths [B], response mask [B, S]."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, vocab, (sum(lengths),), generator=generator) for lengths in zip(prompts, responses, strict=True)]
    return lay_out(rows, packed), torch.tensor(prompts), torch.arange(max(responses)) < torch.tensor(responses)[:, None]


def full_logprobs(model, tokens, prompt_lengths, response_mask, temperature):
    """The same by the textbook: all logits, one sample at a time."""
    logprobs, entropy = torch.zeros(response_mask.shape), torch.zeros(response_mask.shape)
    for row, (first, length) in enumerate(zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)):
        own, start = tokens.input_ids.flatten()[first : first + length], int(prompt_lengths[row])
        distribution = torch.distributions.Categorical(logits=model(own[None]).logits[0, start - 1 : -1].float() / temperature)
        logprobs[row, : len(own) - start] = distribution.log_prob(own[start:])
        entropy[row, : len(own) - start] = distribution.entropy()
    return logprobs, entropy


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_case_21_chunked_logprobs_equal_a_full_log_softmax(model, chunk, packed):
    want, entropy = full_logprobs(model, *batch(), 0.7)
    got, got_entropy = response_logprobs(model, *batch(packed=packed), 0.7, chunk=chunk)
    assert got.dtype == torch.float32 and not got_entropy.requires_grad
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(got_entropy, entropy, atol=1e-5, rtol=0)


def test_chunked_gradients_of_logprobs_and_entropy_equal_the_full_ones(model):
    def gradients(logprobs, entropy):
        (logprobs.square().sum() - 0.3 * entropy.square().sum()).backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return found

    want = gradients(*full_logprobs(model, *batch(), 0.7))
    got = gradients(*response_logprobs(model, *batch(), 0.7, entropy_grad=True, chunk=3))
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-4)


def test_case_2_temperature_divides_the_logits():
    head = TokenHead(1, 2, bias=False)
    head.weight.data = torch.tensor([[2.0], [0.0]])
    logprobs, _ = head(torch.ones(1, 1), torch.tensor([0]), 0.5)
    assert logprobs.item() == pytest.approx(-0.0181, abs=1e-4)


def test_the_head_is_still_an_output_layer(model):
    hidden = torch.randn(2, 3, 64)
    torch.testing.assert_close(model.lm_head(hidden), hidden @ model.lm_head.weight.T)
    assert set(dict(model.named_parameters())) == set(model.state_dict())


class LargestLogits(TorchDispatchMode):
    """The most elements that any tensor [·, V] ever had, but for the transposed weight [64, V]."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.numel = vocab, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
            if isinstance(output, torch.Tensor) and output.ndim > 1 and output.shape[-1] == self.vocab and output.shape[0] != 64:
                self.numel = max(self.numel, output.numel())
        return outputs


@pytest.mark.parametrize(("prompts", "responses"), [((5, 2, 9), (4, 7, 1)), ((90, 60, 80), (40, 70, 10))])
def test_case_21_never_more_logits_than_a_chunk(model, prompts, responses):
    saved = 0

    def count(tensor):
        nonlocal saved
        saved += tensor.numel() if tensor.ndim > 1 and tensor.shape[-1] == 264 and tensor.shape[0] != 64 else 0
        return tensor

    with LargestLogits(264) as largest, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        response_logprobs(model, *batch(prompts, responses), 1.0, chunk=4)[0].sum().backward()
    assert 0 < largest.numel <= 4 * 264
    assert saved <= 3 * 4 * 264 * -(-sum(responses) // 4)  # within the recomputed chunks only


def test_gradient_checkpointing_changes_no_bit(folder):
    found = []
    for checkpointing in (False, True):
        model = load_language_model(Model(path=str(folder), gradient_checkpointing=checkpointing))
        response_logprobs(model, *batch(), 1.0)[0].sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_bfloat16_models_give_float32_logprobs(folder):
    model = load_language_model(Model(path=str(folder), dtype="bfloat16"))
    logprobs, _ = response_logprobs(model, *batch(), 1.0)
    assert next(model.parameters()).dtype == torch.bfloat16 and logprobs.dtype == torch.float32


def test_a_classifier_is_no_language_model(tmp_path):
    with pytest.raises(UserError, match=r"not a causal language model: it has no lm_head.weight"):
        load_language_model(Model(path=str(save_tiny_reward_model(tmp_path / "reward"))))


def test_a_folder_without_a_model_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="cannot be loaded as a model") as raised:
        load_language_model(Model(path=str(tmp_path)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("granite", {"logits_scaling": 8.0}), ("cohere", {"logit_scale": 0.5}), ("gemma2", {"final_logit_softcapping": 3.0})],
)
def test_logprobs_are_of_the_logits_that_the_model_itself_gives(kind, changes):
    """Some models scale or cap what their output layer gives."""
    torch.manual_seed(0)
    settings = dict(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **settings, **changes, pad_token_id=0, initializer_range=0.5)
    ).eval()
    want, entropy = full_logprobs(model, *batch(packed=False), 0.7)
    got, got_entropy = response_logprobs(model, *batch(packed=False), 0.7)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(got_entropy, entropy, atol=1e-5, rtol=0)
    changed = dict.fromkeys(changes, 1.0)
    for name, value in changed.items():
        setattr(model.config, name, value)
    assert not torch.allclose(response_logprobs(model, *batch(packed=False), 0.7)[0], want, atol=1e-2)
