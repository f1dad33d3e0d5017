"""The collectives of a sharded model, in the present generation (torch).

They wait as all others of a step do: until the generation is called off, or its timeout. From then on the step is lost,
and what torch and user code still ask for in it is answered with numbers of the right size: no exception leaves
``model(x)`` or ``backward()``, and the step is drawn again.
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
from elastic_ray.sync.sharded_parameters.row_layout import Layout, layout_of

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

_REDUCES = 1  # what is announced; see Intent.SHARDS


class _Sequence:
    """Order of collectives seen so far, the same on all ranks."""

    def __init__(self) -> None:
        self._next: dict[int, set[int]] = {}
        self._at = 0

    def begin(self, place: int) -> None:
        """Start a pass, as all ranks have agreed."""
        self._at = place

    def knows(self, code: int) -> bool:
        """True if `code` has always been the next collective so far."""
        return self._next.get(self._at) == {code}

    def note(self, code: int) -> None:
        """Record that the collective `code` was made."""
        self._next.setdefault(self._at, set()).add(code)
        self._at = code


class ShardCollectives:
    """Collectives of one sharded model among the ranks of the present group.

    Ranks whose models do different things, as one with a branch that follows from a rank's own samples, must not meet
    in one collective. So a collective that has not always followed the one before is announced first. One that has is
    not: a rank that waits in it says so, and the one that has come elsewhere hears of it there.

    Parameters are gathered and gradients scattered in this rank's shard group. All ranks take part in each collective,
    with nothing for those of other groups: one group of connections serves all of them, and is called off at once.

    Args:
        number: of the model, in the order in which the loop wraps them.
        shard_size: ranks of a shard group; None for one of all ranks.

    Attributes:
        layout: of the present group; for its first step some followers may be others than they are to be.
        weight: of this rank's gradients in those of the step.
        finiteness: of this rank's own gradients in the latest backward pass.
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

    def follow(self, entered: Callable[[], None]) -> None:
        """Have this called before each collective that torch asks for."""
        self._entered = entered

    def watch(self, scattered: Callable[[int, Tensor], None] | None) -> None:
        """Have this called with the shard group's weighted gradients of this rank's rows, [ranks, elements].

        None ends it.
        """
        self._scattered = scattered

    def enter_group(self) -> None:
        """Enter a group, in which the order of collectives is unknown."""
        self._sequence = _Sequence()
        group = self._run.group
        self.layout = layout_of(group.world_size, self.shard_size, [member.node for member in group.members])

    def follow_in(self, layout: Layout) -> None:
        """Adapt to other ranks as in this layout from now on; owners are the same."""
        self.layout = layout

    def begin(self, what: Announced) -> None:
        """Start a pass with all other ranks.

        Raises CommunicationFailedError: the group broke. RanksDisagreeError: others do something else here.
        """
        self._run.consensus.agree_on(what)
        if not self._some_are_idle:
            self._sequence.begin(what.code)

    @property
    def _some_are_idle(self) -> bool:
        """True if some ranks have no sample in the step in progress, and know of it only what is announced."""
        step = self._run.ledger.step
        return step is not None and step.leaves_ranks_idle

    def join(self, units: Sequence[FSDPModule], what: Announced) -> None:
        """Join another rank's gather on a rank without a sample: let torch gather the unit, then reshard it.

        Args:
            units: the model's sharded modules.
            what: the others have announced: a call of the model, or that one of them is gathered.
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
        """Agree with all ranks that `what` is the next collective; ``reductions_started`` ends it.

        Raises CommunicationFailedError: the group broke. RanksDisagreeError: others do something else here.
        """
        code, consensus = zlib.crc32(what.encode()), self._run.consensus
        if self._some_are_idle and self._unit >= 0:
            consensus.announce(Announced(Intent.GATHER, self._number, self._unit))
            consensus.agreed()
            return
        announced = Announced(Intent.SHARDS, self._number, code << 2 | _REDUCES)
        if consensus.announce_reductions(announced, known=self._sequence.knows(code)):
            consensus.agreed()
        self._sequence.note(code)

    def begin_pass(self, weight: float) -> None:
        """Start a backward pass.

        Args:
            weight: share of this rank's samples in the step's mean gradient.
        """
        self.weight, self.finiteness = weight, Finiteness()

    def weigh_alone(self, tensor: Tensor) -> None:
        """Weigh gradients in place in a group of one, for which torch makes no reduce-scatter."""
        if self._run.group.world_size == 1 and self.weight != 1.0:
            tensor.mul_(self.weight)

    def gather(self, output: Tensor, tensor: Tensor, unit: int = -1) -> None:
        """Gather ``tensor`` of each rank in the shard group into ``output``, in rank order; this rank's if that fails.

        Args:
            unit: number of the sharded module whose parameters they are; -1 for none.
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
        """Write this rank's part of the weighted sum of all ranks' ``tensor`` into `output`; zeros if that fails.

        Parts are added up in rank order, in single precision or that of the tensor, whichever is higher: first those of
        the shard group, then those of the owners of the same rows in all groups, who end with the same bits.
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
        """Sum numbers of all ranks."""
        if self._run.group.world_size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        self.comes_next(f"numbers {len(sums)}")
        work = self._gradients.all_reduce(sums)
        self._run.consensus.reductions_started()
        self._run.consensus.wait(work)
        found: list[float] = sums.tolist()
        return found

    def _sum_over_owners(self, output: Tensor, unit: int) -> bool:
        """Sum ``output`` over the groups, in place; False in a step that is lost. Each owner adds up a part."""
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
        """Reduce a tensor over the shard group, in place; it keeps this rank's numbers if that fails.

        Raises NotImplementedError: it is neither a sum, a mean, nor the largest or smallest.
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
        """Send tensors to this rank's follower, and receive those of ranks that it follows, in place.

        Args:
            received: as large as those of each rank that this one follows.
            device: of all of them; ranks that have none meet the others on it.
        """
        group = self._run.group
        follower = self.layout.follower_of(self.layout.owned_by(group.rank).index)
        assert follower is not None, "other owners have the same"
        sent = _joined(tensors, device)
        into = [sum(each.nbytes for each in received.get(rank, ())) for rank in range(group.world_size)]
        came = torch.empty(sum(into), dtype=torch.uint8, device=device)
        out = [sent.numel() if rank == follower else 0 for rank in range(group.world_size)]
        self._run.consensus.wait(self._gradients.all_to_all(came, sent, into, out))
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
        """True if this rank is the one, of those that own its rows, by which they are counted once."""
        rank = self._run.group.rank
        return self.layout.owners(self.layout.owned_by(rank).index)[0] == rank

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of the shard group."""
        return self.layout.group_of(self._run.group.rank)

    def _gathered(self, what: str, output: Tensor, tensor: Tensor, ranks: Sequence[int]) -> bool:
        """Gather ``tensor`` of `ranks`, this one among them, into ``output``; True if it succeeded."""
        if len(ranks) == self._run.group.world_size:
            return self._carry_out(what, lambda: self._gradients.all_gather(_bytes(output), _bytes(tensor)))
        return self._exchanged(what, output, _bytes(tensor).repeat(len(ranks)), ranks)

    def _summed(self, what: str, output: Tensor, tensor: Tensor, ranks: Sequence[int]) -> Tensor | None:
        """Write this rank's part of the sum of ``tensor`` over `ranks`, this one among them, into ``output``.

        Returns what was added up, [ranks, elements]; None in a step that is lost.
        """
        parts = torch.empty_like(tensor)
        if not self._exchanged(what, parts, _bytes(tensor), ranks):
            return None
        wide = torch.promote_types(tensor.dtype, torch.float32)
        parts = parts.view(len(ranks), -1)
        output.copy_(parts.sum(0, dtype=wide).view_as(output))
        return parts

    def _exchanged(self, what: str, output: Tensor, sent: Tensor, ranks: Sequence[int]) -> bool:
        """Exchange parts of ``sent`` (bytes) among `ranks`, each with every other; True if it succeeded."""
        world, splits = self._run.group.world_size, list[int]()  # none: equal parts for all
        if len(ranks) < world:
            splits = [sent.numel() // len(ranks) if rank in ranks else 0 for rank in range(world)]
        return self._carry_out(what, lambda: self._gradients.all_to_all(_bytes(output), sent, splits, splits))

    def _carry_out(self, what: str, start: Callable[[], Any]) -> bool:
        """Make a collective; False in a step that is lost, now or before.

        Raises CommunicationFailedError: the group broke outside of steps.
        """
        ledger, consensus = self._run.ledger, self._run.consensus
        if self._joins:
            consensus.wait(start())
            return True
        if ledger.failed or ledger.replaying:
            return False
        try:
            self.comes_next(what)
            consensus.wait(start())
            consensus.reductions_started()
        except CommunicationFailedError as error:
            if ledger.step is None:
                raise
            ledger.fail(str(error))
            return False
        return True


class GatherShards:
    """Hook of torch for the all-gathers of one sharded module."""

    def __init__(self, collectives: ShardCollectives, unit: int) -> None:
        self._collectives, self._unit = collectives, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Gather one module's shards into the output tensor."""
        self._collectives.gather(output_tensor, input_tensor, self._unit)


class ScatterGradients:
    """Hook of torch for its reduce-scatters; weighted sums take the place of means."""

    def __init__(self, collectives: ShardCollectives, unit: int) -> None:
        self._collectives, self._unit = collectives, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Add up."""
        self._collectives.reduce_scatter(output_tensor, input_tensor, self._unit)


def _like(tensor: Tensor) -> str:
    return f"{tensor.numel()} {tensor.dtype}"


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes, because gloo does not know all types."""
    return tensor.reshape(-1).view(torch.uint8)


def _joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate the bytes of the tensors."""
    parts = [_bytes(each.detach().contiguous()) for each in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
