"""Clients as small state machines on requests: idempotent producers, and transactional ones of both protocols.

They behave as Kafka's clients do: the same batch again after a lost answer, an abort after an abortable error, a new
epoch where the fate of a batch is not known, and nothing said of a commit that was not confirmed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kio.schema.errors import ErrorCode

from semel.records.reference import Record, encode_batch
from semel.verify.simulated_network import Channel, Lost, Network, Peek
from semel.verify.simulation_ledger import Ledger, TopicPartition, Transaction
from semel.wire.api import Api
from semel.wire.server import SERVER_VERSIONS

DELIVERY_TIMEOUT_MS = 8_000
"""For so long a batch is tried again. It must be below the time after which an idle producer is forgotten."""
_REQUEST_TIMEOUT_MS = 900

TRY_AGAIN = frozenset(
    {
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
        ErrorCode.not_enough_replicas,
        ErrorCode.kafka_storage_error,
        ErrorCode.unknown_topic_or_partition,
    }
)
_BASED_ON_VERSION = {Api.PRODUCE: 12, Api.END_TXN: 5, Api.TXN_OFFSET_COMMIT: 5}


class Refusal(Exception):
    """The broker answered with an error that is not to be tried again."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class GivenUp(Exception):
    """For too long no answer came that could be acted on."""


class Surroundings(Protocol):
    """What a client sees of the world."""

    network: Network
    ledger: Ledger
    transaction_version: int
    fetch_bytes_max: int

    def elapsed_ms(self) -> float: ...

    def note(self, line: str) -> None: ...

    @property
    def is_healing(self) -> bool: ...


