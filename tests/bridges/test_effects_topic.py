"""One call for each record of a topic: order, parallel calls, dead letters, redelivery, and stopping."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effects_scene import make_effects, new_database
from session_scene import BROKER_CONFIG, Pipeline, wait_until

from semel.bridges import effects as semel_effects
from semel.bridges.effects import EffectNotDone, EffectRejected, Effects, EffectsReport
from semel.bridges.effects.letters import EffectLetters
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.errors import ConfigError, RecordFailed, TooManyDeadLetters, UnknownTopic
from semel.session.transaction import Row
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as postgres:
        yield postgres


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


class Calls:
    """What was called, and in which order."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[str] = []

    def __call__(self, row: Row, key: str) -> None:
        self.values.append(row.value)
        self.keys.append(key)

    def counts(self) -> Counter[int]:
        return Counter(int(value or b"") for value in self.values)


def run(effects: Effects, pipeline: Pipeline, call: Any, **more: Any) -> EffectsReport:
    options: dict[str, Any] = {"idle_ms": 300, "bootstrap": pipeline.bootstrap, "fetch_max_wait_ms": 50, **more}
    return effects.run(call, topics=[pipeline.source], **options)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_every_record_is_called_for_once_and_not_again_after_a_restart(
    broker: EmbeddedBroker, path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """F4: the position is in the database of the claims; a second run has nothing to do."""
    to = str(path) if kind == "sqlite" else new_database(request.getfixturevalue("postgres"))
    pipeline, calls = Pipeline(broker.bootstrap), Calls()
    pipeline.write(range(20))
    for expected in (20, 0):
        report = run(make_effects(to), pipeline, calls, workers=3, delivery_records_max=6)
        assert (report.records, report.done) == (expected, expected)
    assert calls.counts() == Counter(range(20))
    assert len(set(calls.keys)) == 20


def test_the_one_call_for_a_topic(broker: EmbeddedBroker, path: Path) -> None:
    """F4: `semel.effects.run` as the guide writes it."""
    pipeline, calls = Pipeline(broker.bootstrap), Calls()
    pipeline.write(range(5))
    report = semel_effects.run(
        calls,
        to=path,
        name="mail",
        takes_key=True,
        bootstrap=pipeline.bootstrap,
        topics=[pipeline.source],
        key=lambda row: f"invoice-{int(row.value or b'')}",
        idle_ms=300,
    )
    assert report == EffectsReport(records=5, done=5)
    assert sorted(calls.keys) == [f"invoice-{number}" for number in range(5)]


def test_records_with_one_idempotency_key_are_one_effect(broker: EmbeddedBroker, path: Path) -> None:
    """F4: a producer that wrote the same invoice twice has it sent once."""
    pipeline, calls = Pipeline(broker.bootstrap), Calls()
    pipeline.write([1, 2, 1, 1])
    report = run(make_effects(path), pipeline, calls, key=lambda row: row.value, workers=2)
    assert (report.records, report.done, report.skipped) == (4, 2, 2)
    assert calls.counts() == Counter([1, 2])


def test_records_that_come_again_after_their_effect_is_done_make_no_call(broker: EmbeddedBroker, path: Path) -> None:
    """F4: a position that was lost, or a crash before it was moved."""
    pipeline, calls = Pipeline(broker.bootstrap), Calls()
    pipeline.write(range(10))
    run(make_effects(path), pipeline, calls)
    with make_effects(path).open_database() as database:
        database.execute("DELETE FROM semel_inbox")
    report = run(make_effects(path), pipeline, calls)
    assert report == EffectsReport(records=10, skipped=10)
    assert calls.counts() == Counter(range(10))


def test_a_topic_that_was_created_again_has_new_effects(broker: EmbeddedBroker, path: Path) -> None:
    """F4: the same places in another topic are not taken for those that are done."""
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    pipeline.write(range(3))
    run(make_effects(path), pipeline, calls)
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.delete_topics(pipeline.source)
        admin.create_topics(pipeline.source)
    pipeline.write(range(10, 13))
    run(make_effects(path), pipeline, calls)
    assert calls.counts() == Counter([0, 1, 2, 10, 11, 12])


def test_calls_for_one_record_key_are_in_order_though_many_run_at_a_time(broker: EmbeddedBroker, path: Path) -> None:
    """F4: seven keys, four workers, failures in between; at least two calls were under way at once."""
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    pipeline.write(range(56))
    under_way, most, failed = set[bytes | None](), [0], set[bytes | None]()
    lock, two = threading.Lock(), threading.Event()

    def call(row: Row, key: str) -> None:
        with lock:
            assert row.key not in under_way
            under_way.add(row.key)
            most[0] = max(most[0], len(under_way))
            if most[0] >= 2:
                two.set()
        two.wait(10)
        try:
            if int(row.value or b"") % 5 == 0 and row.value not in failed:
                failed.add(row.value)
                raise ValueError("not at the first attempt")
            calls(row, key)
        finally:
            with lock:
                under_way.remove(row.key)

    report = run(make_effects(path), pipeline, call, workers=4)
    assert report.done == 56
    assert most[0] >= 2
    for key in range(7):
        of_key = [int(value or b"") for value in calls.values if int(value or b"") % 7 == key]
        assert of_key == list(range(key, 56, 7))


def test_an_effect_that_was_given_up_goes_to_the_dead_letter_topic(broker: EmbeddedBroker, path: Path) -> None:
    """F4: with its key, its origin and its error; the others are called, and the position moves on."""
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    pipeline.write(range(6))

    def call(row: Row, key: str) -> None:
        if row.value == b"3":
            raise ValueError("no such customer")
        calls(row, key)

    with make_effects(path, attempts=2) as effects:
        report = run(effects, pipeline, call, dead_letter=pipeline.target)
        [dead] = effects.dead()
    assert (report.records, report.done, report.dead) == (6, 5, 1)
    [letter] = pipeline.read()
    headers = {header["key"]: header["value"] for header in letter["headers"]}
    assert (letter["value"], letter["key"]) == (b"3", b"k3")
    assert headers["semel.effects.key"] == dead.key.encode()
    assert headers["semel.dead-letter.offset"] == b"3"
    assert headers["semel.dead-letter.error"] == b"ValueError: no such customer"
    assert (dead.attempts, dead.is_reported) == (2, True)
    assert run(make_effects(path), pipeline, call, dead_letter=pipeline.target).records == 0


def test_a_dead_letter_that_was_not_confirmed_is_written_again_with_the_same_key(
    broker: EmbeddedBroker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: at least once. The row says that the effect is dead; the record follows it, and may be repeated."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write([1])
    real, crashes = EffectLetters.send, iter([True])

    def send(letters: EffectLetters, row: Row, effect: Any) -> None:
        real(letters, row, effect)
        if next(crashes, False):
            raise MemoryError("as if the process ended here")

    def call(row: Row, key: str) -> None:
        raise EffectRejected("no")

    monkeypatch.setattr(EffectLetters, "send", send)
    with pytest.raises(MemoryError):
        run(make_effects(path), pipeline, call, dead_letter=pipeline.target)
    run(make_effects(path), pipeline, call, dead_letter=pipeline.target)
    keys = [{h["key"]: h["value"] for h in row["headers"]}["semel.effects.key"] for row in pipeline.read()]
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_too_many_dead_letters_stop_the_run(broker: EmbeddedBroker, path: Path) -> None:
    """F4: a callee that is down does not turn a whole topic into dead letters."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(10))

    def call(row: Row, key: str) -> None:
        raise EffectRejected("down")

    with pytest.raises(TooManyDeadLetters, match="More than dead_letter_max=3 effects of 'mail'"):
        run(make_effects(path), pipeline, call, dead_letter_max=3)
    with make_effects(path) as effects:
        assert len(effects.dead()) == 4


def test_too_many_unknown_effects_stop_the_run(broker: EmbeddedBroker, path: Path) -> None:
    """F4: nor does a callee without keys that is down turn a whole topic into unknown effects."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(10))

    def call(row: Row, key: str) -> None:
        raise ConnectionError("down")

    with make_effects(path, takes_key=False) as effects:
        with pytest.raises(TooManyDeadLetters, match="were given up or are unknown"):
            run(effects, pipeline, call, dead_letter_max=3)
        assert len(effects.unknown()) == 4


def test_a_function_without_the_key_is_refused_before_any_call(broker: EmbeddedBroker, path: Path) -> None:
    """F4: it would fail for every record."""
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    pipeline.write(range(3))
    with pytest.raises(ConfigError, match="def call\\(row, key\\)"):
        run(make_effects(path), pipeline, lambda row: calls(row, ""))
    assert not calls.values


def test_an_unknown_effect_is_counted_and_the_pipeline_goes_on(broker: EmbeddedBroker, path: Path) -> None:
    """F4: without the key a call that was left open is not made again; a person decides, and the run calls again."""
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    pipeline.write(range(5))
    is_down = True

    def call(row: Row, key: str) -> None:
        calls(row, key)
        if is_down and row.value in (b"1", b"2"):
            raise TimeoutError("no answer")

    with make_effects(path, takes_key=False) as effects:
        report = run(effects, pipeline, call)
        assert (report.records, report.done, report.unknown) == (5, 3, 2)
        first, second = effects.unknown()
        assert (first.topic, first.partition, first.offset) == (pipeline.source, 0, 1)
        effects.resolve(first.key, done=True)
        effects.resolve(second.key, done=False)
        is_down = False
        report = run(effects, pipeline, call)
        assert (report.records, report.done, report.unknown) == (0, 1, 0)
        assert effects.unknown() == []
    assert calls.counts() == Counter([0, 1, 2, 2, 3, 4])
    assert calls.keys[-1] == second.key


def test_a_reopened_effect_whose_record_is_gone_is_left_alone(
    broker: EmbeddedBroker, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F4: another record in its place is not taken for it."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(2))

    def call(row: Row, key: str) -> None:
        raise EffectRejected("no")

    with make_effects(path) as effects:
        run(effects, pipeline, call)
        for dead in effects.dead():
            effects.resolve(dead.key, done=False)
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.delete_topics(pipeline.source)
            admin.create_topics(pipeline.source)
        pipeline.write(range(10, 11))
        calls = Calls()
        assert run(effects, pipeline, calls).done == 1
    assert calls.counts() == Counter([10])
    assert caplog.text.count("its record is no longer in its topic") == 2


def test_two_runs_of_one_name_share_the_work(broker: EmbeddedBroker, path: Path) -> None:
    """F4: both read everything; each effect is called by one of them, and neither fails."""
    pipeline, calls = Pipeline(broker.bootstrap), Calls()
    pipeline.write(range(40))
    reports: list[EffectsReport] = []

    def work() -> None:
        effects = make_effects(path, takes_key=False)
        reports.append(run(effects, pipeline, calls, delivery_records_max=5, idle_ms=1_500))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert calls.counts() == Counter(range(40))
    assert sum(report.done for report in reports) == 40
    assert [report.unknown for report in reports] == [0, 0]


def test_a_run_that_is_stopped_in_a_back_off_leaves_nothing_in_doubt(broker: EmbeddedBroker, path: Path) -> None:
    """F4: it ends at once; the record comes again with its attempts counted."""
    pipeline, stop = Pipeline(broker.bootstrap, partitions=1), threading.Event()
    pipeline.write(range(3))
    effects = make_effects(path, backoff_s=60, backoff_max_s=60, takes_key=False)
    attempted = threading.Event()

    def call(row: Row, key: str) -> None:
        attempted.set()
        raise EffectNotDone("busy")

    running = threading.Thread(target=run, args=(effects, pipeline, call), kwargs={"stop": stop, "idle_ms": None})
    running.start()
    wait_until(attempted.is_set, "the first attempt")
    stop.set()
    running.join(10)
    assert not running.is_alive()
    with effects.open_database() as database:
        assert database.execute("SELECT state, attempts FROM semel_effects").rows == [("failed", 1)]
        assert database.execute("SELECT * FROM semel_inbox").rows == []


def test_a_record_without_an_idempotency_key_stops_the_run(broker: EmbeddedBroker, path: Path) -> None:
    """K3: a key function that fails is a mistake in the program; the error says at which record."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(2))
    with pytest.raises(RecordFailed, match=f"{pipeline.source}-0 at offset 0: ZeroDivisionError"):
        run(make_effects(path), pipeline, Calls(), key=lambda row: str(1 // 0))


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_record_whose_key_cannot_be_kept_is_a_dead_letter_and_the_others_are_called(
    broker: EmbeddedBroker, path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """F4: bytes that are not UTF-8, NUL, nothing, or more than an index takes; each is written once and counted."""
    to = path if kind == "sqlite" else new_database(request.getfixturevalue("postgres"))
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    bad = [b"bad\xff", b"nul\0", b"", os.urandom(4_000).hex().encode(), b"none"]
    good = [b"first", b"last", os.urandom(1_000).hex().encode()]
    with Producer(bootstrap_servers=pipeline.bootstrap) as producer:
        for value in [good[0], *bad, *good[1:]]:
            producer.send(pipeline.source, value)

    def key(row: Row) -> Any:
        return None if row.value == b"none" else row.value

    effects = make_effects(to)
    report = run(effects, pipeline, calls, key=key, dead_letter=pipeline.target)
    assert (report.records, report.done, report.dead) == (8, 3, 5)
    assert calls.values == good
    assert [letter["value"] for letter in pipeline.read()] == bad
    dead = effects.dead()
    assert [(one.offset, one.is_reported) for one in dead] == [(at, True) for at in range(1, 6)]
    assert run(make_effects(to), pipeline, calls, key=key, dead_letter=pipeline.target).records == 0
    effects.resolve(dead[0].key, done=False)  # asked for again, it is refused again and stops nothing
    assert run(make_effects(to), pipeline, calls, key=key, dead_letter=pipeline.target).dead == 1
    assert calls.values == good
    effects.close()


def test_wrong_options_are_refused_before_anything_is_read(broker: EmbeddedBroker, path: Path) -> None:
    """K3: no worker, a dead-letter topic that is not there, or that is an input."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    with pytest.raises(ConfigError, match="workers=0"):
        run(make_effects(path), pipeline, Calls(), workers=0)
    with pytest.raises(ConfigError, match="one of the topics that are read"):
        run(make_effects(path), pipeline, Calls(), dead_letter=pipeline.source)
    with pytest.raises(UnknownTopic):
        run(make_effects(path), pipeline, Calls(), dead_letter="not-there", default_api_timeout_ms=500)


def test_records_without_a_kafka_key_keep_the_order_of_their_partition(broker: EmbeddedBroker, path: Path) -> None:
    """F4: unless `order` says that their order does not matter."""
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    with Producer(bootstrap_servers=pipeline.bootstrap) as producer:
        for number in range(20):
            producer.send(pipeline.source, str(number).encode())
        producer.flush()
    run(make_effects(path), pipeline, calls, workers=4)
    assert [int(value or b"") for value in calls.values] == list(range(20))
    together = threading.Barrier(4)
    run(
        make_effects(path, name="any-order"),
        pipeline,
        lambda row, key: together.wait(10),
        workers=4,
        order=lambda row: row.offset,
    )
    assert not together.broken


def test_another_name_over_the_same_topic_is_warned_of(
    broker: EmbeddedBroker, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Claims belong to the name: a program that was renamed makes every call again."""
    pipeline, calls = Pipeline(broker.bootstrap, partitions=1), Calls()
    pipeline.write(range(3))
    for _ in range(2):
        run(make_effects(path, name="mail"), pipeline, calls)
    assert "before" not in caplog.text
    run(make_effects(path, name="post"), pipeline, calls)
    assert "effects 'mail' have made calls before" in caplog.text


@pytest.mark.parametrize("takes_key", [True, False])
def test_a_postgres_that_is_stopped_at_once_and_started_again_loses_no_claim(
    broker: EmbeddedBroker, takes_key: bool
) -> None:
    """F4: it is stopped while calls are under way; they are confirmed when it is back, and none is made twice."""
    pipeline, calls = Pipeline(broker.bootstrap), Calls()
    pipeline.write(range(30))
    outage = threading.Lock()

    with Postgres() as postgres:

        def call(row: Row, key: str) -> None:
            calls(row, key)
            if row.value in (b"9", b"20"):
                with outage:
                    postgres.stop_at_once()
                    postgres.start()

        report = run(make_effects(postgres.uri, takes_key=takes_key), pipeline, call, workers=3, delivery_records_max=9)
    assert (report.records, report.done, report.unknown, report.dead) == (30, 30, 0, 0)
    assert calls.counts() == Counter(range(30))
