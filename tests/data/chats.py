"""Short ways to write rows in tests."""

import json

from tests.tiny import tiny_tokenizer

BOS, EOS, USER, ASSISTANT = 1, 2, 3, 4
TOKENIZER = tiny_tokenizer()


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def write_jsonl(path, rows):
    """Rows as JSON lines; a row given as bytes stands as it is."""
    path.write_bytes(b"".join(row + b"\n" if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path
