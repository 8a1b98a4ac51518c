"""Logins by PLAIN and SCRAM against two other clients' sides, in every wrong order, with hostile bytes, and again."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scramp import ScramClient
from test_acls import MemoryMeta

from semel.broker.credentials import CredentialChange, CredentialStore
from semel.broker.sasl import AuthenticateAnswer, SaslExchange
from semel.broker.scram import ScramCredential
from semel.client.config import SecurityConfig
from semel.client.security import sasl_client
from semel.core.refusal import Refused
from semel.errors import AuthenticationFailed, ConfigError, WireError
from semel.wire import Api, ErrorCode

ALL = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SCRAM = ALL[1:]
each_mechanism = pytest.mark.parametrize("mechanism", ALL)
each_scram = pytest.mark.parametrize("mechanism", SCRAM)

USERS = CredentialStore(
    plain={"ann": "secret", "bob": "bob-secret"}, scram={"ann": "secret", "bob": "bob-secret", "a,b=c": "ª ☂"}
)


class Time:
    """Moves when told."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


def exchange(
    *mechanisms: str, users: CredentialStore = USERS, lifetime_ms: int = 0, time: Time | None = None
) -> SaslExchange:
    return SaslExchange(mechanisms or ALL, users, now_ms=(time or Time()).now_ms, session_lifetime_ms=lifetime_ms)


def log_in(
    sasl: SaslExchange, mechanism: str, username: str = "ann", password: str = "secret", version: int = 1
) -> AuthenticateAnswer:
    """Our own client's side, up to the broker's last answer or its first refusal."""
    assert sasl.handshake(mechanism, version).code is ErrorCode.none
    config = SecurityConfig(protocol="SASL_PLAINTEXT", sasl_mechanism=mechanism, username=username, password=password)
    client = sasl_client(config)
    token: bytes | None = client.first()
    answer = None
    while token is not None:
        answer = sasl.authenticate(token)
        if answer.code is not ErrorCode.none:
            return answer
        token = client.next(answer.token)
    assert answer is not None
    return answer


# -- right logins ------------------------------------------------------------------------------------------------------


@each_mechanism
def test_our_client_logs_in(mechanism: str) -> None:
    """Each mechanism is completed by Semel's own client, which checks the broker's proof too."""
    sasl = exchange()
    assert not sasl.is_complete
    answer = log_in(sasl, mechanism)
    assert (answer.code, answer.session_lifetime_ms) == (ErrorCode.none, 0)
    assert sasl.is_complete
    assert sasl.principal == "User:ann"


@each_scram
def test_another_library_logs_in_by_scram(mechanism: str) -> None:
    """The client's side of an independent library accepts the challenge and the proof."""
    sasl = exchange()
    sasl.handshake(mechanism)
    client = ScramClient([mechanism], "bob", "bob-secret")
    client.set_server_first(sasl.authenticate(client.get_client_first().encode()).token.decode())
    client.set_server_final(sasl.authenticate(client.get_client_final().encode()).token.decode())
    assert sasl.principal == "User:bob"


