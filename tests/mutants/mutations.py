"""Mutations: one changed expression of the product each, found by file, function and text, so that they outlive edits."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AREAS = {"runtime": 26, "exporter": 12, "graphs": 10, "serving": 12}  # folder -> its part of sixty mutations
PER_FILE = 2

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
_EXTREMES = {"min": "max", "max": "min"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    file: str  # relative to the root
    function: str  # with its class: Planner.plan
    original: str  # source of the expression
    mutated: str
    index: int  # among equal expressions of the function


@dataclass(frozen=True)
class Site:
    """Where a mutation is in a source, in offsets of UTF-8 bytes."""

    mutation: Mutation
    line: int  # of the statement to put a recording line before, from 1
    column: int  # of that statement
    begin: int
    end: int


def sites(root: Path, file: str) -> list[Site]:
    """All mutations of a file."""
    source = (root / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = list[Site]()
    for name, function in _functions(ast.parse(source), ""):
        seen = Counter[tuple[str, str]]()
        for statement, node, mutated in _expressions(function):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            original = source[begin:end].decode()
            index = seen[original, mutated]
            seen[original, mutated] += 1
            mutation = Mutation(file, name, original, mutated, index)
            found.append(Site(mutation, statement.lineno, statement.col_offset, begin, end))
    return found


def located(root: Path, mutation: Mutation) -> Site | None:
    """Where a mutation is now, if its expression is still there."""
    if not (root / mutation.file).is_file():
        return None
    return next((site for site in sites(root, mutation.file) if site.mutation == mutation), None)


def drawn(root: Path, seed: int) -> list[Site]:
    """Mutations of all areas in a random order, each area with its part at any point of the list."""
    generator = random.Random(seed)
    queues = {}
    for area in AREAS:
        files = sorted((root / area).rglob("*.py"))
        chosen = [site for file in files for site in _some(root, str(file.relative_to(root)), generator)]
        generator.shuffle(chosen)
        queues[area] = chosen
    order = list[Site]()
    taken = Counter[str]()
    while any(queues.values()):
        area = min((area for area in AREAS if queues[area]), key=lambda area: taken[area] / AREAS[area])
        taken[area] += 1
        order.append(queues[area].pop())
    return order


def _some(root: Path, file: str, generator: random.Random) -> list[Site]:
    found = sites(root, file)
    return generator.sample(found, min(PER_FILE, len(found)))


def mutate(root: Path, site: Site) -> bytes:
    """Write a mutation into its file; returns the source as it was."""
    path = root / site.mutation.file
    source = path.read_bytes()
    path.write_bytes(source[: site.begin] + site.mutation.mutated.encode() + source[site.end :])
    return source


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    """Functions of modules and classes; a function inside a function belongs to the outer one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            if child.name != "__repr__":
                yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from _functions(child, prefix)


def _expressions(function: _Function) -> Iterator[tuple[ast.stmt, ast.expr, str]]:
    """The statement, the expression and its mutated source, for everything that can be changed in a function."""
    waiting: list[tuple[ast.stmt, ast.AST]] = [(statement, statement) for statement in reversed(function.body)]
    while waiting:
        statement, node = waiting.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.AnnAssign | ast.arguments | ast.JoinedStr):
            continue
        if isinstance(node, ast.expr):
            yield from ((statement, node, mutated) for mutated in _mutated(node))
        is_chain = isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        for child in reversed(list(ast.iter_child_nodes(node))):
            if isinstance(child, ast.stmt) and not (is_chain and isinstance(node, ast.If) and child in node.orelse):
                waiting.append((child, child))
            else:  # the condition of an elif is recorded before the whole chain
                waiting.append((statement, child))


def _mutated(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Compare(left, [operator], comparators):
            yield ast.unparse(ast.Compare(left, [_COMPARISONS[type(operator)]], comparators))
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.BinOp(left, ast.Add() | ast.Sub() as operator, right) if not _is_text(left) and not _is_text(right):
            other_sign = ast.Sub() if isinstance(operator, ast.Add) else ast.Add()
            yield f"({ast.unparse(ast.BinOp(left, other_sign, right))})"
        case ast.Call(ast.Name("min" | "max" as name), [_, _, *_]):
            yield ast.unparse(ast.Call(ast.Name(_EXTREMES[name]), node.args, node.keywords))
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Constant(value) if type(value) is int:
            yield str(value + 1)
        case ast.Constant(value) if type(value) is bool:
            yield str(not value)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
