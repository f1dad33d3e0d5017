"""Finds the private names of other packages that this tree uses, by its syntax."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("elastic_ray", "placement", "tuning")
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "patched")
_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """Private names that are ours: in one file, in any, and methods that no other file of ours defines."""

    here: set[str]
    anywhere: set[str]
    overrides: set[str]


@functools.cache
def uses() -> dict[str, list[str]]:
    """Private names of others, each with the places that use it.

    A name is that of an attribute, or ``module:name`` of an import through a private module or of a private name. A
    name that a file gives to something itself is the file's own; so is a string that is such a name anywhere, and an
    attribute of ``self``. What ``super()`` has is another's where only one file of ours defines it.
    """
    trees = {path: ast.parse(path.read_text()) for ours in OURS for path in sorted((ROOT / ours).rglob("*.py"))}
    here = {path: set(_given(tree)) for path, tree in trees.items()}
    files = collections.Counter(name for names in here.values() for name in names)
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        methods = {each.name for each in ast.walk(tree) if isinstance(each, _METHODS) and files[each.name] == 1}
        own = _Own(here=here[path], anywhere=set(files), overrides=methods)
        for name, line in _used(tree, own):
            found.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{line}")
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 3


def _given(tree: ast.AST) -> Iterator[str]:
    """Private names that the file defines, assigns to, or takes as its own."""
    for node in ast.walk(tree):
        if isinstance(node, (*_METHODS, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.asname


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _used(tree: ast.AST, own: _Own) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in OURS:
            for alias in node.names:
                if any(map(_is_private, [*node.module.split("."), alias.name])):
                    yield f"{node.module}:{alias.name}", node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parent, _, name = alias.name.rpartition(".")
                if parent and any(map(_is_private, alias.name.split("."))):
                    yield f"{parent}:{name}", node.lineno
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            theirs = _is_super(node.value) and node.attr in own.overrides
            if theirs or node.attr not in (own.anywhere if _is_self(node.value) else own.here):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            names = (text for text in _texts(node.args[1:2]) if _is_private(text) and text not in own.here)
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((name, node.lineno) for name in _named(node.value, own))


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _named(text: str, own: _Own) -> Iterator[str]:
    """Private names in a string that is nothing but a name, or the dotted name of a module."""
    parts = text.split(".")
    if not all(part.isidentifier() for part in parts) or not any(map(_is_private, parts)):
        return
    if len(parts) > 1:
        yield from [f"{'.'.join(parts[:-1])}:{parts[-1]}"] if parts[0] not in OURS else []
    elif text in own.overrides or text not in own.anywhere:
        yield text
