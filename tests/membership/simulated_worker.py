"""A simulated worker: what ``session.py`` and ``worker_side.py`` do, without tensors and threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ray.data.sharding import can_switch
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.recovery import SurvivingWorker
from elastic_ray.membership.signals import (
    Finished,
    Left,
    Lost,
    PrepareFailed,
    Ready,
    Rerun,
    Signal,
    StepFailed,
    Switched,
)
from tests.membership.simulated_groups import Edge, State

if TYPE_CHECKING:
    from tests.membership.simulated_job import SimJob

REGROUP_TIMEOUT_S = 15.0


class SimWorker:
    """See the module's text.

    Attributes:
        token: number of the present wait; what comes for an older one is ignored.
        life: number of the present run of the train function (it starts over when out of memory).
        doing: "building", "joining", "regrouping", "exchanging", "stepping", or "gone".
        complete: holds a trained state.
        loaded: holds an automatic checkpoint, and has been in no group since.
        lineage: generation that the state last went through an exchange in.
    """

    def __init__(self, job: SimJob, name: str, node: str, state: State, loaded: bool) -> None:
        self._job = job
        self.loaded = loaded
        self.name, self.node, self.state = name, node, state
        self.token = self.life = 0
        self.alive = True
        self.hung_s: float | None = None
        self.complete, self.lineage = False, 0
        self.starts_over = False
        self.ending: Signal | None = None
        self.doing = "building"
        self.current: GenerationSpec | None = None
        self._collectives = 0
        self._discard()
        self._build()

    def _discard(self) -> None:
        self.switched = 0
        self._latest = self._void_below = 0
        self._cancelled: set[int] = set()
        self._prepared: tuple[GenerationSpec, bool] | None = None
        self.current = None

    @property
    def responsive(self) -> bool:
        """Whether it runs at all."""
        return self.alive and self.hung_s is None

    @property
    def holds_state(self) -> bool:
        """Whether it could continue with training."""
        return self.responsive and self.complete and self.doing != "gone"

    @property
    def generation(self) -> int:
        """Its present generation, 0 before the first."""
        return self.current.generation if self.current is not None else 0

    @property
    def testifies(self) -> bool:
        """Whether its process can tell a new controller of it; that of a run which has ended can."""
        return self.responsive or (self.ending is not None and self.hung_s is None)

    def as_survivor(self) -> SurvivingWorker:
        """As ``Worker._introduce``."""
        return SurvivingWorker(
            worker=self.name,
            node=self.node,
            spec=self.current,
            switched=self.switched,
            ready=None if self.doing == "building" else self._ready(),
            failed=self._failed("told late") if self.doing == "regrouping" else None,
            pause=Pause(state_s=0.1),
            starts_over=self.starts_over,
        )

    def _ready(self) -> Ready:
        return Ready(worker=self.name, has_state=self.complete, loaded=self.state.ticks if self.loaded else 0)

    def _failed(self, cause: str) -> StepFailed:
        return StepFailed(worker=self.name, generation=self.generation, cause=cause)

    def _end(self, ending: Signal) -> None:
        """The run is over; a new controller may ask how it ended."""
        self.ending = ending
        self._job.send(ending)

    def _build(self) -> None:
        self.doing, life = "building", self.life

        def built() -> None:
            if self.responsive and self.life == life:
                self.doing = "joining"
                self._job.send(self._ready())
                self._poll()

        self._job.soon(1.5, built, at_least_s=0.1)

    # -- faults ------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Its process is gone."""
        self.ending = None
        if self.alive:
            self.alive, self.doing = False, "gone"
            self._job.groups.died(self.name)

    def hang(self) -> None:
        """Its process stands still: no peer notices."""
        self.hung_s = self._job.now_s

    def run_out_of_memory(self) -> None:
        """Start over with the state kept; the peers' sockets stay open."""
        if not self.responsive or self.doing != "stepping" or not self.complete:
            return
        self._job.send(Rerun(worker=self.name))
        self.starts_over = True
        self.token += 1
        self.life += 1
        self._discard()
        self._build()

    # -- messages ----------------------------------------------------------------------------------------------

    def hear_plan(self, spec: GenerationSpec) -> None:
        """As ``WorkerMembership.post``."""
        if self.doing == "gone":
            return
        self._void_below = max(self._void_below, spec.void_below)
        if self._is_void(spec.generation) or spec.generation <= self._latest:
            return
        self._latest = spec.generation
        self._call_off()
        if spec.rank_of(self.name) is None:
            self._prepared = (spec, False)
            self._poll()
        else:
            self._job.groups.form(spec, self)

    def hear_cancel(self, generation: int) -> None:
        """As ``WorkerMembership.post``."""
        self._cancelled.add(generation)
        self._call_off()
        self._poll()

    def _is_void(self, generation: int) -> bool:
        return generation < self._void_below or generation in self._cancelled

    def _call_off(self) -> None:
        if self._prepared is not None and self._is_void(self._prepared[0].generation):
            self._prepared = None
        if self.current is not None and self._is_void(self.generation) and self.doing in ("exchanging", "stepping"):
            self.fail("the generation was called off", self.token)

    def formed(self, spec: GenerationSpec, life: int) -> None:
        """Its group is there."""
        if self.responsive and life == self.life and spec.generation == self._latest:
            if not self._is_void(spec.generation):
                self._prepared = (spec, True)
                self._poll()

    def not_formed(self, spec: GenerationSpec, life: int) -> None:
        """Its group cannot be formed."""
        prepared = self._prepared is not None and self._prepared[0].generation == spec.generation
        if self.responsive and life == self.life and not prepared and self.generation < spec.generation:
            if not self._is_void(spec.generation):
                self._job.send(PrepareFailed(worker=self.name, generation=spec.generation, cause="timeout"))

    # -- from generation to generation -------------------------------------------------------------------------

    def _poll(self) -> None:
        """Take the prepared group up where one is waited for."""
        if self._prepared is None or self.doing not in ("joining", "regrouping"):
            return
        replaced = self.current is None or self._is_void(self.generation)
        if replaced or self._job.rules.regroup_into_planned:  # else it needs the agreement of all
            self._take()

    def _take(self) -> None:
        assert self._prepared is not None
        (spec, member), self._prepared = self._prepared, None
        self.current = spec
        self.token += 1
        if not member:
            self.doing = "gone"
            self._job.soon(0.3, self._unwound)
            return
        self.doing, self._collectives = "exchanging", 0
        self._job.groups.collective(self, spec, 0, 0, lambda _: self._exchange(spec))

    def _unwound(self) -> None:
        if self.responsive:
            self.alive = False  # it rests in the warm pool
            self._end(Left(worker=self.name))

    def _exchange(self, spec: GenerationSpec) -> None:
        token = self.token

        def arrive() -> None:
            if not self.responsive or self.token != token:
                return
            if self._job.groups.receive(spec, self):
                self.complete, self.loaded, self.lineage, self.starts_over = True, False, spec.generation, False
                self.switched = spec.generation
                self._job.send(Switched(worker=self.name, generation=spec.generation, pause=Pause(state_s=0.1)))
                self._step()
            else:
                self._job.after(0.5, lambda: self.fail("its source is gone", token))

        self._job.after(self._job.groups.due_s(spec, self), arrive)

    def fail(self, cause: str, token: int) -> None:
        """What it waits for cannot be."""
        if not self.responsive or token != self.token or self.doing not in ("exchanging", "stepping"):
            return
        self.token += 1
        was, self.doing = self.doing, "regrouping"
        if not self.complete:
            self.doing = "joining"
        else:
            self._job.send(self._failed(f"{cause} ({was})"))
            token = self.token
            self._job.after(REGROUP_TIMEOUT_S, lambda: self._give_up(token))
        self._poll()

    def _give_up(self, token: int) -> None:
        if self.responsive and self.token == token and self.doing == "regrouping":
            self.doing = "gone"
            self._end(Lost(worker=self.name, cause="heard of no generation"))

    # -- steps -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self.doing = "stepping"
        self.token += 1
        token = self.token

        def reduce() -> None:
            if not self.responsive or self.token != token or self.current is None:
                return
            self._collectives += 1
            ahead = self._prepared[0].generation - self.generation if self._prepared is not None else 0
            self._job.groups.collective(self, self.current, self._collectives, ahead, self._commit)

        self._job.soon(0.25, reduce, at_least_s=0.05)

    def _commit(self, edge: Edge) -> None:
        assert self.current is not None
        self.state = edge.state
        self._job.groups.committed(self.current, edge.state)
        if self.current.rank_of(self.name) == 0:
            self._job.maybe_checkpoint(edge.state)
        if edge.state.final:
            self.doing, self.alive = "gone", False
            self._job.finished.append(edge.state)
            self._end(Finished(worker=self.name))
        elif edge.ahead and self._switch(self.generation + edge.ahead):
            return
        else:
            self._step()

    def _switch(self, generation: int) -> bool:
        if self._prepared is None or self._prepared[0].generation != generation:
            self.fail("called off after it was agreed on", self.token)
            return True
        world = self._prepared[0].world_size
        if not can_switch(position=self.state.position, total=self._job.samples, world_size=world):
            return False
        self._take()
        return True
