"""Regular expressions from strangers, matched in a time that grows only with the length of the text.

Python's `re` tries one way after another, and for `(a+)+b` there are more ways than there is time: one subscription
would stop the broker for good. Kafka uses RE2; this does what RE2 does, on the tree that `re` parses: all ways at once,
with the sets of states that were met before remembered. As in RE2, there are no references to groups and no looking
around.

Everything is bounded: the states, edges and work of compiling, what is remembered, and the work of matching.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

STATES_MAX: Final = 2_000
EDGES_MAX: Final = 8_000
PATTERN_CHARACTERS_MAX: Final = 5_000
COMPILE_STEPS_MAX: Final = 20_000
"""Pieces of the tree that are looked at, each as often as it is repeated."""
STEPS_MAX: Final = 400_000
"""For all texts that an expression is tried on at once: some tens of milliseconds. A step is a character, or a state or
an edge that has to be followed because the set of states is a new one."""
SLICE_STEPS: Final = 100_000
_REMEMBERED_MAX: Final = 5_000
"""States in all remembered sets together, and transitions between the sets: less than a megabyte."""
_STEPS_PER_STATE: Final = 3
_STEPS_PER_TEXT: Final = 8

_parser: Any = vars(re)["_parser"]
_codes: Any = vars(re)["_constants"]

_Accepts = Callable[[str], bool]


class UnusableRegex(ValueError):
    """The expression is wrong, uses what is not there, or costs too much."""


class Budget:
    """How many steps are left, for one expression or for several that are tried together."""

    __slots__ = ("steps",)

    def __init__(self, steps: int = STEPS_MAX) -> None:
        self.steps = steps

    @property
    def is_spent(self) -> bool:
        return self.steps <= 0

    def take(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise UnusableRegex("it takes too long on the names that there are")


class LinearRegex:
    """A compiled expression.

    >>> regex = LinearRegex("(o|or)+d.rs?")
    >>> regex.matches("orders"), regex.matches("my-orders")
    (True, False)
    >>> LinearRegex("(a+)+b").matches("a" * 1000)
    False
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > PATTERN_CHARACTERS_MAX:
            raise UnusableRegex(f"it is longer than {PATTERN_CHARACTERS_MAX:,} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise UnusableRegex(str(error)) from None
        self._automaton = _Automaton(tree.state.flags)
        try:
            self._start = self._automaton.add(tree, _END)
        except RecursionError as error:
            raise UnusableRegex(str(error)) from None
        self._automaton.end_compiling()
        self._sets: dict[tuple[int, ...], _StateSet] = {}
        self._remembered = 0

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        return bool(self.select([text]))

    def select(self, texts: Iterable[str], budget: Budget | None = None) -> list[str]:
        """Those that match as a whole. Raises UnusableRegex when trying all of them costs too much."""
        selecting = self.selecting(texts, budget or Budget())
        while True:
            try:
                next(selecting)
            except StopIteration as end:
                return end.value

    def selecting(self, texts: Iterable[str], budget: Budget) -> Generator[None, None, list[str]]:
        """The same in slices: yields whenever `SLICE_STEPS` have been taken, so that others get their turn."""
        selected: list[str] = []
        yield_at = budget.steps - SLICE_STEPS
        for text in texts:
            current = self._set_of((self._start,), budget, at_beginning=True)
            for character in text:
                budget.take(1)
                following = current.following.get(character)
                if following is None:
                    following = self._step(current, character, budget)
                current = following
                if budget.steps < yield_at:
                    yield_at = budget.steps - SLICE_STEPS
                    yield
                if not current.seeds:
                    break
            budget.take(_STEPS_PER_TEXT)
            if self._accepts(current, budget):
                selected.append(text)
        return selected

    def _step(self, current: _StateSet, character: str, budget: Budget) -> _StateSet:
        automaton = self._automaton
        budget.take(_STEPS_PER_STATE * (len(current.takers) + 1))
        seeds = {automaton.next_of(state) for state in current.takers if automaton.takes(state, character)}
        following = self._set_of(tuple(sorted(seeds)), budget, at_beginning=False)
        self._remember(1)
        current.following[character] = following
        return following

    def _set_of(self, seeds: tuple[int, ...], budget: Budget, *, at_beginning: bool) -> _StateSet:
        # The set at the beginning of a text is another than the same states have later: `^` holds in it.
        key = (-1, *seeds) if at_beginning else seeds
        found = self._sets.get(key)
        if found is None:
            reached = self._automaton.closure(seeds, budget, at_beginning=at_beginning, at_end=False)
            takers = tuple(state for state in reached if self._automaton.is_taker(state))
            found = _StateSet(seeds, takers, at_beginning)
            self._remember(len(seeds) + len(takers) + 1)
            self._sets[key] = found
        return found

    def _accepts(self, current: _StateSet, budget: Budget) -> bool:
        """Whether the end is reached when the text ends here."""
        if current.accepts is None:
            reached = self._automaton.closure(current.seeds, budget, at_beginning=current.at_beginning, at_end=True)
            current.accepts = _END in reached
        return current.accepts

    def _remember(self, count: int) -> None:
        """Forget all sets when there are too many: an expression with ever new ones is matched without a memory."""
        self._remembered += count
        if self._remembered > _REMEMBERED_MAX:
            for one in self._sets.values():
                one.following.clear()  # they refer to each other, and would wait for the garbage collector
            self._sets.clear()
            self._remembered = count


_END: Final = 0


class _StateSet:
    """The states that the text so far may have led to; `takers` are those of them that take a character."""

    __slots__ = ("accepts", "at_beginning", "following", "seeds", "takers")

    def __init__(self, seeds: tuple[int, ...], takers: tuple[int, ...], at_beginning: bool) -> None:
        self.seeds = seeds
        self.takers = takers
        self.at_beginning = at_beginning
        self.following: dict[str, _StateSet] = {}
        self.accepts: bool | None = None


class _Automaton:
    """States of four kinds: the end, one character, a fork, and a condition on the place in the text."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._accepts: list[_Accepts | None] = [None]
        self._conditions: list[Any] = [None]
        self._next: list[tuple[int, ...]] = [()]
        self._edges = 0
        self._steps_left = COMPILE_STEPS_MAX
        self._classes: dict[int, _Accepts | None] = {}
        """By the identity of the piece of the tree: what is repeated a thousand times is made once."""

    def end_compiling(self) -> None:
        self._classes.clear()

    def takes(self, state: int, character: str) -> bool:
        accepts = self._accepts[state]
        return accepts is not None and accepts(character)

    def is_taker(self, state: int) -> bool:
        return self._accepts[state] is not None

    def next_of(self, state: int) -> int:
        return self._next[state][0]

    def closure(self, states: Iterable[int], budget: Budget, *, at_beginning: bool, at_end: bool) -> set[int]:
        """All states that can be reached without taking a character."""
        reached: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in reached:
                continue
            reached.add(state)
            condition = self._conditions[state]
            holds = condition is None or (at_beginning if condition in _BEGINNINGS else at_end)
            if self._accepts[state] is None and holds:
                budget.take(_STEPS_PER_STATE * (len(self._next[state]) + 1))
                waiting.extend(self._next[state])
        return reached

    def _state(self, *following: int, accepts: _Accepts | None = None, condition: Any = None) -> int:
        self._count_edges(len(following))
        if len(self._next) >= STATES_MAX:
            raise _too_large()
        self._accepts.append(accepts)
        self._conditions.append(condition)
        self._next.append(following)
        return len(self._next) - 1

    def _count_edges(self, count: int) -> None:
        self._edges += count
        if self._edges > EDGES_MAX:
            raise _too_large()

    def add(self, tree: Iterable[tuple[Any, Any]], end: int) -> int:
        """States for a piece of the tree that lead to `end`; returns the first."""
        for code, argument in reversed(list(tree)):
            self._steps_left -= 1
            if self._steps_left < 0:
                raise _too_large()
            end = self._add_one(code, argument, end)
        return end

    def _add_one(self, code: Any, argument: Any, end: int) -> int:
        if code is _codes.SUBPATTERN:
            _, added, removed, tree = argument
            if added or removed:
                raise UnusableRegex("flags for a part of it are not taken")
            return self.add(tree, end)
        if code is _codes.BRANCH:
            self._steps_left -= len(argument[1])
            return self._state(*(self.add(tree, end) for tree in argument[1]))
        if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT):
            least, most, tree = argument
            return self._add_repeat(least, most, tree, end)
        if code is _codes.AT and (argument in _BEGINNINGS or argument in _ENDS):
            return self._state(end, condition=argument)
        accepts = self._acceptor(code, argument)
        if accepts is None:
            raise UnusableRegex(f"{str(code).lower()} is not taken here")
        return self._state(end, accepts=accepts)

    def _add_repeat(self, least: int, most: int, tree: Any, end: int) -> int:
        if most is _codes.MAXREPEAT:
            loop = self._state(end)
            self._next[loop] = (self.add(tree, loop), end)
            self._count_edges(1)
            end = loop
        else:
            last = end
            for _ in range(most - least):
                end = self._state(self.add(tree, end), last)
        for _ in range(least):
            before = len(self._next)
            end = self.add(tree, end)
            if len(self._next) == before:
                break  # what is empty is the same however often it is repeated
        return end

    def _acceptor(self, code: Any, argument: Any) -> _Accepts | None:
        if code is _codes.ANY:
            return _anything if self._flags & re.DOTALL else _anything_but_newline
        if code is _codes.LITERAL:
            return self._cased(chr(argument).__eq__)
        if code is _codes.NOT_LITERAL:
            accepts = self._cased(chr(argument).__eq__)
            return lambda character: not accepts(character)
        if code is _codes.IN:
            if id(argument) not in self._classes:
                self._classes[id(argument)] = self._class_of(argument)
            return self._classes[id(argument)]
        return None

    def _class_of(self, items: list[tuple[Any, Any]]) -> _Accepts | None:
        is_negated = bool(items) and items[0][0] is _codes.NEGATE
        ranges: list[tuple[int, int]] = []
        categories: set[_Accepts] = set()
        for code, argument in items[is_negated:]:
            if code is _codes.RANGE:
                ranges.append(argument)
            elif code is _codes.LITERAL:
                ranges.append((argument, argument))
            elif code is _codes.CATEGORY and argument in _CATEGORIES:
                categories.add(_CATEGORIES[argument])
            else:
                return None
        accepts = self._cased(_in_class(ranges, categories))
        return (lambda character: not accepts(character)) if is_negated else accepts

    def _cased(self, accepts: _Accepts) -> _Accepts:
        if not self._flags & re.IGNORECASE:
            return accepts
        return lambda character: any(
            len(variant) == 1 and accepts(variant) for variant in (character, character.lower(), character.upper())
        )


def _too_large() -> UnusableRegex:
    return UnusableRegex("it is too large once its repetitions are written out")


def _in_class(ranges: Iterable[tuple[int, int]], categories: Iterable[_Accepts]) -> _Accepts:
    """By binary search, so that a class of a thousand characters costs hardly more than one of two."""
    lows: list[int] = []
    highs: list[int] = []
    for low, high in sorted(ranges):
        if highs and low <= highs[-1] + 1:
            highs[-1] = max(highs[-1], high)
        else:
            lows.append(low)
            highs.append(high)

    def accepts(character: str) -> bool:
        place = bisect_right(lows, ord(character)) - 1
        return (place >= 0 and ord(character) <= highs[place]) or any(test(character) for test in categories)

    return accepts


def _anything(character: str) -> bool:
    return True


def _anything_but_newline(character: str) -> bool:
    return character != "\n"


def _is_word(character: str) -> bool:
    return character == "_" or (character.isascii() and character.isalnum())


def _is_digit(character: str) -> bool:
    return "0" <= character <= "9"


def _is_space(character: str) -> bool:
    return character in " \t\n\r\f\v"


_CATEGORIES: Final[dict[Any, _Accepts]] = {
    _codes.CATEGORY_WORD: _is_word,
    _codes.CATEGORY_NOT_WORD: lambda character: not _is_word(character),
    _codes.CATEGORY_DIGIT: _is_digit,
    _codes.CATEGORY_NOT_DIGIT: lambda character: not _is_digit(character),
    _codes.CATEGORY_SPACE: _is_space,
    _codes.CATEGORY_NOT_SPACE: lambda character: not _is_space(character),
}
_BEGINNINGS: Final = frozenset({_codes.AT_BEGINNING, _codes.AT_BEGINNING_STRING})
_ENDS: Final = frozenset({_codes.AT_END, _codes.AT_END_STRING})
