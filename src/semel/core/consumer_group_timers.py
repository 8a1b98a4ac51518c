"""The timers of KIP-848 members: who was last heard when, and who must have given up partitions by when.

They live in memory only: after a restart all of them start afresh, so nobody is thrown out for the broker's own pause.
"""

from __future__ import annotations

MemberKey = tuple[str, str]


class MemberTimers:
    """Session and rebalance timers of all members of all groups.

    The session time-out is one for all and the clock never runs backwards, so the members in the order in which they
    were last heard are in the order of their deadlines: the first one is the next to expire.
    """

    def __init__(self) -> None:
        self._heard_ms: dict[MemberKey, int] = {}
        self._revoke_by_ms: dict[MemberKey, int] = {}

    def hear(self, member: MemberKey, now_ms: int) -> None:
        """Restart the session timer."""
        self._heard_ms.pop(member, None)
        self._heard_ms[member] = now_ms

    def await_revocation(self, member: MemberKey, deadline_ms: int) -> None:
        """Start the rebalance timer, unless it runs."""
        self._revoke_by_ms.setdefault(member, deadline_ms)

    def end_revocation(self, member: MemberKey) -> None:
        """The member gave up its partitions, or was told to give up others: a running rebalance timer ends."""
        self._revoke_by_ms.pop(member, None)

    def forget(self, member: MemberKey) -> None:
        """The member is gone."""
        self._heard_ms.pop(member, None)
        self._revoke_by_ms.pop(member, None)

    def next_deadline_ms(self, session_timeout_ms: int) -> int | None:
        """When the next timer runs out, or None if none runs."""
        deadlines = list(self._revoke_by_ms.values())
        for heard_ms in self._heard_ms.values():
            deadlines.append(heard_ms + session_timeout_ms)
            break
        return min(deadlines, default=None)

    def expired(self, now_ms: int, session_timeout_ms: int) -> list[MemberKey]:
        """Members whose session ended or that kept partitions for too long, each once."""
        late = {member: None for member, deadline_ms in self._revoke_by_ms.items() if deadline_ms <= now_ms}
        for member, heard_ms in self._heard_ms.items():
            if heard_ms + session_timeout_ms > now_ms:
                break
            late[member] = None
        return list(late)
