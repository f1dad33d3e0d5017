"""Cases of transformers' tests: its ``Trainer`` on two processes beside ours."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from elastic_ray.integrations.huggingface import Trainer
from tests.foreign.two_ranks.common import BATCH, group_hidden, numbers, run, weights

warnings.filterwarnings("ignore")


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def gpt() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet))


def texts() -> list[dict[str, Any]]:
    """Of 3 to 8 tokens, padded: a mean over tokens is no mean over ranks' means."""
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(40):
        ids = torch.randint(0, 16, (8,), generator=generator)
        labels = ids.clone()
        labels[3 + number % 6 :] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class Noting(transformers.TrainerCallback):
    """The order of callbacks, and where the trainer was."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(["step", state.global_step, round(state.epoch, 4), state.max_steps])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(["epoch", state.global_step])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(["evaluate", state.global_step])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(["save", state.global_step])


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def fit(elastic: bool, folder: Path, given: dict[str, Any], resume: Any = None) -> dict[str, Any]:
    given = dict(given)
    model = given.pop("model", Classifier)()
    rows = given.pop("rows", lambda: [{"x": x, "labels": y} for x, y in numbers(given.pop("samples", 40))])()  # type: ignore[attr-defined]
    more, noting = given.pop("trainer", {}), Noting()
    stops, steps = given.pop("stops", False), given.pop("steps", 1)
    evaluated = given.pop("evaluated", (8, 8))
    with group_hidden() if elastic else contextlib.nullcontext():
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            learning_rate=0.05,
            seed=0,
            per_device_eval_batch_size=evaluated[elastic],
            per_device_train_batch_size=2 * BATCH * steps if elastic else BATCH,
            ddp_backend=None if elastic else "gloo",
            **{
                "num_train_epochs": 2,
                "save_strategy": "no",
                "logging_steps": 2,
                "train_sampling_strategy": "sequential",
                **given,
            },
        )
        callbacks: list[Any] = [noting]
        if stops:
            callbacks.append(transformers.EarlyStoppingCallback(1, 1e3))
        trainer: Any = (Trainer if elastic else transformers.Trainer)(
            model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16], callbacks=callbacks, **more
        )
    trainer.remove_callback(transformers.PrinterCallback)
    output = trainer.train(resume_from_checkpoint=resume)
    if not elastic:
        torch.distributed.barrier()
    return {
        "weights": weights(trainer.model),
        "seen": noting.seen,
        "ended": [output.global_step, output.training_loss, trainer.state.best_global_step],
        "log": trainer.state.log_history,
        "evaluated": trainer.evaluate(),
        "files": sorted(each.name for each in folder.glob("checkpoint-*")),
    }


def trained(**given: Any) -> Any:
    return lambda elastic, folder: fit(elastic, folder, given)


def by_length(elastic: bool, folder: Path) -> dict[str, Any]:
    """The order is each side's own; what is compared is how much was trained."""
    rows = [{**each, "length": 3 + number % 6} for number, each in enumerate(texts())]
    given = {"model": gpt, "rows": lambda: rows, "train_sampling_strategy": "group_by_length"}
    found = fit(elastic, folder, {**given, "length_column_name": "length"})
    return {"seen": found["seen"], "ended": found["ended"][0], "lines": [sorted(each) for each in found["log"]]}


def accumulated(elastic: bool, folder: Path) -> dict[str, Any]:
    """Two micro-batches a step of each process: theirs by count, ours by the largest that a worker takes."""
    given: dict[str, Any] = {"samples": 64, "gradient_accumulation_steps": 2}
    if elastic:
        bounds = {"max_batch_size": 4 * BATCH, "local_bsz_bounds": (1, BATCH), "gradient_accumulation": True}
        given = {"samples": 64, "steps": 2, "trainer": bounds}
    return fit(elastic, folder, given)


# Of both sides an evaluation is one batch: theirs weighs the tokens of ranks that evaluate at once, as one batch's.
TEXTS: dict[str, Any] = {"model": gpt, "rows": texts, "optim": "sgd", "evaluated": (8, 16)}


def resumed(elastic: bool, folder: Path) -> dict[str, Any]:
    """From a checkpoint of theirs within an epoch, and ours also from its own."""
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    fit(elastic, folder, given)
    found = {}
    for written in ("theirs", "ours"):
        path = folder.parent / (written if elastic else "theirs") / "checkpoint-3"
        found[written] = fit(elastic, folder / written, {}, str(path))
    return found


CASES: dict[str, Any] = {
    "plain": trained(),
    "no clipping": trained(max_grad_norm=0.0),
    "clipping": trained(max_grad_norm=0.05),
    "bfloat16": trained(bf16=True),
    "cosine with warm-up": trained(lr_scheduler_type="cosine", warmup_steps=3),
    "evaluates by steps": trained(eval_strategy="steps", eval_steps=3, trainer={"compute_metrics": accuracy}),
    "evaluates by epochs": trained(eval_strategy="epoch", trainer={"compute_metrics": accuracy}),
    "the best model at the end": trained(
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
    ),
    "early stopping": trained(
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, num_train_epochs=6, stops=True
    ),
    "max_steps": trained(max_steps=8),
    "label smoothing": trained(**TEXTS, label_smoothing_factor=0.1),
    "a mean over tokens": trained(**TEXTS),
    "a short last batch": trained(samples=36),
    "group_by_length": by_length,
    "resumed": resumed,
    "accumulation by the loader": accumulated,
    "accumulation": trained(gradient_accumulation_steps=2),
    "find_unused_parameters": trained(ddp_find_unused_parameters=True),
}

if __name__ == "__main__":
    run(CASES)
