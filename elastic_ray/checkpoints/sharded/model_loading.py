"""SHELL: loads a model from a run's automatic checkpoints in any process, with any number of workers (torch)."""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow.fs
import torch

from elastic_ray.checkpoints.automatic import DIRECTORY, CorruptStateError, StateFile, state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.state.registered import ModuleExtras
from elastic_ray.state.unread import read_all
from elastic_ray.sync.sharded.embedding import ShardedEmbedding

if TYPE_CHECKING:
    from ray.train import Checkpoint, Result

    Source: TypeAlias = Checkpoint | Result | str | os.PathLike[str]

logger = logging.getLogger(__name__)


def load_model_state(
    checkpoint: Source, model: torch.nn.Module | None = None, *, number: int = 0
) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers from a job's automatic checkpoint, and load them into ``model``.

    Nothing in a checkpoint is executed. The checkpoint may have been written by any number of workers, and may contain
    a sharded model. This process reads the entire model into CPU memory, and needs neither Ray nor a GPU.

    >>> import elastic_ray as er
    >>> result = trainer.fit()  # doctest: +SKIP
    >>> model = torch.nn.Linear(8, 2)  # doctest: +SKIP
    >>> state = er.load_model_state(result.checkpoint, model)  # doctest: +SKIP

    Args:
        checkpoint: ``Result.checkpoint`` of a job that reports no checkpoints. If the job reports checkpoints, pass the
            ``Result`` itself to load the last automatic checkpoint. A run's directory or URI
            (``JobHandle.storage_path``), or a copy of its ``automatic`` folder, also works.
        model: model to load into, built as in the train function before it was wrapped; None only returns the tensors.
        number: index of the model, in the order the train function wraps its models.

    Returns:
        Tensors keyed by name, on the CPU; tied parameters appear once, under their first name. Without a ``model``, the
        weights of its ``ShardedEmbedding`` modules are named ``"rows/0/0"`` and so on.

    Raises:
        FileNotFoundError: no complete automatic checkpoint exists. Reported checkpoints do not count.
        CorruptStateError: the checkpoint has changed since it was written.
        KeyError: the checkpoint has no model with this number.
        RuntimeError: ``model`` has different parameters.
    """
    storage, state = find_state(checkpoint)
    trees = open_checkpoint(storage, state)  # what is divided among ranks, optimizers' states too, is not read yet
    key = f"model/{number}"
    if key not in trees:
        models = sum(each.startswith("model/") for each in trees)
        raise KeyError(f"number must be that of one of the {models} models in {state.path}, from 0, but got {number}")
    tree = read_all(trees[key])
    if not isinstance(tree, Mapping):
        raise CorruptStateError(f"{key} in {state.path} must be a tree of tensors, but is a {type(tree).__name__}")
    found = _flat(tree)
    if strange := next((name for name, each in found.items() if not isinstance(each, torch.Tensor)), None):
        raise CorruptStateError(f"{key}: {strange} in {state.path} must be a tensor, but is no tensor")
    rows = {name: read_all(tree) for name, tree in trees.items() if name.startswith(f"rows/{number}/")}
    names = _table_names(model, list(rows), state.path)
    found |= {name: tree["whole"]["weight"] for name, tree in zip(names, rows.values(), strict=True)}
    if model is not None:
        _load(model, found, state.path)
        if extras := trees.get(f"modules/{number}"):
            ModuleExtras(model).restore({**read_all(extras), "training": {}})  # modes stay the caller's
    return found


def differences(one: tuple[RunStorage, StateFile], other: tuple[RunStorage, StateFile]) -> dict[str, float]:
    """Return max |a - b| / max |a| for each tensor of two automatic checkpoints' models, keyed by tensor name."""
    models = [_models(*each) for each in (one, other)]
    if len({tuple(sorted((name, tensor.shape) for name, tensor in each.items())) for each in models}) > 1:
        raise ValueError(f"{one[1].path} and {other[1].path} must hold the same models to be compared, but do not")
    found = {}
    for name, tensor in models[0].items():
        a, b = tensor.double(), models[1][name].double()
        apart = float((a - b).abs().max()) if a.numel() else 0.0
        found[name] = apart / max(float(a.abs().max()), 1e-12) if apart else 0.0
    return found


