"""Plans of faults: the same for the same seed, as many as asked for, never two at once where that makes no sense."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import ConfigError
from semel.verify.faults.kinds import ABOUT, BROKER_KINDS, PROXY_KINDS, FaultKind, LeftOut, choose_kinds
from semel.verify.faults.plan import BROKERS_LANE, Cast, Fault, FaultPlan, Worker, make_plan
from semel.verify.faults.targets import KafkaTarget, RemoteTarget, parse_target
from semel.wire import Api

ALL = choose_kinds(None, {}).rates
WORKERS = (Worker("copier", ("copier-1", "copier-2"), "copier"), Worker("writer", ("writer-1",)), Worker("reader"))
CAST = Cast(brokers=3, workers=WORKERS, longest_timeout_ms=3_000)
MINUTE_MS = 60_000

casts = st.builds(
    Cast,
    brokers=st.integers(1, 5),
    workers=st.lists(
        st.builds(
            Worker,
            name=st.sampled_from("abcdef"),
            transactional_ids=st.lists(st.text("xyz", min_size=1), max_size=3).map(tuple),
            client_id=st.none() | st.text("pq", min_size=1),
        ),
        max_size=5,
        unique_by=lambda worker: worker.name,
    ).map(tuple),
    longest_timeout_ms=st.integers(100, 60_000),
    restart_ms=st.integers(0, 20_000),
    can_pause_brokers=st.booleans(),
    apis=st.sampled_from([(), ("PRODUCE",), ("PRODUCE", "END_TXN", "FETCH"), ("OFFSET_COMMIT",)]),
)
plans = st.builds(
    make_plan,
    seed=st.integers(0, 2**64),
    rates=st.dictionaries(st.sampled_from(list(FaultKind)), st.floats(0.01, 100)),
    duration_ms=st.integers(1, 300_000),
    cast=casts,
)


@given(st.integers(), st.integers(1, 300_000), casts)
def test_the_same_seed_gives_the_same_plan_to_the_byte(seed: int, duration_ms: int, cast: Cast) -> None:
    """Also whichever order the kinds were named in."""
    once = make_plan(seed, ALL, duration_ms, cast).to_json()
    assert once == make_plan(seed, dict(reversed(list(ALL.items()))), duration_ms, cast).to_json()


def test_a_plan_is_the_same_in_another_process_and_in_every_release() -> None:
    """A found seed is worth nothing if tomorrow it means something else: change the format's number with this."""
    script = (
        "from semel.verify.faults.plan import *; from semel.verify.faults.kinds import *; import sys;"
        "cast = Cast(brokers=2, workers=(Worker('a', ('t',), 'c'), Worker('b')));"
        "sys.stdout.write(make_plan(7, choose_kinds(None, {}).rates, 60_000, cast).to_json())"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    own_cast = Cast(brokers=2, workers=(Worker("a", ("t",), "c"), Worker("b")))
    assert found.decode() == make_plan(7, ALL, MINUTE_MS, own_cast).to_json()
    assert hashlib.sha256(found).hexdigest()[:16] == "b937159186a1d7d3"


@given(plans)
def test_a_plan_survives_its_json(plan: FaultPlan) -> None:
    """What is replayed is what was planned, and the JSON of it is the same text."""
    again = FaultPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


@given(plans)
def test_every_fault_lies_within_the_run_and_they_are_in_order(plan: FaultPlan) -> None:
    """Numbers count from 0 in the order of time; nothing lasts beyond the end."""
    assert [fault.number for fault in plan.faults] == list(range(len(plan.faults)))
    assert [fault.at_ms for fault in plan.faults] == sorted(fault.at_ms for fault in plan.faults)
    assert all(0 <= fault.at_ms <= fault.at_ms + fault.for_ms <= plan.duration_ms for fault in plan.faults)


@given(casts, st.integers(0, 1000), st.integers(1_000, 300_000))
def test_no_two_faults_take_the_same_process_at_once(cast: Cast, seed: int, duration_ms: int) -> None:
    """A broker or worker that was away is then left in peace for as long again, or nothing would ever get done."""
    busy_until: dict[str, int] = {}
    for fault in make_plan(seed, ALL, duration_ms, cast).faults:
        away_ms = fault.for_ms + (cast.restart_ms if fault.kind in (FaultKind.KILL, FaultKind.RESTART) else 0)
        for lane in fault.lanes:
            assert fault.at_ms >= busy_until.get(lane, 0), fault
            busy_until[lane] = fault.at_ms + 2 * away_ms


@given(casts, st.integers(0, 1000))
def test_faults_are_meant_for_who_is_there(cast: Cast, seed: int) -> None:
    """Brokers, workers, ids, clients and requests of the cast; without any, the kind is left out and says why."""
    plan = make_plan(seed, ALL, MINUTE_MS, cast)
    names = {worker.name for worker in cast.workers}
    ids = {one for worker in cast.workers for one in worker.transactional_ids}
    named = {(worker.name, worker.client_id) for worker in cast.workers if worker.client_id is not None}
    clients = {worker.client_id for worker in cast.workers} | {None}
    for fault in plan.faults:
        details = fault.details
        assert 0 <= int(details.get("broker", 0) or 0) < cast.brokers
        assert set(filter(None, str(details.get("workers", "")).split(","))) <= names
        assert details.get("client_id") in clients
        assert fault.kind is not FaultKind.HIJACK or details["transactional_id"] in ids
        assert fault.kind is not FaultKind.CRASH or (details["victim"], details["client_id"]) in named
        assert fault.kind not in PROXY_KINDS or str(details["api"]) in Api.__members__
        assert (BROKERS_LANE in fault.lanes) == (fault.kind in BROKER_KINDS or "broker" in details)
    without = {one.kind for one in plan.left_out}
    assert (FaultKind.HIJACK in without) == (FaultKind.ZOMBIE in without) == (not ids)
    assert (FaultKind.WORKER_KILL in without) == (not names)
    assert (FaultKind.CRASH in without) == (not named)
    assert not without & {fault.kind for fault in plan.faults}
    assert all(one.reason for one in plan.left_out)


def test_a_pipeline_without_transactions_dies_where_it_commits_its_positions() -> None:
    """Only the requests that the cast makes are waited for, and positions outside of transactions only by those."""
    plain = Cast(workers=WORKERS, apis=("PRODUCE", "OFFSET_COMMIT"))
    rates = {FaultKind.CRASH: 60.0}
    assert {one.details["api"] for one in make_plan(1, rates, MINUTE_MS, plain).faults} == {"PRODUCE", "OFFSET_COMMIT"}
    met = {one.details["api"] for one in make_plan(1, rates, MINUTE_MS, Cast(workers=WORKERS)).faults}
    assert met == {"PRODUCE", "END_TXN", "TXN_OFFSET_COMMIT"}


def test_a_plan_is_renamed_for_clients_that_take_the_same_steps_by_other_requests() -> None:
    """The same faults at the same times, struck where these clients commit."""
    plan = make_plan(1, {FaultKind.CRASH: 60.0}, MINUTE_MS, Cast(workers=WORKERS, apis=("PRODUCE", "OFFSET_COMMIT")))
    other = plan.renamed({"PRODUCE": "PRODUCE", "OFFSET_COMMIT": "END_TXN"})
    assert [(one.number, one.at_ms, one.kind) for one in other.faults] == [
        (one.number, one.at_ms, one.kind) for one in plan.faults
    ]
    assert {one.details["api"] for one in other.faults} == {"PRODUCE", "END_TXN"}


def test_few_crashes_meet_every_step_on_both_sides() -> None:
    """Before and after each step once, before any comes again: a short run has them all."""
    for seed in range(20):
        faults = make_plan(
            seed, {FaultKind.CRASH: 5}, MINUTE_MS, Cast(workers=WORKERS, apis=("PRODUCE", "END_TXN"))
        ).faults
        assert len({(one.details["api"], one.details["when"]) for one in faults}) == 4


def test_a_kind_that_is_left_out_does_not_change_the_others() -> None:
    """Each draws from its own stream, so that faults can be taken away one kind at a time to find the guilty one."""
    whole = make_plan(3, ALL, MINUTE_MS, CAST)
    less = make_plan(3, {kind: ALL[kind] for kind in PROXY_KINDS}, MINUTE_MS, CAST)

    def told(plan: FaultPlan) -> list[tuple[int, FaultKind, object]]:
        return [(one.at_ms, one.kind, one.details) for one in plan.faults if one.kind in PROXY_KINDS]

    assert told(whole) == told(less)


@pytest.mark.parametrize("kind", FaultKind)
def test_a_rate_is_what_comes_of_it(kind: FaultKind) -> None:
    """Over ten minutes about as many as asked for, spread over the time; and one of each kind in the shortest run."""
    quick = Cast(brokers=1, workers=WORKERS, longest_timeout_ms=100, restart_ms=0)
    times = [fault.at_ms for fault in make_plan(5, {kind: 6}, 10 * MINUTE_MS, quick).faults]
    assert 50 <= len(times) <= 60
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 60_000
    assert len(make_plan(5, {kind: 0.01}, MINUTE_MS, quick).faults) == 1


def test_a_storm_outlasts_every_time_out_and_a_clock_jumps_past_them() -> None:
    """That is what they are for."""
    faults = make_plan(1, {FaultKind.STORM: 6, FaultKind.CLOCK: 6}, 20 * MINUTE_MS, CAST).faults
    storms = [fault for fault in faults if fault.kind is FaultKind.STORM]
    assert all(fault.for_ms > CAST.longest_timeout_ms for fault in storms)
    assert {"broker" in fault.details for fault in storms} == {True, False}
    jumps = [int(fault.details["jump_ms"] or 0) for fault in faults if fault.kind is FaultKind.CLOCK]
    ahead = [jump for jump in jumps if jump > 0]
    assert all(jump > CAST.longest_timeout_ms for jump in ahead)
    assert 0 < len(jumps) - len(ahead) < len(ahead)


def test_a_zombie_is_somebody_with_a_transaction_and_sleeps_past_every_time_out() -> None:
    """Who has nothing that can time out would sleep for nothing."""
    faults = make_plan(1, {FaultKind.ZOMBIE: 6}, 20 * MINUTE_MS, CAST).faults
    assert all(fault.for_ms > CAST.longest_timeout_ms for fault in faults)
    assert {fault.details["workers"] for fault in faults} == {"copier", "writer"}


def test_a_record_of_a_run_becomes_a_plan_again() -> None:
    """What was missed is not repeated; what was done comes at its real time, and traps at the time they were set."""
    kill = Fault(0, 100, FaultKind.KILL, 50, {"broker": 0})
    cut = Fault(1, 200, FaultKind.CUT, 0, {"api": "END_TXN", "direction": "request", "when": "before", "nth": 1})
    lost = Fault(2, 300, FaultKind.PAUSE, 10, {"broker": 0})

    def line(fault: Fault, began_ms: int, outcome: str) -> str:
        times = {"start_ns": 10**9, "begin_ns": 10**9 + began_ms * 10**6, "end_ns": 2 * 10**9}
        return json.dumps({**fault.to_json(), **times, "outcome": outcome, "note": ""})

    lines = [line(lost, 300, "missed"), line(cut, 900, "done"), line(kill, 170, "done"), ""]
    plan = FaultPlan.from_records(lines, seed=4)
    assert [(fault.kind, fault.at_ms, fault.for_ms) for fault in plan.faults] == [
        (FaultKind.KILL, 170, 50),
        (FaultKind.CUT, 200, 0),
    ]
    assert plan.seed == 4
    assert plan.duration_ms == 220


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 2, "seed": 1, "duration_ms": 1}'])
def test_what_is_no_plan_is_told(text: str) -> None:
    """And nothing is started."""
    with pytest.raises(ConfigError, match="no fault plan"):
        FaultPlan.from_json(text)


