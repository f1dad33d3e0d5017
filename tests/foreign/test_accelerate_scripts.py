"""The programs that Accelerate ships to test itself on several processes, with elastic-ray in place of its launcher.

Each function of ``accelerate.test_utils.scripts`` is a case for two workers: ``Accelerator`` is ours, and the
functions of ``accelerate.utils`` that meet other processes are our collectives. What becomes of each is written
down here; docs/limits.md has the counts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.run.current import set_session
from tests.loop.changing import run_job

accelerate = pytest.importorskip("accelerate")

from elastic_ray.integrations.huggingface import Accelerator  # noqa: E402

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

SCRIPTS = "accelerate.test_utils.scripts"
WORKERS = (1, 2)
PATIENCE_S = 60.0

# "passes"; or why not: "refused" with an error that says the way out, or what differs.
_NO_EPOCHS = "refused: loaders are iterated within remaining_epochs_until()"
_NO_LOOP = "refused: a train function has a loop"
_LATER = "differs: the number of workers is that of one until the first epoch begins"
EXPECTED: dict[str, dict[str, str]] = {
    "test_ops": {},
    "test_script": {
        **dict.fromkeys(("check_seedable_sampler", "check_seedable_sampler_with_data_seed"), _NO_EPOCHS),
        **dict.fromkeys(("central_dl_preparation_check", "custom_sampler_check", "dl_preparation_check"), _NO_LOOP),
        **dict.fromkeys(("init_state_check", "process_execution_check", "rng_sync_check"), _NO_LOOP),
        "check_seedable_sampler_in_batch_sampler_shard": _LATER,
        "test_reinstantiated_state": "differs: an Accelerator works whatever accelerate's own state has lost",
        "training_check": "refused: a sampler with a generator of its own",
    },
    "test_sync": {
        **dict.fromkeys(("test_dataloader_break", "test_distributed_sync", "test_noop_sync"), _NO_EPOCHS),
        "test_distributed_sync_multiple_fwd": _NO_EPOCHS,
        "test_gradient_accumulation": "refused: the job cuts micro-batches",
        "test_gradient_accumulation_with_opt_and_scheduler": "refused: the job cuts micro-batches",
    },
    "test_distributed_data_loop": {
        **dict.fromkeys(("test_default_ensures_even_batch_sizes", "test_can_disable_even_batches"), _LATER),
        **dict.fromkeys(("test_can_join_uneven_inputs", "test_join_can_override_even_batches"), _LATER),
        "test_join_can_override_for_mixed_type_dataloaders": _LATER,
        "test_join_raises_warning_for_iterable_when_overriding_even_batches": _LATER,
        "test_join_raises_warning_for_non_ddp_distributed": "differs: no batch is uneven, so that nothing is joined",
        "test_pickle_accelerator": _LATER,
        **dict.fromkeys(("test_stateful_dataloader", "test_stateful_dataloader_save_state"), _NO_EPOCHS),
    },
}
# Parts of other cases, what needs packages that are not there, and what asks PartialState, which is not ours: it knows
# of one process.
LEFT_OUT = {
    "test_ops": "create_tensor test_copy_tensor_to_devices test_op_checker",
    "test_script": "generate_baseline_dataloader print_main print_local_main print_last print_on mock_training"
    " test_split_between_processes_dataset test_split_between_processes_list test_split_between_processes_nested_dict"
    " test_split_between_processes_tensor test_split_between_processes_evenly",
    "test_sync": "check_model_parameters step_model get_training_setup",
    "test_distributed_data_loop": "create_accelerator create_dataloader verify_dataloader_batch_sizes test_data_loader",
}


@pytest.fixture(autouse=True)
def one_state_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads here, and what accelerate keeps for a process must outlive each of their programs."""
    for name in ("AcceleratorState", "PartialState"):
        monkeypatch.setattr(
            getattr(accelerate.state, name), "_reset_state", staticmethod(lambda *args, **options: None)
        )


def cases() -> list[tuple[str, str]]:
    """Functions of the scripts that check something, in the order of their files."""
    found = []
    for script in EXPECTED:
        module = importlib.import_module(f"{SCRIPTS}.{script}")
        left_out = {"main", *LEFT_OUT.get(script, "").split()}
        found += [
            (script, name)
            for name, each in inspect.getmembers(module, inspect.isfunction)
            if each.__module__ == module.__name__ and not name.startswith("_") and name not in left_out
        ]
    return found


class InPlace:
    """A script's module with elastic-ray's parts under Accelerate's names."""

    def __init__(self, script: str, patch: pytest.MonkeyPatch) -> None:
        self.module: Any = importlib.import_module(f"{SCRIPTS}.{script}")
        ours: dict[str, Any] = {
            "Accelerator": functools.partial(Accelerator, cpu=True),
            "gather": lambda value: Accelerator(cpu=True).gather(value),
            "gather_object": lambda values: [each for rank in er.all_gather(values) for each in rank],
            "broadcast": er.broadcast,
            "reduce": lambda value, *args: Accelerator(cpu=True).reduce(value, *args),
            "pad_across_processes": lambda value, *args, **options: Accelerator(cpu=True).pad_across_processes(
                value, *args, **options
            ),
        }
        for name, value in ours.items():
            if hasattr(self.module, name):
                patch.setattr(self.module, name, value)

    def run(self, name: str) -> None:
        """Call one of its functions as a user's program would be: within a training where it has none of its own."""
        function = getattr(self.module, name)
        wanted = list(inspect.signature(function).parameters)
        accelerator = Accelerator(cpu=True)
        known = {"accelerator": accelerator, "state": accelerator}
        call = functools.partial(function, *[known[each] for each in wanted if each in known])
        if self.module.__name__.endswith("test_ops") or name == "test_trigger":
            within_training(accelerator, call)
        else:
            call()


def within_training(accelerator: Any, call: Any) -> None:
    """Call in the first step of a training."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in er.remaining_epochs_until(1):
        for step, (x,) in enumerate(loader):
            if step == 0:
                call()
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()


def outcome(script: str, name: str, patch: pytest.MonkeyPatch) -> str:
    """``passes``, ``refused``, ``differs`` or ``hangs``, and the error."""
    set_session(None)
    program = InPlace(script, patch)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        pool.submit(run_job, lambda: program.run(name), (), first=WORKERS).result(PATIENCE_S)
    except concurrent.futures.TimeoutError:
        return "hangs"
    except BaseException as error:  # the harness raises what a worker has raised
        text = " ".join(str(error).split())
        own = ("under elastic-ray", "AdaptiveDataLoader")  # an error of ours says the way out
        refused = isinstance(error, (ValueError, RuntimeError)) and any(each in text for each in own)
        return f"{'refused' if refused else 'differs'}: {type(error).__name__}: {text[:160]}"
    finally:
        pool.shutdown(wait=False)
    return "passes"


@pytest.mark.parametrize(("script", "name"), cases())
def test_a_case(script: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = outcome(script, name, monkeypatch)
    print(f"OUTCOME {script}::{name}: {found}")
    assert found.partition(":")[0] == EXPECTED[script].get(name, "passes").partition(":")[0], found


def test_the_docs_have_the_counts() -> None:
    counts = collections.Counter(EXPECTED[script].get(name, "passes").partition(":")[0] for script, name in cases())
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert f"{counts['passes']} of {counts.total()} pass, {counts['refused']} are refused by name" in text
