"""Classic groups: JoinGroup, SyncGroup, Heartbeat, LeaveGroup and the passing of time, each as one pure decision.

A decision takes the group's value (None: there is no such group) and returns its next one, with the records to log
first and the waiting requests to answer then. The steps of a rebalance are in `classic_rebalance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kio.schema.errors import ErrorCode

from semel.core.classic_rebalance import Draft
from semel.core.classic_state import (
    ClassicGroup,
    GroupDecision,
    GroupSettings,
    GroupState,
    JoinReply,
    JoinRequest,
    MemberIdentity,
    SyncRequest,
    metadata_record,
)
from semel.core.refusal import Refused


def decide_join(
    group: ClassicGroup | None, request: JoinRequest, settings: GroupSettings, now_ms: int
) -> GroupDecision:
    """JoinGroup. The reply may come with this decision or with a later one.

    >>> from semel.core.classic_state import MemberProtocol
    >>> request = JoinRequest("g", 1, "", "m-1", "consumer", (MemberProtocol("range", b""),), 10_000, 60_000)
    >>> decision = decide_join(None, request, GroupSettings(), now_ms=0)
    >>> decision.group.state.value, decision.replies[0][1].leader_id
    ('CompletingRebalance', 'm-1')
    """
    _check_group_id(request.group_id)
    if not settings.min_session_timeout_ms <= request.session_timeout_ms <= settings.max_session_timeout_ms:
        raise Refused(
            ErrorCode.invalid_session_timeout,
            f"the session time-out of {request.session_timeout_ms} ms is not between "
            f"{settings.min_session_timeout_ms} and {settings.max_session_timeout_ms}",
        )
    if group is None and request.member_id:
        raise Refused(ErrorCode.unknown_member_id, f"there is no group {request.group_id!r}")
    draft = Draft(ClassicGroup(request.group_id) if group is None else group, settings, now_ms)
    if not _has_room_for(draft.group, request.member_id, settings):
        draft.remove_member(request.member_id)
        draft.replies.append((request.request_id, JoinReply("", ErrorCode.group_max_size_reached)))
        if draft.group.state is GroupState.PREPARING_REBALANCE:
            draft.rebalance_or_complete_join()
    elif not _supports_protocols(draft.group, request):
        raise Refused(
            ErrorCode.inconsistent_group_protocol, "no protocol of the new member is known to all other members"
        )
    elif request.member_id:
        _join_known_member(draft, request)
    else:
        _join_new_member(draft, request)
    if group is None and not draft.records:
        draft.records.append(metadata_record(ClassicGroup(request.group_id)))
    return draft.decision()


def _join_new_member(draft: Draft, request: JoinRequest) -> None:
    instance_id = request.group_instance_id
    old_member_id = None if instance_id is None else draft.group.static_member_id(instance_id)
    if old_member_id is not None:
        _rejoin_static_member(draft, request, old_member_id)
    elif instance_id is None and request.requires_known_member_id:
        # A member that never comes back, because its first answer was lost, would hold up a rebalance (KIP-394).
        draft.refuse_too_many_pending()
        draft.remember_pending(request.new_member_id, request.session_timeout_ms)
        reply = JoinReply(request.new_member_id, ErrorCode.member_id_required)
        draft.replies.append((request.request_id, reply))
    else:
        draft.add_member(request, request.new_member_id)
        draft.rebalance_or_complete_join()


def _rejoin_static_member(draft: Draft, request: JoinRequest, old_member_id: str) -> None:
    old_leader_id = draft.group.leader_id
    draft.replace_static_member(old_member_id, request)
    group = draft.group
    if group.state is GroupState.STABLE and draft.select_protocol() == group.protocol_name:
        reply = draft.join_reply(request.new_member_id)
        if request.supports_skipping_assignment:
            reply = replace(reply, skip_assignment=request.new_member_id == group.leader_id)
        else:
            # An older client that learns it is the leader would make a new assignment, which nobody else fetches.
            reply = replace(reply, leader_id=old_leader_id or "", members=())
        draft.answer_static_member(request.new_member_id, reply)
    else:
        # Before the assignment, the leader may already assign to the old member id: that generation cannot be used.
        draft.rebalance_or_complete_join()


def _join_known_member(draft: Draft, request: JoinRequest) -> None:
    group, member_id = draft.group, request.member_id
    if member_id in group.pending_members and request.group_instance_id is None:
        draft.add_member(request, member_id)
        draft.rebalance_or_complete_join()
        return
    _check_member(group, member_id, request.group_instance_id)
    is_unchanged = group.members[member_id].protocols == request.protocols
    # The leader's wish for a rebalance counts without a changed subscription: it has seen new partitions.
    is_leaders_wish = group.state is GroupState.STABLE and member_id == group.leader_id
    if group.state is not GroupState.PREPARING_REBALANCE and is_unchanged and not is_leaders_wish:
        # Its answer was lost; the generation it asks for is the current one.
        draft.replies.append((request.request_id, draft.join_reply(member_id)))
        return
    draft.update_member(member_id, request)
    draft.rebalance_or_complete_join()


def decide_sync(
    group: ClassicGroup | None, request: SyncRequest, settings: GroupSettings, now_ms: int
) -> GroupDecision:
    """SyncGroup. The leader's brings the assignment, which is logged before anybody is told."""
    _check_group_id(request.group_id)
    group = _existing(group, request.group_id)
    _check_member(group, request.member_id, request.group_instance_id)
    _check_generation(group, request.generation_id)
    for asked, actual in (
        (request.protocol_type, group.protocol_type),
        (request.protocol_name, group.protocol_name),
    ):
        if asked is not None and actual is not None and asked != actual:
            raise Refused(ErrorCode.inconsistent_group_protocol, f"the group uses {actual!r}, not {asked!r}")
    if group.state is GroupState.PREPARING_REBALANCE:
        raise Refused(ErrorCode.rebalance_in_progress, "the group's members are joining again")
    draft = Draft(group, settings, now_ms)
    if group.state is GroupState.STABLE:
        draft.mark_synced(request.member_id)
        draft.replies.append((request.request_id, draft.sync_reply(request.member_id)))
    else:
        draft.wait_for_assignment(request.member_id, request.request_id)
        if request.member_id == group.leader_id:
            draft.assign(dict(request.assignments))
    return draft.decision()


