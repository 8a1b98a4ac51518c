"""Which partitions there are to read now, and where in them the ends, times and commits of the options lie."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from semel.client.admin_topics import TopicAdmin, TopicDescription
from semel.client.cluster import Cluster
from semel.client.config import Isolation
from semel.client.leader_calls import describe
from semel.client.offsets import Edge
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.errors import ConfigError, OffsetOutOfRange, UnknownTopic
from semel.spark.source_offsets import EARLIEST, LATEST, Offsets
from semel.spark.source_options import Assigned, AtOffsets, AtTime, Bound, Committed, Pattern, SourceOptions, Topics
from semel.wire import ErrorCode

_MARKS: Final[Mapping[int, Edge]] = {EARLIEST: "earliest", LATEST: "latest"}


@dataclass(frozen=True, slots=True)
class Found:
    """The partitions to read, the ids of their topics (None from brokers before Kafka 2.8), and their cluster's."""

    partitions: frozenset[TopicPartition]
    topic_ids: Mapping[str, UUID | None]
    cluster: str | None = None


class Lookup:
    """Asks the cluster for one source; belongs to one thread, like every client."""

    def __init__(self, options: SourceOptions) -> None:
        config = parse_config(options.settings)
        self.isolation: Isolation = config.fetch.isolation
        self._options = options
        self._cluster = Cluster(config.client)
        self._topics = TopicAdmin(self._cluster)
        self._known_cluster_id: str | None = None
        self._has_gone = False
        """A topic was missing the last time."""

    def close(self) -> None:
        self._cluster.close()

    # -- partitions ------------------------------------------------------------------------------------------------

    def find_partitions(self, *, may_be_gone: bool = False) -> Found:
        """What the subscription stands for now. `may_be_gone`: leave out what does not exist instead of raising."""
        subscription = self._options.subscription
        match subscription:
            case Topics(names):
                wanted = names
            case Assigned(partitions):
                wanted = tuple(sorted({partition.topic for partition in partitions}))
            case Pattern(regex):
                wanted = tuple(name for name in self._topics.list_topics() if re.fullmatch(regex, name))
                may_be_gone = True  # between the list and the question
        described = self._describe(wanted, may_be_gone=may_be_gone)
        there = {
            TopicPartition(topic.name, item.partition) for topic in described.values() for item in topic.partitions
        }
        if isinstance(subscription, Assigned):
            missing = sorted(subscription.partitions - there)
            if missing and not may_be_gone:
                raise UnknownTopic(
                    f"The cluster has no {describe(missing[0])}, which option assign names; nothing was read. "
                    "Check the partition numbers.",
                    code=ErrorCode.unknown_topic_or_partition,
                )
            there &= subscription.partitions
        return Found(frozenset(there), {name: topic.topic_id for name, topic in described.items()}, self._cluster_id())

    def _cluster_id(self) -> str | None:
        if self._known_cluster_id is None:
            self._known_cluster_id = self._topics.describe_cluster().cluster_id
        return self._known_cluster_id or None

    def _describe(self, names: Collection[str], *, may_be_gone: bool) -> dict[str, TopicDescription]:
        # A topic that is not there is asked for again for some seconds: once is enough, every micro-batch would stall.
        if not (may_be_gone and self._has_gone):
            try:
                return self._topics.describe_topics(*names) if names else {}
            except UnknownTopic:
                if not may_be_gone:
                    raise
        present = set(self._topics.list_topics(include_internal=True)).intersection(names)
        self._has_gone = len(present) < len(names)
        return self._topics.describe_topics(*sorted(present)) if present else {}

    # -- offsets ---------------------------------------------------------------------------------------------------

    def edges(self, partitions: Iterable[TopicPartition], edge: Edge, isolation: Isolation | None = None) -> Offsets:
        """Where partitions begin or end; the end of `read_committed` is the last stable offset."""
        listed = self._topics.list_offsets(dict.fromkeys(partitions, edge), isolation or self.isolation)
        return {partition: answer.offset for partition, answer in listed.items()}

    def starts(self, partitions: frozenset[TopicPartition]) -> Offsets:
        """Where a new query begins to read."""
        options = self._options
        assert options.starting is not None, "the options are those of a batch or of a stream"
        found = self._resolve(options.starting, partitions, options.starting_option)
        return self._checked(found, options.starting_option)

    def ends(self, partitions: frozenset[TopicPartition]) -> Offsets:
        """Where a batch query stops to read."""
        options = self._options
        assert options.ending is not None, "the options are those of a batch"
        found = self._resolve(options.ending, partitions, options.ending_option)
        return found if options.ending == "latest" else self._checked(found, options.ending_option)

    def _resolve(self, bound: Bound, partitions: frozenset[TopicPartition], option: str) -> Offsets:
        match bound:
            case "earliest" | "latest":
                return self.edges(partitions, bound)
            case AtOffsets(offsets):
                _check_complete(option, offsets, partitions)
                found = dict(offsets)
                for mark, edge in _MARKS.items():
                    marked = [partition for partition, offset in offsets.items() if offset == mark]
                    found |= self.edges(marked, edge) if marked else {}
                return found
            case AtTime(times):
                if not isinstance(times, int):
                    _check_complete(option, times, partitions)
                return self._at_time(dict.fromkeys(partitions, times) if isinstance(times, int) else times, option)
            case Committed(group):
                return self._committed(group, partitions, option)

    def _at_time(self, times: Offsets, option: str) -> Offsets:
        listed = self._topics.list_offsets(times, self.isolation)
        found = {partition: answer.offset for partition, answer in listed.items() if answer.offset >= 0}
        if unmatched := sorted(set(times) - set(found)):
            if option.startswith("starting") and self._options.no_match == "error":
                raise ConfigError(
                    f"{option}: {describe(unmatched[0])} has no record of {times[unmatched[0]]} ms or later; nothing "
                    "was read. Start earlier, or write startingOffsetsByTimestampStrategy=latest to begin at its end."
                )
            found |= self.edges(unmatched, "latest")
        return found

    def _committed(self, group: str, partitions: frozenset[TopicPartition], option: str) -> Offsets:
        from semel.client.admin import Admin

        # Waits for transactions that hold offsets of the group, such as those of Semel's sink: they may still commit.
        committed = Admin(self._cluster).committed_offsets(group, sorted(partitions))
        found = {partition: committed[partition].offset for partition in partitions if partition in committed}
        if unknown := sorted(partitions - set(found)):
            reset = self._options.uncommitted_reset if option.startswith("starting") else "earliest"
            if reset == "error":
                raise ConfigError(
                    f"Group {group!r} has committed no offset for {describe(unknown[0])}; nothing was read. "
                    "Check kafka.group.id, or write kafka.auto.offset.reset=earliest or latest."
                )
            found |= self.edges(unknown, reset)
        return found

    def _checked(self, found: Offsets, option: str) -> Offsets:
        """Offsets from outside may lie behind the end: no task could ever read up to them."""
        ends = self.edges(found, "latest", "read_uncommitted")
        for partition, offset in sorted(found.items()):
            if offset > ends[partition]:
                raise OffsetOutOfRange(
                    f"{option} is {offset} for {describe(partition)}, which ends at {ends[partition]}; nothing was "
                    "read. Correct the offset; if the topic was deleted and created again, begin at earliest.",
                    code=ErrorCode.offset_out_of_range,
                )
        return found


def _check_complete(option: str, given: Offsets, partitions: frozenset[TopicPartition]) -> None:
    for missing in sorted(partitions - set(given)):
        raise ConfigError(
            f"{option} has no entry for {describe(missing)}: name every partition (-2 is earliest, -1 latest)."
        )
    for extra in sorted(set(given) - partitions):
        raise ConfigError(f"{option} has an entry for {describe(extra)}, which is not read or not there: remove it.")