def test_the_example_of_rfc_7677_gives_its_bytes() -> None:
    """Salt, nonces and password of the RFC give the RFC's messages, letter by letter."""
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    users = CredentialStore()
    credential = ScramCredential.from_password("SCRAM-SHA-256", "pencil", salt=salt, iterations=4096)
    users.change([CredentialChange("user", "SCRAM-SHA-256", credential)])
    nonce = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    sasl = SaslExchange(ALL, users, now_ms=lambda: 0, make_nonce=lambda: nonce)
    sasl.handshake("SCRAM-SHA-256")
    challenge = sasl.authenticate(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO").token.decode()
    assert challenge == f"r=rOprNGfwEbeRWgbNEkqO{nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    proof = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    answer = sasl.authenticate(f"c=biws,r=rOprNGfwEbeRWgbNEkqO{nonce},p={proof}".encode())
    assert answer.token == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@each_scram
def test_names_and_passwords_are_taken_as_they_are(mechanism: str) -> None:
    """Kafka does not normalise them: separators are escaped, and letters that SASLprep would alter stay."""
    sasl = exchange()
    assert log_in(sasl, mechanism, "a,b=c", "ª ☂").code is ErrorCode.none
    assert sasl.principal == "User:a,b=c"


@each_mechanism
def test_tokens_without_headers_work(mechanism: str) -> None:
    """After a handshake of version 0 the same tokens go bare, and a refusal is the end of the connection."""
    sasl = exchange()
    assert not sasl.expects_raw_tokens
    sasl.handshake(mechanism, 0)
    assert sasl.expects_raw_tokens
    config = SecurityConfig(protocol="SASL_PLAINTEXT", sasl_mechanism=mechanism, username="ann", password="secret")
    client = sasl_client(config)
    token: bytes | None = client.first()
    while token is not None:
        answer = sasl.authenticate_raw(token)
        assert answer is not None
        token = client.next(answer)
    assert sasl.is_complete
    assert not sasl.expects_raw_tokens

    refused = exchange()
    refused.handshake(mechanism, 0)
    assert refused.authenticate_raw(b"\0ann\0wrong") is None
    assert refused.is_failed


# -- wrong logins ------------------------------------------------------------------------------------------------------


@each_mechanism
@pytest.mark.parametrize(("username", "password"), [("ann", "Secret"), ("nobody", "secret")])
def test_a_wrong_login_is_refused_in_kafkas_words(mechanism: str, username: str, password: str) -> None:
    """The answer does not tell whether it was the name or the password, and nothing more is taken."""
    sasl = exchange()
    answer = log_in(sasl, mechanism, username, password)
    assert answer.code is ErrorCode.sasl_authentication_failed
    if mechanism == "PLAIN":
        assert answer.message == "Authentication failed: Invalid username or password"
    else:
        assert answer.message == (
            f"Authentication failed during authentication due to invalid credentials with SASL mechanism {mechanism}"
        )
    assert answer.token == b""
    assert sasl.is_failed
    assert not sasl.is_complete
    with pytest.raises(RuntimeError):
        _ = sasl.principal
    with pytest.raises(WireError, match="after its login had failed"):
        sasl.authenticate(b"\0ann\0secret")
    with pytest.raises(WireError, match="after its login had failed"):
        sasl.handshake("PLAIN")


@pytest.mark.parametrize(
    ("mechanism", "token"), [("PLAIN", b"bob\0ann\0secret"), ("SCRAM-SHA-256", b"n,a=bob,n=ann,r=nonce")]
)
def test_nobody_acts_for_another(mechanism: str, token: bytes) -> None:
    """An authorization id that is not the user's own name is refused, with Kafka's sentence."""
    sasl = exchange()
    sasl.handshake(mechanism)
    answer = sasl.authenticate(token)
    assert answer.code is ErrorCode.sasl_authentication_failed
    assert answer.message is not None
    assert "an authorization id that is different from username" in answer.message


def final(challenge: bytes, change: Callable[[dict[str, str]], object]) -> bytes:
    """The right final message of ann, with a change made to its parts."""
    client = ScramClient(["SCRAM-SHA-256"], "ann", "secret", c_nonce="nonce")
    client.get_client_first()
    client.set_server_first(challenge.decode())
    parts = dict(part.split("=", 1) for part in client.get_client_final().split(","))
    change(parts)
    return ",".join(f"{name}={value}" for name, value in parts.items()).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.update(r=parts["r"] + "x"),
        lambda parts: parts.update(r="nonce"),
        lambda parts: parts.update(c="eSws"),
        lambda parts: parts.update(c="%%%"),
        lambda parts: parts.update(p="AAAA"),
        lambda parts: parts.update(p="A"),
        lambda parts: parts.update(p=base64.b64encode(bytes(32)).decode()),
        lambda parts: parts.pop("p"),
        lambda parts: parts.pop("c"),
        lambda parts: parts.clear(),
    ],
)
def test_a_final_message_that_was_tampered_with_is_refused(change: Callable[[dict[str, str]], object]) -> None:
    """Nonce, channel binding and proof each count; the untouched message is accepted."""
    for tampered, expected in ((False, ErrorCode.none), (True, ErrorCode.sasl_authentication_failed)):
        sasl = exchange()
        sasl.handshake("SCRAM-SHA-256")
        challenge = sasl.authenticate(b"n,,n=ann,r=nonce").token
        message = final(challenge, change if tampered else lambda parts: None)
        assert sasl.authenticate(message).code is expected


