"""`hetctl report --serve`: the page as the run is now, on the loopback only, until it is interrupted."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.runs.serve_report import report_server
from tests.hetctl.render.pages import planning, run_folder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return run_folder(tmp_path / "run", planning(), steps=5)


@pytest.fixture
def port(folder: RunFolder) -> Iterator[int]:
    with report_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def asked(port: int, path: str = "/", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_the_page_is_of_the_run_as_it_is_now(folder: RunFolder, port: int) -> None:
    status, page = asked(port)
    assert status == 200
    assert "5 steps of llama-1b" in page
    assert "data-follow='3.0'" in page
    folder.append_metrics({"step": 6, "loss": 2.0, "tokens": 16384, "tokens_per_s": 9000.0})
    assert "6 steps of llama-1b" in asked(port)[1]
    assert not folder.report.exists(), "looking writes nothing"


def test_only_its_page_is_served_and_only_to_this_machine(folder: RunFolder, port: int) -> None:
    assert asked(port, "/plan.yaml")[0] == 404
    assert asked(port, "/../recipe.yaml")[0] == 404
    assert asked(port, Host="evil.example:80")[0] == 403
    with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
        report_server(folder, port)


def test_a_damaged_folder_is_said_and_the_server_stays(folder: RunFolder, port: int) -> None:
    plan = folder.plan.read_text()
    folder.plan.write_text("islands: 7")
    status, said = asked(port)
    assert status == 500
    assert "plan.yaml" in said
    folder.plan.write_text(plan)
    assert asked(port)[0] == 200


def test_it_says_where_and_ends_with_ctrl_c(folder: RunFolder) -> None:
    argv = [sys.executable, "-m", "hetctl", "report", str(folder.path), "--serve"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a shell's background jobs ignore SIGINT, and so would what they start
    process = subprocess.Popen(
        argv, cwd=ROOT, preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL), **pipes
    )
    assert process.stdout is not None
    address = re.search(r"http://127.0.0.1:(\d+)/", process.stdout.readline())
    assert address is not None
    assert asked(int(address[1]))[0] == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
