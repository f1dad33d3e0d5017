"""Intents: each rank's next action, announced as a number before collectives (pure).

Ranks with different next actions must not meet in one collective: if sizes differ, a process crashes; if they are
equal, unrelated values are summed.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Iterable, Sequence

from placement.text import count

_INDEX_BITS, _DETAIL_BITS = 8, 40  # with the intent's 4 bits, a code is exact in float64


class RanksDisagreeError(RuntimeError):
    """Error raised if ranks make different calls in the same step, so that their collectives cannot match."""


class Intent(enum.IntEnum):
    """Next action of a rank."""

    GRADIENTS = 1
    EDGE = 2
    END_OF_PASS = 3
    BUFFERS = 4
    FINISH = 5
    ROWS = 6
    COLLECTIVE = 7
    UPDATE = 8
    STATE = 9
    SHARDS = 10
    IDLE = 11
    GATHER = 12
    PLAN = 13
    TRANSFER = 14


_TAG_BITS = 15

_SAME_CALLS = (
    "Every rank must make the same calls (backward, break, continue, return) in the same steps: let such a decision "
    "follow from numbers that all ranks share, such as an Accumulator's sums or get_context().get_global_step(), not "
    "from a rank's own samples, rank, clock or count"
)
_UNLIKE_SHARES = (
    ". If tensors have a row for each sample: ranks have unlike shares of a batch that their number does not divide. "
    "Pad the tensors to one shape, exchange them with elastic_ray.all_gather(), or choose batch sizes and numbers of "
    "workers that divide (SchedulingConfig(sizes=), drop_last=True)"
)
_STEPPED = "which parameters have a gradient, and learning rates"


@dataclasses.dataclass(frozen=True, slots=True)
class Announced:
    """Announcement of a rank's next action and its details, also encoded as one number."""

    intent: Intent
    index: int = 0  # number of the model, or depth of the loader pass, by kind
    detail: int = 0  # digest of what must be equal on all ranks besides (layouts, shapes), see :func:`digest`
    strategy: str = ""  # what a user calls that, of gradients and of his own collectives; no part of :attr:`code`
    code: int = dataclasses.field(init=False, repr=False, compare=False)  # as a number below 2^52, never 0

    def __post_init__(self) -> None:
        index = self.index % (1 << _INDEX_BITS)
        object.__setattr__(self, "code", (((self.detail << _INDEX_BITS) | index) << 4) | self.intent)

    @classmethod
    def from_code(cls, code: int) -> Announced:
        """Return the announcement encoded by :attr:`code`."""
        return cls(Intent(code & 15), (code >> 4) & ((1 << _INDEX_BITS) - 1), code >> (4 + _INDEX_BITS))

    def __str__(self) -> str:
        match self.intent:
            case Intent.GRADIENTS:
                under = f" under strategy {self.strategy!r}" if self.strategy else ""
                layout = f"(layout {self.detail:010x})"
                return f"reduces the gradients of model {self.index}{under} {layout} in a backward pass"
            case Intent.EDGE:
                nested = f" of a loader nested {self.index - 1} deep" if self.index > 1 else ""
                averaged = f", and averages models or ends its pass ({self.detail:010x})" if self.detail else ""
                return f"has come to the end of a step{nested}{averaged}"
            case Intent.END_OF_PASS:
                return f"ends its pass over a loader, or left it (buffers {self.detail:010x})"
            case Intent.BUFFERS:
                return f"brings the buffers of its models along (layout {self.detail:010x})"
            case Intent.ROWS:
                what = ("", "fetches rows of", "fetches the whole of", "loads")[self.detail % 4]
                return f"{what} ShardedEmbedding {self.detail // 4} of model {self.index}"
            case Intent.UPDATE:
                if self.detail & 1:
                    return f"divides the optimizer state of model {self.index} anew"
                return f"steps the optimizer of model {self.index} ({_STEPPED}: {self.detail >> 1:08x})"
            case Intent.STATE:
                return (
                    f"calls optimizer.state_dict() of model {self.index}, whose state lies with several ranks (call it "
                    "on all of them; the first one gets it)"
                )
            case Intent.SHARDS:
                if self.detail % 4 == 0 and (parts := self.detail >> 2):
                    return (
                        f"runs out of memory in an evaluation, and calls model {self.index}, whose parameters lie with "
                        f"several ranks, in {parts} parts (which all ranks must do: evaluate with smaller batches)"
                    )
                does = (
                    "calls",
                    "gathers or reduces another part of",
                    "asks for the whole state (call state_dict() on all ranks; the first one gets it) of",
                    "steps the optimizer of",
                )
                with_which = f" ({_STEPPED}: {self.detail >> 2:08x})" if self.detail % 4 == 3 else ""
                return (
                    f"{does[self.detail % 4]} model {self.index}, whose parameters lie with several ranks{with_which}"
                )
            case Intent.IDLE:
                return "has no sample in it, and waits at its end"
            case Intent.GATHER:
                return f"gathers part {self.detail} of model {self.index}, whose parameters lie with several ranks"
            case Intent.COLLECTIVE:
                which = f"number {self.index} between steps" if self.index else "within the step"
                return f"makes a collective of its own, {which} ({self.strategy or 'which'}: {self.detail:010x})"
            case Intent.PLAN:
                return "begins, or continues in a new group, a pass over a loader"
            case Intent.FINISH:
                return "has returned from the train function"
            case Intent.TRANSFER:
                received, peer, tag, _ = self.transfer
                verb, to, lacks = ("receive", "from", "sent") if received else ("send", "to", "asked for")
                return f"waits to {verb} a message {to} rank {peer} (tag {tag}), which that rank has not {lacks}"

    @property
    def transfer(self) -> tuple[bool, int, int, bool]:
        """Arguments that built this in :func:`transfer`: (``received``, ``peer``, ``tag``, ``in_vain``)."""
        rest, in_vain = divmod(self.detail, 2)
        return bool(self.index), rest >> _TAG_BITS, rest % (1 << _TAG_BITS), bool(in_vain)


