"""Claims in real databases: retries, doubt, two workers, zombies, and what people can decide."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from urllib.error import HTTPError

import pytest
from effects_scene import make_effects, new_database
from session_scene import wait_until

from semel.bridges.effects import Effect, EffectNotDone, EffectRejected, Effects
from semel.bridges.effects.table import EffectsTable
from semel.bridges.sqlite import SqliteDatabase
from semel.errors import ConfigError, DatabaseError, InvalidState
from semel.testing.postgres import Postgres
from semel.verify.call_recorder import CallRecorder, Moment, post


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as postgres:
        yield postgres


@pytest.fixture(params=["sqlite", "postgres"])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "app.db")
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture
def recorder() -> Iterator[CallRecorder]:
    with CallRecorder() as recorder:
        yield recorder


def send(recorder: CallRecorder, body: str = "invoice 17") -> Callable[[str], None]:
    return lambda key: post(recorder.url, body, key=key)


def test_a_call_is_claimed_before_it_is_made_and_confirmed_after_it(to: str) -> None:
    """F4: another connection sees the claim while the call is under way, and the result after it."""
    seen: list[Effect | None] = []
    with make_effects(to) as effects, make_effects(to) as other:

        def call(key: str) -> str:
            seen.append(other.get(key))
            return f"sent as {key}"

        ended = effects.call("invoice-17", call)
        assert seen[0] is not None
        assert (seen[0].state, seen[0].attempts, seen[0].epoch) == ("claimed", 1, 1)
        assert (ended.state, ended.result) == ("done", "sent as invoice-17")
        assert other.get("invoice-17") == ended


def test_an_effect_that_is_done_is_not_called_again(to: str, recorder: CallRecorder) -> None:
    """F4: however often, and by any worker."""
    for _ in range(3):
        with make_effects(to, takes_key=False) as effects:
            assert effects.call("invoice-17", send(recorder)).state == "done"
    assert len(recorder.received) == 1


def test_every_attempt_has_the_same_key_until_one_succeeds(to: str) -> None:
    """F4: a callee that carries the call out and fails to answer is asked again, and carries it out once."""
    failures = iter([500, 503])

    def interfere(moment: Moment, body: str) -> int | None:
        return next(failures, None) if moment == "performed" else None

    with CallRecorder(interfere) as recorder, make_effects(to) as effects:
        ended = effects.call("invoice-17", send(recorder))
    assert (ended.state, ended.attempts) == ("done", 3)
    assert {call.key for call in recorder.received} == {"invoice-17"}
    assert recorder.performed == {"invoice 17": 1}


def test_after_the_last_attempt_an_effect_is_dead_with_its_error(to: str) -> None:
    """F4: as many calls as `attempts` says, and no more when it is asked for again."""
    with CallRecorder(lambda *_: 500) as recorder, make_effects(to, attempts=3) as effects:
        for _ in range(2):
            ended = effects.call("invoice-17", send(recorder))
            assert (ended.state, ended.attempts) == ("dead", 3)
            assert ended.error is not None
            assert "HTTP Error 500" in ended.error
        assert len(recorder.received) == 3
        assert [one.key for one in effects.dead()] == ["invoice-17"]


def test_a_failure_that_leaves_it_open_is_unknown_where_the_key_is_not_taken(to: str) -> None:
    """F4: an answer of 500 does not say whether the mail went out, so it is not sent again."""
    with CallRecorder(lambda *_: 500) as recorder, make_effects(to, takes_key=False) as effects:
        assert effects.call("invoice-17", send(recorder)).state == "unknown"
        assert effects.call("invoice-17", send(recorder)).state == "unknown"
        assert [(one.key, one.attempts) for one in effects.unknown()] == [("invoice-17", 1)]
    assert len(recorder.received) == 1


@pytest.mark.parametrize("error", [EffectNotDone("no connection"), ConnectionRefusedError("no connection")])
def test_a_call_that_was_certainly_not_made_is_made_again(to: str, error: Exception) -> None:
    """F4: without the key too; the user says which exceptions mean that."""
    left = [error, error]

    def call(key: str) -> None:
        if left:
            raise left.pop()

    with make_effects(to, takes_key=False, retry_on=(ConnectionRefusedError,)) as effects:
        ended = effects.call("invoice-17", call)
    assert (ended.state, ended.attempts) == ("done", 3)


def test_a_call_that_the_callee_rejects_is_dead_at_once(to: str) -> None:
    """F4: a wrong address stays wrong."""

    def call(key: str) -> None:
        raise EffectRejected("no such mailbox")

    with make_effects(to) as effects:
        ended = effects.call("invoice-17", call)
    assert (ended.state, ended.attempts) == ("dead", 1)
    assert ended.error == "EffectRejected: no such mailbox"


def test_two_workers_never_make_the_call_of_one_key_at_the_same_time(to: str, recorder: CallRecorder) -> None:
    """F4: eight threads ask for the same ten effects; each is called once, and all threads see it done."""
    states: list[str] = []
    together = threading.Barrier(8)

    def work() -> None:
        with make_effects(to, takes_key=False) as effects:
            together.wait(30)
            for number in range(10):
                states.append(effects.call(f"invoice-{number}", send(recorder, f"invoice {number}")).state)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert states == ["done"] * 80
    assert recorder.performed == {f"invoice {number}": 1 for number in range(10)}
    assert len(recorder.received) == 10


def test_a_worker_waits_while_another_has_the_lease(to: str) -> None:
    """F4: its claim says that it is not its turn, and for how long."""
    with make_effects(to) as effects, make_effects(to) as other, effects.claim("invoice-17") as ours:
        assert ours.is_ours
        with other.claim("invoice-17") as theirs:
            assert not theirs.is_ours
            assert 0 < theirs.wait_s <= 30.0
    with make_effects(to) as effects, effects.claim("invoice-17") as again:
        assert not again.is_ours
        assert again.effect.state == "done"


@pytest.mark.parametrize("ending", ["done", "fails"])
def test_a_zombie_whose_lease_has_passed_cannot_overwrite_its_successor(
    to: str, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F4: it wakes while the successor's call is under way; the row stays the successor's."""
    with make_effects(to, lease_s=0.3) as slow, make_effects(to) as quick:
        zombie = slow.claim("invoice-17")
        zombie.begin()
        successor = quick.claim("invoice-17")
        wait_until(lambda: successor.begin() or successor.is_ours, "the lease to pass")
        if ending == "done":
            zombie.confirm("by the zombie")
        else:
            zombie.fail(ValueError("by the zombie"))
        found = quick.get("invoice-17")
        assert found is not None
        assert (found.state, found.epoch, found.error) == ("claimed", 2, None)
        assert "another worker has claimed the effect since" in caplog.text
        successor.confirm("by the successor")
        ended = quick.get("invoice-17")
    assert ended is not None
    assert (ended.state, ended.result) == ("done", "by the successor")


