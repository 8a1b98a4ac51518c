"""Hostile input by the thousand: whatever bytes come, a right answer or a closed connection, and the next is served.

A tenth of what `python -m semel.verify.hostile` does.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_calls import OnHost, body_of, runner_on_host

from semel.broker.faults import Drop, Faults
from semel.broker.listeners import ListenerSettings
from semel.verify.hostile import FRAMES_PER_BROKER, offer_mutated, offer_truncated, offer_valid
from semel.verify.hostile_frames import FrameMaker, World, mutate, served, with_size
from semel.verify.hostile_host import HostileHost, SocketlessConnection, Violation
from semel.verify.hostile_sockets import HostileClients, hostile_clients
from semel.verify.memory import rss_bytes
from semel.wire.api import Api


@pytest.fixture
def on_host(tmp_path: Path) -> OnHost:
    return runner_on_host(tmp_path)


# Frames by the thousand.


def test_valid_requests_of_every_api_and_version_are_answered(rng: random.Random) -> None:
    """The frames that are spoiled below get far when they are not: all are answered, or wait as they ask to."""
    assert asyncio.run(offer_valid(rng.randrange(2**32))).outcomes["answered"] > 550


def test_requests_that_end_at_any_byte_are_refused(rng: random.Random) -> None:
    """Every API and version, cut off at each byte: no answer can be right, so the connection is closed."""
    assert set(asyncio.run(offer_truncated(rng.randrange(2**32))).outcomes) == {"refused"}


@pytest.mark.parametrize("part", range(5))
def test_spoiled_requests_are_answered_rightly_or_refused(part: int, rng: random.Random) -> None:
    """100,000 in five brokers' lives: no exception, no hang, bounded memory, and the broker starts again afterwards."""
    tally = asyncio.run(offer_mutated(rng.randrange(2**32), FRAMES_PER_BROKER))
    assert tally.outcomes["answered"] > FRAMES_PER_BROKER // 10 < tally.outcomes["refused"]


TURNS_OF_A_LOGIN = 4
"""Of the loop: it begins, asks for its turn among the logins, gets it and goes on."""


def test_strangers_who_have_not_logged_in_get_nothing_but_the_login(rng: random.Random, on_host: OnHost) -> None:
    """On a listener with SASL: spoiled and sound requests of all kinds, and only those of the login are answered."""
    listener = ListenerSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms=("PLAIN", "SCRAM-SHA-256"))
    of_login = {Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE}

    async def work(host: HostileHost, world: World) -> None:
        maker = FrameMaker(world, rng)
        for api, version in served():
            for turn in range(5):
                body = maker.frame(api, version, 1)[4:]
                stranger = SocketlessConnection(host.broker, listener)
                if turn % 2:
                    stranger.receive(with_size(body_of(Api.SASL_HANDSHAKE, turn // 2, mechanism="SCRAM-SHA-256")))
                    stranger.sent.clear()
                stranger.receive(with_size(mutate(body, rng) if turn else body))
                for _ in range(TURNS_OF_A_LOGIN):
                    await asyncio.sleep(0)
                assert not stranger.is_busy
                if stranger.sent and not turn:
                    assert api in of_login
                stranger.close()
        assert host.broker.metrics.unexpected_errors == 0, host.log.last

    on_host(work)


def test_a_broken_promise_is_noticed(on_host: OnHost) -> None:
    """The judge of all the above does find fault: with an exception, and with a request that is never answered."""

    async def work(host: HostileHost, world: World) -> None:
        host.broker.metrics.unexpected_errors = 1
        with pytest.raises(Violation, match="unexpected error"):
            await host.offer(body_of(Api.API_VERSIONS, 0))
        host.broker.metrics.unexpected_errors = 0
        host.broker.faults = Faults()
        host.broker.faults.inject(Api.METADATA, Drop(carried_out=False))
        with pytest.raises(Violation, match="hangs"):
            await host.offer(body_of(Api.METADATA, 4, topics=[], allow_auto_topic_creation=False))

    on_host(work)


# Over sockets.


@pytest.fixture(scope="module")
def clients() -> Iterator[HostileClients]:
    """Hostile clients of one broker in its own process; a normal client comes last."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    try:
        with hostile_clients(seed=1) as started:
            yield started
            started.check_transaction()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_spoiled_frames_over_sockets_leave_the_broker_serving(clients: HostileClients) -> None:
    """2,000 of them: each is answered or its connection closed, and new clients are served all the while."""
    outcomes = clients.send_mutated(2_000)
    assert outcomes["served"] > 200 < outcomes["closed"]
    clients.check_transaction()


def test_absurd_sizes_over_sockets_are_refused(clients: HostileClients) -> None:
    """Negative, the largest number there is, just over the cap; and twenty that announce the cap and send a little."""
    clients.announce_absurd_sizes()


def test_a_client_that_has_not_logged_in_may_announce_little(tmp_path: Path) -> None:
    """512 KiB before the login and 100 MiB after it, as in Kafka."""
    users = tmp_path / "users"
    users.touch(mode=0o600)
    users.write_text("ann=secret\n")
    arguments = ["--listener", "SASL_PLAINTEXT://127.0.0.1:0", "--users", str(users)]
    with hostile_clients(seed=1, arguments=arguments) as clients:
        clients.announce_absurd_sizes_before_login("ann", "secret")


def test_clients_that_send_byte_by_byte_keep_nobody_waiting(clients: HostileClients) -> None:
    """Fifty of them at once, each of which is answered in the end."""
    assert clients.send_byte_by_byte(50) < 2.0


def test_connections_that_end_half_way_or_come_in_a_storm_are_cleared_away(clients: HostileClients) -> None:
    """Ends that are said and ends that are not, and strangers who speak HTTP."""
    clients.end_half_way(40)
    clients.storm(300)


def test_a_thousand_idle_connections_keep_nobody_waiting(clients: HostileClients) -> None:
    """They cost a descriptor and a few kilobytes each, and still work when they wake up."""
    before = rss_bytes(clients.process_id)
    assert clients.connect_and_do_nothing(1_000) < 2.0
    assert rss_bytes(clients.process_id) - before < 64 << 20


def test_clients_that_never_read_their_answers_hold_little(clients: HostileClients) -> None:
    """Twenty clients ask for 80 MB each: the broker stops serving them at 4 MiB and an answer."""
    before = rss_bytes(clients.process_id)
    clients.never_read(clients=20, requests=20)
    assert rss_bytes(clients.process_id) - before < 20 * (8 << 20) + (100 << 20)
