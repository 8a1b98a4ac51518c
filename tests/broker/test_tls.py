"""TLS on the broker's side: real handshakes over memory and over a socket, files that are wrong, and who is named."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from semel.broker.listeners import ClientAuth, ListenerSettings, TlsSettings
from semel.broker.sockets import TlsConnection
from semel.broker.tls import TlsChannel, TlsFailed, distinguished_name, server_context
from semel.client.config import ClientConfig, SecurityConfig
from semel.client.connection import Connection
from semel.errors import AuthenticationFailed, ConfigError, SemelError, WireError
from semel.private_files import write_private_text
from semel.testing.certificates import Certificates, make_certificates
from semel.testing.embedded import EmbeddedBroker
from semel.verify.hostile_sockets import ask
from semel.wire.api import Api


class Files:
    """The broker's and the client's side of one set of certificates, as files."""

    def __init__(self, folder: Path) -> None:
        self.certificates: Certificates = make_certificates()
        self.client = self.certificates.write(folder)
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"
        self.certificate.write_text(self.certificates.server.certificate_pem)
        write_private_text(self.key, self.certificates.server.key_pem)
        self.folder = folder

    def listener(self, client_auth: ClientAuth = "none", **fields: str) -> ListenerSettings:
        given = {"certificate_path": str(self.certificate), "key_path": str(self.key), **fields}
        tls = TlsSettings(**given, client_ca_path=str(self.client.ca), client_auth=client_auth)  # type: ignore[arg-type]
        return ListenerSettings(security_protocol="SSL", tls=tls)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


# -- over memory -------------------------------------------------------------------------------------------------------


class Client:
    """A TLS client over memory, joined to a channel of the broker."""

    def __init__(self, channel: TlsChannel, context: ssl.SSLContext) -> None:
        self.channel = channel
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    def exchange(self) -> bytes:
        """Carries bytes both ways once; what the broker has read."""
        self.channel.feed(self._outgoing.read())
        received, buffer = b"", bytearray(1000)
        try:
            while count := self.channel.read_into(memoryview(buffer)):
                received += buffer[:count]
        finally:
            self._incoming.write(self.channel.take_outgoing())
        return received

    def shake_hands(self) -> None:
        for _ in range(4):
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.exchange()
            else:
                self.exchange()
                return
        raise AssertionError("the handshake does not end")


def client_context(files: Files, *, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=files.client.ca)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_bytes_go_both_ways(files: Files, version: ssl.TLSVersion) -> None:
    """A handshake, a message larger than a TLS record in each direction, and an end that is said."""
    channel = TlsChannel(server_context(files.listener()))
    client = Client(channel, client_context(files, version=version))
    client.shake_hands()
    assert channel.is_established
    assert channel.principal == "User:ANONYMOUS"
    message = bytes(range(256)) * 400
    client.tls.write(message)
    assert client.exchange() == message
    channel.write(message)
    client.exchange()
    answer = b""
    while len(answer) < len(message):
        answer += client.tls.read(100_000)
    assert answer == message
    channel.end()
    client.exchange()
    assert client.tls.read(1) == b""


def test_the_end_of_a_client_is_seen(files: Files) -> None:
    """A client's goodbye is told from a moment without bytes."""
    channel = TlsChannel(server_context(files.listener()))
    client = Client(channel, client_context(files))
    client.shake_hands()
    assert channel.read_into(memoryview(bytearray(10))) == 0
    with pytest.raises(ssl.SSLError):
        client.tls.unwrap()
    client.exchange()
    assert channel.read_into(memoryview(bytearray(10))) is None


@pytest.mark.parametrize("client_auth", ["requested", "required"])
def test_a_client_certificate_names_the_client(files: Files, client_auth: ClientAuth) -> None:
    """Its subject is the principal, as Kafka's default principal builder has it."""
    context = client_context(files)
    context.load_cert_chain(files.client.client_certificate, files.client.client_key)
    channel = TlsChannel(server_context(files.listener(client_auth)))
    Client(channel, context).shake_hands()
    assert channel.principal == "User:CN=semel-client"


