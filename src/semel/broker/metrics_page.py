"""The broker's numbers for Prometheus, over HTTP on the loopback interface.

Read in the broker's own thread when they are asked for: nothing is counted twice, and nothing is locked. Thousands of
partitions take long to read and to write down, so others have their turns in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from semel.broker.loop_watch import BOUNDS_S, LoopWatch, TurnTimes
from semel.broker.pacing import ENTRIES_AT_ONCE, Pace, Slices, finish
from semel.broker.sockets import cannot_listen
from semel.core.transaction_metadata import AT_REST
from semel.metrics.families import Family, Kind, write_families, write_sample

if TYPE_CHECKING:
    from semel.broker.state import Broker

_LOG: Final = logging.getLogger("semel.broker")

_HOST: Final = "127.0.0.1"
_REQUEST_BYTES_MAX: Final = 16 * 1024
_REQUEST_TIMEOUT_S: Final = 5.0
_PREFIX: Final = "semel_broker_"
_IDS_AT_ONCE: Final = 4096
_SEGMENTS_PER_STEP: Final = 16
_STEPS_OF_A_FAMILY: Final = 8

# Attributes of `Metrics`, and what they count.
_COUNTS: Final[Mapping[str, str]] = {
    "connections_opened": "Connections that clients have made.",
    "refused_connections": "Connections that were closed for what the client sent or was.",
    "failed_logins": "Logins that failed, for whatever reason.",
    "expired_logins": "Connections that were closed because their login was older than connections.max.reauth.ms.",
    "batches_appended": "Batches that producers have stored.",
    "records_appended": "Records that producers have stored.",
    "bytes_appended": "Bytes that producers have stored, as they sent them.",
    "duplicates_refused": "Batches that were there already and were not stored again.",
    "out_of_order_sequences": "Batches refused because one before them was missing.",
    "fences": "Requests refused because another producer or member has taken over.",
    "transactions_committed": "Transactions that were committed.",
    "transactions_aborted": "Transactions that were aborted, for whatever reason.",
    "transactions_timed_out": "Transactions that were aborted because their time was over.",
    "storage_errors": "Operations that the disk refused.",
    "unexpected_errors": "Failures of the broker itself. Please report them.",
}


def read_numbers(broker: Broker, watch: LoopWatch | None = None) -> Slices[list[Family]]:
    """All numbers. A number that changes meanwhile is shown as it was when its slice was read."""
    families = [*_counters(broker)]
    families += yield from _transactions(broker)
    families += yield from _partitions(broker)
    families += yield from _others(broker)
    if watch is not None:
        families += _turns("loop_turn_seconds", "Turns of the event loop, by how long they took.", watch.wall)
        families += _turns("loop_turn_busy_seconds", "The same by the processor time that they used.", watch.busy)
    return families


def _counters(broker: Broker) -> Iterator[Family]:
    metrics = broker.metrics
    for name, help_text in _COUNTS.items():
        yield Family(Kind.COUNTER, name, help_text, {(): getattr(metrics, name)})
    by_api = {(api,): count for api, count in metrics.requests.items()}
    yield Family(Kind.COUNTER, "requests", "Requests, by API.", by_api, ("api",))
    by_code = {(code,): count for code, count in metrics.refusals.items()}
    yield Family(Kind.COUNTER, "refusals", "Answers with an error, by its code.", by_code, ("code",))


def _transactions(broker: Broker) -> Slices[list[Family]]:
    now_ms = broker.clock.now_ms()
    coordinator = broker.transactions.coordinator
    pace = Pace(_IDS_AT_ONCE)
    open_count, two_phase_count, oldest_ms = 0, 0, now_ms
    for one in list(coordinator):
        if one.status not in AT_REST:
            open_count, oldest_ms = open_count + 1, min(oldest_ms, one.start_ms)
            two_phase_count += one.is_two_phase
        if pace.is_over():
            yield
    oldest_s = (now_ms - oldest_ms) / 1000
    return [
        _gauge("open_transactions", "Transactions that are neither committed nor aborted.", open_count),
        _gauge("open_two_phase_transactions", "Those of them that no timeout ends (KIP-939).", two_phase_count),
        _gauge("oldest_open_transaction_seconds", "How long the oldest of them has been open.", oldest_s),
        _gauge("transactional_ids", "Transactional ids that the broker remembers.", len(coordinator)),
    ]


def _partitions(broker: Broker) -> Slices[list[Family]]:
    lag: dict[tuple[str, ...], float] = {}
    size: dict[tuple[str, ...], float] = {}
    end: dict[tuple[str, ...], float] = {}
    producers = 0
    pace = Pace()
    for partition in broker.all_partitions():
        labels = (partition.topic, str(partition.index))
        lag[labels] = partition.high_watermark - partition.last_stable_offset
        size[labels] = partition.size_bytes
        end[labels] = partition.log_end_offset
        producers += len(partition.log.producers)
        if pace.is_over(1 + len(partition.segments) // _SEGMENTS_PER_STEP):
            yield
    lag_help = "Records that readers of committed data wait for: high watermark minus last stable offset."
    by = ("topic", "partition")
    held_bytes, forgotten = broker.producer_budget.held_bytes, broker.producer_budget.forgotten_count
    return [
        Family(Kind.GAUGE, "last_stable_offset_lag", lag_help, lag, by),
        Family(Kind.GAUGE, "log_size_bytes", "Bytes of the log on disk.", size, by),
        Family(Kind.GAUGE, "log_end_offset", "Offset that the next record gets.", end, by),
        _gauge("producer_states", "Producers remembered, counted once per partition.", producers),
        _gauge("producer_state_bytes", "About how much memory that takes.", held_bytes),
        Family(Kind.COUNTER, "producers_forgotten", "Idle producers forgotten to save memory.", {(): float(forgotten)}),
    ]


def _others(broker: Broker) -> Slices[list[Family]]:
    coordinator = broker.groups.coordinator
    groups: Counter[tuple[str, ...]] = Counter()
    pace = Pace()
    for group_id in coordinator.group_ids():
        if (group := coordinator.listed_group(group_id)) is not None:
            groups[group.group_type, group.state] += 1
        if pace.is_over():
            yield
    return [
        _gauge("connections", "Connections that are open.", broker.connection_count),
        _gauge("topics", "Topics, internal ones included.", len(broker.topics)),
        Family(Kind.GAUGE, "groups", "Groups, by kind and state.", dict(groups), ("type", "state")),
    ]


def _gauge(name: str, help_text: str, value: float) -> Family:
    return Family(Kind.GAUGE, name, help_text, {(): value})


def _turns(name: str, help_text: str, times: TurnTimes) -> list[Family]:
    bounds = (*map(str, BOUNDS_S), "+Inf")
    counts = {(bound,): float(count) for bound, count in zip(bounds, accumulate(times.counts), strict=True)}
    longest_help = "The longest of them since the metrics were last read."
    return [
        Family(Kind.HISTOGRAM, name, help_text, counts, totals={(): times.total_s}),
        _gauge(f"{name}_max", longest_help, times.take_longest_s()),
    ]


def write_page(families: Sequence[Family]) -> Slices[bytes]:
    """The page in Prometheus's text format."""
    pieces: list[bytes] = []
    pace = Pace()
    for one in families:
        is_long = len(one.values) > ENTRIES_AT_ONCE
        written = [replace(one, values={})] if is_long else [one]
        pieces.append(write_families(written, _PREFIX))
        if is_long:
            for labels, value in one.values.items():
                pieces.append(write_sample(one, labels, value, _PREFIX))
                if pace.is_over():
                    yield
        elif pace.is_over(_STEPS_OF_A_FAMILY):
            yield
    return b"".join(pieces)


