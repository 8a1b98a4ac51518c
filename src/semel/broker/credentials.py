"""The users that may log in, and what is kept of their passwords: never the passwords themselves."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import MetaStore
from semel.broker.held_memory import CREDENTIALS_SHARE, HELD_BYTES_MAX
from semel.broker.pacing import ChangeLock, Pace, Slices, WriteAside, finish_now, write_now
from semel.broker.scram import HASHES, ITERATIONS_MIN, SALT_BYTES, ScramCredential
from semel.broker.storage.failures import StorageError
from semel.core.refusal import Refused
from semel.errors import ConfigError

_LOG: Final = logging.getLogger("semel.broker")

META_NAME: Final = "scram-credentials.json"
SECRET_META_NAME: Final = "scram-secret"
CHANGED_MAX: Final = 10_000
"""The default of `semel.scram.credentials.max`. Each change of them writes all of them."""
CHANGED_BYTES_MAX: Final = HELD_BYTES_MAX // CREDENTIALS_SHARE
_CREDENTIAL_BYTES: Final = 600


@dataclass(frozen=True, slots=True)
class CredentialChange:
    """Sets a user's credential for one SCRAM mechanism, or takes it away."""

    username: str
    mechanism: str
    credential: ScramCredential | None


class CredentialStore:
    """Users from the start-up settings, and SCRAM credentials that clients have set since (KIP-554).

    What a client has set or deleted wins over the settings, also after a restart: a user who was locked out stays out.
    That holds for PLAIN too, which knows the same passwords: once a client has changed a user, PLAIN takes only what
    one of the user's SCRAM credentials takes.

    >>> CredentialStore(plain={"ann": "secret"}).is_plain_login("ann", "secret")
    True
    """

    def __init__(
        self,
        *,
        plain: Mapping[str, str] | None = None,
        scram: Mapping[str, str] | None = None,
        store: MetaStore | None = None,
        make_secret: Callable[[int], bytes] = secrets.token_bytes,
        changed_max: int = CHANGED_MAX,
        bytes_max: int = CHANGED_BYTES_MAX,
        write_aside: WriteAside = write_now,
    ) -> None:
        """`changed_max` and `bytes_max` bound what clients can set; what a store holds is taken over in any case."""
        self._store = store
        self._write_aside = write_aside
        self._lock = ChangeLock()
        self._make_secret = make_secret
        self._plain = {
            name: self._salted("SCRAM-SHA-256", name, password, "PLAIN") for name, password in (plain or {}).items()
        }
        # Compared with where there is no such user, so that the time taken does not tell which names exist.
        # Without any user there is none to hide, and a broker for a test starts the sooner.
        self._nobody = (
            self._salted("SCRAM-SHA-256", "nobody", make_secret(SALT_BYTES).hex(), "nobody") if self._plain else None
        )
        self._settings = {
            (name, mechanism): self._salted(mechanism, name, password, mechanism)
            for name, password in (scram or {}).items()
            for mechanism in HASHES
        }
        stored = store.read_meta(META_NAME) if store else None
        self._changed: dict[tuple[str, str], ScramCredential | None] = {} if stored is None else _from_json(stored)
        self._lines = {key: _line_of(key, credential) for key, credential in self._changed.items()}
        """The same, each as it stands in the file."""
        self._held_bytes = sum(map(_bytes_of, self._lines.values()))
        self._changed_max = changed_max
        self._bytes_max = bytes_max
        self._shown: dict[str, list[ScramCredential]] = {}
        """The credentials of each mechanism, until one is changed."""

    def __repr__(self) -> str:
        return f"CredentialStore({len(self._plain)} users for PLAIN, {len(self.scram_users())} for SCRAM)"

    def is_user(self, username: str) -> bool:
        """Whether anybody of that name can log in, by whatever mechanism."""
        return username in self._plain or any(self.scram(username, mechanism) for mechanism in HASHES)

    def is_plain_login(self, username: str, password: str) -> bool:
        known = self._plain.get(username)
        compared = [known] if known else []
        if known and any((username, mechanism) in self._changed for mechanism in HASHES):
            compared = [each for mechanism in HASHES if (each := self.scram(username, mechanism))]
        if not compared:
            if self._nobody is not None:
                self._nobody.is_password(password)
            return False
        answers = [each.is_password(password) for each in compared]  # all of them, whichever is right
        return any(answers)

    def scram_to_show(self, username: str, mechanism: str) -> tuple[ScramCredential, bool]:
        """What a client is shown of a user, and whether there is one.

        For a name that nobody has, it is always the same, and looks like what others have: neither the answer nor its
        time tells which names exist.
        """
        shown = self._made_up(username, mechanism)
        credential = self.scram(username, mechanism)
        return (shown, False) if credential is None else (credential, True)

    def scram(self, username: str, mechanism: str) -> ScramCredential | None:
        key = (username, mechanism)
        return self._changed[key] if key in self._changed else self._settings.get(key)

    def scram_users(self) -> dict[str, list[ScramCredential]]:
        """All users with SCRAM credentials, by name."""
        return finish_now(self.scram_users_in_slices())

    def scram_users_in_slices(self) -> Slices[dict[str, list[ScramCredential]]]:
        """The same, where others may have their turns: there may be thousands."""
        users: dict[str, list[ScramCredential]] = {}
        pace = Pace()
        for username, mechanism in sorted({*self._settings, *self._changed}):
            if (credential := self.scram(username, mechanism)) is not None:
                users.setdefault(username, []).append(credential)
            if pace.is_over():
                yield
        return users

    def change(self, changes: Sequence[CredentialChange]) -> None:
        """All of them or, when the store fails or they are too many (Refused), none."""
        finish_now(self.change_in_slices(changes))

    def change_in_slices(self, changes: Sequence[CredentialChange]) -> Slices[None]:
        """The same, where others may have their turns while the file is written."""
        return self._lock.hold(lambda: self._change(changes))

    def _change(self, changes: Sequence[CredentialChange]) -> Slices[None]:
        if not changes:
            return
        changed, lines, held_bytes = dict(self._changed), dict(self._lines), self._held_bytes
        for change in changes:
            key = (change.username, change.mechanism)
            held_bytes -= _bytes_of(lines.pop(key, ""))
            changed.pop(key, None)
            # What was deleted is remembered only where the settings would bring it back.
            if change.credential is not None or key in self._settings or change.username in self._plain:
                changed[key], lines[key] = change.credential, _line_of(key, change.credential)
                held_bytes += _bytes_of(lines[key])
        is_more = held_bytes > self._held_bytes
        if is_more and (len(changed) > self._changed_max or held_bytes > self._bytes_max):
            raise Refused(
                ErrorCode.policy_violation,
                f"{len(changed):,} SCRAM credentials of about {held_bytes:,} bytes would be over "
                f"semel.scram.credentials.max ({self._changed_max:,}), or over their share of "
                f"semel.client.memory.max.bytes ({self._bytes_max:,}). None was changed. Delete some, or raise these "
                "settings.",
            )
        if store := self._store:
            content = list(lines.values())
            yield from self._write_aside(lambda: store.write_meta(META_NAME, _to_json(content)))
        self._changed, self._lines, self._held_bytes = changed, lines, held_bytes
        self._shown.clear()

    # -- what is derived from the secret -------------------------------------------------------------------------------

    @cached_property
    def _secret(self) -> bytes:
        """Kept over restarts: salts that changed, or did not, would tell which names are users'."""
        kept = self._store.read_meta(SECRET_META_NAME) if self._store else None
        if kept:
            return kept
        secret = self._make_secret(SALT_BYTES)
        if self._store:
            try:
                self._store.write_meta(SECRET_META_NAME, secret)
            except (OSError, StorageError) as error:  # a full disk must not keep users from their records
                _LOG.warning("the secret of the SCRAM salts is not kept over a restart: %s", error)
        return secret

    def _derived(self, purpose: str, name: str, size: int) -> bytes:
        """As good as random, and the same each time."""
        whole = b""
        while len(whole) < size:
            whole += hmac.digest(self._secret, f"{purpose}\0{name}\0{len(whole)}".encode(), "sha512")
        return whole[:size]

    def _salted(self, mechanism: str, name: str, password: str, purpose: str) -> ScramCredential:
        if not name or not password or "\0" in name + password:
            raise ConfigError(f"The user {name!r} cannot log in: neither name nor password may be empty or hold a NUL.")
        salt = self._derived(purpose, name, SALT_BYTES)
        return ScramCredential.from_password(mechanism, password, salt=salt, iterations=ITERATIONS_MIN)

    def _made_up(self, username: str, mechanism: str) -> ScramCredential:
        """What nobody's password opens. It has the salt size and the iterations of one of the users."""
        users = self._shown.get(mechanism)
        if users is None:
            all_users = {**self._settings, **self._changed}.values()
            users = self._shown[mechanism] = [each for each in all_users if each and each.mechanism == mechanism]
        chosen = int.from_bytes(self._derived("shape", username, 8), "big")
        like = users[chosen % len(users)] if users else None
        key_bytes = hashlib.new(HASHES[mechanism]).digest_size
        return ScramCredential(
            mechanism,
            like.iterations if like else ITERATIONS_MIN,
            self._derived(mechanism, username, len(like.salt) if like else SALT_BYTES),
            self._derived(f"{mechanism} stored", username, key_bytes),
            self._derived(f"{mechanism} server", username, key_bytes),
        )


def _line_of(key: tuple[str, str], credential: ScramCredential | None) -> str:
    row: dict[str, Any] = {"user": key[0], "mechanism": key[1]}
    if credential is not None:
        row |= {
            "iterations": credential.iterations,
            "salt": base64.b64encode(credential.salt).decode(),
            "stored_key": base64.b64encode(credential.stored_key).decode(),
            "server_key": base64.b64encode(credential.server_key).decode(),
        }
    return json.dumps(row)


def _bytes_of(line: str) -> int:
    """About what a credential takes in memory, with its line."""
    return _CREDENTIAL_BYTES + 2 * len(line) if line else 0


def _to_json(lines: Iterable[str]) -> bytes:
    return ('{"version": 1, "credentials": [\n' + ",\n".join(lines) + "\n]}\n").encode()


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
