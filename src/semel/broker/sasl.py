"""The broker's side of a SASL login as a state machine for one connection: messages in, answers out. No socket.

Handshake, then tokens, then done; any other order is refused, and a login that failed stays failed. With a session
lifetime the client must log in again before it is over (KIP-368).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from kio.schema.errors import ErrorCode

from semel.broker.credentials import CredentialStore
from semel.broker.scram import OTHER_AUTHORIZATION_ID, LoginRefused, ScramServer
from semel.errors import WireError
from semel.wire.api import Api

REAUTHENTICATION_PAUSE_MS: Final = 1_000

_BEFORE_HANDSHAKE: Final = frozenset({Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE})
_DURING_LOGIN: Final = frozenset({Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE})


class _State(Enum):
    EXPECTS_HANDSHAKE = auto()
    EXPECTS_TOKEN = auto()
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class HandshakeAnswer:
    code: ErrorCode
    mechanisms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuthenticateAnswer:
    code: ErrorCode
    message: str | None = None
    token: bytes = b""
    session_lifetime_ms: int = 0


def not_expected() -> AuthenticateAnswer:
    """To a token where none is due, on a connection that is good for requests: Kafka says so and goes on."""
    message = "SaslAuthenticate request received after successful authentication"
    return AuthenticateAnswer(ErrorCode.illegal_sasl_state, message)


class _Mechanism(Protocol):
    claimed: str | None
    """The name that the client gives, before it has proved anything."""
    username: str | None
    is_complete: bool

    def next(self, message: bytes, /) -> bytes: ...


class SaslExchange:
    """Who a connection's client is, as soon as it has proved it.

    >>> users = CredentialStore(plain={"ann": "secret"})
    >>> exchange = SaslExchange(["PLAIN"], users, now_ms=lambda: 0)
    >>> exchange.handshake("PLAIN").code.name
    'none'
    >>> exchange.authenticate(bytes(1) + b"ann" + bytes(1) + b"secret").code.name
    'none'
    >>> exchange.principal
    'User:ann'
    """

    def __init__(
        self,
        mechanisms: Sequence[str],
        credentials: CredentialStore,
        *,
        now_ms: Callable[[], int],
        session_lifetime_ms: int = 0,
        make_nonce: Callable[[], str] = secrets.token_urlsafe,
    ) -> None:
        self.mechanisms = tuple(mechanisms)
        self._credentials = credentials
        self._now_ms = now_ms
        self._session_lifetime_ms = session_lifetime_ms
        self._make_nonce = make_nonce
        self._state = _State.EXPECTS_HANDSHAKE
        self._mechanism: _Mechanism | None = None
        self._mechanism_name: str | None = None
        self._other_mechanism: str | None = None
        self._has_raw_tokens = False
        self._principal: str | None = None
        self._session_ends_ms: int | None = None
        self._failure = ""
        self._reauthentication_began_ms: int | None = None

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """The client has logged in. While it does so again, this is False."""
        return self._state is _State.COMPLETE

    @property
    def is_failed(self) -> bool:
        """The connection is to be closed, after the answer has left."""
        return self._state is _State.FAILED

    @property
    def failure(self) -> str:
        """Why the login failed, for the broker's log: no password, and no name that is not a user's."""
        return self._failure

    @property
    def principal(self) -> str:
        """The user; asking before there is one is a mistake in the broker."""
        if self._principal is None:
            raise RuntimeError("nobody has logged in on this connection")
        return self._principal

    @property
    def expects_raw_tokens(self) -> bool:
        """The next frame is a bare token, for `authenticate_raw`: the handshake was of version 0."""
        return self._state is _State.EXPECTS_TOKEN and self._has_raw_tokens

    @property
    def has_session_ended(self) -> bool:
        """A session whose time is over ends with the next request, unless that begins a new login (KIP-368)."""
        return self._session_ends_ms is not None and self._now_ms() >= self._session_ends_ms

    def admits(self, api: Api) -> bool:
        """Whether the request may be served. If not, Kafka hangs up without an answer."""
        if self._state is _State.COMPLETE:
            return api is Api.SASL_HANDSHAKE or not self.has_session_ended
        if self._state is _State.EXPECTS_HANDSHAKE:
            return api in _BEFORE_HANDSHAKE
        return self._state is _State.EXPECTS_TOKEN and api in _DURING_LOGIN

    # -- messages ------------------------------------------------------------------------------------------------------

    def handshake(self, mechanism: str, version: int = 1) -> HandshakeAnswer:
        """The client chooses a mechanism. After version 0, tokens come in frames without a header."""
        self._check_not_failed()
        if self._state is _State.EXPECTS_TOKEN:
            self._fail("a handshake in the middle of a login")
            return HandshakeAnswer(ErrorCode.illegal_sasl_state, ())
        if self._state is _State.COMPLETE and not self._may_reauthenticate():
            return HandshakeAnswer(ErrorCode.illegal_sasl_state, ())
        if mechanism not in self.mechanisms:
            self._fail("a mechanism that this listener does not offer")
            return HandshakeAnswer(ErrorCode.unsupported_sasl_mechanism, self.mechanisms)
        if self._state is _State.COMPLETE:
            self._reauthentication_began_ms = self._now_ms()
            # Kafka answers the handshake, and refuses the token that follows.
            self._other_mechanism = None if mechanism == self._mechanism_name else mechanism
        self._has_raw_tokens = version == 0
        self._mechanism = self._begin(mechanism)
        if self._other_mechanism is None:
            self._mechanism_name = mechanism
        self._state = _State.EXPECTS_TOKEN
        return HandshakeAnswer(ErrorCode.none, self.mechanisms)

    def authenticate(self, token: bytes) -> AuthenticateAnswer:
        """The client's next token."""
        self._check_not_failed()
        if self._state is _State.COMPLETE:
            return not_expected()
        if self._mechanism is None or self._state is _State.EXPECTS_HANDSHAKE:
            self._fail("a token before the handshake")
            return AuthenticateAnswer(
                ErrorCode.illegal_sasl_state,
                "Unexpected Kafka request of type SASL_AUTHENTICATE during SASL handshake.",
            )
        try:
            return self._next(self._mechanism, token)
        except LoginRefused as refused:
            self._fail(str(refused))
            told = refused.told or (
                f"Authentication failed during {'authentication' if self._principal is None else 're-authentication'} "
                f"due to invalid credentials with SASL mechanism {self._mechanism_name}"
            )
            return AuthenticateAnswer(ErrorCode.sasl_authentication_failed, told)

    def authenticate_raw(self, token: bytes) -> bytes | None:
        """The same without Kafka's messages around it, which leaves no way to say no: None."""
        answer = self.authenticate(token)
        return answer.token if answer.code is ErrorCode.none else None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        self._state = _State.FAILED
        claimed = None if self._mechanism is None else self._mechanism.claimed
        if claimed is None:
            self._failure = reason
        else:
            known = self._credentials.is_user(claimed)
            self._failure = f"{reason}, for {repr(claimed) if known else 'an unknown user'} by {self._mechanism_name}"

    def _check_not_failed(self) -> None:
        if self._state is _State.FAILED:
            raise WireError("it went on after its login had failed")

    def _may_reauthenticate(self) -> bool:
        if self._session_ends_ms is None:
            return False
        began_ms = self._reauthentication_began_ms
        return began_ms is None or self._now_ms() - began_ms >= REAUTHENTICATION_PAUSE_MS

    def _begin(self, mechanism: str) -> _Mechanism:
        if mechanism == "PLAIN":
            return _Plain(self._credentials)
        return ScramServer(mechanism, lambda name: self._credentials.scram_to_show(name, mechanism), self._make_nonce())

    def _next(self, mechanism: _Mechanism, token: bytes) -> AuthenticateAnswer:
        if self._other_mechanism is not None:
            raise LoginRefused(
                "another mechanism",
                told=f"SASL mechanism '{self._other_mechanism}' requested by client is not supported for "
                f"re-authentication of mechanism '{self._mechanism_name}'",
            )
        answer = mechanism.next(token)
        if not mechanism.is_complete:
            return AuthenticateAnswer(ErrorCode.none, token=answer)
        principal = f"User:{mechanism.username}"
        if self._principal not in (None, principal):
            before, after = (each.replace(":", ".", 1) for each in (self.principal, principal))
            raise LoginRefused(
                "another user", told=f"Cannot change principals during re-authentication from {before}: {after}"
            )
        self._principal = principal
        self._mechanism = None
        self._state = _State.COMPLETE
        if self._session_lifetime_ms:
            self._session_ends_ms = self._now_ms() + self._session_lifetime_ms
        return AuthenticateAnswer(ErrorCode.none, None, answer, self._session_lifetime_ms)


class _Plain:
    """RFC 4616: one message with name and password, and an empty answer."""

    def __init__(self, credentials: CredentialStore) -> None:
        self.claimed: str | None = None
        self.username: str | None = None
        self.is_complete = False
        self._credentials = credentials

    def next(self, message: bytes) -> bytes:
        try:
            authorization_id, username, password = message.decode().split("\0")
        except ValueError:
            raise LoginRefused("the message is not three strings") from None
        if not username or not password:
            raise LoginRefused("the name or the password is empty")
        self.claimed = username
        if not self._credentials.is_plain_login(username, password):
            raise LoginRefused("wrong password", told="Authentication failed: Invalid username or password")
        if authorization_id not in ("", username):
            raise LoginRefused("another authorization id", told=OTHER_AUTHORIZATION_ID)
        self.username = username
        self.is_complete = True
        return b""
