"""Producer ids, never given twice: they are taken from blocks, and a block is on disk before its first id is used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.broker.acls import MetaStore

META_NAME: Final = "producer_ids.json"
META_VERSION: Final = 1
BLOCK_IDS: Final = 1000


class ProducerIds:
    """Hands out ids in rising order. A restart, after a crash too, goes on with the next block.

    The ids left in a block are lost then; there are 2**63 of them.
    """

    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta
        stored = meta.read_meta(META_NAME)
        self._next = self._block_end = 0 if stored is None else _read(stored)

    def next_id(self) -> int:
        """An id that nobody ever had. An OSError means that none was given."""
        if self._next == self._block_end:
            end = self._block_end + BLOCK_IDS
            content = {"version": META_VERSION, "next_block": end}
            self._meta.write_meta(META_NAME, json.dumps(content).encode())
            self._block_end = end
        self._next += 1
        return self._next - 1


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
