"""Encoding of plain values as bytes, for the parts of states that are not tensors. Decoding runs no code.

A value is one byte for its type, followed by its content; a length or a number of items is 8 bytes. Every type that
is not listed here is refused, so that data from a peer is never unpickled. Values are exact: a float keeps its bits,
a tuple stays a tuple, and keys keep their types and order.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

DEEPEST = 100
_LENGTH = struct.Struct("<Q")
_DOUBLE = struct.Struct("<d")
_NUMBERS = "biufc"  # kinds of NumPy's types that are nothing but numbers
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class NotPlainError(TypeError):
    """Error raised if a value's type cannot be sent between ranks; the message names the type and its path."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorIndex:
    """Stand-in, in an encoded state, for the state's n-th tensor."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class SparseIndex:
    """Stand-in for a sparse tensor, which is stored as two tensors: indices and values."""

    indices: TensorIndex
    values: TensorIndex
    shape: tuple[int, ...]


def too_deep(where: str) -> NotPlainError:
    """Return the error for a value at the path ``where`` that is nested too deeply."""
    return NotPlainError(f"{where[:80]}... is nested deeper than {DEEPEST} levels, or holds itself")


def encode(value: Any) -> bytes:
    """Return a plain value as bytes. Raises NotPlainError if the value contains a type that is not plain."""
    out = bytearray()
    _write(out, value, "", 0)
    return bytes(out)


def decode(data: bytes) -> Any:
    """Return the value that :func:`encode` wrote. Raises ValueError if the bytes are malformed."""
    reader = _Reader(data)
    try:
        value = reader.value(0)
    except (struct.error, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"not a plain value: {error}") from error
    if reader.at != len(data):
        raise ValueError(f"not a plain value: {len(data) - reader.at} bytes are left over")
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype for a name from :func:`dtype_name`. Raises ValueError if torch has no such dtype."""
    found = getattr(torch, name, None) if isinstance(name, str) and _NAME.fullmatch(name) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"not a plain value: torch has no type {name!r}")
    return found


def _write(out: bytearray, value: Any, where: str, depth: int) -> None:
    """Append the value's tag and content to ``out``."""
    kind = type(value)
    if depth > DEEPEST:
        raise too_deep(where)
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif kind in _CONTENT:
        tag, content = _CONTENT[kind]
        _text(out, tag, content(value))
    elif kind in _SEQUENCES:
        out += _SEQUENCES[kind] + _LENGTH.pack(len(value))
        for index, item in enumerate(value):
            _write(out, item, f"{where}[{index}]", depth + 1)
    elif kind in _MAPPINGS:
        out += _MAPPINGS[kind] + _LENGTH.pack(len(value))
        for key, item in value.items():
            _write(out, key, f"{where}, key {key!r}", depth + 1)
            _write(out, item, f"{where}[{key!r}]", depth + 1)
    elif kind is SparseIndex:
        out += b"S"
        _write(out, (value.indices, value.values, value.shape), where, depth + 1)
    elif isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in _NUMBERS:
        _text(out, b"g" if isinstance(value, np.generic) else b"y", value.dtype.str.encode())
        _write(out, value.shape, where, depth + 1)
        _text(out, b"b", value.tobytes())
    else:
        raise NotPlainError(f"{where.lstrip('.') or 'it'} is a {kind.__module__}.{kind.__qualname__}")


def _text(out: bytearray, tag: bytes, content: bytes) -> None:
    out += tag + _LENGTH.pack(len(content)) + content


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


_CONTENT: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    int: (b"i", _int_bytes),
    float: (b"f", _DOUBLE.pack),
    complex: (b"c", lambda value: _DOUBLE.pack(value.real) + _DOUBLE.pack(value.imag)),
    str: (b"s", lambda value: value.encode("utf-8", "surrogatepass")),
    bytes: (b"b", bytes),
    bytearray: (b"a", bytes),
    TensorIndex: (b"x", lambda value: _int_bytes(value.index)),
    torch.dtype: (b"d", lambda value: dtype_name(value).encode()),
    torch.device: (b"v", lambda value: str(value).encode()),
}
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t", torch.Size: b"z", set: b"e", frozenset: b"r"}
_MAPPINGS: dict[type, bytes] = {dict: b"m", collections.OrderedDict: b"o", collections.Counter: b"n"}


