"""Policies with KungFu's names: our versions of its published examples, for batches and for sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.adaptation import PolicyView, Resize, SetBatch, Stop
from elastic_ray.adaptation.kungfu import (
    BasePolicy,
    BroadcastGlobalVariablesOp,
    GraphKeys,
    PolicyHook,
    counter,
    current_cluster_size,
    exponential_moving_average,
    kf,
    resize,
    step_based_schedule,
    tf,
)
from elastic_ray.adaptation.runner import PolicyRunner
from placement.goodput.model import NoiseScale
from tests.adaptation.scripted import ScriptedRun, listed
from tests.loop.changing import Change, run_job


class SizeBySchedule(BasePolicy):
    """The example with ``resize``: sizes by step, and a broadcast after each change."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes
        self.stale = True
        self.broadcasts = 0

    def before_train(self) -> None:
        self.size = tf.placeholder(dtype=tf.uint32, shape=[])
        self.change = resize(self.size)
        self.broadcast = BroadcastGlobalVariablesOp()

    def before_step(self, sess: Any) -> None:
        if self.stale:
            sess.run(self.broadcast)
            self.broadcasts += 1
        self.stale = False

    def after_step(self, sess: Any) -> None:
        step = sess.run(tf.train.get_global_step())
        if step in self.sizes:
            self.stale = sess.run(self.change, feed_dict={self.size: self.sizes[step]})


class BatchBySchedule(BasePolicy):
    """The example with a setter: batches by step, with hooks in the older form, without a session."""

    def __init__(self, batches: dict[int, int]) -> None:
        self.batches = batches
        self.epochs = 0

    def before_train(self) -> None:
        self.steps = 0
        self.set_batch = kf.create_setter(kf.get_or_create_batch_size())

    def before_epoch(self) -> None:  # type: ignore[override]
        self.epochs += 1

    def after_step(self, sess: Any) -> None:
        self.steps += 1
        if self.steps in self.batches:
            self.set_batch(sess, self.batches[self.steps])


