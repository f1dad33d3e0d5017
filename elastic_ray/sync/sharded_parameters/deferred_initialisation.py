"""Deferred initialisation of a model built on the meta device, one module at a time (torch).

At any time, only the parameters held directly by one module are in memory in full. Torch's recipe (``to_empty`` on the
whole model, then ``reset_parameters`` on sharded parameters) would materialise all of them, and draw different numbers
for each group size.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from elastic_ray.sync.sharded_parameters.fsdp_fields import ShardedParam

_ONE_AT_A_TIME = threading.Lock()  # torch's generators are the process's


@dataclasses.dataclass(frozen=True, slots=True)
class _Initialisation:
    """Initialisation of one module: its function, device and buffers."""

    function: Callable[[nn.Module], None] | None  # that it is given to; None for its own ``reset_parameters``
    device: torch.device  # where its parameters are to be
    buffers: tuple[str, ...]  # names of those that were on the meta device


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Initialisation] = weakref.WeakKeyDictionary()


def prepare(module: nn.Module, function: Callable[[nn.Module], None] | None, device: torch.device) -> None:
    """Find the initialiser of each submodule on the meta device, and allocate the submodule's buffers.

    Args:
        function: Initialises the tensors held directly by a module; None uses the modules' ``reset_parameters``.

    Raises ValueError if a module has no ``reset_parameters``, and no function is given.
    """
    found: dict[nn.Module, _Initialisation] = {}
    covered: set[Tensor] = set()
    lacking: list[tuple[str, nn.Module, dict[str, Tensor]]] = []
    for name, each in module.named_modules():
        own = {key: p for key, p in each._parameters.items() if p is not None and p.is_meta}
        buffers = {key: b for key, b in each._buffers.items() if b is not None and b.is_meta}
        if not own and not buffers:
            continue
        if function is None and not callable(getattr(each, "reset_parameters", None)):
            lacking.append((name, each, {**own, **buffers}))
            continue
        covered.update(own.values())
        found[each] = _Initialisation(function, device, tuple(buffers))
    for name, each, tensors in lacking:  # tied parameters are made where another module holds them
        if missing := [key for key, value in tensors.items() if value not in covered]:
            where = f"{name} ({type(each).__name__})" if name else type(each).__name__
            raise ValueError(
                f"{where} holds {', '.join(missing)} on the meta device, and has no reset_parameters() to fill it: "
                "define one, or call fully_shard(..., param_init_fn=...) with a function that fills what the module "
                "that it is given holds itself"
            )
    for each, how in found.items():
        each._buffers.update({key: _blank(each._buffers[key], device) for key in how.buffers})
    _KNOWN.update(found)


def initialise(
    module: nn.Module, params: Sequence[ShardedParam], seed: int, keep: Callable[[int, Tensor], None]
) -> None:
    """Initialise a model's parameters and buffers as if it had been built after ``torch.manual_seed(seed)``.

    The values are the same if the model's constructor creates modules in the order of ``modules()``, and draws random
    numbers only in ``reset_parameters``.

    Args:
        seed: Seed for torch's generators, whose states are restored afterwards.
        keep: Called with the position and the full value of each parameter; the value is freed afterwards.

    Raises ValueError if a module's initialisation does not fill its tensors, or changes their shapes.
    """
    places = {id(each.param): place for place, each in enumerate(params)}
    cuda = sorted({each.local.device.index for each in params if each.local.device.type == "cuda"})
    made: set[int] = set()
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=cuda), torch.no_grad():
        # Not torch.manual_seed(), which would begin those of other devices anew, too.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in cuda)):
            generator.manual_seed(seed)
        for name, each in module.named_modules():
            if each in _KNOWN:
                for place, value in _made(name or type(each).__name__.removeprefix("FSDP"), each, places):
                    if place not in made:  # a tied parameter is that of the first module that holds it
                        keep(place, value)
                        made.add(place)
    for each in params:
        if each.param.is_floating_point() and not each.local.isnan().all():
            raise ValueError(
                f"the initialisation of a module must write only into what the module holds itself, but one wrote into "
                f"{each.name} of another: have each module fill its own parameters"
            )


def _made(name: str, module: nn.Module, places: Mapping[int, int]) -> Iterator[tuple[int, Tensor]]:
    """Initialise one module; yield the positions and full values of its own parameters."""
    how = _KNOWN[module]
    shards = {key: p for key, p in module._parameters.items() if p is not None and id(p) in places}
    whole = {key: nn.Parameter(_blank(p, how.device), requires_grad=p.requires_grad) for key, p in shards.items()}
    before = {key: (module._buffers[key], _version(module._buffers[key])) for key in how.buffers}
    module._parameters.update(whole)
    try:
        how.function(module) if how.function is not None else module.reset_parameters()  # type: ignore[operator]
        made = {key: module._parameters[key] for key in shards}
    except Exception as error:
        error.add_note(f"while {name} was initialised, which may write only into what it holds itself")
        raise
    finally:
        module._parameters.update(shards)
    for key, value in made.items():
        if value is None or value.shape != shards[key].shape:
            there = None if value is None else tuple(value.shape)
            raise ValueError(
                f"the initialisation of {name} must leave {key} its shape {tuple(shards[key].shape)}, but left {there}"
            )
        if _is_blank(value) or (not value.is_floating_point() and value is whole[key] and not _version(value)):
            raise _untouched(name, key)
    for key, (buffer, version) in before.items():
        now = module._buffers[key]
        same = now is not None and now is buffer and not now.is_floating_point() and now._version == version
        if now is None or _is_blank(now) or same:
            raise _untouched(name, key)
    for key, value in made.items():
        assert value is not None, "checked above"
        yield places[id(shards[key])], value.detach()


def _untouched(name: str, key: str) -> ValueError:
    return ValueError(
        f"the initialisation of {name} must fill {key}, which was built on the meta device, but left it as it was: "
        "have reset_parameters() fill it, or a function param_init_fn that fully_shard is given"
    )


def _blank(like: Tensor | None, device: torch.device) -> Tensor:
    """Return memory that shows whether it has been filled."""
    assert like is not None, "only of what is there"
    filling = torch.nan if like.is_floating_point() else 0
    return torch.full(tuple(like.shape), filling, dtype=like.dtype, device=device)


def _is_blank(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and bool(value.isnan().all())


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
