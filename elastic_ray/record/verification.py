"""Verification of a run's events: identical group state, each sample once per epoch, repeated steps (pure).

Each event of kind ``pass`` proves facts about one pass over the data, and is a link of a hash chain
(``elastic_ray.state.progress``). A missing, added or modified line breaks the chain. A proof also has its event's
checksum (seal) and the job's name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from elastic_ray.events import EventKind, JobEvent
from elastic_ray.state.progress import BITS, FORMAT, Link, checksum, hash_of_all
from placement.text import count, printable

_ADDED = ("before", "link", "job", "seal")  # to a proof's facts
_KINDS = (EventKind.STARTED, EventKind.RESIZE, EventKind.FAILURE, EventKind.RECOVERED, EventKind.PASS)
# A file may be anybody's: what it counts is not to keep who verifies it busy for hours.
_MOST = 10**10
_sum_of_all = functools.lru_cache(maxsize=8)(hash_of_all)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check of a run."""

    line: int  # of the events' file, from 1; 0 for the whole
    what: str  # "group", "epoch", "steps", "line" or "checkpoint"
    proven: bool | None  # True; False where it is not proven; None for what there is nothing to prove of
    text: str  # a sentence


@dataclasses.dataclass(slots=True, kw_only=True)
class _Proof:
    line: int
    event: JobEvent
    facts: Mapping[str, Any]
    before: int
    link: int
    wrong: str  # why the line proves nothing; empty if it is as it was written

    @property
    def step(self) -> int:
        return int(self.facts.get("step", self.facts.get("steps", 0)))

    @property
    def says(self) -> str:
        """Name of the epoch or generation that the proof belongs to."""
        if self.event.kind is EventKind.PASS:
            return f"epoch {self.facts.get('epoch')}"
        return f"generation {self.event.generation}"


def sealed(event: JobEvent, job: str) -> JobEvent:
    """Return an event that has a proof with the job's name and a checksum of the whole event added to the proof."""
    proof = {**event.detail["proof"], "job": job}
    named = dataclasses.replace(event, detail={**event.detail, "proof": proof})
    return dataclasses.replace(named, detail={**event.detail, "proof": {**proof, "seal": _seal(named)}})


def has_proof(events: Iterable[JobEvent], detail: Mapping[str, Any]) -> bool:
    """True if one of the events has the proof in ``detail``."""
    return any(event.detail.get("proof", {}).get("link") == detail["proof"]["link"] for event in events)


def _seal(event: JobEvent) -> int:
    """Return the checksum of an event without the checksum in its proof."""
    proof = {name: value for name, value in event.detail["proof"].items() if name != "seal"}
    return checksum(dataclasses.replace(event, detail={**event.detail, "proof": proof}).to_json())


def verify_events(
    lines: Iterable[str], *, epochs: int = 0, saved: Mapping[int, str] = MappingProxyType({})
) -> tuple[Finding, ...]:
    """Check all lines of a run's ``events.jsonl`` and return the findings, in the order of the lines.

    Args:
        epochs: Minimum number of epochs that the run has ended according to its result, to detect lines cut off.
        saved: Paths of automatic checkpoints, keyed by the last link before each, which the file must have.
    """
    found: list[Finding] = []
    proofs = _read(lines, found)
    known = {0} | {proof.link for proof in proofs}
    followed: dict[int, _Proof] = {}
    for proof in proofs:
        if proof.wrong:
            found.append(Finding(line=proof.line, what="line", proven=False, text=f"line {proof.line} {proof.wrong}"))
            continue
        if proof.before not in known:
            lost = f"what led to {proof.says} (step {proof.step}) is not in the file: unproven until there"
            found.append(Finding(line=proof.line, what="line", proven=False, text=lost))
        elif (first := followed.get(proof.before)) is not None:
            found.append(Finding(line=proof.line, what="steps", proven=None, text=_again(proof, first, proofs)))
        followed.setdefault(proof.before, proof)
        found.append(_epoch(proof) if proof.event.kind is EventKind.PASS else _group(proof))
    found += _missing(proofs, epochs)
    for link, path in saved.items():
        if link not in known:
            text = (
                f"what led to {path} is not in the file: its last lines are missing, or the checkpoint is another run's"
            )
            found.append(Finding(line=0, what="line", proven=False, text=text))
    if not proofs:
        found.append(Finding(line=0, what="line", proven=False, text="there is no proof in the run's events"))
    return tuple(sorted(found, key=lambda each: each.line))


def _again(proof: _Proof, first: _Proof, proofs: Iterable[_Proof]) -> str:
    """Return a sentence on a proof that follows the same one as ``first``, an earlier line."""
    if not proof.before:
        begins = f"a new chain of proofs begins with {proof.says} at step {proof.step}"
        return f"{begins}: training began anew, or continued from a reported checkpoint"
    return (
        f"the steps after {_place(proof, proofs)} were redone from a checkpoint: {proof.says} follows where "
        f"{first.says} did"
    )


