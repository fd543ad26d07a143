import pytest

from conveyor.config import UserError, sections
from conveyor.data.pairs import load_pairs
from tests.data.chats import ASSISTANT, BOS, EOS, TOKENIZER, USER, assistant, ids, user, write_jsonl


def load(tmp_path, *rows, **data):
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    return load_pairs(sections.Data(path=str(path), **data), TOKENIZER, margins=True)


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


def test_margins(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert [pair.margin for pair in load(tmp_path, row | {"margin": 2}, row, row | {"margin": -0.5})] == [2.0, None, -0.5]
    assert [pair.margin for pair in load(tmp_path, row | {"margin": "large", "by": 1.5}, margin_column="by")] == [1.5]


def test_the_prompts_own_column_goes_before_a_chat(tmp_path):
    whole = [user("a"), assistant("b")]
    (pair,) = load(tmp_path, {"prompt": "a", "messages": whole, "chosen": whole, "rejected": [user("a"), assistant("c")]})
    assert pair.chosen.ids[pair.chosen.mask].tolist() == [*ids("b"), EOS]


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
        ({"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a")]}, "rejected: nothing follows the prompt"),
        ({"prompt": "x", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, "chosen: begins with a user"),
        (
            {"messages": [user("a"), assistant("b")], "chosen": "b", "rejected": "c"},
            "messages: beside chosen and rejected it is the prompt",
        ),
        (
            {"chosen": [user("p"), assistant("x")], "rejected": [user("q"), assistant("y")]},
            "chosen and rejected do not answer the same prompt",
        ),
        ({"chosen": [assistant("x")], "rejected": [assistant("y")]}, "chosen and rejected have no beginning in common"),
        (
            {
                "chosen": [user("a"), assistant("b"), user("p"), assistant("x")],
                "rejected": [user("a"), assistant("b"), user("q"), assistant("y")],
            },
            "chosen and rejected do not answer the same prompt",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "margin: must be a finite number, not '1'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, "margin: must be a finite number, not True"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("inf")}, "margin: must be a finite number, not inf"),
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
