"""Kafka's settings, read into typed values."""

from __future__ import annotations

import pickle
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.client.config import ClientConfig, Config, FetchConfig, ProducerConfig, SecurityConfig
from semel.client.group_config import GroupConfig
from semel.client.settings import IGNORED, IGNORED_PREFIXES, SETTINGS, Setting, parse_bootstrap, parse_config
from semel.errors import ConfigError

SECRET = "s3cret-Pa55"
BROKER = {"bootstrap.servers": "localhost:9092"}
SASL = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "ann", "sasl.password": SECRET}


def read(**settings: Any) -> Config:
    return parse_config({**BROKER, **settings})


def read_dotted(settings: dict[str, Any]) -> Config:
    return parse_config({**BROKER, **settings})


def refusal(settings: dict[str, Any]) -> str:
    """The message that these settings are refused with, checked to be short and without secrets."""
    with pytest.raises(ConfigError) as caught:
        read_dotted(settings)
    message = str(caught.value)
    assert SECRET not in message
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


# -- names and defaults ------------------------------------------------------------------------------------------------


def test_defaults_of_the_dataclasses_are_what_an_empty_mapping_gives() -> None:
    """Only the bootstrap servers must be given, and parsing adds nothing to the documented defaults."""
    config = read()
    assert config.client == ClientConfig(bootstrap=(("localhost", 9092),))
    assert config.producer == ProducerConfig()
    assert config.fetch == FetchConfig()
    assert config.producer.batch_bytes < 1_048_588  # the broker's default message.max.bytes
    assert config.fetch.isolation == "read_committed"


def test_every_row_of_the_table_fills_a_field_that_exists() -> None:
    """A row with a misspelt field would only fail when a user first writes that setting."""
    intermediate = {
        "security": {"truststore_location", "truststore_type", "keystore_location", "keystore_type", "jaas"},
        "producer": {"gzip_level", "lz4_level", "zstd_level"},
    }
    owners = {"client": ClientConfig, "security": SecurityConfig, "producer": ProducerConfig, "fetch": FetchConfig}
    owners |= {"group": GroupConfig}
    for owner, dataclass in owners.items():
        filled = {setting.field for setting in SETTINGS if setting.owner == owner} - intermediate.get(owner, set())
        assert filled == {f.name for f in fields(dataclass)} - {"security"}


def test_no_name_is_in_two_rows_or_both_read_and_ignored() -> None:
    """A name has one meaning."""
    names = [name for setting in SETTINGS for name in setting.names]
    ignored = [name for listed in IGNORED.values() for name in listed.split()]
    assert len(set(names + ignored)) == len(names + ignored)
    assert not [name for name in names if name.startswith(tuple(IGNORED_PREFIXES))]


def test_ignored_names_change_nothing() -> None:
    """Settings that users carry over from other clients are accepted, whatever their value."""
    settings = {name: "anything" for listed in IGNORED.values() for name in listed.split()}
    settings |= {prefix + "something": object() for prefix in IGNORED_PREFIXES}
    assert read_dotted(settings) == read()


SAMPLES = {"bootstrap": "b:1", "sasl_mechanism": "PLAIN", "acks": "all", "compression_type": "lz4"}
SAMPLES |= {"in_flight_max": "3", "wait_ms_max": "300"}


@pytest.mark.parametrize("setting", [s for s in SETTINGS if len(s.names) > 1 and s.owner != "checked"])
def test_all_spellings_of_a_setting_fill_its_field(setting: Setting) -> None:
    """Java's, librdkafka's and the keyword spelling mean the same."""
    value = SAMPLES.get(setting.field, "40000")
    others = {"client.id": "me"} if setting.field == "bootstrap" else dict(BROKER)
    if setting.owner == "security":
        others |= {name: text for name, text in SASL.items() if name not in setting.names}
    for name in [*setting.names, *(name.replace(".", "_") for name in setting.names)]:
        config = parse_config({**others, name: value})
        owner = config.client.security if setting.owner == "security" else getattr(config, setting.owner)
        assert getattr(owner, setting.field) == setting.parse(name, value)


def test_values_may_be_text_or_native() -> None:
    """Spark passes text, Python code passes numbers and booleans."""
    text = read(linger_ms="5", enable_idempotence="FALSE", acks="1", check_crcs="false", batch_size=" 1000 ")
    native = read(linger_ms=5.0, enable_idempotence=False, acks=1, check_crcs=False, batch_size=1000)
    assert text == native
    assert (text.producer.linger_ms, text.producer.idempotent, text.producer.acks) == (5, False, 1)


