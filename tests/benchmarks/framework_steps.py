"""One rank of ``bench_frameworks.py``: trains with a framework, its own DDP or ours, and prints its steps' times."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import itertools

import torch

LOCAL_BATCH, WARM_UP = 32, 10


class Times:
    """When steps ended."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def step(self) -> None:
        """A step has ended."""
        self.ends_s.append(time.perf_counter())

    @property
    def median_s(self) -> float:
        """Of a step, without the first ones."""
        ends = self.ends_s[WARM_UP:]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def layers() -> torch.nn.Sequential:
    """The network of the loops that are not a language model's."""
    sizes = [256, 1024, 1024, 1024, 10]
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(sizes))
    )


def samples(steps: int) -> Any:
    """As many as two ranks take in so many steps."""
    count = 2 * LOCAL_BATCH * steps
    return torch.utils.data.TensorDataset(torch.randn(count, 256), torch.randint(0, 10, (count,)))


def bare_steps(ours: bool, steps: int) -> float:
    """Seconds a step of a plain loop: what is left to an integration is what it adds to this."""
    from torch.utils.data import DataLoader, DistributedSampler

    import elastic_ray as er

    times, data, model = Times(), samples(steps), layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped: torch.nn.Module
    epochs: Any
    loader: Any
    if ours:
        wrapped, epochs = er.AdaptiveDataParallel(model, optimizer), er.remaining_epochs_until(1)
        loader = er.AdaptiveDataLoader(data, batch_size=2 * LOCAL_BATCH, shuffle=True)
    else:
        torch.distributed.init_process_group("gloo")
        wrapped, epochs = torch.nn.parallel.DistributedDataParallel(model), range(1)
        loader = DataLoader(data, batch_size=LOCAL_BATCH, sampler=DistributedSampler(data))
    for _ in epochs:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            times.step()
    return times.median_s


def lightning_steps(ours: bool, steps: int) -> float:
    """Seconds a step of a LightningModule."""
    import lightning
    from torch.utils.data import DataLoader

    times = Times()

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            times.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    batch = 2 * LOCAL_BATCH if ours else LOCAL_BATCH
    strategy: Any
    if ours:
        from elastic_ray.integrations.lightning import ElasticRayStrategy

        strategy = ElasticRayStrategy()
    else:
        from lightning.pytorch.strategies import DDPStrategy

        strategy = DDPStrategy(process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if ours else 2,
        strategy=strategy,
        use_distributed_sampler=not ours,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(samples(steps), batch_size=batch))
    return times.median_s


def huggingface_steps(ours: bool, steps: int) -> float:
    """Seconds a step of a small GPT."""
    hidden: dict[str, str] = {}
    if ours:  # elastic-ray takes its group from torchrun's variables, which transformers must not see
        import elastic_ray as er

        assert er.get_context().get_world_size() == 2
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            hidden[name] = os.environ.pop(name)
    import transformers

    from elastic_ray.integrations.huggingface import Trainer

    times = Times()

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.step()

    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=128, n_layer=3, n_head=4)
    batch = 2 * LOCAL_BATCH if ours else LOCAL_BATCH
    ids = torch.randint(0, 512, (2 * LOCAL_BATCH * steps, 32))
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        save_strategy="no",
        logging_steps=10_000,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        optim="sgd",
        ddp_backend=None if ours else "gloo",
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    kind = Trainer if ours else transformers.Trainer
    model = transformers.GPT2LMHeadModel(config)
    trainer = kind(model=model, args=arguments, train_dataset=rows, callbacks=[Watch()])
    os.environ.update(hidden)
    trainer.train()
    return times.median_s


def main(framework: str, side: str, steps: int) -> None:
    """Print the median step of rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    measure = {"bare": bare_steps, "lightning": lightning_steps, "huggingface": huggingface_steps}[framework]
    seconds = measure(side == "ours", steps)
    if rank == 0:
        print(json.dumps({"framework": framework, "side": side, "step_s": seconds}), flush=True)
    if torch.distributed.is_initialized():  # else gloo may abort at exit
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
