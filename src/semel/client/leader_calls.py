"""One request about many partitions, cut up by leader, sent to all of them at once and repeated where it has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from semel.client.cluster import TRANSPORT_ERRORS, Cluster
from semel.client.failures import failure
from semel.client.partitions import TopicPartition
from semel.client.retry import Patience
from semel.errors import SemelError, WireError
from semel.wire import Action, Api, ErrorCode, Refresh, Verdict, verdict

Question = TypeVar("Question")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class PartitionAnswer(Generic[Answer]):
    """What a leader said about one partition."""

    partition: TopicPartition
    code: ErrorCode
    value: Answer
    message: str | None = None


def call_leaders(
    cluster: Cluster,
    api: Api,
    questions: Mapping[TopicPartition, Question],
    make_fields: Callable[[Mapping[TopicPartition, Question]], Mapping[str, Any]],
    read: Callable[[Any], Iterable[PartitionAnswer[Answer]]],
    *,
    patience: Patience | None = None,
) -> dict[TopicPartition, Answer]:
    """Ask each partition's leader; only for requests that may be repeated.

    `make_fields` writes the request for the partitions of one leader, and `read` takes its response apart. Partitions
    whose leader moved or is being elected are asked again, the others are not.
    """
    patience = patience or cluster.patience()
    answers: dict[TopicPartition, Answer] = {}
    while len(answers) < len(questions):
        open_questions = {asked: question for asked, question in questions.items() if asked not in answers}
        round_ = _ask_once(cluster, api, open_questions, make_fields, read)
        answers.update(round_.answers)
        if round_.refused:
            partition, code, message = round_.refused
            judged = verdict(code, api)
            if judged.action is not Action.RETRIABLE or patience.is_spent:
                raise failure(code, api, describe(partition), message)
            patience.pause(judged)
        elif round_.lost is not None:
            if cluster.gives_up(patience):
                raise round_.lost
            patience.pause()
        elif not round_.answers:
            raise WireError(f"A broker answered {api.name} without a word on {describe(next(iter(open_questions)))}.")
    return answers


def describe(partition: TopicPartition) -> str:
    return f"topic {partition.topic!r} partition {partition.partition}"


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """
    >>> by_topic([TopicPartition("a", 0), TopicPartition("b", 1), TopicPartition("a", 2)])
    {'a': [0, 2], 'b': [1]}
    """
    grouped: dict[str, list[int]] = {}
    for topic, partition in partitions:
        grouped.setdefault(topic, []).append(partition)
    return grouped


class _Round(Generic[Answer]):
    """What came back from one pass over the leaders. Of several refusals the one that cannot be cured counts."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.answers: dict[TopicPartition, Answer] = {}
        self.refused: tuple[TopicPartition, ErrorCode, str | None] | None = None
        self.lost: SemelError | None = None

    def refuse(self, partition: TopicPartition, code: ErrorCode, message: str | None = None) -> Verdict:
        judged = verdict(code, self._api)
        if self.refused is None or judged.action is not Action.RETRIABLE:
            self.refused = (partition, code, message)
        return judged


def _ask_once(
    cluster: Cluster,
    api: Api,
    questions: Mapping[TopicPartition, Question],
    make_fields: Callable[[Mapping[TopicPartition, Question]], Mapping[str, Any]],
    read: Callable[[Any], Iterable[PartitionAnswer[Answer]]],
) -> _Round[Answer]:
    round_ = _Round[Answer](api)
    by_node: dict[int, dict[TopicPartition, Question]] = {}
    for partition, question in questions.items():
        by_node.setdefault(cluster.leader(*partition).node, {})[partition] = question
    for partition in by_node.pop(-1, {}):
        round_.refuse(partition, ErrorCode.leader_not_available)
        cluster.forget_leaders([partition.topic])
    under_way = []
    for node, asked in by_node.items():
        try:
            under_way.append((asked, cluster.submit(node, api, **make_fields(asked))))
        except TRANSPORT_ERRORS as error:
            round_.lost = error
            cluster.forget_leaders({partition.topic for partition in asked})
    for asked, pending in under_way:
        cluster.wait_any([pending])
        try:
            response = pending.result()
        except TRANSPORT_ERRORS as error:
            round_.lost = error
            cluster.forget_leaders({partition.topic for partition in asked})
            continue
        for answer in read(response):
            if answer.code == ErrorCode.none:
                round_.answers[answer.partition] = answer.value
            elif round_.refuse(answer.partition, answer.code, answer.message).refresh is Refresh.LEADER:
                cluster.forget_leaders([answer.partition.topic])
    return round_
