"""Reading TensorBoard's files, for the tests beside it: by TensorBoard's own reader where that is installed."""

from __future__ import annotations

import collections
import importlib.util
from pathlib import Path
from typing import Any

from elastic_ray.observe.trackers import tensorboard

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None

Points = list[tuple[int, float]]


def scalars(folder: Path) -> dict[str, Points]:
    """Step and value of each point of each series, as TensorBoard shows them."""
    if not HAS_TENSORBOARD:
        return own_scalars(folder)
    accumulator = _accumulator(folder)
    shown = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
    shown |= {  # some versions show a scalar as a tensor
        tag: [(e.step, float(e.tensor_proto.float_val[0])) for e in accumulator.Tensors(tag)]
        for tag in accumulator.Tags()["tensors"]
        if accumulator.Tensors(tag) and accumulator.Tensors(tag)[0].tensor_proto.float_val
    }
    shown = {tag: points for tag, points in shown.items() if points}
    assert shown == own_scalars(folder), "TensorBoard shows what was written"
    return shown


def own_scalars(folder: Path) -> dict[str, Points]:
    """The same by our own reader."""
    found: dict[str, Points] = collections.defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        with path.open("rb") as stream:
            for record in tensorboard.records(stream):
                event = tensorboard.read_event(record)
                if event.restarts:
                    for tag, points in found.items():
                        found[tag] = [point for point in points if point[0] < event.step]
                for tag, value in event.values.items():
                    found[tag].append((event.step, value))
    return {tag: points for tag, points in found.items() if points}


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Step and text of each mark, as tensorboardX's protocol buffers have them."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        with path.open("rb") as stream:
            for record in tensorboard.records(stream):
                event = Event.FromString(record)
                if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                    for tag, marks in found.items():
                        found[tag] = [mark for mark in marks if mark[0] < event.step]
                for value in event.summary.value:
                    if value.metadata.plugin_data.plugin_name == "text":
                        found[value.tag].append((event.step, value.tensor.string_val[0].decode()))
    return {tag: marks for tag, marks in found.items() if marks}


def _accumulator(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator
