"""What a broker is told about its listeners, and certificates that hold in a real handshake."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.testing.certificates import Certificates, make_certificates
from semel.testing.kafka_node import write_properties
from semel.testing.security import KeyPair, Security, Tls

TLS = Tls(server=KeyPair(key_pem="key", certificate_pem="certificate"), ca_pem="ca")


@pytest.mark.parametrize(
    ("security", "protocols"),
    [
        (Security(), ("PLAINTEXT",)),
        (Security(tls=TLS), ("PLAINTEXT", "SSL")),
        (Security(scram={"bob": "secret"}), ("PLAINTEXT", "SASL_PLAINTEXT")),
        (Security(tls=TLS, plain={"ann": "secret"}), ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")),
    ],
)
def test_listeners_follow_from_what_is_given(security: Security, protocols: tuple[str, ...]) -> None:
    """TLS brings one listener, users another, and both together a third."""
    assert security.protocols == protocols


def test_every_sasl_listener_gets_every_mechanism() -> None:
    """Each of the two listeners has a login module for each of the three mechanisms."""
    settings = Security(tls=TLS, plain={"ann": "secret"}, scram={"bob": "secret"}).properties()
    modules = [key for key in settings if key.endswith("sasl.jaas.config")]
    assert len(modules) == 6
    assert 'user_ann="secret"' in settings["listener.name.sasl_ssl.plain.sasl.jaas.config"]


@pytest.mark.parametrize(
    ("name", "password"), [("a b", "x"), ("ann", 'quo"te'), ("ann", "a,b"), ("ann", ""), ("", "x")]
)
def test_users_that_cannot_be_quoted_are_refused(name: str, password: str) -> None:
    """What Kafka's own tools would misread is refused here, for both kinds of users."""
    with pytest.raises(ConfigError, match="cannot be given to a broker"):
        Security(plain={name: password})
    with pytest.raises(ConfigError, match="cannot be given to a broker"):
        Security(scram={name: password})


def test_secrets_are_not_shown() -> None:
    """A representation in a failed test's output shows neither passwords nor keys."""
    shown = repr(Security(tls=TLS, plain={"ann": "ann-secret"}))
    assert "ann-secret" not in shown
    assert "key_pem" not in shown


def test_properties_are_escaped() -> None:
    """Line ends, backslashes and characters beyond ASCII survive Java's reader of properties."""
    assert write_properties({"a.b": "1\n2\\3", "c": "\u00e9\U0001f600"}) == "a.b=1\\n2\\\\3\nc=\\u00e9\\ud83d\\ude00\n"


def test_package_needs_no_cryptography() -> None:
    """Apache Kafka for tests can be imported where the certificates' dependency is not installed."""
    code = "import sys; sys.modules['cryptography'] = None; import semel.testing, semel.testing.apache_kafka"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def handshake(certificates: Certificates, folder: Path, client: ssl.SSLContext) -> str | None:
    """Shake hands over a real socket with a server that wants a client certificate; the reason if it fails."""
    (folder / "server.pem").write_text(certificates.server.key_pem + certificates.server.certificate_pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem")
    server.load_verify_locations(cadata=certificates.ca_pem)
    server.verify_mode = ssl.CERT_REQUIRED
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            try:
                with server.wrap_socket(theirs, server_side=True) as secured:
                    secured.sendall(b"welcome")
            except ssl.SSLError:
                return  # the client's side reports it

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours, client.wrap_socket(ours, server_hostname="127.0.0.1") as secured:
            assert secured.recv(7) == b"welcome"
            return None
    except ssl.SSLError as error:
        return error.reason
    finally:
        ours.close()
        thread.join(30)


def test_certificates_are_trusted_only_by_their_own_authority(tmp_path: Path) -> None:
    """Server and client accept each other by address; a stranger on either side is refused."""
    certificates = make_certificates()
    files = certificates.write(tmp_path)

    def context(ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(ca))
        made.load_cert_chain(certificate, key)
        return made

    good = context(files.ca, files.client_certificate, files.client_key)
    strange_client = context(files.ca, files.stranger_certificate, files.stranger_key)
    strange_trust = context(files.stranger_ca, files.client_certificate, files.client_key)
    assert handshake(certificates, tmp_path, good) is None
    assert handshake(certificates, tmp_path, strange_client) == "TLSV1_ALERT_UNKNOWN_CA"
    assert handshake(certificates, tmp_path, strange_trust) == "CERTIFICATE_VERIFY_FAILED"
