"""report.html of runs: complete, self-contained, and plain errors where there is nothing to report on."""

import base64
import re

import pytest

from conveyor.config import UserError
from conveyor.report.events import Event, EventLog
from conveyor.report.page import write_report
from conveyor.report.progress import MetricsLog

pytestmark = pytest.mark.slow  # pictures


@pytest.fixture
def run(tmp_path):
    """Three steps of a second each: 0.6 s rollout, 0.25 s training, 0.15 s sync."""
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in range(1, 4):
            log.append(
                {
                    "step": step,
                    "reward/mean": 0.1 * step,
                    "reward/<b>": 1.0,
                    "kl": None if step == 1 else 0.01,
                    "tokens": 12345,
                    "idle/rollout": 0.3,
                }
            )
    with EventLog(tmp_path / "events.jsonl") as events:
        for step in range(1, 4):
            events.append(Event("rollout", "rollout 0", "rollout", "rollout", step, None, step - 1, step + 0.0, step + 0.5))
            events.append(Event("rollout", "rollout 0", "rollout", "rollout", step, None, step - 1, step + 0.1, step + 0.6))
            events.append(Event("train", "train 0", "actor", "train", step, 0, step - 1, step + 0.6, step + 0.8))
            events.append(Event("train", "train 0", "actor", "update", step, None, step - 1, step + 0.8, step + 0.85))
            events.append(Event("train", "train 0", "actor", "publish", step, None, step - 1, step + 0.85, step + 0.9))
            events.append(Event("rollout", "rollout 0", "rollout", "install", step, None, step, step + 0.9, step + 1.0))
    (tmp_path / "config.yaml").write_text("method: ppo  # <script>\n")
    return tmp_path


def cells(page):
    """First cell of each table row → the others; of rows that begin alike, the first."""
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return {row[0]: row[1:] for row in reversed(rows) if row}


def test_a_report_shows_curves_timeline_and_numbers(run):
    page = write_report(run).read_text()
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert len(pictures) == 2 and all(picture.startswith(b"\x89PNG") for picture in pictures)
    rows = cells(page)
    assert rows["reward/mean"] == ["0.1", "0.3", "0.1", "0.3", "0.2"]  # first, last, smallest, largest, mean
    assert rows["kl"] == ["0.01"] * 5
    assert rows["tokens"][0] == "12,345"
    assert rows["busy"] == ["70.0%", "30.0%"] and rows["idle: waiting for train"] == ["25.0%", "0.0%"]
    assert rows["idle: waiting for sync"] == ["5.0%", "10.0%"]
    assert rows["all"] == ["3", "2.25 rollout", "75%", "12,345", "30.0%", "70.0%"]  # seconds, bound, efficiency, tokens/s, idle
    assert rows["bound: rollout busy, plus syncs (seconds)"] == ["2.25"] and rows["efficiency (bound / actual)"] == ["0.75"]


@pytest.mark.slow
def test_the_timeline_stands_beside_the_page(run):
    page = write_report(run).read_text()
    picture = (run / "timeline.png").read_bytes()
    assert base64.b64encode(picture).decode("ascii") in page
    write_report(run, step=2)
    assert (run / "timeline.png").read_bytes() != picture and "Step 2: who did what when" in (run / "report.html").read_text()


def test_a_report_stands_alone_and_escapes_names(run):
    page = write_report(run).read_text()
    assert not re.search(r"https?://|<script|<link", page)
    assert "<b>" not in page and "reward/&lt;b&gt;" in page
    assert len(page) < 500_000


def test_a_run_without_events_has_a_report_too(run):
    (run / "events.jsonl").unlink()
    (run / "config.yaml").unlink()
    page = write_report(run).read_text()
    assert page.count("data:image/png") == 1 and "<details>" not in page
    assert not (run / "timeline.png").exists()


def test_nothing_to_report_on_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: not found"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="no step has finished yet"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{\n")
    with pytest.raises(UserError, match="line 1"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
