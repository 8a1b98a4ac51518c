"""SCRAM (RFC 5802, 7677) on the broker's side: what is kept of a password, and the exchange as bytes. No socket.

Written out here since Kafka takes names and passwords as their UTF-8 bytes, without SASLprep, and salts of any length:
a library that prepares strings would refuse logins that work with Apache Kafka.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

HASHES: Final[Mapping[str, str]] = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISM_NUMBERS: Final[Mapping[str, int]] = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
ITERATIONS_MIN: Final = 4096
ITERATIONS_MAX: Final = 16_384
SALT_BYTES: Final = 24
SALT_BYTES_MAX: Final = 1_024
"""Of what clients set. Apache Kafka has no bound; its tools make salts of 26 bytes."""
USERNAME_BYTES_MAX: Final = 1_024

_SASLNAME: Final = r"(?:[^,=\x00]|=2C|=3D)+"
_PRINTABLE: Final = r"[\x21-\x2b\x2d-\x7e]+"
_EXTENSIONS: Final = r"(?:,[A-Za-z]+=[^,\x00]*)*"
_CLIENT_FIRST: Final = re.compile(
    rf"(?P<gs2>n,(?:a=(?P<authzid>{_SASLNAME}))?,)"
    rf"(?P<bare>n=(?P<name>{_SASLNAME}),r=(?P<nonce>{_PRINTABLE})(?P<extensions>{_EXTENSIONS}))"
)
_CLIENT_FINAL: Final = re.compile(
    rf"(?P<without_proof>c=(?P<binding>[A-Za-z0-9+/=]+),r=(?P<nonce>{_PRINTABLE}){_EXTENSIONS}),p=(?P<proof>[A-Za-z0-9+/=]+)"
)


class LoginRefused(Exception):
    """A login that failed. `told` is what the client may be told; without it, it learns only that it failed."""

    def __init__(self, reason: str, *, told: str | None = None) -> None:
        super().__init__(reason)
        self.told = told


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """What proves a password without being it.

    >>> kept = ScramCredential.from_password("SCRAM-SHA-256", "secret", salt=b"salt", iterations=4096)
    >>> kept.is_password("secret"), kept.is_password("Secret")
    (True, False)
    """

    mechanism: str
    iterations: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    @classmethod
    def from_password(cls, mechanism: str, password: str, *, salt: bytes, iterations: int) -> ScramCredential:
        return cls.from_salted(
            mechanism, _salted(mechanism, password, salt, iterations), salt=salt, iterations=iterations
        )

    @classmethod
    def from_salted(cls, mechanism: str, salted_password: bytes, *, salt: bytes, iterations: int) -> ScramCredential:
        """From the salted password, which is all that a client sends when it sets one (KIP-554)."""
        return cls(
            mechanism,
            iterations,
            salt,
            _digest(mechanism, _mac(mechanism, salted_password, b"Client Key")),
            _mac(mechanism, salted_password, b"Server Key"),
        )

    def is_password(self, password: str) -> bool:
        """Takes the same time however much of the password is right."""
        salted = _salted(self.mechanism, password, self.salt, self.iterations)
        stored_key = _digest(self.mechanism, _mac(self.mechanism, salted, b"Client Key"))
        return hmac.compare_digest(stored_key, self.stored_key)


class ScramServer:
    """One login: two messages from the client, two answers. Each call may raise LoginRefused, which ends it."""

    def __init__(self, mechanism: str, find: Callable[[str], tuple[ScramCredential, bool]], nonce: str) -> None:
        """`find` gives what to show for a name, and whether there is such a user."""
        self.claimed: str | None = None
        self.username: str | None = None
        self.is_complete = False
        self._mechanism = mechanism
        self._find = find
        self._server_nonce = nonce
        self._is_user = False
        self._first: tuple[ScramCredential, str, str, str, bytes] | None = None

    def next(self, message: bytes) -> bytes:
        try:
            text = message.decode()
        except UnicodeDecodeError:
            raise LoginRefused("the message is not UTF-8") from None
        return self._challenge(text) if self._first is None else self._verify(text)

    def _challenge(self, message: str) -> bytes:
        first = _CLIENT_FIRST.fullmatch(message)
        if first is None:
            raise LoginRefused("the client's first message is malformed")
        if ",tokenauth=true" in first["extensions"]:
            raise LoginRefused("delegation tokens are not issued here")
        username = self.claimed = _unescape(first["name"])
        # A name that is no user's is refused at the end, like a wrong password: the answers must not tell which names
        # exist. Apache Kafka refuses it here, and does tell.
        credential, self._is_user = self._find(username)
        if first["authzid"] is not None and _unescape(first["authzid"]) != username:
            raise LoginRefused("another authorization id", told=OTHER_AUTHORIZATION_ID)
        nonce = first["nonce"] + self._server_nonce
        challenge = f"r={nonce},s={base64.b64encode(credential.salt).decode()},i={credential.iterations}"
        self.username = username
        self._first = (credential, first["bare"], challenge, nonce, first["gs2"].encode())
        return challenge.encode()

    def _verify(self, message: str) -> bytes:
        assert self._first is not None
        credential, bare, challenge, nonce, gs2 = self._first
        final = _CLIENT_FINAL.fullmatch(message)
        if final is None:
            raise LoginRefused("the client's final message is malformed")
        if final["nonce"] != nonce:
            raise LoginRefused("the client's final message has another nonce")
        if _decode(final["binding"]) != gs2:
            raise LoginRefused("the channel binding is not that of the first message")
        signed = f"{bare},{challenge},{final['without_proof']}".encode()
        signature, proof = _mac(self._mechanism, credential.stored_key, signed), _decode(final["proof"])
        if len(proof) != len(signature):
            raise LoginRefused("the proof has the wrong length")
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not hmac.compare_digest(_digest(self._mechanism, client_key), credential.stored_key) or not self._is_user:
            raise LoginRefused("wrong password" if self._is_user else "no credential for this mechanism")
        self.is_complete = True
        return b"v=" + base64.b64encode(_mac(self._mechanism, credential.server_key, signed))


OTHER_AUTHORIZATION_ID: Final = (
    "Authentication failed: Client requested an authorization id that is different from username"
)


def _unescape(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise LoginRefused("a value is not base64") from None


def _salted(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), salt, iterations)


def _mac(mechanism: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, HASHES[mechanism])


def _digest(mechanism: str, message: bytes) -> bytes:
    return hashlib.new(HASHES[mechanism], message).digest()
