"""Kafka's own configuration names, read into typed values.

`SETTINGS` is the one table: every name that has a meaning here, in Java's and librdkafka's spelling, with the field it
fills and the parser that checks it. `IGNORED` holds the names that Kafka users carry along and that change nothing,
each with its reason. Any other name is a mistake and is answered with the closest known one.

No message shows a password.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from semel.client.config import (
    INT32_MAX,
    LEVELS,
    SASL_MECHANISMS,
    ClientConfig,
    Config,
    FetchConfig,
    ProducerConfig,
    SecurityConfig,
)
from semel.client.group_config import GroupConfig, parse_assignors
from semel.errors import ConfigError

# Parsers: each takes the name as written and the value, and returns the field's value or raises.

_TEXT_BYTES_MAX: Final = 32_767

Parser = Callable[[str, object], Any]


def _whole(low: int, high: int = INT32_MAX) -> Parser:
    def parse(name: str, value: object) -> int:
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ConfigError(f"{name}={value!r} is not a whole number: write {low} to {high}.")
        if not low <= int(text) <= high:
            raise ConfigError(f"{name}={text} is out of range: write {low} to {high}.")
        return int(text)

    return parse


def _truth(name: str, value: object) -> bool:
    text = str(value).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name}={value!r} is neither true nor false: write one of them.")
    return text == "true"


def _choice(choices: Mapping[str, object]) -> Parser:
    """One of the keys in any case; several spellings may share a value."""

    def parse(name: str, value: object) -> object:
        text = str(value).strip()
        for spelling, meaning in choices.items():
            if spelling.lower() == text.lower():
                return meaning
        raise ConfigError(f"{name}={text!r} is not supported: write {' or '.join(repr(c) for c in choices)}.")

    return parse


def _same(*names: str) -> Parser:
    return _choice({name: name for name in names})


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} must be text that is not empty: write a value or leave it out.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{name} has a character that UTF-8 cannot carry (half of a surrogate pair).") from None
    if size > _TEXT_BYTES_MAX:
        raise ConfigError(
            f"{name} takes {size} bytes, and Kafka's protocol has room for {_TEXT_BYTES_MAX}: shorten it."
        )
    return value


def _path(name: str, value: object) -> str:
    return _text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _ca_path(name: str, value: object) -> str | None:
    return None if value == "probe" else _path(name, value)  # librdkafka's word for "find the system's"


def _level(name: str, value: object) -> int | None:
    level = _whole(-1, 22)(name, value)
    return None if level == -1 else level  # librdkafka's -1: the codec's own default


def _only(accepted: bool, advice: str) -> Parser:
    """A switch whose other position would promise something that does not happen."""

    def parse(name: str, value: object) -> None:
        if _truth(name, value) is not accepted:
            raise ConfigError(f"{name}={str(value).lower()} is not supported: {advice}.")

    return parse


def _refused(advice: str) -> Parser:
    def parse(name: str, value: object) -> None:
        raise ConfigError(f"{name} is not supported: {advice}.")

    return parse


def _retries(name: str, value: object) -> None:
    if _whole(0)(name, value) == 0:
        raise ConfigError(f"{name}=0 is not supported: leave it out, and bound the retries with delivery.timeout.ms.")


def _mechanism(name: str, value: object) -> str:
    text = str(value).strip().upper()
    if text not in SASL_MECHANISMS:
        raise ConfigError(f"{name}={text} is not supported: write one of {', '.join(SASL_MECHANISMS)}.")
    return text


_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[^\[\]:/@\s]+)):(?P<port>[0-9]{1,5})")


def parse_bootstrap(name: str, value: object) -> tuple[tuple[str, int], ...]:
    """Host and port pairs of `bootstrap.servers`, without repeats.

    >>> parse_bootstrap("bootstrap.servers", "a:9092, [::1]:9093")
    (('a', 9092), ('::1', 9093))
    """
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"{name} must be text: write host:port, several separated by commas.")
    found = [_address(name, entry.strip()) for entry in entries if entry.strip()]
    if not found:
        raise ConfigError(f"{name} is empty: write host:port, several separated by commas.")
    return tuple(dict.fromkeys(found))


def _address(name: str, entry: str) -> tuple[str, int]:
    if "@" in entry:  # what stands before it may be a password: not repeated
        raise ConfigError(f"{name} holds an '@': write host:port, and the login as sasl.username and sasl.password.")
    if "://" in entry:
        raise ConfigError(f"{name} entry {entry!r} has a scheme: write host:port, and the scheme as security.protocol.")
    if match := _ADDRESS.fullmatch(entry):
        port = int(match["port"])
        if not 1 <= port <= 65_535:
            raise ConfigError(f"{name} entry {entry!r} has no valid port: write 1 to 65535.")
        return match["ipv6"] or match["name"], port
    if not entry.startswith("[") and entry.count(":") > 1:
        raise ConfigError(f"{name} entry {entry!r} looks like IPv6: write it in brackets, such as [::1]:9092.")
    if ":" not in entry or entry.endswith((":", "]")):
        host = entry.rstrip(":")
        raise ConfigError(f"{name} entry {entry!r} has no port: write host:port, such as {host}:9092.")
    raise ConfigError(f"{name} entry {entry!r} is not an address: write host:port.")


_JAAS = re.compile(r"\s*(?P<module>[\w.$]+)\s+(?:required|requisite|sufficient|optional)\b(?P<options>.*);\s*", re.S)
_JAAS_OPTION = re.compile(r"""\s*([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s"';]+))""", re.S)


def _jaas(name: str, value: object) -> dict[str, str]:
    """User, password and module of Java's `sasl.jaas.config`; never repeats any of it in a message."""
    match = _JAAS.fullmatch(value) if isinstance(value, str) else None
    module = match["module"].rpartition(".")[2] if match else ""
    if match is None or module not in ("PlainLoginModule", "ScramLoginModule"):
        raise ConfigError(
            f"{name} is not understood: write a PlainLoginModule or ScramLoginModule line that ends in ';', "
            "or use sasl.mechanism, sasl.username and sasl.password."
        )
    options, at = {}, 0
    while option := _JAAS_OPTION.match(match["options"], at):
        key, double, single, bare = option.groups()
        quoted = double if double is not None else single
        options[key] = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.S)
        at = option.end()
    if match["options"][at:].strip() or not {"username", "password"} <= options.keys():
        raise ConfigError(f'{name} is not understood: it must hold username="..." password="..." and end in ";".')
    if options.get("tokenauth", "").lower() == "true":
        raise ConfigError(f"{name} asks for a delegation token, which is not supported: write a user and a password.")
    return {"module": module, "username": options["username"], "password": options["password"]}


