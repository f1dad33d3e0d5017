"""Synchronised parameters of a model, and their profile for strategy builders (torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.state.pieces import shared_out
from elastic_ray.state.tree import OptimizerState, Stateful, as_divided
from elastic_ray.sync.device_numbers import local
from elastic_ray.sync.engine.joint_optimizer import optimizers_of
from elastic_ray.sync.plan import ModelProfile, OptimizerInfo, ParamInfo
from elastic_ray.sync.tables.sparse_backward import switch_off

if TYPE_CHECKING:
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer
    from elastic_ray.sync.sharded_parameters.sharded_optimizer import ShardedOptimizer


class Trainable:
    """Trainable parameters of a model, ordered by the optimizer's parameter groups.

    Parameters that are unfrozen after the model was wrapped are included. Parameters that are frozen later stay
    included, without local gradients, so toggling ``requires_grad`` at every step has no cost.

    Raises ValueError if the optimizer holds parameters that do not belong to the module, or lacks trainable ones.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._known: set[int] = set()
        self.left_out: list[torch.nn.Parameter] = []  # parameters that are not trained, or not taken in yet
        self._sizes: list[int] = []
        self._places = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
        self._kinds: dict[int, str] = {}  # of trainable parameters, as they were taken in
        self.groups: list[list[torch.nn.Parameter]] = []
        self.params: list[torch.nn.Parameter] = []
        self._lay_out(wrapped=False)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Trainable parameters keyed by name, in model order; for divided parameters, this worker's part."""
        left = {id(p): p for p in self.params}
        found = {name: left.pop(key) for name, key in self._places.items() if key in left}
        return {name: local(p) for name, p in found.items()}

    def check(self) -> None:
        """Check that the model still has the parameters it was wrapped with.

        Raises ValueError if parameters were replaced, tied, moved or converted; the message names them.
        """
        now = dict(self._module.named_parameters(remove_duplicate=False))
        if moved := [f"{name} ({_kind(p)})" for name, p in now.items() if self._kinds.get(id(p), _kind(p)) != _kind(p)]:
            raise ValueError(
                f"{', '.join(moved[:3])} of the model had another dtype or device when AdaptiveDataParallel wrapped "
                "it, and made room for its gradients: call .to(), .bfloat16() and the like before the optimizer is "
                "made, and wrap last"
            )
        if self._known <= {id(p) for p in now.values()}:
            return
        other = [name for name, p in now.items() if self._places.get(name, id(p)) != id(p)]
        gone = [name for name, known in self._places.items() if known in self._known and name not in now]
        raise ValueError(
            f"{', '.join([*other, *gone][:5])} of the model were replaced or tied after AdaptiveDataParallel had "
            "wrapped it, and its optimizer does not step the new parameters: change layers and tie weights first, "
            "then make the optimizer, and wrap last"
        )

    def changed(self) -> bool:
        """True if the model has new trainable parameters."""
        more = bool(self.left_out) and any(p.requires_grad for p in self.left_out)
        return more or len(self._optimizer.param_groups) != len(self._sizes)

    def include_unfrozen(self) -> None:
        """Include parameters that user code has unfrozen or added to the optimizer.

        Raises ValueError if the optimizer does not step an unfrozen parameter; the message names it.
        """
        self._lay_out(wrapped=True)

    def drop_strangers(self) -> None:
        """Drop the gradients of parameters that are not synchronised yet, because they would differ between ranks."""
        for p in self.left_out:
            if p.requires_grad:
                p.grad = None

    def _lay_out(self, *, wrapped: bool) -> None:
        """Sort the trainable parameters by group; raise ValueError if the optimizer's parameters are different."""
        order = {id(p): i for i, p in enumerate(self._module.parameters())}
        trained = self._known | {id(p) for p in self._module.parameters() if p.requires_grad}
        groups = [
            [p for p in group["params"] if id(p) in trained or p.requires_grad]
            for group in self._optimizer.param_groups
        ]
        strangers = sum(1 for group in groups for p in group if id(p) not in order)
        if strangers:
            raise ValueError(
                f"optimizer must hold parameters of module only, but {strangers} of its parameters belong elsewhere. "
                "Are they of a layer that was replaced since? Make the optimizer after that. Are they of the loss "
                "(class centres, weights of tasks)? Make them part of module, as module.loss = loss. Several models "
                "need one AdaptiveDataParallel and one optimizer each"
            )
        held = {id(p) for group in groups for p in group}
        missing = [name for name, p in self._module.named_parameters() if id(p) in trained - held]
        if missing and wrapped:
            raise ValueError(
                f"{', '.join(missing[:5])} became trainable after AdaptiveDataParallel had wrapped the model, but its "
                "optimizer does not step them: add them with optimizer.add_param_group() in the same place, or give "
                "all parameters to the optimizer first and freeze them afterwards"
            )
        if missing:
            raise ValueError(
                f"optimizer must hold all of module's trainable parameters, but {len(missing)} are missing; "
                "set requires_grad_(False) on those that are frozen, and give all optimizers of the model: "
                "AdaptiveDataParallel(model, [optimizer, other])"
            )
        self.params = [p for group in groups for p in group]
        self.groups = [sorted(group, key=lambda p: order[id(p)]) for group in groups]
        self._known = held
        self._kinds = {id(p): _kind(p) for p in self.params if p.device.type != "meta"} | self._kinds
        self.left_out = [p for p in self._module.parameters() if id(p) not in held]
        self._sizes = [len(group["params"]) for group in self._optimizer.param_groups]

    def capture(self) -> dict[str, Any]:
        """Return the names of trainable and synchronised parameters, and all names by parameter group."""
        names = {id(p): name for name, p in self._module.named_parameters()}
        return {
            "requires_grad": [name for name, p in self._module.named_parameters() if p.requires_grad],
            "synchronised": [names[each] for each in names if each in self._known],
            "groups": [[names.get(id(p), "") for p in group["params"]] for group in self._optimizer.param_groups],
        }

    def restore(self, tree: dict[str, Any]) -> None:
        """Apply the changes (unfrozen, frozen or added parameters) made by other ranks before this rank joined."""
        mine = dict(self._module.named_parameters())
        wanted = set(tree["requires_grad"])
        for name, p in mine.items():
            p.requires_grad_(name in wanted)
        for names in tree["groups"][len(self._optimizer.param_groups) :]:
            self._optimizer.add_param_group({"params": [mine[name] for name in names if name in mine]})
        self._known |= {id(mine[name]) for name in tree["synchronised"] if name in mine}
        self._lay_out(wrapped=True)


