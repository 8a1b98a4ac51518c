"""The users that may log in, and what is kept of their passwords: never the passwords themselves."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.broker.acls import MetaStore
from semel.broker.scram import HASHES, ITERATIONS_MIN, SALT_BYTES, ScramCredential
from semel.errors import ConfigError

META_NAME: Final = "scram-credentials.json"


@dataclass(frozen=True, slots=True)
class CredentialChange:
    """Sets a user's credential for one SCRAM mechanism, or takes it away."""

    username: str
    mechanism: str
    credential: ScramCredential | None


class CredentialStore:
    """Users from the start-up settings, and SCRAM credentials that clients have set since (KIP-554).

    What a client has set or deleted wins over the settings, also after a restart: a user who was locked out stays out.

    >>> CredentialStore(plain={"ann": "secret"}).is_plain_login("ann", "secret")
    True
    """

    def __init__(
        self,
        *,
        plain: Mapping[str, str] | None = None,
        scram: Mapping[str, str] | None = None,
        store: MetaStore | None = None,
        make_salt: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._store = store
        self._plain = {
            name: _salted("SCRAM-SHA-256", name, password, make_salt) for name, password in (plain or {}).items()
        }
        # Compared with where there is no such user, so that the time taken does not tell which names exist.
        # Without any user there is none to hide, and a broker for a test starts the sooner.
        self._nobody = (
            _salted("SCRAM-SHA-256", "nobody", make_salt(SALT_BYTES).hex(), make_salt) if self._plain else None
        )
        self._settings = {
            (name, mechanism): _salted(mechanism, name, password, make_salt)
            for name, password in (scram or {}).items()
            for mechanism in HASHES
        }
        stored = store.read_meta(META_NAME) if store else None
        self._changed: dict[tuple[str, str], ScramCredential | None] = {} if stored is None else _from_json(stored)

    def __repr__(self) -> str:
        return f"CredentialStore({len(self._plain)} users for PLAIN, {len(self.scram_users())} for SCRAM)"

    def is_plain_login(self, username: str, password: str) -> bool:
        known = self._plain.get(username)
        compared = known or self._nobody
        return compared is not None and compared.is_password(password) and known is not None

    def scram(self, username: str, mechanism: str) -> ScramCredential | None:
        key = (username, mechanism)
        return self._changed[key] if key in self._changed else self._settings.get(key)

    def scram_users(self) -> dict[str, list[ScramCredential]]:
        """All users with SCRAM credentials, by name."""
        users: dict[str, list[ScramCredential]] = {}
        for username, mechanism in sorted({*self._settings, *self._changed}):
            if (credential := self.scram(username, mechanism)) is not None:
                users.setdefault(username, []).append(credential)
        return users

    def change(self, changes: Sequence[CredentialChange]) -> None:
        """All of them or, when the store fails, none."""
        if not changes:
            return
        changed = self._changed | {(change.username, change.mechanism): change.credential for change in changes}
        if self._store:
            self._store.write_meta(META_NAME, _to_json(changed))
        self._changed = changed


def _salted(mechanism: str, name: str, password: str, make_salt: Callable[[int], bytes]) -> ScramCredential:
    if not name or not password or "\0" in name + password:
        raise ConfigError(f"The user {name!r} cannot log in: neither name nor password may be empty or hold a NUL.")
    return ScramCredential.from_password(mechanism, password, salt=make_salt(SALT_BYTES), iterations=ITERATIONS_MIN)


def _to_json(changed: Mapping[tuple[str, str], ScramCredential | None]) -> bytes:
    rows: list[dict[str, Any]] = []
    for (username, mechanism), credential in sorted(changed.items(), key=lambda item: item[0]):
        row: dict[str, Any] = {"user": username, "mechanism": mechanism}
        if credential is not None:
            row |= {
                "iterations": credential.iterations,
                "salt": base64.b64encode(credential.salt).decode(),
                "stored_key": base64.b64encode(credential.stored_key).decode(),
                "server_key": base64.b64encode(credential.server_key).decode(),
            }
        rows.append(row)
    return json.dumps({"version": 1, "credentials": rows}, indent=1).encode()


def _from_json(content: bytes) -> dict[tuple[str, str], ScramCredential | None]:
    changed: dict[tuple[str, str], ScramCredential | None] = {}
    for row in json.loads(content)["credentials"]:
        credential = None
        if "iterations" in row:
            salt, stored_key, server_key = (
                base64.b64decode(row[name]) for name in ("salt", "stored_key", "server_key")
            )
            credential = ScramCredential(row["mechanism"], row["iterations"], salt, stored_key, server_key)
        changed[row["user"], row["mechanism"]] = credential
    return changed
