"""Every anomaly in a story that has it, and in one that comes close and has not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hand_written import story

from semel.verify.anomalies import ANOMALIES, definition
from semel.verify.checker import check
from semel.verify.evidence_of_writes import BrokenHistory
from semel.verify.history import Aggregate, History

COPY = {"copies": [("orders", "copies")]}


def counts(text: str, **manifest: Any) -> dict[str, int]:
    return check(story(text, **manifest)).counts


def test_an_acknowledged_record_that_the_judge_passed_over_is_lost() -> None:
    """It was told to be at offset 0; the judge saw offset 1 and not that one."""
    text = """
        w wrote orders-0@0 a1
        w wrote orders-0@1 a2
        judge read orders-0@1 a2 by w
    """
    assert counts(text) == {"lost_write": 1}


def test_a_record_that_was_never_acknowledged_may_be_missing() -> None:
    """Whoever was told nothing, "unknown" or "failed" has been promised nothing."""
    text = """
        w send orders-0 a0
        w send orders-0 a1
        w send-unknown orders-0 a1
        w send orders-0 a2
        w send-failed orders-0 a2
        w wrote orders-0@3 a3
        judge read orders-0@3 a3 by w
    """
    assert counts(text) == {}


def test_a_record_is_lost_without_an_offset_where_the_writer_sent_more() -> None:
    """A client that tells no offsets: what it sent later to that partition is there."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w commits t0
        w begin t1
        w send orders-0 a2 t1
        w commits t1
        judge read orders-0@2 a2 by w t1
    """
    assert counts(text) == {"lost_write": 1}
    assert counts(text.replace("orders-0 a2", "orders-1 a2").replace("orders-0@2", "orders-1@0")) == {"unseen": 1}


def test_a_record_at_the_end_of_the_log_is_only_unseen() -> None:
    """Nothing behind it was read, so that the judge may have stopped too early."""
    text = """
        w wrote orders-0@0 a1
        w wrote orders-0@1 a2
        judge read orders-0@0 a1 by w
    """
    assert counts(text) == {"unseen": 1}
    assert counts(text + "judge read orders-0@1 a2 by w") == {}


def test_a_record_that_a_reader_saw_and_the_judge_did_not_is_lost() -> None:
    """What one read_committed reader saw was there: an unknown outcome is resolved by it."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w commit t0
        w commit-unknown t0
        r assign orders-0@0
        r read orders-0@0 a1 by w t0
        w wrote orders-0@2 a2
        judge assign orders-0@2
        judge read orders-0@2 a2 by w
    """
    assert counts(text) == {"lost_write": 1}
    assert counts(text.replace("r read", "u read").replace("r assign", "u assign")) == {}


def test_a_committed_input_without_a_copy_is_lost() -> None:
    """Each committed record of the input must be in the output once."""
    text = """
        w wrote orders-0@0 a1
        judge read orders-0@0 a1 by w
    """
    assert counts(text, **COPY) == {"lost_write": 1}
    copied = "c wrote copies-0@0 a1\n judge read copies-0@0 a1 by c"
    assert counts(text + copied, **COPY) == {}


def test_a_record_at_two_places_is_a_duplicate() -> None:
    """Once would do; in another partition of the topic it is one just the same."""
    text = """
        w wrote orders-0@0 a1
        judge read orders-0@0 a1 by w
        judge read orders-0@1 a1 by w
    """
    assert counts(text) == {"duplicate": 1}
    assert counts(text.replace("orders-0@1", "orders-1@0")) == {"duplicate": 1, "misrouted_payload": 1}


def test_a_record_that_was_aborted_and_sent_again_is_no_duplicate() -> None:
    """The first try is in the log too, and no read_committed reader sees it."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w abort t0
        w aborted t0
        w begin t1
        w send orders-0 a1 t1
        w commits t1
        u assign orders-0@0
        u read orders-0@0 a1 by w t0
        u read orders-0@2 a1 by w t1
        judge read orders-0@2 a1 by w t1
    """
    assert counts(text) == {}


def test_a_record_in_two_topics_is_no_duplicate() -> None:
    """A copy keeps origin and sequence."""
    text = """
        w wrote orders-0@0 a1
        c wrote copies-0@0 a1
        judge read orders-0@0 a1 by w
        judge read copies-0@0 a1 by c
    """
    assert counts(text, **COPY) == {}


def test_a_record_that_moved_between_readers_is_a_duplicate() -> None:
    """A reader saw it at offset 0 and the judge at offset 1: who goes on from 1 sees it twice."""
    text = """
        w send orders-0 a1
        r read orders-0@0 a1 by w
        judge read orders-0@1 a1 by w
    """
    assert counts(text) == {"duplicate": 1}
    assert counts(text.replace("r read orders-0@0", "r read orders-0@1")) == {}


def test_a_place_with_two_records_is_inconsistent() -> None:
    """Two readers saw different records at offset 0."""
    text = """
        w send orders-0 a1
        w send orders-0 a2
        r read orders-0@0 a2 by w
        judge read orders-0@0 a1 by w
        judge read orders-0@1 a2 by w
    """
    assert counts(text) == {"inconsistent_offsets": 1, "duplicate": 1}
    assert counts(text.replace("r read orders-0@0 a2", "r read orders-0@0 a1")) == {}


def test_a_place_that_was_acknowledged_to_another_record_is_inconsistent() -> None:
    """The writer was told that a1 is at offset 0, and there is a2."""
    text = """
        w wrote orders-0@0 a1
        w send orders-0 a2
        judge read orders-0@0 a2 by w
        judge read orders-0@1 a1 by w
    """
    assert counts(text) == {"inconsistent_offsets": 1, "order_violation": 1}
    moved = """
        w wrote orders-0@0 a1
        judge read orders-0@1 a1 by w
    """
    assert counts(moved) == {"inconsistent_offsets": 1}
    assert counts(moved.replace("orders-0@1", "orders-0@0")) == {}


def test_an_acknowledgement_of_an_aborted_record_stands() -> None:
    """Its place stays its own; another record there is one too many."""
    text = """
        w begin t0
        w wrote orders-0@0 a1 t0
        w abort t0
        w2 wrote orders-0@{} b1
        judge read orders-0@{} b1 by w2
    """
    assert counts(text.format(2, 2)) == {}
    assert counts(text.format(0, 0)) == {"inconsistent_offsets": 1}


def test_a_record_of_an_aborted_transaction_must_not_be_read() -> None:
    """Each read_committed reader that saw it counts; who reads uncommitted may."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w abort t0
        w aborted t0
        {} read orders-0@0 a1 by w t0
        judge assign orders-0@0
    """
    assert counts(text.format("r")) == {"aborted_read": 1}
    assert counts(text.format("u")) == {}
    refused = text.format("r").replace("abort ", "commit ").replace("aborted", "commit-failed")
    assert counts(refused) == {"aborted_read": 1}


def test_a_record_whose_sending_failed_must_not_be_read() -> None:
    """Failed means that it never will be there."""
    text = """
        w send orders-0 a1
        w send-{} orders-0 a1
        judge read orders-0@0 a1 by w
    """
    assert counts(text.format("failed")) == {"aborted_read": 1}
    assert counts(text.format("unknown")) == {}


def test_an_input_of_an_aborted_transaction_must_not_be_consumed() -> None:
    """CONSUME is a read as well, even where the consumer's own transaction comes to nothing."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w {} t0
        c begin t0
        c consume orders-0@0 a1 by w t0
        c abort t0
    """
    assert counts(text.format("abort")) == {"aborted_read": 1}
    unknown = text.format("commit") + "w wrote orders-0@5 a2 \n judge read orders-0@0 a1 by w t0"
    assert counts(unknown + "\n judge read orders-0@5 a2 by w") == {}


def test_a_record_of_a_transaction_that_never_asked_to_commit_is_dirty() -> None:
    """The writer was killed before it asked; had it asked, the outcome would be open."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        {}
        judge read orders-0@0 a1 by w t0
    """
    assert counts(text.format("")) == {"dirty_read": 1}
    assert counts(text.format("w commit t0")) == {}


def test_a_record_of_which_no_row_tells_is_dirty() -> None:
    """Every SEND is on disk before the record leaves its process."""
    text = """
        w wrote orders-0@0 a1
        judge read orders-0@0 a1 by w
        judge read orders-0@1 a2 by w
    """
    assert counts(text) == {"dirty_read": 1}


def test_a_copy_of_an_aborted_record_is_an_aborted_read() -> None:
    """A pipeline that notes nothing is held against its input: its output has what was never committed."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w {0} t0
        w begin t1
        w send orders-0 a2 t1
        w commits t1
        judge read orders-0@2 a2 by w t1
        judge read copies-0@0 a1 by w t0
        judge read copies-0@1 a2 by w t1
    """
    assert counts(text.format("abort"), **COPY) == {"aborted_read": 1}
    assert counts(text.format("begin"), **COPY) == {"dirty_read": 1}
    assert counts(text.format("commits") + "judge assign orders-0@0 \n judge read orders-0@0 a1 by w t0", **COPY) == {}


def test_a_record_must_not_be_read_before_its_transaction_asks_to_commit() -> None:
    """By the clock that all processes share."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        {}
        r read orders-0@0 a1 by w t0
        {}
        w committed t0
        judge read orders-0@0 a1 by w t0
    """
    assert counts(text.format("", "w commit t0")) == {"precommitted_read": 1}
    assert counts(text.format("w commit t0", "")) == {}


def test_half_a_committed_transaction_is_torn() -> None:
    """Unknown is enough: one visible record proves the commit, and then the others must be there too."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w send orders-1 a2 t0
        w commit t0
        judge read orders-0@0 a1 by w t0
    """
    assert counts(text) == {"torn_transaction": 1, "unseen": 1}
    assert counts(text + "judge read orders-1@0 a2 by w t0") == {}
    assert counts(text.replace("judge read orders-0@0 a1 by w t0", "judge assign orders-0@0")) == {}


def test_a_failed_record_of_a_committed_transaction_does_not_tear_it() -> None:
    """The writer knew that it was not written and committed the rest."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w send orders-1 a2 t0
        w send-failed orders-1 a2 t0
        w commits t0
        judge read orders-0@0 a1 by w t0
    """
    assert counts(text) == {}


CONSUMED_TWICE = """
    w wrote orders-0@0 a1
    c1 begin t0
    c1 consume orders-0@0 a1 by w t0
    c1 send copies-0 a1 t0
    c1 position orders-0@1 t0
    c1 {0} t0
    c2 begin t0
    c2 consume orders-0@0 a1 by w t0
    c2 send {1} t0
    c2 position orders-0@1 t0
    c2 commits t0
    judge read orders-0@0 a1 by w
