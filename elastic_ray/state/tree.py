"""Training state as a tree of tensors: taken apart, moved between ranks, and reassembled (torch)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.state.codec import (
    NotPlainError,
    SparseIndex,
    TensorIndex,
    decode,
    dtype_name,
    dtype_of,
    encode,
)
from elastic_ray.state.pieces import Path, alike, skeleton_of

# Tensors under this size travel in one message together.
_SMALL_BYTES = 1 << 18
_TAG = 7
# What is sent beside the tensors names each of them, in some 100 bytes: a peer that speaks of more than this is none.
_LARGEST_HEADER_BYTES = 1 << 28
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 64


class Stateful(Protocol):
    """Protocol for objects whose state every rank must share."""

    def capture(self) -> Any:
        """Return the state as nested dicts, lists and tuples of tensors and plain values; tensors are not copied."""

    def restore(self, tree: Any) -> None:
        """Restore a captured state; the tensors of ``tree`` belong to this object afterwards."""


@runtime_checkable
class SharedOut(Stateful, Protocol):
    """State that is divided among the ranks; :meth:`capture` returns only the part that all ranks share."""

    def capture_to_save(self) -> Any:
        """Return the complete state if this rank holds it, otherwise only the part common to all ranks."""

    def capture_to_keep(self) -> Any:
        """Return the state that all ranks hold, and this rank's part of the divided state."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuda: bool
    # dimensions as they lie in memory; () for the usual order. Results of linear algebra lie otherwise, and a product
    # with a matrix that lies otherwise is rounded otherwise
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Spec:
        """Return the specification of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_cuda, _order_of(tensor))

    def to_plain(self) -> tuple[Any, ...]:
        """Return the specification as plain values, for :meth:`from_plain`."""
        return self.shape, dtype_name(self.dtype), self.cuda, self.order

    @classmethod
    def from_plain(cls, told: Any) -> _Spec:
        """Return the specification that :meth:`to_plain` wrote. Raises ValueError if a peer sent anything else."""
        shape, dtype, cuda, order = told
        if type(shape) is not tuple or len(shape) > _MOST_DIMENSIONS or type(cuda) is not bool:
            raise ValueError(f"no tensor is like {told!r:.80}")
        if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
            raise ValueError(f"no tensor has the shape {shape!r:.80}")
        if type(order) is not tuple or (order and sorted(order) != list(range(len(shape)))):
            raise ValueError(f"no tensor has its dimensions in the order {order!r:.80}")
        return cls(shape, dtype_of(dtype), cuda, order)

    def empty(self) -> torch.Tensor:
        """Return a tensor of this specification, with any values."""
        places = self.order or tuple(range(len(self.shape)))
        lies = torch.empty(
            [self.shape[each] for each in places], dtype=self.dtype, device="cuda" if self.cuda else "cpu"
        )
        return lies.permute(sorted(range(len(places)), key=places.__getitem__))

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor of this specification as they lie in memory: a view, if it is dense."""
        return (tensor.permute(self.order) if self.order else tensor).contiguous().reshape(-1)


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor as they lie in memory; () for the usual order and for other tensors."""
    if tensor.is_contiguous() or tensor.layout != torch.strided:
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else ()


class UnsafeStateError(TypeError):
    """Error raised if a state contains values that could only be sent, or loaded, by running code."""


def check_plain(trees: Mapping[str, Any]) -> None:
    """Check that states can be sent to another rank, because they contain only tensors and plain values.

    Raises UnsafeStateError if a state contains other values; the message names it.
    """
    for key, tree in trees.items():
        try:
            encode(pack(tree)[0])
        except NotPlainError as error:
            raise UnsafeStateError(
                f"state {key!r} holds something other than tensors and plain values, and data from other workers "
                f"is never unpickled: {error}. Keep numbers, strings, lists, dicts and tensors in it, or leave that "
                "value out of its state_dict() and rebuild it in load_state_dict()"
            ) from error


def pack(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a tree into its skeleton, with indices in place of tensors, and the list of its tensors.

    Raises NotPlainError if the tree is nested too deeply or contains itself.
    """
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor, path: Path) -> TensorIndex:
        whole = tensor.detach()
        tensors.append(getattr(whole, "_local_tensor", whole))  # of what a unit has divided, this worker's part
        return TensorIndex(len(tensors) - 1)

    return skeleton_of(tree, add), tensors


