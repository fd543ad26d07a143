"""Chats written as `from` and `value`, under `conversations`, mean the same as `role` and `content` under `messages`."""

import datasets
import pytest

from conveyor.config import UserError, sections
from conveyor.config.offline import Condition
from conveyor.data.conditional import load_conditional
from conveyor.data.pairs import load_pairs
from conveyor.data.prompts import load_prompts
from conveyor.data.rows import Row
from conveyor.data.sft import load_sft
from conveyor.data.steps import load_steps
from conveyor.data.unpaired import load_unpaired
from tests.data.chats import ASSISTANT, EOS, TOKENIZER, USER, assistant, gpt, human, ids, user, write_jsonl

SYSTEM = {"role": "system", "content": "s"}, {"from": "system", "value": "s"}
TRL = [SYSTEM[0], user("a"), assistant("b"), user("c")]
SHAREGPT = [SYSTEM[1], human("a"), gpt("b"), human("c")]
PAIRS = [
    {"prompt": TRL, "chosen": [assistant("d")], "rejected": [assistant("e")]},
    {"prompt": SHAREGPT, "chosen": [gpt("d")], "rejected": [gpt("e")]},
    {"prompt": SHAREGPT, "chosen": gpt("d"), "rejected": assistant("e")},
    {"prompt": TRL, "chosen": [*SHAREGPT, gpt("d")], "rejected": [*TRL, assistant("e")]},
    {"messages": TRL, "chosen": "d", "rejected": "e"},
    {"conversations": SHAREGPT, "chosen": gpt("d"), "rejected": gpt("e")},
    {"conversations": TRL, "chosen": [*SHAREGPT, gpt("d")], "rejected": [*SHAREGPT, gpt("e")]},
    {"chosen": [*TRL, assistant("d")], "rejected": [*TRL, assistant("e")]},
    {"chosen": [*SHAREGPT, gpt("d")], "rejected": [*SHAREGPT, gpt("e")]},
]
ANSWERS = [
    {"prompt": TRL, "completion": [assistant("d")]},
    {"prompt": SHAREGPT, "completion": [gpt("d")]},
    {"prompt": SHAREGPT, "completion": gpt("d")},
    {"prompt": SHAREGPT, "completion": "d"},
]
CHATS = [
    {"messages": [*TRL, assistant("d")]},
    {"conversations": [*SHAREGPT, gpt("d")]},
    {"messages": [*SHAREGPT, gpt("d")]},
    {"conversations": [*TRL, assistant("d"), user("x")]},
]


def load(loader, tmp_path, rows, **data):
    return loader(sections.Data(path=str(write_jsonl(tmp_path / "d.jsonl", rows)), **data), TOKENIZER)


def plain(*samples):
    return [(sample.ids.tolist(), sample.mask.tolist()) for sample in samples]


def all_equal(values, count):
    assert len(values) == count and all(value == values[0] for value in values)
    return values[0]


def expected(text, *, earlier):
    """Ids and mask of the chat that ends with `text`; the earlier assistant message learnt or not."""
    before = [*TOKENIZER("<s><|system|>sX", add_special_tokens=False)["input_ids"][:-1], USER, *ids("a"), ASSISTANT]
    whole = [*before, *ids("b"), EOS, USER, *ids("c"), ASSISTANT, *ids(text), EOS]
    return whole, [*[False] * len(before), *[earlier] * 2, *[False] * 3, True, True]


def test_supervised_rows(tmp_path):
    """Cases 8 and 9."""
    assert all_equal(plain(*load(load_sft, tmp_path, ANSWERS)), len(ANSWERS)) == expected("d", earlier=False)
    assert all_equal(plain(*load(load_sft, tmp_path, CHATS)), len(CHATS)) == expected("d", earlier=True)


def test_assistant_mask_learns_the_prompts_answers_too(tmp_path):
    rows = [*ANSWERS, *CHATS]
    assert all_equal(plain(*load(load_sft, tmp_path, rows, train_on="assistant")), len(rows)) == expected("d", earlier=True)


def test_pairs(tmp_path):
    pairs = load(load_pairs, tmp_path, PAIRS)
    assert all_equal([plain(pair.chosen, pair.rejected) for pair in pairs], len(PAIRS)) == [
        expected("d", earlier=False),
        expected("e", earlier=False),
    ]