class Client:
    """Sends requests in versions of its own choice, over one connection at a time."""

    def __init__(self, world: Surroundings, name: str, seed: int) -> None:
        self.world = world
        self.name = name
        self.chance = random.Random(seed)
        self.speaks_protocol_2 = world.transaction_version >= 2 and self.chance.random() < 0.6
        self._versions: dict[Api, int] = {}
        self._channel: Channel | None = None

    async def run(self) -> None:
        raise NotImplementedError

    async def pause(self, ms: float) -> None:
        await asyncio.sleep(ms * (0.5 + self.chance.random()) / 1000)

    def version_of(self, api: Api, lowest: int = 0, highest: int = 99) -> int:
        if api not in self._versions:
            served = SERVER_VERSIONS[api]
            if api in _BASED_ON_VERSION:
                since = _BASED_ON_VERSION[api]
                lowest, highest = (since, highest) if self.speaks_protocol_2 else (lowest, since - 1)
            self._versions[api] = self.chance.randint(max(lowest, served.lowest), min(highest, served.highest))
        return self._versions[api]

    def post(
        self,
        api: Api,
        *,
        timeout_ms: float = _REQUEST_TIMEOUT_MS,
        peek: Peek | None = None,
        may_repeat: Callable[[], bool] = lambda: True,
        **fields: Any,
    ) -> Awaitable[Any]:
        """Send; the answer can be awaited. Raises Lost while no broker runs."""
        if self._channel is None or not self._channel.is_open:
            self._channel = self.world.network.open(self.name)
        return self._channel.post(
            api, self.version_of(api), fields, timeout_ms=timeout_ms, peek=peek, may_repeat=may_repeat
        )

    async def call(self, api: Api, **fields: Any) -> Any:
        return await self.post(api, **fields)

    async def insist(self, api: Api, code_of: Callable[[Any], ErrorCode], **fields: Any) -> Any:
        """Ask until there is an answer that is no passing error. Raises Refusal, or GivenUp after a while."""
        started_ms = self.world.elapsed_ms()
        while self.world.elapsed_ms() - started_ms < DELIVERY_TIMEOUT_MS:
            try:
                answer = await self.call(api, **fields)
            except Lost:
                await self.pause(20)
                continue
            code = code_of(answer)
            if code is ErrorCode.none:
                return answer
            if code not in TRY_AGAIN:
                raise Refusal(code)
            await self.pause(20)
        raise GivenUp

    def die(self) -> None:
        """The process is gone, its connection with it."""
        if self._channel is not None:
            self._channel.end()


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that keeps its sequence however often it is sent."""

    where: TopicPartition
    values: list[str]
    data: bytes
    is_acknowledged: bool = False


class Producer(Client):
    """What idempotent and transactional producers have in common: an identity and sequences."""

    transactional_id: str | None = None

    def __init__(self, world: Surroundings, name: str, seed: int) -> None:
        super().__init__(world, name, seed)
        self.identity: tuple[int, int] | None = None
        self._sequences: dict[TopicPartition, int] = {}

    def take_identity(self, producer_id: int, producer_epoch: int) -> None:
        if self.identity != (producer_id, producer_epoch):
            self.identity = (producer_id, producer_epoch)
            self._sequences = {}

    def new_batch(self, where: TopicPartition, values: Sequence[str]) -> Batch:
        assert self.identity is not None
        sequence = self._sequences.get(where, 0)
        self._sequences[where] = sequence + len(values)
        data = encode_batch(
            [Record(number, 1_700_000_000_000, None, value.encode()) for number, value in enumerate(values)],
            producer_id=self.identity[0],
            producer_epoch=self.identity[1],
            base_sequence=sequence,
            transactional=self.transactional_id is not None,
        )
        return Batch(where, list(values), data)

    async def deliver(self, batches: Sequence[Batch], on_acknowledged: Callable[[Batch], None]) -> None:
        """Send all, several in flight, and again what was not answered. Raises Refusal or GivenUp."""
        started_ms = self.world.elapsed_ms()
        pending = list(batches)
        while pending:
            if self.world.elapsed_ms() - started_ms > DELIVERY_TIMEOUT_MS:
                raise GivenUp
            refusal: ErrorCode | None = None
            for number, (batch, answer) in enumerate([(batch, self._send(batch)) for batch in pending]):
                code = await self._code_of(answer)
                if code in (ErrorCode.none, ErrorCode.duplicate_sequence_number):
                    batch.is_acknowledged = True
                    on_acknowledged(batch)
                elif code is ErrorCode.out_of_order_sequence_number and number > 0:
                    pass  # one before it was not taken; it goes with it the next time
                elif code is not None and code not in TRY_AGAIN:
                    refusal = refusal or code
            if refusal is not None:
                raise Refusal(refusal)
            pending = [batch for batch in pending if not batch.is_acknowledged]
            if pending:
                await self.pause(20)

    def _send(self, batch: Batch) -> Awaitable[Any] | None:
        topic, index = batch.where
        try:
            return self.post(
                Api.PRODUCE,
                transactional_id=self.transactional_id,
                acks=-1,
                timeout=1000,
                topic_data=[{"name": topic, "partition_data": [{"index": index, "records": batch.data}]}],
            )
        except Lost:
            return None

    async def _code_of(self, answer: Awaitable[Any] | None) -> ErrorCode | None:
        if answer is None:
            return None
        try:
            response = await answer
        except Lost:
            return None
        return response.responses[0].partition_responses[0].error_code


class IdempotentProducer(Producer):
    """Writes outside transactions. A batch it could not get through is left, and it goes on under a new id."""

    def __init__(
        self, world: Surroundings, name: str, seed: int, partitions: Sequence[TopicPartition], rounds: int
    ) -> None:
        super().__init__(world, name, seed)
        self._partitions = partitions
        self._rounds = rounds

    async def run(self) -> None:
        for number in range(self._rounds):
            await self.pause(300)
            try:
                if self.identity is None:
                    answer = await self.insist(
                        Api.INIT_PRODUCER_ID,
                        lambda answer: answer.error_code,
                        transactional_id=None,
                        transaction_timeout=1000,
                    )
                    self.take_identity(answer.producer_id, answer.producer_epoch)
                where = self.chance.choice(self._partitions)
                batches = [
                    self.new_batch(where, [f"{self.name}/{number}.{part}.{place}" for place in range(1 + part)])
                    for part in range(self.chance.randint(1, 3))
                ]
                await self.deliver(batches, self._acknowledged)
            except (Refusal, GivenUp) as failure:
                self.world.note(f"{self.name} gives up: {failure!r}")
                self.identity = None

    def _acknowledged(self, batch: Batch) -> None:
        self.world.ledger.plain.update(dict.fromkeys(batch.values, batch.where))


class TransactionalProducer(Producer):
    """Writes transactions under an id that others may use as well. Each life of it has a name of its own."""

    def __init__(
        self,
        world: Surroundings,
        name: str,
        seed: int,
        transactional_id: str,
        partitions: Sequence[TopicPartition],
        rounds: int,
    ) -> None:
        super().__init__(world, name, seed)
        self.transactional_id = transactional_id
        self._partitions = partitions
        self._rounds = rounds
        self._raises_epoch = not self.speaks_protocol_2 and self.chance.random() < 0.5
        self._timeout_ms = self.chance.choice((1500, 4000, 60_000))
        self._lives = self._transactions = self._ended = 0
        self.version_of(Api.INIT_PRODUCER_ID, lowest=3 if self._raises_epoch else 0)

    async def run(self) -> None:
        for _ in range(self._rounds):
            await self.pause(250)
            try:
                await self.ensure_identity()
                await self.transact(self._write)
            except (Refusal, GivenUp) as failure:
                self.world.note(f"{self.name} begins anew: {failure!r}")
                self.identity = None

    async def _write(self, transaction: Transaction) -> None:
        count = self.chance.randint(1, min(3, len(self._partitions)))
        wheres = self.chance.sample(self._partitions, count)
        await self.add_partitions(wheres)
        batches: list[Batch] = []
        for where in wheres:
            for _ in range(self.chance.randint(1, 2)):
                first = sum(len(batch.values) for batch in batches)
                values = [f"{transaction.key}/{first + number}" for number in range(self.chance.randint(1, 3))]
                batches.append(self.new_batch(where, values))
        await self.write(transaction, batches)

    # The steps of a transaction.

    async def ensure_identity(self) -> None:
        """Own an epoch: a new life has none; without protocol 2 a careful client takes a new one each time."""
        if self.identity is None:
            self._lives += 1
            await self._init(-1, -1)
        elif self._raises_epoch:
            await self._init(*self.identity)

    async def _init(self, producer_id: int, producer_epoch: int) -> None:
        answer = await self.insist(
            Api.INIT_PRODUCER_ID,
            lambda answer: answer.error_code,
            transactional_id=self.transactional_id,
            transaction_timeout=self._timeout_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
        )
        self._take(answer)

    def _take(self, answer: Any) -> None:
        assert self.transactional_id is not None
        owner = f"{self.name} life {self._lives}"
        self.world.ledger.claim_identity(self.transactional_id, answer.producer_id, answer.producer_epoch, owner)
        self.take_identity(answer.producer_id, answer.producer_epoch)

    async def transact(self, work: Callable[[Transaction], Awaitable[None]]) -> bool:
        """One transaction around `work`; returns whether it is known to be committed."""
        self._transactions += 1
        transaction = self.world.ledger.begin(f"{self.name}.{self._transactions}")
        is_certain = True
        try:
            await work(transaction)
            committed = self.chance.random() < 0.8
        except (Refusal, GivenUp) as failure:
            self.world.note(f"{transaction.key} is to be aborted: {failure!r}")
            committed = is_certain = False
        if self.chance.random() < (0 if self.world.is_healing else 0.06):
            self.world.note(f"{self.name} dies in {transaction.key}")
            self.die()
            self.identity = None
            await self.pause(1000)
            return False
        await self._end(transaction, committed)
        if not is_certain and not self.speaks_protocol_2:
            self.identity = None  # which sequence comes next is not known; a new epoch begins at 0
        return committed and transaction.answered == "commit"

    def _may_repeat(self, *, at_its_end: bool = False) -> Callable[[], bool]:
        """Without a new epoch for each transaction, protocol 1 cannot tell a late request of the last one.

        Only the end itself may come once more before the next begins: it changes nothing then.
        """
        number = self._transactions
        return lambda: (
            self._raises_epoch
            or self.speaks_protocol_2
            or (number == self._transactions and (at_its_end or self._ended < number))
        )

    def _mine(self) -> dict[str, Any]:
        assert self.identity is not None
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.identity[0],
            "producer_epoch": self.identity[1],
            "may_repeat": self._may_repeat(),
        }

    async def add_partitions(self, wheres: Sequence[TopicPartition]) -> None:
        if self.speaks_protocol_2:
            return
        mine = self._mine()
        topics: dict[str, list[int]] = {}
        for topic, index in wheres:
            topics.setdefault(topic, []).append(index)
        await self.insist(
            Api.ADD_PARTITIONS_TO_TXN,
            lambda answer: _first_error(
                one.partition_error_code
                for topic in answer.results_by_topic_v3_and_below
                for one in topic.results_by_partition
            ),
            v3_and_below_transactional_id=mine["transactional_id"],
            v3_and_below_producer_id=mine["producer_id"],
            v3_and_below_producer_epoch=mine["producer_epoch"],
            v3_and_below_topics=[{"name": topic, "partitions": indexes} for topic, indexes in topics.items()],
            may_repeat=mine["may_repeat"],
        )

    async def write(self, transaction: Transaction, batches: Sequence[Batch]) -> None:
        def acknowledged(batch: Batch) -> None:
            transaction.acknowledged.update(dict.fromkeys(batch.values, batch.where))

        await self.deliver(batches, acknowledged)

    async def commit_offsets(
        self,
        transaction: Transaction,
        group_id: str,
        offsets: dict[TopicPartition, int],
        **member: Any,
    ) -> None:
        """Put a group's positions into the transaction, under the transaction's name."""
        if not self.speaks_protocol_2:
            await self.insist(
                Api.ADD_OFFSETS_TO_TXN, lambda answer: answer.error_code, group_id=group_id, **self._mine()
            )
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), offset in offsets.items():
            topics.setdefault(topic, []).append(
                {"partition_index": index, "committed_offset": offset, "committed_metadata": transaction.key}
            )
        await self.insist(
            Api.TXN_OFFSET_COMMIT,
            lambda answer: _first_error(one.error_code for topic in answer.topics for one in topic.partitions),
            group_id=group_id,
            topics=[{"name": topic, "partitions": partitions} for topic, partitions in topics.items()],
            **member,
            **self._mine(),
        )
        transaction.offsets.update({(group_id, where): offset for where, offset in offsets.items()})

    async def _end(self, transaction: Transaction, committed: bool) -> None:
        transaction.is_commit_requested |= committed
        mine = {**self._mine(), "may_repeat": self._may_repeat(at_its_end=True)}
        answer = await self.insist(Api.END_TXN, lambda answer: answer.error_code, committed=committed, **mine)
        self._ended = self._transactions
        self.world.note(f"{transaction.key} {'committed' if committed else 'aborted'}")
        self.world.ledger.answer(transaction, "commit" if committed else "abort")
        if self.speaks_protocol_2:
            self._take(answer)


def _first_error(codes: Any) -> ErrorCode:
    return next((code for code in codes if code is not ErrorCode.none), ErrorCode.none)