Owner = Literal["client", "security", "producer", "fetch", "group", "checked"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table: Kafka's names for one field, the first being the usual one."""

    names: tuple[str, ...]
    owner: Owner
    """The dataclass that has the field; `checked` settings are looked at and hold nothing."""
    field: str
    parse: Parser


def _row(names: str, owner: Owner, field: str, parse: Parser) -> Setting:
    return Setting(tuple(names.split()), owner, field, parse)


_MS: Final = _whole(1)
_INLINE: Final = _refused("write the PEM text to a file and name it in ssl.ca.location, or ssl.certificate.location")
_STORE_TYPE: Final = _same("PEM", "JKS", "PKCS12")
_HOSTNAME_CHECK: Final = _choice({"https": True, "": False, "none": False})
_PROTOCOLS: Final = _same("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_RESETS: Final = {"earliest": "earliest", "latest": "latest", "none": "error", "error": "error"} | {
    "smallest": "earliest", "beginning": "earliest", "largest": "latest", "end": "latest"
}  # fmt: skip
# Java's default, with keyless records spread: librdkafka has a second name for it.
_PARTITIONERS: Final = {"murmur2": "murmur2", "murmur2_random": "murmur2"}

SETTINGS: Final[tuple[Setting, ...]] = (
    _row("bootstrap.servers metadata.broker.list bootstrap", "client", "bootstrap", parse_bootstrap),
    _row("client.id", "client", "client_id", _text),
    _row("request.timeout.ms socket.timeout.ms", "client", "request_timeout_ms", _MS),
    _row("socket.connection.setup.timeout.ms", "client", "connection_setup_timeout_ms", _MS),
    _row("retry.backoff.ms", "client", "retry_backoff_ms", _MS),
    _row("retry.backoff.max.ms", "client", "retry_backoff_max_ms", _MS),
    _row("default.api.timeout.ms max.block.ms", "client", "api_timeout_ms", _MS),
    _row("metadata.max.age.ms", "client", "metadata_max_age_ms", _MS),
    _row("receive.message.max.bytes", "client", "receive_message_bytes_max", _whole(1_000)),
    _row("security.protocol", "security", "protocol", _PROTOCOLS),
    _row("ssl.ca.location", "security", "ca_location", _ca_path),
    _row("ssl.certificate.location", "security", "certificate_location", _path),
    _row("ssl.key.location", "security", "key_location", _path),
    _row("ssl.key.password", "security", "key_password", _text),
    _row("ssl.truststore.location", "security", "truststore_location", _path),
    _row("ssl.truststore.type", "security", "truststore_type", _STORE_TYPE),
    _row("ssl.keystore.location", "security", "keystore_location", _path),
    _row("ssl.keystore.type", "security", "keystore_type", _STORE_TYPE),
    _row("ssl.endpoint.identification.algorithm", "security", "check_hostname", _HOSTNAME_CHECK),
    _row("enable.ssl.certificate.verification", "security", "verify_certificate", _truth),
    _row("sasl.mechanism sasl.mechanisms", "security", "sasl_mechanism", _mechanism),
    _row("sasl.username", "security", "username", _text),
    _row("sasl.password", "security", "password", _text),
    _row("sasl.jaas.config", "security", "jaas", _jaas),
    _row("transactional.id", "producer", "transactional_id", _text),
    _row("transaction.timeout.ms", "producer", "transaction_timeout_ms", _MS),
    _row("acks request.required.acks", "producer", "acks", _choice({"all": -1, "-1": -1, "0": 0, "1": 1})),
    _row("enable.idempotence", "producer", "idempotent", _truth),
    _row("compression.type compression.codec", "producer", "compression_type", _same("none", "snappy", *LEVELS)),
    _row("compression.level", "producer", "compression_level", _level),
    *(_row(f"compression.{codec}.level", "producer", f"{codec}_level", _level) for codec in LEVELS),
    _row("batch.size", "producer", "batch_bytes", _whole(1)),
    _row("linger.ms queue.buffering.max.ms", "producer", "linger_ms", _whole(0)),
    _row("max.in.flight.requests.per.connection max.in.flight", "producer", "in_flight_max", _whole(1, 1_000_000)),
    _row("delivery.timeout.ms message.timeout.ms", "producer", "delivery_timeout_ms", _MS),
    _row("max.request.size message.max.bytes", "producer", "request_bytes_max", _whole(1)),
    _row("partitioner", "producer", "partitioner", _choice(_PARTITIONERS)),
    _row("isolation.level", "fetch", "isolation", _same("read_committed", "read_uncommitted")),
    _row("fetch.max.bytes", "fetch", "fetch_bytes_max", _whole(1)),
    _row("fetch.decompressed.max.bytes", "fetch", "decompressed_bytes_max", _whole(1)),
    _row("max.partition.fetch.bytes fetch.message.max.bytes", "fetch", "partition_bytes_max", _whole(1)),
    _row("fetch.min.bytes", "fetch", "fetch_bytes_min", _whole(1)),
    _row("fetch.max.wait.ms fetch.wait.max.ms", "fetch", "wait_ms_max", _whole(0)),
    _row("check.crcs", "fetch", "check_crcs", _truth),
    _row("auto.offset.reset", "fetch", "auto_offset_reset", _choice(_RESETS)),
    _row("client.rack", "fetch", "client_rack", _text),
    _row("group.id", "group", "group_id", _text),
    _row("group.instance.id", "group", "group_instance_id", _text),
    _row("group.protocol", "group", "protocol", _same("classic", "consumer")),
    _row("group.remote.assignor", "group", "remote_assignor", _text),
    _row("partition.assignment.strategy", "group", "assignors", parse_assignors),
    _row("session.timeout.ms", "group", "session_timeout_ms", _MS),
    _row("heartbeat.interval.ms", "group", "heartbeat_interval_ms", _MS),
    _row("max.poll.interval.ms", "group", "rebalance_timeout_ms", _MS),
    _row("retries message.send.max.retries", "checked", "retries", _retries),
    _row("enable.auto.commit", "checked", "auto_commit", _only(False, "offsets are committed with their results")),
    _row("partitioner.ignore.keys", "checked", "ignore_keys", _only(False, "a record's key decides its partition")),
    _row("partitioner.class", "checked", "partitioner_class", _refused("leave it out for Java's default, murmur2")),
    _row("ssl.ca.pem ssl.truststore.certificates", "checked", "ca_inline", _INLINE),
    _row("ssl.certificate.pem ssl.keystore.certificate.chain", "checked", "certificate_inline", _INLINE),
    _row("ssl.key.pem ssl.keystore.key", "checked", "key_inline", _INLINE),
)

IGNORED: Final[Mapping[str, str]] = {
    "keys and values are bytes or Arrow columns": "key.serializer value.serializer key.deserializer value.deserializer",
    "the caller's tables are the buffer": "buffer.memory queue.buffering.max.messages queue.buffering.max.kbytes "
    "queue.buffering.backpressure.threshold batch.num.messages queued.min.messages queued.max.messages.kbytes "
    "fetch.queue.backoff.ms fetch.error.backoff.ms message.copy.max.bytes max.poll.records",
    "the operating system sizes and watches sockets well by itself": "send.buffer.bytes receive.buffer.bytes "
    "socket.send.buffer.bytes socket.receive.buffer.bytes socket.keepalive.enable socket.nagle.disable "
    "socket.max.fails broker.address.ttl broker.address.family client.dns.lookup connections.max.idle.ms",
    "retry.backoff.ms serves reconnecting too": "reconnect.backoff.ms reconnect.backoff.max.ms "
    "socket.connection.setup.timeout.max.ms",
    "metadata.max.age.ms serves all of it": "topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse "
    "topic.metadata.refresh.fast.interval.ms topic.metadata.propagation.max.ms metadata.max.idle.ms "
    "metadata.recovery.strategy metadata.recovery.rebootstrap.trigger.ms",
    "versions are always negotiated": "api.version.request api.version.request.timeout.ms api.version.fallback.ms "
    "broker.version.fallback",
    "nothing is reported on the side": "metric.reporters enable.metrics.push auto.include.jmx.reporter "
    "statistics.interval.ms interceptor.classes client.software.name client.software.version debug log.level "
    "log.queue log.thread.name log.connection.close error.cb stats.cb throttle.cb logger on.delivery",
    "keyless records are spread evenly over the partitions": "partitioner.adaptive.partitioning.enable "
    "partitioner.availability.timeout.ms sticky.partitioning.linger.ms",
    "reading never creates a topic": "allow.auto.create.topics exclude.internal.topics enable.partition.eof",
    "Python's ssl chooses, from TLS 1.2 on; PEM stores have no password of their own": "ssl.protocol "
    "ssl.enabled.protocols ssl.cipher.suites ssl.provider ssl.providers ssl.engine.factory.class security.providers "
    "ssl.keymanager.algorithm ssl.trustmanager.algorithm ssl.secure.random.implementation ssl.truststore.password "
    "ssl.keystore.password",
    "offsets are committed with their results": "auto.commit.interval.ms enable.auto.offset.store",
}
"""Names that are accepted and change nothing, by the reason why."""

IGNORED_PREFIXES: Final[Mapping[str, str]] = {
    "metrics.": "nothing is reported on the side",
    "sasl.kerberos.": "GSSAPI is refused by sasl.mechanism",
    "sasl.oauthbearer.": "OAUTHBEARER is refused by sasl.mechanism",
    "sasl.login.": "PLAIN and SCRAM log in once for each connection",
}

_EXPECTED_IGNORED: Final = frozenset(
    f"{what}.{kind}" for what in ("key", "value") for kind in ("serializer", "deserializer")
)
"""Nobody expects anything of these here, so they are ignored without a word."""

_LOG: Final = logging.getLogger("semel.client")
_warned_of: Final[set[str]] = set()

_BY_NAME: Final = {name: setting for setting in SETTINGS for name in setting.names}
_IGNORED_NAMES: Final = frozenset(name for names in IGNORED.values() for name in names.split())


def merge_settings(settings: Mapping[str, object] | None, more_settings: Mapping[str, object]) -> dict[str, object]:
    """The mapping and the keywords of a client's constructor as one mapping."""
    if settings is not None:
        _check_mapping(settings)
    return {**(settings or {}), **more_settings}


def check_option_names(options: Mapping[str, object], own: Collection[str], call: str) -> None:
    """Refuse keywords that are no settings, by the nearest name among the call's own options if there is one.

    >>> check_option_names({"idel_ms": 5}, ["idle_ms"], "semel.run()")
    Traceback (most recent call last):
        ...
    semel.errors.ConfigError: semel.run() has no option idel_ms=: did you mean idle_ms=?
    """
    for written in options:
        name = written.replace("_", ".")
        if written in own or name in _BY_NAME or name in _IGNORED_NAMES or name.startswith(tuple(IGNORED_PREFIXES)):
            continue
        close = difflib.get_close_matches(written, own, n=1, cutoff=0.75)
        if close:
            raise ConfigError(f"{call} has no option {written}=: did you mean {close[0]}=?")
        if not difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.6):
            raise ConfigError(f"{call} has no option {written}=, and Kafka's clients have no such setting: remove it.")


