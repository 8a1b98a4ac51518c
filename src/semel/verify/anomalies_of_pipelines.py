"""Anomalies of what a pipeline made of its input: what it took twice, and totals that do not add up.

One pure function for each, with its definition as docstring.
"""

from __future__ import annotations

import numpy as np

from semel.verify.cases import Case, Found, Words, found, together
from semel.verify.copies import visible_in
from semel.verify.evidence import Evidence
from semel.verify.evidence_of_writes import NEVER
from semel.verify.history import Aggregate
from semel.verify.record_keys import OFFSET_BITS, Array, distinct, look_up, partition_and_offset, places


def double_consume(evidence: Evidence) -> Found:
    """An input that two committed transactions of one pipeline took; or a committed transaction that set its group's
    position behind one that another had committed before.

    To take is to consume and to set the position: who only reads takes nothing away. Writers that share an output topic
    are one pipeline: two pipelines may well read the same topic.
    """
    return together(_taken_twice(evidence), _positions_that_went_back(evidence))


def wrong_aggregate(evidence: Evidence) -> Found:
    """Totals that do not fit what the judge saw: the last total of an origin is not that of all its inputs, a total on
    the way is not that of any first part of them, or a count did not grow; or the values of a transaction in the topics
    that must add up to nothing do not.
    """
    wrong = [_wrong_totals(evidence, aggregate) for aggregate in evidence.manifest.aggregates]
    return together(*wrong, _unbalanced(evidence))


def _pipelines(evidence: Evidence) -> Array:
    """A number for each process: the same for those that write to the same topic."""
    sends, process = evidence.sends, evidence.transactions.process
    topic = evidence.lanes.topic_of_partition[sends.partition]
    links = np.unique(np.stack((process[sends.slot], topic), axis=1), axis=0) if len(sends) else np.empty((0, 2), int)
    # Those who write nothing are all in one.
    pipeline = np.full(int(process.max(initial=0)) + 1, -1, np.int64)
    groups: list[tuple[set[int], set[int]]] = []
    for writer, target in links.tolist():
        touching = [group for group in groups if writer in group[0] or (target in group[1] and target >= 0)]
        groups = [group for group in groups if group not in touching]
        groups.append(
            ({writer}.union(*(group[0] for group in touching)), {target}.union(*(group[1] for group in touching)))
        )
    for number, (writers, _) in enumerate(groups):
        pipeline[list(writers)] = number
    return pipeline


def _taken_twice(evidence: Evidence) -> Found:
    words, transactions = Words(evidence), evidence.transactions
    consumer, place, _ = evidence.consumed
    is_committed = transactions.is_committed[consumer]
    consumer, place = consumer[is_committed], place[is_committed]
    order = np.argsort(place, kind="stable")
    consumer, place = consumer[order], place[order]
    in_run = np.zeros(len(place), np.bool_)
    in_run[1:] |= place[1:] == place[:-1]
    in_run[:-1] |= place[1:] == place[:-1]
    consumer, place = consumer[in_run], place[in_run]
    positions = evidence.positions
    claims = distinct(transactions.slots(positions["process"], positions["transaction"]) << 16 | positions["partition"])
    is_claimed = look_up(claims, consumer.astype(np.int64) << 16 | place >> OFFSET_BITS) >= 0
    consumer, place = consumer[is_claimed], place[is_claimed]
    pipeline = _pipelines(evidence)[transactions.process[consumer]] if len(consumer) else consumer
    order = np.lexsort((consumer, pipeline, place))
    consumer, place, pipeline = consumer[order], place[order], pipeline[order]
    same = (place[1:] == place[:-1]) & (pipeline[1:] == pipeline[:-1])
    twice = np.flatnonzero(same & (consumer[1:] != consumer[:-1]))

    def case(number: int) -> Case:
        at = int(twice[number])
        one, other, where = int(consumer[at]), int(consumer[at + 1]), int(place[at])
        text = f"{words.transaction(one)} and {words.transaction(other)} both took {words.place(where)}."
        return Case(text, slots=(one, other), places=(where,))

    return found(twice, case)


def _positions_that_went_back(evidence: Evidence) -> Found:
    words, transactions, rows = Words(evidence), evidence.transactions, evidence.positions
    slot = transactions.slots(rows["process"], rows["transaction"])
    chosen = transactions.is_committed[slot]
    rows, slot = rows[chosen], slot[chosen]
    pipeline = _pipelines(evidence)[rows["process"]] if len(rows) else slot
    back: list[tuple[int, int]] = []
    group = np.stack((pipeline, rows["partition"].astype(np.int64)), axis=1)
    for one in np.unique(group, axis=0):
        at = np.flatnonzero((group == one).all(axis=1))
        ended = at[transactions.commit_ok_ns[slot[at]] < NEVER]
        ended = ended[np.argsort(transactions.commit_ok_ns[slot[ended]], kind="stable")]
        if not len(ended):
            continue
        # The highest position that was committed by then, and by whom.
        highest = np.maximum.accumulate(rows["offset"][ended])
        is_new = rows["offset"][ended] == highest
        holder = ended[np.maximum.accumulate(np.where(is_new, np.arange(len(ended)), 0))]
        before = np.searchsorted(transactions.commit_ok_ns[slot[ended]], rows["time_ns"][at]) - 1
        lower = (before >= 0) & (rows["offset"][at] < highest[before])
        back += [(int(late), int(holder[index])) for late, index in zip(at[lower], before[lower], strict=True)]

    def case(number: int) -> Case:
        late, early = back[number]
        place, other = (int(places(rows["partition"][[n]], rows["offset"][[n]])[0]) for n in (late, early))
        text = (
            f"{words.transaction(int(slot[late]))} set the position to {words.place(place)}, when "
            f"{words.transaction(int(slot[early]))} had committed {partition_and_offset(other)[1]} already."
        )
        return Case(text, slots=(int(slot[late]), int(slot[early])), places=(place,))

    return found(back, case)


