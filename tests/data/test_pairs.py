import json

import pytest

from conveyor.config import UserError, sections
from conveyor.data.pairs import load_pairs
from tests.tiny import tiny_tokenizer

BOS, EOS, USER, ASSISTANT = 1, 2, 3, 4
TOKENIZER = tiny_tokenizer()


def load(tmp_path, *rows, **data):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pairs(sections.Data(path=str(path), **data), TOKENIZER)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def plain(pair):
    return [(side.ids.tolist(), side.mask.tolist()) for side in (pair.chosen, pair.rejected)]


def test_three_layouts_give_the_same_tokens_and_masks(tmp_path):
    """Case 9, with a chat template."""
    good, bad = [user("2+2="), assistant("4")], [user("2+2="), assistant("five")]
    pairs = load(
        tmp_path,
        {"prompt": "2+2=", "chosen": "4", "rejected": "five"},
        {"prompt": [user("2+2=")], "chosen": [assistant("4")], "rejected": [assistant("five")]},
        {"chosen": good, "rejected": bad},
        {"prompt": [user("2+2=")], "chosen": good, "rejected": bad},
        {"prompt": "2+2=", "chosen": good, "rejected": bad},
    )
    prompt = [BOS, USER, *ids("2+2="), ASSISTANT]
    for pair in pairs:
        assert pair.chosen.ids.tolist() == [*prompt, *ids("4"), EOS]
        assert pair.rejected.ids.tolist() == [*prompt, *ids("five"), EOS]
        assert pair.chosen.mask.tolist() == [False] * len(prompt) + [True] * 2
        assert pair.rejected.mask.tolist() == [False] * len(prompt) + [True] * 5


def test_implicit_prompt_of_plain_texts(tmp_path):
    """Case 9, without one. The space before the answer belongs to the answer."""
    explicit, implicit = load(
        tmp_path,
        {"prompt": "Q: 2+2? A:", "chosen": " 4", "rejected": " 5"},
        {"chosen": "Q: 2+2? A: 4", "rejected": "Q: 2+2? A: 5"},
        apply_chat_template=False,
    )
    assert plain(explicit) == plain(implicit)
    assert implicit.chosen.ids[implicit.chosen.mask].tolist() == [*ids(" 4"), EOS]


def test_many_turns_share_all_but_the_last(tmp_path):
    start = [user("a"), assistant("b"), user("c")]
    (pair,) = load(tmp_path, {"chosen": [*start, assistant("d")], "rejected": [*start, assistant("e")]})
    assert pair.chosen.ids[pair.chosen.mask].tolist() == [*ids("d"), EOS]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "rejected": "b"}, "chosen: missing"),
        ({"prompt": "a", "chosen": "b"}, "rejected: missing"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected: empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are identical"),
        ({"prompt": "a", "chosen": "b", "rejected": "b</s>"}, "chosen and rejected are identical"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "prompt: empty"),
        ({"chosen": "b", "rejected": "c"}, "chosen and rejected have no beginning in common"),
        ({"chosen": "ab", "rejected": "a"}, "rejected: nothing follows the prompt"),
        ({"chosen": "ab", "rejected": [user("a")]}, "chosen and rejected must both be texts or both be messages"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a")]}, "rejected: no assistant message to learn"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, message):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(UserError, match=f"pairs.jsonl:2: {message}"):
        load(tmp_path, good, row)
    assert len(load(tmp_path, good, row, good, on_bad_row="drop")) == 2


def test_a_row_with_two_bad_sides_counts_once(tmp_path, caplog):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    load(tmp_path, good, {"prompt": "a", "chosen": "b</s>x", "rejected": "c</s>x"}, on_bad_row="drop")
    assert "dropped 1 malformed rows of 2" in caplog.text


def test_long_pairs(tmp_path, caplog):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c" * 20}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert len(load(tmp_path, *rows, max_length=10)) == 1
    assert "dropped 1 of 2 samples, longer than data.max_length (10 tokens)" in caplog.text
