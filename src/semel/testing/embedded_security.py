"""The listeners of a broker under test (`Security`), as settings of the embedded broker."""

from __future__ import annotations

from pathlib import Path

from semel.broker.listeners import ListenerSettings, TlsSettings
from semel.private_files import write_private_text
from semel.testing.security import Protocol, Security


def listeners_for(security: Security, folder: Path) -> tuple[ListenerSettings, ...]:
    """One listener for each of `security.protocols`, in that order; certificates are written into `folder`.

    >>> [listener.security_protocol for listener in listeners_for(Security(plain={"ann": "secret"}), Path("unused"))]
    ['PLAINTEXT', 'SASL_PLAINTEXT']
    """
    return tuple(
        ListenerSettings(
            security_protocol=protocol,
            tls=_tls(security, protocol, folder),
            sasl_mechanisms=security.mechanisms if protocol.startswith("SASL_") else (),
            session_lifetime_ms=security.session_lifetime_ms,
        )
        for protocol in security.protocols
    )


def _tls(security: Security, protocol: Protocol, folder: Path) -> TlsSettings | None:
    if security.tls is None or protocol not in ("SSL", "SASL_SSL"):
        return None
    files = {
        "server.pem": security.tls.server.certificate_pem,
        "server.key": security.tls.server.key_pem,
        "client-ca.pem": security.tls.ca_pem,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_private_text(folder / name, text)
    certificate, key, client_ca = (str(folder / name) for name in files)
    return TlsSettings(
        certificate_path=certificate,
        key_path=key,
        client_ca_path=client_ca,
        # Apache Kafka passes over ssl.client.auth on SASL_SSL: there the login tells who the client is.
        client_auth=security.tls.client_auth if protocol == "SSL" else "none",
    )