def _wrong_totals(evidence: Evidence, aggregate: Aggregate) -> Found:
    log, topics = evidence.log, evidence.lanes.topics
    if aggregate.input not in topics or aggregate.output not in topics:
        return found([], lambda _: Case(""))
    inputs = _by_origin(evidence, topics.index(aggregate.input))
    outputs = _by_origin(evidence, topics.index(aggregate.output))
    nothing = np.empty(0, np.int32)
    wrong: list[tuple[int, int, str]] = []
    for origin in sorted(inputs.keys() | outputs.keys()):
        mine, totals = inputs.get(origin, nothing), outputs.get(origin, nothing)
        amounts = log.value[mine] if aggregate.of == "sum" else np.ones(len(mine), np.int64)
        if len(totals):
            is_in_order = aggregate.of == "count" or _is_in_one_partition(evidence, mine)
            wrong += [(origin, at, text) for at, text in _wrong_ones(evidence, amounts, totals, is_in_order).items()]
            if aggregate.of == "count":
                wrong += [(origin, at, "the count did not grow") for at in _not_growing(evidence, totals)]
        else:
            wrong.append((origin, -1, f"no total, though its inputs make {amounts.sum()}"))

    def case(number: int) -> Case:
        origin, at, text = wrong[number]
        place = (int(places(log.partition[[at]], log.offset[[at]])[0]),) if at >= 0 else ()
        record = (evidence.lanes.origin_and_sequence(int(log.key[at])),) if at >= 0 else ()
        return Case(f"{aggregate.output}, origin {origin}: {text}.", record, places=place)

    return found(wrong, case)


def _by_origin(evidence: Evidence, topic: int) -> dict[int, Array]:
    """Where in the log the records of each origin in a topic are, by partition and offset."""
    at = visible_in(evidence, topic)
    lane = evidence.log.key[at] >> 32
    starts = np.flatnonzero(np.concatenate(([True], lane[1:] != lane[:-1]))) if len(at) else np.empty(0, np.int64)
    origins = evidence.lanes.origin[lane[starts]].tolist()
    return {origin: np.sort(mine) for origin, mine in zip(origins, np.split(at, starts[1:]), strict=False)}


def _is_in_one_partition(evidence: Evidence, at: Array) -> bool:
    number = np.searchsorted(evidence.log.starts, at, side="right")
    return bool((number == number[:1]).all())


def _wrong_ones(evidence: Evidence, amounts: Array, totals: Array, is_in_order: bool) -> dict[int, str]:
    """Totals that are not of a first part of the inputs, where their order is known, and a last that is not of all."""
    log = evidence.log
    if not _is_in_one_partition(evidence, totals):
        totals = totals[np.argsort(log.key[totals], kind="stable")]
    value, whole = log.value[totals], int(amounts.sum())
    wrong: dict[int, str] = {}
    if is_in_order:
        strange = ~np.isin(value, np.cumsum(amounts))
        wrong = {int(at): f"{log.value[at]} was never the total" for at in totals[strange]}
    if int(value[-1]) != whole:
        wrong[int(totals[-1])] = f"the last total is {value[-1]}, and the inputs make {whole}"
    return wrong


def _not_growing(evidence: Evidence, totals: Array) -> list[int]:
    log = evidence.log
    if not _is_in_one_partition(evidence, totals):
        totals = totals[np.argsort(log.key[totals], kind="stable")]
    value = log.value[totals]
    return totals[1:][value[1:] <= value[:-1]].tolist()


def _unbalanced(evidence: Evidence) -> Found:
    log, words = evidence.log, Words(evidence)
    topics = evidence.numbers_of(evidence.manifest.zero_sum_topics)
    if not topics:
        return found([], lambda _: Case(""))
    is_in = np.isin(evidence.lanes.topic_of_partition[log.partition], topics)
    sums = np.zeros(evidence.transactions.count + 1, np.int64)
    np.add.at(sums, log.slot[is_in], log.value[is_in])
    wrong = np.flatnonzero(sums)

    def case(number: int) -> Case:
        slot = int(wrong[number])
        if slot == evidence.transactions.count:
            return Case(f"What was written by nobody known adds up to {sums[slot]}.")
        mine = np.flatnonzero(is_in & (log.slot == slot))[:4]
        records = tuple(evidence.lanes.origin_and_sequence(int(key)) for key in log.key[mine] if key >= 0)
        return Case(f"What is visible of {words.transaction(slot)} adds up to {sums[slot]}.", records, (slot,))

    return found(wrong, case)
