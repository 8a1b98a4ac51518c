"""Producer ids, never given twice: they are taken from blocks, and a block is on disk before its first id is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.broker.acls import MetaStore

META_NAME: Final = "producer_ids.json"
META_VERSION: Final = 1
BLOCK_IDS: Final = 1000

BeginWrite = Callable[[Callable[[], None]], Future[None] | None]


class ProducerIds:
    """Hands out ids in rising order. A restart, after a crash too, goes on with the next block.

    The ids left in a block are lost then; there are 2**63 of them. When half of a block is used, another thread writes
    down the next one, so that nobody waits for the disk.
    """

    def __init__(self, meta: MetaStore, begin_write: BeginWrite = lambda _: None) -> None:
        """`begin_write` lets another thread write, or returns None where there is none."""
        self._meta = meta
        self._begin_write = begin_write
        stored = meta.read_meta(META_NAME)
        self._next = self._block_end = 0 if stored is None else _read(stored)
        self._ahead: Future[None] | None = None
        """The write of the block after this one."""

    def next_id(self) -> int:
        """An id that nobody ever had. An OSError means that none was given."""
        if self._next == self._block_end:
            self._take_block()
        self._next += 1
        if self._ahead is None and self._block_end - self._next <= BLOCK_IDS // 2:
            end = self._block_end + BLOCK_IDS
            self._ahead = self._begin_write(lambda: self._write(end))
        return self._next - 1

    def _take_block(self) -> None:
        end = self._block_end + BLOCK_IDS
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.exception() is not None:  # waits for it, if it has not ended
            self._write(end)
        self._block_end = end

    def _write(self, end: int) -> None:
        content = {"version": META_VERSION, "next_block": end}
        self._meta.write_meta(META_NAME, json.dumps(content).encode())


def _read(stored: bytes) -> int:
    try:
        content = json.loads(stored)
        if content["version"] != META_VERSION:
            raise ValueError(f"version {content['version']}, and this Semel reads version {META_VERSION}")
        following = content["next_block"]
        if not isinstance(following, int) or following < 0:
            raise ValueError(f"next block {following!r}")
    except (ValueError, KeyError, TypeError) as error:
        # Beginning again at 0 would give ids a second time, and with them another producer's sequence numbers.
        raise ConfigError(
            f"{META_NAME} in the data directory cannot be read ({error!r}), so which producer ids were given is not "
            "known. Nothing was changed; restore this file, or write into it a number above all producer ids in use."
        ) from error
    return following
