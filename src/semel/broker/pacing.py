"""Long requests in small pieces: whoever asks for ten thousand things does not keep the others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

_ITEMS_AT_ONCE: Final = 16


async def collect(items: Iterable[T]) -> list[T]:
    """The items of a generator that does the work as it goes. Between some of them the event loop gets its turn.

    >>> asyncio.run(collect(number * 2 for number in range(3)))
    [0, 2, 4]
    """
    collected: list[T] = []
    for item in items:
        collected.append(item)
        if len(collected) % _ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return collected


def collect_now_if_few(items: Iterable[T], count: int) -> list[T] | Awaitable[list[T]]:
    """At once where there are only a few, which is nearly always: what need not wait is answered without a task."""
    return list(items) if count <= _ITEMS_AT_ONCE else collect(items)