def test_none_counts_as_not_given() -> None:
    """Keyword arguments that default to None can be passed on as they are."""
    assert read(transactional_id=None, acks=None, no_such_setting_yet=None) == read()


def test_two_spellings_that_disagree_are_refused() -> None:
    """Which of the two a user meant cannot be guessed."""
    message = refusal({"linger.ms": 5, "linger_ms": 6})
    assert "linger.ms and linger_ms" in message
    assert read_dotted({"linger.ms": 5, "queue.buffering.max.ms": "5"}).producer.linger_ms == 5


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("bootstap.servers", "bootstrap.servers"),
        ("kafka.bootstrap.servers", "bootstrap.servers"),
        ("transaction.id", "transactional.id"),
        ("transactional_idd", "transactional_id"),
        ("isolation_levels", "isolation_level"),
        ("sesion.timeout.ms", "session.timeout.ms"),
    ],
)
def test_unknown_name_is_answered_with_the_closest_one(name: str, suggested: str) -> None:
    """A typo must not silently lose a guarantee, and the answer keeps the user's way of writing."""
    assert refusal({name: "x"}).endswith(f"did you mean {suggested}?")


def test_name_unlike_any_other_gets_no_suggestion() -> None:
    """A wild guess would mislead."""
    assert "remove it" in refusal({"zzzzqqqq": 1})


# -- bootstrap ---------------------------------------------------------------------------------------------------------


def test_bootstrap_is_required() -> None:
    """Without a broker there is nothing to connect to."""
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is missing"):
        parse_config({})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1,b:2", (("a", 1), ("b", 2))),
        (" a:1 , ,b:2, a:1", (("a", 1), ("b", 2))),
        ("[::1]:9092", (("::1", 9092),)),
        ("[fe80::1%eth0]:9092,127.0.0.1:65535", (("fe80::1%eth0", 9092), ("127.0.0.1", 65535))),
        (["a:1", "b:2"], (("a", 1), ("b", 2))),
    ],
)
def test_bootstrap_addresses_are_read(text: object, expected: object) -> None:
    """Lists, spaces, repeats and IPv6."""
    assert parse_bootstrap("bootstrap.servers", text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("localhost", "has no port: write host:port, such as localhost:9092"),
        ("a:1,localhost:", "'localhost:' has no port"),
        ("[::1]", "has no port"),
        ("::1:9092", "brackets"),
        ("a:0", "1 to 65535"),
        ("a:99999", "1 to 65535"),
        ("a:http", "not an address"),
        ("SSL://a:9093", "security.protocol"),
        (f"ann:{SECRET}@a:9092", "sasl.username"),
        ("", "is empty"),
        (" , ", "is empty"),
        (9092, "must be text"),
        ([9092], "must be text"),
    ],
)
def test_bad_bootstrap_is_refused_with_what_to_write(text: object, says: str) -> None:
    """Each mistake gets its own advice."""
    assert says in refusal({"bootstrap.servers": text})


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True), st.integers(1, 65535)),
        min_size=1,
        unique=True,
    )
)
def test_any_list_of_addresses_survives_writing_and_reading(addresses: list[tuple[str, int]]) -> None:
    """What is written as host:port is read back in order."""
    text = ",".join(f"{host}:{port}" for host, port in addresses)
    assert parse_bootstrap("bootstrap.servers", text) == tuple(addresses)


