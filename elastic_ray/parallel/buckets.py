"""How parameters are laid out in flat buffers for reduction: equal on every rank, whatever order hooks fire in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

# As torch DDP: a small first bucket starts the communication early, later ones amortise its latency.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclasses.dataclass(slots=True)
class Bucket:
    """A flat buffer that holds the gradients of some parameters of one group, dtype and device.

    Attributes:
        index: position in the order of reduction.
        group: parameter group that the parameters belong to.
        params: the parameters, in the order of their ``views``.
        flat: the buffer, followed by ``tail`` extra elements.
        body: the buffer without its tail.
        views: one view of ``body`` for each parameter, in its shape.
        pending: gradients still missing in the present backward pass.
        carried: sum of the earlier micro-steps' gradients, like ``body``; None before the first accumulation.
        used: which parameters had a gradient in any micro-step of an accumulation.
        written: a parameter, the ``.grad`` that the step's reduction has written to, and its version then.
    """

    index: int
    group: int
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    body: torch.Tensor
    views: list[torch.Tensor]
    pending: int = 0
    carried: torch.Tensor | None = None
    used: list[bool] = dataclasses.field(default_factory=list)
    written: tuple[torch.nn.Parameter, torch.Tensor, int] | None = None

    def begin_step(self) -> None:
        """Nothing of an earlier step counts any more."""
        self.used = [False] * len(self.params)
        self.written = None

    def mark_written(self) -> None:
        """Remember a gradient that holds what was reduced."""
        param = next((p for p in self.params if p.grad is not None), None)
        grad = param.grad if param is not None else None
        self.written = (param, grad, grad._version) if param is not None and grad is not None else None

    @property
    def goes_on(self) -> bool:
        """Whether ``.grad`` still holds what was reduced: this backward pass has added to it, nobody zeroed it.

        ``zero_grad`` drops the tensor, or counts as one more change of it than the pass's own.
        """
        if self.written is None:
            return False
        param, grad, version = self.written
        return param.grad is grad and grad._version <= version + 1

    def replace_buffer(self) -> None:
        """Leave the buffer to a reduction that was given up and may still write to it."""
        self.flat = self.flat.clone()
        self.body, self.views = _cut_views(self.flat, self.params)


def build_buckets(groups: Sequence[Sequence[torch.nn.Parameter]], tail: int) -> tuple[list[Bucket], torch.Tensor]:
    """Buckets in the order in which backward fills them (last parameters first), and the tail tensor.

    The tail carries control values with the last bucket's reduction where that is in float32 or float64; else it is a
    buffer of its own, to be reduced by itself.

    Args:
        groups: parameters of each parameter group, in the model's order.
        tail: number of control values.
    """
    order = [(index, p) for index, group in enumerate(groups) for p in group if p.requires_grad]
    cuts: list[tuple[int, list[torch.nn.Parameter]]] = []
    for kind in dict.fromkeys((index, p.dtype, p.device) for index, p in order):
        params = [p for index, p in reversed(order) if (index, p.dtype, p.device) == kind]
        cuts += [(kind[0], cut) for cut in _cut(params, first=not cuts)]
    if not cuts:
        raise ValueError("model must have at least one parameter that requires a gradient")
    buckets = []
    carries_tail = cuts[-1][1][0].dtype in (torch.float32, torch.float64)
    for index, (group, params) in enumerate(cuts):
        extra = tail if carries_tail and index == len(cuts) - 1 else 0
        buckets.append(_allocate(index, group, params, extra))
    last = buckets[-1]
    values = last.flat[last.body.numel() :] if carries_tail else torch.zeros(tail, device=last.flat.device)
    return buckets, values


def _cut(params: list[torch.nn.Parameter], *, first: bool) -> list[list[torch.nn.Parameter]]:
    cuts: list[list[torch.nn.Parameter]] = [[]]
    size, limit = 0, FIRST_BUCKET_BYTES if first else BUCKET_BYTES
    for p in params:
        nbytes = p.numel() * p.element_size()
        if cuts[-1] and size + nbytes > limit:
            cuts.append([])
            size, limit = 0, BUCKET_BYTES
        cuts[-1].append(p)
        size += nbytes
    return cuts


def _allocate(index: int, group: int, params: list[torch.nn.Parameter], extra: int) -> Bucket:
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(numel + extra, dtype=params[0].dtype, device=params[0].device)
    body, views = _cut_views(flat, params)
    return Bucket(index=index, group=group, params=params, flat=flat, body=body, views=views)


def _cut_views(flat: torch.Tensor, params: Sequence[torch.nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sizes = [p.numel() for p in params]
    body = flat[: sum(sizes)]
    return body, [piece.view(p.shape) for piece, p in zip(torch.split(body, sizes), params, strict=True)]
