"""Who looks at the cluster from outside: where the logs end while a run goes on, and all that is in them at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.errors import SemelError
from semel.verify.history import Act, HistoryWriter, Isolation, Phase, make_rows
from semel.verify.payload import decode_many

_POLL_S: Final = 0.25


class Judge:
    """Writes rows of its own, as one of the processes of the run. It reads past the proxy: no fault is meant for it."""

    def __init__(self, path: Path, *, number: int, bootstrap: str, partitions: Sequence[tuple[str, int]]) -> None:
        self._settings = {"bootstrap.servers": bootstrap, "client.id": "semel-verify-judge"}
        self._numbers = {TopicPartition(*where): number for number, where in enumerate(partitions)}
        self._history = HistoryWriter(path, process=number)

    def close(self) -> None:
        self._history.close()

    def look(self, timeout_ms: int = 2_000) -> int | None:
        """Note where every partition ends. Returns how many offsets are not stable yet; None if no broker answers."""
        quick = {**self._settings, "request.timeout.ms": timeout_ms, "default.api.timeout.ms": timeout_ms}
        try:
            stable = self._ends("read_committed", quick)
            ends = self._ends("read_uncommitted", quick)
        except SemelError:
            return None
        now_ns = time.monotonic_ns()
        for where, end in ends.items():
            # The two were not asked for at the same moment; what was stable before is so now.
            offset = min(stable[where], end)
            self._history.note(
                Act.ENDS, Phase.OK, time_ns=now_ns, partition=self._numbers[where], offset=offset, value=end
            )
        self._history.flush()
        return sum(max(0, end - stable[where]) for where, end in ends.items())

    def wait_stable(self, timeout_s: float) -> bool:
        """Wait until no transaction is open any more; the last look is what counts."""
        deadline = time.monotonic() + timeout_s
        while self.look() != 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def read_all(self) -> int:
        """Read every partition from the beginning to its end, as readers of committed records see it."""
        count = 0
        with Fetcher({**self._settings, "isolation.level": "read_committed"}) as fetcher:
            fetcher.assign(dict.fromkeys(self._numbers, 0))
            now_ns = time.monotonic_ns()
            for number in self._numbers.values():
                self._history.note(Act.ASSIGN, Phase.OK, time_ns=now_ns, partition=number, offset=0)
            for table in fetcher.read_until(fetcher.end_offsets()):
                count += table.num_rows
                self._note_reads(table)
        return count

    def _note_reads(self, table: Any) -> None:
        topics = table.column("topic").to_pylist()
        partitions = [
            self._numbers[TopicPartition(topic, index)]
            for topic, index in zip(topics, table.column("partition").to_pylist(), strict=True)
        ]
        payloads = decode_many(table.column("value").combine_chunks())
        rows = make_rows(
            table.num_rows,
            Act.READ,
            Phase.OK,
            time_ns=time.monotonic_ns(),
            partition=partitions,
            offset=table.column("offset").to_numpy(),
            writer=payloads.writer,
            transaction=payloads.transaction,
            origin=payloads.origin,
            sequence=payloads.sequence,
            value=payloads.value,
        )
        rows["phase"] = np.where(payloads.is_sound & (payloads.partition == rows["partition"]), Phase.OK, Phase.FAIL)
        self._history.note_rows(rows)

    def _ends(self, isolation: Isolation, settings: dict[str, Any]) -> dict[TopicPartition, int]:
        with Fetcher({**settings, "isolation.level": isolation}) as fetcher:
            fetcher.assign(dict.fromkeys(self._numbers, 0))
            return fetcher.end_offsets()