def _check_mapping(settings: object) -> None:
    if not isinstance(settings, Mapping):
        address = settings if isinstance(settings, str) and _ADDRESS.fullmatch(settings) else "host:9092"
        kind = type(settings).__name__
        raise ConfigError(f'Settings must be a mapping, not {kind}: write {{"bootstrap.servers": "{address}"}}.')


def parse_config(settings: Mapping[str, object]) -> Config:
    """Read Kafka's settings, by their dotted names or with underscores; `None` counts as not given.

    >>> config = parse_config({"bootstrap.servers": "localhost:9092", "compression_type": "zstd"})
    >>> config.client.bootstrap, config.producer.compression_type, config.fetch.isolation
    ((('localhost', 9092),), 'zstd', 'read_committed')
    """
    _check_mapping(settings)
    given = _read(settings)
    client, producer, fetch = given["client"], given["producer"], given["fetch"]
    if "bootstrap" not in client:
        raise ConfigError("bootstrap.servers is missing: write host:port of one or more brokers.")
    _choose_level(producer)
    _fit_timeouts(client, producer, fetch)
    _fit_sizes(client, producer, fetch)
    _fit_heartbeats(given["group"])
    return Config(
        client=ClientConfig(**client, security=_security(given["security"])),
        producer=ProducerConfig(**producer),
        fetch=FetchConfig(**fetch),
        group=GroupConfig(**given["group"]),
    )


