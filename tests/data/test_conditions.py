"""The condition a model samples under."""

import json
from pathlib import Path

import pytest

from conveyor.config import UserError, sections
from conveyor.data.conditions import apply_template, read_template
from conveyor.data.prompts import load_prompts
from tests.tiny import tiny_tokenizer


def test_the_prompt_takes_its_place_in_the_template() -> None:
    assert apply_template("{good} {prompt}!", "2+{prompt}=") == "{good} 2+{prompt}=!", "braces are text"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c", "name": "x"}]
    assert apply_template("good: {prompt}", chat) == [*chat[:2], {"role": "user", "content": "good: c", "name": "x"}]
    assert chat[2]["content"] == "c", "the chat itself stays"
    with pytest.raises(ValueError, match=r"no \{prompt\}"):
        apply_template("good", "a")
    with pytest.raises(ValueError, match="no user message"):
        apply_template("{prompt}", [{"role": "system", "content": "a"}])


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"prompt_template": 3}', '{"prompt_template": "none"}', '{"prompt_template": "{prompt} {prompt}"}',
        '{"prompt_template": "{condition}: {prompt}"}',
    ],
)  # fmt: skip
def test_a_condition_that_cannot_be_used_is_said(tmp_path: Path, content: str) -> None:
    assert read_template(tmp_path) is None
    (tmp_path / "condition.json").write_text(content)
    with pytest.raises(UserError, match="needs prompt_template"):
        read_template(tmp_path)


def test_engines_read_the_condition_and_nobody_else(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": [{"role": "system", "content": "s"}]}, {"prompt": [{"role": "user", "content": "b"}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, tokenizer = sections.Data(path=str(tmp_path / "rows.jsonl"), max_prompt_length=12, on_bad_row="drop"), tiny_tokenizer()
    first, second = load_prompts(data, tokenizer, template="<{prompt}>")
    assert (first.text, second.messages) == ("a", ({"role": "user", "content": "b"},)), "the row without a user is dropped"
    assert [tokenizer.decode(prompt.token_ids) for prompt in (first, second)] == [f"<s><|user|>{text}<|assistant|>" for text in "ab"]
    assert [tokenizer.decode(prompt.sampling_ids) for prompt in (first, second)] == [f"<s><|user|><{text}><|assistant|>" for text in "ab"]
    with pytest.raises(UserError, match="12\\) tokens or more"):
        load_prompts(data, tokenizer, template="far too long {prompt}")


def test_another_condition_than_the_target(tmp_path):
    told = {"prompt_template": "{prompt} [1.0]", "condition": {"template": "{prompt} [{condition}]"}}
    (tmp_path / "condition.json").write_text(json.dumps(told))
    assert read_template(tmp_path) == "{prompt} [1.0]"
    assert read_template(tmp_path, "-2.0") == "{prompt} [-2.0]"
    with pytest.raises(UserError, match=r"--condition: .* has no condition.json"):
        read_template(tmp_path / "absent", "x")
