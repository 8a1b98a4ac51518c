"""A broker with everything that the page shows, the page itself on a real socket, and requests to it."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import uvicorn
from inspect_scene import Scene

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.records.reference import Record, encode_batch
from semel.spark.ledger import Entry
from semel.web.serve import listen, make_server
from semel.web.site import SiteSettings
from semel.wire import Api, ErrorCode

HOSTILE: Final = b"\x1b[2J<script>window.hacked=1</script>\xff\x00\"'>" + "<img src=x onerror=hacked()>\u202e".encode()
HOSTILE_NAME: Final = "</td><script>window.hacked=1</script>&\"'\n\x1b[2J\u202eöß/../?a=b#c"
LEDGER: Final = "semel-ledger"


def address(path: str, query: Mapping[str, object]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Page:
    """A running page."""

    port: int
    settings: SiteSettings
    cookies: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, headers: Mapping[str, str] | None = None, **query: object) -> Answer:
        return self.request("GET", address(path, query), headers=headers)

    def post(self, path: str, form: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Answer:
        content_type = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.request("POST", path, urlencode(form), {**content_type, **(headers or {})})

    def request(
        self, method: str, path: str, body: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = dict(headers or {})
        if self.cookies and "Cookie" not in sent:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def settled(self, path: str, **query: object) -> Answer:
        """What the page shows when it has looked."""
        deadline = time.monotonic() + 60
        while "data-pending" in (answer := self.get(address(path, query))).text:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.05)
        return answer

    def until(self, is_there: Callable[[str], bool], path: str, **query: object) -> Answer:
        """The page, when it shows something."""
        deadline = time.monotonic() + 60
        while not is_there((answer := self.settled(path, **query)).text):
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.2)
        return answer


def form_of(text: str) -> dict[str, str]:
    """The hidden fields of a page's form."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text))


@contextmanager
def running_page(client_settings: Mapping[str, object], **more: Any) -> Iterator[Page]:
    """The page in a thread, on a free port."""
    given = {"default.api.timeout.ms": 3_000, "socket.connection.setup.timeout.ms": 1_000, **client_settings}
    settings = replace(SiteSettings(given), **more)
    server = make_server(settings)
    with listen(settings) as listener:
        thread = threading.Thread(target=_run, args=(server, listener))
        thread.start()
        try:
            yield Page(listener.getsockname()[1], settings)
        finally:
            server.should_exit = True
            thread.join()


def _run(server: uvicorn.Server, listener: Any) -> None:
    server.run(sockets=[listener])


# -- what is in the cluster ----------------------------------------------------------------------------------------


def fill_orders(place: Scene) -> Producer:
    """Committed, aborted, plain and open records in `orders:0`; returns the producer of the open transaction."""
    place.admin.create_topics("orders", partitions=3)
    with place.producer("order-writer") as producer:
        with producer.transaction():
            producer.send("orders", b"committed one", key=b"a", partition=0)
        producer.begin()
        producer.send("orders", b"aborted one", key=b"b", partition=0)
        producer.flush()
        producer.abort()
    with place.producer() as producer:
        producer.send("orders", b"plain one", partition=0)
    opened = Producer({**place.settings, "transactional.id": "open-writer", "transaction.timeout.ms": 600_000})
    opened.begin()
    opened.send("orders", b"open one", key=b"c", partition=0, headers=[("trace", b"1")])
    opened.flush()
    with place.producer() as producer:
        producer.send("orders", b"behind it", partition=0)
    place.admin.commit_offsets("billing", {("orders", 0): 1})
    return opened


def fill_ledger(place: Scene, name: str = "orders-enriched", batches: int = 12) -> None:
    """A pipeline's ledger, as the sink writes it."""
    if LEDGER not in place.admin.list_topics():
        place.admin.create_topics(LEDGER, partitions=1)
    now_ms = int(time.time() * 1000)
    with place.producer(f"semel-{name}") as producer:
        for number in range(batches):
            with producer.transaction():
                entry = Entry(
                    query="5f0c2f8e-query",
                    batch=number,
                    outputs=["out"],
                    pipeline=name,
                    records=200 + 37 * number % 400,
                    at_ms=now_ms - (batches - number) * 5_000,
                    producer_id=producer.identity.producer_id,
                    producer_epoch=producer.identity.producer_epoch,
                )
                producer.send(LEDGER, entry.encode(), key=name.encode(), partition=0)
    place.admin.commit_offsets(name, {("orders", 0): 3})


