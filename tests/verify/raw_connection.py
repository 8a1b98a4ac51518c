"""A connection for single requests under a chosen client id: what one client sees of a broker or of a proxy."""

from __future__ import annotations

import socket
import time
from typing import Any

from semel.records.reference import Record, encode_batch
from semel.testing.exchange import parse_bootstrap
from semel.testing.proxy import read_frame
from semel.verify.simulated_network import make_request
from semel.wire import Api
from semel.wire.messages import decode_response, encode_request, response_type_for


class Closed(Exception):
    """The other side has closed the connection."""


class RawConnection:
    """Sends and receives one after the other. A read that takes too long raises TimeoutError."""

    def __init__(self, bootstrap: str, client_id: str = "raw", *, timeout_s: float = 10.0) -> None:
        (address,) = parse_bootstrap(bootstrap)
        self._socket = socket.create_connection(address, timeout=timeout_s)
        self._client_id = client_id
        self._sent = 0
        self._waiting: list[Any] = []

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, api: Api, version: int, **fields: Any) -> None:
        request = make_request(api, version, fields)
        self._sent += 1
        self._waiting.append(response_type_for(request))
        self._socket.sendall(b"".join(encode_request(request, self._sent, self._client_id)))

    def receive(self, *, timeout_s: float = 10.0) -> Any:
        """The answer to the oldest request that has none."""
        self._socket.settimeout(timeout_s)
        try:
            frame = read_frame(self._socket)
        except ConnectionError as error:
            raise Closed from error
        if frame is None:
            raise Closed
        return decode_response(self._waiting.pop(0), frame)

    def call(self, api: Api, version: int, **fields: Any) -> Any:
        self.send(api, version, **fields)
        return self.receive()

    # Requests with an effect that can be seen.

    def send_create(self, topic: str) -> None:
        one = {"name": topic, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
        self.send(Api.CREATE_TOPICS, 5, topics=[one], timeout=5_000, validate_only=False)

    def send_record(self, topic: str, value: str, *, producer_id: int = -1) -> None:
        """A batch of one record; with a producer id it carries epoch 0 and sequence 0."""
        first = 0 if producer_id >= 0 else -1
        batch = encode_batch(
            [Record(0, time.time_ns() // 1_000_000, None, value.encode())],
            producer_id=producer_id,
            producer_epoch=first,
            base_sequence=first,
        )
        data = [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}]
        self.send(Api.PRODUCE, 9, transactional_id=None, acks=-1, timeout=5_000, topic_data=data)
