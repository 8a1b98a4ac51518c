"""The handlers of ACLs, logins and SCRAM credentials, asked in every version that is served, over the wire's bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.serial import entity_reader
from test_acls import MemoryMeta

from semel.broker.acls import AclBinding, AclFilter, AllowAll, Authorizer, Operation, PatternType, Permission
from semel.broker.acls import ResourceType as Type
from semel.broker.credentials import CredentialStore
from semel.broker.dispatch import handler_for
from semel.broker.sasl import SaslExchange
from semel.client.config import SecurityConfig
from semel.client.security import sasl_client
from semel.wire import Api, ErrorCode
from semel.wire.server import SERVER_VERSIONS, encode_response

EXPECTED_HEADER_BYTES = {0: 4, 1: 5}


@dataclass
class Peer:
    """A connection, as far as the handlers know it."""

    sasl: SaslExchange | None = None
    principal: str = "User:ANONYMOUS"

    def authenticated(self, principal: str) -> None:
        self.principal = principal


@dataclass
class Brokers:
    """A broker with what security needs, and a way to ask it."""

    meta: MemoryMeta = field(default_factory=MemoryMeta)
    peer: Peer = field(default_factory=Peer)

    def __post_init__(self) -> None:
        self.authorizer: Authorizer = Authorizer(["User:admin"], store=self.meta)
        self.credentials = CredentialStore(scram={"ann": "secret"}, store=self.meta)

    def ask(self, api: Api, version: int, request: Any, *, principal: str = "User:admin") -> Any:
        context = SimpleNamespace(
            principal=principal, host="/127.0.0.1", api_version=version, connection=self.peer, client_id="test"
        )
        broker: Any = self
        asked: Any = context
        response: Any = handler_for(api)(broker, asked, request)
        # What cannot be written to the wire would only fail in the field.
        frame = b"".join(encode_response(response, 7))[4:]
        header = EXPECTED_HEADER_BYTES[int(response.__flexible__)]
        read, size = entity_reader(type(response))(frame, header)
        assert header + size == len(frame)
        assert read == response
        return response


@pytest.fixture
def broker() -> Brokers:
    return Brokers()


def versions(api: Api) -> pytest.MarkDecorator:
    served = SERVER_VERSIONS[api]
    return pytest.mark.parametrize("version", range(served.lowest, served.highest + 1))


def request_of(api: Api, version: int, **fields: Any) -> Any:
    schema: Any = load_request_schema(api, version)
    return schema(**fields)


def part_of(api: Api, version: int, name: str, /, **fields: Any) -> Any:
    """A nested entity of a request, by its name in the schema's module."""
    module = __import__(load_request_schema(api, version).__module__, fromlist=[name])
    return getattr(module, name)(**fields)


def creation(version: int, **fields: Any) -> Any:
    given = {
        "resource_type": Type.TOPIC,
        "resource_name": "orders",
        "resource_pattern_type": PatternType.LITERAL,
        "principal": "User:ann",
        "host": "*",
        "operation": Operation.READ,
        "permission_type": Permission.ALLOW,
    } | fields
    numbers = {name: int(value) if isinstance(value, int) else value for name, value in given.items()}
    return part_of(Api.CREATE_ACLS, version, "AclCreation", **numbers)


def create(broker: Brokers, version: int, *creations: Any, principal: str = "User:admin") -> list[Any]:
    request = request_of(Api.CREATE_ACLS, version, creations=creations)
    return list(broker.ask(Api.CREATE_ACLS, version, request, principal=principal).results)


def filter_fields(**fields: Any) -> dict[str, Any]:
    return {
        "resource_type_filter": 1,
        "resource_name_filter": None,
        "pattern_type_filter": 1,
        "principal_filter": None,
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    } | fields


def describe(broker: Brokers, version: int, *, principal: str = "User:admin", **fields: Any) -> Any:
    request = request_of(Api.DESCRIBE_ACLS, version, **filter_fields(**fields))
    return broker.ask(Api.DESCRIBE_ACLS, version, request, principal=principal)


def delete(broker: Brokers, version: int, *filters: dict[str, Any], principal: str = "User:admin") -> list[Any]:
    parts = tuple(part_of(Api.DELETE_ACLS, version, "DeleteAclsFilter", **each) for each in filters)
    request = request_of(Api.DELETE_ACLS, version, filters=parts)
    return list(broker.ask(Api.DELETE_ACLS, version, request, principal=principal).filter_results)


# -- ACLs --------------------------------------------------------------------------------------------------------------


