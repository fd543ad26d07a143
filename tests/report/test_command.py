"""`conveyor report`: what it prints and writes, of finished runs, of runs that go on, and of folders that are none."""

import argparse
import itertools
import json
import struct

import pytest

from conveyor.config import UserError
from conveyor.report import command
from conveyor.report.causes import CAUSES
from conveyor.report.events import EventLog
from conveyor.report.gantt import WIDTH, draw_timeline
from conveyor.report.page import DOTS
from conveyor.report.progress import MetricsLog
from conveyor.report.timeline import step_windows
from tests.report.steps import STREAMED, event

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    """Two steps of 12 s each."""
    later = [event(e.worker, e.task, e.start + 12, e.end + 12, step=2, micro_batch=e.micro_batch) for e in STREAMED]
    with EventLog(tmp_path / "events.jsonl") as log:
        for one in [*STREAMED, *later]:
            log.append(one)
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        for step in (1, 2):
            metrics.append({"step": step, "tokens": 600 * step, "tokens_per_second": 50.0 * step})
    (tmp_path / "config.yaml").write_text("rollout:\n  max_concurrent_requests: 4\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def report(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    known, rest = parser.parse_known_args([str(argument) for argument in arguments])
    return command.run(known, {word.removeprefix("--"): value for word, value in zip(rest[::2], rest[1::2], strict=True)})


def tables(capsys):
    """Title → first cell of each row → the others. Lines that stand alone are titles too."""
    found = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if cells and not line.startswith(" "):
            rows = found.setdefault(cells[0], {})
        elif cells:
            rows[cells[0]] = cells[1:]
    return found


def size(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_it_prints_where_the_time_went(folder, capsys):
    assert report(folder) == 0
    found = tables(capsys)
    assert f"{folder}: 2 steps" in found
    steps = found["Steps"]
    assert steps["1"] == ["12", "6.5 rollout", "54%", "50", "54.2%", "83.3%", "54.2%"]
    assert steps["all"] == ["24", "13 rollout", "54%", "75", "54.2%", "83.3%", "54.2%"]
    score = found["Idle time of score by cause"]
    assert score["step"] == ["busy", "waiting for rollout", "longest samples", "waiting for train", "waiting for sync", "other"]
    assert score["1"] == ["16.7%", "33.3%", "8.3%", "20.8%", "16.7%", "4.2%"]
    together = found["Time of the devices, all steps"]
    assert together["busy"] == ["45.8%", "16.7%", "45.8%"]
    assert together["idle: waiting for train"] == ["20.8%", "20.8%", "0.0%"]
    assert together["samples in an engine, mean"] == ["0.5 of 4", "–", "–"]
    assert found["Tasks, all steps (seconds)"]["train (role)"] == ["4", "7", "1.75", "2", "train 0, micro-batch 1.0"]


def test_it_writes_trace_timeline_and_page(folder, capsys):
    report(folder)
    assert f"{folder}: wrote trace.json (opens in ui.perfetto.dev), timeline.png, report.html" in tables(capsys)
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "timeline" in (folder / "report.html").read_text()
    width, height = size((folder / "timeline.png").read_bytes())
    assert width == WIDTH * DOTS and 200 < height < 600


def test_one_step(folder, capsys):
    report(folder, "--step", 2)
    found = tables(capsys)
    assert "Steps" not in found and found["Bound, step 2"]["seconds"] == ["12"]
    with pytest.raises(UserError, match=r"--step 3: .* has steps 1 to 2"):
        report(folder, "--step", 3)


def test_a_run_that_goes_on(folder, capsys):
    """Its third step has begun: events beyond the metrics, a last line half written, no model yet."""
    (folder / "model").rmdir()
    with (folder / "events.jsonl").open("a") as events:
        text = (folder / "events.jsonl").read_text().splitlines()
        events.write(text[0].replace('"step": 1', '"step": 3') + "\n" + text[7].replace('"step": 1', '"step": 3') + "\n" + text[1][:40])
    assert report(folder) == 0
    found = tables(capsys)
    assert f"{folder}: 2 steps so far: it is going on, or ended before its model was saved" in found
    assert "2" in found["Steps"] and "3" not in found["Steps"]


def test_a_run_without_stages_has_metrics_only(folder, capsys):
    (folder / "events.jsonl").unlink()
    assert report(folder) == 0
    found = tables(capsys)
    assert found["Metrics"]["tokens"] == ["600", "1,200", "600", "1,200", "900"]
    assert f"{folder}: wrote report.html" in found and not (folder / "trace.json").exists()
    with pytest.raises(UserError, match="has no timeline: its method has no stages"):
        report(folder, "--step", 1)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: not found; a report needs the folder of a run"):
        report(tmp_path)
    with pytest.raises(UserError, match="--stpe: unknown argument"):
        report(tmp_path, "--stpe", 1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 64])
def test_the_picture_has_a_legible_row_for_each_worker(count):
    events = [event(f"rollout {n}", task, 0, 2 + n) for n in range(count) for task in ("rollout", "evaluate")]
    events.append(event("train 0", "update", 70, 80))
    figure = draw_timeline(events, step_windows(events), {"rollout": dict.fromkeys(CAUSES, 1.0), "train": dict.fromkeys(CAUSES, 0.0)})
    axes = figure.axes[0]
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [*(f"rollout {n}" for n in range(count)), "train 0"]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes))  # no name covers the next
    assert figure.get_figheight() < 16


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("events.jsonl", '{"start": "abc"}', "not an event"),
        ("events.jsonl", '{"step": null}', "step is no whole number"),
        ("events.jsonl", '{"end": NaN}', "end is no number"),
        ("config.yaml", "a: [", "config.yaml: not valid YAML"),
        ("config.yaml", b"\xff\xfe", "config.yaml: not valid YAML"),
        ("metrics.jsonl", b"\xff\xfe", "metrics.jsonl: not UTF-8"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(folder, file, content, message):
    if file == "events.jsonl":
        first = json.loads((folder / file).read_text().splitlines()[0])
        content = json.dumps(first | json.loads(content)) + "\n"
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        report(folder)
    assert "\n" not in str(caught.value)


def test_a_report_that_cannot_be_written_is_one_line(folder):
    (folder / "trace.json").mkdir()
    with pytest.raises(UserError, match=r"trace\.json: Is a directory"):
        report(folder)
