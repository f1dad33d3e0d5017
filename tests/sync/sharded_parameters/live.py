"""The storages that are alive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that a thread has made and that live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if type(each) in (Tensor, nn.Parameter) and not each.is_meta:
                storage = each.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage)
        self._known = {key: each for key, each in self._known.items() if not each.expired()}
        # Torch frees what it has gathered by making it small.
        storages = (torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._known.values())
        self.peak = max(self.peak, sum(each.nbytes() for each in storages if each is not None))
        return result
