"""KungFu's names for policies (Mai et al., OSDI 2020), for policies that were written for it (pure).

    from elastic_ray.adaptation.kungfu import BasePolicy, PolicyHook, kf, resize, tf

in place of a policy's own imports, and ``AdaptiveDataParallel(..., policy=PolicyHook(...))`` in place of the list of
TensorFlow's hooks. Hooks get a :class:`Session`: what KungFu has as operations and variables of a graph are small
objects here, which ``sess.run(...)`` computes. As in KungFu, a batch is that of one worker, and progress is counted in
samples.
"""

from __future__ import annotations

from types import SimpleNamespace

from elastic_ray.adaptation.kungfu.graph import (
    BroadcastGlobalVariablesOp,
    GraphKeys,
    Op,
    Session,
    counter,
    create_setter,
    current_cluster_size,
    eval_batch_size,
    eval_global_variable,
    eval_gradient_noise_scale,
    exponential_moving_average,
    get_global_step,
    get_global_variable,
    get_or_create_batch_size,
    placeholder,
    resize,
    step_based_schedule,
)
from elastic_ray.adaptation.kungfu.hook import BasePolicy, PolicyHook

__all__ = [
    "BasePolicy",
    "BroadcastGlobalVariablesOp",
    "GraphKeys",
    "Op",
    "PolicyHook",
    "Session",
    "counter",
    "create_setter",
    "current_cluster_size",
    "eval_batch_size",
    "eval_global_variable",
    "eval_gradient_noise_scale",
    "exponential_moving_average",
    "get_global_step",
    "get_global_variable",
    "get_or_create_batch_size",
    "kf",
    "placeholder",
    "resize",
    "step_based_schedule",
    "tf",
]

tf = SimpleNamespace(
    placeholder=placeholder,
    train=SimpleNamespace(get_global_step=get_global_step),
    **{name: name for name in ("int32", "int64", "uint32", "float32")},
)
"""The few names of TensorFlow that KungFu's policies use."""

kf = SimpleNamespace(
    create_setter=create_setter,
    eval_batch_size=eval_batch_size,
    eval_global_variable=eval_global_variable,
    eval_gradient_noise_scale=eval_gradient_noise_scale,
    get_global_variable=get_global_variable,
    get_or_create_batch_size=get_or_create_batch_size,
)
"""What ``import kungfu.tensorflow as kf`` gives to policies."""
