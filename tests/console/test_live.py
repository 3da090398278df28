"""Where the numbers go: cadence, streams and files. A fake clock decides what is due."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from jobrunner.console.displays import Bar, Style
from jobrunner.console.files import StatusFile
from jobrunner.console.live import Console
from jobrunner.console.machine import MachineLimits
from jobrunner.console.snapshot import Snapshot, metrics_line
from jobrunner.console.stats import Stats
from jobrunner.console.view import plain_line
from jobrunner.errors import ExitCode, InfrastructureError

LOGGER = logging.getLogger("cbjob")


class FakeClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class CountingStats:
    """Stands for Stats and remembers when a snapshot was taken."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.asked_at: list[float] = []

    def snapshot(self, now_s: float) -> Snapshot:
        self.asked_at.append(now_s)
        return self._stats.snapshot(now_s)

    def ended(self) -> None:
        self._stats.ended()


class GoneReader(io.StringIO):
    """A stream that cannot be written any more, for the given reason."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise OSError(self._error, os.strerror(self._error))


class Terminal:
    """A pseudo-terminal: what a user would see is read from the other side."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._master, 4096)
            except OSError:  # Linux reports the closed other side as an error
                return
            if not chunk:
                return
            self._chunks.append(chunk)

    def close(self) -> str:
        """Everything that was written, once the writer is gone."""
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._chunks).decode("utf-8")


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture(autouse=True)
def logger_is_left_as_it_was() -> Iterator[None]:
    before = (list(LOGGER.handlers), LOGGER.level)
    yield
    assert (list(LOGGER.handlers), LOGGER.level) == before


def run_for(console: Console, stats: object, clock: FakeClock, quarters: int) -> None:
    for _ in range(quarters):
        clock.now_s += 0.25
        console.update(stats)  # type: ignore[arg-type]


def test_plain_lines_come_every_interval_and_once_at_the_end(stats: Stats) -> None:
    clock, stream = FakeClock(200.0), io.StringIO()
    with Console("auto", 10.0, stream=stream, clock=clock) as console:
        run_for(console, stats, clock, 4 * 25)
        expected = [plain_line(stats.snapshot(now_s)) for now_s in (210.0, 220.0)]
        console.finish(stats, "the summary")
    expected += [plain_line(stats.snapshot(225.0)), "the summary"]
    assert stream.getvalue().splitlines() == expected


# a closed pipe, a closed terminal, a full disk
@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("style", ["plain", "rich", "tqdm", "json"])
def test_reader_that_goes_away_does_not_end_the_job(stats: Stats, style: Style, error: int) -> None:
    clock = FakeClock()
    with Console(style, 1.0, stream=GoneReader(error), clock=clock) as console:
        run_for(console, stats, clock, 8)
        LOGGER.warning("nobody reads this")
        console.finish(stats, "the summary")


def test_nothing_runs_in_the_last_line(stats: Stats) -> None:
    stream = io.StringIO()
    with Console("plain", 10.0, stream=stream, clock=FakeClock(200.0)) as console:
        console.finish(stats, "the summary")
    assert "running 0, waiting 0, batch 0, KV 0%, " in stream.getvalue()


def test_json_style_gives_an_object_a_line_for_programs(stats: Stats) -> None:
    clock, stream = FakeClock(200.0), io.StringIO()
    with Console("json", 10.0, stream=stream, clock=clock) as console:
        run_for(console, stats, clock, 4 * 10)
        LOGGER.warning("row 3\nis \x1b[2J bad")
        console.finish(stats, "the\nsummary")
    progress, log, summary = (json.loads(line) for line in stream.getvalue().splitlines())
    assert log == {"event": "log", "level": "warning", "message": "row 3\nis \x1b[2J bad"}
    names = [field.name for field in fields(Snapshot)]
    assert list(progress) == ["event", *names]
    assert list(summary) == ["event", *names, "text"]
    assert (progress["event"], progress["elapsed_s"]) == ("progress", 210.0)
    assert (summary["event"], summary["text"]) == ("summary", "the\nsummary")


def test_tqdm_style_draws_a_bar_over_all_rows(stats: Stats) -> None:
    clock, stream = FakeClock(200.0), io.StringIO()
    with Console("tqdm", 10.0, stream=stream, clock=clock) as console:
        run_for(console, stats, clock, 4 * 10)
        LOGGER.warning("row 3 is \x1b[2J bad")
        console.finish(stats, "the summary")
    written = stream.getvalue()
    assert re.search(r"62%\|.*\| 1250/2000 \[.*row/s?, 71\.4 tokens/s, 3 errors\]", written)
    assert "\rwarning: row 3 is \ufffd[2J bad\n" in written
    assert written.endswith("\nthe summary\n")


def test_tqdm_bar_off_a_terminal_is_drawn_once_an_interval(stats: Stats) -> None:
    clock, counting = FakeClock(), CountingStats(stats)
    with Console("tqdm", 10.0, stream=io.StringIO(), clock=clock) as console:
        run_for(console, counting, clock, 4 * 25)
    assert counting.asked_at == [10.0, 20.0]


