"""TLS against real sockets, SASL against the server side of the SCRAM library."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import ipaddress
import socket
import ssl
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import example, given
from hypothesis import strategies as st
from scramp import ScramMechanism

from semel.client.config import SecurityConfig
from semel.client.security import explain_sasl_failure, explain_tls_failure, make_ssl_context, sasl_client
from semel.errors import AuthenticationFailed, BrokerUnreachable, ConfigError, InvalidState, SemelError

SECRET = "s3cret-Pa55"
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)

# -- certificates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self, password: str | None = None) -> bytes:
        encryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def make_identity(
    name: str, issuer: Identity | None = None, *, names: tuple[str, ...] = (), valid: tuple[int, int] = (-1, 1)
) -> Identity:
    """Signed by `issuer`, or by itself as an authority; valid for the given days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    alternatives = [
        x509.IPAddress(ipaddress.ip_address(n)) if n[0].isdigit() else x509.DNSName(n) for n in names or ("nobody",)
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + valid[0] * DAY)
        .not_valid_after(NOW + valid[1] * DAY)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    )
    return Identity(builder.sign(key if issuer is None else issuer.key, hashes.SHA256()), key)


@dataclass(frozen=True)
class Files:
    """One set of certificates on disk for all tests."""

    folder: Path
    authority: Identity

    def write(self, name: str, *parts: bytes) -> str:
        path = self.folder / name
        path.write_bytes(b"".join(parts))
        return str(path)

    def server(self, name: str, **details: Any) -> str:
        """A server's certificate and key in one file."""
        identity = make_identity(name, self.authority, names=("localhost", "127.0.0.1"), **details)
        return self.write(f"{name}.pem", identity.certificate_pem(), identity.key_pem())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    authority = make_identity("authority")
    made = Files(tmp_path_factory.mktemp("certificates"), authority)
    made.write("ca.pem", authority.certificate_pem())
    made.write("stranger.pem", make_identity("stranger").certificate_pem())
    made.server("broker")
    client = make_identity("client", authority)
    made.write("client.pem", client.certificate_pem())
    made.write("client.key", client.key_pem())
    made.write("client-encrypted.key", client.key_pem(SECRET))
    made.write("client-both.pem", client.key_pem(), client.certificate_pem())
    return made


def security_for(files: Files, **changes: Any) -> SecurityConfig:
    """TLS that trusts the tests' authority; file names are inside the folder."""
    in_folder = {
        key: str(files.folder / value) for key, value in changes.items() if key.endswith("_location") and value
    }
    return replace(SecurityConfig(protocol="SSL", ca_location=str(files.folder / "ca.pem")), **(changes | in_folder))


