"""Records that a producer has given up, for the exception that says so."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from semel.records import decode_batches


class Undelivered(NamedTuple):
    """A batch that was not stored, or of which nobody knows whether it was (`RequestTimedOut`)."""

    topic: str
    partition: int
    record_count: int
    data: bytes | None
    """The batch as it would have been stored; None if more than 32 MB were given up at once."""

    @property
    def table(self) -> pa.Table | None:
        """The records, as `Producer.send_table(topic, ...)` takes them; None as above."""
        if self.data is None:
            return None
        return decode_batches([self.data], check_crc=False).drop_columns(["offset"])
