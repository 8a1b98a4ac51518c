"""A broker with every kind of listener, and the settings with which a client gets in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from targets import KafkaUnderTest, Target

from semel.testing.apache_kafka import Protocol, Security, Tls
from semel.testing.certificates import CertificateFiles, make_certificates

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
USERS = {"PLAIN": ("ann", "ann-secret"), "SCRAM-SHA-256": ("bob", "bob-secret"), "SCRAM-SHA-512": ("bob", "bob-secret")}

Settings = dict[str, object]


@dataclass(frozen=True, slots=True)
class SecureKafka:
    broker: KafkaUnderTest
    files: CertificateFiles

    @property
    def trust(self) -> Settings:
        return {"ssl.ca.location": str(self.files.ca)}

    @property
    def certificate(self) -> Settings:
        return {
            "ssl.certificate.location": str(self.files.client_certificate),
            "ssl.key.location": str(self.files.client_key),
        }

    def settings(self, protocol: Protocol, *, trust: bool = True, **more: object) -> Settings:
        """What a client of this listener needs, apart from its login."""
        trusted = self.trust if trust and protocol in ("SSL", "SASL_SSL") else {}
        return {
            "bootstrap.servers": self.broker.bootstrap_for(protocol),
            "security.protocol": protocol,
            **trusted,
            **more,
        }


def login(mechanism: str) -> Settings:
    username, password = USERS[mechanism]
    return {"sasl.mechanism": mechanism, "sasl.username": username, "sasl.password": password}


@contextmanager
def start_secure_kafka(
    target: Target, folder: Path, *, client_auth: Literal["none", "requested", "required"]
) -> Iterator[SecureKafka]:
    """`client_auth` is about the SSL listener: with SASL_SSL the login tells who the client is."""
    certificates = make_certificates()
    tls = Tls(server=certificates.server, ca_pem=certificates.ca_pem, client_auth=client_auth)
    plain, scram = USERS["PLAIN"], USERS["SCRAM-SHA-256"]
    security = Security(tls=tls, plain={plain[0]: plain[1]}, scram={scram[0]: scram[1]})
    with target.start(security) as broker:
        yield SecureKafka(broker, certificates.write(folder))