@versions(Api.CREATE_ACLS)
def test_rules_are_created_described_and_deleted(broker: Brokers, version: int) -> None:
    """What was created is listed by resource, counts at once, and is gone when it was deleted."""
    created = create(
        broker,
        version,
        creation(version),
        creation(version, operation=Operation.DESCRIBE, permission_type=Permission.DENY),
        creation(version, resource_name="etl-", resource_type=Type.TRANSACTIONAL_ID, resource_pattern_type=4),
    )
    assert [each.error_code for each in created] == [ErrorCode.none] * 3
    assert len(broker.authorizer.bindings) == 3

    response = describe(broker, version)
    assert (response.error_code, response.error_message) == (ErrorCode.none, None)
    listed = {(each.resource_type, each.resource_name, each.pattern_type): each.acls for each in response.resources}
    assert {resource: len(entries) for resource, entries in listed.items()} == {(2, "orders", 3): 2, (5, "etl-", 4): 1}
    [entry] = listed[5, "etl-", 4]
    assert (entry.principal, entry.host, entry.operation, entry.permission_type) == ("User:ann", "*", 3, 3)

    by_name, by_user = delete(
        broker, version, filter_fields(resource_name_filter="orders"), filter_fields(principal_filter="User:bob")
    )
    assert {each.operation for each in by_name.matching_acls} == {3, 8}
    assert all(each.error_code is ErrorCode.none for each in by_name.matching_acls)
    assert (by_user.error_code, by_user.matching_acls) == (ErrorCode.none, ())
    assert [each.name for each in broker.authorizer.find(AclFilter())] == ["etl-"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"resource_name": ""}, "Invalid empty resource name"),
        ({"resource_type": Type.CLUSTER}, "only valid name for the CLUSTER resource is kafka-cluster"),
        ({"resource_type": 99}, "Invalid resourceType UNKNOWN"),
        ({"resource_type": Type.ANY}, "Invalid resourceType ANY"),
        ({"resource_pattern_type": PatternType.MATCH}, "Invalid patternType MATCH"),
        ({"operation": Operation.ANY}, "Invalid operation ANY"),
        ({"permission_type": Permission.ANY}, "Invalid permissionType ANY"),
        ({"principal": "ann"}, "Could not parse principal from `ann`"),
    ],
)
def test_an_invalid_rule_is_refused_and_the_others_are_kept(
    broker: Brokers, fields: dict[str, Any], words: str
) -> None:
    """Each has its own answer, in the order of the request."""
    invalid, valid = create(broker, 3, creation(3, **fields), creation(3))
    assert invalid.error_code is ErrorCode.invalid_request
    assert words in invalid.error_message
    assert valid.error_code is ErrorCode.none
    assert {each.name for each in broker.authorizer.bindings} == {"orders"}


def test_a_filter_of_an_unknown_kind_is_refused(broker: Brokers) -> None:
    """A newer client's number must not be read as "everything"."""
    create(broker, 3, creation(3))
    unknown: list[dict[str, Any]] = [{"operation": 99}, {"pattern_type_filter": 0}, {"resource_type_filter": -1}]
    for fields in unknown:
        assert describe(broker, 3, **fields).error_code is ErrorCode.invalid_request
        refused, right = delete(broker, 3, filter_fields(**fields), filter_fields(principal_filter="User:nobody"))
        assert (refused.error_code, right.error_code) == (ErrorCode.invalid_request, ErrorCode.none)
    assert len(broker.authorizer.bindings) == 1


def test_rules_are_changed_by_those_who_may_alter_the_cluster(broker: Brokers) -> None:
    """Others learn that they may not, and nothing else; DESCRIBE is enough to look."""
    refused = ErrorCode.cluster_authorization_failed
    assert [each.error_code for each in create(broker, 3, creation(3), creation(3), principal="User:ann")] == [
        refused
    ] * 2
    assert delete(broker, 3, filter_fields(), principal="User:ann")[0].error_code is refused
    response = describe(broker, 3, principal="User:ann")
    assert (response.error_code, response.resources) == (refused, ())
    assert broker.authorizer.bindings == frozenset()

    rule = AclBinding(Type.CLUSTER, "kafka-cluster", principal="User:ann", operation=Operation.ALTER)
    broker.authorizer.add([rule])
    assert describe(broker, 3, principal="User:ann").error_code is ErrorCode.none
    assert create(broker, 3, creation(3), principal="User:ann")[0].error_code is ErrorCode.none


def test_without_an_authorizer_there_are_no_rules(broker: Brokers) -> None:
    """A client that wants to protect something must not believe that it did."""
    broker.authorizer = AllowAll()
    assert create(broker, 3, creation(3))[0].error_code is ErrorCode.security_disabled
    assert delete(broker, 3, filter_fields())[0].error_code is ErrorCode.security_disabled
    response = describe(broker, 3)
    assert response.error_code is ErrorCode.security_disabled
    assert response.error_message == "No Authorizer is configured on the broker"


