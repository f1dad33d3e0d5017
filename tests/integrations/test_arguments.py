"""Every argument of transformers' and Lightning's trainers is kept, mapped or refused, and the docs say which."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import elastic_ray as er
from elastic_ray.run.current import set_session
from tests.integrations.argument_tables import arguments
from tests.loop.changing import Change, run_job

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import BatchSizeFinder  # noqa: E402

from elastic_ray.integrations.huggingface import Trainer  # noqa: E402
from elastic_ray.integrations.huggingface import arguments as checks  # noqa: E402
from elastic_ray.integrations.huggingface import trainer as ours  # noqa: E402
from elastic_ray.integrations.lightning import ElasticRayStrategy  # noqa: E402

SAMPLES, BATCH = 40, 4
STEPS = SAMPLES // BATCH

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_state_for_all")]


def names(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_every_argument_is_accounted_for() -> None:
    """A new one must be kept, mapped or refused: find out which, and say it in the docs."""
    fields = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert list(arguments("huggingface.md", "TrainingArguments")) == fields
    assert list(arguments("huggingface.md", "Trainer")) == names(transformers.Trainer.__init__)
    assert list(arguments("lightning.md", "Trainer")) == names(lightning.Trainer.__init__)


# --- transformers


class Net(torch.nn.Module):
    """Half of its hidden units are dropped where ``dropout`` says so."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def numbers() -> TensorDataset:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for x, y in numbers()]  # type: ignore[attr-defined]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter(rows())


