"""TLS contexts and SASL exchanges, and what to tell a user when either fails. No socket is opened here.

Passwords stay inside the objects that need them: no message, `repr` or exception chain shows one.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from semel.client.config import SASL_MECHANISMS, SecurityConfig
from semel.errors import AuthenticationFailed, BrokerUnreachable, ConfigError, SemelError
from semel.pem_files import load_authorities, load_certificate

# -- TLS ---------------------------------------------------------------------------------------------------------------


def make_ssl_context(security: SecurityConfig) -> ssl.SSLContext:
    """A context for connections to brokers: whom to trust, who we are, and whether names must match.

    >>> make_ssl_context(SecurityConfig(protocol="SSL", check_hostname=False)).check_hostname
    False
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = security.check_hostname and security.verify_certificate
    if not security.verify_certificate:
        context.verify_mode = ssl.CERT_NONE
    if security.ca_location is None:
        context.load_default_certs()
    else:
        load_authorities(context, security.ca_location, setting="ssl.ca.location")
    if security.certificate_location is not None:
        load_certificate(
            context,
            security.certificate_location,
            security.key_location,
            security.key_password,
            certificate_setting="ssl.certificate.location",
            key_setting="ssl.key.location",
            password_setting="ssl.key.password",
        )
    return context


_NOT_TRUSTED: Final = (
    "The certificate of {at} comes from an authority that is not trusted here, so nothing was sent: "
    "name the authority's PEM file in ssl.ca.location."
)
_SELF_SIGNED: Final = (
    "The certificate of {at} is self-signed and not trusted here, so nothing was sent: "
    "if it is the right one, name its PEM file in ssl.ca.location."
)
_OTHER_NAME: Final = (
    "The certificate of {at} is not made out to that name, so nothing was sent: connect by a name in the certificate "
    '(bootstrap.servers, and advertised.listeners on the broker), or write ssl.endpoint.identification.algorithm="".'
)
_EXPIRED: Final = "The certificate of {at} has expired, so nothing was sent: renew it on the broker."
_NOT_YET_VALID: Final = (
    "The certificate of {at} is not valid yet, so nothing was sent: "
    "check this machine's clock, or renew the certificate."
)

# By X509_V_ERR_* number: Python passes OpenSSL's on without naming it.
_VERIFY: Final[Mapping[int, str]] = {
    2: _NOT_TRUSTED,
    9: _NOT_YET_VALID,
    10: _EXPIRED,
    18: _SELF_SIGNED,
    19: _NOT_TRUSTED,
    20: _NOT_TRUSTED,
    21: _NOT_TRUSTED,
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}

_CERTIFICATE_WANTED: Final = (
    "{at} demands a client certificate that it accepts, so nothing was sent: "
    "name one in ssl.certificate.location and its key in ssl.key.location."
)
_CERTIFICATE_REFUSED: Final = (
    "{at} refuses the client certificate of ssl.certificate.location, so nothing was sent: "
    "use one that is valid and signed by an authority in the broker's trust store."
)
_NO_COMMON_TLS: Final = "{at} and this client share no TLS version or cipher: enable TLS 1.2 or newer on the broker."

# By OpenSSL's name of the alert that the broker sent, or of what went wrong on our side.
_ALERTS: Final[Mapping[str, str]] = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _CERTIFICATE_WANTED,
    # Under TLS 1.2 a server that misses the certificate has only general alerts to say so.
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _CERTIFICATE_WANTED,
    "SSLV3_ALERT_BAD_CERTIFICATE": _CERTIFICATE_WANTED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _CERTIFICATE_REFUSED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _CERTIFICATE_REFUSED,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _CERTIFICATE_REFUSED,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _CERTIFICATE_REFUSED,
    "TLSV1_ALERT_UNKNOWN_CA": _CERTIFICATE_REFUSED,
    "TLSV1_ALERT_DECRYPT_ERROR": _CERTIFICATE_REFUSED,
    "TLSV1_ALERT_ACCESS_DENIED": _CERTIFICATE_REFUSED,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_COMMON_TLS,
    "UNSUPPORTED_PROTOCOL": _NO_COMMON_TLS,
    "TLSV1_ALERT_INSUFFICIENT_SECURITY": _NO_COMMON_TLS,
}

# Bytes that are no TLS record at all.
_NOT_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}
)
_PLAINTEXT: Final = (
    "{at} does not speak TLS, so nothing was sent: use the broker's TLS port, "
    "or write security.protocol=PLAINTEXT (SASL_PLAINTEXT with a login)."
)
_CLOSED: Final = (
    "{at} ended the TLS handshake without an answer, so nothing was sent: it is likely a port without TLS; "
    "use the broker's TLS port, or write security.protocol=PLAINTEXT (SASL_PLAINTEXT with a login)."
)
_CLOSED_AFTER_HANDSHAKE: Final = (
    "{at} closed the connection right after the TLS handshake, so nothing was sent: it likely demands a client "
    "certificate that it accepts; name one in ssl.certificate.location and its key in ssl.key.location."
)
_SILENT: Final = (
    "{at} did not answer the TLS handshake in time, so nothing was sent: check that it is the broker's TLS port, "
    "or raise socket.connection.setup.timeout.ms."
)


