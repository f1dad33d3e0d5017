"""The training state as a tree of tensors: taken apart, moved between ranks, put together (torch)."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from elastic_ray.membership.rendezvous import Communicator

# Tensors under this size travel in one message together.
_SMALL_BYTES = 1 << 18
_TAG = 7


class Stateful(Protocol):
    """Something whose state every rank must share."""

    def capture(self) -> Any:
        """The state as nested dicts, lists and tuples of tensors and plain values; tensors are not copied."""

    def restore(self, tree: Any) -> None:
        """Take over a captured state; the tree's tensors belong to the callee from now on."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the n-th tensor in a packed tree."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuda: bool

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


def pack(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a tree into its skeleton (picklable, small) and its tensors in order."""
    tensors: list[torch.Tensor] = []

    def visit(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            tensors.append(node.detach())
            return _Slot(len(tensors) - 1)
        if isinstance(node, Mapping):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)) and type(node) in (list, tuple):
            return type(node)(visit(value) for value in node)
        return node

    return visit(tree), tensors


def unpack(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    if isinstance(skeleton, _Slot):
        return tensors[skeleton.index]
    if isinstance(skeleton, dict):
        return {key: unpack(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, (list, tuple)):
        return type(skeleton)(unpack(value, tensors) for value in skeleton)
    return skeleton


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def send_state(communicator: Communicator, destination: int, trees: Mapping[str, Any]) -> None:
    """Send captured states to one rank; the other side calls :func:`receive_state`."""
    skeletons, tensors = pack(dict(trees))
    specs = [_Spec(tuple(t.shape), t.dtype, t.is_cuda) for t in tensors]
    header = torch.frombuffer(bytearray(pickle.dumps((skeletons, specs))), dtype=torch.uint8)
    works = [communicator.send(torch.tensor([header.numel()]), destination, _TAG)]
    works.append(communicator.send(header, destination, _TAG))
    kept = [header]  # gloo reads from these until the work is done
    for cuda in (False, True):
        small = [
            _bytes_of(t) for t, s in zip(tensors, specs, strict=True) if s.cuda == cuda and s.nbytes < _SMALL_BYTES
        ]
        if small and sum(piece.numel() for piece in small):
            kept.append(torch.cat(small))
            works.append(communicator.send(kept[-1], destination, _TAG))
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.nbytes >= _SMALL_BYTES:
            kept.append(_bytes_of(tensor))
            works.append(communicator.send(kept[-1], destination, _TAG))
    communicator.wait_all(works)


def receive_state(
    communicator: Communicator, source: int, own: Callable[[str], Any | None]
) -> tuple[dict[str, Any], set[str]]:
    """Receive what :func:`send_state` sent.

    Args:
        communicator: the group.
        source: the sending rank.
        own: for a key, this rank's captured tree when its tensors may be overwritten in place, else None.

    Returns:
        The trees, and the keys whose tensors were received in place (nothing is left to restore there).
    """
    size = torch.zeros(1, dtype=torch.int64)
    communicator.wait_all([communicator.receive(size, source, _TAG)])
    header = torch.empty(int(size), dtype=torch.uint8)
    communicator.wait_all([communicator.receive(header, source, _TAG)])
    skeletons, specs = pickle.loads(header.numpy().tobytes())
    tensors, in_place = _destinations(skeletons, specs, own)
    works, small = [], []
    for cuda in (False, True):
        members = [i for i, s in enumerate(specs) if s.cuda == cuda and s.nbytes < _SMALL_BYTES]
        total = sum(specs[i].nbytes for i in members)
        if total:
            flat = torch.empty(total, dtype=torch.uint8, device="cuda" if cuda else "cpu")
            works.append(communicator.receive(flat, source, _TAG))
            small.append((members, flat))
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.nbytes >= _SMALL_BYTES:
            works.append(communicator.receive(tensor.reshape(-1).view(torch.uint8), source, _TAG))
    communicator.wait_all(works)
    for members, flat in small:
        offset = 0
        for i in members:
            piece = flat[offset : offset + specs[i].nbytes].clone().view(specs[i].dtype)
            tensors[i].copy_(piece.reshape(specs[i].shape))
            offset += specs[i].nbytes
    return unpack(skeletons, tensors), in_place


def _destinations(
    skeletons: dict[str, Any], specs: list[_Spec], own: Callable[[str], Any | None]
) -> tuple[list[torch.Tensor], set[str]]:
    """Where each tensor goes: into this rank's own where layout and shape agree, into fresh memory elsewhere."""
    tensors: dict[int, torch.Tensor] = {}
    in_place: set[str] = set()
    for key, skeleton in skeletons.items():
        mine = own(key)
        if mine is None:
            continue
        my_skeleton, my_tensors = pack(mine)
        slots = _slots(skeleton)
        if len(slots) == len(_slots(my_skeleton)) == len(my_tensors) and all(
            specs[slot.index] == _Spec(tuple(t.shape), t.dtype, t.is_cuda) and t.is_contiguous()
            for slot, t in zip(slots, my_tensors, strict=True)
        ):
            in_place.add(key)
            tensors.update({slot.index: t for slot, t in zip(slots, my_tensors, strict=True)})
    device = {False: "cpu", True: "cuda"}
    return [
        tensors[i] if i in tensors else torch.empty(s.shape, dtype=s.dtype, device=device[s.cuda])
        for i, s in enumerate(specs)
    ], in_place


def _slots(skeleton: Any) -> list[_Slot]:
    if isinstance(skeleton, _Slot):
        return [skeleton]
    if isinstance(skeleton, dict):
        return [slot for value in skeleton.values() for slot in _slots(value)]
    if isinstance(skeleton, (list, tuple)):
        return [slot for value in skeleton for slot in _slots(value)]
    return []


class ModuleState:
    """Parameters and buffers of a module."""

    in_place = True

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def capture(self) -> Any:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def restore(self, tree: Any) -> None:
        mine = self.capture()
        if mine.keys() != tree.keys():
            raise RuntimeError(
                "train_loop_per_worker must build the same model on every worker, but these parameters or buffers "
                f"differ: {sorted(mine.keys() ^ tree.keys())[:5]}"
            )
        for name, tensor in mine.items():
            if tensor.shape != tree[name].shape:  # copy_ would spread the smaller one over the larger
                raise RuntimeError(
                    "train_loop_per_worker must build the same model on every worker, but parameter or buffer "
                    f"{name!r} is {tuple(tensor.shape)} here and {tuple(tree[name].shape)} there"
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(tree[name])


class OptimizerState:
    """Moments, step counts and parameter groups of an optimizer, keyed by parameter order."""

    in_place = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def capture(self) -> Any:
        state = self._optimizer.state
        return {
            "state": {i: dict(state[p]) for i, p in enumerate(self._parameters()) if p in state},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups],
        }

    def restore(self, tree: Any) -> None:
        parameters = self._parameters()
        known = [int(index) for index in tree["state"]]
        if len(tree["groups"]) != len(self._optimizer.param_groups) or max(known, default=-1) >= len(parameters):
            raise RuntimeError(
                "train_loop_per_worker must build the same optimizer on every worker, but its parameters are "
                f"{len(parameters)} in {len(self._optimizer.param_groups)} groups here, and others there"
            )
        self._optimizer.state.clear()
        for index, values in tree["state"].items():
            self._optimizer.state[parameters[index]] = values
        for group, values in zip(self._optimizer.param_groups, tree["groups"], strict=True):
            group.update(values)


class DictState:
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, gradient scalers, metrics."""

    in_place = False

    def __init__(self, target: Any) -> None:
        self._target = target

    def capture(self) -> Any:
        return self._target.state_dict()

    def restore(self, tree: Any) -> None:
        self._target.load_state_dict(tree)