def as_float(kind: type[float]) -> None:
    """Encode values of this class as plain floats from now on."""
    _CONTENT[kind] = _CONTENT[float]


def _device(content: bytes) -> torch.device:
    try:
        return torch.device(content.decode())
    except RuntimeError as error:
        raise ValueError(f"not a plain value: {error}") from error


def _complex(content: bytes) -> complex:
    return complex(_DOUBLE.unpack(content[:8])[0], _DOUBLE.unpack(content[8:])[0])


def _sparse_index(told: Any) -> SparseIndex:
    """Return a sparse index from its decoded fields; raises ValueError if :func:`_write` cannot have written them."""
    if type(told) is not tuple or [type(each) for each in told] != [TensorIndex, TensorIndex, tuple]:
        raise ValueError("not a plain value: no sparse tensor is like this")
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in told[2]):
        raise ValueError("not a plain value: no sparse tensor has this shape")
    return SparseIndex(*told)


_READ_CONTENT: dict[bytes, Callable[[bytes], Any]] = {
    b"i": lambda content: int.from_bytes(content, "little", signed=True),
    b"f": lambda content: _DOUBLE.unpack(content)[0],
    b"c": _complex,
    b"s": lambda content: content.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"a": bytearray,
    b"x": lambda content: TensorIndex(int.from_bytes(content, "little", signed=True)),
    b"d": lambda content: dtype_of(content.decode()),
    b"v": _device,
}
_READ_SEQUENCE: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"z": torch.Size,
    b"e": set,
    b"r": frozenset,
}
_READ_MAPPING: dict[bytes, Callable[[], Any]] = {b"m": dict, b"o": collections.OrderedDict, b"n": collections.Counter}


class _Reader:
    """Reader of encoded bytes that validates every length."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"not a plain value: nested deeper than {DEEPEST} levels")
        tag = self._read(1)
        if tag in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[tag]
        if tag in _READ_CONTENT:
            return _READ_CONTENT[tag](self._content())
        if tag in _READ_SEQUENCE:
            return _READ_SEQUENCE[tag]([self.value(depth + 1) for _ in range(self._count())])
        if tag in _READ_MAPPING:
            return self._fill(_READ_MAPPING[tag](), depth)
        if tag == b"S":
            return _sparse_index(self.value(depth + 1))
        if tag in (b"g", b"y"):
            return self._numbers(depth, scalar=tag == b"g")
        raise ValueError(f"not a plain value: no type begins with {tag!r}")

    def _read(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError("not a plain value: it ends too early")
        piece = self._data[self.at : self.at + count]
        self.at += count
        return piece

    def _content(self) -> bytes:
        return self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])

    def _count(self) -> int:
        count = int(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        if count > len(self._data) - self.at:  # every item has a byte at least
            raise ValueError("not a plain value: it ends too early")
        return count

    def _fill(self, mapping: Any, depth: int) -> Any:
        for _ in range(self._count()):
            key = self.value(depth + 1)
            mapping[key] = self.value(depth + 1)
        return mapping

    def _numbers(self, depth: int, *, scalar: bool) -> Any:
        """Return a NumPy array, or a NumPy scalar."""
        name = self._content().decode()
        if not re.fullmatch(rf"[<>|=][{_NUMBERS}][0-9]{{1,2}}", name):
            raise ValueError(f"not a plain value: NumPy has no numbers of type {name!r}")
        shape, content = self.value(depth + 1), self.value(depth + 1)
        if not isinstance(shape, tuple) or not isinstance(content, bytes):
            raise ValueError("not a plain value: numbers without their shape")
        array = np.frombuffer(content, np.dtype(name)).reshape(shape).copy()
        return array[()] if scalar else array
