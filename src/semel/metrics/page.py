"""The page that Prometheus reads, from a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self

from semel.errors import ConfigError
from semel.metrics.families import write_families
from semel.metrics.parts import PREFIX, REGISTRY

VARIABLE: Final = "SEMEL_METRICS"
_LOG: Final = logging.getLogger("semel.metrics")
_TIMEOUT_S: Final = 5.0
_asked_lock = threading.Lock()
_asked: MetricsServer | None = None
_was_tried: set[str] = set()


class MetricsServer:
    """Serves the metrics until it is closed, at the latest until the program ends."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"Metrics cannot be served on {host}:{port} ({error.strerror or error}). Nothing else is affected: "
                "give each process on a machine its own port, or port 0 for any."
            ) from error
        self.address: Final = "{}:{}".format(*self._server.server_address[:2])
        thread = threading.Thread(target=self._server.serve_forever, name="semel-metrics", daemon=True)
        thread.start()
        _LOG.info("metrics for Prometheus: http://%s/metrics", self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = os.name == "posix"


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, kind, body = 404, "text/plain", b"Ask for /metrics.\n"
        if self.path.partition("?")[0] in ("/", "/metrics"):
            from prometheus_client.exposition import CONTENT_TYPE_LATEST

            status, kind, body = 200, CONTENT_TYPE_LATEST, write_families(REGISTRY.families(), PREFIX)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _LOG.debug(format, *args)


def parse_address(text: str) -> tuple[str, int]:
    """
    >>> parse_address("127.0.0.1:9105"), parse_address("9105"), parse_address("[::1]:0")
    (('127.0.0.1', 9105), ('127.0.0.1', 9105), ('::1', 0))
    """
    host, colon, port = text.strip().rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise ConfigError(f"{text!r} is no address for metrics: write HOST:PORT, such as 127.0.0.1:9105.")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve_if_asked() -> None:
    """Serve as SEMEL_METRICS says, once in a process. What is wrong with it must not stop a pipeline."""
    global _asked
    address = os.environ.get(VARIABLE)
    if not address:
        return
    with _asked_lock:
        if address in _was_tried:
            return
        _was_tried.add(address)
        try:
            _asked = MetricsServer(*parse_address(address))
        except ConfigError as error:
            _LOG.warning("%s (%s)", error, VARIABLE)


def asked_address() -> str | None:
    """Where SEMEL_METRICS has the metrics served, if it has."""
    return None if _asked is None else _asked.address
