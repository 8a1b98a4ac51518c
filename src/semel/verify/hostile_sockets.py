"""Hostile clients on real sockets, against a broker in a process of its own that must outlive all of them."""

from __future__ import annotations

import random
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from semel.broker.held_memory import HELD_BYTES_MAX
from semel.broker.process import Broker
from semel.records import reference
from semel.verify.hostile_frames import TRANSACTIONAL_IDS, FrameMaker, World, mutate, served, with_size
from semel.verify.hostile_host import Violation
from semel.verify.memory import rss_bytes
from semel.verify.simulated_network import make_request
from semel.wire.api import Api
from semel.wire.messages import decode_response, encode_request, response_type_for

RSS_BYTES_MAX: Final = HELD_BYTES_MAX + (400 << 20)
"""What the broker may have in memory at any time: what clients may make it hold, and 400 MiB for itself, its allocator
and the largest answer that is on its way."""
LATENCY_S_MAX: Final = 2.0
"""How long a client may wait for an answer beside hostile ones, on a machine that has other things to do as well."""

_PATIENCE_S: Final = 20.0
_WAIT_S: Final = 0.3
_LAST: Final = 2**31 - 2
_SENTINEL: Final = b"".join(encode_request(make_request(Api.API_VERSIONS, 0, {}), _LAST, "sound"))
_CAP: Final = 104_857_600
_CAP_BEFORE_LOGIN: Final = 524_288


