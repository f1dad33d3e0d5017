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


def lightning_steps(ours: bool, steps: int) -> float:
    """Seconds a step of a LightningModule."""
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    times = Times()

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = [256, 1024, 1024, 1024, 10]
            layers = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(sizes)]
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            times.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    batch = 2 * LOCAL_BATCH if ours else LOCAL_BATCH
    data = TensorDataset(torch.randn(2 * LOCAL_BATCH * steps, 256), torch.randint(0, 10, (2 * LOCAL_BATCH * steps,)))
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
    trainer.fit(Net(), DataLoader(data, batch_size=batch))
    return times.median_s


def huggingface_steps(ours: bool, steps: int) -> float:
    """Seconds a step of a small GPT."""
    if ours:  # elastic-ray takes its group from torchrun's variables, which transformers must not see
        import elastic_ray as er

        er.get_context()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
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
    kind(model=model, args=arguments, train_dataset=rows, callbacks=[Watch()]).train()
    return times.median_s


def main(framework: str, side: str, steps: int) -> None:
    """Print the median step of rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    measure = {"lightning": lightning_steps, "huggingface": huggingface_steps}[framework]
    seconds = measure(side == "ours", steps)
    if rank == 0:
        print(json.dumps({"framework": framework, "side": side, "step_s": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