def decide_heartbeat(
    group: ClassicGroup | None,
    group_id: str,
    *,
    member_id: str,
    generation_id: int,
    group_instance_id: str | None,
    settings: GroupSettings,
    now_ms: int,
) -> GroupDecision:
    """Heartbeat. The session is kept also while the member is told, by the decision's `code`, to join again."""
    _check_group_id(group_id)
    group = _existing(group, group_id)
    _check_member(group, member_id, group_instance_id)
    _check_generation(group, generation_id)
    draft = Draft(group, settings, now_ms)
    draft.keep_session(member_id)
    is_rebalancing = group.state is GroupState.PREPARING_REBALANCE
    return draft.decision(code=ErrorCode.rebalance_in_progress if is_rebalancing else ErrorCode.none)


def decide_leave(
    group: ClassicGroup | None,
    group_id: str,
    members: Sequence[MemberIdentity],
    settings: GroupSettings,
    now_ms: int,
) -> GroupDecision:
    """LeaveGroup. Some members may be refused while others leave: `left` has a code for each."""
    _check_group_id(group_id)
    draft = Draft(_existing(group, group_id), settings, now_ms)
    left = tuple(_leave(draft, identity) for identity in members)
    has_members = draft.group.state is not GroupState.EMPTY
    if ErrorCode.none in left and has_members:
        draft.rebalance_or_complete_join()
    return draft.decision(left=left)


def _leave(draft: Draft, identity: MemberIdentity) -> ErrorCode:
    group, member_id = draft.group, identity.member_id
    try:
        if not member_id and identity.group_instance_id is not None:
            member_id = group.static_member_id(identity.group_instance_id) or ""
        if member_id not in group.pending_members:
            _check_member(group, member_id, identity.group_instance_id)
    except Refused as refused:
        return refused.code
    draft.remove_member(member_id)
    return ErrorCode.none


def decide_tick(group: ClassicGroup, settings: GroupSettings, now_ms: int) -> GroupDecision:
    """What is due by now: sessions that are over, members that never came back, the end of a join or sync phase."""
    draft = Draft(group, settings, now_ms)
    for member_id, deadline_ms in group.pending_members.items():
        if deadline_ms <= now_ms:
            draft.remove_member(member_id)
            draft.complete_join_if_all_joined()
    for member_id in group.members:
        # Looked up anew: the removal of another may have begun a rebalance, or ended one, for this member as well.
        member = draft.group.members.get(member_id)
        if member is not None and member.can_expire and member.session_deadline_ms <= now_ms:
            draft.remove_member(member_id)
            _after_expiry(draft)
    join_deadline_ms = draft.group.join_deadline_ms
    if join_deadline_ms is not None and join_deadline_ms <= now_ms:
        draft.end_of_join_delay()
    sync_deadline_ms = draft.group.sync_deadline_ms
    if sync_deadline_ms is not None and sync_deadline_ms <= now_ms:
        for member_id in tuple(draft.group.pending_sync):
            draft.remove_member(member_id)
        draft.prepare_rebalance()
    return draft.decision()