@given(st.text())
def test_any_text_is_addresses_or_a_config_error(text: str) -> None:
    """No input escapes as another exception or as an unusable address."""
    try:
        addresses = parse_bootstrap("bootstrap.servers", text)
    except ConfigError:
        return
    assert all(host and 1 <= port <= 65535 for host, port in addresses)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("linger.ms", "five", "linger.ms='five' is not a whole number"),
        ("linger.ms", 0.5, "not a whole number"),
        ("linger.ms", True, "not a whole number"),
        ("linger.ms", "1_000", "not a whole number"),
        ("linger.ms", -1, "out of range: write 0 to 2147483647"),
        ("request.timeout.ms", 2**31, "out of range"),
        ("request.timeout.ms", float("inf"), "not a whole number"),
        ("enable.idempotence", "yes", "neither true nor false"),
        ("acks", 2, "acks='2' is not supported: write 'all'"),
        ("compression.type", "brotli", "'zstd'"),
        ("isolation.level", "serializable", "'read_committed' or 'read_uncommitted'"),
        ("auto.offset.reset", "yesterday", "'earliest' or 'latest'"),
        ("partitioner", "consistent_random", "write 'murmur2'"),
        ("partitioner.class", "com.example.Mine", "murmur2"),
        ("partitioner.ignore.keys", "true", "key decides"),
        ("security.protocol", "TLS", "'SASL_SSL'"),
        ("sasl.mechanism", "GSSAPI", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ("sasl.mechanisms", "OAUTHBEARER", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ("transactional.id", "", "not empty"),
        ("client.id", 7, "must be text"),
        ("enable.auto.commit", True, "committed with their results"),
        ("retries", 0, "delivery.timeout.ms"),
        ("ssl.key.pem", SECRET, "to a file"),
        ("sasl.password", 12345, "must be text"),
    ],
)
def test_bad_value_is_refused_by_its_setting(name: str, value: object, says: str) -> None:
    """The sentence names the setting and what to write."""
    message = refusal({name: value})
    assert says in message
    assert name in message
    assert "12345" not in message


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("none", "error"), ("error", "error"), ("smallest", "earliest"), ("EARLIEST", "earliest"), ("end", "latest")],
)
def test_offset_resets_of_all_clients_are_understood(value: str, meaning: str) -> None:
    """Java says none, librdkafka says error, old configurations say smallest."""
    assert read(auto_offset_reset=value).fetch.auto_offset_reset == meaning


def test_switches_in_their_only_position_are_accepted() -> None:
    """What would change nothing may be written."""
    assert read(enable_auto_commit=False, retries=2147483647, partitioner="murmur2_random") == read()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transactional.id": "t", "enable.idempotence": "false"}, "remove enable.idempotence=false"),
        ({"transactional.id": "t", "acks": "1"}, "acks=1 contradicts transactional.id"),
        ({"acks": "0"}, "acks=0 contradicts enable.idempotence=true"),
        ({"max.in.flight": 6}, "write 1 to 5"),
        ({"batch.size": 2_000_000, "max.request.size": 1_000_000}, "raise max.request.size"),
        ({"compression.level": 3}, "has no levels"),
        ({"compression.type": "gzip", "compression.level": 12}, "gzip has 1 to 9"),
        ({"compression.type": "zstd", "compression.level": 3, "compression.zstd.level": 4}, "remove one"),
        ({"delivery.timeout.ms": 10_000, "request.timeout.ms": 20_000}, "linger.ms + request.timeout.ms, 20000"),
        ({"delivery.timeout.ms": 10, "linger.ms": 10}, "linger.ms + request.timeout.ms"),
        ({"fetch.max.wait.ms": 5_000, "request.timeout.ms": 5_000}, "less than request.timeout.ms, 5000"),
        ({"retry.backoff.ms": 500, "retry.backoff.max.ms": 100}, "retry.backoff.max.ms is below"),
        ({"fetch.max.bytes": 10_000, "receive.message.max.bytes": 10_000}, "receive.message.max.bytes of at least"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], says: str) -> None:
    """Two written values that cannot both hold are the user's to settle."""
    assert says in refusal(settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"delivery.timeout.ms": 5_000}, {"request_timeout_ms": 5_000, "delivery_timeout_ms": 5_000}),
        ({"delivery.timeout.ms": 200}, {"request_timeout_ms": 200, "wait_ms_max": 100}),
        ({"request.timeout.ms": 200_000, "linger.ms": 5}, {"delivery_timeout_ms": 200_005}),
        ({"request.timeout.ms": 400}, {"wait_ms_max": 200}),
        ({"retry.backoff.ms": 3_000}, {"retry_backoff_ms": 3_000, "retry_backoff_max_ms": 3_000}),
        ({"retry.backoff.max.ms": 20}, {"retry_backoff_ms": 20, "retry_backoff_max_ms": 20}),
        ({"max.request.size": 500_000}, {"batch_bytes": 500_000}),
        ({"batch.size": 4_000_000}, {"batch_bytes": 4_000_000, "request_bytes_max": 4_065_536}),
        ({"fetch.max.bytes": 200_000_000}, {"receive_message_bytes_max": 200_065_536}),
        ({"receive.message.max.bytes": 1_000_000}, {"fetch_bytes_max": 934_464}),
        ({"transactional.id": "t", "transaction.timeout.ms": 5_000}, {"delivery_timeout_ms": 120_000}),
        (
            {"transactional.id": "t", "transaction.timeout.ms": 60_000, "delivery.timeout.ms": 120_000},
            {"transaction_timeout_ms": 60_000, "delivery_timeout_ms": 120_000},
        ),
        (
            {"compression.type": "lz4", "compression.lz4.level": 9, "compression.gzip.level": 1},
            {"compression_level": 9},
        ),
        ({"compression.type": "gzip", "compression.level": -1}, {"compression_level": None}),
        ({"enable.idempotence": False, "acks": 0, "max.in.flight": 100}, {"acks": 0, "in_flight_max": 100}),
    ],
)
def test_defaults_give_way_to_what_was_written(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    """One written value never contradicts a default that the user did not choose."""
    config = read_dotted(settings)
    values = {**asdict(config.client), **asdict(config.producer), **asdict(config.fetch)}
    assert {name: values[name] for name in expected} == expected


NUMBERS = ["linger.ms", "request.timeout.ms", "delivery.timeout.ms", "fetch.max.wait.ms", "retry.backoff.ms"]
NUMBERS += ["batch.size", "max.request.size", "fetch.max.bytes", "receive.message.max.bytes", "retry.backoff.max.ms"]
ANY_NAME = st.sampled_from([name for setting in SETTINGS for name in setting.names])
ANY_VALUE = st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.floats(), st.none())


