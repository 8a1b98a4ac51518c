"""The decision of a recovery against an obvious model: the real coordinator, a log, and whatever came in between."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_kafka import Kafka, read_markers

from semel.bridges.both.decision import Decision, Place
from semel.bridges.both.recovery import LAST_STEPS, EndAnswer, MarkerSeen, OwnerSeen, Seen, Step, decide_step
from semel.client.ownership import Owner, ProducerIdentity
from semel.core.refusal import Refused
from semel.errors import Fenced

EVENTS = st.lists(
    st.sampled_from(["end", "timeout", "new owner", "commit of another", "abort of another", "retention", "late end"]),
    max_size=6,
)


@settings(max_examples=600)
@given(protocol=st.sampled_from([1, 2]), events=EVENTS, cluster=st.sampled_from(["c", "d"]))
def test_the_step_is_what_became_of_the_transaction_whatever_came_in_between(
    protocol: int, events: list[str], cluster: str
) -> None:
    """DELETE exactly if it is committed, RESEND exactly if it is aborted, and REFUSE only where the proof is gone."""
    kafka = Kafka(protocol)
    mine = kafka.init_producer_id()
    offset = kafka.append(mine, 0, 1, "d1")
    decision = Decision("d1", "c", mine, protocol, (Place("t", 0, offset),))
    identity, is_open = mine, True
    for event in events:
        if event in ("end", "late end"):
            try_end(kafka, mine)
        elif event == "timeout":
            kafka.pass_timeout()
        elif event == "new owner" or is_open:
            identity, is_open = kafka.init_producer_id(), False
        elif event != "retention":
            identity = kafka.init_producer_id()
            kafka.append(identity, 0, 2, "d2")
            kafka.end(identity, protocol, commit=event == "commit of another")
        if event == "retention":
            kafka.partitions[0].start = len(kafka.partitions[0].entries)

    seen = Seen(cluster)
    while (step := decide_step(decision, seen)) not in LAST_STEPS:
        seen = look(kafka, decision, seen, step)
    is_committed = 1 in kafka.partitions[0].committed()
    if cluster != "c":
        assert step is Step.REFUSE_CLUSTER
    elif step is Step.REFUSE:
        assert "retention" in events
    else:
        # Whatever was still open was committed by the look itself, which is right: it is decided.
        assert step is (Step.DELETE if is_committed else Step.RESEND)


def try_end(kafka: Kafka, identity: ProducerIdentity) -> EndAnswer:
    try:
        kafka.end(identity, kafka.protocol, commit=True)
    except Refused:
        return EndAnswer.REFUSED
    return EndAnswer.ACCEPTED


def look(kafka: Kafka, decision: Decision, seen: Seen, step: Step) -> Seen:
    if step is Step.SEND_END:
        return Seen(seen.cluster_id, try_end(kafka, decision.identity))
    if step is Step.READ_MARKERS:
        return Seen(seen.cluster_id, seen.end, read_markers(kafka, decision))
    known = kafka.coordinator.get("shop")
    assert known is not None
    return Seen(seen.cluster_id, seen.end, seen.marker, Owner(ProducerIdentity(*known.identity), known.status.title))


@pytest.mark.parametrize("protocol", [1, 2])
def test_rows_are_deleted_or_sent_again_only_with_a_proof(protocol: int) -> None:
    """Every combination of what can be seen: the two steps that cannot be undone need one answer that proves them."""
    mine = ProducerIdentity(7, 3)
    decision = Decision("d1", "c", mine, protocol, (Place("t", 0, 5),))
    ended_as = mine.following if protocol == 2 else mine
    owners: list[Owner | OwnerSeen] = list(OwnerSeen)
    for identity in (mine, mine.following, ProducerIdentity(7, 5), ProducerIdentity(8, 0)):
        owners += [Owner(identity, state) for state in ("Empty", "Ongoing", "CompleteCommit", "CompleteAbort")]
    for end, marker, owner in itertools.product(EndAnswer, MarkerSeen, owners):
        step = decide_step(decision, Seen("c", end, marker, owner))
        is_refused = end is EndAnswer.REFUSED
        by_owner = is_refused and marker in (MarkerSeen.LOST, MarkerSeen.MISSING)
        committed = (
            end is EndAnswer.ACCEPTED
            or (is_refused and marker is MarkerSeen.COMMIT)
            or (by_owner and owner == Owner(ended_as, "CompleteCommit"))
        )
        aborted = (is_refused and marker is MarkerSeen.ABORT) or (
            by_owner and owner == Owner(ended_as, "CompleteAbort")
        )
        # KIP-939: EndTxn is refused to all but the producer that has taken the open transaction over.
        is_kept = protocol == 2 and owner == Owner(mine, "Ongoing")
        has_no_proof = is_refused and marker not in (MarkerSeen.NOT_READ, MarkerSeen.COMMIT, MarkerSeen.ABORT)
        assert (step is Step.TAKE_OVER) == (has_no_proof and is_kept), (end, marker, owner)
        if is_refused and marker is MarkerSeen.NOT_YET and isinstance(owner, Owner) and not is_kept:
            assert step is Step.READ_MARKERS
        assert (step is Step.DELETE) == committed, (end, marker, owner)
        assert (step is Step.RESEND) == aborted, (end, marker, owner)


def test_a_fenced_writer_of_the_model_is_refused() -> None:
    """The model is worth something only if it fences."""
    kafka = Kafka(2)
    old = kafka.init_producer_id()
    kafka.append(old, 0, 1, "d1")
    kafka.init_producer_id()
    with pytest.raises(Fenced):
        kafka.append(old, 0, 2, "d2")
    assert kafka.partitions[0].committed() == []