"""


def test_an_input_that_two_committed_transactions_took_is_consumed_twice() -> None:
    """Even where the output shows nothing of it."""
    both = "judge read copies-0@0 a1 by c1 t0 \n judge read copies-1@0 a2 by c2 t0"
    assert counts(CONSUMED_TWICE.format("commits", "copies-1 a2") + both) == {"double_consume": 1}
    once = "judge read copies-1@0 a2 by c2 t0"
    assert counts(CONSUMED_TWICE.format("abort", "copies-1 a2") + once) == {}


def test_two_pipelines_may_take_the_same_input() -> None:
    """They write to different topics, so they are not of one group."""
    both = "judge read copies-0@0 a1 by c1 t0 \n judge read orders-1@0 b2 by c2 t0"
    assert counts(CONSUMED_TWICE.format("commits", "orders-1 b2") + both) == {}


def test_who_only_reads_takes_nothing_away() -> None:
    """A transaction that looks at a log without setting a position leaves it to others."""
    both = "judge read copies-0@0 a1 by c1 t0 \n judge read copies-1@0 a2 by c2 t0"
    text = CONSUMED_TWICE.format("commits", "copies-1 a2") + both
    assert counts(text.replace("c2 position orders-0@1 t0", "")) == {}


def test_a_position_behind_a_committed_one_consumes_twice() -> None:
    """c1 had committed position 5 when c2 set it to 3."""
    text = """
        c1 begin t0
        c1 send copies-0 a1 t0
        c1 position orders-0@5 t0
        c1 commits t0
        c2 begin t0
        c2 send copies-0 a2 t0
        c2 position orders-0@3 t0
        c2 commits t0
        judge read copies-0@0 a1 by c1 t0
        judge read copies-0@2 a2 by c2 t0
    """
    assert counts(text) == {"double_consume": 1}
    assert counts(text.replace("orders-0@3", "orders-0@5")) == {}
    assert counts(text.replace("orders-0@3", "orders-1@3")) == {}
    aborted = text.replace("c1 commits t0", "c1 abort t0").replace("judge read copies-0@0 a1 by c1 t0", "")
    assert counts(aborted) == {}


def test_records_of_one_writer_must_stay_in_the_order_of_sending() -> None:
    """Within a partition; between partitions and between writers there is no order."""
    text = """
        w send orders-0 a1
        w send orders-0 a2
        judge read orders-0@0 a2 by w
        judge read orders-0@1 a1 by w
    """
    assert counts(text) == {"order_violation": 1}
    apart = text.replace("orders-0 a2", "orders-1 a2").replace("orders-0@0 a2", "orders-1@0 a2")
    assert counts(apart) == {}
    assert counts(text.replace("w send orders-0 a2", "w2 send orders-0 a2").replace("a2 by w", "a2 by w2")) == {}


def test_records_of_one_key_must_stay_in_order_across_writers() -> None:
    """Two lives of a copier: what one origin sent with one key is read in the order of its sequence."""
    text = """
        c1 send copies-0 a2 =7
        c2 send copies-0 a1 =7
        judge read copies-0@0 a2 by c1 =7
        judge read copies-0@1 a1 by c2 =7
    """
    assert counts(text, keyed_topics=["copies"]) == {"order_violation": 1}
    assert counts(text) == {}
    assert counts(text.replace("a1 =7", "a1 =8").replace("by c2 =7", "by c2 =8"), keyed_topics=["copies"]) == {}


def test_a_reader_must_not_pass_over_what_is_visible() -> None:
    """It went from 0 to 2; from an assignment on it counts as well."""
    text = """
        w wrote orders-0@0 a0
        w wrote orders-0@1 a1
        w wrote orders-0@2 a2
        r assign orders-0@0
        r read orders-0@0 a0 by w
        {}
        r read orders-0@2 a2 by w
        judge assign orders-0@0
        judge read orders-0@0 a0 by w
        judge read orders-0@1 a1 by w
        judge read orders-0@2 a2 by w
    """
    assert counts(text.format("")) == {"poll_skip": 1}
    assert counts(text.format("r assign orders-0@1")) == {"poll_skip": 1}
    assert counts(text.format("r assign orders-0@2")) == {}
    assert counts(text.format("r read orders-0@1 a1 by w")) == {}


def test_a_reader_may_pass_over_what_is_not_visible() -> None:
    """An aborted record and the marker behind it are not for read_committed readers."""
    text = """
        w wrote orders-0@0 a0
        w begin t0
        w wrote orders-0@1 a1 t0
        w abort t0
        w wrote orders-0@3 a2
        {0} assign orders-0@0
        {0} read orders-0@0 a0 by w
        {0} read orders-0@3 a2 by w
        judge read orders-0@0 a0 by w
        judge read orders-0@3 a2 by w
    """
    assert counts(text.format("r")) == {}


def test_gaps_in_what_a_pipeline_took_mean_nothing() -> None:
    """It notes what became part of a transaction; what it read besides is its own affair."""
    text = """
        w wrote orders-0@0 a0
        w wrote orders-0@1 a1
        c assign orders-0@0
        c consume orders-0@1 a1 by w t0
        judge read orders-0@0 a0 by w
        judge read orders-0@1 a1 by w
    """
    assert counts(text) == {}


def test_a_reader_must_not_go_back() -> None:
    """Without a new assignment, what was read is read."""
    text = """
        w wrote orders-0@0 a0
        w wrote orders-0@1 a1
        r assign orders-0@0
        r read orders-0@0 a0 by w
        r read orders-0@1 a1 by w
        {}
        r read orders-0@0 a0 by w
        judge read orders-0@0 a0 by w
        judge read orders-0@1 a1 by w
    """
    assert counts(text.format("")) == {"nonmonotonic_poll": 1}
    assert counts(text.format("r assign orders-0@0")) == {}


def test_acknowledged_offsets_must_not_go_down() -> None:
    """In the order of sending, whatever the order of the answers."""
    text = """
        w send orders-0 a1
        w send orders-0 a2
        w sent orders-0@{} a2
        w sent orders-0@{} a1
        judge read orders-0@0 {} by w
        judge read orders-0@1 {} by w
    """
    assert counts(text.format(0, 1, "a2", "a1")) == {"nonmonotonic_send": 1, "order_violation": 1}
    assert counts(text.format(1, 0, "a1", "a2")) == {}


def test_a_stable_offset_below_the_high_watermark_hangs() -> None:
    """At the end nothing is open any more, so both must be the same; the last look counts."""
    assert counts("judge ends orders-0@3 /5") == {"hung_lso": 1}
    assert counts("judge ends orders-0@3 /5 \n judge ends orders-0@5 /5 \n judge ends orders-1@0 /0") == {}


def test_a_stable_offset_that_hangs_is_told_with_who_wrote_there_and_not_with_every_look() -> None:
    """Judges look several times a second: the first and the last look tell, and the record that holds it up."""
    looks = "\n".join(["judge ends orders-0@1 /2"] * 9)
    [found] = [one for one in check(story(f"w wrote orders-0@1 a1\n{looks}")).anomalies if one.name == "hung_lso"]
    [told, first, last] = found.witnesses[0].lines[1:]
    assert "w: SEND ok" in told
    assert first.split("judge")[1] == last.split("judge")[1]


def aggregate(totals: list[int], *, of: str) -> dict[str, int]:
    lines = [f"w wrote orders-0@{n} a{n} =4 \n judge read orders-0@{n} a{n} by w =4" for n in range(3)]
    lines += [f"c wrote copies-0@{n} a{n} \n judge read copies-0@{n} a{n} by c ={v}" for n, v in enumerate(totals)]
    return counts("\n".join(lines), aggregates=[Aggregate("orders", "copies", of)])  # type: ignore[arg-type]


def test_a_total_must_be_that_of_the_inputs() -> None:
    """Three inputs of 4 each: the last total is that of all, those on the way are of the first ones."""
    assert aggregate([1, 2, 3], of="count") == {}
    assert aggregate([2, 3], of="count") == {}
    assert aggregate([1, 2], of="count") == {"wrong_aggregate": 1}
    assert aggregate([1, 2, 2, 3], of="count") == {"wrong_aggregate": 1}
    assert aggregate([1, 2, 4], of="count") == {"wrong_aggregate": 1}
    assert aggregate([], of="count") == {"wrong_aggregate": 1}
    assert aggregate([4, 8, 12], of="sum") == {}
    assert aggregate([4, 9, 12], of="sum") == {"wrong_aggregate": 1}
    assert aggregate([4, 8], of="sum") == {"wrong_aggregate": 1}


def test_a_total_of_nothing_is_wrong() -> None:
    """There is no input of that origin."""
    text = "c wrote copies-0@0 a1 \n judge read copies-0@0 a1 by c =1"
    assert counts(text, aggregates=[Aggregate("orders", "copies", "count")]) == {"wrong_aggregate": 1}


def test_what_must_add_up_to_nothing_does() -> None:
    """A transfer: what is taken from one account is given to another."""
    text = """
        w begin t0
        w send orders-0 a1 t0 =-5
        w send orders-1 a2 t0 =5
        w commits t0
        judge read orders-0@0 a1 by w t0 =-5
        judge read orders-1@0 a2 by w t0 ={}
    """
    assert counts(text.format(5), zero_sum_topics=["orders"]) == {}
    assert counts(text.format(4), zero_sum_topics=["orders"]) == {"wrong_aggregate": 1}
    assert counts(text.format(4)) == {}


def test_a_record_in_another_partition_is_misrouted() -> None:
    """It was sent to orders-0. Where the client chooses, any partition is right."""
    text = """
        w send {0} a1
        judge read {1} a1 by w
    """
    assert counts(text.format("orders-0", "orders-1@0")) == {"misrouted_payload": 1}
    assert counts(text.format("orders-0", "copies-1@0")) == {"misrouted_payload": 1}
    assert counts(text.format("orders-0", "orders-0@0")) == {}
    assert counts(text.format("", "orders-1@0")) == {}


def test_a_damaged_payload_is_misrouted_and_its_record_lost() -> None:
    """What was read there cannot be told; what was acknowledged there was not read."""
    text = """
        w wrote orders-0@0 a1
        w wrote orders-0@1 a2
        judge assign orders-0@0
        judge damaged orders-0@0
        judge read orders-0@1 a2 by w
    """
    assert counts(text) == {"lost_write": 1, "misrouted_payload": 1}


def test_an_acknowledgement_in_another_partition_is_misrouted() -> None:
    """Asked for orders-0, told orders-1."""
    text = """
        w send orders-0 a1
        w sent orders-1@0 a1
        judge read orders-1@0 a1 by w
    """
    assert counts(text) == {"misrouted_payload": 2}


INTERLEAVED = """
    w1 begin t0
    w2 begin t0
    w1 send orders-0 a1 t0
    w2 send orders-0 b1 t0
    w2 send orders-1 b2 t0
    w1 send orders-1 a2 t0
    w1 commits t0
    w2 commits t0
    judge read orders-0@0 a1 by w1 t0
    judge read orders-0@1 b1 by w2 t0
    judge read orders-1@0 {} t0
    judge read orders-1@1 {} t0
