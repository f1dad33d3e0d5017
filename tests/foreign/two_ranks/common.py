"""What the programs for two ranks share: data, records, and a run of all cases of one framework."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

BATCH = 4  # of one rank
_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Case = Callable[[bool, Path], dict[str, Any]]


def numbers(samples: int = 40) -> TensorDataset:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def plain(values: Any) -> Any:
    """Values as JSON has them; what tells of time is left out."""
    if isinstance(values, dict):
        timed = ("runtime", "_per_second", "total_flos", "_time")
        return {str(key): plain(each) for key, each in values.items() if not str(key).endswith(timed)}
    if isinstance(values, (list, tuple)):
        return [plain(each) for each in values]
    return values.detach().double().tolist() if isinstance(values, torch.Tensor) else values


def weights(module: torch.nn.Module) -> dict[str, Any]:
    """By name, without the prefix of a wrapper."""
    return {name.removeprefix("module."): plain(value) for name, value in module.named_parameters()}


@contextlib.contextmanager
def group_hidden() -> Iterator[None]:
    """Hide torchrun's group, of which elastic-ray knows already, from libraries that would make one of their own."""
    import elastic_ray as er

    assert er.get_context().get_world_size() == 2
    kept = {name: os.environ.pop(name) for name in _GROUP}
    try:
        yield
    finally:
        os.environ.update(kept)


def run(cases: dict[str, Case]) -> None:
    """Run the cases named in the command line, all without names, and write the records of this rank."""
    side, folder, *names = sys.argv[1:]
    rank = int(os.environ["RANK"])
    faulthandler.dump_traceback_later(240, exit=True)
    torch.set_num_threads(1)
    records: dict[str, Any] = {}
    for name in names or cases:
        torch.manual_seed(0)
        own = Path(folder) / name.replace(" ", "-") / side
        own.mkdir(parents=True, exist_ok=True)
        try:
            records[name] = plain(cases[name](side == "ours", own))
        except Exception as error:
            records[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        (Path(folder) / f"{side}-{rank}.json").write_text(json.dumps(records))
    if torch.distributed.is_initialized():  # else gloo may abort at exit
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
