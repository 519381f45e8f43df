"""Radix tree: which holders have which sequence of tokens; an edge is a run of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Match(NamedTuple):
    """The longest common beginning of a sequence and those in the tree."""

    length: int  # tokens
    holders: frozenset[int]  # whose sequences have these tokens in common; none if the length is 0


@dataclass
class _Node:
    """The end of a run of tokens, and the runs that continue it."""

    run: list[int]  # tokens from the parent to this node; at least one, except at the root
    holders: set[int] = field(default_factory=set)  # whose sequences go through all of the run
    children: dict[int, _Node] = field(default_factory=dict)  # by the first token of their run


class RadixTree:
    """One sequence of tokens for each holder; a lookup takes time for the tokens only, not for the holders."""

    def __init__(self) -> None:
        self._root = _Node([])

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def insert(self, tokens: Sequence[int], holder: int) -> None:
        """Add the sequence of a holder, which must have none."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                node.children[tokens[at]] = _Node(list(tokens[at:]), {holder})
                return
            common = _common(child.run, tokens, at)
            if common < len(child.run):
                child = _split(node, child, common)
            child.holders.add(holder)
            node, at = child, at + common

    def remove(self, tokens: Sequence[int], holder: int) -> None:
        """Remove the sequence that was inserted for a holder."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children[tokens[at]]
            child.holders.remove(holder)
            if not child.holders:
                del node.children[tokens[at]]
                break
            node, at = child, at + len(child.run)
        _join(node)

    def longest(self, tokens: Sequence[int]) -> Match:
        """The longest beginning of these tokens that is in the tree."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common(child.run, tokens, at)
            node, at = child, at + common
            if common < len(child.run):
                break
        return Match(at, frozenset(node.holders))


def _common(run: Sequence[int], tokens: Sequence[int], at: int) -> int:
    """Number of tokens of a run that are equal to those from an index on."""
    rest = tokens[at : at + len(run)]
    if rest == run:
        return len(run)
    return next((index for index, (one, other) in enumerate(zip(rest, run, strict=False)) if one != other), len(rest))


def _split(parent: _Node, child: _Node, length: int) -> _Node:
    """Split a run after some tokens; returns the new node between."""
    between = _Node(child.run[:length], set(child.holders), {child.run[length]: child})
    parent.children[child.run[0]] = between
    child.run = child.run[length:]
    return between


def _join(node: _Node) -> None:
    """Join a node with its only child if the same sequences go through both."""
    if len(node.children) != 1 or not node.run:
        return
    (child,) = node.children.values()
    if child.holders == node.holders:
        node.run, node.children = node.run + child.run, child.children