def unpack(skeleton: Any, tensors: Sequence[Any]) -> Any:
    """Rebuild a tree from its skeleton and tensors, inverting :func:`pack`; stand-ins may replace dense tensors.

    Raises RuntimeError if the tensors do not form a sparse tensor in the skeleton.
    """

    def leaf(index: TensorIndex | SparseIndex) -> Any:
        if isinstance(index, TensorIndex):
            return tensors[index.index]
        parts = tensors[index.indices.index], tensors[index.values.index]
        # What a peer has sent may point anywhere: let torch look at it.
        return torch.sparse_coo_tensor(*parts, index.shape, check_invariants=True, is_coalesced=True)

    return _with_leaves(skeleton, leaf)


def _with_leaves(skeleton: Any, leaf: Callable[[TensorIndex | SparseIndex], Any]) -> Any:
    if isinstance(skeleton, (TensorIndex, SparseIndex)):
        return leaf(skeleton)
    if isinstance(skeleton, dict):
        return alike(type(skeleton), {key: _with_leaves(value, leaf) for key, value in skeleton.items()})
    if type(skeleton) in (list, tuple):
        return type(skeleton)(_with_leaves(value, leaf) for value in skeleton)
    return skeleton


def _bytes_of(tensor: torch.Tensor, spec: _Spec) -> torch.Tensor:
    return spec.flat(tensor).view(torch.uint8)


def send_state(communicator: Communicator, destination: int, trees: Mapping[str, Any]) -> None:
    """Send captured states to rank ``destination``, which must call :func:`receive_state`.

    Raises UnsafeStateError if a state contains more than tensors and plain values.
    """
    check_plain(trees)
    skeletons, tensors = pack(dict(trees))
    specs = [_Spec.of(tensor) for tensor in tensors]
    content = encode((skeletons, [spec.to_plain() for spec in specs]))
    header = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    works = [communicator.send(torch.tensor([header.numel()]), destination, _TAG)]
    works.append(communicator.send(header, destination, _TAG))
    # NCCL connects the two when they first exchange something, and fails if one of them is late.
    works.append(communicator.receive(torch.zeros(1), destination, _TAG))
    communicator.wait_all(works)
    works, kept = [], list[torch.Tensor]()  # gloo reads from these until the work is done
    with communicator.batch() as batched:
        for cuda in (False, True):
            both = zip(tensors, specs, strict=True)
            small = [_bytes_of(t, s) for t, s in both if s.cuda == cuda and s.nbytes < _SMALL_BYTES]
            if small and sum(piece.numel() for piece in small):
                kept.append(torch.cat(small))
                works.append(communicator.send(kept[-1], destination, _TAG))
        for tensor, spec in zip(tensors, specs, strict=True):
            if spec.nbytes >= _SMALL_BYTES:
                kept.append(_bytes_of(tensor, spec))
                works.append(communicator.send(kept[-1], destination, _TAG))
    communicator.wait_all(works, batched)


def receive_state(
    communicator: Communicator, source: int, own: Callable[[str], Any | None]
) -> tuple[dict[str, Any], set[str]]:
    """Receive the states that :func:`send_state` sent from rank ``source``.

    Args:
        own: Returns, for a key, this rank's captured tree if its tensors may be overwritten in place, otherwise None.

    Returns the trees, and the keys whose tensors were received in place (which need no restoring).

    Raises CommunicationFailedError if the peer is lost or sent invalid data; no state is adopted then.
    """
    with communicator.together():
        return _received(communicator, source, own)


