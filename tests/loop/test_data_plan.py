"""Ranks whose data, order or batches differ are told what differs, when a pass begins and when a worker joins."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, TensorDataset

import elastic_ray as er
from elastic_ray.data.arrow import ArrowDataset
from elastic_ray.data.compared_items import item_facts, places, still_facts
from elastic_ray.run.current import session_of_thread
from elastic_ray.state.layout import ReplicasDifferError, common_rank, differing
from tests.loop.changing import Change, Kill, run_job
from tests.loop.ranks import Ranks
from tests.loop.trainee import Trainee, numbers

SAMPLES = 48


class Files(Dataset[Any]):
    """Images by name, as a directory listing gives them."""

    def __init__(self, names: list[Any]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Listed(Dataset[Any]):
    """Samples that are an attribute of the class."""

    ids: ClassVar[list[int]] = list(range(SAMPLES))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.ids[index])


class Stream(IterableDataset[Any]):
    """The numbers in order."""

    def __iter__(self) -> Any:
        return iter(torch.arange(SAMPLES))


def shuffled(rank: int) -> list[int]:
    """The numbers in an order of this rank's."""
    return random.Random(rank).sample(range(SAMPLES), SAMPLES)


def names(rank: int) -> list[str]:
    """Paths of one node in an order of this rank's."""
    return [f"/scratch/node-{rank}/images/{number}.png" for number in shuffled(rank)]