def explain_tls_failure(error: OSError, host: str, port: int, *, handshake_done: bool = False) -> SemelError:
    """The exception to raise for a handshake that failed.

    With TLS 1.3 the broker looks at the client's certificate after the client's side of the handshake is done, so an
    error of the first write or read belongs here too, with `handshake_done`.

    >>> str(explain_tls_failure(TimeoutError(), "b", 9093))[:44]
    'b:9093 did not answer the TLS handshake in t'
    """
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(error, ssl.SSLCertVerificationError):
        sentence = _VERIFY.get(error.verify_code)
        if sentence is None:
            sentence = f"The certificate of {{at}} cannot be trusted ({error.verify_message}), so nothing was sent."
        return AuthenticationFailed(sentence.format(at=at))
    reason = getattr(error, "reason", None) or ""
    if sentence := _ALERTS.get(reason):
        return AuthenticationFailed(sentence.format(at=at))
    if reason in _NOT_TLS:
        return BrokerUnreachable(_PLAINTEXT.format(at=at))
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        return BrokerUnreachable((_CLOSED_AFTER_HANDSHAKE if handshake_done else _CLOSED).format(at=at))
    if isinstance(error, TimeoutError):
        return BrokerUnreachable(_SILENT.format(at=at))
    what = reason or error.strerror or type(error).__name__
    return BrokerUnreachable(
        f"The TLS handshake with {at} failed ({what}), so nothing was sent: "
        "check security.protocol and the ssl.* settings."
    )


# -- SASL --------------------------------------------------------------------------------------------------------------


class SaslExchange(Protocol):
    """The client's side of a login as bytes in and bytes out."""

    def first(self) -> bytes:
        """What the client says first."""
        ...

    def next(self, challenge: bytes) -> bytes | None:
        """What the client answers; `None` once both sides are satisfied."""
        ...


def sasl_client(security: SecurityConfig, *, nonce: str | None = None) -> SaslExchange:
    """The exchange for the configured mechanism. `nonce` makes SCRAM repeatable in tests.

    >>> login = SecurityConfig(protocol="SASL_SSL", sasl_mechanism="PLAIN", username="ann", password="pw")
    >>> sasl_client(login).first()
    b'\\x00ann\\x00pw'
    """
    mechanism, username, password = security.sasl_mechanism, security.username, security.password
    if mechanism not in SASL_MECHANISMS:
        raise ConfigError(f"sasl.mechanism {mechanism} is not supported: write one of {', '.join(SASL_MECHANISMS)}.")
    if not username or not password:
        raise ConfigError(f"sasl.mechanism={mechanism} needs a login: write sasl.username and sasl.password.")
    if mechanism == "PLAIN":
        return _Plain(username, password)
    # The library behind it reads certificates too: most connections would wait for that without any use.
    from semel.client.scram import Scram

    return Scram(mechanism, username, password, nonce)


class _Plain:
    """RFC 4616: one message, and the broker's answer is empty."""

    def __init__(self, username: str, password: str) -> None:
        if "\0" in username or "\0" in password:
            raise ConfigError("sasl.username and sasl.password must not hold a NUL character: PLAIN cannot carry it.")
        self._message = f"\0{username}\0{password}".encode()

    def first(self) -> bytes:
        return self._message

    def next(self, challenge: bytes) -> bytes | None:
        return None


def login_refused(mechanism: str | None, username: str | None) -> str:
    """What to tell a user whose login the broker does not take."""
    return (
        f"The broker refused the login of {username!r} with {mechanism}, so nothing was sent: check sasl.username and "
        f"sasl.password, and that the broker has this user for {mechanism}."
    )


def explain_sasl_failure(
    security: SecurityConfig, address: str, *, offered: Sequence[str] | None = None, said: str | None = None
) -> AuthenticationFailed:
    """The exception for a login that the broker at `address` refused.

    `offered` is the broker's list when it does not have the mechanism, `said` its own words when it has.
    """
    mechanism = security.sasl_mechanism
    if offered is not None and mechanism not in offered:
        usable = [name for name in offered if name in SASL_MECHANISMS]
        remedy = f"write sasl.mechanism={' or '.join(usable)}" if usable else f"enable {mechanism} on the broker"
        listed = ", ".join(map(_quotable, offered)) or "none"
        return AuthenticationFailed(
            f"{address} does not offer {mechanism} (it offers {listed}), so nothing was sent: {remedy}."
        )
    sentence = login_refused(mechanism, security.username).replace("The broker", address, 1)
    # A broker that repeats what it was sent must not make us print it.
    if said and not (security.password and security.password in said):
        sentence += f" It said: {_quotable(said)!r}"
    return AuthenticationFailed(sentence)


def _quotable(words: str) -> str:
    """A peer's words on one line and of bounded length: they end up in logs."""
    line = "".join(c if c.isprintable() else " " for c in words)
    return line if len(line) <= 200 else line[:200] + "..."
