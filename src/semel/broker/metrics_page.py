"""The broker's numbers for Prometheus, over HTTP on the loopback interface.

Read in the broker's own thread at the moment they are asked for: nothing is counted twice, and nothing is locked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from semel.broker.sockets import cannot_listen
from semel.core.transaction_metadata import AT_REST

if TYPE_CHECKING:
    from semel.broker.state import Broker

_LOG: Final = logging.getLogger("semel.broker")

_HOST: Final = "127.0.0.1"
_REQUEST_BYTES_MAX: Final = 16 * 1024
_REQUEST_TIMEOUT_S: Final = 5.0
_PREFIX: Final = "semel_broker_"

# Attributes of `Metrics`, and what they count.
_COUNTS: Final[Mapping[str, str]] = {
    "connections_opened": "Connections that clients have made.",
    "refused_connections": "Connections that were closed for what the client sent or was.",
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


class BrokerCollector:
    """A collector for a registry of `prometheus_client`, to be asked in the broker's thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Any]:
        yield from self._counters()
        yield from self._transactions()
        yield from self._partitions()
        yield from self._others()

    def _counters(self) -> Iterator[Any]:
        metrics = self._broker.metrics
        for name, help_text in _COUNTS.items():
            yield _counter(name, help_text, {(): getattr(metrics, name)})
        by_api = {(api,): count for api, count in metrics.requests.items()}
        yield _counter("requests", "Requests, by API.", by_api, "api")
        by_code = {(code,): count for code, count in metrics.refusals.items()}
        yield _counter("refusals", "Answers with an error, by its code.", by_code, "code")

    def _transactions(self) -> Iterator[Any]:
        now_ms = self._broker.clock.now_ms()
        coordinator = self._broker.transactions.coordinator
        started_ms = [one.start_ms for one in coordinator if one.status not in AT_REST]
        oldest_ms = max((now_ms - one for one in started_ms), default=0)
        yield _gauge("open_transactions", "Transactions that are neither committed nor aborted.", len(started_ms))
        yield _gauge(
            "oldest_open_transaction_seconds", "How long the oldest of them has been open.", max(0, oldest_ms) / 1000
        )
        yield _gauge("transactional_ids", "Transactional ids that the broker remembers.", len(coordinator))

    def _partitions(self) -> Iterator[Any]:
        lag: dict[tuple[str, ...], float] = {}
        size: dict[tuple[str, ...], float] = {}
        end: dict[tuple[str, ...], float] = {}
        producers = producer_bytes = 0
        for partition in self._broker.all_partitions():
            labels = (partition.topic, str(partition.index))
            lag[labels] = partition.high_watermark - partition.last_stable_offset
            size[labels] = partition.size_bytes
            end[labels] = partition.log_end_offset
            producers += len(partition.log.producers)
            producer_bytes += partition.log.producers.memory_bytes()
        lag_help = "Records that readers of committed data wait for: high watermark minus last stable offset."
        yield _gauge_by("last_stable_offset_lag", lag_help, lag, "topic", "partition")
        yield _gauge_by("log_size_bytes", "Bytes of the log on disk.", size, "topic", "partition")
        yield _gauge_by("log_end_offset", "Offset that the next record gets.", end, "topic", "partition")
        yield _gauge("producer_states", "Producers remembered, counted once per partition.", producers)
        yield _gauge("producer_state_bytes", "About how much memory that takes.", producer_bytes)

    def _others(self) -> Iterator[Any]:
        yield _gauge("connections", "Connections that are open.", self._broker.connection_count)
        yield _gauge("topics", "Topics, internal ones included.", len(self._broker.topics))
        groups = Counter((one.group_type, one.state) for one in self._broker.groups.coordinator.listed_groups())
        yield _gauge_by("groups", "Groups, by kind and state.", dict(groups), "type", "state")


def _counter(name: str, help_text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(_PREFIX + name, help_text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _gauge(name: str, help_text: str, value: float) -> Any:
    return _gauge_by(name, help_text, {(): value})


def _gauge_by(name: str, help_text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(_PREFIX + name, help_text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


# -- HTTP --------------------------------------------------------------------------------------------------------------


async def serve_metrics(broker: Broker, port: int) -> asyncio.Server:
    """Answer `GET /metrics` on the loopback interface. To be called in the broker's event loop."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(BrokerCollector(broker))  # type: ignore[arg-type]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, registry))
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


def _response(head: bytes, registry: Any) -> bytes:
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path not in (b"/metrics", b"/"):
        return _http("404 Not Found", "text/plain", b"Ask for /metrics.\n")
    if method not in (b"GET", b"HEAD"):
        return _http("405 Method Not Allowed", "text/plain", b"Metrics can only be read.\n")
    body = generate_latest(registry)
    return _http("200 OK", CONTENT_TYPE_LATEST, body, is_head=method == b"HEAD")


def _http(status: str, content_type: str, body: bytes, *, is_head: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