@given(
    st.dictionaries(st.sampled_from(NUMBERS), st.integers(1_000, 2**31 - 1) | st.integers(0, 50), max_size=4)
    | st.dictionaries(ANY_NAME, ANY_VALUE, max_size=4)
)
def test_any_values_are_a_config_or_a_config_error(settings: dict[str, object]) -> None:
    """No value escapes as another exception, and what is accepted fits together."""
    try:
        config = parse_config({**BROKER, **settings})
    except ConfigError:
        return
    assert config.producer.batch_bytes <= config.producer.request_bytes_max
    assert config.client.request_timeout_ms <= config.producer.delivery_timeout_ms
    assert config.fetch.wait_ms_max < config.client.request_timeout_ms
    assert config.fetch.fetch_bytes_max < config.client.receive_message_bytes_max


# -- security ----------------------------------------------------------------------------------------------------------


def test_password_shows_in_no_repr_and_survives_pickling() -> None:
    """Configurations are logged and are sent to Spark's executors."""
    config = read_dotted({**SASL, "ssl.certificate.location": "c.pem", "ssl.key.password": SECRET + "2"})
    assert SECRET not in repr(config)
    assert SECRET not in str(config.client.security)
    security = pickle.loads(pickle.dumps(config)).client.security
    assert (security.password, security.key_password) == (SECRET, SECRET + "2")


@pytest.mark.parametrize(
    ("line", "username", "password"),
    [
        ('org.apache.kafka.common.security.plain.PlainLoginModule required username="a" password="b";', "a", "b"),
        (
            'kafkashaded.org.x.PlainLoginModule required\n  username="a b"\n  password="p;=\\"q\\\\";\n',
            "a b",
            'p;="q\\',
        ),
        ("PlainLoginModule required password='x y' username=ann;", "ann", "x y"),
        ('PlainLoginModule required username="" password="";', None, None),
        ('PlainLoginModule required username="a" password="b" user_bob="c" ;', "a", "b"),
    ],
)
def test_login_line_of_java_is_read(line: str, username: str | None, password: str | None) -> None:
    """Spark users have their credentials in sasl.jaas.config; the mechanism follows from PlainLoginModule."""
    settings = {"security.protocol": "sasl_ssl", "sasl.jaas.config": line}
    if username is None:
        assert "sasl.username is missing" in refusal(settings)
        return
    security = read_dotted(settings).client.security
    assert (security.sasl_mechanism, security.username, security.password) == ("PLAIN", username, password)


SCRAM_LINE = f'org.apache.kafka.common.security.scram.ScramLoginModule required username="ann" password="{SECRET}";'


def test_scram_login_line_needs_its_mechanism() -> None:
    """ScramLoginModule serves two mechanisms, so the user must say which."""
    settings = {"security.protocol": "SASL_SSL", "sasl.jaas.config": SCRAM_LINE}
    assert "sasl.mechanism is missing" in refusal(settings)
    security = read_dotted({**settings, "sasl.mechanism": "scram-sha-512"}).client.security
    assert (security.sasl_mechanism, security.password) == ("SCRAM-SHA-512", SECRET)
    assert "make the two agree" in refusal({**settings, "sasl.mechanism": "PLAIN"})
    assert "sasl.jaas.config and sasl.password differ" in refusal({**settings, "sasl.password": "other"})