def transfer(peer: int, tag: int, *, received: bool, in_vain: bool = False) -> Announced:
    """Return the announcement of a rank that is waiting for a message to (if ``received``, from) rank ``peer``.

    Args:
        in_vain: True if the other rank has returned, or is waiting for a message that this rank has not started.
    """
    detail = ((peer << _TAG_BITS) | tag) << 1 | in_vain
    return Announced(Intent.TRANSFER, int(received), detail)


def disagreement(codes: Sequence[int], loader_steps: Sequence[int], strategies: Sequence[str] = ()) -> str:
    """Return an error message that lists each rank's announced action and its number of committed steps.

    Args:
        codes: Announced code of each rank; 0 if a rank has announced nothing.
    """
    doing: dict[str, list[int]] = {}
    several = len(set(loader_steps)) > 1
    for rank, (code, steps) in enumerate(zip(codes, loader_steps, strict=True)):
        known = dataclasses.replace(Announced.from_code(code), strategy=strategies[rank]) if strategies else None
        what = str(known or Announced.from_code(code)) if code else "has announced nothing"
        doing.setdefault(f"{what} after {count(steps, 'step')}" if several else what, []).append(rank)
    told = "; ".join(f"{_named(ranks)} {what}" for what, ranks in doing.items())
    if idle := sum(code & 15 == Intent.IDLE for code in codes):
        return _needs_samples(min(loader_steps), len(codes) - idle, len(codes), told)
    if layouts_differ(codes):
        told += (
            ". Layouts differ with the strategy, which every rank must set alike, in the same step, "
            "with its options, and with the parameters that are trainable"
        )
    if _exchange_unlike_shapes(codes, strategies):
        told += _UNLIKE_SHARES
    return (
        f"the ranks do different things in step {min(loader_steps)} (steps of all loaders counted), so that their "
        f"collectives cannot be matched: {told}. {_SAME_CALLS}"
    )


def returned_early(rank: int, steps: int, other: int, others_steps: int) -> str:
    """Return the error message if rank ``rank`` has returned after ``steps`` steps, but rank ``other`` continues."""
    return (
        f"the ranks do different things in step {others_steps} (steps of all loaders counted): rank {rank} has "
        f"returned from the train function after {steps} steps; rank {other} begins another step. {_SAME_CALLS}"
    )