def test_a_final_message_cannot_be_replayed() -> None:
    """A recorded login does not work on another connection: the broker's nonce is new each time."""
    first, second = exchange(), exchange()
    for sasl in (first, second):
        sasl.handshake("SCRAM-SHA-256")
    recorded = final(first.authenticate(b"n,,n=ann,r=nonce").token, lambda parts: None)
    second.authenticate(b"n,,n=ann,r=nonce")
    assert first.authenticate(recorded).code is ErrorCode.none
    assert second.authenticate(recorded).code is ErrorCode.sasl_authentication_failed


@given(st.sampled_from(ALL), st.lists(st.binary(max_size=64), min_size=1, max_size=3))
@example("PLAIN", [b"\0ann\0"])
@example("PLAIN", [b"\0\0secret"])
@example("PLAIN", [b"\0ann\0secret\0"])
@example("PLAIN", [b"\xff\0ann\0secret"])
@example("SCRAM-SHA-256", [b"n,,n=ann,r=nonce", b"n,,n=ann,r=nonce"])
@example("SCRAM-SHA-256", [b"n,,n=ann,r=nonce,tokenauth=true"])
@example("SCRAM-SHA-256", [b"p=tls-unique,,n=ann,r=nonce"])
@example("SCRAM-SHA-256", [b"n,,m=x,n=ann,r=nonce"])
@example("SCRAM-SHA-256", [b"n,,n=a=41nn,r=nonce"])
@example("SCRAM-SHA-512", [b"n,,n=ann,r=nonce", b"\xff"])
@example("SCRAM-SHA-512", [b"n,,n=" + b"=" * 100_000])
def test_hostile_tokens_end_in_a_refusal(mechanism: str, tokens: list[bytes]) -> None:
    """Whatever bytes come, nobody is logged in, and the only outcomes are a challenge and a refusal."""
    sasl = exchange()
    sasl.handshake(mechanism)
    for token in tokens:
        if sasl.is_failed:
            break
        answer = sasl.authenticate(token)
        assert answer.code in (ErrorCode.none, ErrorCode.sasl_authentication_failed)
        assert (answer.code is ErrorCode.sasl_authentication_failed) is sasl.is_failed
    assert not sasl.is_complete


# -- wrong order -------------------------------------------------------------------------------------------------------


def test_a_token_before_the_handshake_is_refused() -> None:
    """No mechanism was chosen: ILLEGAL_SASL_STATE, and the connection is done."""
    sasl = exchange()
    assert sasl.authenticate(b"\0ann\0secret").code is ErrorCode.illegal_sasl_state
    assert sasl.is_failed


def test_a_second_handshake_during_a_login_is_refused() -> None:
    """A mechanism is chosen once."""
    sasl = exchange()
    sasl.handshake("SCRAM-SHA-256")
    sasl.authenticate(b"n,,n=ann,r=nonce")
    assert sasl.handshake("PLAIN").code is ErrorCode.illegal_sasl_state
    assert sasl.is_failed


def test_an_unknown_mechanism_is_refused_with_the_list() -> None:
    """The client learns what there is; a mechanism that exists and is not enabled is unknown too."""
    for mechanism in ("GSSAPI", "PLAIN", ""):
        sasl = exchange("SCRAM-SHA-256", "SCRAM-SHA-512")
        answer = sasl.handshake(mechanism)
        assert (answer.code, answer.mechanisms) == (ErrorCode.unsupported_sasl_mechanism, SCRAM)
        assert sasl.is_failed


def test_after_the_login_neither_handshake_nor_token_is_due() -> None:
    """Without session lifetimes both are answered with an error, and the login stays good."""
    sasl = exchange()
    log_in(sasl, "PLAIN")
    assert sasl.authenticate(b"\0bob\0bob-secret").code is ErrorCode.illegal_sasl_state
    assert sasl.handshake("PLAIN").code is ErrorCode.illegal_sasl_state
    assert sasl.is_complete
    assert sasl.principal == "User:ann"


