"""An HTTP server on this machine that records the calls it gets, and takes an `Idempotency-Key`.

A call with a key that was carried out before is answered and not carried out again. Calls without a key are all
carried out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal, NamedTuple, Self
from urllib.request import Request, urlopen

KEY_HEADER: Final = "Idempotency-Key"
_CALL_TIMEOUT_S: Final = 30.0

Moment = Literal["received", "performed"]
Interfere = Callable[[Moment, str], int | None]
"""Called with the body of a call before and after it is carried out. A status ends the call there, with this status."""


class ReceivedCall(NamedTuple):
    body: str
    key: str | None


class CallRecorder:
    """
    >>> with CallRecorder() as recorder:
    ...     for _ in range(2):
    ...         post(recorder.url, "invoice 17", key="a")
    ...     recorder.performed
    Counter({'invoice 17': 1})
    """

    def __init__(self, interfere: Interfere = lambda *_: None) -> None:
        self.interfere = interfere
        self.received: list[ReceivedCall] = []
        self.performed: Counter[str] = Counter()
        """How many times each body was carried out."""
        self.order: list[str] = []
        """The bodies that were carried out, in their order."""
        self._keys: set[str] = set()
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="semel-call-recorder")

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, body: str, key: str | None) -> int:
        """Carry the call out if it has to be; the status to answer with."""
        with self._lock:
            self.received.append(ReceivedCall(body, key))
        status = self.interfere("received", body)
        if status is not None:
            return status
        self._perform(body, key)
        return self.interfere("performed", body) or 200

    def _perform(self, body: str, key: str | None) -> None:
        with self._lock:
            if key is not None and key in self._keys:
                return
            if key is not None:
                self._keys.add(key)
            self.performed[body] += 1
            self.order.append(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.recorder = recorder

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The caller was killed and does not hear the answer."""


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, _Server)
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.send_response(self.server.recorder.take(body, self.headers.get(KEY_HEADER)))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the recorder has it all."""


def post(url: str, body: str, *, key: str | None = None) -> None:
    """Make a call, as a user's program would. Raises unless the answer is 200."""
    headers = {} if key is None else {KEY_HEADER: key}
    with urlopen(Request(url, body.encode(), headers, method="POST"), timeout=_CALL_TIMEOUT_S):
        pass
