"""Radix tree: it finds what a comparison with every sequence finds, and forgets what is removed."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.runtime.scheduling.radix_tree import Match, RadixTree

TOKENS = st.lists(st.integers(0, 2), max_size=9)
CHANGES = st.lists(st.tuples(st.integers(0, 5), st.none() | TOKENS, TOKENS), max_size=30)


def expected(known: dict[int, list[int]], tokens: list[int]) -> Match:
    """The longest match, found by comparing with every sequence."""
    common = {
        holder: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)))
        for holder, other in known.items()
    }
    longest = max(common.values(), default=0)
    return Match(longest, frozenset(holder for holder, length in common.items() if length == longest and longest))


@settings(max_examples=500)
@given(CHANGES)
def test_the_longest_match_is_that_of_a_comparison_with_every_sequence(
    changes: list[tuple[int, list[int] | None, list[int]]],
) -> None:
    tree, known = RadixTree(), dict[int, list[int]]()
    for holder, tokens, asked in changes:
        if holder in known:
            tree.remove(known.pop(holder), holder)
        if tokens is not None:
            tree.insert(tokens, holder)
            known[holder] = tokens
        assert tree.longest(asked) == expected(known, asked)
        assert bool(tree) == any(known.values())
        hold_runs_are_as_long_as_they_can_be(tree, known)


def hold_runs_are_as_long_as_they_can_be(tree: RadixTree, known: dict[int, list[int]]) -> None:
    """Every node but the root is where sequences part or one ends."""
    ends = {tuple(tokens) for tokens in known.values()}
    open_nodes = [((), tree._root)]
    while open_nodes:
        before, node = open_nodes.pop()
        path = (*before, *node.run)
        assert not path or len(node.children) != 1 or path in ends
        for token, child in node.children.items():
            assert child.run[0] == token
            assert child.holders == {
                holder
                for holder, tokens in known.items()
                if [*path, *child.run] == tokens[: len(path) + len(child.run)]
            }
            open_nodes.append((path, child))


def test_sequences_of_a_whole_context_are_found() -> None:
    tree = RadixTree()
    prompts = [[7] * 4000 + [holder, *range(96)] for holder in range(64)]
    for holder, prompt in enumerate(prompts):
        tree.insert(prompt, holder)
    assert tree.longest(prompts[5]) == (4097, {5})
    assert tree.longest([7] * 4000 + [99]) == (4000, frozenset(range(64)))
    assert tree.longest([8]) == (0, frozenset())
