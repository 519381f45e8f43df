"""Template check: which chat templates end soon whatever the messages are, and need no process of their own."""

from __future__ import annotations

import re

from jinja2 import nodes

# Statements and expressions whose results are not larger than their operands together. Without macros, and without sums
# in assignments, nothing grows from one iteration of a loop to the next, and loops are counted and timed.
_NODES: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.CondExpr, nodes.Const, nodes.Name),
    *(
        nodes.Getattr,
        nodes.Getitem,
        nodes.Slice,
        nodes.Compare,
        nodes.Operand,
        nodes.And,
        nodes.Or,
        nodes.Not,
        nodes.Neg,
    ),
    *(nodes.Add, nodes.Sub, nodes.Concat, nodes.Assign, nodes.NSRef, nodes.Filter, nodes.Test, nodes.Call, nodes.List),
    *(nodes.Dict, nodes.Tuple, nodes.Pair, nodes.Keyword, nodes.Break, nodes.Continue, nodes.Scope, nodes.Mod),
)
_FILTERS = frozenset(
    [
        "trim",
        "length",
        "count",
        "upper",
        "lower",
        "title",
        "capitalize",
        "default",
        "d",
        "first",
        "last",
        "list",
        "items",
        "selectattr",
        "rejectattr",
        "tojson",
    ]
)
_FUNCTIONS = frozenset(("raise_exception", "strftime_now", "namespace"))
_METHODS = frozenset(
    [
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "startswith",
        "endswith",
        "items",
        "keys",
        "values",
        "get",
        "upper",
        "lower",
        "title",
    ]
)
_DATE = re.compile(r"(%[a-zA-Z%]|[^%]){0,40}")


def is_harmless(template: nodes.Template) -> bool:
    """Whether rendering takes time and memory in proportion to the messages, or is stopped by the limits of loops."""
    found = [template, *template.find_all(nodes.Node)]
    assigned = {node.name for node in found if isinstance(node, nodes.Name) and node.ctx != "load"}
    return not assigned & _FUNCTIONS and all(_is_harmless(node) for node in found)


def _is_harmless(node: nodes.Node) -> bool:
    if not isinstance(node, _NODES):
        return False
    if isinstance(node, nodes.For):
        return not node.recursive
    if isinstance(node, nodes.Assign):
        return not any(True for _ in node.node.find_all((nodes.Add, nodes.Concat))) and not isinstance(
            node.node, nodes.Add | nodes.Concat
        )
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS and (node.name != "tojson" or not (node.args or node.kwargs))
    if isinstance(node, nodes.Mod):  # of a text it is formatting, which may need any number of characters
        return (
            isinstance(node.left, nodes.Getattr) and node.left.attr in ("index", "index0") and _is_loop(node.left.node)
        )
    return not isinstance(node, nodes.Call) or _is_harmless_call(node)


def _is_harmless_call(call: nodes.Call) -> bool:
    if call.dyn_args is not None or call.dyn_kwargs is not None:
        return False
    if isinstance(call.node, nodes.Getattr):
        return call.node.attr in _METHODS
    if not isinstance(call.node, nodes.Name) or call.node.name not in _FUNCTIONS:
        return False
    if call.node.name != "strftime_now":
        return True
    return (
        len(call.args) == 1 and isinstance(form := call.args[0], nodes.Const) and bool(_DATE.fullmatch(str(form.value)))
    )


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"