def test_without_the_key_a_lost_worker_leaves_doubt_and_may_still_end_it(to: str) -> None:
    """F4: the successor makes no call; the slow worker's own report is heard."""
    with make_effects(to, takes_key=False, lease_s=0.3) as slow, make_effects(to, takes_key=False) as quick:
        late = slow.claim("invoice-17")
        late.begin()
        assert late.is_ours
        assert quick.call("invoice-17", lambda key: pytest.fail("called again")).state == "unknown"
        late.confirm()
        assert quick.unknown() == []
        assert quick.call("invoice-17", lambda key: pytest.fail("called again")).state == "done"


def test_a_person_decides_what_became_of_an_unknown_effect(to: str, recorder: CallRecorder) -> None:
    """F4: done, and it is over; not done, and the call is made again with the same key."""
    with make_effects(to, takes_key=False) as effects:

        def call(key: str) -> None:
            raise TimeoutError("no answer")

        for key in ("invoice-1", "invoice-2"):
            assert effects.call(key, call).state == "unknown"
        assert effects.resolve("invoice-1", done=True).state == "done"
        assert effects.resolve("invoice-2", done=False).state == "failed"
        assert effects.unknown() == []
        for key in ("invoice-1", "invoice-2"):
            assert effects.call(key, send(recorder, key)).state == "done"
        assert [call.body for call in recorder.received] == ["invoice-2"]
        with pytest.raises(InvalidState, match="only one that is unknown or dead"):
            effects.resolve("invoice-2", done=True)
        with pytest.raises(InvalidState, match="There is no effect 'invoice-3'"):
            effects.resolve("invoice-3", done=True)


