"""The same definitions as the checker's, said once more in plain Python, one row after another: slow and obvious.

What it has in common with the checker is the form of a history, nothing else. It returns only how often it found what.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from semel.verify.history import ROW, Act, History, Phase

COMMITTED, ABORTED, OPEN, UNKNOWN, PLAIN = "committed", "aborted", "open", "unknown", "plain"


class Row:
    def __init__(self, values: tuple[int, ...]) -> None:
        named = dict(zip(ROW.names or (), values, strict=True))
        self.time, self.offset, self.value = named["time_ns"], named["offset"], named["value"]
        self.process, self.writer, self.transaction = named["process"], named["writer"], named["transaction"]
        self.origin, self.sequence, self.partition = named["origin"], named["sequence"], named["partition"]
        self.act, self.phase = named["act"], named["phase"]

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset


@dataclass(eq=False)
class Sent:
    topic: str | None
    origin: int
    sequence: int
    writer: int
    transaction: int
    partition: int
    rank: int
    tries: int = 1
    told: list[int] = field(default_factory=list[int])
    offset: int = -1
    by_judge: bool = False
    by_anyone: bool = False

    @property
    def failed(self) -> bool:
        return set(self.told) == {Phase.FAIL} and self.tries == 1

    @property
    def ok(self) -> bool:
        return Phase.OK in self.told

    @property
    def unknown(self) -> bool:
        return not self.ok and not self.failed and bool(self.told)


@dataclass
class Seen:
    """What the judge saw at a place."""

    row: Row
    sent: Sent | None

    @property
    def damaged(self) -> bool:
        return self.row.phase == Phase.FAIL


class SlowChecker:
    def __init__(self, history: History) -> None:
        self.manifest = history.manifest
        self.rows = [[Row(values) for values in source.tolist()] for source in history.sources]  # type: ignore[union-attr]
        self.all = [row for mine in self.rows for row in mine]
        self.process = {process.number: process for process in self.manifest.processes}
        self.found: Counter[str] = Counter()
        self.read_writes()
        self.read_reads()
        self.resolve()

    def topic(self, partition: int) -> str | None:
        return self.manifest.partitions[partition][0] if partition >= 0 else None

    def committed_reader(self, row: Row) -> bool:
        return self.process[row.process].isolation == "read_committed"

    # What was written.

    def read_writes(self) -> None:
        self.sends: list[Sent] = []
        self.by_id: dict[tuple[Any, ...], Sent] = {}
        self.ends: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self.asked_at: dict[tuple[int, int], int] = {}
        self.committed_at: dict[tuple[int, int], int] = {}
        for rank, row in enumerate(self.all):
            transaction = (row.process, row.transaction)
            if row.act == Act.SEND and row.phase == Phase.INVOKE:
                name = (self.topic(row.partition), row.origin, row.sequence, row.process, row.transaction)
                if name in self.by_id:
                    self.by_id[name].tries += 1
                else:
                    self.by_id[name] = Sent(*name, row.partition, rank)
                    self.sends.append(self.by_id[name])
            elif row.act in (Act.COMMIT, Act.ABORT):
                self.ends[transaction].add((row.act, row.phase))
                if (row.act, row.phase) == (Act.COMMIT, Phase.INVOKE):
                    self.asked_at[transaction] = min(row.time, self.asked_at.get(transaction, row.time))
                if (row.act, row.phase) == (Act.COMMIT, Phase.OK):
                    self.committed_at[transaction] = min(row.time, self.committed_at.get(transaction, row.time))
        for row in self.all:
            if row.act == Act.SEND and row.phase != Phase.INVOKE:
                self.answer(row)
        for sent in self.sends:
            if sent.tries > 1:
                sent.offset = -1
        written = {self.topic(sent.partition) for sent in self.sends}
        outputs = {output for _, output in self.manifest.copies} | {each.output for each in self.manifest.aggregates}
        pipelines = {row.process for row in self.all if row.act == Act.CONSUME}
        untold = any(sent.partition < 0 and sent.writer in pipelines for sent in self.sends)
        self.foreign = set[str | None]() if untold else outputs - written

    def answer(self, row: Row) -> None:
        sent = self.find(row.partition, row.origin, row.sequence, row.process, row.transaction)
        assert sent is not None
        sent.told.append(row.phase)
        if row.phase == Phase.OK:
            if sent.partition < 0:
                sent.partition = row.partition
            if row.partition >= 0 and sent.partition != row.partition:
                self.found["misrouted_payload"] += 1
            else:
                sent.offset = row.offset

    def find(self, partition: int, origin: int, sequence: int, writer: int, transaction: int) -> Sent | None:
        topics = [self.topic(partition), None]
        if partition < 0:
            topics += list(dict.fromkeys(topic for topic, _ in self.manifest.partitions))
        names = [(topic, origin, sequence, writer, transaction) for topic in topics]
        return next((self.by_id[name] for name in names if name in self.by_id), None)

    def fate(self, transaction: tuple[int, int]) -> str:
        ends = self.ends[transaction]
        if transaction[1] < 0:
            return PLAIN
        if (Act.COMMIT, Phase.OK) in ends:
            return COMMITTED
        if (Act.COMMIT, Phase.FAIL) in ends:
            return ABORTED
        if any(act == Act.COMMIT for act, _ in ends):
            return UNKNOWN
        return ABORTED if ends else OPEN

    # What was read.

    def read_reads(self) -> None:
        self.log: dict[tuple[int, int], Seen] = {}
        for row in self.all:
            if row.act == Act.READ and self.process[row.process].role == "judge":
                sent = None if row.phase == Phase.FAIL else self.find_read(row)
                if row.place not in self.log:
                    self.log[row.place] = Seen(row, sent)
        self.log = dict(sorted(self.log.items()))
        for seen in self.log.values():
            if seen.sent:
                seen.sent.by_judge = seen.sent.by_anyone = True
        self.strange: list[tuple[Row, Sent | None]] = []
        self.consumed: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int] | None]] = []
        for row in self.all:
            if row.act == Act.READ or row.act == Act.CONSUME:
                self.compare(row)

    def find_read(self, row: Row) -> Sent | None:
        if self.topic(row.partition) in self.foreign:
            return None
        return self.find(row.partition, row.origin, row.sequence, row.writer, row.transaction)

    def compare(self, row: Row) -> None:
        if row.phase == Phase.FAIL:
            self.found["misrouted_payload"] += 1
            return
        seen = self.log.get(row.place)
        agrees = seen is not None and not seen.damaged and self.is_same(row, seen.row)
        if agrees and seen:
            sent, source = seen.sent, (seen.row.writer, seen.row.transaction)
        elif row.act == Act.CONSUME:
            sent = self.find_consumed(row)
            source = (sent.writer, sent.transaction) if sent else None
        else:
            sent, source = self.find_read(row), (row.writer, row.transaction)
        if row.act == Act.CONSUME and row.transaction >= 0:
            self.consumed.append(((row.process, row.transaction), row.place, source))
        if not agrees:
            self.strange.append((row, sent))
            if self.committed_reader(row) and sent:
                sent.by_anyone = True
        self.judge(row, sent)

    def is_same(self, row: Row, other: Row) -> bool:
        same = (row.origin, row.sequence, row.writer) == (other.origin, other.sequence, other.writer)
        return same and (row.act == Act.CONSUME or row.transaction == other.transaction)

    def find_consumed(self, row: Row) -> Sent | None:
        if self.topic(row.partition) in self.foreign:
            return None
        mine = [each for each in self.sends if (each.origin, each.sequence) == (row.origin, row.sequence)]
        mine = sorted((each for each in mine if each.writer == row.writer), key=lambda each: each.transaction)
        for topic in (self.topic(row.partition), None):
            candidates = [each for each in mine if each.topic == topic]
            exact = [each for each in candidates if (each.partition, each.offset) == row.place]
            if candidates:
                return (exact + candidates)[0]
        return None

    def judge(self, row: Row, sent: Sent | None) -> None:
        asked = sent.partition if sent else -1
        is_foreign = self.topic(row.partition) in self.foreign
        elsewhere: Sent | None = None
        if sent is None and row.act == Act.READ:
            others = [each for each in self.sends if self.is_of(each, row)]
            others.sort(key=lambda each: self.topics.index(each.topic) if each.topic else -1)
            elsewhere = others[0] if others else None
            if elsewhere and not is_foreign:
                asked = elsewhere.partition
        if asked >= 0 and asked != row.partition:
            self.found["misrouted_payload"] += 1
        if not self.committed_reader(row):
            return
        if sent is None:
            if not is_foreign and elsewhere is None:
                self.found["dirty_read"] += 1
            return
        transaction = (sent.writer, sent.transaction)
        fate = self.fate(transaction)
        if fate == ABORTED or sent.failed:
            self.found["aborted_read"] += 1
        elif fate == OPEN:
            self.found["dirty_read"] += 1
        elif fate != PLAIN and row.time < self.asked_at.get(transaction, -1):
            self.found["precommitted_read"] += 1

    @property
    def topics(self) -> list[str]:
        return list(dict.fromkeys(topic for topic, _ in self.manifest.partitions))

    def is_of(self, sent: Sent, row: Row) -> bool:
        mine = (sent.origin, sent.sequence, sent.writer, sent.transaction)
        return mine == (row.origin, row.sequence, row.writer, row.transaction)

    def resolve(self) -> None:
        transactions = {(sent.writer, sent.transaction) for sent in self.sends} | set(self.ends)
        shown = {(sent.writer, sent.transaction) for sent in self.sends if sent.by_anyone}
        self.committed = {t for t in transactions if self.fate(t) == COMMITTED}
        self.committed |= {t for t in transactions if self.fate(t) == UNKNOWN and t in shown}

    def right(self, sent: Sent | None, partition: int, *, damaged: bool = False) -> bool:
        """Whether a read_committed reader may see it."""
        if damaged or (self.topic(partition) in self.foreign and sent is None):
            return True
        if sent is None or sent.failed:
            return False
        transaction = (sent.writer, sent.transaction)
        return transaction in self.committed or self.fate(transaction) == PLAIN

    # One anomaly after the other.

    def run(self) -> dict[str, int]:
        self.missing = [sent for sent in self.sends if self.must_be_seen(sent) and not sent.by_judge]
        self.lost_or_unseen()
        self.copies()
        self.duplicates()
        self.inconsistent()
        self.torn()
        self.double_consume()
        self.order()
        self.polls()
        self.nonmonotonic_send()
        self.hung()
        self.aggregates()
        self.circles()
        return {name: count for name, count in self.found.items() if count}

    def must_be_seen(self, sent: Sent) -> bool:
        if sent.failed:
            return False
        if (sent.writer, sent.transaction) in self.committed:
            return not sent.unknown or sent.by_anyone
        return sent.transaction < 0 and (sent.ok or sent.by_anyone)

    def lost_or_unseen(self) -> None:
        for sent in self.missing:
            if sent.offset >= 0:
                behind = any(p == sent.partition and offset > sent.offset for p, offset in self.log)
            else:
                behind = sent.partition >= 0 and any(
                    other.by_judge
                    and (other.writer, other.partition) == (sent.writer, sent.partition)
                    and other.rank > sent.rank
                    for other in self.sends
                )
            self.found["lost_write" if behind else "unseen"] += 1

    def visible(self, topic: str) -> dict[tuple[int, int], Seen]:
        """By origin and sequence, each where it is first; nothing that must not be there."""
        first: dict[tuple[int, int], Seen] = {}
        for place, seen in self.log.items():
            if self.topic(place[0]) == topic and not seen.damaged:
                first.setdefault((seen.row.origin, seen.row.sequence), seen)
        return {key: seen for key, seen in first.items() if self.right(seen.sent, seen.row.partition)}

    def copies(self) -> None:
        for source, target in self.manifest.copies:
            inputs, outputs = self.visible(source), self.visible(target)
            self.found["lost_write"] += len(inputs.keys() - outputs.keys())
            for origin, sequence in outputs.keys() - inputs.keys():
                tries = [sent for sent in self.sends if (sent.origin, sent.sequence) == (origin, sequence)]
                tries = [sent for sent in tries if self.topic(sent.partition) in (source, None)]
                fates = [self.final(sent) for sent in tries]
                if all(fate in (ABORTED, OPEN) for fate in fates):
                    self.found["aborted_read" if ABORTED in fates else "dirty_read"] += 1

    def final(self, sent: Sent) -> str:
        transaction = (sent.writer, sent.transaction)
        fate = self.fate(transaction)
        return ABORTED if sent.failed or (fate == UNKNOWN and transaction not in self.committed) else fate

    def duplicates(self) -> None:
        where: dict[tuple[Any, ...], set[tuple[int, int]]] = defaultdict(set)
        for seen in self.log.values():
            if not seen.damaged:
                where[self.topic(seen.row.partition), seen.row.origin, seen.row.sequence].add(seen.row.place)
        for row, _ in self.strange:
            if row.act == Act.READ and self.committed_reader(row):
                where[self.topic(row.partition), row.origin, row.sequence].add(row.place)
        self.found["duplicate"] += sum(len(places) - 1 for places in where.values())

    def inconsistent(self) -> None:
        claims: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
        places: set[tuple[int, int]] = set()
        for place, seen in self.log.items():
            if not seen.damaged:
                claims[place].add((seen.row.origin, seen.row.sequence, seen.row.writer, seen.row.transaction))
        for row, sent in self.strange:
            transaction = row.transaction if row.act == Act.READ else sent.transaction if sent else None
            if transaction is not None:
                claims[row.place].add((row.origin, row.sequence, row.writer, transaction))
        for sent in self.sends:
            if sent.ok and sent.offset >= 0:
                place = (sent.partition, sent.offset)
                claims[place].add((sent.origin, sent.sequence, sent.writer, sent.transaction))
                if sent.by_judge and place not in self.log:
                    places.add(place)
        places |= {place for place, records in claims.items() if len(records) > 1}
        self.found["inconsistent_offsets"] += len(places)

    def torn(self) -> None:
        missing = {(sent.writer, sent.transaction) for sent in self.missing}
        seen = {(sent.writer, sent.transaction) for sent in self.sends if sent.by_judge}
        self.found["torn_transaction"] += len(missing & seen & self.committed)

    def pipelines(self) -> dict[int, int]:
        """Each process with the lowest process that it is in one pipeline with; -1 for those who write nothing."""
        group = {sent.writer: sent.writer for sent in self.sends}
        for _ in range(len(group)):
            for one in self.sends:
                for other in self.sends:
                    topic, other_topic = self.topic(one.partition), self.topic(other.partition)
                    if topic is not None and topic == other_topic:
                        group[one.writer] = min(group[one.writer], group[other.writer])
        return defaultdict(lambda: -1, group)

    def double_consume(self) -> None:
        pipelines = self.pipelines() if self.consumed else {}
        takers: dict[tuple[Any, ...], set[tuple[int, int]]] = defaultdict(set)
        claims = {((row.process, row.transaction), row.partition) for row in self.all if row.act == Act.POSITION}
        for taker, place, _ in self.consumed:
            if taker in self.committed and (taker, place[0]) in claims:
                takers[pipelines[taker[0]], place].add(taker)
        self.found["double_consume"] += sum(len(some) - 1 for some in takers.values())
        positions = [
            row for row in self.all if row.act == Act.POSITION and row.phase == Phase.OK and row.transaction >= 0
        ]
        positions = [row for row in positions if (row.process, row.transaction) in self.committed]
        pipelines = self.pipelines() if positions else {}
        for row in positions:
            earlier = [
                other.offset
                for other in positions
                if (pipelines[other.process], other.partition) == (pipelines[row.process], row.partition)
                and self.committed_at.get((other.process, other.transaction), row.time) < row.time
            ]
            self.found["double_consume"] += row.offset < max(earlier, default=-1)

    def order(self) -> None:
        last_sent: dict[tuple[int, int], int] = {}
        last_of_key: dict[tuple[int, int, int], int] = {}
        before: set[tuple[Any, ...]] = set()
        for (partition, _), seen in self.log.items():
            row, topic = seen.row, self.topic(partition)
            if seen.damaged or (topic, row.origin, row.sequence) in before:
                continue
            before.add((topic, row.origin, row.sequence))
            is_late = False
            if seen.sent and seen.sent.tries == 1:
                writer = (partition, seen.sent.writer)
                is_late = seen.sent.rank < last_sent.get(writer, -1)
                last_sent[writer] = seen.sent.rank
            if topic in self.manifest.keyed_topics:
                key = (partition, row.origin, row.value)
                is_late |= row.sequence < last_of_key.get(key, -1)
                last_of_key[key] = row.sequence
            self.found["order_violation"] += is_late

    def polls(self) -> None:
        visible = {place for place, seen in self.log.items() if self.right(seen.sent, place[0], damaged=seen.damaged)}
        for row, sent in self.strange:
            if self.committed_reader(row) and self.right(sent, row.partition):
                visible.add(row.place)
        for mine in self.rows:
            position: dict[int, int] = {}
            for row in mine if mine and self.process[mine[0].process].role != "writer" else []:
                if row.act == Act.ASSIGN:
                    position[row.partition] = row.offset
                elif row.act == Act.READ:
                    at = position.get(row.partition, -1)
                    if at >= 0 and row.offset < at:
                        self.found["nonmonotonic_poll"] += 1
                    elif at >= 0 and any((row.partition, offset) in visible for offset in range(at, row.offset)):
                        self.found["poll_skip"] += 1
                    position[row.partition] = row.offset + 1

    def nonmonotonic_send(self) -> None:
        last: dict[tuple[int, int], int] = {}
        for sent in self.sends:
            if sent.offset >= 0 and sent.partition >= 0:
                self.found["nonmonotonic_send"] += sent.offset < last.get((sent.writer, sent.partition), -1)
                last[sent.writer, sent.partition] = sent.offset

    def hung(self) -> None:
        last = {row.partition: row for row in self.all if row.act == Act.ENDS}
        self.found["hung_lso"] += sum(row.offset < row.value for row in last.values())

    def aggregates(self) -> None:
        for aggregate in self.manifest.aggregates:
            inputs, outputs = self.visible(aggregate.input).values(), self.visible(aggregate.output).values()
            for origin in {seen.row.origin for seen in (*inputs, *outputs)}:
                mine = [seen.row for seen in inputs if seen.row.origin == origin]
                totals = [seen.row for seen in outputs if seen.row.origin == origin]
                self.found["wrong_aggregate"] += self.wrong_totals(mine, totals, aggregate.of)
        sums: Counter[tuple[int, int]] = Counter()
        for seen in self.log.values():
            if self.topic(seen.row.partition) in self.manifest.zero_sum_topics:
                sums[seen.row.writer, seen.row.transaction] += seen.row.value
        self.found["wrong_aggregate"] += sum(total != 0 for total in sums.values())

    def wrong_totals(self, mine: list[Row], totals: list[Row], of: str) -> int:
        mine.sort(key=lambda row: row.place)
        amounts = [row.value if of == "sum" else 1 for row in mine]
        if not totals:
            return 1
        in_one = len({row.partition for row in totals}) == 1
        totals.sort(key=lambda row: row.place if in_one else (row.sequence, 0))
        on_the_way = [sum(amounts[: n + 1]) for n in range(len(amounts))]
        wrong: set[tuple[int, int]] = set()
        if of == "count" or len({row.partition for row in mine}) <= 1:
            wrong |= {row.place for row in totals if row.value not in on_the_way}
        if totals[-1].value != sum(amounts):
            wrong.add(totals[-1].place)
        stuck = sum(b.value <= a.value for a, b in pairwise(totals)) if of == "count" else 0
        return len(wrong) + stuck

    def circles(self) -> None:
        writes: set[tuple[Any, Any]] = set()
        for partition in range(len(self.manifest.partitions)):
            mine = [seen.row for place, seen in self.log.items() if place[0] == partition and not seen.damaged]
            order = [(row.writer, row.transaction) for row in mine if (row.writer, row.transaction) in self.committed]
            writes |= {(a, b) for n, a in enumerate(order) for b in order[n + 1 :] if a != b}
        takes = {
            (source, taker)
            for taker, _, source in self.consumed
            if taker in self.committed and source in self.committed and source != taker
        }
        self.found["g0"] += count_circles(writes)
        self.found["g1c"] += count_circles(takes)


def count_circles(edges: set[tuple[Any, Any]]) -> int:
    """How many groups of nodes there are that can all reach each other."""
    reach: dict[Any, set[Any]] = {node: set() for edge in edges for node in edge}
    for one, other in edges:
        reach[one].add(other)
    for middle in list(reach):
        for one in list(reach):
            if middle in reach[one]:
                reach[one] |= reach[middle]
    return len({frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]})
