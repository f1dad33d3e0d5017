"""Format of TensorBoard's event files: records with a length, a protocol buffer ``Event``, and checksums (pure).

The format is TensorFlow's (``tensorflow/core/util/event.proto``, ``summary.proto``; TFRecord) and has not changed since
2017. This module encodes the messages itself, because the usual writers, tensorboardX and torch's, import torch: 180 MB
of memory and more than a second of CPU time in every job's controller.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_LENGTH = 8
_SUM = 4
_LARGEST = 64 << 20  # of a record; what says more is no length
_START = 1
_STRING = 7
_DOUBLE, _FLOAT, _INT, _BYTES = 1, 2, 3, 12
# Fields that are used here: number and type, a message's name or a list of one if the field is repeated. Texts are
# bytes, of which files by others may have any.
_FIELDS: Mapping[str, Mapping[str, tuple[int, int | str | list[int | str]]]] = {
    "Event": {
        "wall_time": (1, _DOUBLE),
        "step": (2, _INT),
        "file_version": (3, _BYTES),
        "summary": (5, "Summary"),
        "session_log": (7, "SessionLog"),
    },
    "SessionLog": {"status": (1, _INT)},
    "Summary": {"value": (1, ["Value"])},
    "Value": {"tag": (1, _BYTES), "simple_value": (2, _FLOAT), "tensor": (8, "Tensor"), "metadata": (9, "Metadata")},
    "Tensor": {"dtype": (1, _INT), "tensor_shape": (2, "Shape"), "string_val": (8, [_BYTES])},
    "Shape": {"dim": (2, ["Dim"])},
    "Dim": {"size": (1, _INT)},
    "Metadata": {"plugin_data": (1, "PluginData")},
    "PluginData": {"plugin_name": (1, _BYTES)},
}


def _event_class() -> Any:
    """Return the class of ``Event`` messages."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = kind[0] if isinstance(kind, list) else kind
            typed = {"type_name": one} if isinstance(one, str) else {"type": one}
            message.field.add(name=field, number=number, label=3 if one is not kind else 1, **typed)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Event"))


_Event = _event_class()


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
    """Yield the records of the event file ``stream``, up to the first record that is truncated or damaged."""
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
    """Return the first record of an event file, whose format version makes readers apply :func:`restart_event`."""
    return _packed(wall_time=time_s, file_version=b"brain.Event:2")


def restart_event(time_s: float, step: int) -> bytes:
    """Return a TensorBoard event that invalidates all earlier events at or after ``step``."""
    return _packed(wall_time=time_s, step=step, session_log={"status": _START})


def _utf8(text: str) -> bytes:
    """Encode any text as UTF-8; a lone surrogate becomes an escape sequence."""
    return text.encode("utf-8", "backslashreplace")


def scalar_event(time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a TensorBoard event with scalars at a step, keyed by tag (``time_s`` in [s since the epoch])."""
    scalars = [{"tag": _utf8(tag), "simple_value": value} for tag, value in values.items()]
    return _packed(wall_time=time_s, step=step, summary={"value": scalars})


def text_event(time_s: float, step: int, tag: str, text: str) -> bytes:
    """Return a TensorBoard event with a text under a tag, at a step; TensorBoard renders the text as Markdown."""
    tensor = {"dtype": _STRING, "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [_utf8(text)]}
    value = {"tag": _utf8(tag), "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": b"text"}}}
    return _packed(wall_time=time_s, step=step, summary={"value": [value]})


def _packed(**fields: Any) -> bytes:
    packed: bytes = _Event(**fields).SerializeToString()
    return packed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvent:
    """Contents of one event that was read from a TensorBoard file."""

    time_s: float = 0.0  # when it was written [s since the epoch]
    step: int = 0
    restarts: bool = False  # it says that what was written of this step and later ones counts no more
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)  # its scalars, by tag
    is_text: bool = False  # it holds a text


def read_event(record: bytes) -> ReadEvent:
    """Return the step, time and scalars of a record. Raises ValueError: the record is not an event."""
    try:
        event = _Event.FromString(record)
    except DecodeError as error:
        raise ValueError(f"a record is not an event: {error}") from None
    found = event.summary.value
    return ReadEvent(
        time_s=event.wall_time,
        step=event.step,
        restarts=event.session_log.status == _START,
        values={
            each.tag.decode(errors="replace"): each.simple_value
            for each in found
            if each.HasField("tag") and each.HasField("simple_value")
        },
        is_text=any(each.HasField("tensor") for each in found),
    )
