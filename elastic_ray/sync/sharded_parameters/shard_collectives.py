"""Collectives for a sharded model in the current generation (torch).

Like all collectives in a step, they wait until the generation is cancelled or a timeout has passed. After that, the
step is lost and will be drawn again. For the rest of the step, collectives return arbitrary numbers of the right size,
so that no exception leaves ``model(x)`` or ``backward()``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.sync.operations.gradient_checks import Finiteness
from elastic_ray.sync.sharded_parameters.row_layout import layout_of

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

_REDUCES = 1  # what is announced; see Intent.SHARDS


class _Sequence:
    """Order of collectives observed so far, the same on all ranks."""

    def __init__(self) -> None:
        self._next: dict[int, set[int]] = {}
        self._at = 0

    def start(self, place: int) -> None:
        """Start a pass, as agreed by all ranks."""
        self._at = place

    def knows(self, code: int) -> bool:
        """True if `code` has always been the next collective at this point."""
        return self._next.get(self._at) == {code}

    def record(self, code: int) -> None:
        """Record that the collective `code` was executed."""
        self._next.setdefault(self._at, set()).add(code)
        self._at = code


class ShardCollectives:
    """Collectives for one sharded model between the ranks in the current group.

    Ranks whose models do different things, for example in a branch that depends on a rank's samples, must not end up in
    the same collective. A collective is therefore announced first unless it has always come after the previous one. If
    it is not announced, a rank waiting in it reports this, so that a rank doing something different finds out.

    Parameters are gathered and gradients scattered within this rank's shard group. All ranks participate in each
    collective, with empty data for ranks in other groups, so that all groups can share one set of connections and be
    cancelled together.

    Attributes:
        layout: Layout of the current group. Before the group's first update, some followers may be temporary.
        weight: Weight of this rank's gradients in the step's mean.
        finiteness: Check that this rank's own gradients in the latest backward pass are finite.
    """

    def __init__(self, run: Run, number: int, shard_size: int | None = None) -> None:
        self._run, self._number = run, number
        self.shard_size, self.layout = shard_size, layout_of(1)
        self._entered: Callable[[], None] = lambda: None
        self._scattered: Callable[[int, Tensor], None] | None = None
        self._sequence = _Sequence()
        self._unit = -1  # number of the sharded module that is gathered
        self._joins = False  # this rank has no sample, and all know what comes next
        self.finiteness = Finiteness()
        self.weight = 1.0

    def adapt(self, entered: Callable[[], None]) -> None:
        """Set a function to be called before each collective requested by torch."""
        self._entered = entered

    def watch(self, scattered: Callable[[int, Tensor], None] | None) -> None:
        """Set a function that receives each rank's weighted gradients for this rank's rows, before they are summed.

        The function is called with the number of a sharded module and a tensor [ranks, elements]; None removes it.
        """
        self._scattered = scattered

    def enter_group(self) -> None:
        """Enter a group, and discard the collective order recorded in the previous group."""
        self._sequence = _Sequence()
        group = self._run.group
        self.layout = layout_of(group.world_size, self.shard_size, [member.node for member in group.members])

    def start(self, what: Announced) -> None:
        """Agree with all ranks to start ``what``, a backward pass or model call, before its first collective.

        Raises CommunicationFailedError if the group breaks. Raises RanksDisagreeError if other ranks do something
        different.
        """
        self._run.consensus.agree_on(what)
        if not self._some_are_idle:
            self._sequence.start(what.code)

    @property
    def _some_are_idle(self) -> bool:
        """True if some ranks have no samples in the current step, and know only what others announce about it."""
        step = self._run.ledger.step
        return step is not None and step.leaves_ranks_idle

    def join(self, units: Sequence[FSDPModule], what: Announced) -> None:
        """Participate, on a rank without samples, in a gather needed by other ranks; discard the parameters.

        Args:
            units: Sharded modules of the model.
            what: Announcement from the other ranks: a call to the model, or a gather for one sharded module.
        """
        if what.intent is not Intent.GATHER:
            for each in units:  # as the others do after the call; one with gradients may have left them gathered
                each.reshard()
            return
        unit, self._joins = units[what.detail], True
        try:
            unit.unshard()
        finally:
            self._joins = False
            unit.reshard()

    def comes_next(self, what: str) -> None:
        """Agree with all ranks that ``what`` is the next collective; it lasts until ``Announcer.done`` is called.

        Raises CommunicationFailedError if the group breaks. Raises RanksDisagreeError if other ranks do something
        different.
        """
        code, consensus = zlib.crc32(what.encode()), self._run.consensus
        if self._some_are_idle and self._unit >= 0:
            consensus.announce(Announced(Intent.GATHER, self._number, self._unit))
            consensus.agreed()
            return
        announced = Announced(Intent.SHARDS, self._number, code << 2 | _REDUCES)
        if consensus.announce_reductions(announced, known=self._sequence.knows(code)):
            consensus.agreed()
        self._sequence.record(code)

    def start_pass(self, weight: float) -> None:
        """Start a backward pass."""
        self.weight, self.finiteness = weight, Finiteness()

    def weigh_alone(self, tensor: Tensor) -> None:
        """Multiply gradients by their weight in place in a group of one, where torch runs no reduce-scatter."""
        if self._run.group.world_size == 1 and self.weight != 1.0:
            tensor.mul_(self.weight)

    def gather(self, output: Tensor, tensor: Tensor, unit: int = -1) -> None:
        """Gather ``tensor`` from the shard group's ranks into ``output``.

        After a failure, ``output`` holds copies of this rank's tensor.

        Args:
            unit: Number of the sharded module that the parameters belong to; -1 for none.
        """
        self._entered()
        output, tensor, self._unit = output.detach(), tensor.detach(), unit
        try:
            found = self._gathered(f"gather {unit} {_like(tensor)}", output, tensor, self.peers)
        finally:
            self._unit = -1
        if not found:
            # A step that is lost continues with numbers of the right size, which zeros would not always be.
            output.view(-1, tensor.numel()).copy_(tensor.clone().view(1, -1).expand(len(self.peers), -1))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, unit: int) -> None:
        """Write this rank's part of all ranks' weighted sum of ``tensor`` to ``output``; zeros after a failure.

        Parts are summed in rank order, in float32 or the tensor's dtype, whichever is more precise. Sums are first
        computed within the shard group, and then over the owners of the same rows in all groups, which get
        bit-identical results.
        """
        self._entered()
        tensor.mul_(self.weight)
        self.finiteness.add(tensor)
        parts = self._summed(f"scatter {unit} {_like(tensor)}", output, tensor, self.peers)
        if parts is None or (self.layout.is_replicated and not self._sum_over_owners(output, unit)):
            output.zero_()
        elif self._scattered is not None:
            self._scattered(unit, parts)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Return the sums of several numbers over all ranks; called on every rank."""
        if self._run.group.world_size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        self.comes_next(f"numbers {len(sums)}")
        work = self._gradients.all_reduce(sums)
        self._run.consensus.announcer.done()
        self._run.consensus.announcer.wait(work)
        found: list[float] = sums.tolist()
        return found

    def _sum_over_owners(self, output: Tensor, unit: int) -> bool:
        """Sum ``output`` over the groups in place, with each owner summing one part; False in a lost step."""
        owners = self.layout.owners(self.layout.owned_by(self._run.group.rank).index)
        what = f"{unit} {_like(output)}"
        mine = output.new_empty(-(-output.numel() // len(owners)))
        padded = output.new_zeros(mine.numel() * len(owners))
        padded[: output.numel()] = output.view(-1)
        if self._summed(f"scatter owners' {what}", mine, padded, owners) is None:
            return False
        if not self._gathered(f"gather owners' {what}", padded, mine, owners):
            return False
        output.copy_(padded[: output.numel()].view_as(output))
        return True

    def sum_up(self, tensor: Tensor, op: Any) -> None:
        """Reduce a tensor over the shard group in place; after a failure, it keeps this rank's numbers.

        Raises NotImplementedError unless the operation is a sum, mean, maximum or minimum.
        """
        self._entered()
        kinds = {
            dist.ReduceOp.SUM: "sum",
            dist.ReduceOp.AVG: "mean",
            dist.ReduceOp.MAX: "max",
            dist.ReduceOp.MIN: "min",
        }
        kind = next((name for each, name in kinds.items() if op == each), None)
        if kind is None:
            raise NotImplementedError(
                f"tensors of a sharded model are not reduced by {op}: use a sum, mean, max or min"
            )
        everyone = tensor.new_empty((len(self.peers), *tensor.shape))
        own = tensor.detach().contiguous()
        if self._gathered(f"{kind} {_like(own)}", everyone, own, self.peers):
            tensor.copy_(everyone.amax(0) if kind == "max" else everyone.amin(0) if kind == "min" else everyone.sum(0))
            if kind == "mean":
                tensor.div_(len(self.peers))

    def to_follower(
        self, tensors: Sequence[Tensor], received: Mapping[int, Sequence[Tensor]], device: torch.device
    ) -> None:
        """Send tensors to this rank's follower, and receive tensors from the ranks it follows.

        Args:
            device: Device of all tensors; also needed on a rank without tensors.
        """
        group = self._run.group
        follower = self.layout.follower_of(self.layout.owned_by(group.rank).index)
        assert follower is not None, "other owners have the same"
        sent = _joined(tensors, device)
        into = [sum(each.nbytes for each in received.get(rank, ())) for rank in range(group.world_size)]
        came = torch.empty(sum(into), dtype=torch.uint8, device=device)
        out = [sent.numel() if rank == follower else 0 for rank in range(group.world_size)]
        self._run.consensus.announcer.wait(self._gradients.all_to_all(came, sent, into, out))
        offset = 0
        for _, tensors_of_rank in sorted(received.items()):
            for each in tensors_of_rank:
                each.copy_(came[offset : offset + each.nbytes].clone().view(each.dtype).view(each.shape))
                offset += each.nbytes

    @property
    def _gradients(self) -> Any:
        return self._run.group.communicator.gradients

    @property
    def is_first_owner(self) -> bool:
        """True if this rank is its rows' first owner, which includes the rows in sums over all ranks."""
        rank = self._run.group.rank
        return self.layout.owners(self.layout.owned_by(rank).index)[0] == rank

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks in the shard group that this rank belongs to."""
        return self.layout.group_of(self._run.group.rank)

    def _gathered(self, what: str, output: Tensor, tensor: Tensor, ranks: Sequence[int]) -> bool:
        """Gather ``tensor`` from `ranks`, including this rank, into ``output``; True if successful."""
        if len(ranks) == self._run.group.world_size:
            return self._carry_out(what, lambda: self._gradients.all_gather(_bytes(output), _bytes(tensor)))
        return self._exchanged(what, output, _bytes(tensor).repeat(len(ranks)), ranks)

    def _summed(self, what: str, output: Tensor, tensor: Tensor, ranks: Sequence[int]) -> Tensor | None:
        """Write this rank's part of the sum of ``tensor`` over `ranks`, including this rank, into ``output``.

        Returns the summands, [ranks, elements]; None in a lost step.
        """
        parts = torch.empty_like(tensor)
        if not self._exchanged(what, parts, _bytes(tensor), ranks):
            return None
        wide = torch.promote_types(tensor.dtype, torch.float32)
        parts = parts.view(len(ranks), -1)
        output.copy_(parts.sum(0, dtype=wide).view_as(output))
        return parts

    def _exchanged(self, what: str, output: Tensor, sent: Tensor, ranks: Sequence[int]) -> bool:
        """Exchange parts of ``sent`` (bytes) between all pairs of `ranks`; True if successful."""
        world, splits = self._run.group.world_size, list[int]()  # none: equal parts for all
        if len(ranks) < world:
            splits = [sent.numel() // len(ranks) if rank in ranks else 0 for rank in range(world)]
        return self._carry_out(what, lambda: self._gradients.all_to_all(_bytes(output), sent, splits, splits))

    def _carry_out(self, what: str, start: Callable[[], Any]) -> bool:
        """Execute a collective; False if the step is already lost, or is lost during it.

        Raises CommunicationFailedError if the group breaks outside steps.
        """
        ledger, consensus = self._run.ledger, self._run.consensus
        if self._joins:
            consensus.announcer.wait(start())
            return True
        if ledger.failed or ledger.replaying:
            return False
        try:
            self.comes_next(what)
            consensus.announcer.wait(start())
            consensus.announcer.done()
        except CommunicationFailedError as error:
            ledger.lose_by(error)
            return False
        return True


class _ShardHook:
    """Base class of torch's hooks for one sharded module's collectives."""

    def __init__(self, collectives: ShardCollectives, unit: int) -> None:
        self._collectives, self._unit = collectives, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class GatherShards(_ShardHook):
    """Hook that carries out torch's all-gathers for one sharded module."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Gather one module's shards into the output tensor."""
        self._collectives.gather(output_tensor, input_tensor, self._unit)


class ScatterGradients(_ShardHook):
    """Hook that carries out torch's reduce-scatters as weighted sums instead of means."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the weighted sum of one module's gradients into the output tensor."""
        self._collectives.reduce_scatter(output_tensor, input_tensor, self._unit)


def _like(tensor: Tensor) -> str:
    return f"{tensor.numel()} {tensor.dtype}"


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes, because gloo does not support all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def _joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the concatenated bytes of the tensors."""
    parts = [_bytes(each.detach().contiguous()) for each in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
