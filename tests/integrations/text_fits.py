"""Trainings of a small language model by Hugging Face's Trainer, alone and as a job whose group changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.loop.changing import run_job

transformers = pytest.importorskip("transformers")

from elastic_ray.integrations.huggingface import Trainer  # noqa: E402

TEXTS, BATCH, EPOCHS, VOCABULARY = 48, 8, 3, 32
STEPS = TEXTS // BATCH


class Texts(Dataset):
    """Made texts of unequal lengths, each with its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 12, (TEXTS,), generator=generator).tolist()
        self.texts = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.texts[index], "number": index}


def collate(texts: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded, with labels that leave the padding out."""
    longest = max(len(each["input_ids"]) for each in texts)
    ids = torch.tensor([each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in texts])
    labels = ids.masked_fill(ids == 0, -100)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": labels,
        "numbers": torch.tensor([each["number"] for each in texts]),
    }


def gpt() -> Any:
    transformers.set_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
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
    return transformers.GPT2LMHeadModel(config)


class Notes(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[name-defined]
    """Counts steps and epochs, as a callback with a state."""

    def __init__(self) -> None:
        self.steps = self.epochs = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.epochs += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps, "epochs": self.epochs}}


USED: list[tuple[int, list[int]]] = []


def noting(base: type) -> type:
    """A trainer that writes down which texts it uses."""

    class Noting(base):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            numbers = inputs.pop("numbers").tolist()
            USED.append((int(self.state.epoch + 1e-9) if self.state.epoch else 0, numbers))
            return super().training_step(model, inputs, num_items_in_batch)

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs.pop("numbers")
            return super().prediction_step(model, inputs, *args, **kwargs)

    return Noting


def fit(
    folder: Path, elastic: bool = True, resume: Any = None, trainer: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Train; returns the trainer."""
    for name in ("transformers.trainer", "elastic_ray.integrations.huggingface.trainer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "optim": "sgd",
        "learning_rate": 0.2,
        "lr_scheduler_type": "linear",
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.5,
        **options,
    }
    kind = noting(Trainer if elastic else transformers.Trainer)
    args = transformers.TrainingArguments(**given)
    made = kind(
        model=gpt(),
        args=args,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        data_collator=collate,
        callbacks=[Notes()],
        **(trainer or {}),
    )
    made.remove_callback(transformers.PrinterCallback)
    made.train(resume_from_checkpoint=resume)
    return made


class Result:
    """What a worker's run came to."""

    def __init__(self, trainer: Any) -> None:
        self.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        self.steps, self.epoch = trainer.state.global_step, trainer.state.epoch
        self.losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        self.rates = [each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each]
        self.evaluations = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        notes = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Notes))
        self.counts = notes.steps, notes.epochs
        self.train_loss = next(e["train_loss"] for e in reversed(trainer.state.log_history) if "train_loss" in e)


def job(folder: Path, script: Sequence[Any], first: Sequence[int], **options: Any) -> tuple[dict[int, Result], Any]:
    USED.clear()
    outcome = run_job(lambda: Result(fit(folder, **options)), script, first=first)
    return outcome.results, outcome


def check_alike(results: dict[int, Result], alone: Result, counts: bool = True) -> None:
    for result in results.values():
        for name, value in alone.weights.items():
            torch.testing.assert_close(result.weights[name], value, rtol=1e-3, atol=2e-5)
        assert (result.steps, result.epoch) == (alone.steps, alone.epoch)
        assert not counts or result.counts == alone.counts
        assert result.rates == pytest.approx(alone.rates)
