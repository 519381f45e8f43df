"""Stop search: finds the first stop string in streamed text, in time linear in the length of the text."""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """All stop strings of a request as one automaton (Aho-Corasick), shared by its threads.

    A state is the longest end of the text that is the beginning of a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]  # for each state: the states that longer beginnings lead to
        self._shorter = [0]  # for each state: the next shorter end of the text that is a beginning
        self.depth = [0]  # for each state: its number of characters
        self.found = [0]  # for each state: characters of the longest stop string that the text ends with; 0: none
        for stop in stops:
            self._add(stop)
        self._link()
        self.starts = frozenset(self._next[0])  # first characters of the stop strings

    def advance(self, state: int, sign: str) -> int:
        """The state after one more character."""
        while sign not in self._next[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return self._next[state][sign]

    def _add(self, stop: str) -> None:
        state = 0
        for sign in stop:
            if sign not in self._next[state]:
                self._next[state][sign] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(0)
            state = self._next[state][sign]
        self.found[state] = len(stop)

    def _link(self) -> None:
        """Set the shorter state of each state, shortest states first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for sign, longer in self._next[state].items():
                self._shorter[longer] = self.advance(self._shorter[state], sign)
                self.found[longer] = self.found[longer] or self.found[self._shorter[longer]]
                waiting.append(longer)


@lru_cache(maxsize=16)
def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings, built once for all threads of a request."""
    return StopAutomaton(stops)


class StopSearch:
    """Passes text on up to the first stop string, and holds back what may be the start of one.

    With `include_stop`, the text ends after the first stop string instead of before it.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self.held = ""  # text that may be the start of a stop string
        self.stopped = False
        self._automaton = automaton_of(stops) if stops else None
        self._state = 0
        self._include_stop = include_stop

    def push(self, text: str) -> str:
        """Text that can be shown now; `stopped` is then whether a stop string is complete."""
        automaton = self._automaton
        if automaton is None or (not self._state and automaton.starts.isdisjoint(text)):
            return text
        state, all_text = self._state, self.held + text
        for end, sign in enumerate(text, len(self.held) + 1):
            state = automaton.advance(state, sign)
            if found := automaton.found[state]:  # the first one to be complete, so that token boundaries do not matter
                self.stopped, self.held, self._state = True, "", 0
                return all_text[: end if self._include_stop else end - found]
        cut = len(all_text) - automaton.depth[state]
        self.held, self._state = all_text[cut:], state
        return all_text[:cut]

    def finish(self) -> str:
        """Text that is still held back, at the end of the text."""
        rest, self.held, self._state = self.held, "", 0
        return rest
