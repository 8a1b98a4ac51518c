"""Clients' connections to a simulated broker: real frames through the broker's own connection code, over a bad network.

A frame may be late, lost with its connection, answered into the void, or arrive a second time much later on another
connection, as the packets of a client do that has given up and tried again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

from kio.static.protocol import ResponsePayload

from semel.broker.connection import Connection
from semel.broker.listeners import ListenerSettings
from semel.broker.state import Broker
from semel.wire.api import Api
from semel.wire.messages import decode_response, encode_request, read_correlation_id, request_schema, response_type_for
from semel.wire.shape import nested_entity

LISTENER = ListenerSettings()
_SHARED = bytearray(64 * 1024)
_ONE_BEHIND_THE_OTHER_S = 1e-6

Peek = Callable[[Any], None]


class Lost(Exception):
    """The connection ended or no answer came: what became of the request is not known."""


class Host(Protocol):
    """What the network knows of the machine that the broker runs on."""

    def broker_if_up(self) -> Broker | None: ...

    def deliver(self, connection: SimulatedConnection, frame: bytes) -> None: ...

    def note(self, line: str) -> None: ...

    def happened(self) -> None: ...


@dataclass(slots=True)
class Weather:
    """How bad the network is. All rates are per request; times are in milliseconds."""

    delay_max_ms: float = 8
    slow_rate: float = 0.02
    slow_max_ms: float = 400
    request_lost_rate: float = 0.01
    answer_lost_rate: float = 0.02
    cut_rate: float = 0.01
    repeat_rate: float = 0.05
    repeat_max_ms: float = 3_000
    piece_rate: float = 0.05

    def clear_up(self) -> None:
        self.slow_rate = self.request_lost_rate = self.answer_lost_rate = self.cut_rate = self.repeat_rate = 0


class SimulatedConnection(Connection):
    """The broker's end. What it sends goes to `on_answer`."""

    def __init__(self, broker: Broker, on_answer: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        super().__init__(broker, LISTENER, "client", _SHARED)
        self._on_answer = on_answer
        self._on_end = on_end
        broker.connection_opened(self)

    def receive(self, data: bytes) -> None:
        while data and not self.is_closed:
            buffer = self.frames.buffer()
            count = min(len(data), len(buffer))
            buffer[:count] = data[:count]
            data = data[count:]
            self.bytes_received(count)

    def send_bytes(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._on_answer(b"".join(pieces))

    def outgoing_bytes(self) -> int:
        return 0

    def set_reading(self, reading: bool) -> None:
        return None

    def close_socket(self) -> None:
        self._on_end()


class Line:
    """A connection and both its directions: what is sent on it arrives in order, late, or not at all."""

    def __init__(self, network: Network, broker: Broker) -> None:
        self.is_open = True
        self._network = network
        self._server = SimulatedConnection(broker, self._answered, self._server_ended)
        self._under_way: dict[int, str] = {}
        self._lost_answers: set[int] = set()
        self._last_arrival = self._last_answer = 0.0
        self._is_silent = False

    def launch(self, number: int, name: str, frame: bytes, may_repeat: Callable[[], bool] = lambda: True) -> None:
        """Send a frame and leave it to its fate. `number` is its correlation id, `name` how the trace calls it."""
        network, loop = self._network, self._network.loop
        fate = network.fate()
        self._under_way[number] = name
        if fate == "answer lost":
            self._lost_answers.add(number)
        network.host.note(f"> {name} {zlib.crc32(frame):08x}" + (f" {fate}" if fate else ""))
        if fate == "request lost":
            self._is_silent = True  # TCP has no holes: what follows on this connection does not arrive either
        if fate == "cut":
            loop.call_later(network.delay(), self.end)
        if not self._is_silent:
            self._last_arrival = self._in_order(self._last_arrival)
            loop.call_at(self._last_arrival, self._arrive, frame)
        network.repeat_later(name, frame, may_repeat, not_before=0 if self._is_silent else self._last_arrival)

    def _in_order(self, last: float) -> float:
        """When what is sent now comes through: behind what was sent before it."""
        return max(last + _ONE_BEHIND_THE_OTHER_S, self._network.loop.time() + self._network.delay())

    def end(self) -> None:
        """The client gives up, or the connection was cut: whoever waits learns that nothing is known."""
        if self.is_open:
            self.is_open = False
            self._server.close()
            self.on_end()

    def _arrive(self, frame: bytes) -> None:
        if not self._server.is_closed:
            self._network.host.deliver(self._server, frame)

    def _answered(self, data: bytes) -> None:
        number = read_correlation_id(memoryview(data)[4:])
        name = self._under_way.pop(number, None)
        if self._network.host.broker_if_up() is not self._server.broker:
            return  # its process has died in a write; what it still does here, nobody hears of
        self._network.host.happened()
        if name is None or not self.is_open:
            return
        self._network.host.note(f"< {name} {zlib.crc32(data):08x}")
        answer = self.open_answer(number, data)
        if number in self._lost_answers:
            self._is_silent = True
        if not self._is_silent:
            self._last_answer = self._in_order(self._last_answer)
            self._network.loop.call_at(self._last_answer, self.give, number, answer)

    def _server_ended(self) -> None:
        if self.is_open:
            self._network.loop.call_later(self._network.delay(), self.end)

    # What the client's end provides.

    def open_answer(self, number: int, data: bytes) -> Any:
        """The broker answers at this moment; returns what `give` is to get when the answer has come through."""
        raise NotImplementedError

    def give(self, number: int, answer: Any) -> None:
        raise NotImplementedError

    def on_end(self) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class _Call:
    response_type: type[ResponsePayload]
    done: asyncio.Future[Any]
    timer: asyncio.TimerHandle
    peek: Peek | None


class Channel(Line):
    """The connection of a client that thinks in requests, from its beginning to its end; then it opens another."""

    def __init__(self, network: Network, name: str, broker: Broker) -> None:
        super().__init__(network, broker)
        self._name = name
        self._calls: dict[int, _Call] = {}

    def post(
        self,
        api: Api,
        version: int,
        fields: Mapping[str, Any],
        *,
        timeout_ms: float,
        peek: Peek | None = None,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> asyncio.Future[Any]:
        """Send a request; the answer, or Lost, is in the future. Requests of one channel arrive in order.

        `peek` sees the answer at the moment when the broker gives it. `may_repeat` tells whether the protocol bears a
        second copy that arrives now.
        """
        network, loop = self._network, self._network.loop
        done: asyncio.Future[Any] = loop.create_future()
        if not self.is_open:
            done.set_exception(Lost())
            return done
        request = make_request(api, version, fields)
        number = network.next_number()
        frame = b"".join(encode_request(request, number, self._name))
        timer = loop.call_later(timeout_ms / 1000, self.end)
        self._calls[number] = _Call(response_type_for(request), done, timer, peek)
        self.launch(number, f"{self._name} {api.name} v{version} #{number}", frame, may_repeat)
        return done

    def open_answer(self, number: int, data: bytes) -> Any:
        call = self._calls[number]
        response = decode_response(call.response_type, memoryview(data)[4:])
        if call.peek is not None:
            call.peek(response)
        return response

    def give(self, number: int, answer: Any) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call.timer.cancel()
            call.done.set_result(answer)

    def on_end(self) -> None:
        for call in self._calls.values():
            call.timer.cancel()
            if not call.done.done():
                call.done.set_exception(Lost())
                call.done.exception()  # a client that is gone does not look
        self._calls.clear()


class Network:
    """Everything between the clients and the broker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random, host: Host) -> None:
        self.loop = loop
        self.host = host
        self.weather = Weather()
        self._chance = chance
        self._last_number = 0
        self._storms = 0

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def open(self, name: str) -> Channel:
        """Raises Lost while no broker runs."""
        broker = self.host.broker_if_up()
        if broker is None:
            raise Lost
        return Channel(self, name, broker)

    def delay(self) -> float:
        """Seconds that the next frame is on its way."""
        weather = self.weather
        slow = weather.slow_max_ms if self._chance.random() < weather.slow_rate else 0
        return (0.1 + self._chance.random() * (weather.delay_max_ms + slow)) / 1000

    def piece(self, count: int) -> int:
        """How many of these bytes one call on a socket takes: TCP promises no more than one."""
        if count > 1 and self._chance.random() < self.weather.piece_rate:
            return self._chance.randint(1, count)
        return count

    def fate(self) -> str:
        weather, dice = self.weather, self._chance.random()
        for name, rate in (
            ("request lost", weather.request_lost_rate),
            ("answer lost", weather.answer_lost_rate),
            ("cut", weather.cut_rate),
        ):
            if dice < rate:
                return name
            dice -= rate
        return ""

    def forget_repeats(self) -> None:
        """So much time has passed at once that no packet of before can still be under way."""
        self._storms += 1

    def repeat_later(self, name: str, frame: bytes, may_repeat: Callable[[], bool], *, not_before: float) -> None:
        """Perhaps. No copy overtakes the frame itself: a client could not know that its first try had been a second."""
        if self._chance.random() < self.weather.repeat_rate:
            delay_ms = self._chance.random() ** 3 * self.weather.repeat_max_ms
            at = max(self.loop.time() + delay_ms / 1000, not_before + _ONE_BEHIND_THE_OTHER_S)
            self.loop.call_at(at, self._repeat, name, frame, self._storms, may_repeat)

    def _repeat(self, name: str, frame: bytes, storms: int, may_repeat: Callable[[], bool]) -> None:
        broker = self.host.broker_if_up()
        if broker is None or storms != self._storms or not may_repeat():
            return
        self.host.note(f"> again {name}")
        connection = SimulatedConnection(broker, lambda _: self.host.happened(), lambda: None)
        self.host.deliver(connection, frame)
        self.loop.call_later(1, connection.close)


def make_request(api: Api, version: int, fields: Mapping[str, Any]) -> Any:
    """A request from plain values; fields that the version does not have are left out."""
    return _make(request_schema(api, version), fields)


def _make(entity: Any, values: Mapping[str, Any]) -> Any:
    return entity(**{name: convert(values[name]) for name, convert in _converters(entity) if name in values})


@cache
def _converters(entity: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((field.name, _converter(field)) for field in dataclasses.fields(entity))


def _converter(field: dataclasses.Field[Any]) -> Callable[[Any], Any]:
    nested = nested_entity(field.type)
    is_array = "tuple" in str(field.type)
    if nested is not None and is_array:
        return lambda value: None if value is None else tuple(_make(nested, item) for item in value)
    if nested is not None:
        return lambda value: None if value is None else _make(nested, value)
    if str(field.metadata.get("kafka_type", "")).startswith("timedelta"):
        return lambda value: timedelta(milliseconds=value)
    if is_array:
        return lambda value: None if value is None else tuple(value)
    return lambda value: value
