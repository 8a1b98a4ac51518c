"""Numbers of this process's sinks, sessions and relays for Prometheus.

Set SEMEL_METRICS=127.0.0.1:9105 and the first pipeline of a process serves them, or call `serve`. A program that has a
page of its own for Prometheus registers `collector()` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from semel.metrics.families import Collected, write_families
from semel.metrics.parts import PREFIX, REGISTRY

if TYPE_CHECKING:
    from semel.metrics.page import MetricsServer

__all__ = ["collector", "serve", "text"]


def serve(address: str = "127.0.0.1:9105") -> MetricsServer:
    """Serve the metrics in a thread of their own; port 0 takes any that is free.

    >>> with serve("127.0.0.1:0") as server:
    ...     print(server.address.rpartition(":")[0])
    127.0.0.1
    """
    from semel.metrics.page import MetricsServer, parse_address

    return MetricsServer(*parse_address(address))


def text() -> str:
    """The page as it is now.

    >>> "semel_sink_transactions_total" in text()
    True
    """
    return write_families(REGISTRY.families(), PREFIX).decode()


class _Collector:
    def collect(self) -> Iterator[Any]:
        return Collected(REGISTRY.families(), PREFIX).collect()


def collector() -> Any:
    """For a registry of `prometheus_client`.

    >>> from prometheus_client import CollectorRegistry
    >>> CollectorRegistry().register(collector())
    """
    return _Collector()