def test_an_exception_leaves_the_block_of_a_claim_after_it_was_recorded(to: str) -> None:
    """F4: the lower-level way, with the back-off before the next attempt."""
    with make_effects(to, backoff_s=50, backoff_max_s=50) as effects:
        with pytest.raises(ZeroDivisionError), effects.claim("invoice-17"):
            _ = 1 / 0
        with effects.claim("invoice-17") as again:
            assert not again.is_ours
            assert again.effect.state == "failed"
            assert 20 < again.wait_s <= 50


def test_ctrl_c_in_a_call_is_recorded_and_passed_on(to: str) -> None:
    """F4: the call may have been carried out, so without the key it is unknown at once, and not after the lease."""

    def call(key: str) -> None:
        raise KeyboardInterrupt

    with make_effects(to, takes_key=False) as effects:
        with pytest.raises(KeyboardInterrupt):
            effects.call("invoice-17", call)
        assert [one.key for one in effects.unknown()] == ["invoice-17"]


def test_names_keep_their_effects_apart(to: str, recorder: CallRecorder) -> None:
    """F4: the same key under two names is two effects."""
    for name in ("mail", "letters", "mail"):
        with make_effects(to, name=name) as effects:
            effects.call("invoice-17", lambda key, name=name: post(recorder.url, name))
    assert recorder.performed == {"mail": 1, "letters": 1}


def test_old_effects_can_be_forgotten_but_not_doubts(to: str) -> None:
    """F4: the table does not grow for ever; what a person has to see stays."""

    def fail(key: str) -> None:
        raise EffectRejected("no")

    with make_effects(to) as effects:
        effects.call("done", lambda key: None)
        effects.call("dead", fail)
        assert effects.forget(timedelta(hours=1)) == 0
        assert effects.forget(timedelta(hours=-1)) == 1
        assert effects.get("done") is None
        assert [one.key for one in effects.dead()] == ["dead"]


def test_text_that_a_database_cannot_store_does_not_lose_the_confirmation(to: str) -> None:
    """F4: results and errors come from outside, with NUL characters, lone surrogates and any length."""
    with make_effects(to, takes_key=False) as effects:
        ended = effects.call('a\'b "c" $1', lambda key: "\0\ud800" + "x" * 10_000)
        assert ended.state == "done"
        assert effects.get('a\'b "c" $1') == ended


def test_a_confirmation_waits_for_a_database_that_is_away_for_a_moment(
    to: str, monkeypatch: pytest.MonkeyPatch, recorder: CallRecorder
) -> None:
    """F4: the call was made, so giving up at the first error would leave it unknown."""
    real, refusals = EffectsTable.change, iter([True, True])

    def change(table: EffectsTable, key: str, decide: object) -> Effect | None:
        changed = real(table, key, decide)  # type: ignore[arg-type]
        if next(refusals, False):  # the commit arrived, and its answer did not
            raise DatabaseError("the connection was lost", is_transient=True)
        return changed

    monkeypatch.setattr(EffectsTable, "change", change)
    with make_effects(to, takes_key=False) as effects:
        assert effects.call("invoice-17", send(recorder)).state == "done"
    assert len(recorder.received) == 1


def test_a_claim_whose_commit_was_not_answered_is_still_ours(
    to: str, monkeypatch: pytest.MonkeyPatch, recorder: CallRecorder
) -> None:
    """F4: no call was made under it, so there is no doubt and nobody has to wait for the lease."""
    real, refusals = EffectsTable.claim, iter([True])

    def claim(table: EffectsTable, key: str, decide: object) -> object:
        decided = real(table, key, decide)  # type: ignore[arg-type]
        if next(refusals, False):
            raise DatabaseError("the connection was lost", is_transient=True)
        return decided

    monkeypatch.setattr(EffectsTable, "claim", claim)
    with make_effects(to, takes_key=False) as effects:
        ended = effects.call("invoice-17", send(recorder))
    assert (ended.state, ended.attempts, len(recorder.received)) == ("done", 1, 1)


