"""Pause of a resize 1 -> 2 -> 1 under Lightning and transformers, against the same model in a bare loop, in one run.

Bar: at most 1.5 x the bare loop's pause, growing and shrinking. A worker that joins has imported and built everything
by then; what is measured is how long the others wait. Every job has the first slot of the cluster to itself.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, bar, finish, median, ratio, wait_until

# Framework, and the bare loop over the same model.
PAIRS = {"lightning": "bare, layers", "huggingface": "bare, GPT"}
LOCAL_BATCH = 32


def gpt_rows() -> tuple[Any, list[dict[str, Any]]]:
    """A small GPT and its texts."""
    import torch
    import transformers

    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=128, n_layer=3, n_head=4)
    ids = torch.randint(0, 512, (2048, 32))
    return transformers.GPT2LMHeadModel(config), [{"input_ids": row, "labels": row} for row in ids]


def bare(config: dict[str, Any]) -> None:
    """A plain loop over the layers or the GPT."""
    import torch
    from framework_steps import layers, samples

    import elastic_ray as er

    if config["side"] == "bare, GPT":
        model, data = gpt_rows()
    else:
        model, data = layers(), samples(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=2 * LOCAL_BATCH, shuffle=True)
    for _ in er.remaining_epochs_until(1_000_000):
        for batch in loader:
            optimizer.zero_grad()
            if isinstance(batch, dict):
                wrapped(**batch).loss.backward()
            else:
                torch.nn.functional.cross_entropy(wrapped(batch[0]), batch[1]).backward()
            optimizer.step()


def lightning_loop(config: dict[str, Any]) -> None:
    """The layers under ``lightning.Trainer``."""
    import lightning
    import torch
    from framework_steps import layers, samples
    from torch.utils.data import DataLoader

    from elastic_ray.integrations.lightning import ElasticRayStrategy

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ElasticRayStrategy(),
        use_distributed_sampler=False,
        max_epochs=1_000_000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(samples(40), batch_size=2 * LOCAL_BATCH, shuffle=True))


def huggingface_loop(config: dict[str, Any]) -> None:
    """The GPT under ``transformers.Trainer``."""
    import transformers

    from elastic_ray.integrations.huggingface import Trainer

    model, rows = gpt_rows()
    options = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2 * LOCAL_BATCH,
        num_train_epochs=1_000_000,
        save_strategy="no",
        logging_steps=1_000_000,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        optim="sgd",
    )
    Trainer(model=model, args=options, train_dataset=rows).train()


LOOPS = {"lightning": lightning_loop, "huggingface": huggingface_loop, "bare, layers": bare, "bare, GPT": bare}


def pauses(side: str, resizes: int) -> list[dict[str, Any]]:
    """One job that grows and shrinks by turns: each pause."""
    import ray.train

    import elastic_ray as er
    from elastic_ray.events import EventKind

    with tempfile.TemporaryDirectory() as folder:
        handle = er.ElasticTrainer(
            LOOPS[side],
            train_loop_config={"side": side},
            scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(storage_path=str(Path(folder))),
        ).submit()
        handle.resize(1)
        assert wait_until(lambda: handle.status().workers == 1 and handle.status().step > 20, 120), handle.status()
        for workers in itertools.islice(itertools.cycle((2, 1)), resizes):
            before = handle.status().step
            handle.resize(workers)
            done = wait_until(
                lambda workers=workers, before=before: (
                    handle.status().workers == workers and handle.status().step > before + 10
                ),
                120,
            )
            assert done, handle.status()
            time.sleep(0.5)
        events = [each for each in handle.events() if each.kind is EventKind.RESIZE]
        handle.stop()
        handle.result(timeout=60)
    return [
        {"side": side, "change": f"{each.from_workers} -> {each.to_workers}", "pause_s": each.pause_s}
        for each in events
    ]


def main() -> None:
    """All four loops in turns."""
    options = arguments(__doc__ or "")
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    rows: list[dict[str, Any]] = []
    try:
        for _ in range(options.repeats):
            for framework, plain in PAIRS.items():
                for side in (plain, framework):
                    rows += pauses(side, 2 if options.quick else 6)
                    print(f"  {rows[-2:]}", flush=True)
    finally:
        ray.shutdown()

    def typical(side: str, change: str) -> float | None:
        return median(row["pause_s"] for row in rows if (row["side"], row["change"]) == (side, change))

    bars = [
        bar(
            f"{framework}, {change}: pause, as a multiple of the bare loop's",
            value=ratio(typical(framework, change), typical(plain, change)),
            limit=1.5,
            at_least=False,
        )
        for framework, plain in PAIRS.items()
        for change in ("1 -> 2", "2 -> 1")
    ]
    finish("framework resizes", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
