"""What a client is told to do: typed values with the defaults and the rules that one of them alone can break.

`settings.py` makes them from Kafka's own names. No `repr` shows a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from semel.client.group_config import GroupConfig
from semel.errors import ConfigError

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Isolation = Literal["read_committed", "read_uncommitted"]
OffsetReset = Literal["error", "earliest", "latest"]
Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]

SASL_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
INT32_MAX: Final = 2**31 - 1
LEVELS: Final[Mapping[str, tuple[int, int]]] = {"gzip": (1, 9), "lz4": (1, 12), "zstd": (1, 22)}


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """How to reach a listener: TLS or not, and who we are."""

    protocol: Protocol = "PLAINTEXT"
    ca_location: str | None = None
    """PEM file of the authorities to trust; without it, the system's."""
    certificate_location: str | None = None
    key_location: str | None = None
    """Without it the key is looked for in `certificate_location`."""
    key_password: str | None = field(default=None, repr=False)
    check_hostname: bool = True
    verify_certificate: bool = True
    sasl_mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def uses_tls(self) -> bool:
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    def __post_init__(self) -> None:
        if self.key_location is not None and self.certificate_location is None:
            raise ConfigError("ssl.key.location is set without its certificate: add ssl.certificate.location.")
        files = self.ca_location or self.certificate_location
        if files and not self.uses_tls:
            raise ConfigError(
                f"Certificates are set, yet security.protocol={self.protocol} does not encrypt: "
                f"write security.protocol={'SASL_SSL' if self.uses_sasl else 'SSL'}, or leave the ssl.* files out."
            )
        if self.uses_sasl:
            self._check_sasl()
        elif self.sasl_mechanism or self.username or self.password:
            raise ConfigError(
                f"SASL credentials are set, yet security.protocol={self.protocol} does not log in: "
                f"write security.protocol={'SASL_SSL' if self.uses_tls else 'SASL_PLAINTEXT or SASL_SSL'}."
            )

    def _check_sasl(self) -> None:
        if self.sasl_mechanism not in SASL_MECHANISMS:
            given = f"is {self.sasl_mechanism}" if self.sasl_mechanism else "is missing"
            raise ConfigError(f"sasl.mechanism {given}: write one of {', '.join(SASL_MECHANISMS)}.")
        for name, value in (("sasl.username", self.username), ("sasl.password", self.password)):
            if not value:
                raise ConfigError(f"{name} is missing: security.protocol={self.protocol} needs it to log in.")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What every connection needs, whoever uses it.

    >>> ClientConfig(bootstrap=(("127.0.0.1", 9092),)).client_id
    'semel'
    """

    bootstrap: tuple[tuple[str, int], ...]
    client_id: str = "semel"
    security: SecurityConfig = field(default_factory=SecurityConfig)
    request_timeout_ms: int = 30_000
    connection_setup_timeout_ms: int = 10_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
    api_timeout_ms: int = 60_000
    """How long one call goes on retrying before it gives up."""
    metadata_max_age_ms: int = 300_000
    receive_message_bytes_max: int = 100_000_000
    """A longer frame is refused before memory is set aside for it."""

    def __post_init__(self) -> None:
        if self.retry_backoff_max_ms < self.retry_backoff_ms:
            raise ConfigError("retry.backoff.max.ms is below retry.backoff.ms: raise the former or lower the latter.")


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """How records are written. The defaults keep order and write once, and fit the broker's default limits."""

    transactional_id: str | None = None
    transaction_timeout_ms: int = 60_000
    acks: int = -1
    idempotent: bool = True
    compression_type: Compression = "none"
    compression_level: int | None = None
    batch_bytes: int = 1_000_000
    """Below the broker's default `message.max.bytes` of 1,048,588, with room for the batch header."""
    linger_ms: int = 5
    """How long a single record may wait for others. In a transaction records leave with a full batch or `commit`."""
    in_flight_max: int = 5
    delivery_timeout_ms: int = 120_000
    request_bytes_max: int = 1_048_576
    partitioner: str = "murmur2"

    def __post_init__(self) -> None:
        if self.transactional_id is not None and not self.idempotent:
            raise ConfigError("transactional.id needs idempotence: remove enable.idempotence=false.")
        if self.idempotent and self.acks != -1:
            what = "transactional.id" if self.transactional_id is not None else "enable.idempotence=true"
            raise ConfigError(f"acks={self.acks} contradicts {what}, which needs every replica: write acks=all.")
        if self.idempotent and not 1 <= self.in_flight_max <= 5:
            raise ConfigError(
                f"max.in.flight.requests.per.connection={self.in_flight_max} would lose the order of retries: "
                "brokers remember five batches, so write 1 to 5."
            )
        if self.batch_bytes > self.request_bytes_max:
            raise ConfigError(
                f"batch.size={self.batch_bytes} does not fit into max.request.size={self.request_bytes_max}: "
                "lower batch.size or raise max.request.size."
            )
        if self.compression_level is not None:
            self._check_level(self.compression_level)

    def _check_level(self, level: int) -> None:
        if self.compression_type not in LEVELS:
            raise ConfigError(f"compression.type={self.compression_type} has no levels: remove compression.level.")
        low, high = LEVELS[self.compression_type]
        if not low <= level <= high:
            raise ConfigError(
                f"compression.level={level} is out of range: {self.compression_type} has {low} to {high}."
            )


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How records are read. Unlike Kafka's own clients: committed records only, and no silent jump to the end."""

    isolation: Isolation = "read_committed"
    fetch_bytes_max: int = 52_428_800
    partition_bytes_max: int = 8_388_608
    """Eight times Kafka's default: Arrow tables are worth their overhead only when they are large."""
    decompressed_bytes_max: int = 134_217_728
    """What one batch may take when it is unpacked. A larger one is refused."""
    fetch_bytes_min: int = 1
    wait_ms_max: int = 500
    check_crcs: bool = True
    auto_offset_reset: OffsetReset = "error"
    client_rack: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that one mapping of settings says."""

    client: ClientConfig
    producer: ProducerConfig
    fetch: FetchConfig
    group: GroupConfig = field(default_factory=GroupConfig)
