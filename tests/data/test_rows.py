import datetime
import decimal
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from conveyor.config import UserError
from conveyor.data.rows import BadRows, read_rows


def read(path, policy="error"):
    return list(read_rows(str(path), "train", BadRows(policy)))


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


DEEP = "[" * 100_000 + "]" * 100_000
ROWS = [{"prompt": "a\u2028b", "n": "007"}, {"prompt": "ü", "n": "8"}]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.parquet"])
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    if name == "d.jsonl":
        write(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n")
    elif name == "d.json":
        write(path, json.dumps(ROWS))
    elif name == "d.csv":
        datasets.Dataset.from_list(ROWS).to_csv(path)
    else:
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    rows = read(path)
    assert [dict(row.values) for row in rows] == ROWS
    assert [row.number for row in rows] == [0, 1]


def test_place_is_the_line_of_the_file(tmp_path):
    path = write(tmp_path / "d.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [row.place for row in read(path)] == [f"{path}:1", f"{path}:3"]


def test_byte_order_mark_and_windows_lines(tmp_path):
    path = write(tmp_path / "d.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [row.values["prompt"] for row in read(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"a": 1}\n{"a": \n', r"d.jsonl:2: not valid JSON"),
        ("d.jsonl", '{"a": 1}\n[1]\n', r"d.jsonl:2: a row is a JSON object, this is a list"),
        ("d.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"d.jsonl:2: not UTF-8 \(byte 0xff\)"),
        ("d.json", '[\n{"a": 1},\n]', r"d.json:3: not valid JSON"),
        ("d.json", '{"a": 1}', r"d.json: a .json dataset is one list of objects"),
        ("d.json", "[{}, 1]", r"d.json: row 1: must be an object, not int"),
        ("d.csv", "a,b\n1,2\n3\n", r"d.csv:3: fewer cells than the header has"),
        ("d.csv", "a,b\n1,2,3\n", r"d.csv:2: more cells than the header has"),
        ("d.csv", "a,b,a\n1,2,3\n", r"d.csv:1: the header has the column a twice"),
        pytest.param("d.jsonl", '{"a": 1}\n{"a": ' + DEEP + "}", "d.jsonl:2: lists or objects nested too deeply", id="deep-jsonl"),
        pytest.param("d.json", DEEP, "d.json: lists or objects nested too deeply", id="deep-json"),
        pytest.param("d.json", '[{"a": ' + "9" * 5000 + "}]", "d.json: not valid JSON: Exceeds the limit", id="digits"),
        ("d.jsonl", '{"a": "\\ud83d\\ude00"}\n{"b": ["x\\uD800"]}', r"d.jsonl:2: b: \\ud800 is half a character, no valid Unicode"),
        ("d.json", '[{}, {"\\udfff": 1}]', r"d.json: row 1: \\udfff: \\udfff is half a character"),
        ("d.parquet", "nonsense", r"data.path: .*d.parquet: not a Parquet file"),
        ("d.txt", "x", r"data.path: .*d.txt: unknown extension; one of .jsonl, .json, .parquet, .csv"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as error:
        read(write(tmp_path / name, content))
    assert "\n" not in str(error.value)


def test_a_line_that_is_not_utf8_is_one_bad_row(tmp_path):
    """Other lines and their numbers stay; a byte order mark moves nothing."""
    path = write(tmp_path / "d.jsonl", b'\xef\xbb\xbf{"a": "\xfe"}\n{"a": "x\xc3"}\n\n{"a": "\xc3\xbc"}\n')
    bad = BadRows("drop")
    assert [(row.place, row.number, row.values) for row in read_rows(str(path), "train", bad)] == [(f"{path}:4", 2, {"a": "ü"})]
    assert bad.dropped == 2 and str(bad.first) == f"{path}:1: not UTF-8 (byte 0xfe)"


@pytest.mark.parametrize(("name", "text"), [("d.json", '["\n", "{}"]'), ("d.csv", "a\n{}\n")])
def test_other_files_that_are_not_utf8_end_the_run(tmp_path, name, text):
    path = write(tmp_path / name, b"\xef\xbb\xbf" + text.encode().replace(b"{}", b"\xff"))
    with pytest.raises(UserError, match=rf"{name}:\d: not UTF-8 \(byte 0xff\)"):
        read(path, "drop")


def test_parquet_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    column = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"a": column}), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"d.parquet: row 1: not UTF-8 \(byte 0xff\)"):
        read(tmp_path / "d.parquet")
    assert [(row.number, row.values) for row in read(tmp_path / "d.parquet", "drop")] == [(0, {"a": "a"}), (2, {"a": "c"})]


TYPED = {
    "at": datetime.datetime(2024, 5, 1, 12, 30), "day": datetime.date(2024, 5, 1), "price": decimal.Decimal("1.25"),
    "deep": [{"at": datetime.datetime(2024, 5, 1), "none": None}],
}  # fmt: skip
PLAIN = {"at": "2024-05-01T12:30:00", "day": "2024-05-01", "price": 1.25, "deep": [{"at": "2024-05-01T00:00:00", "none": None}]}


@pytest.mark.parametrize("hub", [False, True])
def test_typed_columns_become_what_json_knows(tmp_path, monkeypatch, hub):
    """Samples and scores are written as JSON, so what JSON has not is found before anything is sampled."""
    made = [TYPED, TYPED | {"image": b"\x89PNG"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made, schema=pyarrow.Table.from_pylist(made[1:]).schema), tmp_path / "d.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: made)
    source = "some/dataset" if hub else str(tmp_path / "d.parquet")
    bad = BadRows("drop")
    assert [{**row.values, "image": None} for row in read_rows(source, "train", bad)] == [PLAIN | {"image": None}]
    assert str(bad.first).startswith(f"{source}: row 1: image: a column of bytes; text, numbers")


def test_numbers_and_truth_values(tmp_path):
    """CSV spells both as text; other formats have types."""
    (cells,) = read(write(tmp_path / "d.csv", "x,y,z\n-1e-3, True ,1\n"))
    assert (cells.finite("x"), cells.boolean("y"), cells.finite("z")) == (-0.001, True, 1.0)
    (row,) = read(write(tmp_path / "d.jsonl", '{"x": "1", "y": "true", "z": 1, "big": 1' + "0" * 400 + "}"))
    assert row.finite("z") == 1.0
    for call, key, message in (
        (row.finite, "x", "x: must be a finite number, not '1'"),
        (row.finite, "big", "big: must be a finite number, not 1000"),
        (row.finite, "w", "w: missing"),
        (row.boolean, "y", "y: must be true or false, not 'true'"),
        (row.boolean, "z", "z: must be true or false, not 1"),
        (row.boolean, "w", "w: missing"),
        (cells.boolean, "z", "z: must be true or false, not '1'"),
        (cells.finite, "y", "y: must be a finite number, not ' True '"),
    ):
        with pytest.raises(UserError, match=message):
            call(key)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UserError, match=r"data.path: .*absent.jsonl: no such file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"data.path: .* is a folder"):
        read(tmp_path)


def test_bad_rows_are_dropped_and_counted_where_the_recipe_says_so(tmp_path, caplog):
    path = write(tmp_path / "d.jsonl", '{"a": 1}\nnonsense\n{"a": 2}\n')
    bad = BadRows("drop")
    assert [row.number for row in read_rows(str(path), "train", bad)] == [0, 2]
    bad.report(2, str(path))
    assert f"dropped 1 malformed rows of 3; the first: {path}:2: not valid JSON" in caplog.text


def test_empty_dataset_and_all_bad():
    with pytest.raises(UserError, match="x: the dataset is empty"):
        BadRows("drop").report(0, "x")


def test_parquet_values_become_what_json_knows(tmp_path):
    import datetime
    import decimal

    import pyarrow
    import pyarrow.parquet

    when = datetime.datetime(2024, 5, 6, 7, 8, 9)
    good = {"when": when, "day": when.date(), "price": decimal.Decimal("1.50"), "inner": {"at": [when]}, "text": "a"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([good]), tmp_path / "rows.parquet")
    (row,) = read(tmp_path / "rows.parquet")
    assert row.values == {
        "when": "2024-05-06T07:08:09", "day": "2024-05-06", "price": 1.5, "inner": {"at": ["2024-05-06T07:08:09"]}, "text": "a",
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"raw": b"\x00"}]), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows.parquet: row 0: raw: a column of bytes"):
        read(tmp_path / "rows.parquet")
