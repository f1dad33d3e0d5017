"""Parameters and buffers of a sharded model, in the form they are sent and saved (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ray.state.pieces import shared_out
from elastic_ray.sync.sharded_parameters.fsdp_fields import NO_MEMORY_YET, is_sharded, shard_like, stands_in
from elastic_ray.sync.sharded_parameters.sharded_optimizer import ShardedOptimizer


class ShardedModelState:
    """State of a sharded model: just its buffers for joining ranks, plus full parameters for checkpoints.

    Joining ranks receive rows separately, as shards.

    Attributes:
        takes_unread: Whether ranks read only the rows they need from a checkpoint's parameters.
    """

    takes_unread = True

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer) -> None:
        self._module, self._optimizer = module, optimizer

    def capture(self) -> Any:
        """Return the model's buffers, keyed by name, without its parameters."""
        return {"buffers": dict(self._module.named_buffers())}

    def capture_to_save(self) -> Any:
        """Return the model's buffers, and its full parameters if this rank has them."""
        whole = self._optimizer.gathered_whole()
        names = [each.name for each in self._optimizer.params]
        found = {} if whole is None else {"parameters": {names[place]: value for place, (value, _) in whole.items()}}
        return {**self.capture(), **found}

    def capture_part(self, rank: int, world_size: int) -> Any:
        """Return the rows owned by this rank and, on rank 0, the buffers; see ``WrittenInParts``."""
        if self._optimizer.divided:
            rows = {"parameters": self._optimizer.written_params()}
        else:
            whole = self.capture_to_save()
            rows = shared_out({key: tree for key, tree in whole.items() if key != "buffers"}, rank, world_size)
        return {**self.capture(), **rows} if rank == 0 else rows

    def capture_to_keep(self) -> Any:
        """Return the state held by all ranks; this rank's rows are kept with the optimizer state."""
        return self.capture()

    @torch.no_grad()
    def restore(self, tree: Any) -> None:
        """Restore a captured state. Raises RuntimeError if the state belongs to another model."""
        buffers = dict(self._module.named_buffers())
        if "buffers" not in tree or buffers.keys() != tree["buffers"].keys():
            raise RuntimeError(
                "train_loop_per_worker must build the same model on every worker, and shard it "
                "(elastic_ray.fully_shard) on every one or on none"
            )
        for name, buffer in buffers.items():
            buffer.copy_(tree["buffers"][name])
        if "parameters" in tree:
            self._optimizer.hold_whole(tree["parameters"])


def _key(prefix: str, name: str) -> str:
    """Return a parameter's state dict key, without the name inserted by activation checkpointing."""
    return prefix + name.replace("_checkpoint_wrapped_module.", "")


def shard_whole_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Replace full parameters in a state dict with this rank's rows before torch loads it into a sharded module."""
    for name, param in module.named_parameters():
        key = _key(prefix, name)
        value = state_dict.get(key)
        if not is_sharded(param) or not isinstance(value, Tensor) or is_sharded(value) or value.shape != param.shape:
            continue  # what does not fit torch tells of
        if stands_in(param):
            raise RuntimeError(NO_MEMORY_YET)
        mesh: Any = param.device_mesh  # type: ignore[attr-defined]
        parts = list(torch.chunk(value, mesh.size()))
        rank = mesh.get_group().rank()
        rows = parts[rank] if rank < len(parts) else value[:0]
        state_dict[key] = shard_like(param, rows.to(param.device))


class StateDicts:
    """Hooks that make a sharded model's ``state_dict()`` and ``load_state_dict()`` handle full parameters."""

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        hooked: Any = module
        hooked.register_state_dict_post_hook(lambda *arguments: self._give(*arguments))
        taking = hooked.register_load_state_dict_pre_hook(self._load_rows)
        # Before the one that cuts this rank's rows out: the rank that follows needs them, too.
        hooked._load_state_dict_pre_hooks.move_to_end(taking.id, last=False)

    def _give(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace rows in a state dict with full parameters, if this rank has them (torch hook)."""
        sharded = {name for name, value in state_dict.items() if isinstance(value, Tensor) and is_sharded(value)}
        if not sharded:
            return
        names = {id(each.param): each.name for each in self._optimizer.params}
        known = {
            _key(prefix, name): names[id(param)]
            for name, param in module.named_parameters(remove_duplicate=False)
            if id(param) in names
        }
        if strange := sharded - known.keys():
            raise RuntimeError(
                f"state_dict() of a sharded model has keys that are no names of its parameters, as {min(strange)!r}, "
                "so whole tensors cannot be put there: rename keys after state_dict(), not in a hook of a module"
            )
        whole = self._optimizer.whole_params()
        for name in sharded:
            if known[name] in whole:
                state_dict[name] = whole[known[name]]
            else:
                del state_dict[name]

    def _load_rows(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, *arguments: Any
    ) -> None:
        """Copy the full parameters' rows that this rank holds for others; raises RuntimeError for ``assign=True``."""
        if local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would put other parameters in the place of those that the optimizer of a "
                "sharded model steps: leave assign=True out, or load before AdaptiveDataParallel and the optimizer are "
                "made"
            )
        for each in self._optimizer.params:
            value = state_dict.get(_key(prefix, each.name))
            if isinstance(value, Tensor) and not is_sharded(value) and tuple(value.shape) == each.shape:
                self._optimizer.load_param(each.name, value)
