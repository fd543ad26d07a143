"""A small Llama that knows nothing yet, and its tokenizer and chat template, made from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, USER, ASSISTANT = "<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"
VOCABULARY = 384
"""At most: 5 special tokens, 256 bytes, and the words that the training texts are made of."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_base_model(folder: Path, texts: Iterable[str], seed: int) -> int:
    """Write an untrained model and a tokenizer trained on `texts`; returns the number of parameters."""
    tokenizer = train_tokenizer(texts)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=192, intermediate_size=768, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=6, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text can be written in it, the words of `texts` in one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, BOS, EOS, USER, ASSISTANT]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