def _received(
    communicator: Communicator, source: int, own: Callable[[str], Any | None]
) -> tuple[dict[str, Any], set[str]]:
    """Return what one rank sends; see :func:`receive_state`."""
    skeletons, specs = _receive_header(communicator, source)
    tensors, in_place = _destinations(skeletons, specs, own)
    communicator.wait_all([communicator.send(torch.zeros(1), source, _TAG)])
    works, small = [], []
    with communicator.batch() as batched:
        for cuda in (False, True):
            members = [i for i, s in enumerate(specs) if s.cuda == cuda and s.nbytes < _SMALL_BYTES]
            total = sum(specs[i].nbytes for i in members)
            if total:
                flat = torch.empty(total, dtype=torch.uint8, device="cuda" if cuda else "cpu")
                works.append(communicator.receive(flat, source, _TAG))
                small.append((members, flat))
        for tensor, spec in zip(tensors, specs, strict=True):
            if spec.nbytes >= _SMALL_BYTES:
                works.append(communicator.receive(_bytes_of(tensor, spec), source, _TAG))
    communicator.wait_all(works, batched)
    for members, flat in small:
        offset = 0
        for i in members:
            piece = flat[offset : offset + specs[i].nbytes].clone().view(specs[i].dtype)
            specs[i].flat(tensors[i]).copy_(piece)
            offset += specs[i].nbytes
    try:
        return unpack(skeletons, tensors), in_place
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise _refused(communicator, source, str(error)) from error


def _receive_header(communicator: Communicator, source: int) -> tuple[dict[str, Any], list[_Spec]]:
    """Return the skeletons of the states, and the specification of each tensor."""
    size = torch.zeros(1, dtype=torch.int64)
    communicator.wait_all([communicator.receive(size, source, _TAG)])
    if not 0 < int(size) <= _LARGEST_HEADER_BYTES:
        raise _refused(communicator, source, f"a header of {int(size)} bytes")
    header = torch.empty(int(size), dtype=torch.uint8)
    communicator.wait_all([communicator.receive(header, source, _TAG)])
    try:
        skeletons, told = decode(header.numpy().tobytes())
        if type(skeletons) is not dict or type(told) is not list or len(told) > _MOST_TENSORS:
            raise ValueError("neither states nor tensors")
        specs = [_Spec.from_plain(each) for each in told]
        if sorted(each.index for each in _tensor_indices(skeletons)) != list(range(len(specs))):
            raise ValueError("its tensors are not those that it names")
    except (ValueError, TypeError) as error:
        raise _refused(communicator, source, str(error)) from error
    return skeletons, specs


def _refused(communicator: Communicator, source: int, why: str) -> CommunicationFailedError:
    communicator.mark_broken()
    return CommunicationFailedError(f"rank {source} sent what is no state: {why}")


def _destinations(
    skeletons: dict[str, Any], specs: list[_Spec], own: Callable[[str], Any | None]
) -> tuple[list[torch.Tensor], set[str]]:
    """Return the destination of each tensor: this rank's own tensor if layout and shape agree, else new memory."""
    tensors: dict[int, torch.Tensor] = {}
    in_place: set[str] = set()
    for key, skeleton in skeletons.items():
        mine = own(key)
        if mine is None:
            continue
        my_skeleton, my_tensors = pack(mine)
        places = _tensor_indices(skeleton)
        if len(places) == len(_tensor_indices(my_skeleton)) == len(my_tensors) and all(
            specs[place.index] == _Spec.of(t) and t.is_contiguous() for place, t in zip(places, my_tensors, strict=True)
        ):
            in_place.add(key)
            tensors.update({place.index: t for place, t in zip(places, my_tensors, strict=True)})
    return [tensors[i] if i in tensors else spec.empty() for i, spec in enumerate(specs)], in_place


def _tensor_indices(skeleton: Any) -> list[TensorIndex]:
    """Return the indices of all tensors in a skeleton, in order."""
    if isinstance(skeleton, TensorIndex):
        return [skeleton]
    if isinstance(skeleton, SparseIndex):
        return [skeleton.indices, skeleton.values]
    if isinstance(skeleton, dict):
        return [each for value in skeleton.values() for each in _tensor_indices(value)]
    if isinstance(skeleton, (list, tuple)):
        return [each for value in skeleton for each in _tensor_indices(value)]
    return []


