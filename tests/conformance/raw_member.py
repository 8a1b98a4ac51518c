"""A member of a classic group that sends exactly what a test tells it to, over a connection of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raw import RawClient, settled
from raw_producer import GROUP, Where, common_code, find_coordinator, offsets_by_topic

from semel.wire import Api, ErrorCode

NO_GENERATION = -1


@dataclass
class RawMember:
    raw: RawClient
    group: str
    age: str = "newest"
    group_instance_id: str | None = None
    member_id: str = ""
    generation_id: int = NO_GENERATION
    leader_id: str = ""
    session_timeout_ms: int = 10_000
    protocol_type: str = "consumer"
    protocol_names: tuple[str, ...] = ("range",)

    def send_join(self, *, version: int | None = None) -> None:
        """Ask to join without waiting for the others; `joined` gives the answer."""
        self.raw.send(
            Api.JOIN_GROUP,
            self.raw.version(Api.JOIN_GROUP, self.age) if version is None else version,
            group_id=self.group,
            session_timeout=self.session_timeout_ms,
            rebalance_timeout=10_000,
            member_id=self.member_id,
            group_instance_id=self.group_instance_id,
            protocol_type=self.protocol_type,
            protocols=[{"name": name, "metadata": name.encode()} for name in self.protocol_names],
            reason="",
        )

    def joined(self) -> Any:
        answer = self.raw.receive()
        if answer.error_code is ErrorCode.none:
            self.member_id, self.generation_id, self.leader_id = answer.member_id, answer.generation_id, answer.leader
        return answer

    def try_join(self, *, version: int | None = None) -> Any:
        """One JoinGroup and its answer, once the coordinator is there."""
        find_coordinator(self.raw, GROUP, self.group)

        def ask() -> Any:
            self.send_join(version=version)
            return self.joined()

        return settled(ask)

    def join(self) -> Any:
        """As a client joins: with the member id that it is told to use first (KIP-394)."""
        answer = self.try_join()
        if answer.error_code is ErrorCode.member_id_required:
            self.member_id = answer.member_id
            answer = self.try_join()
        assert answer.error_code is ErrorCode.none, answer
        return answer

    def prepare(self) -> None:
        """Get a member id where one is needed, so that the next JoinGroup takes part in the rebalance."""
        if self.raw.version(Api.JOIN_GROUP, self.age) >= 4 and self.group_instance_id is None:
            answer = self.try_join()
            assert answer.error_code is ErrorCode.member_id_required, answer
            self.member_id = answer.member_id

    def sync(self, assignments: Mapping[str, bytes] | None = None) -> Any:
        return self.raw.call(
            Api.SYNC_GROUP,
            self.raw.version(Api.SYNC_GROUP, self.age),
            group_id=self.group,
            generation_id=self.generation_id,
            member_id=self.member_id,
            group_instance_id=self.group_instance_id,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol_names[0],
            assignments=[{"member_id": name, "assignment": data} for name, data in (assignments or {}).items()],
        )

    def join_alone(self) -> RawMember:
        """Be the only member, and its leader, in a stable group."""
        self.join()
        assert self.sync({self.member_id: b"all"}).error_code is ErrorCode.none
        return self

    def heartbeat(self) -> ErrorCode:
        return self.raw.call(
            Api.HEARTBEAT,
            self.raw.version(Api.HEARTBEAT, self.age),
            group_id=self.group,
            generation_id=self.generation_id,
            member_id=self.member_id,
            group_instance_id=self.group_instance_id,
        ).error_code

    def leave(self) -> ErrorCode:
        version = self.raw.version(Api.LEAVE_GROUP, self.age)
        who = {"member_id": self.member_id, "group_instance_id": self.group_instance_id, "reason": "done"}
        answer = self.raw.call(Api.LEAVE_GROUP, version, group_id=self.group, member_id=self.member_id, members=[who])
        return answer.members[0].error_code if version >= 3 else answer.error_code

    def commit(self, offsets: Mapping[Where, int], *, version: int | None = None) -> ErrorCode:
        """OffsetCommit; one code for all partitions."""
        find_coordinator(self.raw, GROUP, self.group)

        def ask() -> ErrorCode:
            return common_code(
                self.raw.call(
                    Api.OFFSET_COMMIT,
                    self.raw.version(Api.OFFSET_COMMIT, self.age) if version is None else version,
                    group_id=self.group,
                    generation_id_or_member_epoch=self.generation_id,
                    member_id=self.member_id,
                    group_instance_id=self.group_instance_id,
                    retention_time=-1,
                    topics=offsets_by_topic(offsets),
                )
            )

        return settled(ask, lambda code: code)

    @property
    def fields(self) -> dict[str, Any]:
        """Who it is, for TxnOffsetCommit."""
        return {
            "member_id": self.member_id,
            "generation_id": self.generation_id,
            "group_instance_id": self.group_instance_id,
        }
