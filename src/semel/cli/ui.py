"""`semel ui`: the page, for any Kafka."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, client_settings
from semel.cli.needs import UI, ensure
from semel.cli.output import expected_errors
from semel.errors import ConfigError
from semel.inspect.ledgers import DEFAULT_LEDGER
from semel.private_files import refuse_readable_by_all

DEFAULT_PORT: Final = 8484
_PANEL: Final = "Beyond this machine"


def ui(
    host: Annotated[str, typer.Option(help="Where to listen. Beyond loopback a login is asked for.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = DEFAULT_PORT,
    reports: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Show the reports of semel verify in this folder.")
    ] = None,
    ledger: Annotated[str, typer.Option(help="Where Spark pipelines have their ledger.")] = DEFAULT_LEDGER,
    password_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Ask for the password in this file, also on loopback.", rich_help_panel=_PANEL
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A name that the page may be opened by; may be repeated.", rich_help_panel=_PANEL
        ),
    ] = None,
    tls_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Serve over TLS with this chain (PEM).", rich_help_panel=_PANEL)
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Its key (PEM), unless the chain's file has it.", rich_help_panel=_PANEL),
    ] = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show a cluster in the browser: what inspect and doctor tell, live.

    Transactions on a timeline and what holds readers back, records with what
    became of each, groups with true lag, Spark pipelines with their batches,
    the doctor's findings, and reports of semel verify. It changes nothing,
    but for a hanging transaction that you end there.

    \b
    semel ui --bootstrap localhost:9092
    semel ui --profile prod --reports ./runs
    semel ui --host 0.0.0.0 --password-file ui-password.txt --tls-certificate ui.pem
    """
    ensure(UI)
    from semel.web.serve import serve
    from semel.web.site import SiteSettings

    with expected_errors():
        if tls_key is not None and tls_certificate is None:
            raise ConfigError("A key is of no use without its certificate: add --tls-certificate FILE.")
        for path in (tls_certificate, tls_key):
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigError(f"The file {path!r} cannot be read, so the page was not started.")
        if reports is not None and not reports.is_dir():
            raise ConfigError(f"{str(reports)!r} is no folder: name one with reports of semel verify.")
        settings = SiteSettings(
            client_settings(bootstrap, profile, config, setting),
            host=host,
            port=port,
            ledger=ledger,
            reports=reports,
            allowed_hosts=allow_host or (),
            password=None if password_file is None else _read_password(password_file),
            certificate=tls_certificate,
            key=tls_key,
        )
        serve(settings, lambda line: typer.echo(line))


def _read_password(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip("\r\n")
        refuse_readable_by_all(path, "The password file", consequence="the page was not started")
    except OSError as error:
        raise ConfigError(f"The password file {path!r} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError:
        raise ConfigError(f"The password file {path!r} is not text in UTF-8.") from None
    if not text:
        raise ConfigError(f"The password file {path!r} is empty, so anybody could log in. Nothing was started.")
    return text