"""


def test_writes_in_a_circle_are_reported_and_tolerated() -> None:
    """Kafka does not promise that transactions lie in the same order everywhere."""
    verdict = check(story(INTERLEAVED.format("b2 by w2", "a2 by w1")))
    assert verdict.counts == {"g0": 1}
    assert verdict.is_clean
    assert "do not isolate writes" in (verdict.anomalies[0].tolerated or "")
    assert counts(INTERLEAVED.format("a2 by w1", "b2 by w2")) == {}


def test_inputs_in_a_circle_are_an_anomaly() -> None:
    """Each took what the other wrote, so that neither can have been first."""
    text = """
        w1 begin t0
        w2 begin t0
        w1 send orders-0 a1 t0
        w2 send orders-1 b1 t0
        w1 commit t0
        w2 commit t0
        w1 consume orders-1@0 b1 by w2 t0
        {} consume orders-0@0 a1 by w1 t0
        w1 committed t0
        w2 committed t0
        judge read orders-0@0 a1 by w1 t0
        judge read orders-1@0 b1 by w2 t0
    """
    verdict = check(story(text.format("w2")))
    assert verdict.counts == {"g1c": 1}
    assert not verdict.is_clean
    assert counts(text.format("w3")) == {}


def test_every_anomaly_has_a_name_and_a_definition() -> None:
    """What a verdict can say is fixed."""
    names = [anomaly.__name__ for anomaly in ANOMALIES]
    assert " ".join(names) == (
        "lost_write unseen duplicate inconsistent_offsets aborted_read dirty_read precommitted_read torn_transaction "
        "double_consume order_violation poll_skip nonmonotonic_poll nonmonotonic_send hung_lso wrong_aggregate "
        "misrouted_payload g0 g1c"
    )
    assert all(40 < len(definition(anomaly)) < 400 for anomaly in ANOMALIES)


def test_a_witness_tells_who_wrote_what_was_told_and_who_read_it() -> None:
    """A person must be able to follow it without the history."""
    text = """
        w begin t0
        w send orders-0 a1 t0
        w abort t0
        w aborted t0
        r read orders-0@4 a1 by w t0
    """
    verdict = check(story(text))
    [witness] = verdict.anomalies[0].witnesses
    assert witness.lines == (
        "r read record 1 of origin 0 at offset 4 of orders-0, which transaction 0 of w wrote and which was aborted.",
        "+0.000000 s w: BEGIN ok in its transaction 0",
        "+0.001000 s w: SEND begins record 1 of origin 0 in orders-0 in its transaction 0",
        "+0.002000 s w: ABORT begins in its transaction 0",
        "+0.003000 s w: ABORT ok in its transaction 0",
        "+0.004000 s r: READ ok record 1 of origin 0 in orders-0 at offset 4 written by w in its transaction 0",
    )
    assert witness.rows[-1] == {
        "time_ns": 4_000_000,
        "process": "r",
        "act": "READ",
        "phase": "OK",
        "partition": "orders-0",
        "writer": "w",
        "transaction": 0,
        "offset": 4,
        "origin": 0,
        "sequence": 1,
        "value": -1,
    }
    fields = json.loads(verdict.to_json())
    assert fields["is_clean"] is False
    assert fields["anomalies"][0]["witnesses"][0]["lines"] == list(witness.lines)
    assert fields["checked"]["reads"] == 1


def test_no_more_witnesses_than_asked_for() -> None:
    """The count tells how many there are."""
    text = "\n".join(f"w wrote orders-0@{n} a{n}" for n in range(9))
    verdict = check(story(text), witnesses_max=2)
    assert verdict.counts == {"unseen": 9}
    assert len(verdict.anomalies[0].witnesses) == 2


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("process", 7, "not listed"),
        ("partition", 99, "partition that is not listed"),
        ("act", 77, "unknown kind"),
        ("transaction", -5, "cannot be"),
        ("offset", 1 << 50, "cannot be"),
    ],
)
def test_a_history_that_breaks_its_form_is_refused(column: str, value: int, message: str) -> None:
    """A verdict on it would mean nothing."""
    history = story("w wrote orders-0@0 a1 \n judge read orders-0@0 a1 by w")
    rows = np.array(history.sources[0])
    rows[column] = value
    with pytest.raises(BrokenHistory, match=message):
        check(History(history.manifest, [rows, history.sources[1]]))


def test_the_end_of_a_send_that_never_began_is_refused() -> None:
    """The beginning is on disk before the record leaves the process, so that such a history was tampered with."""
    with pytest.raises(BrokenHistory, match="never began"):
        check(story("w sent orders-0@0 a1"))


def test_a_history_of_nothing_is_clean_and_says_so() -> None:
    """The figures tell that there was nothing to look at."""
    verdict = check(story("judge assign orders-0@0"))
    assert verdict.is_clean
    assert verdict.checked["records"] == verdict.checked["visible"] == 0
