"""A small GPT on made text of unequal lengths, trained by `transformers.Trainer` as an elastic job.

Lines that differ from a script for one process are marked. Needs `pip install -e ".[huggingface]"`; takes a minute on
two cores:

    python examples/huggingface_text.py
    python examples/huggingface_text.py --smoke     a few epochs, and no kill
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

# There is no hub to ask.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
import watched_job

import elastic_ray as er
from elastic_ray.integrations.huggingface import Trainer  # changed

VOCABULARY, LONGEST = 24, 20


def texts(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Made texts: each counts up from where it begins, by a step of its own, so that two tokens tell the rest."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length, begin, step = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((6, LONGEST), (0, VOCABULARY), (1, 4))
        )
        made.append({"input_ids": [2 + (begin + step * i) % VOCABULARY for i in range(length)]})
    return made


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded to the longest of the batch; padding is no label."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class Tell(transformers.TrainerCallback):
    """Tells the job what an evaluation has found."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Every worker calls it; rank 0's numbers count."""
        er.report({"eval_loss": metrics["eval_loss"], "epoch": state.epoch, "step": state.global_step})  # changed


def train(config: dict[str, Any]) -> None:
    """The train function: what a script for one process would do."""
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY + 2,
            n_positions=LONGEST,
            n_embd=48,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        num_train_epochs=config["epochs"],
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(  # changed by its import
        model=model,
        args=arguments,
        train_dataset=texts(config["texts"], seed=0),
        eval_dataset=texts(128, seed=1),
        data_collator=collate,
        callbacks=[Tell()],
    )
    trainer.train()


def check(metrics: dict[str, Any], smoke: bool) -> bool:
    """Whether the last evaluation was good."""
    return bool(metrics["eval_loss"] < (3.0 if smoke else 1.0))


if __name__ == "__main__":
    sizes = {True: {"epochs": 2, "texts": 256}, False: {"epochs": 25, "texts": 1024}}
    sys.exit(watched_job.main(__doc__, "huggingface", train, sizes.__getitem__, check))