class HostileClients:
    """All of them, one kind after the other. Each method raises Violation, and leaves no connection open."""

    def __init__(self, broker: Broker, seed: int) -> None:
        self._broker = broker
        self.process_id = broker.process_id
        self._chance = random.Random(seed)
        host, _, port = broker.bootstrap.rpartition(":")
        self._address = (host, int(port))
        self.highest_rss_bytes = 0

    # What every kind needs.

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=_PATIENCE_S)

    def ask(self, api: Api, version: int, /, **fields: Any) -> Any:
        with self.connect() as client:
            return ask(client, api, version, **fields)

    def check_alive(self) -> float:
        """Seconds for a new client's first answer. The process must be the same, and not too large."""
        began = time.monotonic()
        self.ask(Api.API_VERSIONS, 0)
        took_s = time.monotonic() - began
        if not self._broker.is_running or self._broker.process_id != self.process_id:
            raise Violation("the broker is not the process that it was")
        rss = rss_bytes(self.process_id)
        self.highest_rss_bytes = max(self.highest_rss_bytes, rss)
        if rss > RSS_BYTES_MAX:
            raise Violation(f"the broker holds {rss:,} bytes")
        if took_s > LATENCY_S_MAX:
            raise Violation(f"a new client waited for {took_s:.1f} s")
        return took_s

    # Frames.

    def send_mutated(self, frames: int) -> Counter[str]:
        """Spoiled frames, each followed by a sound one, whose answer or whose end is waited for."""
        world = World()
        for name in TRANSACTIONAL_IDS:
            answer = self.ask(Api.INIT_PRODUCER_ID, 1, transactional_id=name, transaction_timeout=60_000)
            world.producers[name] = (answer.producer_id, answer.producer_epoch)
        maker, everything = FrameMaker(world, self._chance), list(served())
        samples = [maker.frame(api, version, 1)[4:] for api, version in everything for _ in range(2)]
        outcomes: Counter[str] = Counter()
        client = self.connect()
        for number in range(frames):
            outcome = _send_one(client, mutate(self._chance.choice(samples), self._chance))
            outcomes[outcome] += 1
            if outcome != "served":
                client.close()
                client = self.connect()
            if number % 1_000 == 0:
                self.check_alive()
        client.close()
        return outcomes

    # Sizes.

    def announce_absurd_sizes(self) -> None:
        for size in (-1, -(2**31), 2**31 - 1, _CAP + 1):
            with self.connect() as client:
                client.sendall(struct.pack(">i", size) + b"x")
                if not is_closed(client):
                    raise Violation(f"a frame of {size:,} bytes was not refused")
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(self.connect()).sendall(struct.pack(">i", _CAP) + bytes(70_000))
            self.check_alive()

    def announce_absurd_sizes_before_login(self, user: str, password: str) -> None:
        """On a listener that asks for a login: 512 KiB before it, 100 MiB after it."""
        with self.connect() as client:
            client.sendall(struct.pack(">i", _CAP_BEFORE_LOGIN + 1))
            if not is_closed(client):
                raise Violation("a stranger may announce more than 512 KiB")
        with self.connect() as client:
            ask(client, Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
            answer = ask(client, Api.SASL_AUTHENTICATE, 2, auth_bytes=f"\0{user}\0{password}".encode())
            if answer.error_code:
                raise Violation(f"a sound login failed: {answer}")
            body = make_request(Api.METADATA, 4, {"topics": [{"name": "t"}], "allow_auto_topic_creation": False})
            frame = b"".join(encode_request(body, 5, "sound"))
            size = _CAP_BEFORE_LOGIN + 1000
            client.sendall(struct.pack(">i", size) + frame[4:] + bytes(size - len(frame) + 4))
            if read_frame(client) is None:
                raise Violation("a large frame after the login was refused")
            client.sendall(struct.pack(">i", _CAP + 1))
            if not is_closed(client):
                raise Violation("a frame over the cap was not refused after the login")

    def stop_amid_large_frames(self, clients: int, sent_bytes: int) -> None:
        """Announce all that is allowed, send most of it, and stop."""
        block = bytes(1 << 20)
        with ExitStack() as stack:
            for _ in range(clients):
                client = stack.enter_context(self.connect())
                try:
                    client.sendall(struct.pack(">i", _CAP))
                    for _ in range(sent_bytes >> 20):
                        client.sendall(block)
                except OSError:
                    continue  # the one that holds most has to go
                self.check_alive()

    # Slowness.

    def send_byte_by_byte(self, clients: int) -> float:
        """All at the same time. Returns the longest that another client had to wait meanwhile."""
        request = make_request(Api.METADATA, 4, {"topics": [{"name": "t"}], "allow_auto_topic_creation": False})
        frame = b"".join(encode_request(request, 1, "slow"))
        slowest_s = 0.0
        with ExitStack() as stack, self.connect() as other:
            slow = [stack.enter_context(self.connect()) for _ in range(clients)]
            for client in slow:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(len(frame)):
                for client in slow:
                    client.sendall(frame[at : at + 1])
                began = time.monotonic()
                ask(other, Api.API_VERSIONS, 0)
                slowest_s = max(slowest_s, time.monotonic() - began)
            for client in slow:
                if read_frame(client) is None:
                    raise Violation("a client that sends byte by byte was not answered")
        if slowest_s > LATENCY_S_MAX:
            raise Violation(f"beside slow clients another waited for {slowest_s:.1f} s")
        return slowest_s

    def end_half_way(self, clients: int) -> None:
        """Half a frame, then the end: said properly, or cut off."""
        for number in range(clients):
            client = self.connect()
            client.sendall(struct.pack(">i", 1000) + b"half")
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            client.shutdown(socket.SHUT_WR)
            if not is_closed(client):
                raise Violation("a client that has ended is kept")
            client.close()
        self.check_alive()

    def connect_and_do_nothing(self, clients: int) -> float:
        """Returns how long one client more waits for its answer."""
        with ExitStack() as stack:
            idle = [stack.enter_context(self.connect()) for _ in range(clients)]
            took_s = self.check_alive()
            for client in (idle[0], idle[-1]):
                ask(client, Api.API_VERSIONS, 0)
        return took_s

    def storm(self, clients: int) -> None:
        """Connections that come and go as fast as they can."""
        for number in range(clients):
            client = self.connect()
            if number % 3 == 0:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif number % 3 == 1:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            client.close()
        self.check_alive()

    def never_read(self, clients: int, requests: int, topic: str = "unread") -> None:
        """Ask for megabytes again and again, and never take them."""
        self._fill(topic, megabytes=4)
        part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 26}
        fetch = {
            "replica_id": -1,
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": 1 << 26,
            "isolation_level": 0,
            "topics": [{"topic": topic, "partitions": [part]}],
        }
        frame = b"".join(encode_request(make_request(Api.FETCH, 4, fetch), 1, "deaf"))
        with ExitStack() as stack:
            for _ in range(clients):
                client = stack.enter_context(self.connect())
                client.setblocking(False)
                try:
                    for _ in range(requests):
                        client.send(frame)
                except OSError:
                    continue  # the broker takes no more of them, as it should
                self.check_alive()
            self.check_alive()

    def _fill(self, topic: str, megabytes: int) -> None:
        self.ask(Api.METADATA, 4, topics=[{"name": topic}], allow_auto_topic_creation=True)
        batch = reference.encode_batch([reference.Record(0, 0, None, bytes(1_000_000))])
        partitions = [{"index": 0, "records": batch}]
        for _ in range(megabytes):
            produce = {"transactional_id": None, "acks": 1, "timeout": 1000}
            self.ask(Api.PRODUCE, 3, **produce, topic_data=[{"name": topic, "partition_data": partitions}])

    # In the end.

    def check_transaction(self) -> None:
        """A normal client writes a transaction and reads it; nothing of all this has left a trace in the log."""
        import semel

        topic = f"after-{time.time_ns()}"
        with semel.Admin({"bootstrap.servers": self._broker.bootstrap}) as admin:
            admin.create_topics(topic)
        producer = semel.Producer(bootstrap_servers=self._broker.bootstrap, transactional_id=topic)
        with producer, producer.transaction():
            producer.send(topic, b"committed")
        with semel.Fetcher({"bootstrap.servers": self._broker.bootstrap}) as fetcher:
            fetcher.assign({(topic, 0): "earliest"})
            values = fetcher.read(timeout_ms=10_000).column("value").to_pylist()
        if values != [b"committed"]:
            raise Violation(f"a normal client reads {values} after all this")
        self.check_alive()
        log = self._broker.log_path.read_text(errors="replace")
        if "Traceback" in log:
            raise Violation(f"the broker logged an exception: {log[log.index('Traceback') :][:4000]}")