def test_a_plan_of_another_format_is_told() -> None:
    """A newer version may mean something else by the same words."""
    with pytest.raises(ConfigError, match="format 3"):
        FaultPlan.from_json('{"format": 3}')


def test_kinds_are_read_as_a_user_writes_them() -> None:
    """Names with or without a rate, in any order; all and none."""
    chosen = choose_kinds(" cut=30, kill ", {})
    assert list(chosen.rates.items()) == [(FaultKind.KILL, ABOUT[FaultKind.KILL].per_minute), (FaultKind.CUT, 30)]
    assert choose_kinds("none", {}).rates == {}
    assert set(choose_kinds("all", {}).rates) == set(FaultKind)


@pytest.mark.parametrize(
    ("text", "words"),
    [("kil", "no fault 'kil': write some of kill, restart"), ("cut=0", "no rate"), ("cut=many", "no rate")],
)
def test_a_wrong_word_is_told_with_the_right_ones(text: str, words: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=words):
        choose_kinds(text, {})


def test_what_a_target_cannot_have_is_left_out_or_refused_with_the_reason() -> None:
    """Left out where the user asked for everything, an error where the user asked for just that."""
    remote = RemoteTarget("broker.example:9092")
    chosen = choose_kinds(None, remote.impossible)
    assert set(chosen.rates) == set(FaultKind) - BROKER_KINDS
    assert {one.kind for one in chosen.left_out} == BROKER_KINDS
    assert str(LeftOut(FaultKind.KILL, "why")) == "no kill: why"
    with pytest.raises(ConfigError, match=r"kill cannot be had here: its brokers are not .* to stop\. Leave it out"):
        choose_kinds("cut,kill", remote.impossible)
    with pytest.raises(ConfigError, match=r"disk cannot be had here: .*only root"):
        choose_kinds("disk", KafkaTarget.impossible)
    assert set(choose_kinds(None, KafkaTarget.impossible).rates) == set(FaultKind) - {FaultKind.DISK, FaultKind.CLOCK}


