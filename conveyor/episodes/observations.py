"""What tools and environments say, as token ids that continue a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from conveyor.data.tokenizer import encode_texts, render_chats
from conveyor.episodes.functions import checked_text

_USER, _ASSISTANT = "what the user said", "what the assistant said"


def observation_ids(tokenizer: PreTrainedTokenizerBase, said: str | Sequence[Mapping[str, Any]] | None, before: int | None) -> list[int]:
    """Token ids of an observation, tokenised alone: special tokens where the text spells them, none added.

    Chat messages become what the chat template puts after an assistant's message, up to where the assistant speaks again: the end
    of that message first, unless `before`, the token that stands before the observation, is that end already.

    Raises:
        ValueError: the template refuses such a conversation, with its own words, or does not show what the assistant said; or
            `checked_text` refuses what is to be tokenised.
        UserError: the tokenizer has no chat template.
    """
    if not said:
        return []
    if isinstance(said, str):
        return encode_texts(tokenizer, [checked_text(said)])[0]
    chat = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}, *said]
    _, shown, after = render_chats(tokenizer, [chat], add_generation_prompt=True)[0].partition(_ASSISTANT)
    if not shown:
        raise ValueError("the chat template leaves out what the assistant said before; give the observation as a text")
    ids = encode_texts(tokenizer, [checked_text(after)])[0]
    return ids[1:] if ids[:1] == [before] else ids
