"""`conveyor generate` and `conveyor score`: what their files hold, and that a kill at any moment costs nothing but time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from conveyor.checks import OTHER_HEAD
from conveyor.cli import main
from conveyor.config import UserError, load_recipe, sections
from conveyor.data.completions import load_completions
from conveyor.data.rows import BadRows, read_rows
from conveyor.data.sft import load_sft
from conveyor.data.tokenizer import load_tokenizer
from conveyor.pipeline.row_store import RowStore
from conveyor.run_folder import RunFolder
from tests.pipeline.sampling_in_process import Here, LengthModel, in_process
from tests.tiny import save_tiny_policy, save_tiny_reward_model

PROMPTS = 9
REWARDS = """
def count(prompts, completions, answer, **columns):
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [None if answer == 2 else text.count("a") + 0.5 * answer for text, answer in zip(texts, answer)]

def words(prompts, completions):
    assert all(isinstance(prompt, list) == isinstance(text, list) for prompt, text in zip(prompts, completions))
    return [float(len(text if isinstance(text, str) else text[-1]["content"])) for text in completions]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_policy(folder / "policy")
    save_tiny_reward_model(folder / "judge")
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with prompts and rewards, which is the current one; commands run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("conveyor.pipeline.sampled_rows.Placement", Here)
    rows = [{"prompt": f"say {i}" if i % 2 else [{"role": "user", "content": f"say {i}"}], "answer": i % 3} for i in range(PROMPTS)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(REWARDS)
    Path("recipe.yaml").write_text(
        f"method: grpo\noutput_dir: run\nmodel: {{path: {models / 'policy'}}}\ndata: {{path: elsewhere.jsonl, max_prompt_length: 32}}\n"
        "rewards: [{name: count, function: 'rewards.py:count', weight: 2}]\nrollout: {max_response_length: 6}\nseed: 3\n"
    )
    return tmp_path


def only_texts() -> None:
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}", "answer": i % 3}) + "\n" for i in range(PROMPTS)))


def add(file: str, text: str) -> None:
    with Path(file).open("a") as opened:
        opened.write(text)


def generate(models: Path, *more: str) -> int:
    with in_process():
        return main(["generate", str(models / "policy"), "--data", "prompts.jsonl", "--recipe", "recipe.yaml", "--output-dir", "out",
                     "--n", "2", *more])  # fmt: skip


def rows(file: str) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(file, "train", BadRows("error"))]


def test_a_row_a_sample_in_the_order_of_the_data(here: Path, models: Path, capsys: Any) -> None:
    assert generate(models, "--logprobs") == 0
    found = rows("out/samples.jsonl")
    assert [(row["row"], row["sample"]) for row in found] == [(i + 1, k) for i in range(PROMPTS) for k in range(2)]
    for row in found:
        number = row["row"] - 1
        said = row["prompt"] if number % 2 else row["prompt"][0]["content"]
        assert said == f"say {number}" and row["columns"] == {"answer": number % 3}
        assert len(row["logprobs"]) == len(row["response_ids"]) == row["response_length"] == len(row["completion"])
        assert row["logprob"] == pytest.approx(sum(row["logprobs"])) and row["prompt_ids"][0] == 1
        assert row["finish_reason"] == ("length" if row["response_length"] == 6 else "stop")
        count = None if number % 3 == 2 else row["completion"].count("a") + 0.5 * (number % 3)
        assert row["rewards"] == {"count": count} and row["score"] == (None if count is None else 2 * count)
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "config.yaml",
        "data.json",
        "events.jsonl",
        "samples.jsonl",
        "samples.settings.json",
    ]
    said = capsys.readouterr().out
    scores = [row["score"] for row in found if row["score"] is not None]
    for name, value in {"prompts": 9, "samples": 18, "reward/mean": f"{sum(scores) / len(scores):.4g}"}.items():
        assert [line.split()[-1] for line in said.splitlines() if line.strip().startswith(name)] == [str(value)]


def test_it_is_a_dataset_that_sft_reads(here: Path, models: Path) -> None:
    only_texts()
    assert generate(models, "--format", "parquet") == 0
    tokenizer = load_tokenizer(sections.Model(path=str(models / "policy")))
    samples = load_sft(sections.Data(path="out/samples.parquet"), tokenizer)
    assert [tokenizer.decode(sample.ids[sample.mask][:-1]) for sample in samples] == [
        row["completion"] for row in rows("out/samples.parquet")
    ]


class Killed(Exception):
    pass


