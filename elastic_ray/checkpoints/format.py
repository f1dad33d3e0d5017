"""SHELL: captured states as automatic checkpoints: plain values and tensors only, so that loading runs no code."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elastic_ray.checkpoints.automatic import CorruptStateError, StateFile, read_file, write_file
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.state.tree import UnsafeStateError, hollow


def write_state(
    storage: RunStorage,
    trees: Mapping[str, Any],
    resume_point: ResumePoint,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> StateFile:
    """Write captured states (``SharedState.capture``) as an automatic checkpoint, wholly or not at all.

    Args:
        storage: the run.
        trees: states by name; their tensors do not change meanwhile.
        resume_point: where they stand.
        go_on: asked with every piece; once it says no, writing ends with ``InterruptedError``.

    Raises:
        UnsafeStateError: one of them holds more than tensors and plain values; the message names it.
    """
    for key, tree in trees.items():
        _check_plain(key, tree)
    return write_file(storage, resume_point, lambda stream: torch.save(dict(trees), stream), go_on=go_on)  # type: ignore[arg-type]


def read_state(storage: RunStorage, state: StateFile) -> dict[str, Any]:
    """The captured states of an automatic checkpoint, on the CPU. Nothing in it is executed (``weights_only``).

    Raises:
        CorruptStateError: it is not what was written.
    """
    data = read_file(storage, state)
    try:
        trees: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptStateError(f"{state.path} is no state of ours: {error}") from error
    if not isinstance(trees, dict):
        raise CorruptStateError(f"{state.path} is no state of ours, but a {type(trees).__name__}")
    return trees


def _check_plain(key: str, tree: Any) -> None:
    """Refuse a state that holds more than tensors and plain values, by its name."""
    stream = io.BytesIO()
    plain = hollow(tree)
    try:
        torch.save(plain, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        raise UnsafeStateError(f"state {key!r} holds something else than tensors and plain values: {why}") from error