class ModuleState:
    """Parameters and buffers of a ``module``."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._divided: list[Any] = [  # by torch's fully_shard, which takes a second to import
            each for each in module.modules() if any(kind.__name__ == "FSDPModule" for kind in type(each).__mro__)
        ]

    def capture(self) -> Any:
        for each in self._divided:  # an evaluation leaves parameters whole
            each.reshard()
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def restore(self, tree: Any) -> None:
        mine = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in self.capture().items()}
        if mine.keys() != tree.keys():
            raise RuntimeError(
                "train_loop_per_worker must build the same model on every worker, but these parameters or buffers "
                f"differ: {sorted(mine.keys() ^ tree.keys())[:5]}. Layers that an epoch adds, such as adapters, are "
                "unknown to a worker that joins in it: make them before the first epoch, and freeze them until then"
            )
        grown = {name for name, _ in self.module.named_buffers()}  # as observers' buffers do with the first batch
        for name, tensor in mine.items():
            if tensor.shape != tree[name].shape and name not in grown:  # copy_ would spread the smaller one
                raise RuntimeError(
                    "train_loop_per_worker must build the same model on every worker, but parameter or buffer "
                    f"{name!r} is {tuple(tensor.shape)} here and {tuple(tree[name].shape)} there"
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                if 0 in tensor.stride():  # as expand() makes it: torch refuses to write into elements that are one
                    tensor.set_(tensor.clone(memory_format=torch.contiguous_format))
                if tensor.shape != tree[name].shape:
                    tensor.set_(tensor.new_empty(tree[name].shape))
                tensor.copy_(tree[name])


class OptimizerState:
    """Moments, step counts and parameter groups of an optimizer, keyed by parameter order."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.kind = type(optimizer).__name__

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


def as_divided(values: dict[str, Any], param: Any) -> dict[str, Any]:
    """Return optimizer state ``values`` of ``param``, with local parts as DTensors that are divided like ``param``."""
    part = getattr(param, "_local_tensor", None)
    if part is None:
        return values
    from torch.distributed.tensor import DTensor

    def divided(value: Any) -> Any:
        whole = isinstance(value, DTensor) or not isinstance(value, torch.Tensor)
        if whole or not value.dim() or value.shape != part.shape:  # a count of steps has no dimension
            return value
        return DTensor(value.to(part.device), param._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    return {key: divided(value) for key, value in values.items()}


class DictState:
    """State of any object with ``state_dict`` and ``load_state_dict``: schedulers, gradient scalers, metrics."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.kind = type(target).__name__

    def capture(self) -> Any:
        return self.target.state_dict()

    def restore(self, tree: Any) -> None:
        self.target.load_state_dict(tree)


_LENGTH_BYTES = 8


def to_bytes(tree: Any) -> bytes:
    """Return a tree as bytes; tensors are copied to the CPU.

    Raises NotPlainError if the tree contains anything other than tensors and plain values.
    """
    skeleton, tensors = pack(tree)
    header = encode((encode(skeleton), [(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors]))
    parts = [len(header).to_bytes(_LENGTH_BYTES, "big"), header]
    parts += [tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return b"".join(parts)


def from_bytes(content: bytes) -> Any:
    """Return the tree that :func:`to_bytes` wrote, with its tensors in new memory on the CPU.

    Raises ValueError if the bytes, which a peer may have sent, do not encode a tree.
    """
    size = int.from_bytes(content[:_LENGTH_BYTES], "big")
    begin = _LENGTH_BYTES + size
    try:
        plain, told = decode(content[_LENGTH_BYTES:begin])
        tensors = []
        for shape, name in told:
            dtype = dtype_of(name)
            end = begin + math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or end > len(content):
                raise ValueError("a tensor is not all there")
            flat = torch.zeros(end - begin, dtype=torch.uint8)
            if end > begin:
                flat[:] = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.uint8)
            tensors.append(flat.view(dtype).reshape(shape))
            begin = end
        if begin != len(content):
            raise ValueError("something is left")
        return unpack(decode(plain), tensors)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise ValueError(f"a peer has sent an invalid value: {error}") from error


def on_device_of(tree: Any, own: Any) -> Any:
    """Return ``tree`` with its tensors moved to the device that holds the tensors in ``own``."""
    device = next((tensor.device for tensor in pack(own)[1]), torch.device("cpu"))
    if device.type == "cpu":
        return tree
    skeleton, tensors = pack(tree)
    return unpack(skeleton, [tensor.to(device) for tensor in tensors])
