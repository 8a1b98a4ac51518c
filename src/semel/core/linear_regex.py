"""Regular expressions from strangers, matched in a time that grows only with the length of the text.

Python's `re` tries one way after another, and for `(a+)+b` there are more ways than there is time: one subscription
would stop the broker for good. Kafka uses RE2; this does what RE2 does, on the tree that `re` parses: all ways at once.
As in RE2, there are no references to groups and no looking around.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

STATES_MAX: Final = 2_000
PATTERN_CHARACTERS_MAX: Final = 10_000
STEPS_MAX: Final = 3_000_000
"""For all texts that an expression is tried on at once: a second or so."""

_parser: Any = vars(re)["_parser"]
_codes: Any = vars(re)["_constants"]

_Accepts = Callable[[str], bool]
_Holds = Callable[[str, int], bool]


class UnusableRegex(ValueError):
    """The expression is wrong, uses what is not there, or costs too much."""


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

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        return bool(self.select([text]))

    def select(self, texts: Iterable[str]) -> list[str]:
        """Those that match as a whole. Raises UnusableRegex when trying all of them costs too much."""
        selected: list[str] = []
        steps_left = STEPS_MAX
        for text in texts:
            is_match, steps = self._try(text)
            steps_left -= steps
            if steps_left < 0:
                raise UnusableRegex("it takes too long on the names that there are")
            if is_match:
                selected.append(text)
        return selected

    def _try(self, text: str) -> tuple[bool, int]:
        automaton = self._automaton
        current = automaton.closure([self._start], text, 0)
        steps = 0
        for position, character in enumerate(text, 1):
            steps += len(current) + 1
            following = [automaton.next_of(state) for state in current if automaton.takes(state, character)]
            if not following:
                return False, steps
            current = automaton.closure(following, text, position)
        return _END in current, steps


_END: Final = 0


class _Automaton:
    """States of four kinds: the end, one character, a fork, and a condition on the place in the text."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._accepts: list[_Accepts | None] = [None]
        self._holds: list[_Holds | None] = [None]
        self._next: list[tuple[int, ...]] = [()]

    def takes(self, state: int, character: str) -> bool:
        accepts = self._accepts[state]
        return accepts is not None and accepts(character)

    def next_of(self, state: int) -> int:
        return self._next[state][0]

    def closure(self, states: Iterable[int], text: str, position: int) -> set[int]:
        """All states that can be reached without taking a character."""
        reached: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in reached:
                continue
            reached.add(state)
            holds = self._holds[state]
            if self._accepts[state] is None and (holds is None or holds(text, position)):
                waiting.extend(self._next[state])
        return reached

    def _state(self, *following: int, accepts: _Accepts | None = None, holds: _Holds | None = None) -> int:
        if len(self._next) >= STATES_MAX:
            raise UnusableRegex("it is too large once its repetitions are written out")
        self._accepts.append(accepts)
        self._holds.append(holds)
        self._next.append(following)
        return len(self._next) - 1

    def add(self, tree: Iterable[tuple[Any, Any]], end: int) -> int:
        """States for a piece of the tree that lead to `end`; returns the first."""
        for code, argument in reversed(list(tree)):
            end = self._add_one(code, argument, end)
        return end

    def _add_one(self, code: Any, argument: Any, end: int) -> int:
        if code is _codes.SUBPATTERN:
            _, added, removed, tree = argument
            if added or removed:
                raise UnusableRegex("flags for a part of it are not taken")
            return self.add(tree, end)
        if code is _codes.BRANCH:
            return self._state(*(self.add(tree, end) for tree in argument[1]))
        if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT):
            least, most, tree = argument
            return self._add_repeat(least, most, tree, end)
        if code is _codes.AT:
            holds = _CONDITIONS.get(argument)
            if holds is not None:
                return self._state(end, holds=holds)
        accepts = self._acceptor(code, argument)
        if accepts is None:
            raise UnusableRegex(f"{str(code).lower()} is not taken here")
        return self._state(end, accepts=accepts)

    def _add_repeat(self, least: int, most: int, tree: Any, end: int) -> int:
        if most is _codes.MAXREPEAT:
            loop = self._state(end)
            self._next[loop] = (self.add(tree, loop), end)
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
            dotall = bool(self._flags & re.DOTALL)
            return lambda character: dotall or character != "\n"
        if code is _codes.LITERAL:
            return self._cased(lambda character: ord(character) == argument)
        if code is _codes.NOT_LITERAL:
            accepts = self._cased(lambda character: ord(character) == argument)
            return lambda character: not accepts(character)
        if code is _codes.IN:
            return self._class_of(argument)
        return None

    def _class_of(self, items: list[tuple[Any, Any]]) -> _Accepts | None:
        is_negated = bool(items) and items[0][0] is _codes.NEGATE
        tests: list[_Accepts] = []
        for code, argument in items[is_negated:]:
            if code is _codes.RANGE:
                low, high = argument
                tests.append(lambda character, low=low, high=high: low <= ord(character) <= high)
            elif code is _codes.LITERAL:
                tests.append(lambda character, argument=argument: ord(character) == argument)
            elif code is _codes.CATEGORY and argument in _CATEGORIES:
                tests.append(_CATEGORIES[argument])
            else:
                return None
        accepts = self._cased(lambda character: any(test(character) for test in tests))
        return (lambda character: not accepts(character)) if is_negated else accepts

    def _cased(self, accepts: _Accepts) -> _Accepts:
        if not self._flags & re.IGNORECASE:
            return accepts
        return lambda character: any(
            len(variant) == 1 and accepts(variant) for variant in (character, character.lower(), character.upper())
        )


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
_CONDITIONS: Final[dict[Any, _Holds]] = {
    _codes.AT_BEGINNING: lambda text, position: position == 0,
    _codes.AT_BEGINNING_STRING: lambda text, position: position == 0,
    _codes.AT_END: lambda text, position: position == len(text),
    _codes.AT_END_STRING: lambda text, position: position == len(text),
}
