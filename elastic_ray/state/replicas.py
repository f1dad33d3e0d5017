"""Comparison of replicas: checks that all ranks hold bit-identical parameters and train them identically.

A fingerprint of the parameters, and of how they are trained, is sent with announcements from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.layout import Facts, ReplicasDifferError, digest

_EARLY = (1, 10)  # what goes wrong in every step is not to be found out a hundred steps later
_EVERY = 100
# Passes of a few steps need no check each: as many steps in between as this part of all before, at most _EVERY.
_PART_OF_ALL = 4
_NAMED = 5


class Replicas:
    """Wrapped models of one rank, for comparison with the other ranks.

    When a check is due depends only on numbers that all ranks share, so that all ranks check at the same point.
    """

    def __init__(self, drift: Callable[[], bool] = lambda: False) -> None:
        self._drift = drift
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._checked, self._started = -1, 0
        self.next_check = 0  # no check is due before so many steps in reductions of gradients, unless asked for
        self._left = 0, 0
        self._held = 0  # a number for the parameters' memory at the end of the last pass
        # by the model's id: its mode in its last optimizer step; later code may change it on one rank alone
        self.trained: dict[int, bool] = {}

    def add(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Add a model and the optimizer that steps it.

        Raises ValueError if the model shares parameters with a previously added model.
        """
        known = {id(p): number for number, other in enumerate(self._modules) for p in other.parameters()}
        for name, p in module.named_parameters():
            if id(p) in known:
                raise ValueError(
                    f"module must be wrapped once, with all that shares parameters with it, but its {name} belongs to "
                    f"model {known[id(p)]} of this train loop, which AdaptiveDataParallel has wrapped already: its "
                    "gradients would be reduced twice. Put models that share parameters into one torch.nn.Module"
                )
        self._modules.append(module)
        self._optimizers.append(optimizer)

    @staticmethod
    def _compared(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters that every rank holds completely, leaving out sharded models' parameters."""
        return [(name, p) for name, p in module.named_parameters() if not hasattr(p, "to_local")]

    def start(self, steps: int) -> None:
        """Enter a group after ``steps`` steps.

        The previous group's checks and recorded training modes are discarded, because joining ranks lack them.
        """
        self._checked, self.next_check, self._started = -1, 0, steps
        self.trained.clear()

    def due(self, steps: int, *, at_end: bool = False, always: bool = False) -> bool:
        """True if ranks must compare all parameters after ``steps`` steps: after 1 and 10 in a group, and every 100.

        Also True if ``always`` is True or, when a pass ends (``at_end``), if the last comparison was many steps ago.
        """
        late = at_end and steps - self._checked >= min(_EVERY, self._checked // _PART_OF_ALL)
        due = always or late or steps - self._started in _EARLY or steps % _EVERY == 0
        return due and steps != self._checked and bool(self._modules) and not self._drift()

    def end_pass(self) -> None:
        """Record the parameters after a pass's last step, before user code may change them on one rank alone."""
        self._held = self._memory()

    def _memory(self) -> int:
        """Return a hash that changes with every write to parameters."""
        parameters = (p for module in self._modules for _, p in self._compared(module))
        return hash(tuple((p.data_ptr(), p._version) for p in parameters))

    def leave(self, steps: int, loader_steps: int) -> None:
        """Record the parameters' fingerprint when the loop over epochs ends, before code on one rank changes them.

        Nothing is recorded if code in the last epoch has already changed them after its steps.
        """
        if self.due(steps, always=True) and self._held == self._memory():
            self._left = loader_steps, digest(self._sums()) or 1

    def left_at(self, loader_steps: int) -> int:
        """Return the fingerprint recorded when the loop ended if that was after ``loader_steps`` steps; otherwise 0."""
        at, fingerprint = self._left
        return fingerprint if at == loader_steps else 0

    def fingerprint(self, steps: int) -> int:
        """Return a fingerprint, never 0, of all parameters and of how they are trained, after ``steps`` steps."""
        self._checked, every = steps, (steps // _EVERY + 1) * _EVERY
        self.next_check = min(each for each in (*(self._started + early for early in _EARLY), every) if each > steps)
        return digest((self._sums(), self._settings().fingerprint)) or 1

    def compare(self, communicator: Communicator, fingerprints: Sequence[int]) -> None:
        """Compare the fingerprints announced by all ranks; if they differ, jointly find the tensor that differs.

        Raises:
            CommunicationFailedError: The group broke during the call.
            ReplicasDifferError: The replicas differ; raised on every rank.
        """
        if len(set(fingerprints)) == 1:
            return
        settings = self._settings()
        own = [sum(len(self._compared(module)) for module in self._modules), settings.fingerprint]
        told = communicator.gather_ints(own)
        if len({row[0] for row in told}) > 1:
            raise ReplicasDifferError("the ranks' models have different numbers of parameters by now")
        if text := settings.difference(communicator, [row[1] for row in told]):
            raise ReplicasDifferError(
                f"every rank must train its replica in the same way, but after {self._checked} steps {text}. Freeze "
                "and unfreeze, call train() and eval(), and set options of the optimizer alike on every rank, in the "
                "same step: derive it from numbers that all ranks share, such as get_context().get_global_step(), not "
                "from rank, clock, local samples, or a count of your own, which begins at 0 on a worker that joins"
            )
        names = [f"{prefix}{name}" for (prefix, module) in self._named_modules() for name, _ in self._compared(module)]
        everyone = communicator.gather_ints(self._sums())
        differing = [name for index, name in enumerate(names) if len({row[index] for row in everyone}) > 1]
        if not differing:
            return
        common = max(set(fingerprints), key=lambda value: (fingerprints.count(value), -fingerprints.index(value)))
        others = [str(rank) for rank, value in enumerate(fingerprints) if value != common]
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise ReplicasDifferError(
            f"rank{'s' if len(others) > 1 else ''} {', '.join(others)} of {communicator.world_size} no longer hold"
            f"{'' if len(others) > 1 else 's'} the same parameters as the others after {self._checked} steps: "
            f"{', '.join(differing[:_NAMED])}{more}. Everything that changes parameters must do so alike on every "
            "rank: learning rates, noise and in-place changes that follow from rank, clock or unseeded random numbers "
            "do not, nor do gradients that are changed on one rank alone after backward(), nor what follows from a "
            "count of your own, such as enumerate's, which begins at 0 on a worker that joins in the middle of a pass: "
            "get_context().get_global_step() does not"
        )

    def _named_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return the models with their parameter name prefixes."""
        several = len(self._modules) > 1
        return [(f"model {number}: " if several else "", each) for number, each in enumerate(self._modules)]

    def _settings(self) -> Facts:
        """Return facts about how the models are trained: trainable parameters, training modes, optimizer options."""
        found: dict[str, Any] = {}
        for (prefix, module), optimizer in zip(self._named_modules(), self._optimizers, strict=True):
            for name, p in module.named_parameters():
                found[f"{prefix}{name}.requires_grad"] = p.requires_grad
            trains = self.trained.get(id(module)) is module.training  # else one rank may be about to evaluate
            for name, each in module.named_modules():
                found[f"{prefix}{name or 'model'}.training"] = each.training if trains else None
            for number, group in enumerate(optimizer.param_groups):
                for option, value in group.items():
                    told = len(value) if option == "params" else _plain(value)
                    found[f"{prefix}optimizer.param_groups[{number}][{option!r}]"] = told
        return Facts(facts=found)

    def _sums(self) -> list[int]:
        """Return the sum of each parameter's bits."""
        with torch.no_grad():
            sums = [sum_of_bits(p) for module in self._modules for _, p in self._compared(module)]
        by_device: dict[torch.device, list[int]] = {}
        for device in {each.device for each in sums}:
            by_device[device] = torch.stack([each for each in sums if each.device == device]).tolist()
        found = {device: iter(values) for device, values in by_device.items()}
        return [next(found[each.device]) for each in sums]


def _plain(value: Any) -> Any:
    """Return an optimizer's option as a plain value; None if it cannot be compared."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, (bool, int, float, str)) else repr(value) if value is None else None


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the wrapping integer sum of a tensor's memory, which is the same on every device."""
    return integers(tensor).sum(dtype=torch.int64)


_ROW = 8  # integers that are added up before they are weighed by their place
_LARGE_BYTES, _LARGE_ROW = 1 << 16, 64


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a captured state with their paths, which start with ``name``."""
    if isinstance(tree, torch.Tensor):
        yield name, getattr(tree, "_local_tensor", tree)  # of what a unit has divided, this worker's part
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}/{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{name}/{index}")


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as a flat integer tensor, in the order of its elements."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values()
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if flat.numel() and flat.numel() * size % 8 == 0:
        if flat.storage_offset() * size % 8:
            flat = flat.clone()  # a part of a larger tensor, which cannot be read as other integers where it lies
        return flat.view(torch.int64)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _rows(values: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Return the sum of each row of ``length`` integers, and of those left over; it wraps around on every device."""
    whole = values.numel() // length * length
    rows = [values[:whole].view(-1, length).sum(1, dtype=torch.int64)]
    return rows if whole == values.numel() else [*rows, values[whole:].sum(dtype=torch.int64).reshape(1)]


def _fold(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one integer that depends on the rows' sums and their order."""
    together = torch.cat(list(rows))
    return (together * (2 * torch.arange(together.numel(), device=together.device) + 1)).sum()


def digest_of_tensors(tensors: Sequence[torch.Tensor]) -> int:
    """Return a 40-bit digest of the contents of ``tensors`` and their order; 0 without tensors.

    Small tensors are folded together, and so are sums of the rows of large ones, so that a model with many parameters
    needs few operations. The order of values within a row is not seen.
    """
    together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    large: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.numel() * tensor.element_size() < _LARGE_BYTES:
            together.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().reshape(-1))
        else:
            large.setdefault(tensor.device, []).extend(_rows(integers(tensor), _LARGE_ROW))
    folded = [_fold(rows) for rows in large.values()]
    folded += [_fold(_rows(integers(torch.cat(small)), _ROW)) for small in together.values()]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in folded:
        by_device.setdefault(each.device, []).append(each)
    return (digest([torch.stack(each).tolist() for each in by_device.values()]) or 1) if folded else 0


def different_ranks(told: Sequence[int], joined: Sequence[bool]) -> tuple[int, ...]:
    """Return the ranks whose digest in ``told`` differs from the most common among ranks that have not just joined."""
    members = [each for each, late in zip(told, joined, strict=True) if not late] or list(told)
    common = max(set(members), key=lambda value: (members.count(value), -members.index(value)))
    return tuple(rank for rank, value in enumerate(told) if value != common)


def difference(communicator: Communicator, tensors: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> str:
    """Return a text that says which tensor is the first to differ between ranks, and how; called on every rank.

    Raises CommunicationFailedError if the group breaks.
    """
    names = list(tensors)
    others = next(rank for rank in range(communicator.world_size) if rank not in ranks)
    plural, rest = "s" if len(ranks) > 1 else "", communicator.world_size - len(ranks)
    sides = f"rank{plural} {', '.join(map(str, ranks))} and the other {rest}"
    counts = [row[0] for row in communicator.gather_ints([len(names)])]
    if len(set(counts)) > 1:
        return f"{sides} hold different numbers of tensors ({counts[ranks[0]]} and {counts[others]})"
    sums = communicator.gather_ints([digest_of_tensors([each]) for each in tensors.values()])
    first = next((n for n, name in enumerate(names) if sums[ranks[0]][n] != sums[others][n]), None)
    what = "values whose order differs" if first is None else f"different values in {names[first]}"
    return f"{sides} hold {what}"


def check_alike(ranks: Sequence[int], joined: Sequence[bool], told: str, step: int) -> None:
    """Raise ReplicasDifferError, with the text ``told``, unless all differing ``ranks`` have just ``joined``."""
    if any(not joined[rank] for rank in ranks):
        raise ReplicasDifferError(
            f"all ranks must hold the same state before a group starts, but after {step} steps {told}. Code that "
            "changes parameters or optimizer state must do the same on every rank"
        )
