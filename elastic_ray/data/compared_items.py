"""Facts about a few items of a dataset, which ranks compare to check that they use the same data (torch).

Items are inspected only if that costs nothing: tensors, arrays, lists, tables, and dataset attributes that name each
sample (a list of files). No sample is loaded, and no user code runs except ``__len__``. Inspection therefore opens no
file that worker processes would share, and draws no random number.
"""

from __future__ import annotations

import itertools
import pathlib
import re
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
_FEWEST = 4  # samples of a dataset whose attributes may have an entry for each by intent

Facts = dict[str, Any]


def places(count: int) -> list[int]:
    """Return the indices of the items to compare: all of them if few, otherwise an evenly spaced selection.

    >>> places(3), places(1000)[:3], places(1000)[-1]
    ([0, 1, 2], [0, 66, 133], 999)
    """
    if count <= _PLACES:
        return list(range(count))
    return [number * (count - 1) // (_PLACES - 1) for number in range(_PLACES)]


def item_facts(dataset: Any, name: str = "dataset", depth: int = 0) -> Facts:
    """Return facts about a dataset's items for comparison across ranks, keyed by names that start with ``name``."""
    if depth > _DEEPEST:
        return {}
    if isinstance(dataset, Subset):
        inner = item_facts(dataset.dataset, f"{name}.dataset", depth + 1)
        return {**_entries(dataset.indices, f"{name}.indices"), **inner}
    if isinstance(dataset, TensorDataset):
        tensors = enumerate(dataset.tensors)
        return {key: value for n, t in tensors for key, value in _entries(t, f"{name}.tensors[{n}]").items()}
    if callable(getattr(type(dataset), "compared_files", None)):
        return _entries(dataset.compared_files(), f"{name} files")
    if _is_table(dataset):
        return _table_facts(dataset, name)
    return _entries(dataset, name) or _attributes(dataset, name, depth)


def _attributes(dataset: Any, name: str, depth: int) -> Facts:
    """Return facts about the dataset's attributes that identify samples, and about datasets held in its attributes.

    Other attributes, such as counts, losses, caches and parameters drawn for augmentation, may differ between ranks.
    """
    found: Facts = {}
    try:
        count = len(dataset)
        attributes = {**_of_classes(dataset), **vars(dataset)}
    except Exception:  # the user's code: what does not tell its length is not compared
        return {}
    for attribute, value in sorted(attributes.items()):
        path = f"{name}.{attribute}"
        if _is_dataset(value):
            found |= item_facts(value, path, depth + 1)
        elif type(value) in (list, tuple) and value and _is_dataset(value[0]):
            for number, part in enumerate(value[:_MOST_PARTS]):
                found |= item_facts(part, f"{path}[{number}]", depth + 1)
        elif count >= _FEWEST and _length(value) == count:
            entries = _entries(value, path)
            if _distinguish([each for key, each in entries.items() if _is_item(key)]):
                found |= entries
    return found


def _distinguish(entries: Sequence[Any]) -> bool:
    """True if the entries identify samples: all are distinct, and each is a text, an integer, or a list with a text."""
    return all(map(_names_one, entries)) and len(set(map(repr, entries))) == len(entries)


def _names_one(entry: Any) -> bool:
    is_list = isinstance(entry, list) and type(next(iter(entry), None)) is int  # a length, and no key
    values = entry if is_list else [entry]
    return type(entry) is int or any(isinstance(value, str) for value in values)


def _of_classes(dataset: Any) -> dict[str, Any]:
    """Return list and tuple attributes of the dataset's classes, excluding torch's and Python's."""
    own = [
        kind for kind in reversed(type(dataset).__mro__) if kind.__module__.split(".")[0] not in ("torch", "builtins")
    ]
    return {name: value for kind in own for name, value in vars(kind).items() if type(value) in (list, tuple)}


def _length(value: Any) -> int:
    """Return the number of entries in a value that can be read at no cost; -1 for any other value.

    No user code is called.
    """
    kind = type(value)
    if kind is torch.Tensor:
        readable = value.layout == torch.strided and value.dim() > 0 and value.device.type == "cpu"
        return len(value) if readable else -1
    if kind in (np.ndarray, np.memmap):
        return len(value) if value.ndim else -1
    return len(value) if kind in (list, tuple, range) or _is_frame(value) else -1


def _is_frame(value: Any) -> bool:
    """True for a pandas DataFrame or Series."""
    kind = type(value)
    return kind.__module__.startswith("pandas.core.") and kind.__name__ in ("DataFrame", "Series")


def _entries(value: Any, name: str) -> Facts:
    """Return some entries of a list, array, tensor or data frame, keyed by name; empty for other types."""
    count = _length(value)
    if count < 0:
        return {}
    rows = value.iloc if _is_frame(value) else value
    told = _without_root([_plain(rows[index]) for index in places(count)])
    return {f"len({name})": count} | dict(zip((f"{name}[{index}]" for index in places(count)), told, strict=True))


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset) or _is_table(value)