class BatchByNoise(BasePolicy):
    """The example with the noise scale: twice the batch after an epoch in which noise over batch has grown."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.before: float | None = None
        self.latest = 0.0

    def before_train(self) -> None:
        self.ratio = tf.placeholder(dtype=tf.float32)
        self.mean = exponential_moving_average(self.ratio, alpha=0.9)
        self.set_batch = kf.create_setter(kf.get_global_variable(GraphKeys.BATCH_SIZE))

    def after_step(self, sess: Any) -> None:
        ratio = abs(kf.eval_gradient_noise_scale(sess)) / kf.eval_batch_size(sess)
        self.latest = sess.run(self.mean, {self.ratio: ratio})

    def after_epoch(self, sess: Any) -> None:
        if self.before is not None and self.latest > self.before:
            self.set_batch(sess, min(2 * kf.eval_batch_size(sess), self.most))
        self.before = self.latest


def run(hook: PolicyHook, view: PolicyView) -> ScriptedRun:
    return ScriptedRun(policy=hook, view=view, step_s=lambda view: 0.1)


def steps(script: ScriptedRun, count: int, **changes: Any) -> list[Any]:
    """Both hooks of so many steps."""
    found = []
    for _ in range(count):
        found += listed(script.policy.before_step(script.view))
        found += script.step(**changes)
    return found


SIZES = {10: 2, 20: 3, 30: 4, 40: 1, 50: 1}


def test_the_elastic_example_asks_for_its_sizes() -> None:
    policy = SizeBySchedule(SIZES)
    script = run(PolicyHook([policy], 6000, 1, 10), PolicyView(workers=1, batch_size=10, max_batch_size=100))
    asked = steps(script, 60)
    assert [each for each in asked if isinstance(each, Resize)] == [Resize(to=size) for size in (2, 3, 4, 1)]
    assert policy.broadcasts == 5, "at the beginning and after each change; to 1 from 1 is none"
    batches = [each.batch_size for each in asked if isinstance(each, SetBatch)]
    assert batches == [20, 30, 40, 10], "as in KungFu a batch is that of one worker"


def test_the_schedule_example_sets_the_batch_of_each_worker() -> None:
    policy = BatchBySchedule({3: 16, 5: 32})
    view = PolicyView(workers=2, batch_size=16, max_batch_size=256)
    script = run(PolicyHook([policy], epoch_size=64, epoch_num=100), view)
    assert steps(script, 8) == [SetBatch(32), SetBatch(64)]
    assert [step for step, _ in script.asked] == [3, 5]
    assert policy.epochs == 1 + script.view.samples // 64 - (script.view.samples % 64 == 0)


def test_the_noise_example_doubles_the_batch_while_noise_grows() -> None:
    view = PolicyView(workers=2, batch_size=16, initial_batch_size=16, max_batch_size=256)
    script = run(PolicyHook([BatchByNoise(most=32)], epoch_size=64, epoch_num=1000), view)
    found = []
    for epoch in range(8):
        noise = NoiseScale(sqr=1.0, var=float(10**epoch))
        until = script.view.samples + 64
        while script.view.samples < until:
            found += steps(script, 1, noise=noise)
    assert found == [SetBatch(32), SetBatch(64)], "of two workers; and not beyond what it was told"


def test_the_training_ends_with_the_samples() -> None:
    script = run(PolicyHook([BasePolicy()], epoch_size=100, epoch_num=2), PolicyView(batch_size=10))
    while not script.stopped:
        script.step()
    assert script.view.samples == 200
    assert isinstance(script.asked[0][1], Stop)


def test_policies_end_in_reverse_order() -> None:
    order: list[str] = []

    class Names(BasePolicy):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_step(self, sess: Any) -> None:
            order.append(f"before {self.name}")

        def after_step(self, sess: Any) -> None:
            order.append(f"after {self.name} of {current_cluster_size()}")

    steps(run(PolicyHook([Names("a"), Names("b")], 1000, 1), PolicyView(workers=3, batch_size=1)), 1)
    assert order == ["before a", "before b", "after b of 3", "after a of 3"]


def test_operations() -> None:
    hook = PolicyHook([BasePolicy()], 100, 2, 8)
    seen: dict[str, Any] = {}

    class Looks(BasePolicy):
        def before_train(self) -> None:
            self.counter = counter(init=5, incr=2)
            self.schedule = step_based_schedule("10:2,100:3")
            self.mean = exponential_moving_average(tf.train.get_global_step(), alpha=0.5)

        def after_step(self, sess: Any) -> None:
            for name in ("counter", "schedule", "mean"):
                seen.setdefault(name, []).append(sess.run(getattr(self, name)))
            seen["both"] = sess.run([kf.get_global_variable(GraphKeys.TRAINED_SAMPLES), tf.train.get_global_step()])
            seen["total"] = kf.eval_global_variable(GraphKeys.TOTAL_SAMPLES, sess)

    hook = PolicyHook([Looks()], 1000, 2)
    steps(run(hook, PolicyView(batch_size=4)), 7)
    assert seen["counter"] == [5, 7, 9, 11, 13, 15, 17]
    assert seen["schedule"] == [10, 10, 100, 100, 100, 1, 1]
    assert seen["mean"][:3] == [1, 1.5, 2.25]
    assert seen["both"] == [28, 7] and seen["total"] == 2000


def test_a_worker_that_joins_goes_on_as_the_others() -> None:
    def made() -> PolicyHook:
        return PolicyHook([BatchByNoise(64), SizeBySchedule(SIZES)], 64, 100, 8)

    first, joined = made(), made()
    script = run(first, PolicyView(workers=1, batch_size=8, initial_batch_size=8, max_batch_size=256))
    before = copy.deepcopy(first.state_dict())
    steps(script, 15, noise=NoiseScale(sqr=1.0, var=2.0))
    joined.load_state_dict(copy.deepcopy(first.state_dict()))
    assert joined.state_dict() == first.state_dict() != before
    view = script.view
    assert listed(joined.before_step(view)) == listed(first.before_step(view))
    assert listed(joined.after_step(view)) == listed(first.after_step(view))
    assert joined.state_dict() == first.state_dict()
    joined.load_state_dict(before)
    assert joined.state_dict() == before, "also operations that had no state"


def test_a_policys_own_objects_are_refused_by_name() -> None:
    class Keeps(BasePolicy):
        def __init__(self) -> None:
            self.mean = torch.zeros(1)

    runner = PolicyRunner(None, None, None)  # type: ignore[arg-type]
    runner.add([PolicyHook([Keeps()], 100, 1)])
    with pytest.raises(Exception, match=r"PolicyHook\.policies\[0\]\['mean'\].*of type Tensor"):
        runner.check_plain()


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(TypeError, match=r"must be instances of kungfu.BasePolicy"):
        PolicyHook([object()], 10, 1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"PolicyHook\(epoch_size\) must be 1 or more, but got 0"):
        PolicyHook([], 0, 1)
    with pytest.raises(ValueError, match="cannot be set"):
        kf.create_setter(kf.get_global_variable(GraphKeys.TRAINED_SAMPLES))
    with pytest.raises(ValueError, match="a variable must be one of kungfu_batch_size"):
        kf.get_global_variable("kungfu_steps")
    with pytest.raises(RuntimeError, match="is for hooks that get a session"):
        resize(3)

    class Unfed(BasePolicy):
        def after_step(self, sess: Any) -> None:
            sess.run(tf.placeholder())

    with pytest.raises(RuntimeError, match="was not fed"):
        steps(run(PolicyHook([Unfed()], 10, 1), PolicyView(batch_size=1)), 1)


def trained() -> tuple[list[int], list[Any], int]:
    """A loop whose only lines of ours are those of the README; its batches, and what its policies keep."""
    policies = [BatchBySchedule({4: 8, 8: 4}), SizeBySchedule({6: 1})]
    torch.manual_seed(0)
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook = PolicyHook(policies, epoch_size=120, epoch_num=2, init_batch_size=4)
    wrapped = er.AdaptiveDataParallel(model, optimizer, policy=hook)
    loader = er.AdaptiveDataLoader(TensorDataset(x), batch_size=8)
    loader.autoscale_batch_size(max_batch_size=32)
    sizes = []
    for _ in er.remaining_epochs_until(9):
        for (rows,) in loader:
            sizes.append(loader.current_batch_size)
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
    return sizes, [policies[0].steps, policies[0].epochs, policies[1].broadcasts], er.get_context().get_global_step()


def test_the_examples_train_while_workers_come_and_go() -> None:
    outcome = run_job(trained, [Change(3, (1, 2, 3)), Change(10, (2, 3))], first=(1, 2))
    told = [text for kind, text, _ in outcome.told if kind == "policy"]
    assert not [text for text in told if "differs" in text or "not say the same" in text], told
    assert any("Resize(to=1" in text for text in told)
    sizes, kept, count = outcome.results[2]
    assert outcome.results[3][1:] == (kept, count), "the joiner's policies have gone on as the others"
    assert sizes[0] == 8 and 24 in sizes and sizes[-1] == 8
    assert kept[0] == count and 240 <= sum(sizes) <= 240 + 2 * max(sizes), "it ends with epoch_size * epoch_num"
