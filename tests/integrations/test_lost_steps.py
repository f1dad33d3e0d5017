"""Steps of Lightning and transformers in which a worker is lost where a loop ends, saves or validates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("transformers")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.integrations import lightning_fits as regression
from tests.integrations import text_fits as texts
from tests.loop.changing import Kill

STEPS = regression.STEPS
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_state_for_all")]


class StopsAfter(Callback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("joins", [(), (3,)])
@pytest.mark.parametrize("moment", ["backward", "edge"])
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"limit_train_batches": 3}, 2),
        ({"max_steps": STEPS + 2, "max_epochs": -1}, STEPS + 1),
        ({"callbacks": lambda: [StopsAfter(STEPS + 2)]}, STEPS + 1),
    ],
    ids=["limit_train_batches", "max_steps", "should_stop"],
)
def test_lightning_draws_the_last_step_of_a_pass_again(
    options: dict[str, Any], step: int, moment: str, joins: tuple[int, ...]
) -> None:
    alone = regression.fit(False, **options)
    results, _ = regression.job([Kill(step, 2, moment, joins=joins)], (1, 2), **options)
    regression.check_alike(results, alone)


@pytest.mark.parametrize("joins", [(), (3,)])
@pytest.mark.parametrize("moment", ["backward", "collective"])
def test_lightning_saves_no_step_that_is_lost(moment: str, joins: tuple[int, ...], tmp_path: Path) -> None:
    def saving(folder: str) -> dict[str, Any]:
        def keeper() -> list[Any]:
            return [ModelCheckpoint(tmp_path / folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")]

        return {"callbacks": keeper, "enable_checkpointing": True}

    regression.fit(False, **saving("alone"))
    regression.job([Kill(3, 2, moment, joins=joins)], (1, 2), **saving("job"))
    files = sorted(each.name for each in (tmp_path / "alone").iterdir())
    assert sorted(each.name for each in (tmp_path / "job").iterdir()) == files
    for name in files:
        alone, saved = (torch.load(tmp_path / which / name, weights_only=False) for which in ("alone", "job"))
        for key, value in alone["state_dict"].items():
            torch.testing.assert_close(saved["state_dict"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["collective", "after_collective"])
@pytest.mark.parametrize("first", [(1, 2), (1, 2, 3)])
def test_transformers_tells_of_evaluation_again_in_the_last_step(
    moment: str, first: tuple[int, ...], tmp_path: Path
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": texts.STEPS, "logging_steps": 8}
    alone = texts.Result(texts.fit(tmp_path / "alone", elastic=False, **options))
    script = [Kill(texts.STEPS * texts.EPOCHS - 1, 2, moment)]
    results, _ = texts.job(tmp_path / "job", script, first, **options)
    texts.check_alike(results, alone)


@pytest.mark.thorough
def test_transformers_saves_no_step_that_is_lost(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 8, "logging_steps": 8}
    alone = texts.Result(texts.fit(tmp_path / "alone", elastic=False, **options))
    results, _ = texts.job(tmp_path / "job", [Kill(7, 2, "collective", joins=(3,))], (1, 2), **options)
    texts.check_alike(results, alone)
    saved, theirs = (
        next((tmp_path / which).glob("checkpoint-8/model.safetensors")).read_bytes() for which in ("job", "alone")
    )
    assert len(saved) == len(theirs)


def small(module: torch.nn.Module, refused: list[int]) -> None:
    """Leave a module in training room for five samples at once; ``refused`` gets the sizes that do not fit."""

    def check(called: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
        samples = len(args[0] if args else named["input_ids"])
        if called.training and samples > 5:
            refused.append(samples)
            raise torch.OutOfMemoryError("as if")

    module.register_forward_pre_hook(check, with_kwargs=True)


def test_lightning_draws_a_step_without_memory_again() -> None:
    refused: list[int] = []

    def made() -> regression.Module:
        module = regression.Module("step")
        small(module.net, refused)
        return module

    alone = regression.fit(False, lambda: regression.Module("step"))
    found = regression.fit(True, made)
    found.batches //= 2  # every step has two
    assert refused == [8] and found.told == alone.told
    regression.check_alike({1: found}, alone)


def test_transformers_draws_a_step_without_memory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = texts.Result(texts.fit(tmp_path / "alone", elastic=False))
    refused, plain = list[int](), texts.gpt

    def gpt() -> Any:
        model = plain()
        small(model.transformer, refused)
        return model

    monkeypatch.setattr(texts, "gpt", gpt)
    found = texts.Result(texts.fit(tmp_path / "small"))
    assert refused == [8]
    texts.check_alike({1: found}, alone)
