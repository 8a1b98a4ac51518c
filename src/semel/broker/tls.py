"""TLS on the broker's side: the context from PEM files, a channel as bytes in and out, and who a certificate names."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

from semel.broker.listeners import ListenerSettings
from semel.errors import ConfigError
from semel.pem_files import load_authorities, load_certificate
from semel.private_files import refuse_readable_by_all

ANONYMOUS: Final = "User:ANONYMOUS"

_VERIFY_MODES: Final[Mapping[str, ssl.VerifyMode]] = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}

# -- the context -------------------------------------------------------------------------------------------------------


def server_context(listener: ListenerSettings) -> ssl.SSLContext:
    """The context for a listener's connections. A file that is wrong raises ConfigError with what is wrong about it."""
    settings = listener.tls
    if settings is None:
        raise ConfigError(f"A listener with security.protocol={listener.security_protocol} has no certificate.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could make the broker compute handshakes without end; TLS 1.3 has done away with it.
    context.options |= ssl.OP_NO_RENEGOTIATION
    load_certificate(
        context,
        settings.certificate_path,
        settings.key_path,
        settings.key_password,
        certificate_setting="The broker's certificate",
        key_setting="the key of the broker's certificate",
        password_setting="the password of the key",
    )
    refuse_readable_by_all(settings.key_path or settings.certificate_path, "The key of the broker's certificate")
    if settings.client_ca_path is not None:
        load_authorities(context, settings.client_ca_path, setting="The authority of client certificates")
    context.verify_mode = _VERIFY_MODES[settings.client_auth]
    return context


# -- the channel -------------------------------------------------------------------------------------------------------

# Said where OpenSSL says nothing: to a client whose first bytes are not TLS at all. It would otherwise only see the
# connection end; Java's TLS answers with an alert too. This one is fatal, and is named protocol_version.
_NOT_TLS_ALERT: Final = bytes([0x15, 3, 3, 0, 2, 2, 70])


class TlsFailed(Exception):
    """The conversation is over. What `take_outgoing` still has is the alert that tells the client why: send it."""


class TlsChannel:
    """TLS with one client, without a socket: ciphertext in and out on one side, plain bytes on the other.

    asyncio's own TLS drops the alert of a failed handshake, so that a client without the certificate that is asked for
    only sees the connection end.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.is_established = False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._alert = b""

    @property
    def principal(self) -> str:
        return principal_of(self._tls)

    def feed(self, ciphertext: bytes | bytearray | memoryview) -> None:
        """Takes what was received. Then call `read_into` until it gives 0, and send `take_outgoing`."""
        self._incoming.write(ciphertext)

    def read_into(self, buffer: memoryview) -> int | None:
        """How many plain bytes it has put into the buffer; 0 until more is fed; None once the client has ended."""
        try:
            if not self.is_established:
                self._tls.do_handshake()
                self.is_established = True
            # The module takes any buffer, and returns a count then; its stub knows only bytearrays and bytes.
            tls: Any = self._tls
            return tls.read(len(buffer), buffer) or None
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            if not self.is_established and not self._outgoing.pending:
                self._alert = _NOT_TLS_ALERT
            raise TlsFailed(error.reason or type(error).__name__) from None

    def write(self, plain: bytes | bytearray | memoryview) -> None:
        """Encrypts. An answer of many megabytes is better given in pieces, each sent before the next."""
        rest = memoryview(plain)
        while rest:
            rest = rest[self._tls.write(rest) :]

    def take_outgoing(self) -> bytes:
        """What is to be sent: the handshake, an alert, or what was written."""
        alert, self._alert = self._alert, b""
        return self._outgoing.read() + alert

    def end(self) -> None:
        """Says goodbye (close_notify), so that the client can tell the end from a connection that was cut."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            return  # the client has not said it too, and need not


# -- who it is ---------------------------------------------------------------------------------------------------------

# What Java's RFC 2253 form calls them; an attribute that is not among these is written as its number and bytes.
_SHORT_NAMES: Final[Mapping[str, str]] = {
    "commonName": "CN",
    "countryName": "C",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}
_NUMBERS: Final[Mapping[str, str]] = {
    "emailAddress": "1.2.840.113549.1.9.1",
    "serialNumber": "2.5.4.5",
    "title": "2.5.4.12",
    "givenName": "2.5.4.42",
    "surname": "2.5.4.4",
    "name": "2.5.4.41",
    "initials": "2.5.4.43",
    "dnQualifier": "2.5.4.46",
}
_IA5_STRING, _PRINTABLE_STRING, _UTF8_STRING = 0x16, 0x13, 0x0C
_STRING_TYPES: Final[Mapping[str, int]] = {
    "emailAddress": _IA5_STRING,
    "serialNumber": _PRINTABLE_STRING,
    "dnQualifier": _PRINTABLE_STRING,
}


def principal_of(tls: ssl.SSLObject | ssl.SSLSocket) -> str:
    """The client as Kafka's default principal builder names it: by its certificate's subject, the last part first."""
    certificate = tls.getpeercert()
    subject: Any = (certificate or {}).get("subject", ())
    return f"User:{distinguished_name(subject)}" if subject else ANONYMOUS


def distinguished_name(subject: tuple[tuple[tuple[str, str], ...], ...]) -> str:
    """A subject, in the form that the ssl module gives, as RFC 2253 writes it.

    >>> distinguished_name(((("organizationName", "Semel, Inc"),), (("commonName", "client"),)))
    'CN=client,O=Semel\\\\, Inc'
    """
    return ",".join("+".join(_attribute(name, value) for name, value in part) for part in reversed(subject))


def _attribute(name: str, value: str) -> str:
    if short := _SHORT_NAMES.get(name):
        return f"{short}={_escaped(value)}"
    encoded = value.encode()
    return f"{_NUMBERS.get(name, name)}=#{_der(_STRING_TYPES.get(name, _UTF8_STRING), encoded).hex()}"


def _escaped(value: str) -> str:
    text = "".join(f"\\{c}" if c in ',+"\\<>;' else c for c in value)
    if text.startswith(("#", " ")):
        text = "\\" + text
    return text[:-1] + "\\ " if text.endswith(" ") and len(text) > 1 and not text.endswith("\\ ") else text


def _der(tag: int, content: bytes) -> bytes:
    if len(content) < 0x80:
        return bytes([tag, len(content)]) + content
    size = len(content).to_bytes((len(content).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + content