def test_tqdm_speed_leaves_out_rows_of_earlier_runs(stats: Stats) -> None:
    bar = Bar(io.StringIO())
    bar.show(stats.snapshot(200.0))
    assert bar._bar is not None
    assert (bar._bar.n, bar._bar.initial) == (1250, 1000)
    bar.close()


def test_status_is_written_at_the_first_update_then_every_interval_and_at_the_end(
    stats: Stats, tmp_path: Path
) -> None:
    path, clock, counting = tmp_path / "status" / "w.json", FakeClock(), CountingStats(stats)
    with Console("off", 10.0, status_path=path, stream=io.StringIO(), clock=clock) as console:
        run_for(console, counting, clock, 4 * 25)
        assert json.loads(path.read_text())["elapsed_s"] == 20.0
        console.finish(counting, "")  # type: ignore[arg-type]
    assert counting.asked_at == [0.25, 10.0, 20.0, 25.0]
    assert json.loads(path.read_text())["elapsed_s"] == 25.0


def test_status_has_the_numbers_and_who_says_them(stats: Stats, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    with Console(
        "off",
        10.0,
        status_path=path,
        identity={"worker": "w", "host": "h", "pid": 7},
        stream=io.StringIO(),
        clock=FakeClock(200.0),
        unix_clock=lambda: 1.7e9,
    ) as console:
        console.finish(stats, "")
    status = json.loads(path.read_text())
    said = {name: status.pop(name) for name in ("worker", "host", "pid", "time", "interval_s")}
    assert said == {"worker": "w", "host": "h", "pid": 7, "time": 1.7e9, "interval_s": 10.0}
    assert status == json.loads(json.dumps(metrics_line(stats.snapshot(200.0))))


def test_status_is_replaced_whole_and_leaves_no_other_file(stats: Stats, tmp_path: Path) -> None:
    path, snapshot = tmp_path / "w.json", stats.snapshot(200.0)
    status = StatusFile(path, {}, 1.0)
    status.write(snapshot, 1.0)
    with path.open() as before:
        status.write(snapshot, 2.0)
        # whoever has it open goes on reading the old one
        assert json.loads(before.read())["time"] == 1.0
    assert json.loads(path.read_text())["time"] == 2.0
    assert os.listdir(tmp_path) == ["w.json"]


def test_status_that_cannot_be_written_is_an_infrastructure_fault(
    stats: Stats, tmp_path: Path
) -> None:
    (tmp_path / "status").write_text("a file where the folder should be")
    path, clock = tmp_path / "status" / "w.json", FakeClock(1.0)
    console = Console("off", 1.0, status_path=path, stream=io.StringIO(), clock=clock)
    with pytest.raises(InfrastructureError, match="cannot write the status"), console:
        console.update(stats)


def test_update_computes_nothing_until_something_is_due(stats: Stats) -> None:
    clock, counting = FakeClock(), CountingStats(stats)
    with Console("plain", 10.0, stream=io.StringIO(), clock=clock) as console:
        run_for(console, counting, clock, 4 * 25)
    assert counting.asked_at == [10.0, 20.0]


def test_live_view_refreshes_at_most_four_times_a_second(stats: Stats) -> None:
    clock, counting = FakeClock(), CountingStats(stats)
    with Console("rich", 1e9, stream=io.StringIO(), clock=clock) as console:
        for _ in range(200):
            clock.now_s += 1 / 64
            console.update(counting)  # type: ignore[arg-type]
    gaps = [b - a for a, b in zip(counting.asked_at, counting.asked_at[1:], strict=False)]
    assert set(gaps) == {0.25}


def test_style_off_shows_only_warnings(stats: Stats) -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Console("off", 1.0, stream=stream, clock=clock) as console:
        run_for(console, stats, clock, 8)
        LOGGER.info("merged a shard")
        LOGGER.warning("row 3 has no text")
        console.finish(stats, "the summary")
    assert stream.getvalue() == "warning: row 3 has no text\n"


def test_nothing_is_written_to_stdout(stats: Stats, capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with Console("rich", 1.0, clock=clock) as console:
        run_for(console, stats, clock, 8)
        console.finish(stats, "the summary")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("the summary\n")


def test_dumb_terminal_gets_plain_lines(stats: Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal, clock = Terminal(), FakeClock(200.0)
    with Console("auto", 1.0, stream=terminal.stream, clock=clock) as console:
        run_for(console, stats, clock, 4)
    assert terminal.close() == plain_line(stats.snapshot(201.0)) + "\r\n"


@pytest.mark.usefixtures("on_a_terminal")
def test_terminal_gets_a_live_view_with_notes_and_logs_above_it(stats: Stats) -> None:
    terminal, clock = Terminal(), FakeClock(200.0)
    with Console("auto", 10.0, stream=terminal.stream, clock=clock) as console:
        run_for(console, stats, clock, 2)
        LOGGER.info("[b]claimed[/b] a span \x1b[2J")
        LOGGER.warning("row %d is bad", 3)
        run_for(console, stats, clock, 2)
        console.finish(stats, "the summary\n  results  runs/[1]/:smile:")
    screen = terminal.close()
    assert "\x1b[" in screen
    assert "\x1b[2J" not in screen
    assert "[b]claimed[/b] a span \ufffd[2J" in screen
    assert "warning: row 3 is bad" in screen
    assert "1,250 of 2,000 rows" in screen
    assert screen.endswith("the summary\r\n  results  runs/[1]/:smile:\r\n")


@pytest.mark.usefixtures("on_a_terminal")
def test_live_view_leaves_the_cursor_visible_while_it_runs(stats: Stats) -> None:
    terminal, clock = Terminal(), FakeClock(200.0)
    console = Console("auto", 10.0, stream=terminal.stream, clock=clock)
    with console:
        run_for(console, stats, clock, 1)
    screen = terminal.close()
    hidden, shown = screen.index("\x1b[?25l"), screen.index("\x1b[?25h")
    assert hidden < shown < screen.index("rows")


@pytest.mark.usefixtures("on_a_terminal")
def test_no_color_is_obeyed(stats: Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, clock = Terminal(), FakeClock(200.0)
    with Console("auto", 10.0, stream=terminal.stream, clock=clock) as console:
        run_for(console, stats, clock, 1)
        LOGGER.warning("row 3 is bad")
        console.finish(stats, "the summary")
    styles = re.findall(r"\x1b\[([0-9;]*)m", terminal.close())
    # bold and plain are left, colours (30 to 49 and 90 to 107) are not
    assert set(styles) <= {"", "0", "1"}


def test_warnings_of_libraries_are_not_lost_after_a_live_view(stats: Stats) -> None:
    before = sys.stderr
    clock = FakeClock()
    with Console("rich", 1.0, clock=clock) as console:
        run_for(console, stats, clock, 4)
    assert sys.stderr is before


def test_log_record_with_traceback_keeps_its_lines(stats: Stats) -> None:
    stream = io.StringIO()
    with Console("plain", 1.0, stream=stream, clock=FakeClock()):
        try:
            raise ValueError("bad\x1b[2J\nwarning: forged")
        except ValueError:
            LOGGER.exception("internal")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["error: internal", "  Traceback (most recent call last):"]
    assert lines[-2:] == ["  ValueError: bad\ufffd[2J", "  warning: forged"]


def test_metrics_lines_have_the_names_of_the_snapshot(stats: Stats, tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", FakeClock(200.0)
    with Console("off", 10.0, path, stream=io.StringIO(), clock=clock) as console:
        run_for(console, stats, clock, 4 * 25)
        console.finish(stats, "the summary")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["elapsed_s"] for line in lines] == [210.0, 220.0, 225.0]
    for line in lines:
        assert list(line) == [field.name for field in fields(Snapshot)]


def test_the_first_line_of_metrics_says_what_the_machine_gives(
    stats: Stats, tmp_path: Path
) -> None:
    path, clock = tmp_path / "metrics.jsonl", FakeClock(200.0)
    with Console("off", 10.0, path, stream=io.StringIO(), clock=clock) as console:
        console.measured(MachineLimits(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))
        run_for(console, stats, clock, 4 * 25)
        console.finish(stats, "the summary")
    first, *others = [json.loads(line) for line in path.read_text().splitlines()]
    names = [field.name for field in fields(Snapshot)]
    assert list(first) == [*names, "machine"]
    assert MachineLimits(**first["machine"]) == MachineLimits(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert all(list(line) == names for line in others)


def test_metrics_of_an_earlier_run_stay(stats: Stats, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with Console("off", 1.0, path, stream=io.StringIO(), clock=FakeClock(9.0)) as console:
            console.finish(stats, "")
    assert len(path.read_text().splitlines()) == 2


def test_metrics_line_is_on_disk_as_soon_as_it_is_due(stats: Stats, tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", FakeClock()
    with Console("off", 1.0, path, stream=io.StringIO(), clock=clock) as console:
        run_for(console, stats, clock, 4)
        assert path.read_text().endswith("}\n")


def test_metrics_that_cannot_be_opened_are_an_infrastructure_fault(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="No such file or directory") as raised:
        Console("off", 1.0, tmp_path / "missing" / "metrics.jsonl")
    assert raised.value.exit_code is ExitCode.INFRASTRUCTURE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_full_disk_stops_the_job(stats: Stats) -> None:
    console = Console("off", 1.0, Path("/dev/full"), stream=io.StringIO(), clock=FakeClock())
    with pytest.raises(InfrastructureError, match="No space left"), console:
        console.finish(stats, "")


@pytest.mark.parametrize("style", ["plain", "rich", "tqdm", "json"])
def test_failure_inside_comes_out_and_the_logger_is_left_in_order(
    stats: Stats, style: Style
) -> None:
    clock = FakeClock()

    def failing_job() -> None:
        with Console(style, 1.0, stream=io.StringIO(), clock=clock) as console:
            run_for(console, stats, clock, 8)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing_job()