def test_a_client_without_certificate_is_anonymous_where_it_is_only_requested(files: Files) -> None:
    """Nothing is demanded of it, and nothing is known of it."""
    channel = TlsChannel(server_context(files.listener("requested")))
    Client(channel, client_context(files)).shake_hands()
    assert channel.principal == "User:ANONYMOUS"


def test_an_old_protocol_is_refused(files: Files) -> None:
    """Below TLS 1.2 there is no handshake, and the client is told so by an alert."""
    context = client_context(files)
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        context.minimum_version = ssl.TLSVersion.TLSv1_1
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    client = Client(TlsChannel(server_context(files.listener())), context)
    with pytest.raises(TlsFailed):
        client.shake_hands()
    with pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"):
        client.tls.do_handshake()


@pytest.mark.parametrize("sent", [b"\0\0\0\x10\0\x12\0\x03more", b"GET / HTTP/1.1\r\n\r\n", bytes(300)])
def test_what_is_not_tls_is_answered_with_an_alert(files: Files, sent: bytes) -> None:
    """A client that speaks plaintext can tell from the first bytes what kind of port it met."""
    channel = TlsChannel(server_context(files.listener()))
    channel.feed(sent)
    with pytest.raises(TlsFailed):
        channel.read_into(memoryview(bytearray(100)))
    assert channel.take_outgoing()[:2] == b"\x15\x03"
    assert channel.take_outgoing() == b""


# -- over a socket, with Semel's own client ----------------------------------------------------------------------------


@contextmanager
def tls_server(listener: ListenerSettings) -> Iterator[int]:
    """Takes one connection, does what the channel says, sends what it has to send, and hangs up on a failure."""
    context = server_context(listener)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def serve() -> None:
            peer, _ = server.accept()
            channel, buffer = TlsChannel(context), memoryview(bytearray(1000))
            with peer:
                peer.settimeout(10)
                while received := peer.recv(10_000):
                    channel.feed(received)
                    try:
                        while channel.read_into(buffer):
                            pass
                    except TlsFailed:
                        with suppress(OSError):  # the client may be the first to hang up
                            peer.sendall(channel.take_outgoing())
                            # Closing over bytes that were not read resets the connection, and the alert is lost.
                            peer.shutdown(socket.SHUT_WR)
                            while peer.recv(10_000):
                                pass
                        return
                    peer.sendall(channel.take_outgoing())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)
        assert not thread.is_alive()


def failure(listener: ListenerSettings, security: SecurityConfig) -> SemelError:
    """How Semel's own client fails to connect."""
    with tls_server(listener) as port:
        config = ClientConfig(bootstrap=(("localhost", port),), security=security, connection_setup_timeout_ms=2_000)
        with pytest.raises(SemelError) as caught:
            Connection("localhost", port, config)
    return caught.value


def test_a_missing_client_certificate_is_told_to_the_client(files: Files) -> None:
    """The alert leaves before the connection ends: the client knows what was missing."""
    trusting = SecurityConfig(protocol="SSL", ca_location=str(files.client.ca))
    error = failure(files.listener("required"), trusting)
    assert type(error) is AuthenticationFailed
    assert "demands a client certificate" in str(error)


@pytest.mark.parametrize("client_auth", ["requested", "required"])
def test_a_strangers_certificate_is_refused(files: Files, client_auth: ClientAuth) -> None:
    """A certificate that is shown has to be a good one, also where none is demanded."""
    stranger = SecurityConfig(
        protocol="SSL",
        ca_location=str(files.client.ca),
        certificate_location=str(files.client.stranger_certificate),
        key_location=str(files.client.stranger_key),
    )
    error = failure(files.listener(client_auth), stranger)
    assert type(error) is AuthenticationFailed
    assert "ssl.certificate.location" in str(error)