def train(kind: Any, folder: Path, data: Any = None, resume: Any = None, dropout: float = 0.0, **options: Any) -> Any:
    given = {"num_train_epochs": 3, "save_strategy": "no", "train_sampling_strategy": "sequential", **options}
    made = transformers.TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        optim=given.pop("optim", "sgd"),
        learning_rate=0.01,
        per_device_train_batch_size=BATCH,
        **given,
    )
    trainer = kind(model=Net(dropout), args=made, train_dataset=rows() if data is None else data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


REFUSED: dict[str, dict[str, Any]] = {
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "parallelism_config": {"parallelism_config": "any"},
    "dataloader_in_order": {"dataloader_in_order": False},
    "ddp_find_unused_parameters": {"ddp_find_unused_parameters": False},
    "ddp_bucket_cap_mb": {"ddp_bucket_cap_mb": 25},
    "ddp_broadcast_buffers": {"ddp_broadcast_buffers": False},
    "ddp_static_graph": {"ddp_static_graph": True},
    "ddp_backend": {"ddp_backend": "gloo"},
    "ddp_timeout": {"ddp_timeout": 60},
    "fsdp": {"fsdp": "full_shard"},
    "deepspeed": {"deepspeed": "any"},
    "optim": {"optim": "lomo"},
    "accelerator_config": {"accelerator_config": {"dispatch_batches": True}},
    "train_sampling_strategy": {"train_sampling_strategy": "batch_rebalance"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str, tmp_path: Path) -> None:
    given = dict(REFUSED[name])
    later = {key: given.pop(key) for key in ("deepspeed", "parallelism_config") if key in given}  # want packages
    made = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **given)
    vars(made).update(later)
    with pytest.raises(ValueError, match=rf"^{name}=.*is not supported under elastic-ray: \w"):
        Trainer(model=Net(), args=made, train_dataset=rows())


def test_what_the_docs_call_refused_is_what_is_checked() -> None:
    table = arguments("huggingface.md", "TrainingArguments")
    of_processes = {"n_gpu", "world_size"}  # no arguments
    assert set(REFUSED) == set(checks._REFUSED) - of_processes
    in_part = {"optim", "accelerator_config", "train_sampling_strategy"}
    assert {name for name, what in table.items() if what == "refused"} == set(REFUSED) - in_part


def test_the_usual_ones_are_not_refused(tmp_path: Path) -> None:
    made = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    checks.check_arguments(made)


def test_a_stream_is_read_in_the_workers_own_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataloader_num_workers=2 is not supported under elastic-ray for a dataset"):
        train(Trainer, tmp_path, Stream(), max_steps=2, dataloader_num_workers=2)


@pytest.mark.thorough
def test_a_model_that_is_to_be_compiled_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # accelerate's state has the compiler
    options = {"torch_compile": True, "torch_compile_backend": "eager", "num_train_epochs": 1}
    theirs = train(transformers.Trainer, tmp_path, **options)
    set_session(None)
    made = train(Trainer, tmp_path, **options)
    for _ in range(2):
        compiled = made.model_wrapped.module
        assert type(compiled) is type(theirs.model_wrapped) and compiled._orig_mod is made.model
        made.train()  # alone, a second training compiles no less
    once = train(Trainer, tmp_path, **options)
    torch.testing.assert_close(weights(once), weights(theirs))


def run(kind: Any, folder: Path, resume: bool, **options: Any) -> Any:
    """A training of its own, which saves within the second epoch or continues from there."""
    set_session(None)
    folder = folder / kind.__module__
    saves = {} if resume else {"save_strategy": "steps", "save_steps": STEPS + 3}
    return train(kind, folder, resume=folder / f"checkpoint-{STEPS + 3}" if resume else None, **saves, **options)


def test_going_on_draws_random_numbers_that_would_have_come(tmp_path: Path) -> None:
    whole = run(Trainer, tmp_path, False, dropout=0.5)
    torch.testing.assert_close(weights(run(Trainer, tmp_path, True, dropout=0.5)), weights(whole))


def test_going_on_without_skipping_data_begins_the_epoch_anew(tmp_path: Path) -> None:
    found = []
    for kind in (transformers.Trainer, Trainer):
        whole = run(kind, tmp_path, False)
        anew = run(kind, tmp_path, True, ignore_data_skip=True)
        assert not torch.equal(weights(anew), weights(whole))
        found.append((anew.state.global_step, weights(anew)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_each_node_may_have_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks._ElasticArguments, "local_process_index", property(lambda self: 0))  # a node each

    def run(each_node: bool, folder: Path) -> None:
        train(Trainer, folder, save_strategy="epoch", num_train_epochs=1, save_on_each_node=each_node)

    for each_node, copies in ((False, 1), (True, 2)):
        folders = iter([tmp_path / f"{each_node}{number}" for number in range(2)])
        run_job(lambda each_node=each_node, folders=folders: run(each_node, next(folders)), (), first=(1, 2))
        assert len(list(tmp_path.glob(f"{each_node}*/checkpoint-{STEPS}/model.safetensors"))) == copies


def test_other_ranks_have_the_log_level_of_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    levels: set[tuple[int, int]] = set()

    def note(level: int) -> None:
        levels.add((er.get_context().get_world_rank(), level))

    def run() -> None:
        monkeypatch.setattr(ours.transformers.utils.logging, "set_verbosity", note)  # type: ignore[attr-defined]
        train(Trainer, tmp_path, num_train_epochs=1, log_level="info", log_level_replica="error")

    run_job(run, (), first=(1, 2))
    assert (0, 20) in levels and (1, 40) in levels


# --- Lightning


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    """Writes down after which steps it was validated; the second worker's clock may be ahead."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.validated: list[int] = []
        self._ahead_s = ahead_s

    def on_train_start(self) -> None:
        if er.get_context().get_world_rank() == 1:
            self.trainer._last_val_time -= self._ahead_s

    def training_step(self, batch: Any, _: int) -> Any:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def validation_step(self, *_: Any) -> None:
        self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def validations(elastic: bool, ahead_s: float = 0.0, **options: Any) -> list[int]:
    trainer = lightning.Trainer(
        strategy=ElasticRayStrategy() if elastic else "auto",
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        **{"max_epochs": 2, **options},
    )
    module = Module(ahead_s)
    trainer.fit(module, DataLoader(numbers(), BATCH), DataLoader(numbers(), BATCH))
    return module.validated


def test_lightning_validates_by_the_clock_of_rank_0() -> None:
    """By each worker's own clock some would average buffers with others that do not validate yet."""
    now, never = datetime.timedelta(0), datetime.timedelta(hours=1)
    set_session(None)
    for interval in (now, never):
        assert validations(True, val_check_interval=interval) == validations(False, val_check_interval=interval)
        set_session(None)
    changed = run_job(
        lambda: validations(True, 7200.0, val_check_interval=never), (Change(3, (1, 2, 3)),), first=(1, 2)
    )
    assert set(map(tuple, changed.results.values())) == {()}


def test_a_search_for_the_batch_size_is_refused() -> None:
    with pytest.raises(Exception, match="Batch size finder is not supported with distributed strategies"):
        validations(True, callbacks=[BatchSizeFinder()])
