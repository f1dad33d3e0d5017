"""Tensors that forward passes write to: of any kind, and those that have not changed are left alone."""

from __future__ import annotations

import pytest
import torch

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.parallel.buffers import BufferSync, SavedBuffers, WrittenTensors
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.shared_state import SharedState
from tests.membership.groups import on_ranks


@pytest.mark.parametrize("kind", ["inference", "sparse", "expanded", "dense"])
def test_buffers_of_any_kind_survive_lost_steps(kind: str) -> None:
    model = torch.nn.Module()
    with torch.inference_mode(kind == "inference"):
        held = torch.eye(4)
    held = held.to_sparse() if kind == "sparse" else held[:1].expand(4, 4) if kind == "expanded" else held
    model.register_buffer("held", held)
    written = WrittenTensors(model)
    for _ in range(5):
        before = written.remember()
        written.roll_back(before)
    assert model.get_buffer("held") is held


def test_unchanged_tensors_keep_their_counters() -> None:
    """Else a graph from before the lost pass could not be gone through any more."""
    model = torch.nn.Module()
    model.register_buffer("scale", torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    loss = (x * model.get_buffer("scale")).sum()
    written = WrittenTensors(model)
    written.roll_back(written.remember())
    loss.backward()
    assert x.grad is not None


def test_group_that_breaks_between_kinds_changes_no_buffers() -> None:
    def work(communicator: Communicator) -> tuple[float, int] | None:
        if communicator.rank == 1:
            # its floating-point buffers, and no others
            communicator.wait(communicator.all_reduce(torch.full((2,), 5.0)))
            communicator.leave(1.0)
            return None
        norm = torch.nn.BatchNorm1d(1)
        with pytest.raises(CommunicationFailedError):
            BufferSync(norm)(communicator)
        return float(norm.running_mean), int(norm.num_batches_tracked)

    assert on_ranks(2, work, timeout_s=5.0) == [(0.0, 0), None]


class Teacher(torch.nn.Module):
    """A frozen layer that forward passes write to, beside ``trained`` layers of the same size."""

    def __init__(self, trained: int) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
        self.trained = torch.nn.ParameterList(torch.zeros(8) for _ in range(trained))


@pytest.mark.parametrize("counted", [True, False])
def test_first_write_to_a_frozen_parameter_is_undone(counted: bool) -> None:
    model = Teacher(trained=1)
    written = WrittenTensors(model)
    for value in (1.0, 2.0):
        before, values = written.remember(), model.frozen.clone()
        (model.frozen if counted else model.frozen.data).fill_(value)
        written.roll_back(before)
        assert torch.equal(model.frozen, values)


def test_unwritten_frozen_parameters_are_not_held_twice() -> None:
    backbone, student = WrittenTensors(Teacher(trained=0)), WrittenTensors(Teacher(trained=1))
    first = [each.remember()[0] for each in (backbone, student)]
    assert [each is not None and each.copied is not None for each in first] == [False, True]
    assert all(each is not None and each.copied is None for each in (student.remember()[0], backbone.remember()[0]))


def test_lost_step_puts_no_other_tensor_in_place() -> None:
    """A loop may hold a teacher's parameters in a list, and move these."""
    model, states = Teacher(trained=1), SharedState(RunProgress())
    written, frozen = WrittenTensors(model), model.frozen
    states.register_rollback(written.remember, written.roll_back, "written")
    states.snapshot()
    frozen.fill_(1.0)
    states.roll_back()
    assert model.frozen is frozen and not frozen.any()


def test_buffer_that_grew_in_lost_step_shrinks() -> None:
    model = torch.nn.Module()
    model.register_buffer("seen", torch.zeros(0))
    seen = model.get_buffer("seen")
    written, saved = WrittenTensors(model), SavedBuffers(model)
    for go_back in (lambda before: written.roll_back(before), lambda _: saved.restore()):
        before = written.remember()
        saved.save(None, goes_on=False)
        seen.resize_(3).fill_(2.0)
        go_back(before)
        assert model.get_buffer("seen") is seen and seen.shape == (0,)