def _read(settings: Mapping[str, object]) -> dict[Owner, dict[str, Any]]:
    """Each field that was given, by owner. Two spellings of one setting must agree."""
    owners: tuple[Owner, ...] = ("client", "security", "producer", "fetch", "group", "checked")
    values: dict[Owner, dict[str, Any]] = {owner: {} for owner in owners}
    written: dict[str, str] = {}
    for written_name, value in settings.items():
        name = written_name.replace("_", ".")
        if value is None or name in _IGNORED_NAMES or name.startswith(tuple(IGNORED_PREFIXES)):
            if value is not None:
                _warn_once(name)
            continue
        if name not in _BY_NAME:
            raise ConfigError(_unknown(written_name, name))
        setting = _BY_NAME[name]
        parsed = setting.parse(written_name, value)
        fields = values[setting.owner]
        if setting.field in fields and fields[setting.field] != parsed:
            raise ConfigError(
                f"{written[setting.field]} and {written_name} mean the same and differ: remove one of them."
            )
        fields[setting.field] = parsed
        written[setting.field] = written_name
    return values


def _warn_once(name: str) -> None:
    if name in _EXPECTED_IGNORED or name in _warned_of:
        return
    _warned_of.add(name)
    reasons = [why for why, names in IGNORED.items() if name in names.split()]
    reasons += [why for prefix, why in IGNORED_PREFIXES.items() if name.startswith(prefix)]
    _LOG.warning("%s has no effect in Semel: %s.", name, reasons[0])