# -- servers -----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on loopback that gives its first connection to `handle` and ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def run() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the test failed before it connected
        with connection:
            connection.settimeout(10)
            handle(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(timeout=15)
        listener.close()
        assert not thread.is_alive()


def tls_echo(certificate: str, *, demand: str | None = None, version: ssl.TLSVersion | None = None) -> Any:
    """A TLS server that echoes four bytes; `demand` is the authority that client certificates must come from."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    if demand is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(demand)

    def handle(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as tls:
            try:
                tls.do_handshake()
                tls.sendall(tls.recv(4))
            except OSError:
                # The client refused us or we refused it; what the client makes of it is what the test looks at.
                with socket.socket(fileno=tls.detach()) as plain:
                    drain(plain)

    return handle


def drain(connection: socket.socket) -> None:
    """Read to the end: closing with unread bytes would reset the connection before the client has read the alert."""
    connection.settimeout(10)
    try:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            continue
    except OSError:
        return


def talk(port: int, security: SecurityConfig, host: str = "localhost") -> bytes:
    """Handshake and one echo; raises what a user would meet."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        try:
            with make_ssl_context(security).wrap_socket(plain, server_hostname=host) as tls:
                tls.sendall(b"ping")
                return tls.recv(4)
        except OSError as error:
            raise explain_tls_failure(error, host, port) from error


def failure(handle: Any, security: SecurityConfig, kind: type[SemelError], host: str = "localhost") -> str:
    with serving(handle) as port, pytest.raises(kind) as caught:
        talk(port, security, host)
    assert type(caught.value) is kind
    assert f"{host}:{port}" in str(caught.value)
    return str(caught.value)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_broker_with_a_trusted_certificate_is_reached(files: Files, host: str) -> None:
    """The right authority and a name or address in the certificate are enough."""
    with serving(tls_echo(files.server("broker"))) as port:
        assert talk(port, security_for(files), host) == b"ping"


def test_unknown_authority_is_refused_with_the_setting_to_write(files: Files) -> None:
    """Neither another authority nor the system's list vouches for the broker."""
    for ca in ("stranger.pem", None):
        message = failure(tls_echo(files.server("broker")), security_for(files, ca_location=ca), AuthenticationFailed)
        assert "authority that is not trusted" in message
        assert "ssl.ca.location" in message


def test_self_signed_certificate_is_refused_until_it_is_named(files: Files) -> None:
    """The message says what is special, and following its advice works."""
    alone = make_identity("alone", names=("localhost",))
    server = files.write("alone-server.pem", alone.certificate_pem(), alone.key_pem())
    files.write("alone.pem", alone.certificate_pem())
    assert "self-signed" in failure(tls_echo(server), security_for(files), AuthenticationFailed)
    with serving(tls_echo(server)) as port:
        assert talk(port, security_for(files, ca_location="alone.pem")) == b"ping"


@pytest.mark.parametrize("host", ["other.example", "127.0.0.2"])
def test_certificate_for_another_name_is_refused_unless_names_are_not_checked(files: Files, host: str) -> None:
    """The advice of the message works: the same broker is reached with an empty identification algorithm."""
    server = files.server("broker")
    message = failure(tls_echo(server), security_for(files), AuthenticationFailed, host)
    assert "not made out to that name" in message
    assert 'ssl.endpoint.identification.algorithm=""' in message
    with serving(tls_echo(server)) as port:
        assert talk(port, security_for(files, check_hostname=False), host) == b"ping"


@pytest.mark.parametrize(("valid", "says"), [((-3, -1), "has expired"), ((1, 3), "is not valid yet")])
def test_certificate_outside_of_its_time_is_refused(files: Files, valid: tuple[int, int], says: str) -> None:
    """Expired and not yet valid are different advice."""
    server = files.server(f"time{valid[0]}", valid=valid)
    assert says in failure(tls_echo(server), security_for(files), AuthenticationFailed)


def test_verification_can_be_switched_off(files: Files) -> None:
    """enable.ssl.certificate.verification=false trusts anybody under any name."""
    with serving(tls_echo(files.server("broker"))) as port:
        security = security_for(files, ca_location="stranger.pem", verify_certificate=False)
        assert talk(port, security, "other.example") == b"ping"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_missing_client_certificate_is_named(files: Files, version: ssl.TLSVersion) -> None:
    """TLS 1.3 reports it at the first read, TLS 1.2 in the handshake: the same sentence for both."""
    server = tls_echo(files.server("broker"), demand=str(files.folder / "ca.pem"), version=version)
    message = failure(server, security_for(files), AuthenticationFailed)
    assert "demands a client certificate" in message
    assert "ssl.certificate.location" in message


@pytest.mark.parametrize(
    "identity",
    [
        {"certificate_location": "client.pem", "key_location": "client.key"},
        {"certificate_location": "client-both.pem"},
        {"certificate_location": "client-both.pem", "key_location": "client-both.pem"},
        {"certificate_location": "client.pem", "key_location": "client-encrypted.key", "key_password": SECRET},
    ],
)
def test_client_certificate_is_presented(files: Files, identity: dict[str, str]) -> None:
    """Key apart, in the same file, or encrypted."""
    with serving(tls_echo(files.server("broker"), demand=str(files.folder / "ca.pem"))) as port:
        assert talk(port, security_for(files, **identity)) == b"ping"


def test_client_certificate_of_an_unknown_authority_is_refused_by_the_broker(files: Files) -> None:
    """The advice is about the client's certificate, not about the broker's."""
    server = tls_echo(files.server("broker"), demand=str(files.folder / "stranger.pem"))
    security = security_for(files, certificate_location="client-both.pem")
    assert "refuses the client certificate" in failure(server, security, AuthenticationFailed)


def answer_in_plain_text(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"\0\0\0\x0a hello there")
    drain(connection)


def close_at_once(connection: socket.socket) -> None:
    """What a plaintext listener of Kafka does: the handshake reads as a request of 369 MB."""
    connection.recv(4096)


@pytest.mark.parametrize("handle", [answer_in_plain_text, close_at_once])
def test_plaintext_port_is_recognised(files: Files, handle: Any) -> None:
    """Whether the broker answers or hangs up, the advice is the port or the protocol."""
    message = failure(handle, security_for(files), BrokerUnreachable)
    assert "security.protocol=PLAINTEXT" in message


def test_broker_that_shares_no_tls_version_is_told_apart() -> None:
    """An alert about versions is not about certificates."""
    error = ssl.SSLError(1, "alert")
    error.reason = "TLSV1_ALERT_PROTOCOL_VERSION"
    assert "TLS 1.2 or newer" in str(explain_tls_failure(error, "b", 1))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TimeoutError(), "did not answer the TLS handshake in time"),
        (ConnectionResetError(104, "reset"), "likely a port without TLS"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (ssl.SSLError(), "SSLError"),
    ],
)
def test_other_failures_of_the_handshake_are_unreachable(error: OSError, says: str) -> None:
    """Whatever the operating system says becomes one sentence with the address, IPv6 in brackets."""
    explained = explain_tls_failure(error, "::1", 9093)
    assert isinstance(explained, BrokerUnreachable)
    assert says in str(explained)
    assert "[::1]:9093" in str(explained)