def split(rank: int) -> Any:
    """Half of the samples, without a seed that the ranks share."""
    half, _ = torch.utils.data.random_split(
        Files(list(range(SAMPLES))), [SAMPLES // 2] * 2, torch.Generator().manual_seed(rank)
    )
    return half


def weights(rank: int) -> torch.utils.data.WeightedRandomSampler:
    """Draws some samples more often, others on each rank."""
    return torch.utils.data.WeightedRandomSampler([1.0 + (index % 2 == rank) for index in range(SAMPLES)], SAMPLES)


def loader(dataset: Any, **options: Any) -> er.AdaptiveDataLoader:
    """One over the dataset."""
    return er.AdaptiveDataLoader(dataset, **{"batch_size": 12, **options})


def batches(rank: int) -> list[list[int]]:
    """As many batches of other sizes."""
    return [list(range(10 + rank)), list(range(10 + rank, SAMPLES))]


CASES: dict[str, tuple[Callable[[int], er.AdaptiveDataLoader], str]] = {
    "a set of texts": (
        lambda rank: loader(Files([f"img-{n}" for n in shuffled(rank)])),
        r"dataset\.names\[0\] is 'img-",
    ),
    "a listing": (lambda rank: loader(Files(names(rank))), r"dataset\.names\[0\] is '\d+\.png' on rank 0"),
    "targets": (
        lambda rank: loader(Files([(n, 1) for n in names(rank)])),
        r"dataset\.names\[0\] is \[2, '\d+\.png', 1\]",
    ),
    "ids": (lambda rank: loader(Files(shuffled(rank))), r"dataset\.names\[0\] is \d+ on rank 0"),
    "tensors": (lambda rank: loader(TensorDataset(torch.tensor(shuffled(rank)))), r"dataset\.tensors\[0\]\[0\] is"),
    "arrays": (lambda rank: loader(np.array(shuffled(rank))), r"dataset\[0\] is"),
    "a part by rank": (lambda rank: loader(list(range(2 * SAMPLES))[rank::2]), r"dataset\[0\] is 0 on rank 0 and 1 on"),
    "a split": (lambda rank: loader(split(rank)), r"dataset\.indices\[0\] is"),
    "parts in another order": (
        lambda rank: loader(ConcatDataset([Files(list(range(24))), Files(shuffled(rank))])),
        r"dataset\.datasets\[1\]\.names\[0\] is",
    ),
    "a wrapper": (
        lambda rank: loader(StackDataset(TensorDataset(torch.tensor(shuffled(rank))), numbers(SAMPLES))),
        r"dataset\.datasets\[0\]",
    ),
    "seed": (lambda rank: loader(numbers(SAMPLES), seed=rank), "seed is 0 on rank 0 and 1 on rank 1"),
    "seed of a stream": (lambda rank: loader(Stream(), seed=rank), "seed is 0 on rank 0 and 1 on rank 1"),
    "shuffle": (
        lambda rank: loader(numbers(SAMPLES), shuffle=rank == 0),
        "shuffle is True on rank 0 and False on rank",
    ),
    "sampler": (
        lambda rank: loader(numbers(SAMPLES), sampler=range(SAMPLES) if rank else None, shuffle=False),
        "sampler is 'none' on rank 0 and 'range' on rank 1",
    ),
    "weights": (lambda rank: loader(numbers(SAMPLES), sampler=weights(rank)), r"the order of epoch 0 is \[\d+, "),
    "batch_size": (
        lambda rank: loader(numbers(SAMPLES), batch_size=12 + rank),
        "batch_size is 12 on rank 0 and 13 on rank",
    ),
    "batch_size of a stream": (lambda rank: loader(Stream(), batch_size=12 + rank), "batch_size is 12 on rank 0"),
    "drop_last": (lambda rank: loader(numbers(SAMPLES), drop_last=rank == 1), "drop_last is False on rank 0 and True"),
    "batches": (
        lambda rank: loader(numbers(SAMPLES), batch_size=1, batch_sampler=batches(rank), whole_batches=True),
        "the batches' ends is",
    ),
}


def passes(case: str, epochs: int = 1) -> str:
    """What a rank is told, which passes over a loader that is made for it."""
    Trainee()
    context = er.get_context()
    made = CASES[case][0](context.get_world_rank())
    read = 0
    try:
        for _ in er.remaining_epochs_until(epochs):
            for _batch in made:
                read += 1
    except ReplicasDifferError as error:
        return f"{read}: {error}"
    return ""


@pytest.mark.parametrize("case", list(CASES))
def test_what_differs_is_named_before_the_first_step(ranks: Ranks, case: str) -> None:
    for told in ranks.run(passes, case, world=2):
        assert told.startswith("0: every worker must train on the same data in the same order, but"), told
        assert re.search(CASES[case][1], told), told


def thinned(rank: int, epoch: int, data: Listed) -> None:
    """A rank leaves samples out by itself in the last epoch."""
    if epoch == 2:
        data.ids = list(range(SAMPLES - rank))


def mixed(rank: int, epoch: int, data: Listed) -> None:
    """Each rank has an order of its own in the last epoch."""
    if epoch == 2:
        data.ids = [n * 7 % SAMPLES if rank else n for n in range(SAMPLES)]


def later(change: Callable[[int, int, Listed], None]) -> tuple[int, str]:
    """Epoch in which a rank is told, and what."""
    trainee, data, rank = Trainee(), Listed(), er.get_context().get_world_rank()
    made = loader(data, shuffle=False)
    for epoch in er.remaining_epochs_until(3):
        change(rank, epoch, data)
        try:
            for x in made:
                trainee.train(x)
        except ReplicasDifferError as error:
            return epoch, str(error)
    return -1, ""


def test_length_that_changes_is_an_error_of_its_pass(ranks: Ranks) -> None:
    for epoch, told in ranks.run(later, thinned, world=2):
        assert epoch == 2 and "len(dataset) is 48 on rank 0 and 47 on rank 1" in told


def test_numbers_that_rank_notes_for_itself_are_its_own(ranks: Ranks) -> None:
    assert ranks.run(later, mixed, world=2) == [(-1, "")] * 2


def nested() -> str:
    """Evaluate within a step, on other samples on each rank."""
    trainee, rank = Trainee(), er.get_context().get_world_rank()
    made, evaluation = loader(numbers(SAMPLES)), loader(list(range(rank, SAMPLES + rank)), shuffle=False)
    try:
        for _ in er.remaining_epochs_until(1):
            for (x,) in made:
                trainee.train(x)
                for _batch in evaluation:
                    pass
    except ReplicasDifferError as error:
        return str(error)
    return ""


def test_pass_within_a_step_is_compared_at_its_end(ranks: Ranks) -> None:
    for told in ranks.run(nested, world=2):
        assert "dataset[0] is 0 on rank 0 and 1 on rank 1" in told


@pytest.mark.parametrize("third", [True, False])
def test_a_joiner_with_other_data_is_named(third: bool) -> None:
    def train() -> None:
        trainee = Trainee()
        worker = session_of_thread().worker
        made = loader(Files(names(3 if worker == "w3" else 1)))
        for _ in er.remaining_epochs_until(2):
            for x in made:
                trainee.train(x)

    if not third:
        assert len(run_job(train, [Change(2, (1, 2))], first=(1,)).groups) == 2
        return
    with pytest.raises(ReplicasDifferError, match=r"on rank 0 and '\d+\.png' on rank 2.* Rank 2 has just joined"):
        run_job(train, [Change(2, (1, 2, 3))], first=(1, 2))


def test_a_joiner_with_fewer_samples_is_named() -> None:
    def train() -> None:
        trainee = Trainee()
        worker = session_of_thread().worker
        made = loader(numbers(SAMPLES - (worker == "w2")))
        for _ in er.remaining_epochs_until(2):
            for (x,) in made:
                trainee.train(x)

    with pytest.raises(ReplicasDifferError, match=r"48 samples on rank 0 and 47 on rank 1, which joins:"):
        run_job(train, [Change(2, (1, 2))], first=(1,))


# -- changes of the group ------------------------------------------------------------------------------------------


def passes_of_all_sizes() -> int:
    """Steps of a run with passes of training, of fewer samples than workers, and within a step."""
    trainee = Trainee()
    train, few = loader(numbers(SAMPLES), seed=3), loader(numbers(3), batch_size=2)
    fewer = loader(numbers(3), batch_size=2, drop_last=True)
    for _ in er.remaining_epochs_until(2):
        assert all(len(x) for (x,) in few)
        for (x,) in train:
            if er.get_context().get_global_step() % STEPS == 1:
                assert all(len(x) for (x,) in few)
            trainee.train(x)
        assert all(len(x) for (x,) in fewer)
        assert all(len(x) for (x,) in few)
    return er.get_context().get_global_step()


STEPS = SAMPLES // 12


@pytest.mark.parametrize(
    "script",
    [
        [Change(STEPS - 1, (1, 2, 3, 4))],
        [Change(STEPS, (1, 2, 3, 4))],
        [Change(0, (1, 2, 3, 4)), Change(STEPS, (1,))],
        [Kill(STEPS, 2, "edge", joins=(3, 4))],
        [Kill(STEPS, 2, "forward", joins=(3, 4))],
        [Kill(STEPS - 1, 1, "edge", last=True, joins=(3,))],
    ],
    ids=str,
)
def test_wherever_the_group_changes_passes_are_compared_by_all(script: Any) -> None:
    """Also where a pass begins with it, and where ranks have no sample in it."""
    found = run_job(passes_of_all_sizes, script, first=(1, 2))
    assert len(found.groups) >= 2 and set(found.results.values()) == {2 * STEPS}


# -- facts -----------------------------------------------------------------------------------------------------


def test_paths_may_lie_elsewhere_on_each_node() -> None:
    ones, others = (item_facts(Files([f"/scratch/{node}/a/{n}.png" for n in range(40)])) for node in ("x", "yy"))
    assert ones == others and len(ones) == 17


def test_long_paths_may_too_also_within_rows() -> None:
    """Their length differs as well; those that have no folder in common are compared by their files' names."""

    def facts(node: str) -> dict[str, Any]:
        folder = f"/scratch/{node}/.cache/huggingface/datasets/downloads/extracted/0123456789abcdef0123456789abcdef"
        rows = [{"image": {"path": f"{folder}/{n}.png", "bytes": b"x"}, "text": f"a/{n}"} for n in range(40)]
        apart = [f"/{node}-{n % 2}/{n}.png" if n % 3 else f"~/{node}/{n}.png" for n in range(40)]
        return {**item_facts(rows), **item_facts(Files(apart), "apart")}

    assert facts("x") == facts("another-node")


class Notes(Dataset[Any]):
    """Keeps for each sample what no other rank knows."""

    def __init__(self, rank: int) -> None:
        self.base = numbers(SAMPLES)
        self.read = [0] * SAMPLES
        self.losses = np.full(SAMPLES, float(rank))
        self.cache: list[Any] = [None if rank else {"x": torch.tensor(n)} for n in range(SAMPLES)]
        self.drawn = [{"x": rank + n} for n in range(SAMPLES)]
        self.decoded = [None if rank else f"text {n}" for n in range(SAMPLES)]
        self.angles = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(rank))
        self.made_at = [object() for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        self.cache[index] = {"x": index}
        return self.base[index]


def test_what_a_rank_keeps_for_itself_is_its_own(ranks: Ranks) -> None:
    assert ranks.run(noting, world=2) == [SAMPLES // 2 * 4] * 2


def noting() -> int:
    """Reads of two loaders over one dataset with notes, the second of which is made later."""
    trainee, data = Trainee(), Notes(er.get_context().get_world_rank())
    train = loader(data)
    for epoch in er.remaining_epochs_until(2):
        if epoch == 0:
            evaluation = loader(torch.utils.data.Subset(data, range(SAMPLES)), shuffle=False)
        for (x,) in train:
            trainee.train(x)
        for _batch in evaluation:
            pass
    return sum(data.read)


def test_a_worker_that_joins_has_no_notes_yet() -> None:
    def train() -> None:
        trainee, data = Trainee(), Notes(0)
        for _ in er.remaining_epochs_until(2):
            for (x,) in loader(data):
                trainee.train(x)

    assert run_job(train, [Change(6, (1, 2))], first=(1,)).groups[-1] == (1, 2)


class Lazy(list[Any]):
    """Loads what it is asked for."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an item is loaded")


def test_what_is_loaded_when_asked_for_is_not_compared() -> None:
    assert not item_facts(Lazy(range(20))) and not item_facts(Files(Lazy(range(20))))
    stored = torch.utils.data.TensorDataset(torch.full((20, 2), torch.nan))
    assert not differing(item_facts(stored), item_facts(stored))


def test_numbers_may_be_rounded_otherwise() -> None:
    values = torch.rand(40, 3)
    ones, others = (item_facts(TensorDataset(each)) for each in (values, values * (1 + 1e-6)))
    assert ones != others and not differing(ones, others)
    assert differing(ones, item_facts(TensorDataset(values.flip(0))))


def test_no_sample_is_loaded() -> None:
    class Raises(Files):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} is looked for: it might open a file that worker processes come to share")

    assert item_facts(Raises(list(range(9))))["dataset.names[8]"] == 8


def test_images_with_black_borders_are_told_apart() -> None:
    images = torch.zeros(20, 28, 28, dtype=torch.uint8)
    images[:, 7:21, 7:21] = torch.arange(20, dtype=torch.uint8)[:, None, None]
    assert differing(item_facts(TensorDataset(images)), item_facts(TensorDataset(images.flip(0))))


def test_tables_are_read_as_they_are_stored() -> None:
    datasets = pytest.importorskip("datasets")

    def raises(rows: Any) -> Any:
        raise AssertionError

    table = datasets.Dataset.from_dict({"text": [f"t{n}" for n in range(40)], "label": list(range(40))})
    facts = item_facts(table.with_transform(raises))
    assert facts["dataset[0]"] == [["text", "t0"], ["label", 0]]
    assert differing(facts, item_facts(table.shuffle(seed=1)))
    assert "dataset.table[0]" in item_facts(Wraps(table))


@dataclasses.dataclass
class Wraps(Dataset[Any]):
    """As collators and tokenizers do."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)


def test_row_groups_stand_for_rows(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, rows in (("a", 3), ("b", 4), ("c", 3)):
        pq.write_table(pa.table({"x": list(range(rows))}), tmp_path / f"{name}.parquet")
    ones, others = (
        item_facts(ArrowDataset([tmp_path / f"{name}.parquet" for name in chosen])) for chosen in ("ab", "cb")
    )
    assert differing(ones, others) == ["dataset files[0]"]


def test_what_rank_noted_in_numbers_is_no_fact_later() -> None:
    first = {"dataset.losses[0]": [0.0, 0.0], "dataset.names[0]": ["a"], "len(dataset)": 1}
    now = {"dataset.losses[0]": [0.5, 0.0], "dataset.names[0]": ["b"], "len(dataset)": 2, "dataset.texts[0]": "new"}
    assert still_facts(now, first) == {**now, "dataset.losses[0]": None, "dataset.texts[0]": None}
    assert not differing({"losses": None}, {"losses": [1.0, 2.0]})


def test_common_rank_is_of_the_most_not_just_joined() -> None:
    assert common_rank([5, 6, 6], [False] * 3) == 1
    assert common_rank([5, 6, 6], [False, True, True]) == 0
    assert common_rank([0, 6, 7], [False] * 3) == 1


def test_places_are_spread() -> None:
    assert places(1) == [0] and places(16) == list(range(16))
    assert len(set(places(17))) == 16 and places(10**9)[-1] == 10**9 - 1