def write_report(folder: Path, name: str, *, is_clean: bool, text: str = "a cycle") -> None:
    """What `semel verify` leaves in a run's folder."""
    run = folder / name
    run.mkdir(parents=True)
    witness = {"lines": [f"t1 wrote {text}"], "rows": []}
    anomaly = {"name": "lost", "definition": text, "count": 0 if is_clean else 3, "tolerated": None}
    verdict = {
        "is_clean": is_clean,
        "checked": {"records": 12_345},
        "faults": {"process kills": 3},
        "anomalies": [] if is_clean else [{**anomaly, "witnesses": [witness]}],
    }
    (run / "verdict.json").write_text(json.dumps(verdict))
    (run / "run.json").write_text(json.dumps({"workload": "copier", "client": text, "target": "embedded", "seed": 7}))
    style = "<style>body { color: green }</style>"
    (run / "report.html").write_text(f'<!doctype html>{style}<p id="report" style="margin: 0">{text}</p>')


def open_many(bootstrap: str, topic: str, *, partitions: int, transactions: int) -> None:
    """So many transactions that stay open, one after another in the partitions of a topic, and a group of its name.

    With raw requests: a producer for each would need thousands of connections.
    """
    settings = parse_config({"bootstrap.servers": bootstrap, "default.api.timeout.ms": 60_000})
    with Cluster(settings.client) as cluster:
        admin = Admin(cluster)
        admin.create_topics(topic, partitions=partitions)
        admin.commit_offsets(topic, {(topic, number): 0 for number in range(partitions)})
        node = cluster.leader(topic, 0).node
        for start in range(0, transactions, 500):
            _open_some(cluster, node, topic, partitions, range(start, min(start + 500, transactions)))


def _open_some(cluster: Cluster, node: int, topic: str, partitions: int, numbers: range) -> None:
    identities: dict[int, tuple[int, int]] = {}
    begun = {number: cluster.submit(node, Api.INIT_PRODUCER_ID, **_init(number)) for number in numbers}
    for number, pending in begun.items():
        cluster.wait_any([pending])
        answer = pending.result()
        assert answer.error_code is ErrorCode.none, answer
        identities[number] = (answer.producer_id, answer.producer_epoch)
    for api, make in ((Api.ADD_PARTITIONS_TO_TXN, _add), (Api.PRODUCE, _produce)):
        sent = [
            cluster.submit(node, api, highest=_HIGHEST[api], **make(number, topic, number % partitions, *identity))
            for number, identity in identities.items()
        ]
        for pending in sent:
            cluster.wait_any([pending])
            assert "error_code=<ErrorCode.none" in repr(pending.result()), pending.result()


_HIGHEST: Final = {Api.ADD_PARTITIONS_TO_TXN: 3, Api.PRODUCE: 11}


def _init(number: int) -> dict[str, Any]:
    return {
        "transactional_id": f"writer-{number:04}",
        "transaction_timeout": 900_000,
        "producer_id": -1,
        "producer_epoch": -1,
    }


def _add(number: int, topic: str, partition: int, producer_id: int, epoch: int) -> dict[str, Any]:
    return {
        "v3_and_below_transactional_id": f"writer-{number:04}",
        "v3_and_below_producer_id": producer_id,
        "v3_and_below_producer_epoch": epoch,
        "v3_and_below_topics": [{"name": topic, "partitions": [partition]}],
    }


def _produce(number: int, topic: str, partition: int, producer_id: int, epoch: int) -> dict[str, Any]:
    batch = encode_batch(
        [Record(0, int(time.time() * 1000), None, b"open")],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=0,
        transactional=True,
    )
    return {
        "transactional_id": f"writer-{number:04}",
        "acks": -1,
        "timeout": 60_000,
        "topic_data": [{"name": topic, "partition_data": [{"index": partition, "records": batch}]}],
    }
