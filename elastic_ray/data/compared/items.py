"""What can be told of some of a dataset's items, as facts that ranks compare (torch).

Items are looked at where that costs nothing: tensors, arrays, lists, tables, and such attributes of a dataset as have
an entry for each sample (a list of files). No sample is loaded, and no ``__getitem__`` of the user's is called.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

_PLACES = 16  # of items
_VALUES = 8  # of an item
_LONGEST = 64  # characters of a text
_DEEPEST = 3
_MOST_PARTS = 8

Facts = dict[str, Any]


def places(count: int) -> list[int]:
    """Indices at which items are compared: all of a few, else some from the first to the last.

    >>> places(3), places(1000)[:3], places(1000)[-1]
    ([0, 1, 2], [0, 66, 133], 999)
    """
    if count <= _PLACES:
        return list(range(count))
    return [number * (count - 1) // (_PLACES - 1) for number in range(_PLACES)]


def item_facts(dataset: Any, name: str = "dataset", depth: int = 0) -> Facts:
    """Facts about a dataset's items by name, as far as they can be told without loading one."""
    if depth > _DEEPEST:
        return {}
    if isinstance(dataset, Subset):
        inner = item_facts(dataset.dataset, f"{name}.dataset", depth + 1)
        return {**_entries(dataset.indices, f"{name}.indices"), **inner}
    if isinstance(dataset, TensorDataset):
        tensors = enumerate(dataset.tensors)
        return {key: value for n, t in tensors for key, value in _entries(t, f"{name}.tensors[{n}]").items()}
    if callable(told := getattr(dataset, "told_of_files", None)):
        return _entries(told(), f"{name} files")
    if _is_table(dataset):
        return _table_facts(dataset, name)
    return _entries(dataset, name) or _attributes(dataset, name, depth)


def _attributes(dataset: Any, name: str, depth: int) -> Facts:
    """Facts about attributes that have an entry for each sample, and about datasets among the attributes."""
    found: Facts = {}
    try:
        count = len(dataset)
        attributes = {**_of_classes(dataset), **vars(dataset)}
    except TypeError:
        return {}
    for attribute, value in sorted(attributes.items()):
        path = f"{name}.{attribute}"
        if _is_dataset(value):
            found |= item_facts(value, path, depth + 1)
        elif isinstance(value, (list, tuple)) and value and _is_dataset(value[0]):
            for number, part in enumerate(value[:_MOST_PARTS]):
                found |= item_facts(part, f"{path}[{number}]", depth + 1)
        elif _length(value) == count:
            found |= _entries(value, path)
    return found


def _of_classes(dataset: Any) -> dict[str, Any]:
    """Attributes of the dataset's own classes."""
    own = [
        kind for kind in reversed(type(dataset).__mro__) if kind.__module__.split(".")[0] not in ("torch", "builtins")
    ]
    return {name: value for kind in own for name, value in vars(kind).items() if isinstance(value, (list, tuple))}


def _length(value: Any) -> int:
    """Number of entries of what they can be read from at no cost, else -1."""
    if isinstance(value, torch.Tensor):
        readable = value.layout == torch.strided and value.dim() > 0 and value.device.type == "cpu"
        return len(value) if readable else -1
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else -1
    if isinstance(value, (list, tuple, range)) or hasattr(value, "iloc"):
        return len(value)
    return -1


def _entries(value: Any, name: str) -> Facts:
    """Some entries of a list, an array, a tensor or a data frame by name; none of anything else."""
    count = _length(value)
    if count < 0:
        return {}
    rows = value.iloc if hasattr(value, "iloc") else value
    told = [_plain(rows[index]) for index in places(count)]
    return {f"len({name})": count} | {
        f"{name}[{index}]": each for index, each in zip(places(count), _without_root(told), strict=True)
    }


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset) or _is_table(value)


def _is_table(dataset: Any) -> bool:
    """True for a table of Hugging Face's ``datasets``."""
    return type(dataset).__module__ == "datasets.arrow_dataset" and hasattr(dataset, "with_format")


def _table_facts(dataset: Any, name: str) -> Facts:
    """Rows of a table as they are stored: neither decoded nor transformed."""
    try:
        stored = dataset.with_format("arrow")
        return {f"{name}[{index}]": _plain(stored[index].to_pylist()[0]) for index in places(len(dataset))}
    except Exception:  # another version of a foreign library: what it cannot tell is not compared
        return {}


def _plain(item: Any, depth: int = 0) -> Any:
    """Some values of an item, as JSON has them."""
    if isinstance(item, torch.Tensor):
        item = item.detach()
        if item.layout != torch.strided or item.device.type != "cpu":
            return list(item.shape)
        return [list(item.shape), *map(_plain, _some(item.reshape(-1)))] if item.dim() else _plain(item.item())
    if isinstance(item, np.ndarray):
        return [list(item.shape), *map(_plain, _some(item.reshape(-1)))] if item.ndim else _plain(item.item())
    if isinstance(item, np.generic):
        return _plain(item.item(), depth)
    if isinstance(item, os.PathLike):
        item = os.fspath(item)
    if isinstance(item, (str, bytes)):
        text = item if isinstance(item, str) else item[:_LONGEST].hex()
        return text if len(text) <= _LONGEST else f"{len(text)} {text[:_LONGEST]} {text[-_LONGEST:]}"
    if hasattr(item, "iloc"):
        item = list(item.values)
    if depth < _DEEPEST and isinstance(item, Mapping):
        return [[str(key), _plain(item[key], depth + 1)] for key in list(item)[:_VALUES]]
    if depth < _DEEPEST and isinstance(item, (list, tuple)):
        return [len(item), *(_plain(value, depth + 1) for value in item[:_VALUES])]
    if item is None or isinstance(item, complex):
        return repr(item)
    return item if isinstance(item, (bool, int, float)) else type(item).__name__


def _some(flat: Any) -> list[Any]:
    """Values of a flat tensor or array from all over it."""
    stride = max(1, len(flat) // _VALUES)
    found: list[Any] = flat[::stride][:_VALUES].tolist()
    return found


def _without_root(entries: Sequence[Any]) -> list[Any]:
    """Entries without the folder that all of their paths are in: it may be another one on each node."""
    texts = [text for each in entries for text in _texts(each)]
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    root = "".join(letters[0] for letters in same)
    root = root[: max(root.rfind("/"), root.rfind("\\")) + 1]
    return [_cut(each, root) for each in entries] if root else list(entries)


def _texts(entry: Any) -> list[str]:
    """Paths in an entry."""
    values = entry if isinstance(entry, list) else [entry]
    return [value for value in values if isinstance(value, str) and ("/" in value or "\\" in value)]


def _cut(entry: Any, root: str) -> Any:
    if isinstance(entry, list):
        return [_cut(value, root) if isinstance(value, str) else value for value in entry]
    return entry.removeprefix(root) if isinstance(entry, str) else entry


def still_facts(facts: Mapping[str, Any], first: Mapping[str, Any]) -> Facts:
    """Facts of a later pass, without numbers in items that this rank has changed since its ``first``: its notes."""
    return {
        name: None if _is_item(name) and first.get(name, value) != value and not _has_text(value) else value
        for name, value in facts.items()
    }


def _is_item(name: str) -> bool:
    return name.startswith(("dataset.", "dataset["))


def _has_text(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_text(each) for each in value)
    return isinstance(value, str)