def _send_one(client: socket.socket, body: bytes) -> str:
    client.settimeout(_WAIT_S)
    try:
        client.sendall(with_size(body) + _SENTINEL)
        while (answer := read_frame(client)) is not None:
            if struct.unpack_from(">i", answer)[0] == _LAST:
                return "served"
    except TimeoutError:
        return "left waiting"  # a fetch or a join that waits, and the sound request behind it
    except OSError:
        return "closed"
    return "closed"


def ask(client: socket.socket, api: Api, version: int, /, **fields: Any) -> Any:
    """One sound request and its answer on this connection."""
    request = make_request(api, version, fields)
    client.sendall(b"".join(encode_request(request, 1, "sound")))
    answer = read_frame(client)
    if answer is None:
        raise Violation(f"a sound {api.name} was answered by the end of the connection")
    return decode_response(response_type_for(request), answer)


def read_frame(client: socket.socket) -> bytes | None:
    """The next answer; None when the connection ends."""
    size = _read(client, 4)
    return None if size is None else _read(client, struct.unpack(">i", size)[0])


def _read(client: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = client.recv(min(1 << 20, count - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)


def is_closed(client: socket.socket) -> bool:
    """Whether the broker closes the connection, waited for."""
    readable, _, _ = select.select([client], [], [], _PATIENCE_S)
    if not readable:
        return False
    try:
        return client.recv(1) == b""
    except OSError:
        return True


@contextmanager
def hostile_clients(seed: int, **broker: Any) -> Iterator[HostileClients]:
    """A broker in its own process, and those who mean it harm."""
    with Broker(fsync="never", **broker) as started:
        yield HostileClients(started, seed)