def _kind(param: torch.Tensor) -> str:
    return f"{str(param.dtype).removeprefix('torch.')} on {param.device}"


class TrainedState(OptimizerState):
    """Optimizer state together with a record of the trained parameters.

    Buckets are rebuilt when the record changes. If the state is divided among the ranks, only its common part is sent
    and saved; see ``SharedOut``.

    Args:
        carried: Accumulated gradients waiting for an optimizer step; None if another optimizer's state includes them.
        divided: States that are split, with each rank holding a part.
        in_unit: Whether parameters and their states may be divided within the unit (workers that share one replica).

    Attributes:
        takes_unread: Whether ranks read only the parts they need from a checkpoint's complete states.
    """

    takes_unread = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trainable: Trainable,
        rebuild: Callable[[], None],
        carried: Stateful | None,
        divided: TiledOptimizer | ShardedOptimizer,
        *,
        in_unit: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._in_unit, self._trainable, self._rebuild, self._carried = in_unit, trainable, rebuild, carried
        self._divided = divided

    def capture(self) -> Any:
        captured = {**super().capture(), "trainable": self._trainable.capture()}
        if self._carried is not None:
            captured["carried"] = self._carried.capture()
        divided = self._divided.capture()
        if divided is not None:
            tiled = {id(p) for p in self._divided.tiled}
            hidden = {i for i, p in enumerate(self._parameters()) if id(p) in tiled}
            captured["state"] = {i: state for i, state in captured["state"].items() if i not in hidden}
            captured["divided"] = divided
        return captured

    def capture_to_save(self) -> Any:
        """Return the state for a checkpoint, with the complete optimizer state if this rank holds it."""
        captured, gathered = self.capture(), self._divided.gathered()
        if "divided" in captured and gathered is not None:
            places = {id(p): i for i, p in enumerate(self._parameters())}
            captured["state"] |= {places[id(p)]: dict(state) for p, state in gathered.items()}
            captured["divided"] |= {"whole": True}
        return captured

    def capture_part(self, rank: int, world_size: int) -> Any:
        """Return this rank's part of a checkpoint written by all ranks; see ``WrittenInParts``."""
        written = self._divided.written(rank)
        captured = self.capture_to_save() if written is None else self.capture()
        states = shared_out(captured["state"], rank, world_size)
        if written is not None:
            places = {id(p): i for i, p in enumerate(self._parameters())}
            states |= {places[id(p)]: dict(state) for p, state in written.items()}
            captured["divided"] |= {"whole": True}  # in all parts together
        return {**captured, "state": states} if rank == 0 else {"state": states}

    def capture_to_keep(self) -> Any:
        """Return the state that all ranks share, and this rank's divided state, for another run in this process."""
        captured, kept = self.capture(), self._divided.kept()
        if "divided" not in captured:
            return captured
        if not kept:
            return self.capture_to_save()
        captured["divided"] |= {"kept": kept}
        return captured

    def restore(self, tree: Any) -> None:
        if tree["trainable"] != self._trainable.capture():
            self._trainable.restore(tree["trainable"])
            self._rebuild()
        divided, state = tree.get("divided"), self._optimizer.state
        own: dict[torch.Tensor, Any] = {p: state[p] for p in self._divided.tiled if p in state}
        super().restore(tree)
        if self._in_unit:
            for param, values in list(state.items()):
                state[param] = as_divided(values, param)
        if self._carried is not None:
            self._carried.restore(tree.get("carried", {}))
        whole = divided is None or bool(divided.get("whole"))
        if not whole:
            state.update(own)
        self._divided.restore(divided, whole=whole)


