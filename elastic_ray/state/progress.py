"""Progress of a training run and its chain of proofs, as plain values for joiners and checkpoints (pure)."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from elastic_ray.batch.tokens import MOVED
from elastic_ray.json_numbers import dump
from elastic_ray.state.resume_point import ResumePoint
from placement.cluster.jobs import Progress
from placement.text import count

_LINK_BYTES = 6  # exact in a float64, as JavaScript reads it
_CHUNK = 1 << 20
BITS = (1 << 32) - 1
"""Sums of samples' hashes are taken modulo 2^32."""


FORMAT = 1
"""Format of proofs: which facts a link holds, and how digests and hashes are computed."""


def checksum(text: str) -> int:
    """Return a hash of a text that a float64 holds exactly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_LINK_BYTES).digest(), "big")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link in a run's chain of proofs (hashed facts on each training pass); any changed or missing link breaks it."""

    before: int  # the link that it follows; 0 for the first of a run, and after a checkpoint that does not know it
    link: int  # its own number, from that and its facts; never 0
    facts: Mapping[str, Any]  # what it proves, as plain values

    @classmethod
    def after(cls, before: int, facts: Mapping[str, Any]) -> Link:
        """Return the link with ``facts`` that continues the chain after link number ``before`` (0 starts a chain)."""
        facts = {"format": FORMAT, **facts}
        return cls(before=before, link=checksum(f"{before} {dump(facts, sort_keys=True)}") or 1, facts=facts)

    @property
    def detail(self) -> dict[str, Any]:
        """Fields of the link for an event's ``detail``."""
        return {"proof": {**self.facts, "before": self.before, "link": self.link}}


