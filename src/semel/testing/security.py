"""What an Apache Kafka under test offers besides its plaintext listener: TLS, SASL, or both, and who may log in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from semel.errors import ConfigError

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]

PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
SCRAM_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key and the chain of certificates that vouches for it, both PEM."""

    key_pem: str = field(repr=False)
    certificate_pem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The broker's side of TLS. With `client_auth="required"` a client without a trusted certificate is refused."""

    server: KeyPair
    ca_pem: str
    client_auth: Literal["none", "requested", "required"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The listeners besides plaintext: `SSL` with `tls`, `SASL_PLAINTEXT` with users, `SASL_SSL` with both.

    Users are name to password: those in `plain` log in by PLAIN, those in `scram` by SCRAM-SHA-256 and SCRAM-SHA-512.

    >>> Security(plain={"ann": "secret"}).protocols
    ('PLAINTEXT', 'SASL_PLAINTEXT')
    """

    tls: Tls | None = None
    plain: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    scram: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    session_lifetime_ms: int = 0
    """How long a login lasts (`connections.max.reauth.ms`). 0: as long as the connection."""

    def __post_init__(self) -> None:
        # Passwords go through two little languages (JAAS, StorageTool's --add-scram) that quote badly or not at all.
        for name, password in [*self.plain.items(), *self.scram.items()]:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not re.fullmatch(r"[^\s\"'\\,;=\[\]]+", password):
                raise ConfigError(
                    f"The user {name!r} cannot be given to a broker under test: use letters, digits and _.- in names, "
                    "and no spaces, quotes, backslashes or ,;=[] in passwords."
                )

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        protocols: list[Protocol] = ["PLAINTEXT"]
        if self.tls:
            protocols.append("SSL")
        if self.mechanisms:
            protocols.append("SASL_PLAINTEXT")
        if self.tls and self.mechanisms:
            protocols.append("SASL_SSL")
        return tuple(protocols)

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return (("PLAIN",) if self.plain else ()) + (SCRAM_MECHANISMS if self.scram else ())

    def properties(self) -> dict[str, str]:
        """The broker settings that these listeners need, apart from their addresses."""
        settings: dict[str, str] = {}
        if self.tls:
            settings |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.key": self.tls.server.key_pem,
                "ssl.keystore.certificate.chain": self.tls.server.certificate_pem,
                "ssl.truststore.type": "PEM",
                "ssl.truststore.certificates": self.tls.ca_pem,
                "ssl.client.auth": self.tls.client_auth,
            }
        if self.mechanisms:
            settings["sasl.enabled.mechanisms"] = ",".join(self.mechanisms)
        if self.session_lifetime_ms:
            settings["connections.max.reauth.ms"] = str(self.session_lifetime_ms)
        for protocol in self.protocols:
            if protocol.startswith("SASL_"):
                for mechanism in self.mechanisms:
                    prefix = f"listener.name.{protocol.lower()}.{mechanism.lower()}"
                    settings[f"{prefix}.sasl.jaas.config"] = self._jaas(mechanism)
        return settings

    def _jaas(self, mechanism: str) -> str:
        if mechanism in SCRAM_MECHANISMS:
            return f"{SCRAM_MODULE} required;"
        users = " ".join(f'user_{name}="{password}"' for name, password in self.plain.items())
        return f"{PLAIN_MODULE} required {users};"

    def format_arguments(self) -> list[str]:
        """Arguments of `StorageTool format` that put the SCRAM users into the cluster's metadata from the start."""
        arguments: list[str] = []
        for mechanism in SCRAM_MECHANISMS:
            for name, password in self.scram.items():
                arguments += ["--add-scram", f"{mechanism}=[name={name},password={password}]"]
        return arguments
