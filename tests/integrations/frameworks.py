"""Train functions in Lightning's and Hugging Face's words that write down what they use, for jobs of real processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

SAMPLES, BATCH, EPOCHS = 240, 12, 4


class Notes:
    """Which samples this process has used, by epoch and step, in a file of its own."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / f"used-{os.getpid()}-{time.monotonic_ns()}"
        self._pause = Path(folder) / "pause"

    def use(self, epoch: int, step: int, samples: list[int]) -> None:
        """A batch was handed out in this step."""
        import elastic_ray as er

        generation = er.get_context().get_generation()
        with self._file.open("a") as file:
            file.write(json.dumps([epoch, step, generation, samples]) + "\n")
        if self._pause.exists():
            # as long as the test asks, so that a change falls into the training
            time.sleep(float(self._pause.read_text() or 0))


def used(folder: Path) -> dict[int, dict[int, list[int]]]:
    """Samples by epoch and step; of a step that was drawn again, those of its last group."""
    steps: dict[tuple[int, int], dict[int, list[int]]] = {}
    for file in folder.glob("used-*"):
        for line in file.read_text().splitlines():
            epoch, step, generation, samples = json.loads(line)
            steps.setdefault((epoch, step), {}).setdefault(generation, []).extend(samples)
    found: dict[int, dict[int, list[int]]] = {}
    for (epoch, step), groups in steps.items():
        found.setdefault(epoch, {})[step] = groups[max(groups)]
    return found


def save(folder: str, weights: Any) -> None:
    """The weights that rank 0 ends with."""
    import torch

    torch.save({name: each.detach().cpu() for name, each in weights}, Path(folder) / "weights.pt")


def dataset() -> Any:
    """Numbered rows of a regression."""
    import torch

    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))


def with_lightning(config: dict[str, Any]) -> None:
    """Train with ``lightning.Trainer``: on one device where ``config["plain"]`` says so."""
    import lightning
    import torch
    from torch.utils.data import DataLoader

    notes = None if config.get("plain") else Notes(config["folder"])

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if notes is not None:
                notes.use(self.current_epoch, self.global_step, batch[2].tolist())
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    options: dict[str, Any] = {}
    if notes is not None:
        from elastic_ray.integrations.lightning import ElasticRayStrategy

        options = {"strategy": ElasticRayStrategy(), "use_distributed_sampler": False}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        default_root_dir=config["folder"],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    net = Net()
    trainer.fit(net, DataLoader(dataset(), BATCH))
    if trainer.is_global_zero:
        save(config["folder"], net.net.named_parameters())


def with_transformers(config: dict[str, Any]) -> None:
    """Train with ``transformers.Trainer``."""
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    from elastic_ray.integrations.huggingface import Trainer

    notes = None if config.get("plain") else Notes(config["folder"])
    transformers.set_seed(1)
    gpt = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 12, (SAMPLES,), generator=generator).tolist()
    rows = [{"ids": torch.randint(1, 32, (n,), generator=generator), "number": i} for i, n in enumerate(lengths)]

    def collate(batch: list[Any]) -> dict[str, Any]:
        ids = torch.nn.utils.rnn.pad_sequence([each["ids"] for each in batch], batch_first=True)
        numbers = torch.tensor([each["number"] for each in batch])
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "numbers": numbers}

    class Noting(transformers.Trainer if notes is None else Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            numbers = inputs.pop("numbers").tolist()
            if notes is not None:
                notes.use(self.state.global_step * BATCH // SAMPLES, self.state.global_step, numbers)
            return super().training_step(model, inputs, num_items_in_batch)

    arguments = transformers.TrainingArguments(
        output_dir=config["folder"],
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=0.2,
        optim="sgd",
        save_strategy="epoch",
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    trainer = Noting(model=transformers.GPT2LMHeadModel(gpt), args=arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    if trainer.is_world_process_zero():
        save(config["folder"], trainer.model.named_parameters())