def _unknown(written_name: str, name: str) -> str:
    close = difflib.get_close_matches(name, [*_BY_NAME, *_IGNORED_NAMES], n=1, cutoff=0.6)
    if not close:
        return f"{written_name} is not a setting of Kafka's clients: remove it."
    suggestion = close[0].replace(".", "_") if "_" in written_name else close[0]
    return f"{written_name} is not a setting of Kafka's clients: did you mean {suggestion}?"


# A default gives way to what was written, so that a user meets contradictions between settings, not with our choices.

_CLIENT: Final = ClientConfig(bootstrap=())
_PRODUCER: Final = ProducerConfig()
_FETCH: Final = FetchConfig()
_GROUP: Final = GroupConfig()


def _choose_level(producer: dict[str, Any]) -> None:
    """Java has a level for each codec; only the one of the codec in use counts."""
    for codec in LEVELS:
        level = producer.pop(f"{codec}_level", None)
        if level is None or producer.get("compression_type") != codec:
            continue
        if producer.setdefault("compression_level", level) != level:
            raise ConfigError(f"compression.level and compression.{codec}.level differ: remove one of them.")


def _fit_timeouts(client: dict[str, Any], producer: dict[str, Any], fetch: dict[str, Any]) -> None:
    linger = producer.get("linger_ms", 0)
    request = client.get("request_timeout_ms")
    delivery = producer.get("delivery_timeout_ms")
    request_default = _CLIENT.request_timeout_ms
    if delivery is None:
        usual = _PRODUCER.delivery_timeout_ms
        producer["delivery_timeout_ms"] = max(usual, linger + (request or request_default))
    elif linger + (request or 1) > delivery:
        raise ConfigError(
            f"delivery.timeout.ms={delivery} is shorter than one attempt: "
            f"write at least linger.ms + request.timeout.ms, {linger + (request or request_default)}."
        )
    elif request is None:
        client["request_timeout_ms"] = min(request_default, delivery - linger)

    request = client.get("request_timeout_ms", request_default)
    wait = fetch.setdefault("wait_ms_max", min(_FETCH.wait_ms_max, request // 2))
    if wait >= request:
        raise ConfigError(
            f"fetch.max.wait.ms={wait} would let every idle fetch time out: "
            f"write less than request.timeout.ms, {request}."
        )
    if (backoff := client.get("retry_backoff_ms", 0)) > _CLIENT.retry_backoff_max_ms:
        client.setdefault("retry_backoff_max_ms", backoff)
    if (backoff_max := client.get("retry_backoff_max_ms", INT32_MAX)) < _CLIENT.retry_backoff_ms:
        client.setdefault("retry_backoff_ms", backoff_max)


def _fit_heartbeats(group: dict[str, Any]) -> None:
    """Written alone, either time-out takes the other along."""
    session, beat = group.get("session_timeout_ms"), group.get("heartbeat_interval_ms")
    if session is not None and beat is None:
        group["heartbeat_interval_ms"] = max(1, min(_GROUP.heartbeat_interval_ms, session // 3))
    elif beat is not None and session is None:
        group["session_timeout_ms"] = max(_GROUP.session_timeout_ms, 3 * beat)


_FRAME_ROOM: Final = 65_536
"""Bytes of a frame that are not records: headers, topic names, offsets of each partition."""


def _fit_sizes(client: dict[str, Any], producer: dict[str, Any], fetch: dict[str, Any]) -> None:
    batch, request = producer.get("batch_bytes"), producer.get("request_bytes_max")
    if batch is None and request is not None:
        producer["batch_bytes"] = min(_PRODUCER.batch_bytes, request)
    elif batch is not None and request is None:
        room = min(batch + _FRAME_ROOM, INT32_MAX)
        producer["request_bytes_max"] = max(_PRODUCER.request_bytes_max, room)

    fetched = fetch.get("fetch_bytes_max", _FETCH.fetch_bytes_max)
    usual = _CLIENT.receive_message_bytes_max
    receive = client.setdefault("receive_message_bytes_max", max(usual, min(fetched + _FRAME_ROOM, INT32_MAX)))
    if "fetch_bytes_max" not in fetch:
        fetch["fetch_bytes_max"] = min(fetched, max(1, receive - _FRAME_ROOM))
    elif receive <= fetched:
        raise ConfigError(
            f"receive.message.max.bytes={receive} cannot hold fetch.max.bytes={fetched}: "
            f"write receive.message.max.bytes of at least {fetched + _FRAME_ROOM}, or lower fetch.max.bytes."
        )


def _security(values: dict[str, Any]) -> SecurityConfig:
    """Java's stores and login line, turned into the fields that librdkafka's names fill directly."""
    for kind, fields in (("truststore", ("ca_location",)), ("keystore", ("certificate_location", "key_location"))):
        store, store_type = values.pop(f"{kind}_location", None), values.pop(f"{kind}_type", None)
        if store is None:
            continue
        if store_type != "PEM":
            raise ConfigError(_how_to_make_pem(kind, store, store_type or "JKS"))
        for name in fields:
            if values.setdefault(name, store) != store:
                raise ConfigError(f"ssl.{kind}.location and ssl.{name.replace('_', '.')} differ: remove one of them.")
    if jaas := values.pop("jaas", None):
        for name in ("username", "password"):
            if values.setdefault(name, jaas[name]) != jaas[name]:
                raise ConfigError(f"sasl.jaas.config and sasl.{name} differ: remove one of them.")
        plain = jaas["module"] == "PlainLoginModule"
        if plain:
            values.setdefault("sasl_mechanism", "PLAIN")
        if (values.get("sasl_mechanism", "SCRAM") == "PLAIN") is not plain:
            raise ConfigError(
                f"sasl.jaas.config names {jaas['module']}, which does not go with "
                f"sasl.mechanism={values['sasl_mechanism']}: make the two agree."
            )
    return SecurityConfig(**values)


def _how_to_make_pem(kind: str, store: str, store_type: str) -> str:
    path = shlex.quote(store)
    if kind == "truststore":
        export = (
            f"openssl pkcs12 -nokeys -in {path}" if store_type == "PKCS12" else f"keytool -list -rfc -keystore {path}"
        )
        command, remedy = f"{export} > ca.pem", "ssl.ca.location=ca.pem"
    else:
        convert = f"keytool -importkeystore -srckeystore {path} -destkeystore client.p12 -deststoretype PKCS12 && "
        source = path if store_type == "PKCS12" else "client.p12"
        command = f"{'' if store_type == 'PKCS12' else convert}openssl pkcs12 -in {source} -out client.pem"
        remedy = "ssl.certificate.location=client.pem"
    return (
        f"ssl.{kind}.location is a {store_type} file and only PEM can be read: run `{command}` and write {remedy} "
        f"(for a PEM file, add ssl.{kind}.type=PEM)."
    )