def test_a_worker_that_was_paused_before_its_call_looks_at_its_lease_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: after half of the lease it claims again; if another worker was there meanwhile, it makes no call."""
    path = tmp_path / "app.db"
    real, paused = EffectsTable.claim, iter([True])

    def claim(table: EffectsTable, key: str, decide: object) -> object:
        decided = real(table, key, decide)  # type: ignore[arg-type]
        if next(paused, False):
            with make_effects(path) as other:
                other.call(key, lambda key: None)  # waits until the lease has passed
        return decided

    monkeypatch.setattr(EffectsTable, "claim", claim)
    with make_effects(path, lease_s=0.2) as effects, effects.claim("invoice-17") as late:
        assert not late.is_ours
        assert (late.effect.state, late.effect.epoch) == ("done", 2)


def test_a_lease_that_is_shorter_than_a_claim_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K3: it would be over before any call; nothing is called, and nothing is left in doubt."""
    with make_effects(tmp_path / "app.db", takes_key=False, lease_s=0.001) as effects:
        claim = effects.retry
        monkeypatch.setattr(effects, "retry", lambda action: (time.sleep(0.002), claim(action))[1])
        with pytest.raises(ConfigError, match="Raise lease_s"):
            effects.call("invoice-17", lambda key: pytest.fail("called"))
        assert effects.unknown() == []


@pytest.mark.parametrize("wrong", ["dbname=app", "mysql://host/app", object()])
def test_a_place_that_cannot_hold_claims_is_refused(wrong: str) -> None:
    """K3: a connection string of another kind does not become the name of a file."""
    with pytest.raises(ConfigError):
        Effects(wrong, name="mail", takes_key=True)


def test_a_target_can_hold_the_claims(tmp_path: Path) -> None:
    """F4: whatever opens a database, such as `semel.SQLite(...)`."""

    class Target:
        def open(self) -> SqliteDatabase:
            return SqliteDatabase(tmp_path / "app.db")

    with Effects(Target(), name="mail", takes_key=True) as effects:
        assert effects.call("invoice-17", lambda key: None).state == "done"


def test_keys_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    """K3: before any call."""
    with make_effects(tmp_path / "app.db") as effects:
        for key in ("", "a\0b", "half a pair \ud800", "x" * 2_001):
            with pytest.raises(ConfigError, match="cannot be an idempotency key"):
                effects.claim(key)


def test_an_answer_that_is_not_200_raises(recorder: CallRecorder) -> None:
    """The recorder itself: a refused call is not carried out."""
    recorder.interfere = lambda *_: 500
    with pytest.raises(HTTPError) as refused:
        post(recorder.url, "x")
    refused.value.close()
    assert recorder.performed == {}


@pytest.mark.filterwarnings("error")
def test_an_async_call_is_refused_and_its_effect_is_not_done(to: str) -> None:
    """F4: its coroutine is never awaited, so no call was made. The effect counted as done."""

    async def send_later(key: str) -> None:
        raise AssertionError(key)

    made: list[str] = []
    with make_effects(to, takes_key=False) as effects:
        with pytest.raises(ConfigError, match="The function is async"):
            effects.call("invoice-17", send_later)
        assert effects.get("invoice-17") is None
        with pytest.raises(ConfigError, match="The function is async"):
            effects.call("invoice-17", lambda key: send_later(key))
        assert effects.call("invoice-17", made.append).state == "done"
    assert made == ["invoice-17"]


FORKS = """
import os, sys
from effects_scene import make_effects
effects = make_effects(sys.argv[1], takes_key=False)
effects.call("before", lambda key: None)
children = []
for worker in range(3):
    child = os.fork()
    if child == 0:
        for number in range(15):
            effects.call(f"{worker}-{number}", lambda key: os.write(1, f"{key}\\n".encode()))
            effects.call(f"shared-{number}", lambda key: os.write(1, f"{key}\\n".encode()))
        os._exit(0)
    children.append(child)
effects.call("parent", lambda key: os.write(1, b"parent\\n"))
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_workers_forked_after_the_first_use_have_their_own_connections(to: str) -> None:
    """F4: as in a web server that loads the program first. They shared one connection and read each other's answers."""
    result = subprocess.run(
        [sys.executable, "-c", FORKS, to], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent
    )
    assert result.returncode == 0, result.stderr
    names = [*(f"{worker}-{number}" for worker in range(3) for number in range(15))]
    assert sorted(result.stdout.split()) == sorted([*names, *(f"shared-{number}" for number in range(15)), "parent"])
