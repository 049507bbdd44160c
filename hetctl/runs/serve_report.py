"""`hetctl report --serve`: a run's page over HTTP on the loopback, made anew each time it is asked for."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hetctl.comm.contract.errors import ConfigError, HetctlError, of_system
from hetctl.console import Sink
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.render.report import report_page
from hetctl.runs.manage import find_folder
from hetctl.runs.report import figures

FOLLOW_S = 3.0  # how often the page asks for a newer one
HOST = "127.0.0.1"


def serve_report(word: str | None, port: int, sink: Sink) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError where there is no such run, or the port is taken."""
    folder = find_folder(word)
    figures(folder)
    with report_server(folder, port) as server:
        sink.say(f"{folder.name}: http://{HOST}:{server.server_port}/ (Ctrl-C ends it; the run goes on)")
        with suppress(KeyboardInterrupt):  # the way to leave; of the run it ends nothing
            server.serve_forever()


def report_server(folder: RunFolder, port: int) -> ThreadingHTTPServer:
    """The server, listening. Raises ConfigError where the port is taken."""
    try:
        return ThreadingHTTPServer((HOST, port), partial(_Handler, folder))
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used: {error}", hint="another --port, or none for a free one"
        ) from None


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page at /, and nothing else."""

    def __init__(self, folder: RunFolder, *of_request: Any) -> None:
        self.folder = folder
        super().__init__(*of_request)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost"):  # a name of somebody else's that leads here: logs may hold secrets
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            with suppress(ConnectionError):  # the tab was closed meanwhile
                self._answer(*self._page())

    def log_message(self, format: str, *args: Any) -> None:
        """The page asks every few seconds: nobody wants to read that."""

    def _page(self) -> tuple[HTTPStatus, str]:
        try:
            summary, timeline = figures(self.folder)
            return HTTPStatus.OK, report_page(self.folder, {**summary, "timeline": timeline}, follow_s=FOLLOW_S)
        except (OSError, HetctlError) as error:
            said = error if isinstance(error, HetctlError) else of_system(error)
            return HTTPStatus.INTERNAL_SERVER_ERROR, f"{said}\n"

    def _answer(self, status: HTTPStatus, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        kind = "html" if status == HTTPStatus.OK else "plain"
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