def sample_hashes(indices: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a pseudo-random 64-bit hash of each index (the finalizer of SplitMix64, Steele et al. 2014)."""
    values = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_of_all(samples: int) -> int:
    """Return the sum of the index hashes for indices 0 to ``samples`` - 1, modulo 2^32."""
    total = 0
    for begin in range(0, samples, _CHUNK):
        hashes = sample_hashes(np.arange(begin, min(begin + _CHUNK, samples), dtype=np.int64))
        total += int(hashes.sum(dtype=np.uint64)) & BITS
    return total & BITS


@dataclasses.dataclass(slots=True)
class PassProgress:
    """Progress of one pass of a loader within an epoch."""

    position: int = 0  # samples used so far
    done: bool = False  # whether it has ended
    # sum of the hashes of these samples' indices, modulo 2^32; None where not all of them are known
    hashed: int | None = 0

    def advance(self, samples: int, hashes: int | None = None) -> None:
        """Count a committed step with ``samples`` samples; ``hashes`` sums their index hashes (None: unknown)."""
        self.position += samples
        self.hashed = None if self.hashed is None or hashes is None else (self.hashed + hashes) & BITS

    def end(self) -> None:
        """Mark the pass as done."""
        self.done = True

    def adapt(self, other: PassProgress) -> None:
        """Adopt the progress of another rank's copy of this pass."""
        self.position, self.done, self.hashed = other.position, other.done, other.hashed


_MOST_ENDS = 128
"""Ends of epochs that are remembered: they travel with every heartbeat, and a run may have a million epochs."""


@dataclasses.dataclass(slots=True)
class RunProgress:
    """Progress of a run, and all other plain values that its ranks must share."""

    epoch: int = 0  # epoch in progress, from 0
    epochs: int | None = None  # declared number of epochs, None before it is known
    # the loader passes of this epoch in the order the user's code started them
    passes: list[PassProgress] = dataclasses.field(default_factory=list)
    loader_steps: int = 0  # committed steps of any loader since the start; orders the states of ranks
    steps: int = 0  # committed optimizer steps of the training loader
    lineage: int = 0  # generation in which the last step was committed
    ended_passes: int = 0  # loader passes that ended, counted when all ranks agreed on the end
    optimizers_stepped: int = 0  # optimizers stepped within the step in progress
    stepped_samples: int = 0  # samples of the step if its own update is among these, not only those of passes in it
    # what accumulators hold, by accumulator and name
    sums: dict[tuple[int, int], dict[str, float]] = dataclasses.field(default_factory=dict)
    reports: int = 0  # calls of ``report`` that the run has made
    # statistical progress of the committed steps, the sum of their gains: scale-invariant iterations, each worth one
    # step at the initial batch
    done: float = 0.0
    # ``done`` at the end of every ``stride``-th epoch
    epoch_ends: list[float] = dataclasses.field(default_factory=list)
    stride: int = 1  # 1; doubled whenever there would be too many ends
    collectives: int = 0  # those that user code made between steps and this rank has the results of
    collectives_before: int = 0  # the same at the last place from which a worker that joins runs the code
    meeting: bool = False  # user code is in a collective between steps now
    # that collective's number, of the rank whose state a worker that joins has got: what the code does up to there is
    # in it. None where it was in none.
    joined_at: int | None = None
    proof: int = 0  # latest link of the run's chain of proofs; 0 before the first
    # facts of the training pass that ended last, with its link; empty before the first
    last_pass: dict[str, int | None] = dataclasses.field(default_factory=dict)
    # most samples that a worker may take at once, since one ran out of memory with more; None for none
    memory_bound: int | None = None
    fits: int = 0  # most that one has taken at once in a committed step of training
    weighed: float = 0.0  # what the loop has weighed samples by (``loader.weigh``), their tokens, in steps that trained
    weighed_samples: int = 0  # how many samples these were
    tokens_per_sample: float = 0.0  # their mean as batches go by it, which follows once it has moved by a part

    @property
    def in_last_epoch(self) -> bool:
        """True if the loop has declared its number of epochs and the current epoch is the last."""
        return self.epochs is not None and self.epoch + 1 >= self.epochs

    @property
    def place_in_epochs(self) -> int:
        """Epoch and number of passes ended before its first unfinished pass, as one number that only increases."""
        return self.epoch << 20 | next((n for n, each in enumerate(self.passes) if not each.done), len(self.passes))

    def end_epoch(self) -> None:
        """Count the current epoch as done, and discard the progress of its passes."""
        self.epoch += 1
        self.passes.clear()
        self.collectives_before = self.collectives
        if self.epoch % self.stride == 0:
            self.epoch_ends.append(self.done)
        if len(self.epoch_ends) > _MOST_ENDS:
            self.epoch_ends, self.stride = self.epoch_ends[1::2], 2 * self.stride

    def start_pass(self, ordinal: int) -> None:
        """Start the epoch's pass number ``ordinal``, or continue it if it was started before."""
        if ordinal == len(self.passes):
            self.passes.append(PassProgress())
            self.collectives_before = self.collectives

    def discard_passes(self, ordinal: int) -> None:
        """Discard the epoch's passes from number `ordinal` on, which are nested in an ended or lost step."""
        del self.passes[ordinal:]

    def commit(self, generation: int) -> None:
        """Count a committed step of any loader, and record its generation."""
        self.loader_steps += 1
        self.lineage = generation
        self.collectives_before = self.collectives

    def commit_training(self, gain: float) -> None:
        """Count a committed training step; ``gain`` is the number of steps at the initial batch that it is worth."""
        self.steps += 1
        self.done += gain

    def count_weights(self, weight: float, samples: int) -> None:
        """Update the mean number of tokens per sample with a step's tokens (``weight``) and samples."""
        self.weighed += weight
        self.weighed_samples += samples
        mean = self.weighed / self.weighed_samples
        if mean > 0 and abs(mean - self.tokens_per_sample) > MOVED * self.tokens_per_sample:
            self.tokens_per_sample = mean

    def count_optimizers(self, stepped: int, samples: int = 0) -> None:
        """Set the number of optimizers that have stepped in the current step, and its samples; 0 samples if unused."""
        self.optimizers_stepped, self.stepped_samples = stepped, samples

    def end_pass(self) -> None:
        """Count a pass as ended, as agreed by all ranks."""
        self.ended_passes += 1
        self.collectives_before = self.collectives

    def prove(self, facts: Mapping[str, int | None]) -> None:
        """Append the facts about a finished training pass as the next link of the run's hash chain of proofs."""
        link = Link.after(self.proof, facts)
        self.proof, self.last_pass = link.link, {**link.facts, "before": link.before, "link": link.link}

    def advance_passes(self, furthest: int) -> None:
        """Set the number of ended passes to ``furthest``, another rank's number, if that is larger."""
        self.ended_passes = max(self.ended_passes, furthest)
        self.collectives_before = self.collectives

    def count_collective(self) -> None:
        """Count a collective whose result user code has received."""
        self.collectives += 1
        self.meeting = False

    def count_report(self, agreed: int) -> int:
        """Count another ``report`` call, and return its number; all ranks have agreed on at least ``agreed`` calls."""
        self.reports = max(self.reports, agreed) + 1
        return self.reports

    def bound_memory(self, failed: int, least: int = 1) -> None:
        """Bound the samples processed at once, after a worker ran out of memory with ``failed`` samples."""
        self.limit_memory(self.bound_after(failed, least))

    def bound_after(self, failed: int, least: int = 1) -> int:
        """Return the bound on samples at once that follows if a worker runs out of memory with ``failed`` samples.

        The bound is half of ``failed`` or, if larger, ``least``, or the largest number known to fit, if at most 90 % of
        ``failed``. If that is no less than the bound that the samples were divided by, it is half of that bound.
        """
        fits = self.fits if self.fits <= 0.9 * failed else 0
        bound = max(least, failed // 2, fits)
        if self.memory_bound is not None and bound >= self.memory_bound:
            bound = max(least, self.memory_bound // 2)
        return bound

    def limit_memory(self, bound: int | None) -> None:
        """Lower the bound on the samples that any worker processes at once to ``bound``; None changes nothing."""
        if bound is not None:
            self.memory_bound = bound if self.memory_bound is None else min(bound, self.memory_bound)
            self.count_fit(0)

    def count_fit(self, samples: int) -> None:
        """Count that workers had memory for a committed training step with ``samples`` samples at once.

        Samples beyond the bound do not count: the step was committed by other ranks than the one that lacked memory.
        """
        self.fits = max(self.fits, samples)
        if self.memory_bound is not None:
            self.fits = min(self.fits, self.memory_bound)

    def add_sums(self, added: Iterable[tuple[tuple[int, int], str, float]]) -> None:
        """Add contributions from all ranks, given as (accumulator key, name, value), to the sums."""
        for key, name, value in added:
            sums = self.sums.setdefault(key, {})
            sums[name] = sums.get(name, 0.0) + value

    def keep_sums(self) -> None:
        """Drop the sums of all accumulators except those made in the current epoch, or before the first epoch."""
        kept = (-1, self.epoch)
        self.sums = {key: sums for key, sums in self.sums.items() if key[0] in kept}

    def reset_sums(self, key: tuple[int, int]) -> None:
        """Empty the sums of the accumulator with this key, adding the key if it is new."""
        self.sums[key] = {}

    def restore_effects(self, effects: Effects) -> None:
        """Restore the sums and the number of reports from an earlier result of :meth:`effects`."""
        self.sums, self.reports = effects.sums, effects.reports

    def effects(self) -> Effects:
        """Return a copy of the sums and the number of reports, for :meth:`restore_effects`."""
        return Effects(sums=copy.deepcopy(self.sums), reports=self.reports)

    def after(self, ordinal: int, count: int, gain: float) -> RunProgress:
        """Return a copy that counts the current step, of ``count`` samples and this gain, as done.

        Args:
            ordinal: Number of the epoch's loader passes that had started when the step started.
        """
        done = copy.deepcopy(self)
        done.discard_passes(ordinal)
        done.passes[-1].advance(count)
        done.commit_training(gain)
        return done

    def summary(self) -> Progress:
        """Return the progress as sent to the allocator; to limit its size, ``stride`` epochs count as one."""
        epochs = None if not self.epochs else self.epochs / self.stride
        return Progress(done=self.done, epoch_ends=tuple(self.epoch_ends), epochs=epochs, stride=self.stride)

    def resume_point(self, samples_left: int = 0) -> ResumePoint:
        """Return the resume point for a checkpoint of this state; ``samples_left`` is stored with it.

        If every loader pass in the epoch has ended, a checkpoint of this state resumes at the next epoch.
        """
        point = self
        if self.passes and all(each.done for each in self.passes):
            point = copy.deepcopy(self)
            point.end_epoch()
        return ResumePoint(
            epoch=point.epoch,
            epochs=point.epochs,
            passes=tuple((each.position, each.done) for each in point.passes),
            steps=point.steps,
            reports=point.reports,
            done=point.done,
            epoch_ends=tuple(point.epoch_ends),
            stride=point.stride,
            samples_left=samples_left,
        )

    @property
    def place(self) -> str:
        """Epoch, steps and passes as text, which is identical for ranks at the same position."""
        positions = ", ".join(
            f"{count(each.position, 'sample')}{' and done' if each.done else ''}" for each in self.passes
        )
        return f"epoch {self.epoch} after {count(self.steps, 'step')}" + (
            f" (passes: {positions})" if positions else ""
        )

    @classmethod
    def from_resume_point(cls, point: ResumePoint) -> RunProgress:
        """Return the progress at a resume point, the inverse of :meth:`resume_point`."""
        return cls(
            epoch=point.epoch,
            passes=[PassProgress(position, done, None if position else 0) for position, done in point.passes],
            steps=point.steps,
            reports=point.reports,
            epochs=point.epochs,
            done=point.done,
            epoch_ends=list(point.epoch_ends),
            stride=point.stride,
        )

    def to_state(self) -> dict[str, Any]:
        """Return plain values for joining ranks and checkpoints, which resume at the last common position."""
        return dataclasses.asdict(self) | {
            "collectives": self.collectives_before,
            "joined_at": self.collectives if self.meeting else None,
            "meeting": False,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunProgress:
        """Return the progress that :meth:`to_state` wrote. Raises TypeError if the state has different fields."""
        return cls(**{**state, "passes": [PassProgress(**each) for each in state["passes"]]})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Effects of user code outside the model: sums of accumulators, and the number of reports."""

    sums: dict[tuple[int, int], dict[str, float]]
    reports: int


def in_no_generation(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored state adapted for a new job: without its generation, and with no optimizer step in progress."""
    return {**state, "lineage": 0, "optimizers_stepped": 0}
