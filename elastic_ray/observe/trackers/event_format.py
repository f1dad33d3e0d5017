"""TensorBoard's event files: records with a length, a protocol buffer ``Event``, and checksums (pure).

The format is TensorFlow's (``tensorflow/core/util/event.proto``, ``summary.proto``; TFRecord) and has not changed since
2017. This module writes it directly because the usual writers, tensorboardX and torch's, import torch: 180 MB of memory
and more than a second of CPU time in every job's controller.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

_LENGTH = 8
_SUM = 4
_LARGEST = 64 << 20  # of a record; what says more is no length
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Numbers of the fields that are written here.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _TENSOR, _METADATA = 1, 1, 2, 8, 9
_START = 1
_STRING = 7


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum (RFC 3720) of ``data``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(record: bytes) -> bytes:
    """Return a record as it is stored in an event file, with its length and checksums."""
    length = struct.pack("<Q", len(record))
    return length + _masked(length) + record + _masked(record)


def records(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a file, up to the first one that is cut short or damaged."""
    while True:
        head = stream.read(_LENGTH + _SUM)
        if len(head) < _LENGTH + _SUM or _masked(head[:_LENGTH]) != head[_LENGTH:]:
            return
        (length,) = struct.unpack("<Q", head[:_LENGTH])
        if length > _LARGEST:
            return
        body = stream.read(length + _SUM)
        if len(body) < length + _SUM or _masked(body[:length]) != body[length:]:
            return
        yield body[:length]


def version_event(time_s: float) -> bytes:
    """Return the first record of a file: a format version for which readers respect :func:`restart_event`."""
    return _event(time_s, _field(_FILE_VERSION, b"brain.Event:2"))


def restart_event(time_s: float, step: int) -> bytes:
    """Return an event that voids all earlier events with this step or a later one."""
    return _event(time_s, _int(_STEP, step), _field(_SESSION_LOG, _int(1, _START)))


def _utf8(text: str) -> bytes:
    """Encode any text as UTF-8; a lone surrogate becomes an escape sequence."""
    return text.encode("utf-8", "backslashreplace")


def scalar_event(time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return an event with scalar values, keyed by tag, at a step (``time_s`` in [s since the epoch])."""
    packed = (_field(_TAG, _utf8(tag)) + _single(_SIMPLE_VALUE, value) for tag, value in values.items())
    return _event(time_s, _int(_STEP, step), _field(_SUMMARY, b"".join(_field(_VALUE, each) for each in packed)))


def text_event(time_s: float, step: int, tag: str, text: str) -> bytes:
    """Return an event with a text under a tag, at a step; TensorBoard renders the text as Markdown."""
    shape = _field(2, _int(1, 1))
    tensor = _int(1, _STRING) + _field(2, shape) + _field(8, _utf8(text))
    metadata = _field(1, _field(1, b"text"))
    value = _field(_TAG, _utf8(tag)) + _field(_TENSOR, tensor) + _field(_METADATA, metadata)
    return _event(time_s, _int(_STEP, step), _field(_SUMMARY, _field(_VALUE, value)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvent:
    """Contents of one event read from a file."""

    time_s: float = 0.0  # when it was written [s since the epoch]
    step: int = 0
    restarts: bool = False  # it says that what was written of this step and later ones counts no more
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)  # its scalars, by tag
    is_text: bool = False  # it holds a text


def read_event(record: bytes) -> ReadEvent:
    """Parse a record into its step, time and scalars. Raises ValueError: the record is not an event."""
    time_s, step, restarts, is_text, values = 0.0, 0, False, False, dict[str, float]()
    for number, value in _fields(record):
        if number == _STEP and isinstance(value, int):
            step = value
        elif number == _WALL_TIME and isinstance(value, float):
            time_s = value
        elif number == _SESSION_LOG and isinstance(value, bytes):
            restarts = (1, _START) in _fields(value)
        elif number == _SUMMARY and isinstance(value, bytes):
            for _, each in _fields(value):
                found = dict(_fields(each)) if isinstance(each, bytes) else {}
                tag, scalar = found.get(_TAG), found.get(_SIMPLE_VALUE)
                is_text = is_text or _TENSOR in found
                if isinstance(tag, bytes) and isinstance(scalar, float):
                    values[tag.decode(errors="replace")] = scalar
    return ReadEvent(time_s=time_s, step=step, restarts=restarts, values=values, is_text=is_text)


def _event(time_s: float, *fields: bytes) -> bytes:
    return bytes([_WALL_TIME << 3 | _FIXED64]) + struct.pack("<d", time_s) + b"".join(fields)


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _single(number: int, value: float) -> bytes:
    """Encode a number in single precision; a number out of range becomes infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(number << 3 | _FIXED32) + packed


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _fields(message: bytes) -> Iterable[tuple[int, int | float | bytes]]:
    """Return the fields of a protocol buffer message as (number, value) pairs."""
    at, found = 0, list[tuple[int, int | float | bytes]]()
    try:
        while at < len(message):
            key, at = _read_varint(message, at)
            match key & 7:
                case 0:
                    value, at = _read_varint(message, at)
                    found.append((key >> 3, value))
                case 1:
                    found.append((key >> 3, struct.unpack_from("<d", message, at)[0]))
                    at += 8
                case 2:
                    size, at = _read_varint(message, at)
                    found.append((key >> 3, message[at : at + size]))
                    at += size
                case 5:
                    found.append((key >> 3, struct.unpack_from("<f", message, at)[0]))
                    at += 4
                case kind:
                    raise ValueError(f"a field cannot be of kind {kind}")
    except (IndexError, struct.error) as error:
        raise ValueError(f"a message was cut short: {error}") from None
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the varint at offset ``at``, and the offset after it.

    Raises IndexError: the message ends before the varint does.
    """
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