def test_an_unknown_authority_is_noticed_by_the_client(files: Files) -> None:
    """The client's alert ends the handshake on this side too."""
    error = failure(files.listener(), SecurityConfig(protocol="SSL", ca_location=str(files.client.stranger_ca)))
    assert type(error) is AuthenticationFailed
    assert "not trusted" in str(error)


def test_a_plaintext_client_is_told_that_the_port_speaks_tls(files: Files) -> None:
    """What the conformance tests ask of Apache Kafka holds here: the port is recognised."""
    error = failure(files.listener(), SecurityConfig())
    assert type(error) is WireError
    assert "speaks TLS" in str(error)


# -- files that are wrong ----------------------------------------------------------------------------------------------


def test_files_that_are_wrong_are_named(files: Files, tmp_path: Path) -> None:
    """Each mistake has its own sentence, with the file's name in it."""
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    other_key = tmp_path / "other.key"
    write_private_text(other_key, make_certificates().server.key_pem)
    for fields, words in [
        ({"certificate_path": "absent.pem"}, r"certificate 'absent\.pem' cannot be read \(No such file"),
        ({"key_path": "absent.key"}, r"key of .* 'absent\.key' cannot be read"),
        ({"certificate_path": str(empty)}, r"empty\.pem' and .* do not hold"),
        ({"key_path": str(empty)}, r"empty\.pem' do not hold"),
        ({"key_path": str(other_key)}, r"other\.key' does not belong to"),
    ]:
        with pytest.raises(ConfigError, match=words):
            server_context(files.listener("none", **fields))
    for path, words in [("absent-ca.pem", "cannot be read"), (str(empty), "no certificate in PEM form")]:
        tls = TlsSettings(
            certificate_path=str(files.certificate),
            key_path=str(files.key),
            client_ca_path=path,
            client_auth="required",
        )
        with pytest.raises(ConfigError, match=words):
            server_context(ListenerSettings(security_protocol="SSL", tls=tls))


def test_an_encrypted_key_needs_its_password(files: Files, tmp_path: Path) -> None:
    """Without it nobody is asked on the terminal, and a wrong one is not repeated."""
    key = load_pem_private_key(files.key.read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.touch(0o600)
    encrypted.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open")))
    server_context(files.listener(key_path=str(encrypted), key_password="open"))
    with pytest.raises(ConfigError, match="is encrypted"):
        server_context(files.listener(key_path=str(encrypted)))
    with pytest.raises(ConfigError, match="does not open") as caught:
        server_context(files.listener(key_path=str(encrypted), key_password="hunter22"))
    assert "hunter22" not in str(caught.value)


def test_key_and_certificate_may_be_in_one_file(files: Files, tmp_path: Path) -> None:
    """As Java's PEM key stores have them."""
    both = tmp_path / "both.pem"
    write_private_text(both, files.key.read_text() + files.certificate.read_text())
    tls = TlsSettings(certificate_path=str(both))
    assert server_context(ListenerSettings(security_protocol="SSL", tls=tls)).verify_mode is ssl.CERT_NONE


# -- who is named ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        [("commonName", "client"), ("organizationName", "Semel"), ("countryName", "DE")],
        [("commonName", 'a,b+c"d\\e<f>g;h=i')],
        [("commonName", "#first"), ("organizationalUnitName", " both ")],
        [("domainComponent", "example"), ("domainComponent", "www"), ("userId", "ann")],
        [("localityName", "Köln"), ("stateOrProvinceName", "NRW"), ("streetAddress", "Ring 1")],
    ],
)
def test_a_subject_is_written_as_rfc_4514_has_it(parts: list[tuple[str, str]]) -> None:
    """The name that an independent library writes for the same subject is the same, special characters included."""
    numbers = {
        "commonName": x509.NameOID.COMMON_NAME,
        "organizationName": x509.NameOID.ORGANIZATION_NAME,
        "organizationalUnitName": x509.NameOID.ORGANIZATIONAL_UNIT_NAME,
        "countryName": x509.NameOID.COUNTRY_NAME,
        "localityName": x509.NameOID.LOCALITY_NAME,
        "stateOrProvinceName": x509.NameOID.STATE_OR_PROVINCE_NAME,
        "streetAddress": x509.NameOID.STREET_ADDRESS,
        "domainComponent": x509.NameOID.DOMAIN_COMPONENT,
        "userId": x509.NameOID.USER_ID,
    }
    subject = tuple(((name, value),) for name, value in parts)
    expected = x509.Name([x509.NameAttribute(numbers[name], value) for name, value in parts]).rfc4514_string()
    assert distinguished_name(subject) == expected


