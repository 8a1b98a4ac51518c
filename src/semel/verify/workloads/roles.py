"""Roles that several workloads have: readers that watch, and sources that fill an input."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from semel.client.fetcher import Fetcher
from semel.verify.clients.face import Integers
from semel.verify.history import Act, Isolation, Phase
from semel.verify.workloads.life import Life
from semel.verify.workloads.transactions import Batch, Transactions, note_all_reads, note_sends, outgoing

POLL_MS = 200
_READ_RECORDS_MAX = 20_000
_BEFORE_END_MAX = 5_000
"""How many offsets before the end a later life of a reader begins, at most."""


def live_as_reader(life: Life, partitions: Sequence[int], isolation: Isolation) -> None:
    """Reads everything from the beginning on, and never goes back.

    A later life begins a little before the present end: in a long run, all over again after each kill would be without
    end, and the judge reads everything in any case.
    """
    positions = dict.fromkeys(partitions, 0)
    if life.spec.life:
        ends = life.insist(lambda: ends_of(life, partitions))
        positions = {number: max(0, end - life.chance.randint(0, _BEFORE_END_MAX)) for number, end in ends.items()}
    for number, offset in positions.items():
        life.history.note(Act.ASSIGN, Phase.OK, time_ns=time.monotonic_ns(), partition=number, offset=offset)
    life.history.flush()
    reader = life.insist(lambda: life.clients.reader(positions, isolation))
    try:
        while not life.is_over:
            incoming = life.insist(lambda: reader.poll(POLL_MS, _READ_RECORDS_MAX))
            if len(incoming):
                note_all_reads(life, incoming)
    finally:
        reader.close()


def ends_of(life: Life, partitions: Sequence[int]) -> dict[int, int]:
    """Where these partitions end now."""
    places = {life.spec.partitions[number]: number for number in partitions}
    with Fetcher({"bootstrap.servers": life.spec.bootstrap, **life.spec.settings}) as fetcher:
        ends = fetcher.offsets_for(places, "latest")
    return {places[place.topic, place.partition]: end for place, end in ends.items()}


def live_as_source(life: Life, make_batch: Callable[[int], Batch]) -> None:
    """Writes batches; each record is sent once, whatever becomes of it."""
    if life.options.writing == "transactions":
        _write_transactions(life, make_batch)
    else:
        _write_plainly(life, make_batch)


def _write_transactions(life: Life, make_batch: Callable[[int], Batch]) -> None:
    transactions = Transactions(life)
    try:
        while not life.is_over:
            batch = make_batch(life.batch_size())
            transactions.run(batch, is_to_abort=life.wants_abort())
            life.keep_pace(len(batch))
    finally:
        transactions.writer.close()


def _write_plainly(life: Life, make_batch: Callable[[int], Batch]) -> None:
    writer = life.clients.plain_writer(idempotent=life.options.writing == "idempotent", acks=life.options.acks)
    try:
        while not life.is_over:
            batch = make_batch(life.batch_size())
            records = outgoing(life, batch, -1)
            note_sends(life, batch, -1, Phase.INVOKE)
            delivered = writer.write(records)
            note_sends(life, batch, -1, delivered.phase, delivered.offset)
            life.keep_pace(len(batch))
    finally:
        writer.close()


def running_totals(groups: Integers, amounts: Integers) -> Integers:
    """For each element the sum of the amounts of its group up to and with it.

    >>> running_totals(np.array([7, 9, 7, 7, 9]), np.array([1, 10, 2, 3, 20])).tolist()
    [1, 10, 3, 6, 30]
    """
    order = np.argsort(groups, kind="stable")
    _, first, count = np.unique(groups[order], return_index=True, return_counts=True)
    sums = np.cumsum(amounts[order])
    totals = np.empty_like(sums)
    totals[order] = sums - np.repeat((sums - amounts[order])[first], count)
    return totals
