"""Accelerate's collectives, of an elastic job's workers."""

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
    """Mixin whose ``_saves_alone`` is True within :meth:`_alone`."""

    _saves_alone = False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Enter a context in which calls involve no other worker."""
        self._saves_alone = True
        try:
            yield
        finally:
            self._saves_alone = False


class Collectives(SavesAlone, accelerate.Accelerator):
    """Accelerate's processes are one here, each worker's; these go through elastic-ray's collectives."""

    flag_tensor: Any

    def gather(self, tensor: Any) -> Any:
        """Tensors of all workers, one after the other; their first sizes may differ."""
        leaves: list[Any] = []
        recursively_apply(leaves.append, tensor, test_type=_every_leaf)
        parts = map(_joined, zip(*er.all_gather(leaves), strict=True))
        return recursively_apply(lambda _: next(parts), tensor, test_type=_every_leaf)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as :meth:`gather`, because no sample occurs twice; lists of other values are concatenated."""
        if use_gather_object or (isinstance(input_data, list) and not _all_tensors(input_data)):
            return [each for part in er.all_gather(list(input_data)) for each in part]
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Sum, mean or maximum over all workers of each tensor in it."""
        if reduction not in ("sum", "mean", "max", "none"):
            raise ValueError(f"reduction must be 'sum', 'mean', 'max' or 'none', but got {reduction!r}")
        if reduction == "none":
            return tensor
        return recursively_apply(lambda each: er.all_reduce(each, reduction) * scale, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Each tensor as long on ``dim`` as the longest of any worker's."""

        def padded(each: torch.Tensor) -> torch.Tensor:
            if dim >= each.dim():
                return each
            missing = int(er.all_reduce(each.shape[dim], "max")) - each.shape[dim]
            shape = [*each.shape[:dim], missing, *each.shape[dim + 1 :]]
            parts = [each, each.new_full(shape, pad_index)]
            return torch.cat(parts[::-1] if pad_first else parts, dim)

        return recursively_apply(padded, tensor)

    def wait_for_everyone(self) -> None:
        """Wait for all workers as ``elastic_ray.barrier``; return at once while rank 0 saves a state."""
        if not self._saves_alone:
            er.barrier()

    def check_trigger(self) -> bool:
        """True if any worker has called ``set_trigger``."""
        own = float(self.flag_tensor.item()) if self.flag_tensor is not None else 0.0
        if er.all_reduce(own, "max") == 0:
            return False
        self.flag_tensor = None
        return True

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Rank 0 runs the block before the others."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The first worker of each node runs the block before the others."""
        return self._first(self.is_local_main_process)

    @contextlib.contextmanager
    def _first(self, main: bool) -> Iterator[None]:
        """Workers that are ``main`` run the block before the others."""
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
    """Concatenate all ranks' tensors; other values become a list."""
    if not isinstance(parts[0], torch.Tensor):
        return list(parts)
    return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in parts])


_FILE = "elastic_ray_position.json"


def write_position(folder: Path) -> None:
    """Put the present place into a checkpoint's folder, as a whole or not at all."""
    part = folder / f"{_FILE}.part"
    part.write_text(json.dumps(current_session().resume_point().to_json()))
    part.replace(folder / _FILE)


def read_position(folder: Path) -> Any | None:
    """The place of a checkpoint; None where it has none, being of another program.

    Raises ValueError: the file is damaged.
    """
    file = folder / _FILE
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged, so that it is not known where the checkpoint stands in the data: {error}. Take "
            "another checkpoint; or delete the file, and the epoch begins anew"
        ) from error