def test_an_attribute_without_a_short_name_is_written_in_numbers(files: Files) -> None:
    """Java writes an e-mail address as its number and its bytes; the subject comes from a real certificate here."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.EMAIL_ADDRESS, "a@b.c"),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, "client"),
        ]
    )
    source = x509.load_pem_x509_certificate(files.certificates.client.certificate_pem.encode())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(source.not_valid_before_utc)
        .not_valid_after(source.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)  # the module lists only these
        .sign(key, hashes.SHA256())
    )
    own = files.folder / "own.pem"
    own.write_bytes(certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=own)
    [decoded] = context.get_ca_certs()
    subject_of_the_module: Any = decoded["subject"]
    assert distinguished_name(subject_of_the_module) == "CN=client,1.2.840.113549.1.9.1=#16056140622e63"


# -- many at once ------------------------------------------------------------------------------------------------------


def hello_of(files: Files) -> bytes:
    """The first message of a client, which the broker answers with a signature."""
    outgoing = ssl.MemoryBIO()
    tls = client_context(files).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@contextmanager
def strangers(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections on which nothing is said."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(count)]


def port_of(broker: EmbeddedBroker) -> int:
    return int(broker.bootstrap.rpartition(":")[2])


@pytest.mark.parametrize("client_auth", ["none", "required"])
def test_strangers_do_not_close_the_connections_of_clients(files: Files, client_auth: ClientAuth) -> None:
    """They said nothing, counted as logged in, and filled the half of the budget that is for clients."""
    config = {"semel.client.memory.max.bytes": str(32 << 20)}
    context = client_context(files)
    context.load_cert_chain(files.client.client_certificate, files.client.client_key)
    with EmbeddedBroker(listeners=[files.listener(client_auth)], config=config) as broker:
        port = port_of(broker)

        def client() -> ssl.SSLSocket:
            raw = socket.create_connection(("127.0.0.1", port), timeout=30)
            connected = context.wrap_socket(raw, server_hostname="localhost")
            ask(connected, Api.API_VERSIONS, 0)
            return connected

        with client() as before, strangers(port, 300) as silent, client() as after:
            for connected in (before, after):
                ask(connected, Api.API_VERSIONS, 0)
            # The oldest of them have gone: a client that comes after them finds room for its handshake.
            assert silent[0].recv(1) == b""


def test_handshakes_are_computed_one_in_each_turn(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """To sign takes milliseconds: two hundred hellos at once held the loop for 200 ms."""
    turn, turns = 0, list[int]()
    shake_hands = TlsConnection._shake_hands

    def next_turn() -> None:
        nonlocal turn
        turn += 1

    def counted(connection: TlsConnection) -> None:
        turns.append(turn)
        asyncio.get_running_loop().call_soon(next_turn)
        shake_hands(connection)

    monkeypatch.setattr(TlsConnection, "_shake_hands", counted)
    with EmbeddedBroker(listeners=[files.listener()]) as broker, strangers(port_of(broker), 40) as silent:
        hello = hello_of(files)
        for stranger in silent:
            stranger.sendall(hello)
        for stranger in silent:
            assert stranger.recv(1)
    assert len(turns) == len(set(turns)) == 40
