"""One request about many named things (topics, groups, resources), each of which is answered with a code of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from semel.client.cluster import TRANSPORT_ERRORS, Cluster, CoordinatorKind
from semel.client.failures import failure
from semel.client.retry import Patience
from semel.errors import ConfigError, WireError
from semel.wire import Action, Api, ErrorCode, Refresh, Verdict, verdict

Item = TypeVar("Item", bound=Hashable)
Answer = TypeVar("Answer")


def flat_names(names: Iterable[str | Iterable[str]]) -> list[str]:
    """Names that came one by one or as a list.

    >>> flat_names(("a", ["b", "c"]))
    ['a', 'b', 'c']
    """
    flat: list[str] = []
    for given in names:
        for name in [given] if isinstance(given, str) or not isinstance(given, list | tuple | set) else given:
            if not isinstance(name, str):
                raise ConfigError(f"A name must be text, not {name!r}; nothing was asked of the broker.")
            flat.append(name)
    return flat


@dataclass(frozen=True, slots=True)
class Route:
    """How to find the broker that answers, and what to forget when it was the wrong one."""

    find_node: Callable[[], int | None]
    forget: Callable[[], None] = lambda: None


def any_broker() -> Route:
    return Route(lambda: None)


def broker(node: int) -> Route:
    return Route(lambda: node)


def coordinator(cluster: Cluster, kind: CoordinatorKind, key: str) -> Route:
    return Route(lambda: cluster.coordinator(kind, key), lambda: cluster.forget_coordinator(kind, key))


def controller(cluster: Cluster) -> Route:
    """The controller; brokers with KRaft name any of themselves and pass requests on."""

    def find() -> int | None:
        if cluster.controller not in cluster.nodes():
            cluster.list_topics()  # every answer to Metadata names the controller
        return cluster.controller if cluster.controller in cluster.nodes() else None

    def forget() -> None:
        cluster.controller = -1

    return Route(find, forget)


@dataclass(frozen=True, slots=True)
class ItemAnswer(Generic[Item, Answer]):
    """What the broker said about one item."""

    item: Item
    code: ErrorCode
    value: Answer
    message: str | None = None


def call_for_items(
    cluster: Cluster,
    route: Route,
    api: Api,
    items: Sequence[Item],
    make_fields: Callable[[Sequence[Item]], Mapping[str, Any]],
    read: Callable[[Any], Iterable[ItemAnswer[Item, Answer]]],
    *,
    what: Callable[[Item], str],
    done_already: ErrorCode | None = None,
    patience: Patience | None = None,
) -> dict[Item, Answer]:
    """Ask until every item is settled; those that are settled are not asked again.

    `done_already` is the code that tells, after an answer was lost, that the lost request had been carried out.
    """
    patience = patience or cluster.patience()
    answers: dict[Item, Answer] = {}
    is_repeated = False
    while len(answers) < len(items):
        asked = [item for item in items if item not in answers]
        judged: Verdict | None = None
        try:
            response = cluster.call(route.find_node(), api, **make_fields(asked))
        except TRANSPORT_ERRORS:
            if cluster.gives_up(patience):
                raise
            is_repeated = True
            route.forget()
            patience.pause()
            continue
        for answer in read(response):
            if answer.code == ErrorCode.none or (is_repeated and answer.code == done_already):
                answers[answer.item] = answer.value
                continue
            judged = verdict(answer.code, api)
            if judged.action is not Action.RETRIABLE or patience.is_spent:
                raise failure(answer.code, api, what(answer.item), answer.message)
            if judged.refresh is not Refresh.NOTHING:
                route.forget()
        if judged is not None:
            patience.pause(judged)
        elif unanswered := [item for item in asked if item not in answers]:
            raise WireError(f"A broker answered {api.name} without a word on {what(unanswered[0])}.")
    return answers


def on_every_broker(cluster: Cluster, call: Callable[[Route], Iterable[Answer]]) -> list[Answer]:
    """What each broker of the cluster says, one after another."""
    cluster.list_topics()  # the brokers of this moment
    return [answer for node in sorted(cluster.nodes()) for answer in call(broker(node))]