@pytest.mark.parametrize(
    "line",
    [
        SCRAM_LINE.rstrip(";"),
        SCRAM_LINE.replace("required", ""),
        SCRAM_LINE.replace("username=", "user="),
        SCRAM_LINE.replace('password="', "password="),
        SCRAM_LINE.replace("ScramLoginModule", "Krb5LoginModule"),
        SCRAM_LINE.replace("required", 'required tokenauth="true"'),
        f"{SCRAM_LINE} {SCRAM_LINE}",
        "",
        42,
    ],
)
def test_login_line_that_is_not_understood_is_refused_without_showing_it(line: object) -> None:
    """The line holds a password, so the message must not repeat it (`refusal` checks that)."""
    message = refusal({"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-256", "sasl.jaas.config": line})
    assert message.startswith("sasl.jaas.config")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism is missing"),
        ({**SASL, "sasl.password": None}, "sasl.password is missing"),
        ({**SASL, "sasl.username": None}, "sasl.username is missing"),
        ({**SASL, "security.protocol": "SSL"}, "write security.protocol=SASL_SSL"),
        ({**SASL, "security.protocol": None}, "write security.protocol=SASL_PLAINTEXT or SASL_SSL"),
        ({"ssl.ca.location": "ca.pem"}, "write security.protocol=SSL"),
        ({**SASL, "security.protocol": "SASL_PLAINTEXT", "ssl.ca.location": "ca.pem"}, "security.protocol=SASL_SSL"),
        ({"security.protocol": "SSL", "ssl.key.location": "k.pem"}, "add ssl.certificate.location"),
    ],
)
def test_security_settings_that_do_not_fit_the_protocol_are_refused(settings: dict[str, Any], says: str) -> None:
    """A user who wrote certificates or a login believes that they are in use."""
    assert says in refusal(settings)


def test_pem_stores_of_java_fill_the_same_fields() -> None:
    """Java's PEM stores are librdkafka's files under other names; the key store holds certificate and key."""
    stores = {"ssl.truststore.location": "ca.pem", "ssl.truststore.type": "PEM"}
    stores |= {"ssl.keystore.location": Path("me.pem"), "ssl.keystore.type": "pem", "ssl.keystore.password": SECRET}
    files = {"ssl.ca.location": "ca.pem", "ssl.certificate.location": "me.pem", "ssl.key.location": "me.pem"}
    protocol = {"security.protocol": "SSL"}
    assert read_dotted({**stores, **protocol}) == read_dotted({**files, **protocol})
    assert "remove one" in refusal({**stores, **protocol, "ssl.ca.location": "other.pem"})


def test_system_authorities_and_unchecked_names_can_be_asked_for() -> None:
    """librdkafka's "probe" and Java's empty algorithm."""
    settings = {"security.protocol": "SSL", "ssl.ca.location": "probe", "ssl.endpoint.identification.algorithm": ""}
    security = read_dotted({**settings, "enable.ssl.certificate.verification": "false"}).client.security
    assert (security.ca_location, security.check_hostname, security.verify_certificate) == (None, False, False)


@pytest.mark.parametrize(
    ("kind", "store_type", "command", "remedy"),
    [
        ("truststore", "JKS", "keytool -list -rfc -keystore 'my store.jks' > ca.pem", "ssl.ca.location=ca.pem"),
        ("truststore", None, "keytool -list -rfc", "ssl.truststore.type=PEM"),
        ("truststore", "PKCS12", "openssl pkcs12 -nokeys -in 'my store.jks' > ca.pem", "ssl.ca.location=ca.pem"),
        ("keystore", "PKCS12", "openssl pkcs12 -in 'my store.jks' -out client.pem", "ssl.certificate.location"),
        ("keystore", "JKS", "keytool -importkeystore -srckeystore 'my store.jks'", "ssl.certificate.location"),
    ],
)
def test_java_stores_are_refused_with_the_command_that_converts_them(
    kind: str, store_type: str | None, command: str, remedy: str
) -> None:
    """The user can copy the command; the path is quoted for a shell and no password is in it."""
    message = refusal(
        {
            "security.protocol": "SSL",
            f"ssl.{kind}.location": "my store.jks",
            f"ssl.{kind}.type": store_type,
            f"ssl.{kind}.password": SECRET,
        }
    )
    assert command in message
    assert remedy in message


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_mechanisms_are_accepted_in_any_case(mechanism: str) -> None:
    """librdkafka and Java differ in how strictly they read it."""
    assert read_dotted({**SASL, "sasl.mechanism": mechanism.lower()}).client.security.sasl_mechanism == mechanism
