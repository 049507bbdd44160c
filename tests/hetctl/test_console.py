"""The output sink while ranks run: no reader that goes away, stops or is slow holds anything up."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hetctl import console
from hetctl.console import Sink

ROOT = Path(__file__).parents[2]


def piped(monkeypatch: pytest.MonkeyPatch) -> tuple[Sink, IO[str], int]:
    """A sink that writes both streams into one real pipe, as under `2>&1 |`; its end to write to, and to read from."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return Sink(), stream, reading


def test_a_reader_that_went_away_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, stream, reading = piped(monkeypatch)
    with stream:
        os.close(reading)
        with sink.outliving_readers():
            sink.say("a line")
            sink.warn("a doubt")
        sink.say("and what comes later goes nowhere")


def test_a_reader_that_stopped_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte into a pipe that holds 64 KiB: without the thread this would wait for ever."""
    monkeypatch.setattr(console, "PATIENCE_S", 0.2)
    sink, stream, reading = piped(monkeypatch)
    with stream:
        with sink.outliving_readers():
            for _ in range(1000):
                sink.say("x" * 1000)
        sink.say("and what comes later goes nowhere")
        os.close(reading)


def test_a_slow_reader_reads_in_order_and_hears_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "MOST_UNREAD", 100)
    sink, stream, reading = piped(monkeypatch)
    with stream, os.fdopen(reading) as end:
        with sink.outliving_readers():
            for number in range(500):
                sink.say(f"{number} " + "x" * 1000)
            reader = threading.Thread(target=lambda: lines.extend(end))
            lines: list[str] = []
            reader.start()
        sink.say("after")
        sink.people.file.flush()
        stream.close()
        reader.join()
    numbers = [int(line.split()[0]) for line in lines if line[0].isdigit()]
    assert numbers == sorted(numbers)
    assert len(numbers) >= 100
    assert any("lines were not read in time" in line for line in lines)
    assert lines[-1] == "after\n"


def test_who_waits_for_the_reader_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "MOST_UNREAD", 100)
    sink, stream, reading = piped(monkeypatch)
    lines: list[str] = []
    with stream, os.fdopen(reading) as end:
        reader = threading.Thread(target=lambda: lines.extend(end))
        reader.start()
        with sink.outliving_readers():
            for number in range(5000):
                sink.await_reader()
                sink.say(str(number))
        stream.close()
        reader.join()
    assert lines == [f"{number}\n" for number in range(5000)]


def test_a_stream_without_a_descriptor_is_written_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    sink = Sink()
    with sink.outliving_readers():
        sink.say("a line")
    assert out.getvalue() == "a line\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here: Linux has it")
def test_a_full_disk_under_the_output_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        sink = Sink()
        with sink.outliving_readers():
            sink.say("a line")


@pytest.mark.parametrize(("argv", "code"), [(("--help",), 1), (("plan", "--set", "nonsense"), 2)])
def test_an_error_keeps_its_exit_code_though_nobody_reads_it(argv: tuple[str, ...], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hetctl", *argv], cwd=ROOT, stdout=writing, stderr=writing, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == code


def test_a_command_that_is_told_to_end_closes_what_it_opened() -> None:
    program = (
        "import time, hetctl.app as app\n"
        "def command():\n"
        "    try:\n        print('open', flush=True); time.sleep(60)\n"
        "    finally:\n        print('closed')\n"
        "app.app = command\napp.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    process.terminate()
    assert process.communicate() == ("closed\n", None)
    assert process.returncode == 143


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_word_of_a_table_is_cut_on_a_narrow_terminal(width: int) -> None:
    sink = Sink()
    sink.people = Console(file=io.StringIO(), width=width, color_system=None)
    words = ["a", "/a/path/that/is/rather/long/[x]", "12345678.9", "to be told apart"]
    table = Table("island", "folder", "tokens per second", "remark", title="runs", caption="of today")
    table.add_row(*map(escape, words))
    sink.say(table)
    assert isinstance(sink.people.file, io.StringIO)
    text = sink.people.file.getvalue()
    assert "…" not in text
    for word in " ".join((*words, "island tokens second runs today")).split():
        assert word in text
    assert ("┏" in text) == (width == 200)  # in between without its frame
    assert ("remark to be told apart\nof today" in text) == (width in (40, 60))
