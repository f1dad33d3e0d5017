"""transformers' Trainer as an elastic job: the same training as in one process."""

from __future__ import annotations

import collections
import json
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.run.current import set_session
from tests.integrations.text_fits import (
    BATCH,
    EPOCHS,
    STEPS,
    TEXTS,
    USED,
    VOCABULARY,
    Result,
    Texts,
    check_alike,
    collate,
    fit,
    gpt,
    job,
    transformers,
)
from tests.loop.changing import Change, Kill, run_job

pytest.importorskip("accelerate")

from elastic_ray.integrations.huggingface import ElasticTrainerMixin, Trainer
from elastic_ray.integrations.huggingface.collectives import read_position
from elastic_ray.integrations.huggingface.data import counts_items
from elastic_ray.integrations.huggingface.state import _set_state, _state_of

GROWS = (Change(3, (1, 2, 3)), Change(STEPS + 3, (1, 2)))
LOSES = (Kill(2, 2, "backward"), Kill(STEPS, 3, "edge"))

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_state_for_all")]


def bare(texts: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Without the numbers, which models do not take."""
    batch = collate(texts)
    del batch["numbers"]
    return batch


def arguments(folder: Path) -> Any:
    """One epoch, as it is."""
    return transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, num_train_epochs=1, disable_tqdm=True, optim="sgd",
        save_strategy="no", remove_unused_columns=False, per_device_train_batch_size=BATCH, learning_rate=0.2,
        train_sampling_strategy="sequential",
    )  # fmt: skip


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(("script", "first"), [((), (1,)), ((), (1, 2)), (GROWS, (1,)), (LOSES, (1, 2, 3))])
def test_a_causal_model_trains_as_in_one_process(script: Any, first: Any, tmp_path: Path) -> None:
    alone = Result(fit(tmp_path, elastic=False))
    results, outcome = job(tmp_path, script, first)
    check_alike(results, alone)
    assert len(outcome.groups) == 1 + len(script)
    for result in results.values():
        if script != GROWS and script != LOSES:
            assert result.losses == pytest.approx(alone.losses, rel=1e-3)
            assert result.train_loss == pytest.approx(alone.train_loss, rel=1e-3)
    if script != LOSES:
        used = collections.Counter(number for _, batch in USED for number in batch)
        assert used == dict.fromkeys(range(TEXTS), EPOCHS)


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer_step", "after_step", "edge"])
@pytest.mark.parametrize("step", [1, STEPS - 1, STEPS])
def test_a_lost_worker_costs_no_step_and_no_count(moment: str, step: int, tmp_path: Path) -> None:
    options = {"logging_steps": 1, "eval_strategy": "epoch"}
    alone = Result(fit(tmp_path, elastic=False, **options))
    results, outcome = job(tmp_path, [Kill(step, 2, moment, joins=(3,))], (1, 2), **options)
    check_alike(results, alone)
    assert outcome.groups == [(1, 2), (1, 3)] and set(results) == {1, 3}
    for result in results.values():
        assert len(result.losses) == STEPS * EPOCHS
        assert result.evaluations == pytest.approx(alone.evaluations, rel=1e-3)


@pytest.mark.thorough
def test_max_steps_and_schedules_end_where_they_should(tmp_path: Path) -> None:
    alone = Result(fit(tmp_path, elastic=False, max_steps=STEPS + 2))
    results, _ = job(tmp_path, [Change(2, (1, 2))], (1,), max_steps=STEPS + 2)
    check_alike(results, alone)
    wanted = {"max_batch_size": 2 * BATCH, "elastic_options": {"policy": er.adaptation.BatchSchedule({0: 2 * BATCH})}}
    results, _ = job(tmp_path, (), (1,), max_steps=2 * STEPS, trainer=wanted, logging_steps=1)
    (result,) = results.values()
    assert STEPS <= result.steps <= STEPS + 1 and result.epoch == 2.0, "half as many steps of twice the batch"
    assert result.rates[-1] <= 0.2 * 2 / (2 * STEPS) + 1e-9, "the linear schedule has come to its end"


def test_the_log_begins_with_the_lines_of_theirs(tmp_path: Path) -> None:
    logger, said = logging.getLogger("transformers.trainer"), dict[bool, list[str]]()
    for elastic in (False, True):
        lines = said[elastic] = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        args = arguments(tmp_path)
        made = (Trainer if elastic else transformers.Trainer)(
            model=gpt(), args=args, train_dataset=Texts(), data_collator=bare
        )
        made.remove_callback(transformers.PrinterCallback)
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            made.train()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    begins = [each for each in said[False] if each.startswith(("*****", "  "))]
    assert len(begins) >= 8
    assert set(begins) <= set(said[True])


def test_micro_batches_are_accumulated_and_clipped_whole(tmp_path: Path) -> None:
    alone = Result(fit(tmp_path, elastic=False))
    wanted = {"max_batch_size": BATCH, "local_bsz_bounds": (1, 4), "gradient_accumulation": True}
    results, _ = job(tmp_path, (), (1,), trainer=wanted)
    check_alike(results, alone)
    assert max(len(batch) for _, batch in USED) == 4


@pytest.mark.parametrize(("script", "first"), [((), (1,)), (GROWS, (1,))])
def test_accumulated_batches_are_cut_by_the_job(script: Any, first: Any, tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2}
    alone = Result(fit(tmp_path, elastic=False, **options))
    results, _ = job(tmp_path, script, first, **options)
    check_alike(results, alone)
    assert max(len(batch) for _, batch in USED) == BATCH // 2
    made = fit(tmp_path, num_train_epochs=1, **options)
    assert pickle.loads(pickle.dumps(made.args)).gradient_accumulation_steps == 2, "as the user has set it"


def test_what_is_logged_is_jobs_and_bars_are_not(tmp_path: Path) -> None:
    def train() -> Any:
        return fit(tmp_path, disable_tqdm=False, num_train_epochs=2, eval_strategy="epoch", logging_steps=4)

    outcome = run_job(train, (), first=(1, 2))
    trainers, reports = outcome.results.values(), list(outcome.reports.values())
    history = next(iter(trainers)).state.log_history
    assert [each["loss"] for each in reports] == [
        next(row["loss"] for row in reversed(history[: i + 1]) if "loss" in row) for i in range(len(history))
    ]
    assert {"loss", "eval_loss", "train_loss", "learning_rate"} <= set(reports[-1])
    assert all(made.args.disable_tqdm for made in trainers)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(("script", "first"), [((), (1, 2)), (LOSES, (1, 2, 3))])
def test_beside_a_gradient_scaler_steps_are_ours(script: Any, first: Any, new_scaler: Any, tmp_path: Path) -> None:
    """The scaler stands for fp16's, which accelerate makes on a GPU only."""

    def with_scaler(base: Any) -> type:
        class Scaling(base):
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                self.accelerator.scaler = new_scaler()

        return Scaling

    def train(base: Any) -> tuple[dict[str, torch.Tensor], Any]:
        made = with_scaler(base)(model=gpt(), args=arguments(tmp_path), train_dataset=Texts(), data_collator=bare)
        made.train()
        weights = {name: p.detach().clone() for name, p in made.model.named_parameters()}
        return weights, getattr(made.model_wrapped, "scale_invariant_steps", STEPS)

    alone, steps = train(transformers.Trainer)
    for weights, progress in run_job(lambda: train(Trainer), script, first=first).results.values():
        assert progress == steps
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5)


