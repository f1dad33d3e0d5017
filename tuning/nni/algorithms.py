"""NNI's algorithms on elastic jobs: which ones work, substitutes for the rest, and how each receives the mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from placement.checks import is_whole
from tuning.trials import Promise

_OLD_SCIPY = "it needs an older SciPy"
_HYPEROPT = "hyperopt 0.3 rounds to arrays, which NNI 3.0 cannot read"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSupport:
    """Support for one NNI algorithm on elastic jobs: whether and in what settings it runs, and a substitute."""

    kind: str = "tuner"  # "tuner", "advisor" (a tuner that stops trials itself) or "assessor"
    optimizes: bool = True  # whether it takes ``optimize_mode``
    manager_only: str = ""  # why it cannot be used in Ray Tune; empty if it can
    broken: str = ""  # why it does not run on this stack; empty if it does
    instead: str = "TPE"  # one that runs and is nearest to it
    not_types: tuple[str, ...] = ()  # types of search spaces that it cannot have
    why_not: str = ""
    class_name: str = ""  # what is to be used in place of NNI's class


_STEPS = "its trials are generations that NNI's manager starts; use ray.tune.schedulers.PopulationBasedTraining"
_ROUNDS = "it is an advisor, driven by NNI's manager; use ray.tune.schedulers.HyperBandScheduler"
_QUANTIZED = ("quniform", "qloguniform")

# Tried on Python 3.11, NumPy 2.4, SciPy 1.17.
KNOWN: Mapping[str, AlgorithmSupport] = {
    "TPE": AlgorithmSupport(),
    "TPE_legacy": AlgorithmSupport(not_types=_QUANTIZED, why_not=_HYPEROPT),
    "Random": AlgorithmSupport(),
    "GridSearch": AlgorithmSupport(),
    "Anneal": AlgorithmSupport(not_types=_QUANTIZED, why_not=_HYPEROPT),
    "Evolution": AlgorithmSupport(),
    "Batch": AlgorithmSupport(optimizes=False),
    "PBT": AlgorithmSupport(manager_only=_STEPS),
    "Hyperband": AlgorithmSupport(kind="advisor", manager_only=_ROUNDS, class_name="tuning.nni.hyperband.Hyperband"),
    "BOHB": AlgorithmSupport(kind="advisor", manager_only=_ROUNDS, class_name="tuning.nni.bohb.BOHB"),
    "GP": AlgorithmSupport(broken=_OLD_SCIPY),
    "Metis": AlgorithmSupport(broken=_OLD_SCIPY),
    "NetworkMorphism": AlgorithmSupport(broken="it needs an older NumPy", instead="Evolution"),
    "SMAC": AlgorithmSupport(broken="it needs smac4nni, a package of its time"),
    "DNGO": AlgorithmSupport(broken="it needs pybnn, a package of its time"),
    "PPO": AlgorithmSupport(broken="it needs gym, a package of its time", instead="Evolution"),
    "RegularizedEvolutionTuner": AlgorithmSupport(
        broken="it searches architectures, not parameters", instead="Evolution"
    ),
    "Medianstop": AlgorithmSupport(kind="assessor", instead="Medianstop"),
    "Curvefitting": AlgorithmSupport(kind="assessor", optimizes=False, instead="Medianstop"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """NNI tuner, advisor or assessor chosen by a user, with its arguments in NNI's format."""

    name: str = ""
    class_name: str = ""
    code_directory: str = "."
    class_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_tuner(given: Any, mode: str, *, in_tune: bool = False) -> Algorithm:
    """Return the tuner that a user specified, as a name such as ``"TPE"`` or as an NNI ``tuner`` configuration.

    Args:
        in_tune: True if the tuner will run in Ray Tune, without NNI's manager.
    """
    return _with_mode("tuner", _read("tuner", ("tuner", "advisor"), given, in_tune=in_tune), mode)


def read_assessor(given: Any, mode: str) -> Algorithm | None:
    """Return the assessor that a user specified, in any form accepted by :func:`read_tuner`; None stays None."""
    if given is None:
        return None
    assessor = _read("assessor", ("assessor",), given)
    if assessor.name == "Curvefitting" and mode == "min":
        raise ValueError(
            "assessor 'Curvefitting' extrapolates accuracies and cannot minimize: report an accuracy with mode='max', "
            "or use 'Medianstop'"
        )
    return _with_mode("assessor", assessor, mode)


