"""Accelerate's collectives over the workers of an elastic job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import recursively_apply

import elastic_ray as er
from elastic_ray.loop.api import current_session


class SavesAlone:
    """Mixin with a context (``_alone``) where this worker saves without communicating with other workers."""

    _saves_alone = False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Skip communication with other workers inside the block."""
        self._saves_alone = True
        try:
            yield
        finally:
            self._saves_alone = False


class Collectives(SavesAlone, accelerate.Accelerator):
    """Accelerate's collectives over all workers of the job, since accelerate itself sees each worker as one process."""

    flag_tensor: Any

    def gather(self, tensor: Any) -> Any:
        """Return each tensor, gathered from all workers and concatenated along dimension 0; its size may differ."""
        leaves: list[Any] = []
        recursively_apply(leaves.append, tensor, test_type=_every_leaf)
        parts = map(_joined, zip(*er.all_gather(leaves), strict=True))
        return recursively_apply(lambda _: next(parts), tensor, test_type=_every_leaf)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as :meth:`gather` does, or join lists of other objects; no duplicates are dropped, as none exist."""
        if use_gather_object or (isinstance(input_data, list) and not _all_tensors(input_data)):
            return [each for part in er.all_gather(list(input_data)) for each in part]
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Return each tensor reduced over all workers (sum, mean or max), times `scale`; unchanged for "none"."""
        if reduction not in ("sum", "mean", "max", "none"):
            raise ValueError(f"reduction must be 'sum', 'mean', 'max' or 'none', but got {reduction!r}")
        if reduction == "none":
            return tensor
        return recursively_apply(lambda each: er.all_reduce(each, reduction) * scale, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return each tensor, padded along ``dim`` with ``pad_index`` to the longest length on any worker."""

        def padded(each: torch.Tensor) -> torch.Tensor:
            if dim >= each.dim():
                return each
            missing = int(er.all_reduce(each.shape[dim], "max")) - each.shape[dim]
            shape = [*each.shape[:dim], missing, *each.shape[dim + 1 :]]
            parts = [each, each.new_full(shape, pad_index)]
            return torch.cat(parts[::-1] if pad_first else parts, dim)

        return recursively_apply(padded, tensor)

    def wait_for_everyone(self) -> None:
        """Wait for all workers, as ``elastic_ray.barrier`` does; return at once while rank 0 saves a state."""
        if not self._saves_alone:
            er.barrier()

    def check_trigger(self) -> bool:
        """True if any worker has called ``set_trigger`` since the last check that returned True."""
        own = float(self.flag_tensor.item()) if self.flag_tensor is not None else 0.0
        if er.all_reduce(own, "max") == 0:
            return False
        self.flag_tensor = None
        return True

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that makes rank 0 run the block before the other ranks do."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that makes each node's first worker run the block before the other workers do."""
        return self._first(self.is_local_main_process)

    @contextlib.contextmanager
    def _first(self, main: bool) -> Iterator[None]:
        """Run the block on workers with ``main=True`` before the other workers."""
        if not main:
            self.wait_for_everyone()
        yield
        if main:
            self.wait_for_everyone()


def _every_leaf(leaf: Any) -> bool:
    return True


def _all_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return all(map(_all_tensors, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(_all_tensors, tree))
    return isinstance(tree, torch.Tensor)


def _joined(parts: tuple[Any, ...]) -> Any:
    """Concatenate tensors from all ranks; return values of other types as a list."""
    if not isinstance(parts[0], torch.Tensor):
        return list(parts)
    return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in parts])


_FILE = "elastic_ray_position.json"


def write_position(folder: Path) -> None:
    """Atomically write the current position in the data into a checkpoint folder."""
    part = folder / f"{_FILE}.part"
    part.write_text(json.dumps(current_session().resume_point().to_json()))
    part.replace(folder / _FILE)


def read_position(folder: Path) -> Any | None:
    """Return the data position stored in a checkpoint, or None if another program wrote the checkpoint."""
    file = folder / _FILE
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged, so the checkpoint's position in the data is unknown: {error}. Use "
            "another checkpoint, or delete the file to restart the epoch"
        ) from error