class Adaptive(Trainer):
    """Gives a loader of ours."""

    loader: er.AdaptiveDataLoader | None = None

    def get_train_dataloader(self) -> Any:
        if self.loader is None:
            self.loader = er.AdaptiveDataLoader(Texts(), BATCH, collate_fn=bare)
        return self.loader


def test_adaptive_loader_of_users_own_has_the_trainers_limits(tmp_path: Path) -> None:
    def train(times: int) -> list[int]:
        made = Adaptive(model=gpt(), args=arguments(tmp_path), max_batch_size=2 * BATCH)
        steps = []
        for _ in range(times):
            made._elastic_options["policy"] = er.adaptation.BatchSchedule({0: 2 * BATCH})  # each asks once
            made.train()
            steps.append(made.state.global_step)
        return steps

    expected = STEPS // 2 + 1  # the first is of the initial batch
    assert list(run_job(lambda: train(1), ()).results.values()) == [[expected]]
    assert train(2) == [expected] * 2, "alone, the same loader begins anew"


def test_a_checkpoint_of_rank_0_continues_at_its_batch(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": STEPS + 2, "save_total_limit": 3}
    alone = Result(fit(tmp_path / "alone", elastic=False))
    results, _ = job(tmp_path / "job", (), (1,), **options)
    check_alike(results, alone)
    saved = sorted((tmp_path / "job").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    ends = STEPS * EPOCHS
    assert [path.name for path in saved] == [f"checkpoint-{n}" for n in (STEPS + 2, 2 * (STEPS + 2), ends)]
    assert json.loads((saved[0] / "elastic_ray_position.json").read_text())["steps"] == STEPS + 2
    assert type(torch.load(saved[0] / "training_args.bin", weights_only=False)) is transformers.TrainingArguments
    results, _ = job(tmp_path / "job", [Change(STEPS + 4, (1, 2))], (1,), resume=str(saved[0]))
    check_alike(results, alone, counts=False)
    assert sum(len(batch) for _, batch in USED) == (EPOCHS * STEPS - STEPS - 2) * BATCH


def test_a_checkpoint_of_transformers_own_goes_on_too(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": STEPS + 2}
    alone = Result(fit(tmp_path, elastic=False, **options))
    results, _ = job(tmp_path / "job", (), (1, 2), resume=str(tmp_path / f"checkpoint-{STEPS + 2}"))
    check_alike(results, alone, counts=False)


@pytest.mark.thorough
def test_a_classifier_is_weighted_by_samples(tmp_path: Path) -> None:
    def classify(elastic: bool) -> Any:
        transformers.set_seed(2)
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            train_sampling_strategy="sequential",
            label_smoothing_factor=0.1,
        )
        ids = torch.randint(0, VOCABULARY, (TEXTS, 8), generator=torch.Generator().manual_seed(0))
        rows = [{"input_ids": row, "labels": int(row.sum()) % 2} for row in ids]
        kind = Trainer if elastic else transformers.Trainer
        made = kind(model=transformers.BertForSequenceClassification(config), args=args, train_dataset=rows)
        made.remove_callback(transformers.PrinterCallback)
        made.train()
        return {name: p.detach().clone() for name, p in made.model.named_parameters()}

    alone = classify(elastic=False)
    for script, first in ([(), (1, 2, 3)], [(Change(3, (1, 2)),), (1,)]):
        for weights in run_job(lambda: classify(elastic=True), script, first=first).results.values():
            for name, value in alone.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dataloader_in_order": False}, "dataloader_in_order=False is not supported"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config=.*is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"train_sampling_strategy": "batch_rebalance"}, "group_by_length"),
        ({"ddp_find_unused_parameters": True}, "no DistributedDataParallel here"),
        ({"fsdp": "full_shard"}, "its shards cannot follow the group: leave it out"),
        ({"trainer": {"gradient_accumulation": True}}, "max_batch_size"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        fit(tmp_path, **options)


def test_subclasses_of_theirs_take_the_mixin(tmp_path: Path) -> None:
    class Own(ElasticTrainerMixin, transformers.Seq2SeqTrainer):
        pass

    args = transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    made = Own(model=gpt(), args=args, train_dataset=Texts(), data_collator=collate)
    assert type(pickle.loads(pickle.dumps(made.args))) is transformers.Seq2SeqTrainingArguments
    assert made.args.process_index == 0


@pytest.mark.thorough
def test_train_dataloader_of_the_users_own_is_shared_too(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Texts(), BATCH, collate_fn=collate)

    class Prepared(Own):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(super().get_train_dataloader())

    def train(kind: Any) -> dict[str, torch.Tensor]:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, num_train_epochs=1, disable_tqdm=True, optim="sgd",
            save_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        made = kind(model=Plain(gpt()), args=args, data_collator=collate)
        made.train()
        return {name: p.detach().clone() for name, p in made.model.named_parameters()}

    (alone,) = run_job(lambda: train(Own), (), first=(1,)).results.values()
    for weights in run_job(lambda: train(Own), (), first=(1, 2)).results.values():
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5)
    with pytest.raises(TypeError, match=r"leave out accelerator.prepare\(\)"):
        train(Prepared)


class Plain(torch.nn.Module):
    """Takes no ``numbers``."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, numbers: Any = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def test_loss_of_the_users_own_is_weighted_by_samples() -> None:
    def by_samples(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(inputs)

    def by_items(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(inputs) / num_items_in_batch

    def passes_on(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return transformers.Trainer.compute_loss(self, model, *args, **kwargs)

    assert not counts_items(by_samples)
    assert counts_items(by_items) and counts_items(passes_on) and counts_items(transformers.Trainer.compute_loss)


def test_a_damaged_position_is_named(tmp_path: Path) -> None:
    (tmp_path / "elastic_ray_position.json").write_text('{"epoch": 1, "pas')
    with pytest.raises(ValueError, match=r"elastic_ray_position.json is damaged.*delete the file"):
        read_position(tmp_path)
    assert read_position(tmp_path / "none") is None


class OwnKeys(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    """Exports keys of its own, which it reads by itself."""

    def __init__(self) -> None:
        self.best = 0.0

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> OwnKeys:
        made = cls()
        made.best = state["best"]
        return made


class NoAttributes(OwnKeys):
    """Exports arguments alone, as the library reads them."""

    from_state = transformers.trainer_callback.ExportableState.from_state

    def state(self) -> dict[str, Any]:
        return {"args": {}}


def test_a_callbacks_state_of_keys_of_its_own_travels() -> None:
    callback, other = OwnKeys(), OwnKeys()
    callback.best = 3.0
    _set_state(other, _state_of(callback))
    assert other.best == 3.0
    assert _state_of(NoAttributes()) == {}


def tokens(base: type, folder: Path) -> dict[str, list[int]]:
    """Tokens of each step, and of each batch of an evaluation, as TRL's trainers count them."""
    counted: dict[str, list[int]] = {"train": [], "eval": []}

    class Counting(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            own = inputs["attention_mask"].sum()
            count = int(self.accelerator.gather_for_metrics(own).sum())
            counted["train" if self.model.training else "eval"].append(count)
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    trainer = Counting(model=gpt(), args=arguments(folder), train_dataset=Texts(), data_collator=bare)
    trainer.train()
    trainer.evaluate(Texts())
    return counted


def test_what_subclass_gathers_in_step_is_of_all_workers(tmp_path: Path) -> None:
    alone = tokens(transformers.Trainer, tmp_path)
    assert len(alone["train"]) == STEPS and alone["eval"]
    for counted in run_job(lambda: tokens(Trainer, tmp_path), (), first=(1, 2)).results.values():
        assert counted == alone


class Noisy(torch.nn.Module):
    """Draws a random number in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        DRAWN.append(float(torch.rand(())))
        return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}


DRAWN: list[float] = []


@pytest.mark.parametrize("step", [3, 4, 6])
def test_alone_random_numbers_go_on_where_a_checkpoint_stands(step: int, tmp_path: Path) -> None:
    rows = [{"x": torch.ones(2), "labels": torch.ones(())} for _ in range(16)]

    def run(**options: Any) -> list[float]:
        set_session(None)
        DRAWN.clear()
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, num_train_epochs=2, disable_tqdm=True, save_steps=1,
            save_strategy="steps", per_device_train_batch_size=4,
        )  # fmt: skip
        trainer = Trainer(model=Noisy(), args=args, train_dataset=rows)
        trainer.train(**options)
        return list(DRAWN)

    whole = run()
    assert run(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}")) == whole[step:]
