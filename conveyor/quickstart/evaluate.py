"""Sample from a model with transformers alone, so that what is measured does not depend on what trained it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from conveyor.data.tokenizer import Messages, encode_prompt


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    *,
    max_response_length: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 100,
) -> list[str]:
    """One response a prompt, special tokens skipped; the same seed gives the same responses.

    Args:
        prompts: texts (put through the chat template as one user message) or lists of chat messages.
        max_response_length: tokens.
    """
    settings = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=max_response_length,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    encoded = [encode_prompt(tokenizer, prompt, apply_chat_template=True) for prompt in prompts]
    responses: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for first in range(0, len(encoded), batch_size):
            batch = tokenizer.pad({"input_ids": encoded[first : first + batch_size]}, padding_side="left", return_tensors="pt")
            ids: Tensor = model.generate(**batch.to(model.device), generation_config=settings)  # type: ignore[operator]
            responses += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return responses