def test_requests_are_admitted_after_the_login_only() -> None:
    """Before it there are versions and the login itself; after a failure there is nothing."""
    sasl = exchange()
    admitted = {api for api in Api if sasl.admits(api)}
    assert admitted == {Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE}
    sasl.handshake("PLAIN")
    assert {api for api in Api if sasl.admits(api)} == {Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE}
    sasl.authenticate(b"\0ann\0secret")
    assert all(sasl.admits(api) for api in Api)
    failed = exchange()
    log_in(failed, "PLAIN", password="wrong")
    assert not any(failed.admits(api) for api in Api)


# -- again -------------------------------------------------------------------------------------------------------------


@each_mechanism
def test_a_session_is_prolonged_by_a_new_login(mechanism: str) -> None:
    """KIP-368: the lifetime is told, nothing but a handshake is taken after it, and a login begins it anew."""
    time = Time()
    sasl = exchange(lifetime_ms=60_000, time=time)
    assert log_in(sasl, mechanism).session_lifetime_ms == 60_000
    time.ms += 60_000
    assert sasl.has_session_ended
    assert not sasl.admits(Api.PRODUCE)
    assert sasl.admits(Api.SASL_HANDSHAKE)
    assert log_in(sasl, mechanism).session_lifetime_ms == 60_000
    assert not sasl.has_session_ended
    assert sasl.admits(Api.PRODUCE)


def test_a_new_login_cannot_change_the_user_or_the_mechanism() -> None:
    """Both would let one connection be several users; Kafka's sentences tell why."""
    sasl = exchange(lifetime_ms=60_000)
    log_in(sasl, "PLAIN")
    answer = log_in(sasl, "PLAIN", "bob", "bob-secret")
    assert answer.code is ErrorCode.sasl_authentication_failed
    assert answer.message == "Cannot change principals during re-authentication from User.ann: User.bob"

    sasl = exchange(lifetime_ms=60_000)
    log_in(sasl, "SCRAM-SHA-256")
    answer = log_in(sasl, "PLAIN")
    assert answer.message == (
        "SASL mechanism 'PLAIN' requested by client is not supported for re-authentication of mechanism 'SCRAM-SHA-256'"
    )


def test_a_failed_new_login_ends_the_session() -> None:
    """The connection is not left as it was: the password may have been changed on purpose."""
    sasl = exchange(lifetime_ms=60_000)
    log_in(sasl, "SCRAM-SHA-256")
    answer = log_in(sasl, "SCRAM-SHA-256", password="wrong")
    assert answer.message is not None
    assert "during re-authentication due to invalid credentials" in answer.message
    assert not any(sasl.admits(api) for api in Api)


def test_logins_do_not_follow_one_another_within_a_second() -> None:
    """A client cannot keep the broker busy with logins."""
    time = Time()
    sasl = exchange(lifetime_ms=60_000, time=time)
    log_in(sasl, "PLAIN")
    log_in(sasl, "PLAIN")
    assert sasl.handshake("PLAIN").code is ErrorCode.illegal_sasl_state
    time.ms += 1_000
    assert log_in(sasl, "PLAIN").code is ErrorCode.none


# -- the store ---------------------------------------------------------------------------------------------------------


def salted(mechanism: str, password: str) -> CredentialChange:
    name = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism]
    salt = b"twelve bytes"
    pbkdf2 = hashlib.pbkdf2_hmac(name, password.encode(), salt, 8192)
    return CredentialChange(
        "ann", mechanism, ScramCredential.from_salted(mechanism, pbkdf2, salt=salt, iterations=8192)
    )


@each_scram
def test_a_changed_password_survives_a_restart(mechanism: str) -> None:
    """What a client has set wins over the settings of the start, then and after the next start."""
    meta = MemoryMeta()
    CredentialStore(scram={"ann": "secret"}, store=meta).change([salted(mechanism, "new")])
    users = CredentialStore(scram={"ann": "secret"}, store=meta)
    assert log_in(exchange(users=users), mechanism, password="new").code is ErrorCode.none
    assert log_in(exchange(users=users), mechanism).code is ErrorCode.sasl_authentication_failed
    [other] = set(SCRAM) - {mechanism}
    assert log_in(exchange(users=users), other).code is ErrorCode.none


