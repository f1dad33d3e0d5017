"""Event files are what tensorboardX, and so TensorBoard, take them for."""

from __future__ import annotations

import contextlib
import io
import math
import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elastic_ray.observe.trackers import tensorboard as format_


def test_the_check_sum_is_that_of_the_rfc() -> None:
    """RFC 3720, appendix B.4."""
    assert format_.crc32c(bytes(32)) == 0x8A9136AA
    assert format_.crc32c(bytes([0xFF] * 32)) == 0x62A8AB43
    assert format_.crc32c(bytes(range(32))) == 0x46DD794E


def test_tensorboardx_reads_what_is_written() -> None:
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    scalars = Event.FromString(format_.scalar_event(12.5, 1 << 40, {"loss": 0.5, "größe/x": -3.0, "inf": 1e300}))
    assert (scalars.wall_time, scalars.step) == (12.5, 1 << 40)
    assert {v.tag: v.simple_value for v in scalars.summary.value} == {"loss": 0.5, "größe/x": -3.0, "inf": math.inf}
    text = Event.FromString(format_.text_event(1.0, 7, "elastic/resize", "1 -> 2 <script>"))
    (value,) = text.summary.value
    assert value.metadata.plugin_data.plugin_name == "text" and value.tensor.tensor_shape.dim[0].size == 1
    assert value.tensor.string_val == [b"1 -> 2 <script>"] and value.tensor.dtype == 7
    assert Event.FromString(format_.version_event(1.0)).file_version == "brain.Event:2"
    restart = Event.FromString(format_.restart_event(1.0, 9))
    assert restart.step == 9 and restart.session_log.status == SessionLog.START


def test_tensorboardx_frames_records_alike() -> None:
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", 3)
    sums = [struct.pack("<I", masked_crc32c(each)) for each in (length, b"abc")]
    assert format_.frame(b"abc") == length + sums[0] + b"abc" + sums[1]


@given(st.lists(st.binary(max_size=40), max_size=5), st.data())
def test_file_that_was_cut_short_gives_its_whole_records(written: list[bytes], data: st.DataObject) -> None:
    framed = [format_.frame(each) for each in written]
    whole = b"".join(framed)
    cut = data.draw(st.integers(0, len(whole)))
    read = list(format_.records(io.BytesIO(whole[:cut])))
    assert read == written[: len(read)]
    assert (
        sum(map(len, framed[: len(read)])) <= cut < sum(map(len, framed[: len(read) + 1])) + (len(read) == len(framed))
    )


@given(st.floats(allow_nan=False), st.integers(0, 2**62), st.dictionaries(st.text(max_size=8), st.floats(width=32)))
def test_an_event_is_read_as_it_was_written(time_s: float, step: int, values: dict[str, float]) -> None:
    event = format_.read_event(format_.scalar_event(time_s, step, values))
    assert (event.time_s, event.step, event.restarts, event.is_text) == (time_s, step, False, False)
    assert event.values.keys() == values.keys()
    assert all(event.values[k] == v or (math.isnan(v) and math.isnan(event.values[k])) for k, v in values.items())
    assert format_.read_event(format_.restart_event(time_s, step)).restarts
    assert format_.read_event(format_.text_event(time_s, step, "a", "b")).is_text


@given(st.binary(max_size=60))
def test_what_is_no_event_raises_no_other_error(noise: bytes) -> None:
    with contextlib.suppress(ValueError):
        format_.read_event(noise)


def test_a_damaged_record_ends_the_file() -> None:
    whole = bytearray(format_.frame(b"one") + format_.frame(b"two") + format_.frame(b"three"))
    whole[len(format_.frame(b"one")) + 13] ^= 1
    assert list(format_.records(io.BytesIO(bytes(whole)))) == [b"one"]
    huge = struct.pack("<Q", 1 << 60)
    assert list(format_.records(io.BytesIO(huge + format_._masked(huge)))) == []


@pytest.mark.parametrize("length", [0, 127, 128, 300])
def test_long_tags_and_texts(length: int) -> None:
    event = format_.read_event(format_.scalar_event(0.0, 0, {"x" * length: 1.0}))
    assert event.values == {"x" * length: 1.0}
