import numpy as np
import pytest

from conveyor.config import UserError, sections
from conveyor.data.samples import Sample
from conveyor.data.unpaired import load_unpaired, mismatch
from tests.data.chats import ASSISTANT, BOS, EOS, TOKENIZER, USER, assistant, ids, user, write_jsonl


def load(tmp_path, *rows, **data):
    return load_unpaired(sections.Data(path=str(write_jsonl(tmp_path / "d.jsonl", rows)), **data), TOKENIZER)


def test_a_row_is_a_sample_with_its_label(tmp_path):
    good, bad = load(
        tmp_path, {"prompt": "2+2=", "completion": "4", "label": True}, {"prompt": "2+2=", "completion": "five", "label": False}
    )
    assert (good.label, bad.label, good.prompt, bad.prompt) == (True, False, 0, 0)
    assert good.sample.ids.tolist() == [BOS, USER, *ids("2+2="), ASSISTANT, *ids("4"), EOS]
    assert bad.sample.ids[bad.sample.mask].tolist() == [*ids("five"), EOS]


def test_of_a_chat_only_the_last_answer_is_judged(tmp_path):
    chat = [user("a"), assistant("b"), user("c"), assistant("d"), user("left out")]
    one, _ = load(tmp_path, {"messages": chat, "label": True}, {"messages": chat, "label": False}, train_on="assistant")
    assert one.sample.ids[one.sample.mask].tolist() == [*ids("d"), EOS]


def test_pairs_give_two_samples(tmp_path):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "chosen": "b", "rejected": "c"},
        {"chosen": [user("a"), assistant("x")], "rejected": [user("a"), assistant("y")]},
    ]
    labelled = load(tmp_path, *rows)
    assert [(item.label, item.prompt) for item in labelled] == [(True, 0), (False, 0), (True, 1), (False, 1), (True, 0), (False, 0)]


def test_prompts_past_the_template(tmp_path):
    rows = [{"chosen": "Q: 1? A: b", "rejected": "Q: 1? A: c"}, {"prompt": "Q: 1? A:", "completion": " d", "label": False}]
    assert [item.prompt for item in load(tmp_path, *rows, apply_chat_template=False)] == [0, 0, 0]


def test_csv_spells_labels_as_text(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,completion,ok\na,b,True\na,c,FALSE\na,d,true\n")
    labelled = load_unpaired(sections.Data(path=str(tmp_path / "d.csv"), label_column="ok"), TOKENIZER)
    assert [item.label for item in labelled] == [True, False, True]
    (tmp_path / "d.csv").write_text("prompt,completion,ok\na,b,1\n")
    with pytest.raises(UserError, match=r"d.csv:2: ok: must be true or false, not '1'"):
        load_unpaired(sections.Data(path=str(tmp_path / "d.csv"), label_column="ok"), TOKENIZER)


@pytest.mark.parametrize(("label", "shown"), [(1, "1"), (0, "0"), ("true", "'true'"), (1.0, "1.0"), ([True], r"\[True\]")])
def test_a_label_is_a_boolean(tmp_path, label, shown):
    row = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(UserError, match=rf"d.jsonl:1: label: must be true or false, not {shown}"):
        load(tmp_path, row)


def test_one_kind_of_label_is_warned_of(tmp_path, caplog):
    assert len(load(tmp_path, {"prompt": "a", "completion": "b", "label": False})) == 1
    assert "d.jsonl: every sample is labelled false" in caplog.text
    caplog.clear()
    load(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"})
    assert not caplog.text


def test_mismatch_by_hand():
    one = Sample(np.array([1, 10, 11, 12, 2], np.int32), np.array([False, False, False, True, True]), "f:1")
    other = Sample(np.array([1, 20, 21, 22, 2], np.int32), np.array([False, False, True, True, True]), "f:2")
    mixed = mismatch(one, other)
    assert mixed.ids.tolist() == [1, 10, 11, 21, 22, 2] and mixed.ids.dtype == np.int32
    assert mixed.mask.tolist() == [False, False, False, True, True, True]
    assert mismatch(other, one).ids.tolist() == [1, 20, 12, 2]


def test_mismatch_equals_the_row_written_out(tmp_path):
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in (("ab", "cd"), ("x", "yz"), ("ab", "yz"))]
    one, other, both = (item.sample for item in load(tmp_path, *rows))
    mixed = mismatch(one, other)
    assert (mixed.ids.tolist(), mixed.mask.tolist()) == (both.ids.tolist(), both.mask.tolist())