def test_a_deleted_user_stays_out_after_a_restart() -> None:
    """A deletion is remembered, though the settings of the start still name the user."""
    meta = MemoryMeta()
    CredentialStore(scram={"ann": "secret"}, store=meta).change([CredentialChange("ann", "SCRAM-SHA-256", None)])
    users = CredentialStore(scram={"ann": "secret"}, store=meta)
    assert log_in(exchange(users=users), "SCRAM-SHA-256").code is ErrorCode.sasl_authentication_failed
    assert [each.mechanism for each in users.scram_users()["ann"]] == ["SCRAM-SHA-512"]


def known_by_both(meta: MemoryMeta) -> CredentialStore:
    """As a users file makes it: one password for PLAIN and SCRAM."""
    return CredentialStore(plain={"ann": "secret"}, scram={"ann": "secret"}, store=meta)


def test_a_user_whose_scram_credentials_are_deleted_cannot_log_in_by_plain() -> None:
    """The users file gives one password for both. Deleting it removes the user's access, also after a restart."""
    meta = MemoryMeta()
    users = known_by_both(meta)
    users.change([CredentialChange("ann", "SCRAM-SHA-256", None)])
    assert log_in(exchange(users=users), "PLAIN").code is ErrorCode.none, "SCRAM-SHA-512 still takes this password"
    users.change([CredentialChange("ann", "SCRAM-SHA-512", None)])
    for known in (users, known_by_both(meta)):
        assert log_in(exchange(users=known), "PLAIN").code is ErrorCode.sasl_authentication_failed


def test_a_password_that_scram_no_longer_takes_is_refused_by_plain() -> None:
    """A password is changed because somebody else may know it. The new one works by every mechanism."""
    users = known_by_both(MemoryMeta())
    users.change([salted(mechanism, "new") for mechanism in SCRAM])
    assert log_in(exchange(users=users), "PLAIN").code is ErrorCode.sasl_authentication_failed
    assert log_in(exchange(users=users), "PLAIN", password="new").code is ErrorCode.none


# -- which names exist -------------------------------------------------------------------------------------------------


def challenge(users: CredentialStore, mechanism: str, name: str) -> dict[str, str]:
    """What anybody is shown who claims to be `name`, without the nonce."""
    sasl = exchange(users=users)
    sasl.handshake(mechanism)
    answer = sasl.authenticate(f"n,,n={name},r=mine".encode())
    assert answer.code is ErrorCode.none, answer.message
    parts = dict(part.split("=", 1) for part in answer.token.decode().split(","))
    del parts["r"]
    return parts


@each_scram
def test_a_name_that_nobody_has_is_answered_like_a_users(mechanism: str) -> None:
    """Salt and iterations of the same shape, the same each time and after a restart, and another for each name."""
    meta = MemoryMeta()
    users = CredentialStore(scram={"ann": "secret"}, store=meta)
    known, unknown = challenge(users, mechanism, "ann"), challenge(users, mechanism, "eve")
    assert known["i"] == unknown["i"]
    assert len(known["s"]) == len(unknown["s"])
    assert unknown != challenge(users, mechanism, "eva")
    again = CredentialStore(scram={"ann": "secret"}, store=meta)
    assert [challenge(each, mechanism, name) for each in (users, again) for name in ("ann", "eve")] == [
        known,
        unknown,
    ] * 2
    users.change([CredentialChange("ann", mechanism, None)])
    users.change([salted(mechanism, "new")])
    assert challenge(users, mechanism, "eve")["i"] == "8192", "all users have 8192 iterations now"


@each_scram
def test_a_wrong_name_and_a_wrong_password_are_refused_alike(mechanism: str) -> None:
    """At the same step and in the same words."""
    refusals: list[tuple[int, str | None]] = []
    for name in ("ann", "eve"):
        sasl = exchange()
        sasl.handshake(mechanism)
        client = sasl_client(
            SecurityConfig(protocol="SASL_PLAINTEXT", sasl_mechanism=mechanism, username=name, password="wrong")
        )
        final = client.next(sasl.authenticate(client.first()).token)
        assert final is not None
        answer = sasl.authenticate(final)
        assert not sasl.is_complete
        refusals.append((answer.code, answer.message))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] is ErrorCode.sasl_authentication_failed


