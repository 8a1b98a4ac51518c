"""Workers killed with SIGKILL at every named point; the calls are counted by a real HTTP server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import effects_worker
import pytest
from effects_scene import make_effects, new_database
from session_scene import BROKER_CONFIG, Pipeline, wait_until

from semel.processes import spawn
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres
from semel.verify.call_recorder import CallRecorder, Moment

COUNT = 40
NOT_CALLED = ("after_claim", "before_call")
CALLED = ("after_call", "before_confirm")
POINTS = ("before_claim", *NOT_CALLED, *CALLED, "after_confirm", "before_move", "after_move")


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as postgres:
        yield postgres


@pytest.fixture(params=["sqlite", "postgres"])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "app.db")
    return new_database(request.getfixturevalue("postgres"))


def run_workers(to: str, pipeline: Pipeline, url: str, key: str, dead_letter: str, *points: str) -> None:
    command = [sys.executable, effects_worker.__file__, to, pipeline.bootstrap, pipeline.source, url, key, dead_letter]
    done = subprocess.run([*command, *points, ""], timeout=120, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == [*[str(-signal.SIGKILL)] * len(points), "0"]


def start_worker(to: str, pipeline: Pipeline, url: str, key: str, folder: Path) -> subprocess.Popen[bytes]:
    """Without a fork: signals for it go to the process that works."""
    code = "import sys, effects_worker as w; w.work(*sys.argv[1:5], sys.argv[5] == 'key', None, '')"
    command = [sys.executable, "-c", code, to, pipeline.bootstrap, pipeline.source, url, key]
    path = {**os.environ, "PYTHONPATH": str(Path(effects_worker.__file__).parent)}
    return spawn(command, folder=folder, output=folder / "log", environment=path)


def points_for(names: tuple[str, ...]) -> list[str]:
    """In the middle of a delivery; the position moves once in five records."""
    return [name if name.endswith("_move") else f"{name}:3" for name in names]


def test_a_callee_that_takes_the_key_carries_out_each_call_once(broker: EmbeddedBroker, to: str) -> None:
    """F4: killed at each point, nothing is missing, repeated or unknown; calls in doubt were made twice."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(COUNT))
    with CallRecorder() as recorder:
        run_workers(to, pipeline, recorder.url, "key", "", *points_for(POINTS))
    assert recorder.performed == Counter(str(number) for number in range(COUNT))
    assert len(recorder.received) == COUNT + len(CALLED)
    assert len({call.key for call in recorder.received}) == COUNT
    with make_effects(to) as effects:
        assert effects.unknown() == effects.dead() == []


def test_a_callee_that_does_not_take_the_key_is_never_called_twice(broker: EmbeddedBroker, to: str) -> None:
    """F4: what was under way at a kill is unknown, whether it was carried out or not; nothing else is missing."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(COUNT))
    with CallRecorder() as recorder:
        run_workers(to, pipeline, recorder.url, "no key", "", *points_for(POINTS))
    assert max(recorder.performed.values()) == 1
    missing = {str(number) for number in range(COUNT)} - set(recorder.performed)
    assert len(missing) == len(NOT_CALLED)
    with make_effects(to, takes_key=False) as effects:
        unknown = effects.unknown()
        assert effects.dead() == []
    assert len(unknown) == len(NOT_CALLED) + len(CALLED)
    places = {(one.partition, one.offset) for one in unknown}
    # Number n is in partition n % 2, at offset n // 2.
    assert {(int(number) % 2, int(number) // 2) for number in missing} <= places


@pytest.mark.chaos
def test_dead_letters_are_written_at_least_once_though_workers_are_killed(broker: EmbeddedBroker, to: str) -> None:
    """F4: none is missing; one is repeated, with its key, where the kill was between the record and the row."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(6))
    points = ("before_letter", "after_letter", "after_reported")
    run_workers(to, pipeline, "http://127.0.0.1:9/", "no key", pipeline.target, *points)
    letters = Counter(
        next(header["value"] for header in row["headers"] if header["key"] == "semel.effects.key")
        for row in pipeline.read()
    )
    assert sorted(letters.values()) == [1, 1, 1, 1, 1, 2]
    with make_effects(to) as effects:
        assert {one.key.encode() for one in effects.dead()} == set(letters)
        assert all(one.is_reported for one in effects.dead())


@pytest.mark.chaos
@pytest.mark.parametrize("takes_key", [True, False])
def test_a_zombie_that_wakes_after_its_successor_repeats_nothing(
    broker: EmbeddedBroker, to: str, takes_key: bool, tmp_path: Path
) -> None:
    """F4: stopped by SIGSTOP while its call is under way, and woken when another worker has done the rest."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(5))
    stopped: list[int] = []

    def interfere(moment: Moment, body: str) -> int | None:
        if moment == "performed" and body == "2" and not stopped:
            stopped.append(first.pid)
            os.kill(first.pid, signal.SIGSTOP)
        return None

    key = "key" if takes_key else "no key"
    with CallRecorder(interfere) as recorder:
        first = start_worker(to, pipeline, recorder.url, key, tmp_path)
        try:
            wait_until(lambda: bool(stopped), "the call for record 2")
            run_workers(to, pipeline, recorder.url, key, "")
            with make_effects(to, takes_key=takes_key) as effects:
                assert len(effects.unknown()) == (0 if takes_key else 1)
                os.kill(first.pid, signal.SIGCONT)
                assert first.wait(60) == 0, (tmp_path / "log").read_text()
                assert effects.unknown() == []  # without the key, it was the zombie that knew
        finally:
            first.kill()
            first.wait()
    assert recorder.performed == Counter(str(number) for number in range(5))
    assert len(recorder.received) == (6 if takes_key else 5)


def test_sigterm_lets_the_call_under_way_end_and_leaves_nothing_in_doubt(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """F4: an ordinary deployment must not produce unknown effects; the next worker goes on with the next record."""
    pipeline, to = Pipeline(broker.bootstrap, partitions=1), str(tmp_path / "app.db")
    pipeline.write(range(5))
    asked: list[int] = []

    def interfere(moment: Moment, body: str) -> int | None:
        if moment == "received" and not asked:
            asked.append(first.pid)
            os.kill(first.pid, signal.SIGTERM)
        return None

    with CallRecorder(interfere) as recorder:
        first = start_worker(to, pipeline, recorder.url, "no key", tmp_path)
        try:
            assert first.wait(60) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
        finally:
            first.kill()
            first.wait()
        assert len(recorder.received) == 1
        run_workers(to, pipeline, recorder.url, "no key", "")
    assert recorder.performed == Counter(str(number) for number in range(5))
    with make_effects(to, takes_key=False) as effects:
        assert effects.unknown() == []
