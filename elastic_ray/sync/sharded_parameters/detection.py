"""Whether a model is sharded: asked of every model, so that torch's side of it is not loaded for the answer (torch)."""

from __future__ import annotations

from torch import nn

from elastic_ray.sync.spec import Strategy

SHARDED = Strategy(name="fully_shard")
"""What ``strategy`` of a sharded model is."""


def is_sharded_model(module: nn.Module) -> bool:
    """Whether some of a model's modules are sharded by torch's ``fully_shard``, ours or not."""
    return any(hasattr(type(each), "_get_fsdp_state") for each in module.modules())