def test_connection_that_ends_after_the_handshake_points_to_the_client_certificate() -> None:
    """Under TLS 1.3 the broker's alert may be overtaken by the end of the connection."""
    explained = explain_tls_failure(ConnectionResetError(), "b", 9093, handshake_done=True)
    assert isinstance(explained, BrokerUnreachable)
    assert "ssl.certificate.location" in str(explained)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ca_location": "missing.pem"}, "missing.pem' cannot be read (No such file or directory)"),
        ({"ca_location": "."}, "cannot be read (Is a directory)"),
        ({"ca_location": "client.key"}, "holds no certificate in PEM form"),
        ({"certificate_location": "missing.pem"}, "ssl.certificate.location"),
        ({"certificate_location": "client.pem", "key_location": "missing.key"}, "ssl.key.location"),
        ({"certificate_location": "client.pem"}, "do not hold a certificate and a private key"),
        ({"certificate_location": "client.pem", "key_location": "client-encrypted.key"}, "write its password"),
        (
            {"certificate_location": "client.pem", "key_location": "client-encrypted.key", "key_password": "wrong-one"},
            "ssl.key.password does not open the key",
        ),
        (
            {"certificate_location": "client.pem", "key_location": "client-encrypted.key", "key_password": "x" * 2000},
            "ssl.key.password does not open the key",
        ),
        ({"certificate_location": "client.pem", "key_location": "broker.pem"}, "does not belong to the certificate"),
    ],
)
def test_files_that_cannot_be_used_are_config_errors(files: Files, changes: dict[str, str], says: str) -> None:
    """Each names the file or setting, shows no password, and never asks for one on the terminal."""
    with pytest.raises(ConfigError) as caught:
        make_ssl_context(security_for(files, **changes))
    assert says in str(caught.value)
    assert "wrong-one" not in str(caught.value)
    assert "xxxx" not in str(caught.value)


# -- SASL --------------------------------------------------------------------------------------------------------------

SCRAM = ["SCRAM-SHA-256", "SCRAM-SHA-512"]
SALT = b"a salt of length"
GOOD_CHALLENGE = b"r=abcd,s=%s,i=4096" % base64.b64encode(SALT)


def login(mechanism: str, username: str = "ann", password: str = SECRET) -> SecurityConfig:
    return SecurityConfig(protocol="SASL_SSL", sasl_mechanism=mechanism, username=username, password=password)


def scram_server(mechanism: str, password: str = SECRET) -> Any:
    scram = ScramMechanism(mechanism)
    return scram.make_server(lambda username: scram.make_auth_info(password))


