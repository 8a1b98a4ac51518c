"""The registry counts what it is told, and its page is what Prometheus' own parser reads."""

from __future__ import annotations

import http.client
import logging
import os
import subprocess
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel.errors import ConfigError
from semel.metrics.families import write_families
from semel.metrics.page import parse_address
from semel.metrics.registry import Registry


def test_a_page_says_what_was_counted_in_every_kind_of_metric() -> None:
    """Labels with every awkward character, a histogram with its bounds, and a gauge that went down again."""
    registry = Registry()
    sent = registry.counter("sent", "Letters.", ["to"])
    level = registry.gauge("level", "Water.", [])
    took = registry.histogram("took_seconds", "Time.", ["to"], [0.1, 1.0])
    odd = 'a\\b"c\nd'
    sent.add(odd)
    sent.add(odd, amount=2)
    level.set(value=7)
    level.set(value=3)
    for value in (0.1, 0.5, 20.0):
        took.observe("Rome", value=value)
    page = write_families(registry.families(), "semel_").decode()
    samples = {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["semel_sent_total", (odd,)] == 3
    assert samples["semel_level", ()] == 3
    buckets = [samples["semel_took_seconds_bucket", (bound, "Rome")] for bound in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert samples["semel_took_seconds_sum", ("Rome",)] == pytest.approx(20.6)
    registry.clear()
    assert b"Rome" not in write_families(registry.families())


def test_threads_lose_no_count() -> None:
    """Sessions of one program run in threads of their own."""
    metric = Registry().counter("sent", "Letters.", ["to"])
    threads = [threading.Thread(target=lambda: [metric.add("Rome") for _ in range(2_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metric.family().values == {("Rome",): 8_000}


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_a_served_page_is_the_text_and_nothing_else_is_served() -> None:
    """On the loopback interface; a second one on the port is refused with what to do."""
    with semel.metrics.serve("127.0.0.1:0") as server:
        assert get(server.address, "/metrics") == (200, semel.metrics.text())
        assert get(server.address, "/etc/passwd")[0] == 404
        with pytest.raises(ConfigError, match="give each process on a machine its own port"):
            semel.metrics.serve(server.address)


def test_a_programs_own_page_can_have_them() -> None:
    """A service that has a page for Prometheus needs no second one."""
    registry = CollectorRegistry()
    registry.register(semel.metrics.collector())
    assert b"semel_relay_transactions_total" in generate_latest(registry)


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:", "127.0.0.1:99999", ":x", ":9105"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    """With an example of a right one."""
    with pytest.raises(ConfigError, match=r"HOST:PORT, such as 127\.0\.0\.1:9105"):
        parse_address(text)


def test_an_address_that_is_taken_stops_no_pipeline() -> None:
    """SEMEL_METRICS is often the same for several processes of a machine: the second one says so and works on."""
    program = (
        "import logging, semel\n"
        "from semel.metrics.parts import SINK\n"
        "from semel.observe import Pipeline\n"
        "logging.basicConfig()\n"
        "for _ in range(2): Pipeline(SINK, 'orders')\n"
    )
    with semel.metrics.serve("127.0.0.1:0") as server:
        env = {**os.environ, "SEMEL_METRICS": server.address}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.count("Metrics cannot be served") == 1
    assert logging.getLogger("semel").propagate


def test_loading_the_metrics_loads_no_server_and_no_library() -> None:
    """A pipeline that nobody scrapes pays nothing for Prometheus' library or an HTTP server."""
    code = (
        "import sys, semel.observe, semel.metrics\n"
        "print(sorted({'prometheus_client', 'http.server', 'opentelemetry'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
