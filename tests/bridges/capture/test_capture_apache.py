"""Change capture into Apache Kafka: 4.x with transaction protocol 2, and 3.9 with protocol 1."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from capture_lives import AT_THE_BEGINNING, NUMBERS, ids, insert, live, points_of_a_stream
from capture_scene import Source, server
from relay_scene import in_postgres

from semel.testing.apache_kafka import LATEST, OLD, ApacheKafka
from semel.testing.postgres import Postgres

__all__ = ["server"]

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module", params=[LATEST, OLD])
def kafka(request: pytest.FixtureRequest) -> Iterator[ApacheKafka]:
    with ApacheKafka(request.param) as kafka:
        yield kafka


def test_every_change_is_in_apache_kafka_once_though_the_capture_is_killed_at_every_point(
    kafka: ApacheKafka, server: Postgres
) -> None:
    """G2: at every point of the snapshot, and then of the stream."""
    made = in_postgres(server, kafka)
    source = Source("postgres", made.address, made.bootstrap)
    source.make(NUMBERS)
    insert(source, 1, 12)
    assert live(source, *AT_THE_BEGINNING, "") == [-signal.SIGKILL] * len(AT_THE_BEGINNING) + [0]
    assert sorted(ids(source)) == list(range(1, 13))
    points = points_of_a_stream()
    for first in range(13, 113, 20):
        insert(source, first, first + 11)
        for number in range(first + 12, first + 20):
            insert(source, number, number)
    assert live(source, *points, "") == [-signal.SIGKILL] * len(points) + [0]
    assert ids(source)[12:] == list(range(13, 113))
    assert [end.events for end in source.ends()] == [12] + [12, *[1] * 8] * 5
