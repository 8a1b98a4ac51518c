"""Long requests in small pieces: a client that asks for ten thousand things does not keep the others waiting.

The pieces are counted and not timed, so that a simulation does the same each time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

from semel.broker.context import Answer, Encoded, Reply, RequestContext
from semel.wire.server import encode_response, respond

if TYPE_CHECKING:
    from semel.broker.state import Broker

T = TypeVar("T")
Pause = Future[Any] | None
Slices = Generator[Pause, None, T]
"""Work that yields wherever others may have a turn, and returns its result. What it yields it waits for, if anything.

It goes on waiting when it is resumed too early, so only `finish` and `finish_now` need to look at what was yielded.
"""

ENTRIES_AT_ONCE: Final = 256
CONNECTIONS_AT_ONCE: Final = 32


class Pace:
    """Counts the small steps of a request and says when others should have a turn.

    >>> pace = Pace(at_once=3)
    >>> [pace.is_over() for _ in range(7)]
    [False, False, True, False, False, True, False]
    """

    __slots__ = ("_at_once", "_left")

    def __init__(self, at_once: int = ENTRIES_AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once

    def is_over(self, steps: int = 1) -> bool:
        """Take some steps; whether the slice ends with them."""
        self._left -= steps
        if self._left > 0:
            return False
        self._left = self._at_once
        return True


def sliced(
    items: Iterable[T], at_once: int = ENTRIES_AT_ONCE, *, weigh: Callable[[T], int] = lambda _: 1
) -> Slices[list[T]]:
    """The items of a generator that does the work as it goes, with a pause after every few of them."""
    pace = Pace(at_once)
    collected: list[T] = []
    for item in items:
        collected.append(item)
        if pace.is_over(weigh(item)):
            yield
    return collected


def sliced_partitions(
    topics: Iterable[Any],
    answer: Callable[[str, Any], Mapping[str, Any]],
    *,
    name: str = "name",
    partitions: str = "partitions",
    at_once: int = ENTRIES_AT_ONCE,
) -> Slices[list[Mapping[str, Any]]]:
    """What `answer` says of each partition of each topic in a request, by topic. `name` and `partitions` are fields."""
    pace = Pace(at_once)
    answered: list[Mapping[str, Any]] = []
    for topic in topics:
        topic_name: str = getattr(topic, name)
        ones: list[Mapping[str, Any]] = []
        for one in getattr(topic, partitions):
            ones.append(answer(topic_name, one))
            if pace.is_over():
                yield
        answered.append({name: topic_name, "partitions": ones})
        if pace.is_over():
            yield
    return answered


def finish_now(work: Slices[T]) -> T:
    """Do all slices at once, where nobody waits.

    >>> finish_now(sliced([1, 2, 3], at_once=1))
    [1, 2, 3]
    """
    while True:
        try:
            pause = next(work)
        except StopIteration as end:
            return end.value
        if pause is not None:
            pause.exception()  # waits until it is done


def wait_for(future: Future[T]) -> Slices[T]:
    """The result of what another thread does, for which others need not wait."""
    while not future.done():
        yield future
    return future.result()


WriteAside = Callable[[Callable[[], None]], Slices[None]]
"""How a small file is written durably without keeping others waiting. What it raises, the write has raised."""


def write_now(write: Callable[[], None]) -> Slices[None]:
    """For where nobody waits."""
    yield from ()
    write()


class ChangeLock:
    """One change at a time, in the order of asking, where a change waits for the disk before it takes effect."""

    def __init__(self) -> None:
        self._changes: deque[object] = deque()
        self.pause: Pause = None
        """What the change that is under way waits for."""

    @property
    def is_held(self) -> bool:
        return bool(self._changes)

    def hold(self, change: Callable[[], Slices[T]]) -> Slices[T]:
        """Begin the change when all before it are done. `change` decides by what is there then."""
        this = object()
        self._changes.append(this)
        try:
            while self._changes[0] is not this:
                yield self.pause
            work = change()
            while True:
                try:
                    self.pause = next(work)
                except StopIteration as end:
                    return end.value
                yield self.pause
        finally:
            self.pause = None
            self._changes.remove(this)


class SlowLane:
    """Where long requests wait for their turns: of all of them together, one slice is done in each turn of the loop.

    So a small request waits for one slice at most, however many clients ask for much at the same time.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_moving = False

    async def wait_turn(self) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if not self._is_moving:
            self._is_moving = True
            loop.call_soon(self._move)
        await turn

    def _move(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break
        self._is_moving = bool(self._waiting)
        if self._is_moving:
            asyncio.get_running_loop().call_soon(self._move)


class QuickLane:
    """Where connections wait that have sent several requests at once: each turn of the loop takes up some of them.

    So a thousand clients with a full queue do not make one turn of the loop that others wait for.
    """

    def __init__(self, at_once: int = CONNECTIONS_AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_moving = False

    def call_in_turn(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if not self._is_moving:
            self._is_moving = True
            asyncio.get_running_loop().call_soon(self._move)

    def _move(self) -> None:
        try:
            for _ in range(min(self._at_once, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._is_moving = bool(self._waiting)
            if self._is_moving:
                asyncio.get_running_loop().call_soon(self._move)


async def finish(work: Slices[T], lane: SlowLane) -> T:
    """Do one slice after the other, each in its turn."""
    while True:
        await lane.wait_turn()
        try:
            pause = next(work)
        except StopIteration as end:
            return end.value
        if pause is not None and not pause.done():
            # Not cancelled with this task: half a write would be worse than an answer lost.
            await asyncio.wait([asyncio.wrap_future(pause)])


def answer_in_slices(
    broker: Broker, context: RequestContext, request: Any, work: Slices[Mapping[str, Any] | Reply]
) -> Reply:
    """The answer to a request from work that returns its fields.

    What is done within the first slice, as nearly all requests are, is answered without a task. The others are mostly
    many entries, and writing these takes as long as finding them: that is done in another thread.
    """
    try:
        next(work)
    except StopIteration as end:
        return respond(request, **end.value) if isinstance(end.value, Mapping) else end.value
    return _answer_later(broker, context, request, work)


def answer_list(broker: Broker, context: RequestContext, request: Any, field: str, work: Slices[list[Any]]) -> Reply:
    """The same for an answer that has nothing but one list in it."""

    def fields() -> Slices[Mapping[str, Any]]:
        return {field: (yield from work)}

    return answer_in_slices(broker, context, request, fields())


def answer_wide(
    broker: Broker, context: RequestContext, request: Any, entries: int, fields: Mapping[str, Any]
) -> Reply:
    """An answer that is known already and may have many entries."""
    return (
        respond(request, **fields) if entries <= ENTRIES_AT_ONCE else _written_aside(broker, context, request, fields)
    )


async def _answer_later(
    broker: Broker, context: RequestContext, request: Any, work: Slices[Mapping[str, Any] | Reply]
) -> Answer:
    fields = await finish(work, broker.lane)
    if isinstance(fields, Awaitable):
        return await fields
    if not isinstance(fields, Mapping):
        return fields
    # A search through much may have found little: to hand that to another thread would take longer than to write it.
    if _entries_of(fields) <= ENTRIES_AT_ONCE:
        return respond(request, **fields)
    return await _written_aside(broker, context, request, fields)


def _entries_of(fields: Mapping[str, Any]) -> int:
    """How many entries the lists of an answer have; enough of them to tell whether they are many."""
    count = 0
    for value in fields.values():
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            count += len(value)
            for entry in value[: ENTRIES_AT_ONCE + 1]:
                if count > ENTRIES_AT_ONCE:
                    return count
                if isinstance(entry, Mapping):
                    count += _entries_of(entry)
    return count


async def _written_aside(broker: Broker, context: RequestContext, request: Any, fields: Mapping[str, Any]) -> Answer:
    return await broker.durability.compute_long_aside(
        lambda: Encoded(encode_response(respond(request, **fields), context.correlation_id))
    )
