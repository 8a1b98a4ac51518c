"""What a listener of the broker is: where it listens, what it asks of clients, and how large their frames may be."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from semel.broker.scram import HASHES
from semel.errors import ConfigError

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
ClientAuth = Literal["none", "requested", "required"]

FRAME_BYTES_MAX: Final = 104_857_600
"""Kafka's `socket.request.max.bytes`."""
FRAME_BYTES_MAX_BEFORE_AUTHENTICATION: Final = 524_288
"""Kafka's `sasl.server.max.receive.size`: a stranger must not make the broker hold 100 MB."""

MECHANISMS: Final = ("PLAIN", *HASHES)
_WILDCARDS: Final = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """PEM files: the broker's certificate chain and key (in one file or two), and whose client certificates count."""

    certificate_path: str
    key_path: str | None = None
    key_password: str | None = field(default=None, repr=False)
    client_ca_path: str | None = None
    client_auth: ClientAuth = "none"

    def __post_init__(self) -> None:
        if self.client_auth not in get_args(ClientAuth):
            raise ConfigError(f"ssl.client.auth={self.client_auth} is not known: write none, requested or required.")
        if self.client_auth != "none" and self.client_ca_path is None:
            raise ConfigError(
                f"ssl.client.auth={self.client_auth} needs the authority that signs client certificates: "
                "name its PEM file."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """One listener. On the loopback interface and on a free port unless told otherwise.

    >>> ListenerSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms=("PLAIN",)).uses_sasl
    True
    """

    host: str = "127.0.0.1"
    port: int = 0
    security_protocol: SecurityProtocol = "PLAINTEXT"
    advertised_host: str | None = None
    advertised_port: int | None = None
    tls: TlsSettings | None = None
    sasl_mechanisms: tuple[str, ...] = ()
    session_lifetime_ms: int = 0
    """Kafka's `connections.max.reauth.ms` for this listener: after so long a client must log in again. 0: whatever
    the broker's setting of that name says."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    frame_bytes_max_before_authentication: int = FRAME_BYTES_MAX_BEFORE_AUTHENTICATION

    def __post_init__(self) -> None:
        if self.security_protocol not in get_args(SecurityProtocol):
            raise ConfigError(
                f"security.protocol={self.security_protocol} is not known: "
                f"write one of {', '.join(get_args(SecurityProtocol))}."
            )
        self._check_address()
        self._check_security()
        if min(self.frame_bytes_max, self.frame_bytes_max_before_authentication) < 1 or self.session_lifetime_ms < 0:
            raise ConfigError("The largest frame must be 1 byte or more, and a session cannot last less than 0 ms.")

    def _check_address(self) -> None:
        # To the operating system an empty host means every interface; nobody is to say that by leaving something out.
        if not self.host:
            raise ConfigError(
                "The listener has no host: write 127.0.0.1, or 0.0.0.0 to be reached from other machines."
            )
        for port in (self.port, self.advertised_port or 0):
            if not 0 <= port <= 65_535:
                raise ConfigError(f"{port} is no port: write a number up to 65535, or 0 for a free one.")
        if self.advertised_port == 0:
            raise ConfigError(
                "Clients cannot connect to port 0: leave the advertised port out to tell them the real one."
            )
        if (self.advertised_host or self.host) in _WILDCARDS:
            raise ConfigError(
                f"Clients cannot connect to {self.advertised_host or self.host}: "
                "write the name or address by which they reach this machine as the advertised host."
            )

    def _check_security(self) -> None:
        protocol = self.security_protocol
        if self.uses_tls != (self.tls is not None):
            wanted = "needs a certificate and its key" if self.uses_tls else "does not use a certificate"
            raise ConfigError(f"A listener with security.protocol={protocol} {wanted}.")
        if self.uses_sasl != bool(self.sasl_mechanisms):
            wanted = "needs at least one SASL mechanism" if self.uses_sasl else "does not use SASL mechanisms"
            raise ConfigError(f"A listener with security.protocol={protocol} {wanted}.")
        if unknown := [name for name in self.sasl_mechanisms if name not in MECHANISMS]:
            raise ConfigError(f"The SASL mechanism {unknown[0]} is not known: write some of {', '.join(MECHANISMS)}.")

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect. A name other than `localhost` is taken not to be."""
        try:
            return ipaddress.ip_address(plain_address(self.host)).is_loopback
        except ValueError:
            return self.host == "localhost"

    def warnings(self) -> list[str]:
        """What somebody who chose this listener may not be aware of."""
        where = f"The {self.security_protocol} listener on {self.host}"
        found: list[str] = []
        asks_who = self.uses_sasl or (self.tls is not None and self.tls.client_auth == "required")
        if not self.is_loopback and not asks_who:
            found.append(
                f"{where} lets other machines connect without a login: anyone who reaches it can do what "
                "User:ANONYMOUS may, which without ACLs is everything. Use SASL_SSL, or SSL with --client-auth "
                "required."
            )
        if "PLAIN" in self.sasl_mechanisms and not self.uses_tls:
            found.append(
                f"{where} takes PLAIN passwords without encryption: anyone who sees the traffic can read them. Use "
                "SASL_SSL, or --sasl-mechanisms SCRAM-SHA-256,SCRAM-SHA-512."
            )
        return found

    def advertised(self, bound_port: int) -> tuple[str, int]:
        """What clients of this listener are told to connect to, once it is known where it listens."""
        return self.advertised_host or self.host, self.advertised_port or bound_port


def plain_address(host: str) -> str:
    """One spelling for each address, as rules compare them: an IPv4 client of an IPv6 socket has its IPv4 address.

    >>> plain_address("::ffff:127.0.0.1"), plain_address("0:0:0:0:0:0:0:1"), plain_address("example.org")
    ('127.0.0.1', '::1', 'example.org')
    """
    address, percent, zone = host.partition("%")
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return host
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return f"{mapped or parsed}{percent}{zone}"


def check_listeners(listeners: Sequence[ListenerSettings]) -> None:
    """A broker needs a listener, and no two of them can have one address."""
    if not listeners:
        raise ConfigError("The broker has no listener, so nobody could reach it: name at least one.")
    addresses = [(listener.host, listener.port) for listener in listeners if listener.port]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"Two listeners are to listen on {address[0]}:{address[1]}: give each a port of its own.")
