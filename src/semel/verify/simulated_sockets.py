"""What Semel's own client meets of a simulated machine: a clock, sleep, and sockets on the bad network.

Bytes come and go as they do on TCP, in pieces of any size; whole frames are what the network delays, loses and repeats.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from semel.broker.state import Broker
from semel.client.cluster import Cluster
from semel.client.connection import Connection
from semel.verify.simulated_network import Line, Network
from semel.verify.simulated_threads import SimulatedThread
from semel.wire.api import Api

_HEADER = struct.Struct(">ihhi")


class SimulatedSocket(Line):
    """The client's end of a connection. Has the face of `semel.client.connection.Stream`."""

    def __init__(self, network: Network, broker: Broker, name: str, fileno: int, thread: SimulatedThread) -> None:
        super().__init__(network, broker)
        self._name = name
        self._fileno = fileno
        self._thread = thread
        self._timeout_s = 0.0
        self._outgoing = b""
        self._incoming = b""

    @property
    def is_readable(self) -> bool:
        return bool(self._incoming) or not self.is_open

    def fileno(self) -> int:
        return self._fileno

    def settimeout(self, value: float | None, /) -> None:
        assert value is not None, "a client that may wait for ever is no part of this"
        self._timeout_s = value

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        self._thread.check_alive()
        if not self.is_open:
            raise BrokenPipeError("the broker is gone")
        data = b"".join(buffers)
        data = data[: self._network.piece(len(data))]
        self._outgoing += data
        while len(self._outgoing) >= 4 and len(self._outgoing) >= 4 + int.from_bytes(self._outgoing[:4], "big"):
            size = 4 + int.from_bytes(self._outgoing[:4], "big")
            self._launch_frame(self._outgoing[:size])
            self._outgoing = self._outgoing[size:]
        return len(data)

    def _launch_frame(self, frame: bytes) -> None:
        _, api, version, number = _HEADER.unpack_from(frame)
        self.launch(number, f"{self._name} {Api(api).name} v{version} #{self._fileno}.{number}", frame)

    def recv_into(self, buffer: memoryview, /) -> int:
        if not self._thread.wait_until(lambda: self.is_readable, self._timeout_s):
            raise TimeoutError("timed out")
        count = self._network.piece(min(len(buffer), len(self._incoming)))
        buffer[:count] = self._incoming[:count]
        self._incoming = self._incoming[count:]
        return count

    def close(self) -> None:
        """What was sent before still arrives; the broker learns of the end behind it."""
        self._fileno = -1
        if self.is_open:
            self.is_open = False
            self._network.loop.call_at(self._in_order(self._last_arrival), self._server.close)

    def open_answer(self, number: int, data: bytes) -> Any:
        return data

    def give(self, number: int, answer: Any) -> None:
        if self.is_open:
            self._incoming += answer
            self._thread.wake()

    def on_end(self) -> None:
        self._thread.wake()


class SimulatedMachine:
    """One life of a process: its thread, its clock, and the sockets it has opened."""

    def __init__(self, network: Network, name: str, clock: Callable[[], float], work: Callable[[], None]) -> None:
        self.clock = clock
        self.thread = SimulatedThread(network.loop, work)
        self._network = network
        self._name = name
        self._sockets: dict[int, SimulatedSocket] = {}

    async def run(self) -> None:
        """Until the process ends; with it end its connections."""
        try:
            await self.thread.run()
        finally:
            for socket in self._sockets.values():
                socket.close()

    def sleep(self, seconds: float) -> None:
        self.thread.sleep(seconds)

    @property
    def make_cluster(self) -> Callable[..., Cluster]:
        """A `Cluster` of this machine."""
        return partial(
            Cluster, clock=self.clock, sleep=self.sleep, connect=self.connect, wait_readable=self.wait_readable
        )

    def connect(self, host: str, port: int, timeout_s: float) -> SimulatedSocket:
        self.sleep(self._network.delay())
        if self._network.fate() == "request lost":
            self.sleep(timeout_s)
            raise TimeoutError("timed out")
        broker = self._network.host.broker_if_up()
        if broker is None:
            raise ConnectionRefusedError("connection refused")
        fileno = self._network.next_number()
        socket = self._sockets[fileno] = SimulatedSocket(self._network, broker, self._name, fileno, self.thread)
        return socket

    def wait_readable(self, connections: Iterable[Connection], timeout_s: float) -> list[Connection]:
        listed = [(connection, self._sockets[connection.fileno()]) for connection in connections]
        self.thread.wait_until(lambda: any(socket.is_readable for _, socket in listed), timeout_s)
        return [connection for connection, socket in listed if socket.is_readable]
