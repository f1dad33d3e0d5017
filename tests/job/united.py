"""Train functions of jobs of units, whose models are parallelised inside a unit by torch's own means."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView, ScaleRate, SetBatch
from elastic_ray.monitoring import Monitor

SAMPLES, BATCH, WIDTH = 48, 12, 8


class Net(nn.Module):
    """Two layers that a plan can cut, and a norm that every worker of the unit holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


MONITOR = Monitor(variance_every=2, norms_every=2, workers=True)


class Wishes(Policy):
    """Sets the batch and the rates at fixed steps."""

    def before_train(self, view: PolicyView) -> Any:
        return SetBatch(BATCH)

    def after_step(self, view: PolicyView) -> Any:
        return {20: SetBatch(2 * BATCH), 40: ScaleRate(0.5), 60: SetBatch(BATCH)}.get(view.step)


class Unitary(torch.optim.Optimizer):
    """Steps of one length for each matrix, whose direction is the gradient's: no element steps by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm() * group["lr"])


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.roll(inputs, 1, 1).sin())


def tensor_parallel(net: Net, mesh: Any = None) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, mesh or er.unit_mesh(), plan)


def sharded(net: Net, mesh: Any = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or er.unit_mesh()
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)  # type: ignore[return-value]


def cut_twice(net: Net) -> nn.Module:
    """Tensor parallelism, whose parts are sharded."""
    mesh = er.unit_mesh()
    tensor_parallel(net, mesh["tp"])
    return sharded(net, mesh["shard"])


class Pipelined(nn.Module):
    """Blocks one after the other, of which a unit's workers hold one each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Net() for number in range(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Attending(nn.Module):
    """One head of attention over four tokens; in a unit each worker has two of them, and the keys of all."""

    def __init__(self) -> None:
        super().__init__()
        # The bias of a key changes no weight of attention: Adam would step by the rounding of its gradient.
        self.heads, self.out = nn.ModuleList(nn.Linear(2, 4, bias=False) for _ in range(3)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (head(own_part(x.view(-1, 4, 2), 1)) for head in self.heads)
        if dist.get_world_size() > 1:
            key, value = Gathered.apply(key), Gathered.apply(value)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value)).flatten(1)


class Experts(nn.Module):
    """Two experts, of which each token's gate chooses one; in a unit each worker holds one, and sends its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = own_part(x, 0)
        share, chosen = self.gate(x).softmax(1).max(1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=2)
        tokens = x[order]
        if dist.get_world_size() > 1:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            (expert,) = self.experts.values()
            answers = Exchanged.apply(expert(Exchanged.apply(tokens, theirs, counts)), counts, theirs)
        else:
            parts = tokens.split(counts.tolist())
            answers = torch.cat([self.experts[str(number)](part) for number, part in enumerate(parts)])
        return x + share[:, None] * answers[order.argsort()]


def own_part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Gathered(torch.autograd.Function):
    """All workers' tensors, along the second dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return own_part(total, 1)


class Exchanged(torch.autograd.Function):
    """Rows that other workers have sent here, for those that go there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, receives: torch.Tensor, sends: torch.Tensor) -> torch.Tensor:
        ctx.counts = receives, sends
        output = x.new_empty(int(receives.sum()), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), receives.tolist(), sends.tolist())
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        receives, sends = ctx.counts
        return Exchanged.apply(grads[0], sends, receives), None, None


def add_up_in_unit(params: Any) -> None:
    """Gradients of what all workers hold are of each worker's tokens."""

    def add_up(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total

    for param in params:
        param.register_hook(add_up)


def context_parallel(net: Attending) -> nn.Module:
    add_up_in_unit(net.parameters())
    return net


def expert_parallel(net: Experts) -> nn.Module:
    del net.experts[str(1 - dist.get_rank())]
    add_up_in_unit(net.gate.parameters())
    return net


MADE = {"blocks": Pipelined, "pp": Pipelined, "cp": Attending, "context": Attending, "ep": Experts, "experts": Experts}
KINDS = {"tp": tensor_parallel, "both": cut_twice, "shard": sharded, "cp": context_parallel, "ep": expert_parallel}


def whole(model: nn.Module) -> dict[str, Any]:
    """All parameters; a collective within the unit."""
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    return {name: p.detach().flatten().tolist() for name, p in full.items()}


def loss_of(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(found, targets)


def pipeline_step(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Forward and backward passes of two micro-batches through both stages, by torch's schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model.module, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
    if dist.get_rank() == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """What is reported after the last epoch."""
    torch.manual_seed(0)
    kind = config["kind"]
    pipelines = kind == "pp"
    net: Any = MADE.get(kind, Net)()
    if pipelines:
        del net.blocks[str(1 - dist.get_rank())]
    net = KINDS.get(kind, lambda net: net)(net)
    batch = BATCH
    if "still" in config:  # every step is the same one
        optimizers: Any = [getattr(torch.optim, config["still"])(net.parameters(), lr=0.0, foreach=False)]
        batch = SAMPLES
    elif "matrices" in config:
        matrices = [p for p in net.parameters() if p.dim() > 1]
        first = (
            Unitary(matrices, {"lr": 1e-2}) if config["matrices"] == "unitary" else torch.optim.Muon(matrices, lr=1e-2)
        )
        rest = [p for p in net.parameters() if p.dim() < 2]
        optimizers = [first, torch.optim.AdamW(rest, lr=1e-2, foreach=False)]
    else:
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)]
    policy, monitor = (Wishes(), MONITOR) if "policies" in config else (None, None)
    given = optimizers[0] if len(optimizers) == 1 else optimizers
    options: dict[str, Any] = {"policy": policy, "monitor": monitor, "strategy": config.get("strategy")}
    model = er.AdaptiveDataParallel(net, given, scaling_rule="none" if "policies" in config else None, **options)
    loader = er.AdaptiveDataLoader(data(), batch_size=batch, shuffle="still" not in config)
    if "largest" in config:
        loader.autoscale_batch_size(config["largest"], local_bsz_bounds=(4, config["largest"]))
    told: dict[str, Any] = {}
    for epoch in er.remaining_epochs_until(config["epochs"]):
        for inputs, targets in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            if er.get_context().get_world_rank() in config.get("slow", ()):
                time.sleep(config.get("slow_s", 0.05) * len(inputs))  # as a slow node
            if pipelines:
                pipeline_step(model, inputs, targets)
            elif kind in ("cp", "ep"):
                own = own_part(targets, 1 if kind == "cp" else 0)
                (loss_of(model(inputs), own) / dist.get_world_size()).backward()
            else:
                loss_of(model(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
            until = config.get("until")
            if until and not Path(until).exists():
                time.sleep(0.1)  # units take seconds to start
        if config.get("evaluates"):
            with torch.no_grad():
                model.eval()(data().tensors[0][:4])
            model.train()
        found = whole(net)
        if pipelines or kind == "ep":
            parts: list[Any] = [None, None]
            dist.all_gather_object(parts, found)
            found = parts[0] | parts[1]
        noise = model.noise_scale
        told |= {"noise": [noise.sqr, noise.var] if noise is not None else [], "batch": loader.current_batch_size}
        norms = model.measures.norms
        told["norms"] = [] if norms is None else [norms.step, *norms.gradients, *norms.updates]
        told["workers"] = [each.compute_s for each in model.measures.workers]
        workers = dist.get_world_size() if dist.is_initialized() else 1
        told |= {"epoch": epoch, "parameters": found, "unit": workers}
        er.report(told)
    return told
