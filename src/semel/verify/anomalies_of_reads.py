"""Anomalies of what was read: what must not be visible, what is not where it belongs, and readers that jump.

One pure function for each, with its definition as docstring. Each counts reads: what three readers saw, counts three
times.
"""

from __future__ import annotations

from semel.verify.cases import Case, Found, case_of_sighting, found, together
from semel.verify.copies import copies_of_aborted, copies_of_unsent
from semel.verify.evidence import Evidence
from semel.verify.evidence_of_reads import DAMAGED, Sighting
from semel.verify.record_keys import Array


def aborted_read(evidence: Evidence) -> Found:
    """A read_committed reader saw a record of a transaction that is known to be aborted, or one whose sending is known
    to have failed; or a pipeline copied such a record.
    """
    text = "{reader} {record} at {place}, which {writer} wrote and which was aborted."
    return together(_sighted(evidence, Sighting.ABORTED, text), copies_of_aborted(evidence))


def dirty_read(evidence: Evidence) -> Found:
    """A read_committed reader saw a record of a transaction that never asked to commit, or one of which no row tells;
    or a pipeline copied such a record.
    """
    text = "{reader} {record} at {place}, which {writer} wrote and never asked to commit."
    return together(_sighted(evidence, Sighting.DIRTY, text), copies_of_unsent(evidence))


def precommitted_read(evidence: Evidence) -> Found:
    """A read_committed reader saw a record before its transaction asked to commit."""
    return _sighted(
        evidence,
        Sighting.PRECOMMITTED,
        "{reader} {record} at {place} before {writer}, which wrote it, asked to commit.",
    )


def poll_skip(evidence: Evidence) -> Found:
    """A reader went on behind the place of a committed record and did not see it. Its next read tells of it."""
    return _sighted(evidence, Sighting.SKIPPED, "{reader} {place} though it had not seen what begins at {expected}.")


def nonmonotonic_poll(evidence: Evidence) -> Found:
    """A reader went back in a partition, without having been assigned to it anew."""
    return _sighted(evidence, Sighting.WENT_BACK, "{reader} {place} though it was at {expected} already.")


def misrouted_payload(evidence: Evidence) -> Found:
    """A record that was read or acknowledged in another partition than it was sent to, or whose payload is damaged."""
    sightings = evidence.sightings.of(Sighting.MISROUTED)

    def case(number: int) -> Case:
        sighting = sightings[number]
        if sighting["sent"] == DAMAGED:
            return case_of_sighting(evidence, sighting, "{reader} {place}, and the payload is damaged.")
        return case_of_sighting(evidence, sighting, "{record} is at {place} and was sent to another partition.")

    return found(sightings, case)


def _sighted(evidence: Evidence, kind: Sighting, text: str) -> Found:
    sightings: Array = evidence.sightings.of(kind)
    return found(sightings, lambda number: case_of_sighting(evidence, sightings[number], text))
