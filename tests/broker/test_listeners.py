"""Listeners: what may be left out, what contradicts itself, and how a test's `Security` becomes listeners."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel import Admin
from semel.broker.acls import AclBinding, Authorizer, Operation, Permission, ResourceType
from semel.broker.listeners import ListenerSettings, TlsSettings, check_listeners
from semel.errors import ConfigError
from semel.testing.certificates import make_certificates
from semel.testing.embedded import EmbeddedBroker
from semel.testing.embedded_security import listeners_for
from semel.testing.security import Security, Tls

TLS = TlsSettings(certificate_path="server.pem")


def test_a_listener_is_on_the_loopback_interface_unless_told() -> None:
    """Nothing else has to be said, and clients are told the port that was found."""
    listener = ListenerSettings()
    assert listener.is_loopback
    assert listener.advertised(40_000) == ("127.0.0.1", 40_000)
    assert (listener.uses_tls, listener.uses_sasl) == (False, False)
    assert (listener.frame_bytes_max, listener.frame_bytes_max_before_authentication) == (104_857_600, 524_288)


def test_a_listener_for_other_machines_says_how_it_is_reached() -> None:
    """All interfaces are no address that a client could connect to."""
    listener = ListenerSettings(host="0.0.0.0", port=9092, advertised_host="broker.example", advertised_port=19_092)
    assert not listener.is_loopback
    assert listener.advertised(9092) == ("broker.example", 19_092)
    assert not ListenerSettings(host="192.0.2.1").is_loopback
    assert not ListenerSettings(host="somewhere.example").is_loopback
    assert ListenerSettings(host="localhost").is_loopback
    assert ListenerSettings(host="::1").is_loopback


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": ""}, "no host"),
        ({"host": "0.0.0.0"}, "advertised host"),
        ({"host": "::"}, "advertised host"),
        ({"advertised_host": "0.0.0.0"}, "advertised host"),
        ({"port": 70_000}, "no port"),
        ({"advertised_port": 0}, "port 0"),
        ({"security_protocol": "TLS"}, "is not known"),
        ({"security_protocol": "SSL"}, "needs a certificate"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanisms": ("PLAIN",)}, "needs a certificate"),
        ({"tls": TLS}, "does not use a certificate"),
        ({"security_protocol": "SASL_PLAINTEXT"}, "needs at least one SASL mechanism"),
        ({"security_protocol": "SSL", "tls": TLS, "sasl_mechanisms": ("PLAIN",)}, "does not use SASL"),
        ({"security_protocol": "SASL_PLAINTEXT", "sasl_mechanisms": ("GSSAPI",)}, "GSSAPI is not known"),
        ({"frame_bytes_max": 0}, "largest frame"),
        ({"session_lifetime_ms": -1}, "session"),
    ],
)
def test_contradictions_are_told(fields: dict[str, object], words: str) -> None:
    """A listener that would be open to more than was meant, or to nobody, is not made."""
    with pytest.raises(ConfigError, match=words):
        ListenerSettings(**fields)  # type: ignore[arg-type]


def test_client_certificates_need_an_authority() -> None:
    """Without one, no certificate could ever be accepted."""
    with pytest.raises(ConfigError, match="authority"):
        TlsSettings(certificate_path="server.pem", client_auth="required")
    with pytest.raises(ConfigError, match="is not known"):
        TlsSettings(certificate_path="server.pem", client_auth="maybe")  # type: ignore[arg-type]


def test_a_password_is_not_shown() -> None:
    """Settings end up in logs."""
    assert "hunter22" not in repr(TlsSettings(certificate_path="server.pem", key_password="hunter22"))


def test_two_listeners_need_two_addresses() -> None:
    """Free ports are two by themselves."""
    check_listeners([ListenerSettings(), ListenerSettings(), ListenerSettings(port=9092), ListenerSettings(port=9093)])
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9092"):
        check_listeners([ListenerSettings(port=9092), ListenerSettings(port=9092)])
    with pytest.raises(ConfigError, match="no listener"):
        check_listeners([])


def test_the_security_of_a_test_becomes_listeners_and_users(tmp_path: Path) -> None:
    """Each protocol has its listener; client certificates count on SSL only, as with Apache Kafka."""
    certificates = make_certificates()
    tls = Tls(server=certificates.server, ca_pem=certificates.ca_pem, client_auth="required")
    security = Security(tls=tls, plain={"ann": "ann-secret"}, scram={"bob": "bob-secret"})
    listeners = {each.security_protocol: each for each in listeners_for(security, tmp_path / "tls")}
    assert tuple(listeners) == security.protocols
    assert listeners["PLAINTEXT"] == ListenerSettings()
    assert listeners["SASL_PLAINTEXT"].sasl_mechanisms == ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
    ssl_tls, sasl_tls = listeners["SSL"].tls, listeners["SASL_SSL"].tls
    assert ssl_tls is not None
    assert sasl_tls is not None
    assert (ssl_tls.client_auth, sasl_tls.client_auth) == ("required", "none")
    assert Path(ssl_tls.certificate_path).read_text() == certificates.server.certificate_pem
    assert stat.S_IMODE(Path(ssl_tls.key_path or "").stat().st_mode) == 0o600


CERTIFICATE = TlsSettings(certificate_path="c.pem", client_ca_path="ca.pem", client_auth="required")
PLAIN_ONLY = ("PLAIN",)
EXPOSED = {
    "beyond loopback": (ListenerSettings(host="192.0.2.1"), ["without a login"]),
    "a name": (ListenerSettings(host="broker.example.org"), ["without a login"]),
    "TLS without client certificates": (
        ListenerSettings(host="192.0.2.1", security_protocol="SSL", tls=replace(CERTIFICATE, client_auth="requested")),
        ["without a login"],
    ),
    "PLAIN in the clear": (
        ListenerSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms=PLAIN_ONLY),
        ["without encryption"],
    ),
    "loopback": (ListenerSettings(), []),
    "loopback as IPv6 sees it": (ListenerSettings(host="::ffff:127.0.0.1"), []),
    "client certificates": (ListenerSettings(host="192.0.2.1", security_protocol="SSL", tls=CERTIFICATE), []),
    "SCRAM": (ListenerSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms=("SCRAM-SHA-256",)), []),
    "PLAIN with TLS": (
        ListenerSettings(host="192.0.2.1", security_protocol="SASL_SSL", tls=CERTIFICATE, sasl_mechanisms=PLAIN_ONLY),
        [],
    ),
}


@pytest.mark.parametrize("name", EXPOSED)
def test_a_listener_that_is_open_to_others_is_warned_of(name: str) -> None:
    """No login beyond this machine, or a password in the clear: it works, and it is said at the start."""
    listener, expected = EXPOSED[name]
    warnings = listener.warnings()
    assert len(warnings) == len(expected)
    assert all(words in warning for words, warning in zip(expected, warnings, strict=True))


def test_a_broker_says_at_its_start_what_is_open(caplog: pytest.LogCaptureFixture) -> None:
    """One line at WARNING, with what to do."""
    listener = ListenerSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms=PLAIN_ONLY)
    with EmbeddedBroker(listeners=[listener], plain_users={"ann": "secret"}):
        pass
    [line] = [record for record in caplog.records if "PLAIN passwords" in record.getMessage()]
    assert line.levelname == "WARNING"
    assert "SASL_SSL" in line.getMessage()


def test_a_client_of_an_ipv6_socket_has_its_ipv4_address() -> None:
    """A rule that shuts 127.0.0.1 out also holds where the socket calls it ::ffff:127.0.0.1."""
    listener = ListenerSettings(host="::ffff:127.0.0.1", advertised_host="127.0.0.1")
    config = {"authorizer.class.name": "any", "allow.everyone.if.no.acl.found": "true"}
    broker = EmbeddedBroker(listeners=[listener], config=config)
    with broker, Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics("orders")
        broker.call(lambda: broker.broker.authorizer.add([AclBinding(ResourceType.TOPIC, "orders")]))
        assert "orders" in admin.list_topics()
        shut_out = AclBinding(ResourceType.TOPIC, "orders", host="127.0.0.1", permission=Permission.DENY)
        broker.call(lambda: broker.broker.authorizer.add([shut_out]))
        assert "orders" not in admin.list_topics()


@pytest.mark.parametrize("spelling", ["10.0.0.1", "::ffff:10.0.0.1", "::FFFF:a00:1", "0:0:0:0:0:ffff:a00:1"])
@pytest.mark.parametrize("client", ["/10.0.0.1", "/::ffff:10.0.0.1", "10.0.0.1"])
def test_a_rule_holds_for_every_spelling_of_an_address(spelling: str, client: str) -> None:
    """Java writes IPv6 addresses in full, others write them short; a DENY must not depend on that."""
    authorizer = Authorizer(allow_if_no_acl=True)
    everybody = AclBinding(ResourceType.TOPIC, "orders")
    authorizer.add([everybody, AclBinding(ResourceType.TOPIC, "orders", host=spelling, permission=Permission.DENY)])
    eve: Any = SimpleNamespace(principal="User:eve", host=client)
    other: Any = SimpleNamespace(principal="User:eve", host="/10.0.0.2")
    assert not authorizer.allows(eve, Operation.READ, ResourceType.TOPIC, "orders")
    assert authorizer.allows(other, Operation.READ, ResourceType.TOPIC, "orders")