def _place(proof: _Proof, proofs: Iterable[_Proof]) -> str:
    """Return a description of the position in the chain that a proof follows."""
    before = next(each for each in proofs if each.link == proof.before)
    return f"step {before.step} ({before.says})"


def _read(lines: Iterable[str], found: list[Finding]) -> list[_Proof]:
    """Return the proofs in these lines, equal ones once; lines that cannot be read are added to ``found``."""
    proofs: list[_Proof] = []
    known: set[int] = set()
    job: str | None = None

    def refuse(number: int, why: str) -> None:
        found.append(Finding(line=number, what="line", proven=False, text=f"line {number} {why}"))

    for number, line in enumerate(lines, 1):
        try:
            event = JobEvent.from_json(line)
        except ValueError as error:
            refuse(number, f"cannot be read: {error}")
            continue
        told = event.detail.get("proof")
        if event.kind not in _KINDS or told is None:
            continue
        try:
            before, link = _count(told, "before"), _count(told, "link")
            facts = {name: value for name, value in told.items() if name not in _ADDED}
            if facts.get("format") != FORMAT:
                wrong = f"has a proof of format {facts.get('format')!r:.20}, and only {FORMAT} can be checked here"
            elif Link.after(before, facts).link != link:
                wrong = "was changed: its facts are not those that its link was made of"
            elif _seal(event) != told.get("seal"):
                wrong = "was changed: its fields are not those that its seal was made of"
            else:
                _check(event.kind, facts)
                job = job or told["job"]
                wrong = "" if told["job"] == job else f"is of another job, {told['job']!r:.80}"
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            refuse(number, "has a proof that is none")
            continue
        if wrong or link not in known:
            proofs.append(_Proof(line=number, event=event, facts=facts, before=before, link=link, wrong=wrong))
        if not wrong:
            known.add(link)
    return proofs


def _check(kind: EventKind, facts: Mapping[str, Any]) -> None:
    """Raise ValueError if a proof has values that no run can produce."""
    is_pass = kind is EventKind.PASS
    for name in ("epoch", "steps", "samples", "of", "hash") if is_pass else ("step", "epoch", "digest", "bytes"):
        _count(facts, name)
    if is_pass and facts["rest"] is not None:
        _count(facts, "rest")
    if not is_pass and not (isinstance(facts["members"], list) and facts["members"]):
        raise ValueError("it has no members")


def _count(facts: Mapping[str, Any], name: str) -> int:
    value = facts[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def _group(proof: _Proof) -> Finding:
    """Return the finding for the start of a group."""
    facts = proof.facts
    members = printable(", ".join(map(str, facts["members"])))
    begins = f"{proof.says} began at step {proof.step} with {members}"
    if not facts.get("digest"):
        text = f"{begins}: its models differ by design, or are divided, so that there was nothing to compare"
        return Finding(line=proof.line, what="group", proven=None, text=text)
    text = f"{begins}, which held the same {facts.get('bytes')} bytes (digest {facts['digest']:010x})"
    return Finding(line=proof.line, what="group", proven=True, text=text)


def _epoch(proof: _Proof) -> Finding:
    """Return the finding for an ended epoch."""
    facts = proof.facts
    rest, total = facts["rest"], facts["of"]
    used, left = f"{proof.says}: {facts['samples']} of {count(total, 'sample')}", total - facts["samples"]
    if rest is None:
        text = f"{used}, by a sampler that may draw one twice: counted only"
        return Finding(line=proof.line, what="epoch", proven=None, text=text)
    if total > _MOST:
        text = f"{used}: more than {_MOST} are not counted here"
        return Finding(line=proof.line, what="epoch", proven=False, text=text)
    if (facts["hash"] + rest) & BITS != _sum_of_all(total):
        text = f"{used}, but not each once"
        return Finding(line=proof.line, what="epoch", proven=False, text=text)
    text = f"{used}, each once" + (f"; {left} left out at its end" if left else "")
    return Finding(line=proof.line, what="epoch", proven=True, text=text)


def _missing(proofs: Iterable[_Proof], epochs: int) -> list[Finding]:
    """Return findings for epochs, before the last one or epoch number ``epochs``, without any proof."""
    proven = {int(p.facts["epoch"]) for p in proofs if p.event.kind is EventKind.PASS and not p.wrong}
    told = sorted({-1} | proven | ({epochs} if proven and epochs > max(proven) else set()))
    gaps = [(one + 1, other - 1) for one, other in itertools.pairwise(told) if other - one > 1]
    text = "epoch{}: no line says that it ended, or its samples were not known"
    names = [f" {first}" if first == last else f"s {first} to {last}" for first, last in gaps]
    return [Finding(line=0, what="epoch", proven=False, text=text.format(name)) for name in names]
