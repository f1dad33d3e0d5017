"""A sharded model that is compiled: where torch's own ``fully_shard`` compiles it, and with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.run.current import session_of_thread
from tests.loop.changing import Change, Kill, run_job
from tests.sync.sharded_parameters.sharded import CLOSE, Net, data, sharded_net


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiler:
    """Torch's, and what it was given: by whom, at which committed step, and the functions in the graph."""

    def __init__(self, name: str, *, dynamic: bool | None = None) -> None:
        self.dynamic = dynamic
        self._compile: Any = torch._dynamo.lookup_backend(name)
        self.graphs: list[tuple[str, int, set[str]]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        session: Any = session_of_thread()
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        self.graphs.append((session.worker, session.progress.steps, called))
        return self._compile(graph, inputs)


def blocks_first(compiler: Compiler) -> Net:
    model = Net()
    for block in model.blocks:
        block.compile(backend=compiler, dynamic=compiler.dynamic)
        er.fully_shard(block)
    return er.fully_shard(model)


def whole_model(compiler: Compiler) -> Net:
    model = sharded_net()
    model.compile(backend=compiler, dynamic=compiler.dynamic)
    return model


def weights_of(make: Callable[[], Net]) -> dict[str, torch.Tensor] | None:
    """Of a model that was trained for two epochs; on rank 0."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data(), batch_size=12, seed=3)
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model.state_dict() if er.get_context().get_world_rank() == 0 else None


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [None, True], ids=["by default", "any batch size"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiled", [blocks_first, whole_model])
def test_it_trains_as_one_that_is_not_compiled(
    compiled: Callable[[Compiler], Net], backend: str, *, dynamic: bool | None
) -> None:
    (plain,) = run_job(lambda: weights_of(Net), first=(1,)).results.values()
    compiler = Compiler(backend, dynamic=dynamic)
    script = [Change(3, (1, 2, 3)), Kill(7, 2, "forward"), Change(11, (1,))]
    outcome = run_job(lambda: weights_of(lambda: compiled(compiler)), script, first=(1, 2))
    assert outcome.groups == [(1, 2), (1, 2, 3), (1, 3), (1,)]
    for name, value in outcome.results[1].items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=CLOSE, msg=lambda text, at=name: f"{at}: {text}")
    assert any("tanh" in target for *_, called in compiler.graphs for target in called), "the blocks are compiled"
    later = {step for worker, step, _ in compiler.graphs if step > 0 and worker != "w3"}
    assert later == (set() if dynamic else {4}), "with the first other batch size, which varies from there on"
