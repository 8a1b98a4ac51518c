"""Certificates and keys from PEM files into a TLS context, with an error that says which file is wrong and how."""

from __future__ import annotations

import ssl

from semel.errors import ConfigError


def load_authorities(context: ssl.SSLContext, path: str, *, setting: str) -> None:
    """Whom to trust. `setting` is what the user calls the file."""
    _check_readable(setting, path)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ConfigError(
            f"{setting} {path!r} holds no certificate in PEM form: name a file with -----BEGIN CERTIFICATE-----."
        ) from None


def load_certificate(
    context: ssl.SSLContext,
    certificate: str,
    key: str | None,
    key_password: str | None,
    *,
    certificate_setting: str,
    key_setting: str,
    password_setting: str,
) -> None:
    """Who we are. Without a file of its own the key is in the certificate's."""
    key = certificate if key is None else key
    _check_readable(certificate_setting, certificate)
    _check_readable(key_setting, key)
    is_encrypted = False

    def password() -> str:
        # Called for an encrypted key only. Without it OpenSSL would ask on the terminal and hang a job.
        nonlocal is_encrypted
        is_encrypted = True
        if key_password is None:
            raise ConfigError(f"The key in {key!r} is encrypted: write its password as {password_setting}.")
        return key_password

    try:
        context.load_cert_chain(certificate, key, password=password)
    except (ssl.SSLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            message = f"The key in {key!r} does not belong to the certificate in {certificate!r}: name its own key."
        elif is_encrypted:
            message = f"{password_setting} does not open the key in {key!r}: write the password it was encrypted with."
        else:
            message = (
                f"{certificate_setting} {certificate!r} and {key_setting} {key!r} "
                "do not hold a certificate and a private key: both must be in PEM form."
            )
        raise ConfigError(message) from None


def _check_readable(setting: str, path: str) -> None:
    """The ssl module does not say which of its files it could not open."""
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise ConfigError(
            f"{setting} {path!r} cannot be read ({error.strerror}): check the path and its rights."
        ) from None
