"""A Llama of a few ten thousand parameters with a tokenizer and chat template, made in a second."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(add_bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level, one token a character; adds BOS like Llama's when called on plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config(**changes: object) -> LlamaConfig:
    settings: dict[str, object] = dict(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaConfig(**(settings | changes))


_MOE_SIZES: dict[str, object] = dict(
    vocab_size=264, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    num_experts_per_tok=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    initializer_range=0.1,
)  # fmt: skip
"""Weights are large enough that routers prefer some experts clearly."""


def tiny_moe_config(kind: str = "qwen3_moe", **changes: object) -> Qwen3MoeConfig | MixtralConfig:
    """Of a mixture of experts of kind `qwen3_moe` (2 of 8 experts of 32) or `mixtral` (2 of 4 experts of 64)."""
    if kind == "qwen3_moe":
        own: dict[str, object] = dict(num_experts=8, moe_intermediate_size=32, intermediate_size=64, norm_topk_prob=True)
        return Qwen3MoeConfig(**(_MOE_SIZES | own | changes))
    return MixtralConfig(**(_MOE_SIZES | dict(num_local_experts=4, intermediate_size=64, sliding_window=None) | changes))


def save_tiny_moe(folder: Path, kind: str = "qwen3_moe", seed: int = 0, **changes: object) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_moe_config(kind, **changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_policy(folder: Path, seed: int = 0, **changes: object) -> Path:
    torch.manual_seed(seed)
    LlamaForCausalLM(tiny_config(**changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_reward_model(folder: Path, seed: int = 1, **changes: object) -> Path:
    torch.manual_seed(seed)
    LlamaForSequenceClassification(tiny_config(num_labels=1, **changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
