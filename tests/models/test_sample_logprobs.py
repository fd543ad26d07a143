"""Log-probs of many samples in packed rows are those of each sample alone."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from conveyor.config import sections
from conveyor.data.samples import Sample
from conveyor.models.language_model import load_language_model
from conveyor.models.sample_logprobs import loss_tokens, sample_logprobs


def drawn(sizes: tuple[int, ...]) -> list[Sample]:
    """Of many lengths; completions of one token and of all but the first, and one with a gap, as of several turns."""
    generator = np.random.default_rng(1)
    samples = []
    for number, size in enumerate(sizes):
        mask = np.arange(size) >= (1, size - 1, size // 2)[number % 3]
        if number == 3:
            mask[size // 2] = False
        samples.append(Sample(generator.integers(5, 260, size).astype(np.int32), mask, f"row {number}"))
    return samples


@torch.no_grad()
def test_packed_is_each_alone(tiny_policy: Path) -> None:
    samples = drawn((9, 3, 30, 12, 2, 17, 5))
    model = load_language_model(sections.Model(path=str(tiny_policy)))
    plain = AutoModelForCausalLM.from_pretrained(tiny_policy)
    wanted = []
    for sample in samples:
        ids = torch.from_numpy(sample.ids).long()
        logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        wanted.append(float(logprobs[torch.from_numpy(sample.mask[1:])].sum()))
    found = sample_logprobs(model, samples)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-6)
    one_by_one = torch.cat([sample_logprobs(model, [sample]) for sample in samples])
    torch.testing.assert_close(found, one_by_one, atol=1e-5, rtol=1e-6)
    assert loss_tokens(samples).tolist() == [int(sample.mask.sum()) for sample in samples]


def test_the_gradient_of_one_sample_is_its_own(tiny_policy: Path) -> None:
    """Nothing of a sample leaks into its neighbours in the row."""
    samples = drawn((9, 3, 30, 12))
    model = load_language_model(sections.Model(path=str(tiny_policy)))
    weight = model.get_input_embeddings().weight
    together = torch.autograd.grad(sample_logprobs(model, samples)[3], weight)[0]
    alone = torch.autograd.grad(sample_logprobs(model, samples[3:])[0], weight)[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
