"""One run of a mirror, from the first connection to the last commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Final

from semel.bridges.failpoints import reach
from semel.bridges.mirror.cuts import CutFinder, Piece, in_portions
from semel.bridges.mirror.groups import GroupCarrier, Translator
from semel.bridges.mirror.options import MirrorOptions
from semel.bridges.mirror.plan import check_before, plan, skip_lost
from semel.bridges.mirror.progress import MirrorState, progress_key
from semel.bridges.mirror.records import Copied, copy_batches
from semel.bridges.mirror.report import MirrorProgress, MirrorReport, WaitingTransaction
from semel.bridges.mirror.source import Source
from semel.bridges.mirror.target import PartCut, Target
from semel.bridges.mirror.topics import TopicFollower
from semel.bridges.retries import LOG, Retries
from semel.client.partitions import TopicPartition
from semel.errors import (
    BrokerUnreachable,
    CommitUnknown,
    ConnectionLost,
    KafkaError,
    OffsetOutOfRange,
    RequestTimedOut,
    SemelError,
    TopicRecreated,
    TransactionAborted,
)
from semel.metrics.parts import MIRROR, MIRROR_GROUPS_BEHIND, MIRROR_LAG, MIRROR_LOST, MIRROR_RETRIES, MIRROR_WAITING
from semel.observe import Pipeline
from semel.wire import ErrorCode

_KEEP_ALIVE_S: Final = 3600.0
"""How long an idle mirror writes nothing. After a week the coordinator forgets it, and could not name a successor."""
_WAIT_MS: Final = 200.0
_TELL_S: Final = 1.0
_EMPTY_CUT_S: Final = 1.0
"""A cut without records is written at most so often."""
_COPY_BYTES: Final = 8 << 20
"""How many bytes of batches are decoded at a time."""
_HANGS_S: Final = 60.0
_PASSING: Final = (BrokerUnreachable, CommitUnknown, ConnectionLost, RequestTimedOut, TransactionAborted)
_PASSING_CODES: Final = frozenset(
    {
        ErrorCode.kafka_storage_error,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.unknown_topic_or_partition,
    }
)
_AFTER: Final = "Progress is at the target together with the records, so a new start goes on from there."


class _TopicsChanged(Exception):
    """The source has other topics or partitions than before: plan again."""


class MirrorRun:
    """Cuts the source and writes the target, and goes on after lost connections on either side.

    After any trouble everything that was read is forgotten, and the mirror begins again at what is committed.
    """

    def __init__(
        self,
        options: MirrorOptions,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[MirrorProgress], None] | None = None,
    ) -> None:
        self.report = MirrorReport()
        self.options = options
        self.is_stopping = is_stopping
        self._on_progress = on_progress
        self.retries = Retries(options.retry_s, is_stopping, what="Kafka", after=_AFTER)
        self._named: dict[int, str | None] = {}
        self._warned: set[tuple[int, int]] = set()
        self.pipeline = Pipeline(MIRROR, options.name)

    def go(self, idle_ms: float | None = None, on_ready: Callable[[], None] | None = None) -> None:
        """Until stopped, or until nothing has come for `idle_ms`."""
        try:
            self._go(idle_ms, on_ready)
        except Exception as error:
            self.pipeline.failed(error)
            raise

    def _go(self, idle_ms: float | None, on_ready: Callable[[], None] | None) -> None:
        target = self._wait_target()
        if target is None:
            return
        with closing(target):
            reach("mirror_taken_over")
            must_recover = False
            while not self.is_stopping():
                try:
                    if must_recover:
                        target.recover()
                        must_recover = False
                    with closing(Source(self.options)) as source:
                        route = _Route(self, source, target)
                        if on_ready is not None:
                            on_ready()
                            on_ready = None
                        route.follow(idle_ms)
                        return
                except _TopicsChanged:
                    continue
                except SemelError as error:
                    if not _is_passing(error):
                        raise
                    must_recover = True
                    self._wait_after(error)

    def _wait_target(self) -> Target | None:
        """Take the name over, once both sides answer and nothing speaks against it: a mirror that works is fenced."""
        while not self.is_stopping():
            try:
                with closing(Source(self.options)) as source:
                    check_before(self.options, source)
                return Target(self.options)
            except SemelError as error:
                if not _is_passing(error):
                    raise
                self._wait_after(error)
        return None

    def _wait_after(self, error: SemelError) -> None:
        MIRROR_RETRIES.add(self.options.name)
        self.retries.wait_after(error)

    # -- telling ---------------------------------------------------------------------------------------------------

    def tell(self, source: Source, finder: CutFinder, state: MirrorState, cuts_per_s: float, behind: int) -> None:
        """Metrics, progress for the caller that asked for it, and a warning for each transaction that hangs."""
        waiting = self._waiting(source, finder)
        for one in waiting:
            key = (one.producer_id, one.producer_epoch)
            if one.age_s > _HANGS_S and key not in self._warned:
                self._warned.add(key)
                LOG.warning(
                    "Waiting %.0f s for a transaction of the source: %s (producer id %d, epoch %d) in %s. Partitions "
                    "that neither it nor a transaction behind it touches go on.",
                    one.age_s,
                    one.transactional_id or "its transactional.id may not be listed",
                    *key,
                    ", ".join(f"{topic}/{number}" for topic, number in one.partitions),
                )
        lag = {
            named: max(0, source.high_watermarks.get(named, one.source) - one.source)
            for named in finder.positions
            if (one := state.partition(named)) is not None
        }
        name, report = self.options.name, self.report
        self.pipeline.looked()
        MIRROR_LAG.set(name, value=sum(lag.values()))
        MIRROR_WAITING.set(name, value=waiting[0].age_s if waiting else 0.0)
        MIRROR_GROUPS_BEHIND.set(name, value=behind)
        if self._on_progress is not None:
            self._on_progress(MirrorProgress(name, lag, report.records, report.cuts, cuts_per_s, waiting, behind))

    def _waiting(self, source: Source, finder: CutFinder) -> tuple[WaitingTransaction, ...]:
        now = time.monotonic()
        groups = sorted(finder.waiting(), key=lambda group: group.since)
        found: list[WaitingTransaction] = []
        for group in groups[:10]:
            age_s = now - group.since
            name = self._name_of(source, group.producer_id) if age_s > _HANGS_S else None
            partitions = tuple(dict.fromkeys(part.partition for part in group.parts))
            if partitions:
                found.append(WaitingTransaction(group.producer_id, group.producer_epoch, age_s, partitions, name))
        return tuple(found)

    def _name_of(self, source: Source, producer_id: int) -> str | None:
        if producer_id not in self._named:
            try:
                listed = source.admin.list_transactions(producer_ids=[producer_id])
                self._named[producer_id] = listed[0].transactional_id if listed else None
            except SemelError:
                self._named[producer_id] = None  # not permitted, or too old: the number must do
        return self._named[producer_id]


class _Route:
    """From one plan of topics to the next one."""

    def __init__(self, run: MirrorRun, source: Source, target: Target) -> None:
        self._run = run
        self._options = run.options
        self._is_stopping = run.is_stopping
        self._source = source
        self._target = target
        self._follower = TopicFollower(source.admin, target.admin)
        self._topics = source.topics()
        committed = target.state()
        for name, topic in self._topics.items():
            known = None if committed is None else committed.topics.get(name)
            self._follower.ensure(name, topic, known.target if known else self._options.target_topic(name))
        self._source_cluster = source.admin.describe_cluster().cluster_id
        self._target_cluster = target.admin.describe_cluster().cluster_id
        self._state = self._begin(committed)
        self._finder = CutFinder(self._positions())
        self._passed: dict[TopicPartition, int] = {}
        """Ends of cuts that are not committed yet."""
        source.assign(self._positions())
        self._translator = Translator(self._options.name, target.cluster)
        self._carrier = None
        if self._options.groups is not None:
            self._carrier = GroupCarrier(source.admin, target.admin, self._translator, self._options.groups)
        now = time.monotonic()
        self._last_move = self._last_publish = self._last_told = now
        self._next_follow = now
        self._next_groups = now
        self._cuts_told = run.report.cuts
        self._behind = 0

    def _begin(self, committed: MirrorState | None) -> MirrorState:
        state = plan(self._options, self._source, self._target, self._topics)
        if self._options.lost == "go-on":
            state, lost = skip_lost(state, self._source)
            self._run.report.lost += lost
            MIRROR_LOST.add(self._options.name, amount=lost)
        if state != committed:
            state = self._target.publish([], state).state
        return state

    def _positions(self) -> dict[TopicPartition, int]:
        return {
            TopicPartition(name, number): self._state.topics[name].partitions[number].source
            for name, topic in self._topics.items()
            for number in range(topic.partitions)
        }

    # -- the loop --------------------------------------------------------------------------------------------------

    def follow(self, idle_ms: float | None) -> None:
        while not self._is_stopping():
            has_come = self._read()
            if self._finder.needs_barrier:
                self._set_barrier()
            self._finder.try_pass_barrier()
            has_moved = self._cut_all()
            self._look_around()
            if has_come or has_moved:
                self._last_move = time.monotonic()
            elif self._rest(idle_ms):
                break
        self._finish()

    def _rest(self, idle_ms: float | None) -> bool:
        """Nothing has come. True if that has been so for long enough."""
        if self._finder.barrier is None:
            self._run.retries.succeeded()  # nothing is left to do: no cut is failing again and again
        now = time.monotonic()
        if idle_ms is None or (now - self._last_move) * 1000 < idle_ms:
            return False
        self._last_move = now
        return self._has_read_everything()

    def _has_read_everything(self) -> bool:
        """A source that is slow to answer is not one that has nothing."""
        positions = self._finder.positions
        return all(positions[named] >= end for named, end in self._source.ends(positions).items())

    def _read(self) -> bool:
        try:
            return self._source.read_into(self._finder, _WAIT_MS)
        except OffsetOutOfRange as error:
            self._check_topics()
            if self._options.lost == "go-on" and not isinstance(error, TopicRecreated):
                raise _TopicsChanged from error  # the next plan begins where the partition begins now
            error.add_note(
                "The mirror stops, so that the loss is not silent. If retention has deleted these records, pass "
                'lost="go-on" to go on at what is left.'
            )
            raise
        except KafkaError as error:
            if error.code == ErrorCode.unknown_topic_or_partition:
                self._check_topics()
            raise

    def _set_barrier(self) -> None:
        """Ask where everything ends now, and whether partitions have come that a transaction may have written to."""
        event = self._finder.event
        self._finder.set_barrier(event, self._source.ends(self._finder.positions))
        self._check_topics()

    def _check_topics(self) -> None:
        topics = self._source.topics()
        if topics == self._topics:
            return
        for name in self._topics.keys() - topics.keys():
            LOG.warning("Topic %r is gone at the source. What was mirrored of it stays at the target.", name)
        raise _TopicsChanged

    def _cut_all(self) -> bool:
        """Publish every cut that can be made now. Those without records wait for one that has some, up to a second."""
        has_moved = False
        while not self._is_stopping():
            ends = self._finder.find_ends(self._options.cut_bytes)
            if not ends:
                break
            starts = self._finder.cut_offsets
            cut = self._finder.take(ends)
            self._passed |= cut.ends
            if cut.pieces:
                self._publish(starts, cut.pieces)
            has_moved = True
        if self._passed and time.monotonic() - self._last_publish >= _EMPTY_CUT_S:
            self._publish({}, {})
        return has_moved

    def _publish(self, starts: Mapping[TopicPartition, int], pieces: Mapping[TopicPartition, list[Piece]]) -> None:
        """Write these batches, and that everything up to `_passed` is done."""
        reach("mirror_cut_found")
        parts = [
            PartCut(partition, end, self._copy(partition, starts[partition], end, pieces[partition]))
            if partition in pieces
            else PartCut(partition, end)
            for partition, end in self._passed.items()
        ]
        ids = {name: topic.topic_id for name, topic in self._topics.items()}
        if pieces and not self._source.have_ids(ids, pieces):
            raise _TopicsChanged
        with self._run.pipeline.begin(transactional_id=progress_key(self._options.name)) as work:
            done = self._target.publish(parts, self._state)
            work.committed(done.records)
        self._run.retries.succeeded()
        self._state = done.state
        self._translator.add(done.cuts)
        self._passed = {}
        for written in pieces.values():
            self._source.release(written)
        report = self._run.report
        report.cuts += bool(done.records)
        report.records += done.records
        report.loops += done.loops
        self._last_publish = time.monotonic()

    def _copy(self, partition: TopicPartition, start: int, end: int, pieces: list[Piece]) -> Iterator[Copied]:
        for some in in_portions(pieces, _COPY_BYTES):
            yield copy_batches(
                self._source.batches(partition, some),
                start,
                end,
                source_cluster=self._source_cluster,
                target_cluster=self._target_cluster,
            )

    # -- besides ---------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        now = time.monotonic()
        if now >= self._next_follow:
            self._check_topics()
            for name in self._topics:
                self._follower.follow_config(name, self._state.topics[name].target)
            self._next_follow = now + self._options.follow_s
        if self._carrier is not None and now >= self._next_groups:
            self._carry_groups()
        if now - self._last_told >= _TELL_S:
            self._tell(now)
        if now - self._last_publish >= _KEEP_ALIVE_S:
            self._state = self._target.publish([], self._state).state
            self._last_publish = now

    def _carry_groups(self) -> None:
        assert self._carrier is not None
        self._behind = self._carrier.carry(self._state, self._is_stopping).behind
        self._next_groups = time.monotonic() + self._options.groups_s
        reach("mirror_groups_carried")

    def _tell(self, now: float) -> None:
        cuts = self._run.report.cuts
        cuts_per_s = (cuts - self._cuts_told) / (now - self._last_told) if now > self._last_told else 0.0
        self._cuts_told, self._last_told = cuts, now
        self._run.tell(self._source, self._finder, self._state, cuts_per_s, self._behind)

    def _finish(self) -> None:
        """What a stop leaves to do: progress without records, and the groups' last positions."""
        if self._passed:
            self._publish({}, {})
        if self._carrier is not None:
            self._carry_groups()
        self._tell(time.monotonic())


def _is_passing(error: SemelError) -> bool:
    return isinstance(error, _PASSING) or (isinstance(error, KafkaError) and error.code in _PASSING_CODES)