def test_plain_sends_user_and_password_once() -> None:
    """RFC 4616 with an empty authorization identity; the broker's empty answer ends it."""
    exchange = sasl_client(login("PLAIN", "änne", "pä:ß"))
    assert exchange.first() == b"\0" + "änne".encode() + b"\0" + "pä:ß".encode()
    assert exchange.next(b"") is None


def test_plain_refuses_what_it_cannot_carry() -> None:
    """A NUL would shift the password into another field."""
    with pytest.raises(ConfigError, match="NUL") as caught:
        sasl_client(login("PLAIN", password=f"{SECRET}\0x"))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("mechanism", SCRAM)
@pytest.mark.parametrize("username", ["ann", "a=b,c"])
def test_scram_exchange_ends_with_both_sides_satisfied(mechanism: str, username: str) -> None:
    """Against an independent server side, with characters that the message format must escape."""
    exchange, server = sasl_client(login(mechanism, username)), scram_server(mechanism)
    server.set_client_first(exchange.first().decode())
    final = exchange.next(server.get_server_first().encode())
    assert final is not None
    server.set_client_final(final.decode())
    assert exchange.next(server.get_server_final().encode()) is None
    with pytest.raises(InvalidState, match="over"):
        exchange.next(b"")


def test_scram_agrees_with_the_example_of_rfc_7677() -> None:
    """Known bytes, so that client and server are not wrong together."""
    exchange = sasl_client(login("SCRAM-SHA-256", "user", "pencil"), nonce="rOprNGfwEbeRWgbNEkqO")
    assert exchange.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    assert exchange.next(f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()) == (
        f"c=biws,r={nonce},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=".encode()
    )
    assert exchange.next(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=") is None


def test_scram_hashes_the_password_as_it_is_written() -> None:
    """Kafka does no SASLprep: its brokers hash the UTF-8 bytes of a hard space or a ligature as they are."""
    password = "a\u00a0ﬁ\x07ª"
    exchange = sasl_client(login("SCRAM-SHA-256", password=password), nonce="abc")
    first_bare = exchange.first().decode().removeprefix("n,,")
    server_first = GOOD_CHALLENGE.decode()
    final = exchange.next(GOOD_CHALLENGE)
    assert final is not None
    without_proof, _, proof = final.decode().rpartition(",p=")

    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), SALT, 4096)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(
        hashlib.sha256(client_key).digest(), f"{first_bare},{server_first},{without_proof}".encode(), "sha256"
    )
    assert base64.b64decode(proof) == bytes(a ^ b for a, b in zip(client_key, signature, strict=True))


@pytest.mark.parametrize("mechanism", SCRAM)
def test_scram_with_a_wrong_password_is_refused_by_the_server(mechanism: str) -> None:
    """The server's error becomes the advice about user and password."""
    exchange, server = sasl_client(login(mechanism)), scram_server(mechanism, password="another")
    server.set_client_first(exchange.first().decode())
    final = exchange.next(server.get_server_first().encode())
    assert final is not None
    with pytest.raises(Exception, match="proof"):
        server.set_client_final(final.decode())
    with pytest.raises(AuthenticationFailed, match=r"refused the login of 'ann'.*sasl\.password") as caught:
        exchange.next(server.get_server_final().encode())
    assert SECRET not in str(caught.value)


def test_server_that_does_not_know_the_password_is_an_impostor() -> None:
    """A server that accepts anybody cannot make the signature, and the client walks away."""
    exchange, server = sasl_client(login("SCRAM-SHA-512")), scram_server("SCRAM-SHA-512", password="guess")
    server.set_client_first(exchange.first().decode())
    exchange.next(server.get_server_first().encode())
    forged = base64.b64encode(hashlib.sha512(b"forged").digest())
    with pytest.raises(AuthenticationFailed, match="did not prove") as caught:
        exchange.next(b"v=" + forged)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("challenge", "says"),
    [
        (b"", "not valid"),
        (b"\xff\xfe", "not valid"),
        (GOOD_CHALLENGE.replace(b"r=abcd", b"r=other"), "not valid"),
        (GOOD_CHALLENGE.replace(b"r=abcd", b"r=abc"), "not valid"),
        (GOOD_CHALLENGE.replace(b"i=4096", b"i=4095"), "not valid"),
        (GOOD_CHALLENGE.replace(b"i=4096", b"i=99999999"), "not valid"),
        (GOOD_CHALLENGE.replace(b"s=", b"s=*"), "not valid"),
        (b"e=unknown-user", "refused the login"),
        (b"e=", "refused the login"),
    ],
)
def test_challenge_of_a_dishonest_server_is_refused(challenge: bytes, says: str) -> None:
    """Another nonce, hashing too weak to protect the password, or so strong that it would hang us."""
    exchange = sasl_client(login("SCRAM-SHA-256"), nonce="abc")
    exchange.first()
    with pytest.raises(AuthenticationFailed, match=says):
        exchange.next(challenge)