@contextmanager
def killed_after(prompts: int, torn: bytes) -> Iterator[None]:
    """The process ends after so many prompts, in the middle of writing the next line."""
    append = RowStore.append

    def cut(self: RowStore, index: int, found: list[dict[str, Any]]) -> None:
        if len(self.done) == prompts:
            self._lines.write(torn)
            self._lines.flush()
            raise Killed
        append(self, index, found)

    with patch.object(RowStore, "append", cut), pytest.raises(Killed):
        yield


@pytest.mark.parametrize("torn", [b"", b'{"index": 8, "rows": [{"ro', '{"index": 8, "rows": [{"completion": "é'.encode()[:-1]])
def test_a_killed_command_goes_on_where_it_stopped(here: Path, models: Path, torn: bytes) -> None:
    assert generate(models, "--logprobs", "--output-dir", "whole") == 0
    for times in (2, 5):
        with killed_after(times, torn):
            generate(models, "--logprobs")
        assert not Path("out/samples.jsonl").exists(), "complete or absent"
    before = len(Path("out/events.jsonl").read_text().splitlines())
    assert generate(models, "--logprobs") == 0
    assert Path("out/samples.jsonl").read_bytes() == Path("whole/samples.jsonl").read_bytes()
    assert len(Path("out/events.jsonl").read_text().splitlines()) > before, "events go on too"
    assert not list(Path("out").glob("*partial*"))


def test_nothing_is_sampled_again_that_is_there(here: Path, models: Path, capsys: Any) -> None:
    with killed_after(5, b""):
        generate(models)
    with patch("conveyor.pipeline.sampled_rows.Sampler.sample", autospec=True) as sample:
        generate(models)
    assert len(sample.call_args.args[1]) == PROMPTS - 5
    Path("out/samples.jsonl").unlink()


def test_what_is_complete_stays_and_overwrite_begins_anew(here: Path, models: Path, capsys: Any) -> None:
    assert generate(models) == 0
    first = Path("out/samples.jsonl").read_bytes()
    assert generate(models) == 0 and "complete already" in capsys.readouterr().out
    assert generate(models, "--seed", "4", "--overwrite") == 0
    assert Path("out/samples.jsonl").read_bytes() != first


@pytest.mark.parametrize(
    ("more", "change", "line"),
    [
        (("--rollout.temperature", "0.7"), (), "rollout.temperature: 0.7, but out was begun with 1.0"),
        (("--n", "3"), (), "rollout.n_samples_per_prompt: 3, but out was begun with 2"),
        (("--logprobs",), (), "logprobs: True, but out was begun with False"),
        ((), ("prompts.jsonl", '{"prompt": "more", "answer": 1}\n'), "data.path (content): "),
        ((), ("rewards.py", "#\n"), "rewards.count (files): "),
        (("--rewards.0.weight", "3"), (), "rewards.count.weight: 3.0, but out was begun with 2.0"),
    ],
)  # fmt: skip
def test_other_settings_do_not_go_on_with_it(
    here: Path, models: Path, more: tuple[str, ...], change: tuple[str, ...], line: str, capsys: Any
) -> None:
    with killed_after(5, b""):
        generate(models)
    kept = Path("out/samples.partial.jsonl").read_bytes()
    if change:
        add(*change)
    assert generate(models, *more) == 2
    assert line in capsys.readouterr().err and Path("out/samples.partial.jsonl").read_bytes() == kept
    Path("out/samples.settings.json").unlink()


def test_settings_that_change_no_sample_may_differ(here: Path, models: Path) -> None:
    with killed_after(5, b""):
        generate(models)
    assert generate(models, "--format", "parquet") == 2, "prompts are texts and messages"
    assert generate(models, "--rollout.max_concurrent_requests", "9", "--devices.rollout", "1") == 0
    assert len(rows("out/samples.jsonl")) == 2 * PROMPTS