def _load_library() -> None:
    import prometheus_client.core
    import prometheus_client.exposition  # noqa: F401


# -- HTTP --------------------------------------------------------------------------------------------------------------


async def serve_metrics(broker: Broker, port: int, watch: LoopWatch | None = None) -> asyncio.Server:
    """Answer `GET /metrics` on the loopback interface. To be called in the broker's event loop."""
    one_at_a_time = asyncio.Lock()  # the numbers and the page of thousands of partitions take megabytes

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            async with one_at_a_time:
                response = await _response(head, broker, watch)
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                writer.write(response)
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            _LOG.debug("somebody asked for the metrics and went away")
        except Exception:
            _LOG.exception("the metrics could not be told")
            broker.metrics.unexpected_errors += 1
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, _HOST, port, limit=_REQUEST_BYTES_MAX)
    except OSError as error:
        raise cannot_listen(_HOST, port, error) from error
    _LOG.info("metrics for Prometheus: http://%s:%d/metrics", *server.sockets[0].getsockname()[:2])
    return server


async def _response(head: bytes, broker: Broker, watch: LoopWatch | None) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path not in (b"/metrics", b"/"):
        return _http("404 Not Found", "text/plain", b"Ask for /metrics.\n")
    if method not in (b"GET", b"HEAD"):
        return _http("405 Method Not Allowed", "text/plain", b"Metrics can only be read.\n")
    await broker.durability.compute_aside(_load_library)
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    families = await finish(read_numbers(broker, watch), broker.lane)
    body = await finish(write_page(families), broker.lane)
    return _http("200 OK", CONTENT_TYPE_LATEST, body, is_head=method == b"HEAD")


def _http(status: str, content_type: str, body: bytes, *, is_head: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