def test_what_a_target_does_not_survive_comes_only_by_name() -> None:
    """One broker of Kafka 4 forgets markers when it was killed; three of them, or Kafka 3.9, do not."""
    four = KafkaTarget()
    assert FaultKind.KILL not in choose_kinds(None, four.impossible, four.flawed).rates
    assert FaultKind.KILL in {one.kind for one in choose_kinds("all", four.impossible, four.flawed).left_out}
    assert FaultKind.KILL in choose_kinds("kill", four.impossible, four.flawed).rates
    assert not KafkaTarget("3.9.2").flawed
    assert not KafkaTarget(nodes=3).flawed


def test_a_storm_on_brokers_of_somebody_else_stops_only_workers() -> None:
    """What the plan draws is what the target can have."""
    cast = Cast(workers=WORKERS, longest_timeout_ms=100, can_pause_brokers=False)
    faults = make_plan(1, {FaultKind.STORM: 20}, 10 * MINUTE_MS, cast).faults
    assert len(faults) > 100
    assert all(fault.details == {"workers": "copier,writer,reader"} for fault in faults)
    assert [one.kind for one in make_plan(1, ALL, 1, Cast(can_pause_brokers=False)).left_out].count(FaultKind.STORM)


@pytest.mark.parametrize("text", ["kafka:latest", "somewhere", "host:0", "host:99999", ":9092", ""])
def test_a_target_that_is_not_known_is_told(text: str) -> None:
    """With what can be written."""
    with pytest.raises(ConfigError, match="write embedded, kafka, "):
        parse_target(text)
