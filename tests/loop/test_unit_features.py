"""Features of the job inside units of processes: through changes and a kill, as one whole worker trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import elastic_ray as er
from elastic_ray.stragglers.detection import StragglerConfig
from elastic_ray.sync import PowerSGD
from tests.job import united
from tests.loop.changing import run_job
from tests.loop.unit_processes import Place, Script, UnitJob

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
CHANGES = Script(changes={12: (1, 2, 3), 30: (1, 2), 44: (1, 2, 4)}, kill=(Place(2, 1), "backward", 56))
every_unit = pytest.mark.parametrize(("kind", "unit"), [("tp", 2), ("shard", er.Unit(shard=2))])
FEATURES: dict[str, dict[str, Any]] = {
    "policies": {"policies": True, "largest": 24},
    "evaluation": {"evaluates": True},
    "ring": {"strategy": "ring"},
    "ps_balanced": {"strategy": "ps_balanced"},
    "matrices": {"matrices": "unitary"},
}


def whole(workers: int = 1, **config: Any) -> dict[str, Any]:
    """What whole workers return."""
    first = tuple(range(1, workers + 1))
    found: dict[str, Any] = run_job(
        lambda: united.train({"kind": "plain", "epochs": 30, **config}), first=first
    ).results[1]
    return found


def check_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["parameters"].keys() == wanted["parameters"].keys()
    for name, values in wanted["parameters"].items():
        assert found["parameters"][name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


@every_unit
@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=[] if name == "policies" else pytest.mark.slow) for name in FEATURES]
)
def test_feature_survives_changes_and_kill(tmp_path: Path, feature: str, kind: str, unit: Any) -> None:
    config = FEATURES[feature]
    job = UnitJob(united.train, {"kind": kind, "epochs": 30, **config}, tmp_path, unit)
    results = job.run((1, 2), CHANGES)
    assert job.groups == [(1, 2), (1, 2, 3), (1, 2), (1, 2, 4), (1, 4)]
    wanted = whole(2, **{**config, "strategy": None})
    assert {place.number for place in results} == {1, 4}
    for result in results.values():
        check_close(result, wanted)
    if feature == "policies":
        requests = [text for kind, text in job.told if kind == "policy"]
        assert len(requests) == 4 and not any("refused" in text for text in requests), requests
        for result in results.values():
            assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-3)
        assert len({tuple(result["workers"]) for result in results.values()}) == 1


@pytest.mark.slow
@every_unit
def test_slow_unit_takes_fewer_samples_through_changes(tmp_path: Path, kind: str, unit: Any) -> None:
    config = {"kind": kind, "epochs": 12, "slow": (1,), "slow_s": 0.05 if kind == "tp" else 0.1}
    job = UnitJob(united.train, config, tmp_path, unit, stragglers=StragglerConfig(response="share"))
    script = Script(changes={18: (1, 2, 3), 30: (1, 2)}, kill=(Place(2, 1), "backward", 40))
    results = job.run((1, 2), script)
    wanted = whole(epochs=12)
    for result in results.values():
        check_close(result, wanted)
    shares = [text for kind, text in job.told if kind == "straggler" and "of another's samples" in text]
    assert shares, job.told


@pytest.mark.slow
@every_unit
@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_units_that_drift_average_their_parts(tmp_path: Path, strategy: str, kind: str, unit: Any) -> None:
    """Two units as two whole workers do; and what is left of a unit that dies trains on."""
    found = UnitJob(united.train, {"kind": kind, "epochs": 5, "strategy": strategy}, tmp_path, unit).run((1, 2))
    wanted = whole(2, epochs=5, strategy=strategy)
    for result in found.values():
        check_close(result, wanted)
    job = UnitJob(united.train, {"kind": kind, "epochs": 30, "strategy": strategy}, tmp_path / "changes", unit)
    results = list(job.run((1, 2), CHANGES).values())
    assert len(job.groups) == 5 and len(results) == 4
    for result in results:
        check_close(result, results[0])


@pytest.mark.slow
@every_unit
def test_powersgd_compresses_parts_through_changes(tmp_path: Path, kind: str, unit: Any) -> None:
    config = {"kind": kind, "epochs": 30, "strategy": PowerSGD(rank=1)}
    results = list(UnitJob(united.train, config, tmp_path, unit).run((1, 2), CHANGES).values())
    for result in results:
        check_close(result, results[0])
    plain = whole()["parameters"]
    assert results[0]["parameters"]["norm.weight"] != pytest.approx(plain["norm.weight"], rel=1e-4)


@pytest.mark.slow
def test_int8_compresses_what_each_worker_holds(tmp_path: Path) -> None:
    config = {"kind": "shard", "epochs": 5, "strategy": "int8"}
    results = list(UnitJob(united.train, config, tmp_path, er.Unit(shard=2)).run((1, 2)).values())
    for result in results:
        check_close(result, results[0])


@pytest.mark.slow
@every_unit
def test_muon_steps_whole_matrices(tmp_path: Path, kind: str, unit: Any) -> None:
    """As on one worker, but for its arithmetic in bfloat16; a step has the length of 0.1 in 16 x 8 elements."""
    results = UnitJob(united.train, {"kind": kind, "epochs": 2, "matrices": "muon"}, tmp_path, unit).run((1, 2))
    wanted = whole(epochs=2, matrices="muon")["parameters"]
    for result in results.values():
        for name, values in wanted.items():
            assert result["parameters"][name] == pytest.approx(values, abs=5e-3), name


def test_unit_joins_after_evaluation(tmp_path: Path) -> None:
    """When torch's fully_shard has left the root's parameters whole, each of its workers is sent its part."""
    script = Script(kill=(Place(2, 1), "end_of_pass", 12), joins=(3,))
    config = {"kind": "shard", "epochs": 6, "evaluates": True}
    job = UnitJob(united.train, config, tmp_path, er.Unit(shard=2))
    results = job.run((1, 2), script)
    assert job.groups == [(1, 2), (1, 3)]
    wanted = whole(2, epochs=6)
    for result in results.values():
        check_close(result, wanted)
