"""Scripted faults in jobs of processes on one device: run as a program it counts hangs, pauses and wrong results."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastic_ray as er
from tests.gpu.processes import ProcessJob, asked_to_finish
from tests.membership.groups import local_controller
from tests.sync.sharded_parameters.sharded import Net, data

EQUAL = (
    "all_reduce",
    "zero1",
    "zero2",
    "ps_balanced",
    "partitioned_ar",
    "ring",
    "fully_shard",
    "hsdp",
)  # as one worker alone
UNEQUAL = ("int8", "powersgd", "local_sgd", "diloco")  # what is sent is rounded, or sent seldom
DIVIDED = ("zero1", "zero2", "ps_balanced", "fully_shard", "hsdp")
BATCH = 12
HANGS_S = 25.0
CLOSE = 1e-6
LEAST = 3  # members when a fault strikes: two are left
STEP_MOMENTS = ("forward", "backward", "allreduce", "optimizer_step", "after_step", "edge")
KINDS = (
    *(f"kill {moment}" for moment in STEP_MOMENTS),
    "kill receiving",
    "kill source",
    "kill forming",
    "stop forward",
    "stop forming",
    "cancel forming",
    "swap",
    "swap and kill",
)


def train(
    strategy: str, device_name: str, epochs: int, pace_s: float, asked: Callable[[], bool] = asked_to_finish
) -> Any:
    """Train until so many epochs are over (0: until some rank is asked to finish); return the model, on each rank."""
    strategy, _, kind = strategy.partition("+")  # of the optimizer
    device = torch.device(device_name)
    model = Net().double().to(device)
    if strategy in ("fully_shard", "hsdp"):
        size = {"shard_size": 2} if strategy == "hsdp" else {}
        for block in model.blocks:
            er.fully_shard(block, **size)
        er.fully_shard(model, **size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.003, weight_decay=0.1, eps=1e-2, **({kind: True} if kind else {})
    )
    options = {} if strategy in ("all_reduce", "fully_shard", "hsdp") else {"strategy": strategy}
    wrapped: Any = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", **options)
    ended = 0
    for _ in er.remaining_epochs_until(epochs or 10**6):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.double().to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if not epochs and not asked():
                time.sleep(pace_s)  # so that a step takes as long as one of a model
        ended += 1
        if not epochs and er.all_reduce(int(asked())):
            break
    weights = {name: value.cpu().tolist() for name, value in model.state_dict().items()}
    return {"weights": weights, "epochs": ended}


class Faults:
    """Strikes one job after the other way."""

    def __init__(self, job: ProcessJob, seed: int, until_s: float) -> None:
        self.job, self.dice, self.until_s = job, random.Random(seed), until_s
        self.spares: list[int] = []
        self.next = 1
        self.outcomes: list[dict[str, Any]] = []

    def more(self, count: int = 1) -> None:
        for _ in range(count):
            self.job.start(self.next)
            self.spares.append(self.next)
            self.next += 1

    def spare(self) -> int:
        """A worker that is ready to join; another one is started in its place."""
        self.more()
        number = self.spares.pop(0)
        self.job.wait(lambda: self.job.workers[number].ready.is_set(), 40.0, f"w{number} does not start")
        return number

    def trained(self, since_s: float, what: str) -> float:
        """Wait until all members have applied a step in the present group; returns when."""
        job = self.job

        def all_have() -> bool:
            return all(
                job.workers[each].generation == job.generation
                and job.workers[each].steps
                and job.workers[each].steps[-1][1] > job.workers[each].entered_s
                for each in job.members
            )

        job.wait(all_have, HANGS_S, f"no step after {what}")
        return max(
            next(s for _, s in job.workers[each].steps if s > job.workers[each].entered_s) for each in job.members
        )

    def lost(self, number: int, what: str, seconds: float = HANGS_S) -> float:
        """Wait until a worker is known to be lost; returns when."""
        job = self.job
        job.wait(lambda: number not in job.members, seconds, f"{what} does not strike")
        return time.monotonic()

    def join(self) -> float:
        """One more worker; returns the time from its announcement to the first step of all."""
        number = self.spare()
        begin_s = time.monotonic()
        self.job.announce((*self.job.members, number), void=False)
        return self.trained(begin_s, f"w{number} has joined") - begin_s

    def refill(self, size: int) -> None:
        """As many members again, in one change."""
        numbers = [self.spare() for _ in range(size - len(self.job.members))]
        self.job.announce((*self.job.members, *numbers), void=False)
        self.trained(time.monotonic(), "a refill")

    def kill(self, moment: str, sent: int) -> dict[str, Any]:
        number = self.dice.choice(self.job.members)
        self.job.arm(number, moment, sent)
        lost_s = self.lost(number, f"{sent} at {moment}", 12.0)
        return {"next_s": self.trained(lost_s, moment) - lost_s}

    def kill_in_transfer(self, *, source: bool) -> dict[str, Any]:
        job, number = self.job, self.spare()
        before = job.members
        victim = before[0] if source else number
        job.arm(victim, "receiving", signal.SIGKILL)
        job.announce((*before, number), void=False)
        lost_s = self.lost(victim, "a kill while the state moves")
        return {"next_s": self.trained(lost_s, "a kill while the state moves") - lost_s}

    def strike_forming(self, sent: int) -> dict[str, Any]:
        job, number = self.job, self.spare()
        before = job.members
        victim = self.dice.choice([*before, number])
        job.announce((*before, number), void=False)
        time.sleep(self.dice.random() * 0.3)  # at some moment of the forming
        os.kill(job.workers[victim].process.pid, sent)
        lost_s = self.lost(victim, "a signal while forming")
        return {"next_s": self.trained(lost_s, "a signal while forming") - lost_s}

    def cancel_forming(self) -> dict[str, Any]:
        job, number = self.job, self.spare()
        before = job.members
        generation = job.announce((*before, number), void=False)
        time.sleep(self.dice.random() * 0.25)  # at some moment of the forming
        if all(job.workers[each].generation >= generation for each in before):
            return {"next_s": 0.0, "late": 1}
        job.cancel(generation, (*before, number))
        # Who has entered it already regroups; so another one is reported to all, as the controller does.
        begin_s = time.monotonic()
        job.announce((*before, number), void=False)
        return {"next_s": self.trained(begin_s, "a cancelled change") - begin_s}

    def swap(self, *, kill: bool) -> dict[str, Any]:
        """One leaves and one joins in the same change; by choice one of those that stay is killed on the way."""
        job, number = self.job, self.spare()
        leaves = self.dice.choice(job.members[1:] or job.members)
        stay = [each for each in job.members if each != leaves]
        begin_s = time.monotonic()
        if kill and len(stay) > 1:
            job.arm(stay[-1], "receiving", signal.SIGKILL)
        job.announce((*stay, number), void=False)
        if kill and len(stay) > 1:
            begin_s = self.lost(stay[-1], "a kill in a swap")
        return {"next_s": self.trained(begin_s, "a swap") - begin_s}

    def strike(self, kind: str) -> dict[str, Any]:
        what, _, where = kind.partition(" ")
        sent = signal.SIGSTOP if what == "stop" else signal.SIGKILL
        if kind == "join":
            return {"next_s": 0.0, "join_s": self.join()}
        if kind == "leave":
            begin_s = time.monotonic()
            self.job.announce(self.job.members[:-1], void=False)
            return {"next_s": self.trained(begin_s, kind) - begin_s}
        if where == "receiving":
            return self.kill_in_transfer(source=False)
        if where == "source":
            return self.kill_in_transfer(source=True)
        if what == "cancel":
            return self.cancel_forming()
        if where == "forming":
            return self.strike_forming(sent)
        if what == "swap":
            return self.swap(kill=bool(where))
        return self.kill(where, sent)


def alone(strategy: str, device: str, steps: int) -> Any:
    """Weights of one undisturbed worker."""
    with local_controller() as controller:
        job = ProcessJob(controller, train, (strategy, device, steps, 0.0), gpu=device == "cuda")
        try:
            worker = job.start(1)
            job.wait(worker.ready.is_set, 60.0, "one alone does not start")
            job.announce((1,), void=False)
            job.wait(lambda: bool(worker.over), 120.0, "one alone does not end")
            if worker.over != "done":
                raise RuntimeError(worker.over)
            return worker.result
        finally:
            job.close()


def apart(mine: Any, wanted: Any) -> float:
    """The largest difference of two models."""
    return max(
        float((torch.tensor(value, dtype=torch.float64) - torch.tensor(wanted[name], dtype=torch.float64)).abs().max())
        for name, value in mine.items()
    )


def run(
    strategy: str,
    device: str,
    kinds: list[str],
    *,
    seed: int,
    until_s: float,
    pace_s: float,
    workers: int = 4,
    spares: int = 2,
) -> dict[str, Any]:
    """One job that all these faults strike, as far as time allows."""
    found: dict[str, Any] = {"strategy": strategy, "seed": seed, "faults": [], "hangs": [], "error": ""}
    with local_controller() as controller:
        job = ProcessJob(controller, train, (strategy, device, 0, pace_s), gpu=device == "cuda")
        faults = Faults(job, seed, until_s)
        try:
            faults.more(workers)
            first = list(faults.spares)
            faults.spares.clear()
            faults.more(spares)
            for each in first:
                job.wait(lambda e=each: job.workers[e].ready.is_set() or job.workers[e].over, 60.0, "start")
            job.announce(first, void=False)
            faults.trained(time.monotonic(), "the beginning")
            for kind in kinds:
                if time.monotonic() > until_s - 8.0:
                    break
                job.note(f"--- {kind}")
                if len(job.members) < LEAST:
                    faults.refill(workers)
                size = len(job.members)
                found["faults"].append({"kind": kind, "size": size, **faults.strike(kind)})
            job.finish()
            job.wait(lambda: all(job.workers[e].over for e in job.members), HANGS_S, "the end")
            wrong = [job.workers[each].over for each in job.members if job.workers[each].over != "done"]
            found["error"] = "; ".join(wrong)
            results = [job.workers[each].result for each in job.members if job.workers[each].result]
            found["memory"] = [job.workers[each].memory for each in job.members]
            if results:
                found["ranks_apart"] = max(apart(each["weights"], results[0]["weights"]) for each in results)
                found["result"] = results[0]
                found["steps"] = job.last_step(job.members)
        except TimeoutError as error:
            found["hangs"].append(str(error))
        except Exception:
            found["error"] = traceback.format_exc()[-600:]
        finally:
            job.close()
            found["log"] = job.log
            found["over_nccl"] = sorted(job.over_nccl)
            found["forming_s"] = [round(each, 3) for each in job.forming_s]
            found["planned"] = [detail for planned, detail in job.pauses if planned]
    return found


def summary(found: dict[str, Any], bar_s: float) -> str:
    """One line."""
    times = sorted(each["next_s"] for each in found["faults"])
    joins = sorted(each["join_s"] for each in found["faults"] if each.get("join_s"))
    late = [f"{each['kind']}:{each['next_s']:.2f}" for each in found["faults"] if each["next_s"] > bar_s]
    middle: Callable[[list[float]], float] = lambda values: statistics.median(values) if values else 0.0  # noqa: E731
    waits = [sum(p[part] or 0.0 for part in ("vote_s", "group_s", "state_s")) for p in found["planned"]]
    if found["shown"]:
        print(" ".join(f"{each['kind']} {each['next_s']:.2f}" for each in found["faults"]))
        print("pauses of each rank", " ".join(f"{each:.3f}" for each in waits))
    states = [p["state_s"] for p in found["planned"] if p["state_s"]]
    return (
        f"{found['strategy']:14} n={len(times):3} hangs={found['hangs']} err={found['error'][-300:]!r} "
        f"next {middle(times):.2f}/{max(times, default=0):.2f} join {middle(joins):.2f} form "
        f"{middle(found['forming_s']):.2f}/{max(found['forming_s'], default=0):.2f} nccl={found['over_nccl']} "
        f"apart={found.get('apart', -1):.1e} ranks={found.get('ranks_apart', -1):.1e} steps={found.get('steps')} "
        f"late={late[:6]} mem={found.get('memory')} planned pauses n={len(waits)} "
        f"{middle(waits):.3f}/{max(waits, default=0):.3f} state {middle(states):.3f}/{max(states, default=0):.3f}"
    )


def main() -> None:
    """Run one job, write all about it into a file, and print a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("--device", default=os.environ.get("ELASTIC_RAY_TEST_DEVICE", "cuda"))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--out", default=".")
    parser.add_argument("--show", action="store_true", help="print each fault's times")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--spares", type=int, default=2, help="workers that are ready to join")
    parser.add_argument("--bar", type=float, default=0.7)
    chosen = parser.parse_args()
    until_s = time.monotonic() + chosen.seconds
    kinds = chosen.kinds.split(",") if chosen.kinds else list(KINDS)
    if (
        chosen.strategy.partition("+")[0] in DIVIDED
    ):  # a rank that leaves and one that dies in the same change may hold both copies
        kinds = [kind for kind in kinds if kind != "swap and kill"]
    kinds = (kinds * chosen.count)[: chosen.count]
    if not chosen.kinds:
        random.Random(chosen.seed).shuffle(kinds)
    found = run(
        chosen.strategy,
        chosen.device,
        kinds,
        seed=chosen.seed,
        until_s=until_s,
        pace_s=chosen.pace,
        workers=chosen.workers,
        spares=chosen.spares,
    )
    found["shown"] = chosen.show
    result = found.pop("result", None)
    if result and chosen.strategy.partition("+")[0] in EQUAL:
        try:
            steps = found["steps"]
            epochs = steps * BATCH // len(data())
            same = chosen.strategy.partition("+")  # the optimizer's kind rounds in its own way
            wanted = alone("".join(("all_reduce", *same[1:])), chosen.device, epochs)
            found["apart"] = apart(result["weights"], wanted["weights"])
            found["epochs"] = steps * BATCH / len(data())
        except Exception as error:
            found["error"] += f"; reference: {error}"
    name = f"{chosen.strategy}-{chosen.seed}"
    Path(chosen.out, f"{name}.json").write_text(json.dumps(found, indent=1))
    print(summary(found, chosen.bar), flush=True)
    if found["hangs"] or found["error"]:
        print("\n".join(line[:110] for line in found["log"][-14:]), flush=True)
    sys.exit(bool(found["hangs"] or found["error"]))


if __name__ == "__main__":
    from tests.gpu import faults  # so that workers find what is theirs by its name

    faults.main()
