"""Certificates for tests of TLS: an authority, a server for the loopback interface, a client, and a stranger.

Made anew at each call, valid for a day, with the `cryptography` package, which only this module needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from semel.private_files import write_private_text
from semel.testing.security import KeyPair

VALID_FOR = timedelta(days=1)
CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Certificates:
    """All PEM. `ca_pem` has signed `server` and `client`; the unrelated `stranger_ca_pem` has signed `stranger`."""

    ca_pem: str
    server: KeyPair
    client: KeyPair
    stranger_ca_pem: str
    stranger: KeyPair

    def write(self, folder: Path) -> CertificateFiles:
        """The client's side as files, which is how most clients want it."""
        texts = {
            "ca.pem": self.ca_pem,
            "client.pem": self.client.certificate_pem,
            "client.key": self.client.key_pem,
            "stranger-ca.pem": self.stranger_ca_pem,
            "stranger.pem": self.stranger.certificate_pem,
            "stranger.key": self.stranger.key_pem,
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_private_text(folder / name, text)
        return CertificateFiles(*(folder / name for name in texts))


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    ca: Path
    client_certificate: Path
    client_key: Path
    stranger_ca: Path
    stranger_certificate: Path
    stranger_key: Path


def make_certificates(server_names: tuple[str, ...] = ("localhost",), address: str = "127.0.0.1") -> Certificates:
    """A fresh set. The server's certificate is for `server_names` and `address`.

    >>> make_certificates().ca_pem.splitlines()[0]
    '-----BEGIN CERTIFICATE-----'
    """
    authority, stranger = _Authority("Semel test authority"), _Authority("Unrelated authority")
    names = [x509.DNSName(name) for name in server_names]
    return Certificates(
        ca_pem=_pem(authority.certificate),
        server=authority.issue("semel-server", ExtendedKeyUsageOID.SERVER_AUTH, [*names, _address(address)]),
        client=authority.issue("semel-client", ExtendedKeyUsageOID.CLIENT_AUTH, []),
        stranger_ca_pem=_pem(stranger.certificate),
        stranger=stranger.issue("stranger", ExtendedKeyUsageOID.CLIENT_AUTH, []),
    )


class _Authority:
    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        self.certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str, purpose: x509.ObjectIdentifier, alternatives: list[x509.GeneralName]) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_common_name(name), self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        return KeyPair(key_pem=secret, certificate_pem=_pem(builder.sign(self._key, hashes.SHA256())))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALID_FOR)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _address(address: str) -> x509.IPAddress:
    return x509.IPAddress(IPv4Address(address))


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
