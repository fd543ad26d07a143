"""Tokenizers and chat templates: loaded and checked before any model is, with special tokens exactly once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.data.rows import read_utf8

Messages = Sequence[Mapping[str, Any]]
"""Chat messages: mappings with at least `role` and `content`."""


def load_tokenizer(model: sections.Model) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, else of `model.path`, with the chat template of `model.chat_template`.

    Raises:
        UserError: the folder or template file is missing or cannot be read, or the tokenizer has no pad or end-of-sequence token.
    """
    key, source = ("model.tokenizer", model.tokenizer) if model.tokenizer is not None else ("model.path", model.path)
    check_folder_or_hub_id(key, source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers, tokenizers and the hub raise a dozen types; all mean the same to the user
        raise UserError(f"{key}: no tokenizer can be read from {source}: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"{key}: the tokenizer of {source} has no pad token; set `pad_token` in its tokenizer_config.json "
            "(an unused token, not the end-of-sequence token) or name another tokenizer in model.tokenizer"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key}: the tokenizer of {source} has no end-of-sequence token; set `eos_token` in its tokenizer_config.json")
    if model.chat_template is not None:
        file = Path(model.chat_template)
        if not file.is_file():
            raise UserError(f"model.chat_template: {file}: no such file")
        try:
            tokenizer.chat_template = read_utf8(file)
        except UserError as error:
            raise UserError(f"model.chat_template: {error}") from None
    return tokenizer


def check_folder_or_hub_id(key: str, source: str) -> None:
    """Refuse a path that can only be meant as a local folder and is not there, or holds no model files."""
    if not source.strip():
        raise UserError(f"{key}: empty; name a model folder or a hub id")
    path = Path(source).expanduser()
    if path.is_dir():
        if not any(path.iterdir()):
            raise UserError(f"{key}: {source} is an empty folder")
        return
    looks_local = source.startswith((".", "/", "~")) or len(path.parts) > 2 or (len(path.parts) == 2 and os.path.isdir(path.parts[0]))
    if path.exists() or looks_local:
        raise UserError(f"{key}: {source}: no such model folder")


def render_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Messages], *, add_generation_prompt: bool) -> list[str]:
    """Chat messages as text; the template brings all special tokens itself.

    Raises:
        UserError: the tokenizer has no chat template, or one that is not valid Jinja.
        ValueError: the template refuses a conversation (say, two user messages in a row), with its own words, or fails at it.
    """
    if not chats:
        return []
    if tokenizer.chat_template is None:
        raise UserError(
            "model.chat_template: the tokenizer has no chat template; give a Jinja file here, "
            "or, for rows of plain text, set data.apply_chat_template: false"
        )
    try:
        return tokenizer.apply_chat_template(  # type: ignore[return-value]
            [[dict(message) for message in chat] for chat in chats], tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"model.chat_template: the chat template is not valid Jinja: line {error.lineno}: {_first_line(error)}") from error
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses it: {_first_line(error)}") from error
    except Exception as error:  # a template computes: it may divide by zero, index past an end, or miss a key
        raise ValueError(f"the chat template fails: {type(error).__name__}: {_first_line(error)}") from error


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text alone: special tokens where the text spells them, none added."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def begin(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, add: bool) -> list[int]:
    """`ids` with BOS in front exactly once: doubled ones become one; where there is none, one is added if the tokenizer
    adds one to plain text and `add` is set. A chat template decides alone, so its text comes with `add=False`."""
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return [bos, *ids] if add and ids[:1] != [bos] and adds_bos(tokenizer) else ids


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer, called on plain text, puts a BOS in front."""
    return tokenizer.bos_token_id is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, apply_chat_template: bool) -> list[int]:
    """Token ids of a prompt, ready to be continued by the model; BOS stands there once at most.

    A text goes through the chat template as one user message if `apply_chat_template`, else it is taken as it stands.
    """
    chat: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(prompt, str) and not apply_chat_template:
        return begin(tokenizer, encode_texts(tokenizer, [prompt])[0], add=True)
    text = render_chats(tokenizer, [chat], add_generation_prompt=True)
    return begin(tokenizer, encode_texts(tokenizer, text)[0], add=False)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
