"""The source's side of a mirror: which topics there are, where they end, and their batches into a `CutFinder`."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from semel.bridges.mirror.cuts import NOT_TRANSACTIONAL, CutFinder, Piece
from semel.bridges.mirror.options import MirrorOptions
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.fetcher import Fetcher, RawRecords
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.client.topic_ids import ask_topic_ids
from semel.errors import RequestTimedOut
from semel.records import ControlMarker, read_header

_FETCH_BYTES = 16 << 20
_PARTITION_BYTES = 2 << 20
_WAIT_MS = 200
_REREAD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SourceTopic:
    """A topic as the source shows it. Brokers before Kafka 2.8 have no ids."""

    topic_id: UUID | None
    partitions: int

    @property
    def id_text(self) -> str | None:
        return None if self.topic_id is None else str(self.topic_id)


class _Held:
    """The bytes of a batch, until there are too many of them; then it is read again when it is needed."""

    __slots__ = ("data",)

    def __init__(self, data: memoryview | None) -> None:
        self.data = data


class Source:
    """Reads everything, committed or not, and leaves it to the markers to decide.

    A fetch that waits for new records holds up other requests on its connection, so there are two clusters: one for the
    fetches and one for questions.
    """

    def __init__(self, options: MirrorOptions) -> None:
        config = parse_config(options.source)
        self._options = options
        self._fetching = Cluster(config.client)
        self.cluster = Cluster(config.client)
        self._config = replace(
            config.fetch,
            isolation="read_uncommitted",
            fetch_bytes_max=_FETCH_BYTES,
            partition_bytes_max=_PARTITION_BYTES,
            wait_ms_max=_WAIT_MS,
            auto_offset_reset="error",
        )
        self._fetcher = Fetcher(self._fetching, self._config, include_markers=True, prefetch=True)
        self.high_watermarks: dict[TopicPartition, int] = {}
        self._held_bytes = 0

    def close(self) -> None:
        self._fetching.close()
        self.cluster.close()

    @property
    def admin(self) -> Admin:
        return Admin(self.cluster)

    # -- questions -------------------------------------------------------------------------------------------------

    def topics(self) -> dict[str, SourceTopic]:
        """The topics to mirror, as they are now."""
        shapes = self.cluster.list_topics()
        return {
            name: SourceTopic(self.cluster.topic_id(name), len(leaders))
            for name, leaders in sorted(shapes.items())
            if self._options.includes(name)
        }

    def ends(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where partitions end now, open transactions included."""
        return edge_offsets(self.cluster, partitions, "latest", "read_uncommitted") if partitions else {}

    def have_ids(self, ids: Mapping[str, UUID | None], partitions: Collection[TopicPartition]) -> bool:
        """Whether these partitions still are of the topics that they were, by their leaders' word.

        Brokers before Kafka 2.8 have no ids to compare.
        """
        if all(topic_id is None for topic_id in ids.values()):
            return True
        found = ask_topic_ids(self.cluster, list(partitions))()
        return all(topic in found and found[topic] == ids[topic] for topic in {named.topic for named in partitions})

    # -- records ---------------------------------------------------------------------------------------------------

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._fetcher.assign(positions)

    def read_into(self, finder: CutFinder, timeout_ms: float) -> bool:
        """Feed what comes next to `finder`, up to its barrier if there is one. False if nothing came in time."""
        barrier = finder.barrier
        answers = self._fetcher.fetch_raw(timeout_ms, None if barrier is None else barrier.ends)
        now = time.monotonic()
        for answer in answers:
            self._feed(finder, answer, now)
        return bool(answers)

    def _feed(self, finder: CutFinder, answer: RawRecords, now: float) -> None:
        partition = answer.partition
        self.high_watermarks[partition] = answer.high_watermark
        for offset, item in _in_order(answer):
            if isinstance(item, ControlMarker):
                finder.add_marker(partition, offset, (item.producer_id, item.producer_epoch), item.kind)
                continue
            header = read_header(item)
            producer = (header.producer_id, header.producer_epoch) if header.is_transactional else NOT_TRANSACTIONAL
            finder.add_batch(
                partition,
                max(offset, finder.position_of(partition)),
                header.last_offset + 1,
                producer=producer,
                size=len(item),
                now=now,
                data=self._hold(item),
            )
        finder.pass_gap(partition, answer.next_offset)

    def _hold(self, data: memoryview) -> _Held:
        if self._held_bytes + len(data) > self._options.buffer_bytes:
            return _Held(None)
        self._held_bytes += len(data)
        return _Held(data)

    def batches(self, partition: TopicPartition, pieces: list[Piece]) -> list[memoryview]:
        """The bytes of these batches, read again where they were not kept."""
        missing = [piece for piece in pieces if piece.data.data is None]
        again = self._read_again(partition, missing) if missing else {}
        found: list[memoryview] = []
        for piece in pieces:
            data = piece.data.data
            found.append(again[piece.end] if data is None else data)
        return found

    def release(self, pieces: list[Piece]) -> None:
        """These are committed at the target."""
        self._held_bytes -= sum(len(piece.data.data) for piece in pieces if piece.data.data is not None)

    def _read_again(self, partition: TopicPartition, pieces: list[Piece]) -> dict[int, memoryview]:
        """By the offset after each batch."""
        wanted = {piece.end for piece in pieces}
        end = max(wanted)
        found: dict[int, memoryview] = {}
        deadline = time.monotonic() + _REREAD_TIMEOUT_S
        with Fetcher(self.cluster, self._config, prefetch=False) as fetcher:
            fetcher.assign({partition: pieces[0].start})
            while wanted - found.keys():
                for answer in fetcher.fetch_raw(1_000, {partition: end}):
                    for batch in answer.batches:
                        if (after := read_header(batch).last_offset + 1) in wanted:
                            found[after] = batch
                if (fetcher.positions[partition] >= end and wanted - found.keys()) or time.monotonic() > deadline:
                    raise RequestTimedOut(
                        f"Batches of topic {partition.topic!r} partition {partition.partition} below offset {end} were "
                        "read once and are not there the second time: compaction or retention was faster."
                    )
        return found


def _in_order(answer: RawRecords) -> list[tuple[int, memoryview | ControlMarker]]:
    items: list[tuple[int, memoryview | ControlMarker]] = [
        (read_header(batch).base_offset, batch) for batch in answer.batches
    ]
    if answer.markers:
        items += [(marker.offset, marker) for marker in answer.markers]
        items.sort(key=lambda item: item[0])
    return items