def test_a_full_disk_changes_no_password() -> None:
    """The old one works on, since the new one would be gone after a restart."""
    meta = MemoryMeta()
    users = CredentialStore(scram={"ann": "secret"}, store=meta)
    meta.is_full = True
    with pytest.raises(OSError, match="no space"):
        users.change([salted("SCRAM-SHA-256", "new")])
    assert log_in(exchange(users=users), "SCRAM-SHA-256").code is ErrorCode.none


def test_no_password_is_kept_or_shown() -> None:
    """Neither the objects nor what is written to disk hold one."""
    meta = MemoryMeta()
    users = CredentialStore(plain={"ann": "hunter22"}, scram={"ann": "hunter22"}, store=meta)
    users.change([salted("SCRAM-SHA-256", "hunter22")])
    seen = repr(users) + repr(vars(users)) + repr(users.scram_users()) + repr(meta.values)
    assert "hunter22" not in seen
    assert not re.search(r"stored_key=|server_key=b", seen)


def test_a_user_who_could_never_log_in_is_a_mistake() -> None:
    """An empty password would be refused by PLAIN at each login; it is told at the start."""
    for users in ({"ann": ""}, {"": "secret"}, {"ann": "a\0b"}):
        with pytest.raises(ConfigError, match="cannot log in"):
            CredentialStore(plain=users)


def test_the_client_notices_a_broker_that_does_not_know_the_password() -> None:
    """The proof that the broker sends is one only the password's owner can make."""
    sasl = exchange()
    sasl.handshake("SCRAM-SHA-256")
    config = SecurityConfig(
        protocol="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-256", username="ann", password="secret"
    )
    client = sasl_client(config)
    proof = client.next(sasl.authenticate(client.first()).token)
    assert proof is not None
    right = sasl.authenticate(proof).token
    with pytest.raises(AuthenticationFailed, match="did not prove"):
        client.next(b"v=" + base64.b64encode(bytes(32)))
    assert right.startswith(b"v=")


def test_credentials_that_clients_set_are_bounded_and_deleted_ones_leave_no_trace() -> None:
    """Users without end filled the memory, and each that was deleted again stayed in the file for ever."""
    meta = MemoryMeta()
    users = CredentialStore(plain={"ann": "secret"}, scram={"ann": "secret"}, store=meta, changed_max=3)
    kept = ScramCredential.from_password("SCRAM-SHA-256", "new", salt=b"salt", iterations=4096)
    for number in range(20):
        users.change([CredentialChange(f"user-{number}", "SCRAM-SHA-256", kept)])
        users.change([CredentialChange(f"user-{number}", "SCRAM-SHA-256", None)])
    users.change([CredentialChange("ann", "SCRAM-SHA-256", None)])
    users.change([CredentialChange(f"user-{number}", "SCRAM-SHA-256", kept) for number in range(2)])
    with pytest.raises(Refused, match=r"semel\.scram\.credentials\.max"):
        users.change([CredentialChange("one-more", "SCRAM-SHA-256", kept)])
    again = CredentialStore(plain={"ann": "secret"}, scram={"ann": "secret"}, store=meta, changed_max=0)
    for store in (users, again):
        assert sorted(store.scram_users()) == ["ann", "user-0", "user-1"]
        assert store.scram("ann", "SCRAM-SHA-256") is None
        assert store.scram("one-more", "SCRAM-SHA-256") is None
    again.change([CredentialChange("user-0", "SCRAM-SHA-256", None)])  # to delete is allowed at any time
    with pytest.raises(Refused):
        again.change([CredentialChange("user-0", "SCRAM-SHA-256", kept)])
    small = CredentialStore(bytes_max=2_000)
    with pytest.raises(Refused, match="share"):
        small.change([CredentialChange("n" * 1_000, "SCRAM-SHA-256", kept)])