def _needs_samples(step: int, have: int, world_size: int, told: str) -> str:
    """Return the error text for an action that needs all ranks in a step where only ``have`` ranks have samples."""
    return (
        f"step {step} (steps of all loaders counted) has samples for {have} of {world_size} workers, and these do what "
        f"takes all of them: {told}. In such a step models may be called, and Accumulators added to. To train, to loop "
        "over another loader and for collectives of the loop's own every worker needs a sample: use at most "
        f"{have} worker{'s' if have > 1 else ''} here, more samples, or drop_last=True"
    )


def notes_differ(notes: Sequence[int], step: int) -> str:
    """Return the error message if only some ranks cleared the last update's gradients before a step."""
    doing: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        without = ", on top of those of the last update, which zero_grad() has not cleared" if note else ""
        doing.setdefault(f"reduces gradients{without}", []).append(rank)
    told = "; ".join(f"{_named(ranks)} {what}" for what, ranks in doing.items())
    return (
        f"the ranks do different things in step {step} (steps of all loaders counted), so that their gradients do not "
        f"belong together: {told}. Every rank must clear gradients in the same steps, whatever its rank, its own "
        "samples or a count of its own say"
    )


def joined_by_idle(codes: Sequence[int]) -> Announced | None:
    """Return the action announced by ranks with samples that ranks without samples can join; None if not announced.

    Args:
        codes: Announced code of each rank; a rank without samples announces the end of the step or pass where it is
            waiting.
    """
    told = {Announced.from_code(code) for code in codes if code}
    ends = {each for each in told if each.intent is Intent.IDLE}
    if len(ends) != 1 or len(told) != 2 or 0 in codes:
        return None
    (end,), (found,) = ends, told - ends
    match found.intent:
        case Intent.EDGE:
            joins = (found.index, found.detail) == (end.index, end.detail)
        case Intent.SHARDS:
            joins = found.detail == 0
        case Intent.ROWS:
            joins = found.detail % 4 == 1
        case _:
            joins = found.intent is Intent.GATHER
    return found if joins else None


def _exchange_unlike_shapes(codes: Sequence[int], calls: Sequence[str]) -> bool:
    """True if all ranks make the same collective of user code within a step, with tensors of different shapes."""
    known = [Announced.from_code(code) for code in codes if code]
    within = len(known) == len(codes) and {(each.intent, each.index) for each in known} == {(Intent.COLLECTIVE, 0)}
    return within and len(set(calls)) > 1 and len({call.partition("(")[0] for call in calls}) == 1


def layouts_differ(codes: Sequence[int]) -> bool:
    """True if any two ranks reduce gradients of the same model in different bucket layouts."""
    known = [Announced.from_code(code) for code in codes if code]
    layouts = {(each.index, each.detail) for each in known if each.intent is Intent.GRADIENTS}
    return len(layouts) > len({index for index, _ in layouts})


def _named(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    shown = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def agreed_generations_ahead(sum_of_distances: float, sum_of_squares: float, world_size: int) -> int:
    """Return how many generations ahead all ranks are prepared; 0 if ranks differ.

    Each rank contributes d and d squared to the two sums. d is the number of its prepared generation minus the current
    one's (0 if none is prepared). All d are equal if and only if ``world_size`` x sum(d^2) = sum(d)^2 (Cauchy-Schwarz).
    """
    total, squares = round(sum_of_distances), round(sum_of_squares)
    return total // world_size if total > 0 and world_size * squares == total * total else 0


def names_ballot(names: Sequence[tuple[tuple[int, int], str]]) -> list[float]:
    """Return a digest of the accumulators' names and its square, and their count and its square; exact in float64."""
    digest, count = zlib.crc32(repr(list(names)).encode()) & 0xFFFFF, len(names)
    return [float(digest), float(digest * digest), float(count), float(count * count)]


def names_agree(sums: Sequence[float], world_size: int) -> bool:
    """True if all ranks have the same names, based on the sums of their :func:`names_ballot`."""
    return all(world_size * round(b) == round(a) ** 2 for a, b in zip(sums[::2], sums[1::2], strict=True))