def _is_table(dataset: Any) -> bool:
    """True for a ``datasets.Dataset`` of Hugging Face."""
    return type(dataset).__module__ == "datasets.arrow_dataset" and type(dataset).__name__ == "Dataset"


def _table_facts(dataset: Any, name: str) -> Facts:
    """Return some rows of a table in stored form, neither decoded nor transformed."""
    try:
        stored, chosen = dataset.with_format("arrow"), places(len(dataset))
        told = _without_root([_plain(stored[index].to_pylist()[0]) for index in chosen])
    except Exception:  # another version of a foreign library: what it cannot tell is not compared
        return {}
    return dict(zip((f"{name}[{index}]" for index in chosen), told, strict=True))


def _plain(item: Any, depth: int = 0) -> Any:
    """Return the first values of an item in JSON types; None for a value of any other type."""
    kind = type(item)
    if kind is torch.Tensor:
        item = item.detach()
        if item.layout != torch.strided or item.device.type != "cpu":
            return list(item.shape)
        return [list(item.shape), *map(_plain, _some(item))] if item.dim() else _plain(item.item())
    if kind in (np.ndarray, np.memmap):
        return [list(item.shape), *map(_plain, _some(item))] if item.ndim else _plain(item.item())
    if isinstance(item, np.generic):
        return _plain(item.item(), depth)
    if isinstance(item, pathlib.PurePath):
        item = str(item)
    if isinstance(item, (str, bytes)):
        return item if isinstance(item, str) else item[:_LONGEST].hex()
    if _is_frame(item):
        item = list(item.values)
    if depth < _DEEPEST and kind is dict:
        return [[str(key), _plain(item[key], depth + 1)] for key in list(item)[:_VALUES]]
    if depth < _DEEPEST and type(item) in (list, tuple):
        return [len(item), *(_plain(value, depth + 1) for value in item[:_VALUES])]
    return item if isinstance(item, (bool, int, float)) else None


def _some(values: Any) -> list[Any]:
    """Return a few values spread over a tensor or array."""
    flat = values.reshape(-1)
    found: list[Any] = flat[:: max(1, len(flat) // _VALUES)][:_VALUES].tolist()
    return found


def _without_root(entries: Sequence[Any]) -> list[Any]:
    """Return entries with the common root folder removed from their paths, because it may differ between nodes.

    If the paths have no common folder, only their file names are kept.
    """
    paths = [text for each in entries for text in _paths(each)]
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*paths, strict=False))
    root = "".join(letters[0] for letters in same)
    root = root[: max(root.rfind("/"), root.rfind("\\")) + 1]
    return [_cut(each, root if len(root) > 1 else "") for each in entries]


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and (value.startswith(("/", "~", "\\\\")) or value[1:3] in (":\\", ":/"))


def _paths(entry: Any) -> list[str]:
    """Return the absolute paths in an entry."""
    if isinstance(entry, list):
        return [path for value in entry for path in _paths(value)]
    return [entry] if _is_path(entry) else []


def _cut(entry: Any, root: str) -> Any:
    """Return an entry with paths relative to ``root`` (or file names only, if empty) and long texts shortened."""
    if isinstance(entry, list):
        return [_cut(value, root) for value in entry]
    if not isinstance(entry, str):
        return entry
    if _is_path(entry):
        entry = entry.removeprefix(root) if root else re.split(r"[/\\]", entry)[-1]
    return entry if len(entry) <= _LONGEST else f"{len(entry)} {entry[:_LONGEST]} {entry[-_LONGEST:]}"


def still_facts(facts: Mapping[str, Any], first: Mapping[str, Any]) -> Facts:
    """Return a pass's facts, with None for items that have changed since the ``first`` pass and are not text."""
    return {name: value if _is_still(name, value, first.get(name)) else None for name, value in facts.items()}


def _is_still(name: str, value: Any, before: Any) -> bool:
    return not _is_item(name) or value == before or (_has_text(value) and _has_text(before))


def _is_item(name: str) -> bool:
    return name.startswith(("dataset.", "dataset["))


def _has_text(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_text(each) for each in value)
    return isinstance(value, str)
