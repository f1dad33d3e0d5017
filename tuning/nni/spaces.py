"""NNI's search spaces: validation, and conversion from Ray Tune's (pure except for Tune's types)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuning.nni.algorithms import KNOWN, Algorithm
from tuning.trials import check_searchable

_VALUES = {
    "choice": "a list of what to choose from",
    "randint": "[low, high], whole numbers, without high itself",
    "uniform": "[low, high]",
    "quniform": "[low, high, q]",
    "loguniform": "[low, high], both above 0",
    "qloguniform": "[low, high, q], all above 0",
    "normal": "[mean, sigma]",
    "qnormal": "[mean, sigma, q]",
    "lognormal": "[mean, sigma]",
    "qlognormal": "[mean, sigma, q]",
}


def check_space(space: Any, tuner: Algorithm) -> dict[str, Any]:
    """Return the NNI search space as a dict, after checking that the tuner can search it."""
    if not isinstance(space, Mapping):
        raise TypeError(
            'search_space must be a mapping such as {"lr": {"_type": "loguniform", "_value": [1e-4, 1e-1]}}, but got '
            f"{space!r}"
        )
    if not space:
        raise ValueError("search_space must have at least one parameter, but got {}")
    refused = KNOWN[tuner.name].not_types if tuner.name else ()
    for name, spec in space.items():
        check_searchable(name)
        _check_parameter(name, spec)
        if spec["_type"] in refused:
            raise ValueError(
                f"search_space[{name!r}] cannot be {spec['_type']!r} with tuner={tuner.name!r} here: "
                f"{KNOWN[tuner.name].why_not}. Take 'choice' for it, or the tuner 'TPE'"
            )
    return dict(space)


def _check_parameter(name: Any, spec: Any) -> None:
    """Raise ValueError unless the parameter has one of NNI's types and matching values; the message lists both."""
    where = f"search_space[{name!r}]"
    if not isinstance(spec, Mapping) or not {"_type", "_value"} <= spec.keys():
        raise ValueError(f'{where} must be {{"_type": ..., "_value": [...]}}, but got {spec!r}')
    kind, value = spec["_type"], spec["_value"]
    if kind not in _VALUES:
        raise ValueError(f"{where} must have a _type of {', '.join(_VALUES)}, but got {kind!r}")
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{where}, {kind}, must have as _value {_VALUES[kind]}, but got {value!r}")
    if kind == "choice":
        return
    number = int if kind == "randint" else (int, float)
    good = len(value) == (3 if kind.startswith("q") else 2)
    good = good and all(isinstance(each, number) and not isinstance(each, bool) for each in value)
    if good and "normal" not in kind:
        good = value[0] < value[1] and not ("log" in kind and min(value) <= 0)
    if not good:
        raise ValueError(f"{where}, {kind}, must have as _value {_VALUES[kind]}, but got {value!r}")


def from_tune(space: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert Tune's ``param_space`` into two dicts: the searched part in NNI's format, and the fixed values."""
    from ray.tune.search.sample import Categorical, Domain, Float, Integer

    searched: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, value in space.items():
        check_searchable(name)
        if isinstance(value, Categorical):
            searched[name] = {"_type": "choice", "_value": list(value.categories)}
        elif isinstance(value, Float | Integer):
            searched[name] = _from_domain(name, value)
        elif isinstance(value, Domain) or (isinstance(value, Mapping) and _has_domain(value)):
            raise ValueError(
                f"param_space[{name!r}] has no equal in NNI: {value!r}. Give NNISearch(space=...) in NNI's words, with "
                f"types {', '.join(_VALUES)}; leave grid_search to tune's BasicVariantGenerator"
            )
        else:
            fixed[name] = value
    return searched, fixed


def _has_domain(value: Any) -> bool:
    from ray.tune.search.sample import Domain

    if isinstance(value, Mapping):
        return "grid_search" in value or any(_has_domain(each) for each in value.values())
    return isinstance(value, Domain)


def _from_domain(name: str, domain: Any) -> dict[str, Any]:
    """Return a numeric Tune domain in NNI's format; raise ValueError if NNI has no equivalent."""
    from ray.tune.search.sample import Integer, LogUniform, Normal, Quantized

    sampler: Any = domain.get_sampler()
    q = None
    if isinstance(sampler, Quantized):
        sampler, q = sampler.sampler, sampler.q
    if isinstance(sampler, Normal):
        kind, value = "normal", [sampler.mean, sampler.sd]
    else:
        kind, value = ("loguniform" if isinstance(sampler, LogUniform) else "uniform"), [domain.lower, domain.upper]
    if isinstance(domain, Integer) and kind == "uniform" and q in (None, 1):
        return {"_type": "randint", "_value": [int(each) for each in value]}
    if isinstance(domain, Integer):
        raise ValueError(
            f"param_space[{name!r}] has no equal in NNI: whole numbers are randint(low, high) or choice([...]) there, "
            f"but got {domain!r} with a {type(sampler).__name__} sampler"
        )
    return {"_type": kind if q is None else f"q{kind}", "_value": value if q is None else [*value, q]}