def _models(storage: RunStorage, state: StateFile) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of all models in a checkpoint, keyed by model number and name."""
    trees = open_checkpoint(storage, state)
    found: dict[str, torch.Tensor] = {}
    for key in sorted(trees):
        kind, _, number = key.partition("/")
        if kind == "model":
            found |= {f"{number}/{name}": each for name, each in _flat(read_all(trees[key])).items()}
        elif kind == "rows":
            found[key] = read_all(trees[key])["whole"]["weight"]
    return found


def find_state(checkpoint: Source) -> tuple[RunStorage, StateFile]:
    """Return a run's newest complete automatic checkpoint and its storage. Raises FileNotFoundError if none exists."""
    filesystem = getattr(checkpoint, "filesystem", None)
    if filesystem is None:
        storage = RunStorage(os.fspath(checkpoint))  # type: ignore[arg-type]
    else:
        storage = RunStorage(str(checkpoint.path), filesystem)  # type: ignore[union-attr]
    problems: list[str] = []
    for directory in (posixpath.join(storage.path, DIRECTORY), storage.path):
        if found := state_files(storage, problems.append, directory=directory):
            for problem in problems:
                logger.warning("%s: %s is loaded", problem, found[0].path)
            return storage, found[0]
    reported = storage.filesystem.get_file_info(storage.path).type == pyarrow.fs.FileType.Directory
    raise FileNotFoundError(
        f"there is no automatic checkpoint in {storage.where}"
        + (
            f": {'; '.join(problems)}"
            if problems
            else ": what report() has stored there is the train function's own format. Give the Result, or the run's "
            "directory, for the last automatic one"
            if reported
            else ". Jobs leave one unless ElasticConfig says automatic_checkpoints=False or keep_last_state=False; "
            "trials of a sweep leave none"
        )
    )


def _flat(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers keyed by name; a sharded model stores the two separately."""
    apart = isinstance(tree.get("buffers"), Mapping)
    return {**tree.get("parameters", {}), **tree["buffers"]} if apart else dict(tree)


def _table_names(model: torch.nn.Module | None, keys: Sequence[str], where: str) -> list[str]:
    """Return the weight names of a model's sharded tables. Raises RuntimeError if ``model`` has more or fewer."""
    if model is None:
        return list(keys)
    modules = [(name, part) for name, part in model.named_modules() if isinstance(part, ShardedEmbedding)]
    if len(modules) != len(keys):
        raise RuntimeError(
            f"model must be built as in the train function, but it has {len(modules)} ShardedEmbedding modules, and "
            f"{where} has {len(keys)}"
        )
    return [f"{name}.weight" if name else "weight" for name, _ in modules]


def _load(model: torch.nn.Module, state: dict[str, torch.Tensor], where: str) -> None:
    """Copy tensors into a model. Raises RuntimeError if the model has different tensors."""
    tables = {name: part for name, part in model.named_modules() if isinstance(part, ShardedEmbedding)}
    state = dict(state)
    for name, part in tables.items():
        part.load_state_dict({"weight": state.pop(f"{name}.weight" if name else "weight")})
    own: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if own.keys() != state.keys():
        lacks, more = sorted(state.keys() - own.keys())[:5], sorted(own.keys() - state.keys())[:5]
        raise RuntimeError(
            f"model must be built as in the train function, before it is wrapped, but of {where} it lacks {lacks} and "
            f"has {more} instead"
        )
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise RuntimeError(
                f"model must be built as in the train function, but {name!r} is {tuple(tensor.shape)} here and "
                f"{tuple(state[name].shape)} in {where}"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])
