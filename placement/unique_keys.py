"""YAML and JSON in which no key occurs twice: both formats would silently ignore all but the last (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"  # of "<<: *other", which may take in several mappings


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, value in node.value:  # for the messages of `construct_object`
            value.key = getattr(key, "value", "")
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(None, None, f"key {key.value!r} occurs twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # PyYAML's own, of a date such as 2024-02-30
            of = f" of {key}" if isinstance(key := getattr(node, "key", ""), str) and key else ""
            why = f"the value{of}, {node.value!r:.80}, is not valid: {str(error).split('; use sys.')[0]}"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark) from error


def compose_yaml(text: str) -> Any:
    """Return YAML text as nodes, with the text of each value as written. Raises yaml.YAMLError."""
    return _parsed(yaml.compose, yaml.YAMLError, text, Loader=_Loader)


def load_yaml(text: str) -> Any:
    """Return the value of YAML text. Raises yaml.YAMLError, also for a key that occurs twice in a mapping."""
    return _parsed(yaml.load, yaml.YAMLError, text, Loader=_Loader)


def load_json(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError, also for a key that occurs twice in an object."""
    return _parsed(json.loads, ValueError, text, object_pairs_hook=_once, parse_int=_whole)


def _parsed(parse: Callable[..., Any], invalid: type[Exception], text: str, **options: Any) -> Any:
    try:
        return parse(text, **options)
    except RecursionError as error:
        raise invalid("it is nested too deeply") from error


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python parses no longer ones
        raise ValueError(f"the whole number {digits[:20]}... is too long: it has {len(digits)} digits") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} occurs twice")
        found[key] = value
    return found