def test_labelled_rows(tmp_path):
    rows = [row | {"label": True} for row in (*ANSWERS, *CHATS)]
    labelled = load(load_unpaired, tmp_path, [*rows, *PAIRS])
    assert [item.label for item in labelled] == [True] * len(rows) + [True, False] * len(PAIRS)
    assert {item.prompt for item in labelled} == {0}
    good = [item.sample for item in labelled if item.label]
    assert all_equal(plain(*good), len(rows) + len(PAIRS)) == expected("d", earlier=False)
    bad = [item.sample for item in labelled if not item.label]
    assert all_equal(plain(*bad), len(PAIRS)) == expected("e", earlier=False)


def test_conditional_rows(tmp_path):
    rows = [row | {"reward": 2.0} for row in (*ANSWERS, *CHATS)]
    data = sections.Data(path=str(write_jsonl(tmp_path / "d.jsonl", rows)))
    weighted, _ = load_conditional(data, Condition(mean=1.0, std=2.0), TOKENIZER)
    whole, mask = all_equal(plain(*[item.sample for item in weighted]), len(rows))
    assert "<|user|>c [0.5]<|assistant|>d" in TOKENIZER.decode(whole) and sum(mask) == 2


def test_step_rows_and_prompts(tmp_path):
    rows = [{"prompt": prompt, "completions": ["d"], "labels": [True]} for prompt in (TRL, SHAREGPT)]
    one, other = load(load_steps, tmp_path, rows)
    assert plain(one.sample) == plain(other.sample)
    one, other = load(load_prompts, tmp_path, rows)
    assert (one.token_ids, one.messages) == (other.token_ids, other.messages)


@pytest.mark.parametrize(
    ("name", "role"),
    [("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("chatgpt", "assistant"), ("bing", "assistant"),
     ("bard", "assistant"), ("system", "system"), ("tool", "tool"), ("observation", "tool"), ("function_response", "tool")],
)  # fmt: skip
def test_names_of_speakers(tmp_path, name, role):
    rows = [
        {"prompt": [human("a"), {"from": name, "value": "b"}, human("c")], "completion": "d"},
        {"prompt": [user("a"), {"role": role, "content": "b"}, user("c")], "completion": "d"},
    ]
    all_equal(plain(*load(load_sft, tmp_path, rows)), 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"conversations": [human("a"), {"from": "narrator", "value": "b"}]},
            r"conversations\[1\].from: unknown speaker 'narrator'; one of",
        ),
        ({"conversations": [human("a"), {"from": 3, "value": "b"}]}, r"conversations\[1\].from: unknown speaker 3"),
        ({"conversations": [human("a"), {"from": "gpt"}]}, r"conversations\[1\].value: must be text"),
        ({"conversations": [human("a"), {"value": "b"}]}, r"conversations\[1\]: a message is a mapping with `role` and `content`, or"),
        ({"prompt": "a", "completion": {"from": "gpt", "value": " "}}, "completion: an assistant message is empty"),
        ({"prompt": "a", "completion": [user("b"), assistant("c")]}, "completion: begins with a user message"),
    ],
)
def test_a_malformed_chat_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=rf"d.jsonl:2: {message}"):
        load(load_sft, tmp_path, [ANSWERS[0], row])


def test_parquet_fills_absent_keys_with_null(tmp_path):
    rows = [{"conversations": [*SHAREGPT, gpt("d")]}, {"conversations": [*TRL, assistant("d")]}]
    keys = ("from", "value", "role", "content")
    filled = [{"conversations": [{key: message.get(key) for key in keys} for message in row["conversations"]]} for row in rows]
    datasets.Dataset.from_list(filled).to_parquet(tmp_path / "d.parquet")
    samples = load_sft(sections.Data(path=str(tmp_path / "d.parquet")), TOKENIZER)
    assert all_equal(plain(*samples), 2) == expected("d", earlier=True)


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_a_system_column_begins_the_chat(key):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    told = Row("here", 0, {key: chat, "system": "be brief"}).messages(key)
    assert told == [{"role": "system", "content": "be brief"}, *chat]
    own = [{"role": "system", "content": "mine"}, *chat]
    assert Row("here", 0, {key: own, "system": "be brief"}).messages(key) == own
    assert Row("here", 0, {key: chat, "system": ""}).messages(key) == chat
