"""Bindings and filters as the three ACL requests carry them, and the check that stands before all three."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kio.schema.errors import ErrorCode

from semel.broker.acls import (
    CLUSTER_NAME,
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from semel.broker.storage.failures import StorageError
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import RequestContext
    from semel.broker.state import Broker

_Number = TypeVar("_Number", bound=IntEnum)

STORE_FAILURES: Final = (OSError, StorageError)
NOT_WRITTEN: Final = "The change could not be written to disk, and nothing was changed."


def check_cluster(broker: Broker, context: RequestContext, operation: Operation) -> None:
    if not broker.authorizer.allows(context, operation, ResourceType.CLUSTER, CLUSTER_NAME):
        raise Refused(ErrorCode.cluster_authorization_failed, "Cluster authorization failed.")


def check_acls(broker: Broker, context: RequestContext, operation: Operation) -> None:
    """Raises when the requester may not do that to the cluster, or when no authorizer is configured."""
    check_cluster(broker, context, operation)
    if not broker.authorizer.is_configured:
        raise Refused(ErrorCode.security_disabled, "No Authorizer is configured on the broker")


def filter_of(request: Any) -> AclFilter:
    """The filter in a DescribeAcls request or in a part of a DeleteAcls request."""
    chosen = AclFilter(
        _known(ResourceType, request.resource_type_filter),
        request.resource_name_filter,
        _known(PatternType, request.pattern_type_filter),
        request.principal_filter,
        request.host_filter,
        _known(Operation, request.operation),
        _known(Permission, request.permission_type),
    )
    if 0 in (chosen.resource_type, chosen.pattern_type, chosen.operation, chosen.permission):
        raise Refused(ErrorCode.invalid_request, "The filter contains UNKNOWN elements")
    return chosen


def binding_of(creation: Any) -> AclBinding:
    """The binding in a part of a CreateAcls request, if it is one that can be kept."""
    binding = AclBinding(
        _known(ResourceType, creation.resource_type),
        creation.resource_name,
        _known(PatternType, creation.resource_pattern_type),
        creation.principal,
        creation.host,
        _known(Operation, creation.operation),
        _known(Permission, creation.permission_type),
    )
    if fault := _fault_of(binding):
        raise Refused(ErrorCode.invalid_request, fault)
    return binding


def _fault_of(binding: AclBinding) -> str | None:
    if binding.resource_type is ResourceType.CLUSTER and binding.name != CLUSTER_NAME:
        return f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}"
    if not binding.name:
        return "Invalid empty resource name"
    if binding.resource_type in (ResourceType.UNKNOWN, ResourceType.ANY):
        return f"Invalid resourceType {binding.resource_type.name}"
    if binding.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        return f"Invalid patternType {binding.pattern_type.name}"
    if binding.operation in (Operation.UNKNOWN, Operation.ANY):
        return f"Invalid operation {binding.operation.name}"
    if binding.permission not in (Permission.ALLOW, Permission.DENY):
        return f"Invalid permissionType {binding.permission.name}"
    if ":" not in binding.principal:
        return (
            f"Could not parse principal from `{binding.principal}` "
            "(no colon is present separating the principal type from the principal name)"
        )
    return None


def _known(numbers: type[_Number], code: int) -> _Number:
    """A number of a newer client's is UNKNOWN, which no binding and no filter may hold."""
    try:
        return numbers(code)
    except ValueError:
        return numbers(0)