@pytest.mark.parametrize("columns", [{}, {"answer": {}, "more": [{"deep": {}}]}])
def test_parquet_of_rows_with_empty_mappings(tmp_path: Path, columns: dict[str, Any]) -> None:
    """A dataset of prompts alone has no columns. A spool that a kill has left goes."""
    (tmp_path / ".samples.rows.jsonl").write_text("torn")
    store = RowStore(tmp_path, "samples")
    store.open({})
    store.append(0, [{"prompt": "p", "completion": "c", "columns": columns}])
    file = store.finish(store.rows(), "parquet")
    (row,) = rows(str(file))
    told = None if not columns else {"answer": None, "more": [{"deep": None}]}
    assert row == {"prompt": "p", "completion": "c", "columns": told}
    assert [set(one.columns) for one in load_completions(sections.Data(path=str(file)), None)] == [set(columns)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.parquet", "samples.settings.json"]


@pytest.mark.parametrize("values", [[2**70], [1, "one"], [[1], {"a": 1}]])
def test_rows_that_parquet_cannot_hold_stay(tmp_path: Path, values: list[Any]) -> None:
    store = RowStore(tmp_path, "samples")
    store.open({})
    for index, value in enumerate(values):
        store.append(index, [{"value": value}])
    with pytest.raises(UserError, match="--format parquet: it cannot hold these rows") as said:
        store.finish(store.rows(), "parquet")
    assert "\n" not in str(said.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.partial.jsonl", "samples.settings.json"]
    assert [row["value"] for row in rows(str(store.finish(store.rows(), "jsonl")))] == values


def test_the_same_data_may_be_named_otherwise(here: Path, models: Path, capsys: Any) -> None:
    Path("rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    assert score(str(here / "rows.jsonl"), "--reward", "rewards.py:words") == 0
    assert score("rows.jsonl", "--reward", "rewards.py:words") == 0 and "complete already" in capsys.readouterr().out
    add("rows.jsonl", '{"prompt": "p", "completion": "d"}\n')
    assert score("rows.jsonl", "--reward", "rewards.py:words") == 2
    assert "data.path (content): " in capsys.readouterr().err


def test_a_reward_model_samples_nothing(here: Path, models: Path, capsys: Any) -> None:
    """Said before engines start."""
    assert main(["generate", str(models / "judge"), "--data", "prompts.jsonl", "--recipe", "recipe.yaml"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("judge is a LlamaForSequenceClassification, not a language model that writes text") and "\n" not in said


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        ("Qwen2ForCausalLM", True), ("GPT2LMHeadModel", True), ("Gemma3ForConditionalGeneration", True), ("LlamaForCausalLMEagle3", True),
        ("Qwen2ForRewardModel", False), ("LlamaForTokenClassification", False), ("BertForMaskedLM", False),
    ],
)  # fmt: skip
def test_architectures_that_write(name: str, writes: bool) -> None:
    assert (OTHER_HEAD.search(name) is None) == writes


def test_a_run_is_not_written_over(here: Path, models: Path, capsys: Any) -> None:
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text("{}\n")
    assert generate(models, "--overwrite") == 2
    assert "out holds a run (metrics.jsonl)" in capsys.readouterr().err
    Path("out/metrics.jsonl").unlink()
    Path("out/samples.jsonl").write_text("{}\n")
    assert generate(models) == 2
    assert "is not of this command" in capsys.readouterr().err and Path("out/samples.jsonl").read_text() == "{}\n"


def test_one_command_does_not_write_over_another(here: Path, models: Path, capsys: Any) -> None:
    assert generate(models) == 0
    made = Path("out/samples.jsonl").read_bytes()
    Path("rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    assert score("rows.jsonl", "--reward", "rewards.py:words", "--output-dir", "out", "--overwrite") == 2
    assert "out/samples.jsonl is of another command" in capsys.readouterr().err and Path("out/samples.jsonl").read_bytes() == made
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder.check(load_recipe("recipe.yaml", {"output_dir": "out"}))


def test_the_condition_of_a_model_is_put_to_its_engines_alone(here: Path, models: Path, tmp_path: Path, capsys: Any) -> None:
    conditioned = save_tiny_policy(tmp_path / "conditioned")
    (conditioned / "condition.json").write_text(json.dumps({"prompt_template": "good: {prompt}"}))
    tokenizer = load_tokenizer(sections.Model(path=str(conditioned)))

    def read(*more: str) -> list[str]:
        with in_process():
            assert (
                main(["generate", str(conditioned), "--data", "prompts.jsonl", "--logprobs", "--output-dir", "out", "--overwrite", *more])
                == 0
            )
        found = rows("out/samples.jsonl")
        assert [row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"] for row in found] == [
            f"say {i}" for i in range(PROMPTS)
        ]
        return [tokenizer.decode(row["prompt_ids"]) for row in found]

    assert read() == [f"<s><|user|>good: say {i}<|assistant|>" for i in range(PROMPTS)]
    assert "condition.json: prompts are put as 'good: {prompt}'" in capsys.readouterr().out
    assert read("--no-condition") == [f"<s><|user|>say {i}<|assistant|>" for i in range(PROMPTS)]
    (conditioned / "condition.json").write_text("{}")
    assert main(["generate", str(conditioned), "--data", "prompts.jsonl"]) == 2
    assert "needs prompt_template" in capsys.readouterr().err


# ── score ────────────────────────────────────────────────────────────────────────────────────────


def score(data: str, *more: str, model: LengthModel | None = None) -> int:
    with in_process(model=model):
        return main(["score", data, "--output-dir", "scored", *more])


def test_what_was_generated_is_scored_with_its_own_columns(here: Path, models: Path) -> None:
    """Without any model: functions see text."""
    assert generate(models) == 0
    generated = rows("out/samples.jsonl")
    assert score("out/samples.jsonl", "--reward", "rewards.py:count", "--reward", "rewards.py:words", "--rewards.1.weight", "0.1") == 0
    scored = rows("scored/scores.jsonl")
    assert [{**row, "rewards": None, "score": None} for row in scored] == [{**row, "rewards": None, "score": None} for row in generated]
    for row, before in zip(scored, generated, strict=True):
        assert row["rewards"] == {"count": before["rewards"]["count"], "words": float(len(row["completion"]))}
        assert row["score"] == pytest.approx((row["rewards"]["count"] or 0) + 0.1 * len(row["completion"]))


def test_reward_models_read_the_tokens_the_policy_sampled(here: Path, models: Path) -> None:
    """`LengthModel` counts them: a truncated response has no end, an ended one has EOS once."""
    lines = [
        {"prompt": "2+2=", "completion": "four"},
        {"prompt": "2+2=", "completion": "four", "finish_reason": "length"},
        {"prompt": "2+2=", "completion": ""},
        {"prompt": "2+2=", "completion": [{"role": "assistant", "content": "5</s>"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
                      {"role": "assistant", "content": "d!"}]},
    ]  # fmt: skip
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert score("rows.jsonl", "--model", str(models / "judge")) == 0
    assert [row["rewards"] for row in rows("scored/scores.jsonl")] == [{"judge": float(n)} for n in (5, 4, 1, 2, 3)]
    tokenizer = load_tokenizer(sections.Model(path=str(models / "judge")))
    chat = load_completions(sections.Data(path="rows.jsonl"), tokenizer)[-1]
    assert tokenizer.decode(chat.token_ids) == "<s><|user|>a<|assistant|>b</s><|user|>c<|assistant|>" and chat.completion == "d!"
    assert chat.messages is not None and len(chat.messages) == 3


def test_scoring_goes_on_where_it_stopped_and_leaves_bad_rows_out(here: Path, models: Path) -> None:
    lines = [{"prompt": f"p{i}", "completion": "a" * i} for i in range(8)]
    bad = [*lines[:3], {"prompt": "no completion"}, *lines[3:]]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bad))
    assert score("rows.jsonl", "--reward", "rewards.py:words") == 2
    command = ("rows.jsonl", "--reward", "rewards.py:words", "--data.on_bad_row", "drop", "--format", "parquet")
    with killed_after(4, b'{"index"'):
        score(*command)
    assert score(*command) == 0
    found = rows("scored/scores.parquet")
    assert [(row["completion"], row["score"]) for row in found] == [("a" * i, float(i)) for i in range(8)]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "score: name a reward with --reward, --model or --recipe"),
        (("--reward", "rewards.py:nothing"), "rewards.nothing.function: "),
        (("--reward", "rewards.py:count"), "the function asks for the column answer"),
        (("--reward", "rewards.py:words", "--rollout.temperature", "2"), "--rollout.temperature: score samples nothing"),
        (("--model", "policy"), "rewards.policy.model: "),
        (("--reward", "rewards.py:words", "--roles", "x"), "score: roles: "),
    ],
)
def test_what_cannot_be_scored_is_one_line(here: Path, arguments: tuple[str, ...], line: str, capsys: Any) -> None:
    Path("rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    assert score("rows.jsonl", *arguments) == 2
    said = capsys.readouterr().err.strip()
    assert line in said and "\n" not in said


def test_a_response_must_be_the_assistants(tmp_path: Path) -> None:
    for row, reason in (
        ({"prompt": "p", "completion": [{"role": "user", "content": "c"}]}, "must be the assistant's"),
        ({"messages": [{"role": "assistant", "content": "c"}]}, "no message before the response"),
        ({"prompt": "p"}, "completion: missing"),
        ({"prompt": "p", "completion": 3}, "completion: must be"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=reason):
            load_completions(sections.Data(path=str(tmp_path / "rows.jsonl")), None)
