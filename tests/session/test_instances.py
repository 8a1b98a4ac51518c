"""Several sessions with one `instance` at the same time: the one that was started last goes on, the others stop."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from session_scene import BROKER_CONFIG, WAIT_S, Pipeline, copy_all, copy_turn, wait_until

from semel.client.membership import Membership
from semel.errors import Fenced
from semel.testing.embedded import EmbeddedBroker

PROTOCOLS = ["cooperative-sticky", "range", "consumer"]


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session without records looks around often."""
    monkeypatch.setattr("semel.session.inputs._LOOK_AT_TOPICS_S", 0.2)


class Runners:
    """Sessions with one `instance`, each in a thread that copies until it is fenced or stopped."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.fenced: list[int] = []
        self.failed: list[BaseException] = []
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        thread = threading.Thread(target=self._run, args=(len(self.threads),), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, number: int) -> None:
        try:
            with self.pipeline.session("same", transaction_records_max=10) as session:
                while not self.stop.is_set():
                    copy_turn(session, self.pipeline, 50)
        except Fenced:
            self.fenced.append(number)
        except BaseException as error:
            self.failed.append(error)

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert self.failed == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.3])
def test_of_sessions_that_start_close_to_each_other_the_last_goes_on(
    broker: EmbeddedBroker, protocol: str, delay_s: float
) -> None:
    """D5: one survives whatever the delay is, and every record is written once."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(100))
    runners, pause = Runners(pipeline), threading.Event()
    try:
        for _ in range(3):
            runners.start()
            pause.wait(delay_s)
        wait_until(lambda: len(runners.fenced) == 2, "two that stop")
        pipeline.write(range(100, 150))
        wait_until(lambda: sum(pipeline.committed().values()) >= 150 or len(runners.fenced) > 2, "all records")
    finally:
        runners.end()
    assert len(runners.fenced) == 2
    if delay_s >= 0.3:
        assert 2 not in runners.fenced, "the last that was started"
    assert pipeline.counts() == Counter(range(150))


class LateJoiner:
    """The older of two sessions: it takes over the producer first, and joins the group only on a signal."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pipeline = pipeline
        self.session = pipeline.session("same")
        self._memberships: list[Membership] = []
        self.fenced: list[Fenced] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        with monkeypatch.context() as patch:
            patch.setattr(Membership, "start", lambda membership: self._memberships.append(membership))
            self.session.__enter__()

    def join(self) -> None:
        self._memberships[0].start()
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                copy_turn(self.session, self._pipeline, 50)
        except Fenced as error:
            self.fenced.append(error)

    def close(self) -> None:
        self._thread.join(WAIT_S)
        self.session.close()
        assert not self._thread.is_alive()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("has_records", [True, False])
def test_an_older_session_that_joins_late_does_not_stop_the_newer(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, protocol: str, has_records: bool
) -> None:
    """D5: producer and place in the group are taken over in two steps, and the older session's second comes last."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    older = LateJoiner(pipeline, monkeypatch)
    with pipeline.session("same") as newer:
        wait_until(lambda: copy_turn(newer, pipeline, 50) == 0 and len(newer.partitions) == 2, "its share")
        older.join()
        copied = 0
        if has_records:
            pipeline.write(range(40))

        def is_older_fenced() -> bool:
            nonlocal copied
            copied += copy_turn(newer, pipeline, 50)
            return bool(older.fenced)

        wait_until(is_older_fenced, "the older one to stop")
        pipeline.write(range(40, 60))
        copy_all(newer, pipeline, (60 if has_records else 20) - copied)
        older.close()
    assert pipeline.counts() == Counter(range(0 if has_records else 40, 60))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_session_without_records_gives_its_place_to_the_next(broker: EmbeddedBroker, protocol: str) -> None:
    """D5: it does not notice by a write that another has taken over."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    with pipeline.session("same") as first:
        wait_until(lambda: copy_turn(first, pipeline, 50) == 0 and len(first.partitions) == 2, "its share")
        with pipeline.session("same") as second:
            with pytest.raises(Fenced, match="has taken over"):
                copy_all(first, pipeline, 1)
            pipeline.write(range(20))
            copy_all(second, pipeline, 20)
    assert pipeline.counts() == Counter(range(20))


def test_two_with_a_group_instance_id_of_the_user_do_not_fight(broker: EmbeddedBroker) -> None:
    """D5: their producers differ, so nothing tells which is newer, and the group has the last word."""
    pipeline = Pipeline(broker.bootstrap)
    with pipeline.session(group_instance_id="mine") as first:
        wait_until(lambda: copy_turn(first, pipeline, 50) == 0 and len(first.partitions) == 2, "its share")
        with pipeline.session(group_instance_id="mine") as second:
            with pytest.raises(Fenced, match="has taken over"):
                copy_all(first, pipeline, 1)
            pipeline.write(range(20))
            copy_all(second, pipeline, 20)