class LocalParameter:
    """Stand-in for a distributed parameter that exposes only its local part to buckets."""

    def __init__(self, param: Any) -> None:
        self.whole = param

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function on the local part instead of the stand-in."""
        return function(*(each.part if isinstance(each, cls) else each for each in args), **(kwargs or {}))

    @property
    def part(self) -> torch.Tensor:
        """Local part of the tensor."""
        found: torch.Tensor = local(self.whole)
        return found

    @property
    def shape(self) -> torch.Size:
        """Shape of the local part."""
        return self.part.shape

    def numel(self) -> int:
        """Return the number of elements in the local part."""
        return self.part.numel()

    def is_contiguous(self) -> bool:
        """True if the local part is contiguous."""
        return self.part.is_contiguous()

    @property
    def grad(self) -> torch.Tensor | None:
        """Local part of the gradient, redistributed to match the parameter."""
        grad: Any = self.whole.grad
        if grad is None:
            return None
        if grad.placements != self.whole.placements:  # partial sums, of what follows a parallel sequence
            self.whole.grad = grad = grad.redistribute(placements=self.whole.placements)
        found: torch.Tensor = local(grad)
        return found

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        from torch.distributed.tensor import DTensor

        held = None if part is None else DTensor(part, self.whole._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        self.whole.grad = held


def local_groups(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """Return the parameters by group, with a stand-in for the local part of each distributed parameter."""
    return [[LocalParameter(p) if hasattr(p, "_local_tensor") else p for p in group] for group in groups]


_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
# A class derived from one of these may do anything.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def profile_of(
    module: torch.nn.Module, groups: Sequence[Sequence[torch.nn.Parameter]], optimizer: torch.optim.Optimizer
) -> ModelProfile:
    """Return a model's profile for strategy builders."""
    for layer in module.modules():
        if layer._forward_pre_hooks:
            switch_off(layer)
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    layers = layers_by_parameter(module)
    params = [
        ParamInfo(
            names=tuple(names[id(param)]),
            shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            itemsize=param.element_size(),
            device=param.device.type,
            group=index,
            sparse=any(getattr(layer, "sparse", False) for layer in layers[id(param)] if isinstance(layer, _TABLES)),
            table=all(isinstance(layer, _TABLES) for layer in layers[id(param)]),
            divisible=param.is_contiguous(),
        )
        for index, group in enumerate(groups)
        for param in group
    ]
    trained = {id(param) for group in groups for param in group}
    frozen = [name for key, all_names in names.items() if key not in trained for name in all_names]
    first, *others = optimizers = optimizers_of(optimizer)
    by_group = tuple(_describe(each) for each in optimizers for _ in each.param_groups) if others else ()
    return ModelProfile(params=tuple(params), optimizer=_describe(first), by_group=by_group, frozen=tuple(frozen))


def layers_by_parameter(module: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """Return the layers that hold each parameter, keyed by parameter ``id``."""
    layers: dict[int, list[torch.nn.Module]] = {}
    for layer in module.modules():
        for param in layer.parameters(recurse=False):
            layers.setdefault(id(param), []).append(layer)
    return layers


def _describe(optimizer: torch.optim.Optimizer) -> OptimizerInfo:
    """Return the kinds of gradients that the optimizer can handle; measured with torch 2.13 for torch's own."""
    decays = any(group.get("weight_decay", 0) for group in optimizer.param_groups)
    takes = isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)) and not decays
    return OptimizerInfo(
        name=type(optimizer).__name__,
        takes_sparse=takes or isinstance(optimizer, torch.optim.SparseAdam),
        only_sparse=isinstance(optimizer, torch.optim.SparseAdam),
        elementwise=is_elementwise(optimizer),
    )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer is known to update each element independently of the rest of its tensor."""
    return type(optimizer) in _ELEMENTWISE
