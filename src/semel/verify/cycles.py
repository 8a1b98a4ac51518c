"""Transactions that depend on each other in a circle: G0 by writes alone, G1c by what they took from each other."""

from __future__ import annotations

from collections import deque

import numpy as np

from semel.verify.cases import Case, Found, Words, found
from semel.verify.evidence import Evidence
from semel.verify.evidence_of_writes import Fate
from semel.verify.record_keys import Array

G0_IS_TOLERATED = (
    "Kafka's transactions do not isolate writes from each other: the records of two that are open at the same time may "
    "lie in one order in one partition and in another order elsewhere, and no reader is promised more."
)


def g0(evidence: Evidence) -> Found:
    """Committed transactions in a circle, each of which wrote to some partition before the next one did. Each group of
    transactions that are in circles with each other counts once.
    """
    log, transactions = evidence.log, evidence.transactions
    edges: list[Array] = []
    for partition in range(len(log.starts) - 1):
        slot = log.slot[log.starts[partition] : log.starts[partition + 1]]
        slot = slot[slot >= 0]
        slot = slot[transactions.is_committed[slot]]
        # A transaction that wrote before another wrote before all behind that one too, so neighbours will do.
        changes = np.flatnonzero(slot[1:] != slot[:-1])
        edges.append(slot[changes].astype(np.int64) << 32 | slot[changes + 1])
    return _circles(evidence, edges, "wrote before")


def g1c(evidence: Evidence) -> Found:
    """Committed transactions in a circle, each of which took as input what the one before it wrote.

    Who wrote before whom is left out: on Kafka it does not say which transaction came first (see G0).
    """
    transactions = evidence.transactions
    consumer, _, writer = evidence.consumed
    both = (writer >= 0) & (writer != consumer) & transactions.is_committed[consumer]
    both[both] &= transactions.is_committed[writer[both]] & (transactions.fate[writer[both]] != Fate.PLAIN)
    return _circles(evidence, [writer[both].astype(np.int64) << 32 | consumer[both]], "wrote what was taken by")


def _circles(evidence: Evidence, packed: list[Array], verb: str) -> Found:
    edges = np.unique(np.concatenate(packed)) if packed else np.empty(0, np.int64)
    before, after = edges >> 32, edges & 0xFFFFFFFF
    components = find_circles(before, after, evidence.transactions.commit_invoked_ns)
    words = Words(evidence)

    def case(number: int) -> Case:
        circle = shortest_circle(components[number], before, after)
        names = f" {verb} ".join(words.transaction(slot) for slot in [*circle[:6], circle[0]])
        text = f"{names} (of {len(components[number])} transactions in circles)."
        return Case(text, slots=tuple(circle[:6]))

    return found(components, case)


def find_circles(before: Array, after: Array, time: Array) -> list[list[int]]:
    """The strongly connected components of more than one node, each sorted, by their lowest node.

    `time` is any order in which most edges go forward: it only makes the search short.

    >>> find_circles(np.array([0, 1, 2, 3]), np.array([1, 0, 3, 4]), np.zeros(5, int))
    [[0, 1]]
    """
    nodes = np.unique(np.concatenate((before, after)))
    order = nodes[np.argsort(time[nodes], kind="stable")]
    rank_of = np.empty(len(nodes), np.int64)
    rank_of[np.searchsorted(nodes, order)] = np.arange(len(order))
    source, target = (rank_of[np.searchsorted(nodes, ends)] for ends in (before, after))
    span = _spans(source, target, len(nodes))
    inside = span[source] == span[target]
    kept = np.unique(np.concatenate((source[inside], target[inside])))
    source, target = (np.searchsorted(kept, ends[inside]) for ends in (source, target))
    components = _strong_components(source, target, len(kept))
    return sorted(sorted(order[kept[component]].tolist()) for component in components)


def shortest_circle(component: list[int], before: Array, after: Array) -> list[int]:
    """A shortest way from the lowest node of a component back to it.

    >>> shortest_circle([0, 1, 2], np.array([0, 0, 1, 2]), np.array([1, 2, 2, 0]))
    [0, 2]
    """
    inside = np.isin(before, component) & np.isin(after, component)
    nexts: dict[int, list[int]] = {}
    for one, other in zip(before[inside].tolist(), after[inside].tolist(), strict=True):
        nexts.setdefault(one, []).append(other)
    start = component[0]
    came_from = {start: start}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for other in nexts[node]:
            if other == start:
                way = [node]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if other not in came_from:
                came_from[other] = node
                waiting.append(other)
    raise ValueError("not strongly connected")


def _spans(source: Array, target: Array, count: int) -> Array:
    """A number for each node, the same for all between the two ends of an edge that goes back.

    A circle goes back somewhere, and all of it lies in edges that go back and overlap: no circle leaves its span.
    """
    steps = np.zeros(count + 1, np.int64)
    back = source > target
    np.add.at(steps, target[back], 1)
    np.add.at(steps, source[back], -1)
    is_joined = np.cumsum(steps)[: max(count - 1, 0)] > 0
    return np.concatenate(([0], np.cumsum(~is_joined))) if count else np.empty(0, np.int64)


def _strong_components(source: Array, target: Array, count: int) -> list[list[int]]:
    """Tarjan's algorithm without recursion; components of one node are left out."""
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(source[order], np.arange(count + 1)).tolist()
    targets = target[order].tolist()
    index, low = [-1] * count, [0] * count
    is_open = bytearray(count)
    at, path, opened = first[:-1], [], []
    components: list[list[int]] = []
    counter = 0
    for root in range(count):
        if index[root] >= 0:
            continue
        path.append(root)
        while path:
            node = path[-1]
            if index[node] < 0:
                index[node] = low[node] = counter
                counter += 1
                opened.append(node)
                is_open[node] = 1
            edge, end = at[node], first[node + 1]
            while edge < end:
                other = targets[edge]
                edge += 1
                if index[other] < 0:
                    path.append(other)
                    break
                if is_open[other] and index[other] < low[node]:
                    low[node] = index[other]
            at[node] = edge
            if path[-1] != node:
                continue
            path.pop()
            if path and low[node] < low[path[-1]]:
                low[path[-1]] = low[node]
            if low[node] == index[node]:
                component = [opened.pop()]
                while component[-1] != node:
                    component.append(opened.pop())
                for member in component:
                    is_open[member] = 0
                components.append(component)
    return [component for component in components if len(component) > 1]
