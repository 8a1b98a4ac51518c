"""Producer ids: no id twice, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_meta import MemoryMeta

from semel.broker.producer_ids import BLOCK_IDS, META_NAME, ProducerIds
from semel.errors import ConfigError


@given(lives=st.lists(st.integers(min_value=0, max_value=2 * BLOCK_IDS + 1), min_size=1, max_size=5))
def test_no_id_is_given_twice_over_crashes(lives: list[int]) -> None:
    """Each life ends without a goodbye after some ids; the next one goes on above them."""
    meta = MemoryMeta()
    given_ids: list[int] = []
    for count in lives:
        producer_ids = ProducerIds(meta)
        given_ids += [producer_ids.next_id() for _ in range(count)]
    assert given_ids == sorted(set(given_ids))


def test_a_block_is_on_disk_before_its_first_id_is_used() -> None:
    """One write per thousand ids, and it comes first."""
    meta = MemoryMeta()
    producer_ids = ProducerIds(meta)
    assert META_NAME not in meta.files
    assert producer_ids.next_id() == 0
    written = meta.files[META_NAME]
    assert [producer_ids.next_id() for _ in range(BLOCK_IDS - 1)] == list(range(1, BLOCK_IDS))
    assert meta.files[META_NAME] == written
    assert producer_ids.next_id() == BLOCK_IDS
    assert meta.files[META_NAME] != written


@pytest.mark.parametrize("ends", ["at once", "late", "with an error"])
def test_the_next_block_is_written_ahead_and_no_id_is_given_before(ends: str) -> None:
    """With half of a block used, another thread writes. If it fails or is slow, the one who needs the block waits."""
    meta = MemoryMeta()
    begun: list[tuple[Future[None], Callable[[], None]]] = []

    def end(future: Future[None], write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def begin(write: Callable[[], None]) -> Future[None]:
        future = Future[None]()
        begun.append((future, write))
        if ends == "with an error":
            future.set_exception(OSError("No space"))
        elif ends == "at once":
            end(future, write)
        return future

    producer_ids = ProducerIds(meta, begin)
    half = [producer_ids.next_id() for _ in range(BLOCK_IDS // 2 - 1)]
    assert not begun
    half += [producer_ids.next_id() for _ in range(BLOCK_IDS // 2 + 1)]
    assert len(begun) == 1
    if ends == "late":
        threading.Timer(0.05, end, begun[0]).start()
    following = producer_ids.next_id()
    assert [*half, following] == list(range(BLOCK_IDS + 1))
    assert ProducerIds(meta).next_id() == 2 * BLOCK_IDS, "the block of what was given is on the disk"


def test_a_full_disk_gives_no_id_and_loses_none() -> None:
    """The failed call is an error; the next one, with room again, gets the id that it would have had."""
    meta = MemoryMeta()
    producer_ids = ProducerIds(meta)
    meta.writes_until_full = 0
    with pytest.raises(OSError, match="No space"):
        producer_ids.next_id()
    meta.writes_until_full = None
    assert producer_ids.next_id() == 0


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"version": 2, "next_block": 5}', b'{"version": 1, "next_block": -1}']
)
def test_an_unreadable_file_stops_the_start(content: bytes) -> None:
    """Beginning again at 0 would give ids a second time."""
    meta = MemoryMeta()
    meta.files[META_NAME] = content
    with pytest.raises(ConfigError, match=r"producer_ids\.json.*restore this file"):
        ProducerIds(meta)