def test_a_full_disk_is_told(broker: Brokers) -> None:
    """Nothing was changed, and the answer says so."""
    create(broker, 3, creation(3))
    broker.meta.is_full = True
    invalid, failed = create(broker, 3, creation(3, resource_name=""), creation(3, resource_name="other"))
    assert (invalid.error_code, failed.error_code) == (ErrorCode.invalid_request, ErrorCode.kafka_storage_error)
    assert "nothing was changed" in failed.error_message
    [result] = delete(broker, 3, filter_fields())
    assert (result.error_code, result.matching_acls) == (ErrorCode.kafka_storage_error, ())
    assert {each.name for each in broker.authorizer.bindings} == {"orders"}


# -- logins ------------------------------------------------------------------------------------------------------------


def handshake(broker: Brokers, version: int, mechanism: str = "SCRAM-SHA-256") -> Any:
    return broker.ask(Api.SASL_HANDSHAKE, version, request_of(Api.SASL_HANDSHAKE, version, mechanism=mechanism))


def authenticate(broker: Brokers, version: int, token: bytes) -> Any:
    return broker.ask(Api.SASL_AUTHENTICATE, version, request_of(Api.SASL_AUTHENTICATE, version, auth_bytes=token))


@versions(Api.SASL_AUTHENTICATE)
def test_a_login_tells_the_connection_who_it_is(broker: Brokers, version: int) -> None:
    """The principal is set with the last token, not before."""
    lifetime_ms = 5_000
    broker.peer.sasl = SaslExchange(
        ["SCRAM-SHA-256"], broker.credentials, now_ms=lambda: 0, session_lifetime_ms=lifetime_ms
    )
    response = handshake(broker, 1)
    assert (response.error_code, response.mechanisms) == (ErrorCode.none, ("SCRAM-SHA-256",))
    config = SecurityConfig(protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-256", username="ann", password="secret")
    client = sasl_client(config)
    challenge = authenticate(broker, version, client.first())
    assert broker.peer.principal == "User:ANONYMOUS"
    proof = client.next(challenge.auth_bytes)
    assert proof is not None
    last = authenticate(broker, version, proof)
    assert client.next(last.auth_bytes) is None
    assert broker.peer.principal == "User:ann"
    if version >= 1:
        assert last.session_lifetime.total_seconds() * 1000 == lifetime_ms


@versions(Api.SASL_HANDSHAKE)
def test_a_mechanism_that_is_not_offered_is_refused(broker: Brokers, version: int) -> None:
    """The list of those that are is part of the answer; the version decides how tokens come."""
    broker.peer.sasl = SaslExchange(["SCRAM-SHA-256"], broker.credentials, now_ms=lambda: 0)
    response = handshake(broker, version, "GSSAPI")
    assert (response.error_code, response.mechanisms) == (ErrorCode.unsupported_sasl_mechanism, ("SCRAM-SHA-256",))
    broker.peer.sasl = SaslExchange(["SCRAM-SHA-256"], broker.credentials, now_ms=lambda: 0)
    handshake(broker, version)
    assert broker.peer.sasl.expects_raw_tokens is (version == 0)


def test_a_failed_login_changes_nobody(broker: Brokers) -> None:
    """The client reads why, and is still nobody."""
    broker.peer.sasl = SaslExchange(["PLAIN"], broker.credentials, now_ms=lambda: 0)
    handshake(broker, 1, "PLAIN")
    response = authenticate(broker, 2, b"\0ann\0secret")  # ann may log in by SCRAM only
    assert response.error_code is ErrorCode.sasl_authentication_failed
    assert response.error_message == "Authentication failed: Invalid username or password"
    assert broker.peer.principal == "User:ANONYMOUS"
    assert broker.peer.sasl.is_failed


def test_a_listener_without_logins_offers_none(broker: Brokers) -> None:
    """Apache Kafka answers so on a plaintext port, and goes on."""
    response = handshake(broker, 1, "PLAIN")
    assert (response.error_code, response.mechanisms) == (ErrorCode.illegal_sasl_state, ())
    assert authenticate(broker, 2, b"\0ann\0secret").error_code is ErrorCode.illegal_sasl_state


# -- SCRAM credentials -------------------------------------------------------------------------------------------------

ALTER, DESCRIBE = Api.ALTER_USER_SCRAM_CREDENTIALS, Api.DESCRIBE_USER_SCRAM_CREDENTIALS


def upsertion(name: str, password: str = "new", mechanism: int = 1, iterations: int = 4096) -> Any:
    salt = b"salt of this user"
    salted = hashlib.pbkdf2_hmac("sha512" if mechanism == 2 else "sha256", password.encode(), salt, max(iterations, 1))
    fields = {"mechanism": mechanism, "iterations": iterations, "salt": salt, "salted_password": salted}
    return part_of(ALTER, 0, "ScramCredentialUpsertion", name=name, **fields)


def deletion(name: str, mechanism: int = 1) -> Any:
    return part_of(ALTER, 0, "ScramCredentialDeletion", name=name, mechanism=mechanism)


def alter(broker: Brokers, deletions: Any = (), upsertions: Any = (), principal: str = "User:admin") -> dict[str, Any]:
    request = request_of(ALTER, 0, deletions=tuple(deletions), upsertions=tuple(upsertions))
    response = broker.ask(ALTER, 0, request, principal=principal)
    return {each.user: each.error_code for each in response.results}


def described(broker: Brokers, *names: str, principal: str = "User:admin") -> Any:
    users = tuple(part_of(DESCRIBE, 0, "UserName", name=name) for name in names) or None
    return broker.ask(DESCRIBE, 0, request_of(DESCRIBE, 0, users=users), principal=principal)


@pytest.mark.parametrize(("mechanism", "number"), [("SCRAM-SHA-256", 1), ("SCRAM-SHA-512", 2)])
def test_a_credential_that_was_set_logs_in(broker: Brokers, mechanism: str, number: int) -> None:
    """The salted password of the request is enough; the user is listed with the iterations."""
    assert alter(broker, upsertions=[upsertion("eve", "new", number, 8192)]) == {"eve": ErrorCode.none}
    [result] = described(broker, "eve").results
    assert [(each.mechanism, each.iterations) for each in result.credential_infos] == [(number, 8192)]
    broker.peer.sasl = SaslExchange([mechanism], broker.credentials, now_ms=lambda: 0)
    handshake(broker, 1, mechanism)
    client = sasl_client(SecurityConfig(protocol="SASL_SSL", sasl_mechanism=mechanism, username="eve", password="new"))
    proof = client.next(authenticate(broker, 2, client.first()).auth_bytes)
    assert proof is not None
    assert client.next(authenticate(broker, 2, proof).auth_bytes) is None
    assert broker.peer.principal == "User:eve"


def test_what_cannot_be_altered_is_told_for_each_user(broker: Brokers) -> None:
    """Kafka's bounds and codes; the right ones among them are carried out."""
    codes = alter(
        broker,
        deletions=[deletion("nobody"), deletion("twice")],
        upsertions=[
            upsertion("few", iterations=4095),
            upsertion("many", iterations=16_385),
            upsertion("other", mechanism=3),
            upsertion("twice"),
            upsertion("right", iterations=16_384),
            upsertion(""),
        ],
    )
    assert codes == {
        "nobody": ErrorCode.resource_not_found,
        "twice": ErrorCode.duplicate_resource,
        "few": ErrorCode.unacceptable_credential,
        "many": ErrorCode.unacceptable_credential,
        "other": ErrorCode.unsupported_sasl_mechanism,
        "right": ErrorCode.none,
        "": ErrorCode.unacceptable_credential,
    }
    assert list(broker.credentials.scram_users()) == ["ann", "right"]


def test_a_deleted_credential_is_not_listed(broker: Brokers) -> None:
    """The user's other mechanism stays."""
    assert alter(broker, deletions=[deletion("ann", 1)]) == {"ann": ErrorCode.none}
    [result] = described(broker).results
    assert [each.mechanism for each in result.credential_infos] == [2]
    assert alter(broker, deletions=[deletion("ann", 1)]) == {"ann": ErrorCode.resource_not_found}


def test_users_that_cannot_be_described_are_told(broker: Brokers) -> None:
    """No names asks for all; an unknown one and one that is named twice have their own errors."""
    assert [each.user for each in described(broker).results] == ["ann"]
    results = {each.user: each for each in described(broker, "nobody", "ann", "nobody", "eve").results}
    assert results["ann"].error_code is ErrorCode.none
    assert results["nobody"].error_code is ErrorCode.duplicate_resource
    assert results["eve"].error_code is ErrorCode.resource_not_found


def test_credentials_belong_to_those_who_may_alter_the_cluster(broker: Brokers) -> None:
    """Others see no names and change nothing."""
    refused = ErrorCode.cluster_authorization_failed
    assert alter(broker, [deletion("ann")], [upsertion("eve")], "User:ann") == {"ann": refused, "eve": refused}
    response = described(broker, principal="User:ann")
    assert (response.error_code, response.results) == (refused, ())
    assert list(broker.credentials.scram_users()) == ["ann"]


def test_a_credential_that_could_not_be_stored_is_not_set(broker: Brokers) -> None:
    """A full disk is told, and the old password works on."""
    broker.meta.is_full = True
    before = broker.credentials.scram("ann", "SCRAM-SHA-256")
    assert alter(broker, upsertions=[upsertion("ann")]) == {"ann": ErrorCode.kafka_storage_error}
    assert broker.credentials.scram("ann", "SCRAM-SHA-256") is before