def _after_expiry(draft: Draft) -> None:
    if draft.group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
        draft.prepare_rebalance()
    else:
        draft.complete_join_if_all_joined()


def decide_loaded(group: ClassicGroup, settings: GroupSettings, now_ms: int) -> GroupDecision:
    """After a restart: a group that has more members than are allowed now must rebalance, which removes some."""
    draft = Draft(group, settings, now_ms)
    if len(group.members) > settings.max_size:
        draft.prepare_rebalance()
    return draft.decision()


def check_offset_commit(
    group: ClassicGroup,
    *,
    member_id: str,
    generation_id: int,
    group_instance_id: str | None,
    is_transactional: bool,
) -> None:
    """Whether this member may commit offsets now; raises `Refused`. This is where KIP-447 fences a zombie's offsets."""
    if generation_id < 0 and group.state is GroupState.EMPTY:
        return  # An administrator, or a consumer that assigns its partitions itself.
    if generation_id >= 0 or member_id or group_instance_id is not None:
        _check_member(group, member_id, group_instance_id)
        _check_generation(group, generation_id)
    elif not is_transactional:
        raise Refused(ErrorCode.unknown_member_id, "the group has members, and the commit names none of them")
    # A transaction may be committed while the group rebalances: the generation above is what fences it.
    if not is_transactional and group.state is GroupState.COMPLETING_REBALANCE:
        raise Refused(ErrorCode.rebalance_in_progress, "the group waits for its leader's assignment")


def with_session_kept(group: ClassicGroup, member_id: str, now_ms: int) -> ClassicGroup:
    """A commit of offsets is a sign of life as good as a heartbeat."""
    member = group.members.get(member_id)
    if member is None:
        return group
    kept = replace(member, session_deadline_ms=now_ms + member.session_timeout_ms)
    return replace(group, members={**group.members, member_id: kept})


def _has_room_for(group: ClassicGroup, member_id: str, settings: GroupSettings) -> bool:
    member = group.members.get(member_id)
    if group.state is GroupState.EMPTY:
        return True
    if group.state is GroupState.PREPARING_REBALANCE:
        # Who joins again first stays: the group may be over its limit, when that was lowered.
        waiting = sum(other.join_request_id is not None for other in group.members.values())
        return (member is not None and member.join_request_id is not None) or waiting < settings.max_size
    return member is not None or len(group.members) < settings.max_size


def _supports_protocols(group: ClassicGroup, request: JoinRequest) -> bool:
    if not request.protocol_type or not request.protocols:
        return False
    if group.state is GroupState.EMPTY:
        return True
    return request.protocol_type == group.protocol_type and any(
        group.is_known_to_all(protocol.name) for protocol in request.protocols
    )


def _existing(group: ClassicGroup | None, group_id: str) -> ClassicGroup:
    if group is None:
        raise Refused(ErrorCode.unknown_member_id, f"there is no group {group_id!r}")
    return group


def _check_group_id(group_id: str) -> None:
    if not group_id:
        raise Refused(ErrorCode.invalid_group_id, "the group id is empty")


def _check_member(group: ClassicGroup, member_id: str, group_instance_id: str | None) -> None:
    if group_instance_id is not None:
        holder = group.static_member_id(group_instance_id)
        if holder is not None and holder != member_id:
            raise Refused(
                ErrorCode.fenced_instance_id, f"group.instance.id {group_instance_id!r} belongs to a newer member"
            )
        if holder is None:
            raise Refused(ErrorCode.unknown_member_id, f"no member has the group.instance.id {group_instance_id!r}")
    if member_id not in group.members:
        raise Refused(ErrorCode.unknown_member_id, f"{member_id!r} is not a member of the group")


def _check_generation(group: ClassicGroup, generation_id: int) -> None:
    if generation_id != group.generation_id:
        raise Refused(
            ErrorCode.illegal_generation, f"generation {generation_id} is not the current one, {group.generation_id}"
        )
