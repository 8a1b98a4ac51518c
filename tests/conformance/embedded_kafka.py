"""The embedded broker as a target of the conformance tests."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from semel.broker.process import Broker
from semel.testing.apache_kafka import quick_settings
from semel.testing.embedded import EmbeddedBroker
from semel.testing.embedded_security import listeners_for
from semel.testing.security import Protocol, Security

_PLAINTEXT = Security()


class EmbeddedKafka:
    """One embedded broker with the face that the tests know from `ApacheKafka`.

    With plaintext alone it is the process that users start; with more listeners it runs inside the test, which then
    knows all of its ports.
    """

    def __init__(
        self,
        *,
        transaction_version: int,
        security: Security = _PLAINTEXT,
        config: Mapping[str, str] | None = None,
        has_metrics_page: bool = False,
        syncs: bool = True,
    ) -> None:
        self._security = security
        own = {"node.id": "0", "transaction.version": str(transaction_version)}
        self._config = {**quick_settings(1), **own, **(config or {})}
        self._syncs = syncs
        self._stack = ExitStack()
        self._addresses: dict[Protocol, str] = {}
        self._process: Broker | None = None
        self.metrics_port = _free_port() if has_metrics_page else None

    def __enter__(self) -> EmbeddedKafka:
        if self._security.protocols == ("PLAINTEXT",):
            broker = Broker(
                config=self._config, metrics_port=self.metrics_port, fsync="commit" if self._syncs else "never"
            )
            self._process = self._stack.enter_context(broker)
            self._addresses["PLAINTEXT"] = self._process.bootstrap
            return self
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-conformance-"))
        broker = EmbeddedBroker(
            config=self._config,
            listeners=listeners_for(self._security, Path(folder)),
            plain_users=self._security.plain,
            scram_users=self._security.scram,
        )
        ports = self._stack.enter_context(broker).ports
        for protocol, port in zip(self._security.protocols, ports, strict=True):
            self._addresses[protocol] = f"127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def restart(self, *, kill: bool) -> None:
        """End it, as a crash would or in order, and start it again at the same address with the same data."""
        assert self._process is not None
        if kill:
            self._process.kill()
        self._process.restart()

    @property
    def bootstrap(self) -> str:
        return self.bootstrap_for("PLAINTEXT")

    def bootstrap_for(self, protocol: Protocol) -> str:
        return self._addresses[protocol]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