def promise_of(assessor: Algorithm | None, metric: str, mode: str) -> Promise | None:
    """Return the promise (comparison rule) for an NNI assessor; None if the assessor is None, custom or invalid."""
    if assessor is None or not assessor.name:
        return None
    said = assessor.class_args
    most = said.get("epoch_num")  # of Curvefitting, which must have it
    grace = said.get("start_step", 6 if assessor.name == "Curvefitting" else 0)
    if not (most is None or is_whole(most, 1)) or not is_whole(grace, 0):
        return None  # NNI refuses it
    grace = max(1, min(grace, most or grace))
    return Promise(metric=metric, mode=mode, max_t=most, grace_period=grace, reduction_factor=2)


def check_together(tuner: Algorithm, assessor: Algorithm | None) -> None:
    """Raise ValueError if an assessor is given with a tuner that stops trials itself (an advisor, or PBT)."""
    advises = tuner.name in KNOWN and KNOWN[tuner.name].kind == "advisor"
    if assessor is not None and (advises or tuner.name == "PBT"):
        raise ValueError(
            f"assessor must be None with tuner={tuner.name!r}, which compares trials of equal length itself, but got "
            f"{assessor.name or assessor.class_name!r}"
        )


def works(kind: str) -> list[str]:
    """Return the names of the supported NNI algorithms of a kind: "assessor" or "tuner" (which includes advisors)."""
    kinds = ("tuner", "advisor") if kind == "tuner" else (kind,)
    return [name for name, known in KNOWN.items() if known.kind in kinds and not known.broken]


def _read(what: str, kinds: tuple[str, ...], given: Any, *, in_tune: bool = False) -> Algorithm:
    """Return the named algorithm or the user's own class; raise TypeError if both or neither are given."""
    if isinstance(given, str):
        given = {"name": given}
    elif not isinstance(given, Mapping):
        given = {key: getattr(given, key, None) for key in ("name", "class_name", "code_directory", "class_args")}
        given = {key: value for key, value in given.items() if value}
    unknown = set(given) - {"name", "class_name", "code_directory", "class_args"}
    if unknown or ("name" in given) == ("class_name" in given):
        raise TypeError(
            f'{what} must be a name, such as {works(what)[0]!r}, or {{"name": ..., "class_args": {{...}}}}, or '
            f'{{"class_name": "module.Class", "code_directory": ..., "class_args": {{...}}}}, but got {given!r}'
        )
    arguments = given.get("class_args") or {}
    if not isinstance(arguments, Mapping):
        raise TypeError(f"class_args of the {what} must be a mapping, but got {arguments!r}")
    if "class_name" in given:
        return Algorithm(
            class_name=given["class_name"],
            code_directory=str(given.get("code_directory") or "."),
            class_args=dict(arguments),
        )
    return Algorithm(name=_known_name(what, kinds, given["name"], in_tune), class_args=dict(arguments))


def _known_name(what: str, kinds: tuple[str, ...], name: Any, in_tune: bool) -> str:
    """Return NNI's spelling of an algorithm's name, matched case-insensitively as NNI does."""
    spelled = {each.lower(): each for each in KNOWN if KNOWN[each].kind in kinds}
    found = spelled.get(str(name).lower())
    if found is None and str(name).lower().endswith("tuner"):
        found = spelled.get(str(name).lower().removesuffix("tuner"))
    if found is None:
        raise ValueError(f"{what} must be one of {', '.join(works(what))}, but got {name!r}")
    known = KNOWN[found]
    if known.broken:
        raise ValueError(
            f"{what} {found!r} does not run on today's Python stack: {known.broken}. Take {known.instead!r}, which "
            f"does (there are {', '.join(works(what))})"
        )
    if in_tune and known.manager_only:
        raise ValueError(f"{what} {found!r} cannot be used in Ray Tune: {known.manager_only}")
    return found


def _with_mode(what: str, algorithm: Algorithm, mode: str) -> Algorithm:
    """Return the algorithm with ``optimize_mode`` if it accepts one; raise ValueError if it contradicts ``mode``."""
    if mode not in ("max", "min"):
        raise ValueError(f"mode must be 'max' or 'min', but got {mode!r}")
    word = {"max": "maximize", "min": "minimize"}[mode]
    given = algorithm.class_args.get("optimize_mode", word)
    if given != word:
        raise ValueError(f"optimize_mode of the {what} must be {word!r} as mode={mode!r} says, but got {given!r}")
    if not algorithm.name or not KNOWN[algorithm.name].optimizes:
        return algorithm
    return dataclasses.replace(algorithm, class_args={**algorithm.class_args, "optimize_mode": word})
