"""What must be true of a broker after any number of kills, one function for each promise; each raises Violation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from semel.verify.chaos_clients import COMPACTED, COPIED, INPUT, RETAINED
from semel.verify.chaos_ledger import Fate, Ledger, TopicPartition, Violation
from semel.verify.chaos_reading import Records


def check_ends(before: dict[TopicPartition, int], now: dict[TopicPartition, int]) -> None:
    """No log ends before the last record of it that was acknowledged."""
    for where, end in before.items():
        if now.get(where, 0) < end:
            raise Violation(f"{where[0]}-{where[1]} ends at {now.get(where)}, but offset {end - 1} was acknowledged")


def check_everything(ledger: Ledger, records: Records) -> None:
    """All that the ledger and the committed records of all topics can tell."""
    check_nothing_twice(records)
    check_places(ledger, records)
    check_transactions(ledger, records)
    check_acknowledged(ledger, records)
    check_copies(records)
    check_compacted(ledger, records)
    check_retained(ledger, records)


def check_nothing_twice(records: Records) -> None:
    for where, found in records.items():
        twice = [value for value, count in Counter(value for _, value in found).items() if count > 1]
        if twice:
            raise Violation(f"twice in {where[0]}-{where[1]}: {twice[:5]}")


def check_places(ledger: Ledger, records: Records) -> None:
    """Every record was sent, to where it is."""
    sent = dict(ledger.sent)
    for transaction in ledger.transactions:
        sent.update(transaction.values)
    for where, found in records.items():
        for offset, value in found:
            expected = sent.get(value)
            if expected != where and not (where[0] == COPIED and expected == (INPUT, where[1])):
                raise Violation(f"{value} is at offset {offset} of {where[0]}-{where[1]} and was sent to {expected}")


def check_transactions(ledger: Ledger, records: Records) -> None:
    seen = {where: {value for _, value in found} for where, found in records.items()}
    for transaction in ledger.transactions:
        there = [value in seen[where] for value, where in transaction.values.items()]
        missing = [value for value, where in transaction.values.items() if value not in seen[where]]
        if transaction.fate is Fate.COMMITTED and missing:
            raise Violation(f"committed by {transaction.name}, and lost: {missing}")
        if transaction.fate in (Fate.ABORTED, Fate.OPEN) and any(there):
            raise Violation(f"{transaction.fate.value} by {transaction.name}, and visible: {transaction.values}")
        if len(set(there)) > 1:
            raise Violation(f"half a transaction of {transaction.name}: {missing} of {transaction.values}")


def check_acknowledged(ledger: Ledger, records: Records) -> None:
    seen = {where: {value for _, value in found} for where, found in records.items()}
    for value, where in ledger.acknowledged.items():
        if where[0] == INPUT and value not in seen[where]:
            raise Violation(f"{value} was acknowledged in {where[0]}-{where[1]}, and is lost")


def check_copies(records: Records) -> None:
    """What the copier read is written once, and in the order of its input."""
    for (topic, index), found in records.items():
        if topic != INPUT:
            continue
        wanted = [value for _, value in found]
        copied = [value for _, value in records[COPIED, index]]
        if copied != wanted:
            lost, new = set(wanted) - set(copied), set(copied) - set(wanted)
            raise Violation(f"the copy of {INPUT}-{index} is not the same: {len(lost)} lost, {len(new)} more")


def check_compacted(ledger: Ledger, records: Records) -> None:
    """The last value of each key is there; older ones may be."""
    seen = {value for where, found in records.items() if where[0] == COMPACTED for _, value in found}
    for key, values in ledger.last_of_key.items():
        known = [number for number, value in enumerate(values) if value in ledger.acknowledged]
        if known and not seen.intersection(values[known[-1] :]):
            raise Violation(f"the last value of {key} is gone from {COMPACTED}: {values[known[-1]]}")


def check_retained(ledger: Ledger, records: Records) -> None:
    """Retention takes from the beginning: each client's last records are there without a gap."""
    seen = [value for where, found in records.items() if where[0] == RETAINED for _, value in found]
    if not seen:
        raise Violation(f"nothing is left in {RETAINED}")
    oldest: dict[str, int] = {}
    for value in seen:
        client, _, number = value.partition("/")
        oldest.setdefault(client, int(number))
    for value, where in ledger.acknowledged.items():
        client, _, number = value.partition("/")
        if where[0] == RETAINED and int(number) >= oldest.get(client, int(number) + 1) and value not in seen:
            raise Violation(f"{value} was acknowledged in {RETAINED}, and is lost")


def check_reader(seen: Records, records: Records) -> None:
    """What a reader got while brokers came and went is what stands there now, from the first record on."""
    for where, found in seen.items():
        if found != records[where][: len(found)]:
            first = next(n for n, one in enumerate(found) if n >= len(records[where]) or one != records[where][n])
            raise Violation(f"the reader got {found[first]} from {where[0]}-{where[1]}, and it is not there")


def check_same(one: Records, other: Records, what: str) -> None:
    for where in one.keys() | other.keys():
        if one.get(where) != other.get(where):
            raise Violation(f"{what}: {where[0]}-{where[1]} has {len(one[where])} and {len(other[where])} records")


def check_positions(positions: dict[TopicPartition, int], records: Records) -> None:
    """The group stands behind the last record that it has copied."""
    for where, position in positions.items():
        expected = records[where][-1][0] + 1 if records[where] else -1
        if position != expected:
            raise Violation(f"the copier's position in {where[0]}-{where[1]} is {position}, not {expected}")


def check_topics(ledger: Ledger, names: Iterable[str]) -> None:
    present = set(names)
    for name, state in ledger.topics.items():
        if state == "there" and name not in present:
            raise Violation(f"the topic {name} was created, and is gone")
        if state == "gone" and name in present:
            raise Violation(f"the topic {name} was deleted, and is there")
