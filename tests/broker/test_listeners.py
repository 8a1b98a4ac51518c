"""Listeners: what may be left out, what contradicts itself, and how a test's `Security` becomes listeners."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from semel.broker.listeners import ListenerSettings, TlsSettings, check_listeners
from semel.errors import ConfigError
from semel.testing.certificates import make_certificates
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
