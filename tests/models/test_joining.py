"""Samples side by side, tokens of tools among them."""

import pytest
import torch
from transformers import LlamaForCausalLM

from conveyor.models.joining import join, per_sample
from conveyor.models.language_model import response_logprobs
from conveyor.types import Prompt, Rollout
from tests.tiny import tiny_config

PROMPTS = [(1, 5, 6), (1, 7), (1, 8, 9, 10)]
RESPONSES = [[20, 21, 22, 23, 24], [30, 31, 32], [2]]
SAMPLED = [[True, False, False, True, True], None, [False]]


def rollouts() -> list[Rollout]:
    return [
        Rollout(
            Prompt(i, i, prompt, ""), 0, torch.tensor(ids), torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.int32), "stop", "",
            None if sampled is None else torch.tensor(sampled),
        )
        for i, (prompt, ids, sampled) in enumerate(zip(PROMPTS, RESPONSES, SAMPLED, strict=True))
    ]  # fmt: skip


def test_the_mask_is_true_where_the_policy_sampled() -> None:
    batch = join(rollouts(), packed=False)
    assert batch.tokens.input_ids.tolist() == [[1, 5, 6, 20, 21, 22, 23, 24], [1, 7, 30, 31, 32, 0, 0, 0], [1, 8, 9, 10, 2, 0, 0, 0]]
    assert batch.tokens.lengths.tolist() == [8, 5, 5]
    assert batch.response_mask.tolist() == [[True, False, False, True, True], [True] * 3 + [False] * 2, [False] * 5]
    assert batch.response_lengths.tolist() == [5, 3, 1]


@pytest.mark.parametrize("packed", [True, False])
def test_logprobs_of_sampled_tokens_see_the_tools_tokens(packed: bool) -> None:
    """As long as the response each; equal to the textbook's at sampled tokens, 0 at others."""
    torch.manual_seed(0)
    model, batch = LlamaForCausalLM(tiny_config()).eval(), join(rollouts(), packed)
    with torch.no_grad():
        values, _ = response_logprobs(model, batch.tokens, batch.prompt_lengths, batch.response_mask, 1.0)
        rows = per_sample(values, batch)
        assert [len(row) for row in rows] == [5, 3, 1]
        for prompt, ids, rollout, row in zip(PROMPTS, RESPONSES, rollouts(), rows, strict=True):
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            right = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(row, right * rollout.sampled_mask, atol=1e-5, rtol=0)


def test_a_batch_of_nothing_sampled_has_no_logprobs() -> None:
    """What a function that failed before its first turn leaves."""
    model, batch = LlamaForCausalLM(tiny_config()), join(rollouts()[2:], packed=True)
    values, _ = response_logprobs(model, batch.tokens, batch.prompt_lengths, batch.response_mask, 1.0)
    values.sum().backward()
    assert [row.tolist() for row in per_sample(values.detach(), batch)] == [[0.0]]
