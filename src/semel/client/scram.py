"""The client's side of SCRAM. Apart from `security.py`, so that only those who log in this way load the library."""

from __future__ import annotations

from scramp import ScramClient, ScramException

from semel.client.security import login_refused
from semel.errors import AuthenticationFailed, InvalidState


class Scram:
    """RFC 5802 without channel binding, as Kafka has it: two round trips, the second proves the broker to us."""

    def __init__(self, mechanism: str, username: str, password: str, nonce: str | None) -> None:
        self._mechanism = mechanism
        self._username = username
        self._client = ScramClient([mechanism], "-", "-", c_nonce=nonce)
        # Kafka hashes the UTF-8 bytes as they are. The library's SASLprep would alter some characters and refuse
        # others, and a password that works with Java's client would be wrong here.
        self._client.username.username = username
        self._client.password.password = password
        self._challenges = 0

    def first(self) -> bytes:
        return self._client.get_client_first().encode()

    def next(self, challenge: bytes) -> bytes | None:
        self._challenges += 1
        if self._challenges == 1:
            return self._prove(challenge)
        if self._challenges == 2:
            return self._check_proof(challenge)
        raise InvalidState("The SCRAM exchange is over; begin a new one for each connection.")

    def _prove(self, challenge: bytes) -> bytes:
        try:
            self._client.set_server_first(bytes(challenge).decode())
            return self._client.get_client_final().encode()
        except (ScramException, UnicodeDecodeError):
            if bytes(challenge).startswith(b"e="):
                raise AuthenticationFailed(login_refused(self._mechanism, self._username)) from None
            raise AuthenticationFailed(
                f"The broker's {self._mechanism} challenge is not valid, so no password was sent: "
                "check that bootstrap.servers names a Kafka broker."
            ) from None

    def _check_proof(self, challenge: bytes) -> None:
        try:
            self._client.set_server_final(bytes(challenge).decode())
        except (ScramException, UnicodeDecodeError):
            if bytes(challenge).startswith(b"e="):
                raise AuthenticationFailed(login_refused(self._mechanism, self._username)) from None
            raise AuthenticationFailed(
                f"The broker did not prove that it knows the password of {self._username!r}, so it may be an impostor "
                "and nothing was sent: check bootstrap.servers, and use security.protocol=SASL_SSL."
            ) from None