@given(st.binary(max_size=60))
@example(b"v=")
def test_any_bytes_of_a_server_end_in_authentication_failed(garbage: bytes) -> None:
    """Neither of the two challenges lets another exception or a success through."""
    exchange = sasl_client(login("SCRAM-SHA-256"), nonce="abc")
    exchange.first()
    with pytest.raises(AuthenticationFailed):
        exchange.next(garbage)
    exchange = sasl_client(login("SCRAM-SHA-256"), nonce="abc")
    exchange.first()
    exchange.next(GOOD_CHALLENGE)
    with pytest.raises(AuthenticationFailed):
        exchange.next(garbage)


@pytest.mark.parametrize("mechanism", ["GSSAPI", "OAUTHBEARER", None])
def test_other_mechanisms_are_refused_with_the_supported_ones(mechanism: str | None) -> None:
    """Even for an object that did not come through the checks of SecurityConfig."""
    unchecked: Any = SimpleNamespace(sasl_mechanism=mechanism, username="ann", password=SECRET)
    with pytest.raises(ConfigError, match="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"):
        sasl_client(unchecked)


def test_login_without_credentials_is_refused() -> None:
    """SCRAM with an empty password would log in as somebody without one."""
    unchecked: Any = SimpleNamespace(sasl_mechanism="PLAIN", username="ann", password=None)
    with pytest.raises(ConfigError, match=r"sasl\.password"):
        sasl_client(unchecked)


def test_mechanism_that_is_not_enabled_is_answered_with_the_brokers_list() -> None:
    """Of what the broker offers, the advice names what this client can do."""
    offered = ["GSSAPI", "SCRAM-SHA-512"]
    message = str(explain_sasl_failure(login("PLAIN"), "b:9092", offered=offered))
    assert "b:9092 does not offer PLAIN (it offers GSSAPI, SCRAM-SHA-512)" in message
    assert message.endswith("write sasl.mechanism=SCRAM-SHA-512.")
    assert "enable PLAIN on the broker" in str(explain_sasl_failure(login("PLAIN"), "b:9092", offered=["GSSAPI"]))
    assert "it offers none" in str(explain_sasl_failure(login("PLAIN"), "b:9092", offered=[]))


def test_refused_login_repeats_the_brokers_words_within_bounds() -> None:
    """Useful words are shown; line breaks and endless text do not reach a log."""
    said = "Authentication failed: invalid credentials\n\x1b[31m" + "x" * 10_000
    message = str(explain_sasl_failure(login("SCRAM-SHA-256"), "b:9092", said=said))
    assert message.startswith("b:9092 refused the login of 'ann' with SCRAM-SHA-256")
    assert "invalid credentials" in message
    assert message.isprintable()
    assert len(message) < 500


def test_broker_that_repeats_the_password_is_not_quoted() -> None:
    """The broker's words are left out rather than shown with the password in them."""
    message = str(explain_sasl_failure(login("PLAIN"), "b:9092", said=f"bad password {SECRET}"))
    assert SECRET not in message
    assert "sasl.password" in message


def test_the_oldest_allowed_scramp_is_one_that_scram_works_with() -> None:
    """Before 1.4.10 a broker could ask for any number of iterations; before 1.4.18 no login worked at all."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [needed] = [each for each in project["dependencies"] if each.startswith("scramp")]
    assert needed == "scramp>=1.4.18"
