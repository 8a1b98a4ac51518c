"""Damages to plant in the rows of a clean history, each with the anomaly that it must show as; and blind scrambling.

A damage gets the rows of all processes as one table that it may change, and returns None where the history has no place
for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from semel.verify.history import Act, History, Manifest, Phase, Rows

Damage = Callable[[Rows, Manifest, random.Random], Rows | None]
DAMAGES: list[tuple[str, Damage]] = []


def damage(anomaly: str) -> Callable[[Damage], Damage]:
    def plant(function: Damage) -> Damage:
        DAMAGES.append((anomaly, function))
        return function

    return plant


def rows_of(history: History) -> Rows:
    return np.concatenate([np.asarray(source) for source in history.sources])


def with_rows(history: History, rows: Rows) -> History:
    numbers = [process.number for process in history.manifest.processes]
    return History(history.manifest, [rows[rows["process"] == number] for number in numbers])


def pick(rng: random.Random, among: Sequence[int]) -> int | None:
    return int(rng.choice(list(among))) if len(among) else None


def judge_of(manifest: Manifest) -> int:
    return next(process.number for process in manifest.processes if process.role == "judge")


def judged(rows: Rows, manifest: Manifest) -> list[int]:
    return np.flatnonzero((rows["process"] == judge_of(manifest)) & (rows["act"] == Act.READ)).tolist()


def is_told_committed(rows: Rows, at: int) -> bool:
    """Of a read: its writer was told that its transaction is committed, or that the record is written."""
    read = rows[at]
    mine = (
        (rows["process"] == read["writer"]) & (rows["transaction"] == read["transaction"]) & (rows["phase"] == Phase.OK)
    )
    if read["transaction"] >= 0:
        return bool((mine & (rows["act"] == Act.COMMIT)).any())
    same = (rows["origin"] == read["origin"]) & (rows["sequence"] == read["sequence"])
    return bool((mine & same & (rows["act"] == Act.SEND)).any())


def same_record(rows: Rows, at: int) -> npt.NDArray[np.bool_]:
    one = rows[at]
    return (rows["origin"] == one["origin"]) & (rows["sequence"] == one["sequence"])


def without(rows: Rows, *at: int) -> Rows:
    return np.delete(rows, at)


def swap(rows: Rows, one: int, other: int, *columns: str) -> Rows:
    for column in columns or rows.dtype.names or ():
        rows[column][[one, other]] = rows[column][[other, one]]
    return rows


@damage("lost_write")
def the_judge_misses_a_record(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    reads = judged(rows, manifest)
    chosen = [
        at
        for at in reads
        if is_told_committed(rows, at)
        # Something was read behind it, and its own place is known: without that it would only be unseen.
        and any(rows["partition"][later] == rows["partition"][at] and later > at for later in reads)
        and manifest.partitions[rows["partition"][at]][0] == "orders"
        and (
            same_record(rows, at)
            & (rows["act"] == Act.SEND)
            & (rows["process"] == rows["writer"][at])
            & (rows["offset"] >= 0)
        ).any()
    ]
    at = pick(rng, chosen)
    return None if at is None else without(rows, at)


@damage("unseen")
def the_judge_stops_too_early(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    reads = judged(rows, manifest)
    reads = [at for at in reads if rows["partition"][at] == 0]
    if not len(reads) or not is_told_committed(rows, reads[-1]):
        return None
    return without(rows, int(reads[-1]))


@damage("duplicate")
def a_record_is_there_again(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(rng, judged(rows, manifest))
    if at is None:
        return None
    again = rows[at : at + 1].copy()
    again["offset"] = rows["offset"].max() + 1
    return np.concatenate((rows, again))


@damage("inconsistent_offsets")
def two_acknowledgements_name_one_place(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    told = np.flatnonzero((rows["act"] == Act.SEND) & (rows["phase"] == Phase.OK)).tolist()
    at = pick(rng, told)
    others = [
        other for other in told if at is not None and rows["partition"][other] == rows["partition"][at] and other != at
    ]
    other = pick(rng, others)
    if at is None or other is None:
        return None
    rows["offset"][at] = rows["offset"][other]
    return rows


@damage("aborted_read")
def a_commit_was_refused(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(
        rng, [at for at in judged(rows, manifest) if rows["transaction"][at] >= 0 and is_told_committed(rows, at)]
    )
    if at is None or manifest.partitions[rows["partition"][at]][0] != "orders":
        return None
    mine = (rows["process"] == rows["writer"][at]) & (rows["transaction"] == rows["transaction"][at])
    rows["phase"][mine & (rows["act"] == Act.COMMIT) & (rows["phase"] == Phase.OK)] = Phase.FAIL
    return rows


@damage("dirty_read")
def a_commit_was_never_asked_for(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(rng, [at for at in judged(rows, manifest) if rows["transaction"][at] >= 0])
    if at is None or manifest.partitions[rows["partition"][at]][0] != "orders":
        return None
    mine = (rows["process"] == rows["writer"][at]) & (rows["transaction"] == rows["transaction"][at])
    return rows[~(mine & np.isin(rows["act"], (Act.COMMIT, Act.ABORT)))]


@damage("dirty_read")
def a_record_was_never_sent(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(rng, [at for at in judged(rows, manifest) if manifest.partitions[rows["partition"][at]][0] == "orders"])
    return None if at is None else rows[~(same_record(rows, at) & (rows["act"] == Act.SEND))]


@damage("precommitted_read")
def a_reader_was_too_early(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(rng, [at for at in judged(rows, manifest) if rows["transaction"][at] >= 0])
    if at is None or manifest.partitions[rows["partition"][at]][0] != "orders":
        return None
    rows["time_ns"][at] = 0
    return rows


@damage("torn_transaction")
def a_part_of_a_transaction_is_gone(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    reads = judged(rows, manifest)
    reads = [
        at for at in reads if rows["transaction"][at] >= 0 and manifest.partitions[rows["partition"][at]][0] == "orders"
    ]
    chosen = [
        at
        for at in reads
        if any(rows[["writer", "transaction"]][at] == rows[["writer", "transaction"]][o] for o in reads if o != at)
    ]
    at = pick(rng, chosen)
    return None if at is None else without(rows, at)


@damage("double_consume")
def an_input_is_taken_once_more(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    taken = [at for at in np.flatnonzero(rows["act"] == Act.CONSUME).tolist() if _is_consumer_told_committed(rows, at)]
    at = pick(rng, taken)
    placed = {(*_consumer(rows, p), rows["partition"][p]) for p in np.flatnonzero(rows["act"] == Act.POSITION).tolist()}
    others = [
        other
        for other in taken
        if at is not None
        and _consumer(rows, other) != _consumer(rows, at)
        and (*_consumer(rows, other), rows["partition"][at]) in placed
    ]
    other = pick(rng, others)
    if at is None or other is None or _outputs(rows, at).isdisjoint(_outputs(rows, other)):
        return None
    again = rows[at : at + 1].copy()
    again[["process", "transaction"]] = rows[["process", "transaction"]][other]
    return np.concatenate((rows, again))


@damage("double_consume")
def a_position_goes_back(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    ends = np.flatnonzero((rows["act"] == Act.COMMIT) & (rows["phase"] == Phase.OK)).tolist()
    placed = np.flatnonzero((rows["act"] == Act.POSITION) & (rows["offset"] > 0)).tolist()
    for at in rng.sample(placed, len(placed)):
        end = [end for end in ends if _consumer(rows, end) == _consumer(rows, at)]
        later = [
            other
            for other in placed
            if end
            and rows["partition"][other] == rows["partition"][at]
            and rows["time_ns"][other] > rows["time_ns"][end[0]]
            and any(_consumer(rows, other) == _consumer(rows, e) for e in ends)
            and not _outputs(rows, at).isdisjoint(_outputs(rows, other))
        ]
        if later:
            rows["offset"][later[0]] = rows["offset"][at] - 1
            return rows
    return None


@damage("order_violation")
def two_records_change_places(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    reads = judged(rows, manifest)
    for one, other in pairwise(reads):
        names = ["partition", "writer"]
        if rows[names][one] == rows[names][other] and not _is_foreign(rows, manifest, one):
            return swap(rows, one, other, "origin", "sequence", "transaction", "value")
    return None


@damage("poll_skip")
def a_reader_passes_over_a_record(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    reads = np.flatnonzero((rows["act"] == Act.READ) & (rows["process"] != judge_of(manifest))).tolist()
    visible = {(rows["partition"][at], rows["offset"][at]) for at in judged(rows, manifest)}
    for at in reads:
        later = [
            other
            for other in range(at + 1, len(rows))
            if rows[["process", "partition"]][other] == rows[["process", "partition"]][at]
        ]
        seen = (rows["partition"][at], rows["offset"][at]) in visible
        if seen and later and rows["act"][later[0]] == Act.READ and rows["offset"][later[0]] > rows["offset"][at]:
            before = rows[:at][rows["process"][:at] == rows["process"][at]]
            if (before["partition"] == rows["partition"][at]).any():
                return without(rows, at)
    return None


@damage("nonmonotonic_poll")
def a_reader_goes_back(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    reads = np.flatnonzero(rows["act"] == Act.READ)
    for one, other in pairwise(reads):
        if other == one + 1 and rows[["process", "partition"]][one] == rows[["process", "partition"]][other]:
            return swap(rows, int(one), int(other))
    return None


@damage("nonmonotonic_send")
def two_acknowledgements_change_places(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    told = np.flatnonzero((rows["act"] == Act.SEND) & (rows["phase"] == Phase.OK))
    for one, other in pairwise(told):
        if rows[["process", "partition"]][one] == rows[["process", "partition"]][other]:
            return swap(rows, int(one), int(other), "offset")
    return None


@damage("hung_lso")
def a_transaction_hangs(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(rng, np.flatnonzero(rows["act"] == Act.ENDS).tolist())
    assert at is not None
    rows["offset"][at] = rows["value"][at] - 1
    return rows


@damage("wrong_aggregate")
def a_total_is_off(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    if not manifest.aggregates and not manifest.zero_sum_topics:
        return None
    reads = judged(rows, manifest)
    topic = "orders" if manifest.zero_sum_topics else "results"
    reads = [at for at in reads if manifest.partitions[rows["partition"][at]][0] == topic]
    at = reads[-1] if reads else None
    if at is None:
        return None
    rows["value"][at] += 1000
    return rows


@damage("misrouted_payload")
def a_payload_is_damaged(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(rng, np.flatnonzero(rows["act"] == Act.READ).tolist())
    if at is None:
        return None
    rows["phase"][at] = Phase.FAIL
    for column in ("writer", "transaction", "origin", "sequence", "value"):
        rows[column][at] = -1
    return rows


@damage("misrouted_payload")
def a_record_was_sent_to_another_partition(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    at = pick(rng, judged(rows, manifest))
    if at is None or sum(topic == "orders" for topic, _ in manifest.partitions) == 1:
        return None
    mine = same_record(rows, at) & (rows["act"] == Act.SEND) & (rows["partition"] == rows["partition"][at])
    if not mine.any() or rows["partition"][at] > 1:
        return None
    rows["partition"][mine] = 1 - rows["partition"][at]
    return rows


@damage("g1c")
def two_transactions_take_from_each_other(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows | None:
    reads = [
        at for at in judged(rows, manifest) if rows["transaction"][at] >= 0 and not _is_foreign(rows, manifest, at)
    ]
    one = pick(rng, reads)
    other = pick(rng, [at for at in reads if one is not None and _writer(rows, at) != _writer(rows, one)])
    if one is None or other is None:
        return None
    taken = rows[[one, other]].copy()
    taken["act"] = Act.CONSUME
    for row, taker in zip(taken, (other, one), strict=True):
        row["process"], row["transaction"] = _writer(rows, taker)
    return np.concatenate((rows, taken))


def scramble(rows: Rows, manifest: Manifest, rng: random.Random) -> Rows:
    """Change, drop, repeat or move some rows without any plan, but keep the history well-formed."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(rows))
        choice = rng.choice(("drop", "repeat", "swap", "offset", "time", "outcome", "identity"))
        act = rows["act"][at]
        if choice == "drop" and act != Act.SEND and len(rows) > 1:
            rows = without(rows, at)
        elif choice == "repeat":
            rows = np.insert(rows, rng.randint(0, len(rows)), rows[at])
        elif choice == "swap":
            other = rng.randrange(len(rows))
            if rows["process"][at] == rows["process"][other]:
                swap(rows, at, other)
        elif choice == "offset" and rows["offset"][at] >= 0:
            rows["offset"][at] = max(0, rows["offset"][at] + rng.choice((-2, -1, 1, 2)))
        elif choice == "time":
            rows["time_ns"][at] = rng.randint(1000, int(rows["time_ns"].max()))
        elif choice == "outcome" and act in (Act.COMMIT, Act.ABORT, Act.SEND) and rows["phase"][at] != Phase.INVOKE:
            rows["phase"][at] = rng.choice((Phase.OK, Phase.FAIL, Phase.UNKNOWN))
        elif choice == "identity" and act in (Act.READ, Act.CONSUME):
            other = pick(rng, np.flatnonzero(rows["act"] == act).tolist())
            for column in ("origin", "sequence", "writer"):
                rows[column][at] = rows[column][other]
            if act == Act.READ:
                rows["transaction"][at] = rows["transaction"][other]
    return rows


def _consumer(rows: Rows, at: int) -> tuple[int, int]:
    return int(rows["process"][at]), int(rows["transaction"][at])


def _writer(rows: Rows, at: int) -> tuple[int, int]:
    return int(rows["writer"][at]), int(rows["transaction"][at])


def _is_consumer_told_committed(rows: Rows, at: int) -> bool:
    mine = (rows["process"] == rows["process"][at]) & (rows["transaction"] == rows["transaction"][at])
    return bool((mine & (rows["act"] == Act.COMMIT) & (rows["phase"] == Phase.OK)).any())


def _outputs(rows: Rows, at: int) -> set[int]:
    """Whether the process writes at all: all copiers write to the one output topic."""
    return set(rows["act"][(rows["process"] == rows["process"][at]) & (rows["act"] == Act.SEND)].tolist())


def _is_foreign(rows: Rows, manifest: Manifest, at: int) -> bool:
    topic = manifest.partitions[rows["partition"][at]][0]
    return topic == "results" and not (same_record(rows, at) & (rows["act"] == Act.CONSUME)).any()
