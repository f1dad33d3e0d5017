"""The shape of the tree: small modules and folders, and no writes into other objects. Imports: pyproject.toml."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("placement", "elastic_ray", "tuning")
MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES, MOST_UNDOCUMENTED_LINES = 20, 650, 60, 8

# Objects of Ray and NNI, which are set up by writing into them.
FOREIGN = ("TuneController", "launcher", "nni.trial", "theirs", "self._tuner")
# Attributes of Python's, torch's, NumPy's and Ray's objects that are there to be written, or that we patch on purpose.
FOREIGN_ATTRIBUTES = (
    "config.blocking",  # of an NCCL group's options, which torch has no argument for
    *("__class__", "__traceback__", ".loader.exec_module"),
    *(".grad", "optimizer.step", "optimizer.zero_grad", "layer.sparse", "ctx.param", ".bit_generator.state"),
    "Queue._on_queue_feeder_error",
    *("optimizer.state_dict", "optimizer.load_state_dict", "optimizer.state", "optimizer.param_groups", "view.data"),
    *("ray.get_actor", "actor_class._remote", "sys.excepthook"),
)

# Classes that share their name with another of their package, and why.
SAME_NAMES = {
    "Pause": "elastic_ray.events.Pause is what a change takes, elastic_ray.adaptation.Pause asks to pause a job",
    "Report": "elastic_ray.events.Report is what a loop reports, elastic_ray.adaptation.Report what a policy reports",
}

# Private names that tests use, by reason. What is not listed is reached by what users and other modules see.
PRIVATE_NAMES = {
    "of torch: what a hook or an operator leaves is to be seen": """_Work _backward_hooks _cdata _dynamo
        _foreach_lerp_ _foreach_mul_ _forward_hooks _forward_pre_hooks _indices _lazy_seed_tracker _local_scalar_dense
        _new_with_weak_ptr _orig_mod _post_accumulate_grad_hooks
        _set_params_and_buffers_to_ignore_for_model _version""",
    "of Ray and its Python: what it keeps has no public view": """_MockFileSystem _TrainingResult _WrappedDataLoader
        _connect_and_get_accessor _derive_autoscaling_config_from_ray_cr _gcs_client _global_node _internal_kv_del
        _internal_kv_get _internal_kv_list _internal_kv_put _private _proc _resources_per_worker_not_none _scaler
        _objects _exit""",
    "of Lightning, Accelerate and transformers: what a user's code finds there": """_elastic_options _enabled
        _last_val_time _mixed_precision _reset_state _trainer""",
    "of torch's own test classes, whose cases run in the ranks of a group": """_barrier _create_process_group_gloo
        _get_default_group _spawn_processes _spawn_threads""",
    "a clock that a test sets": "_clock",
    "a lock of torch's that no process may be forked with": "_initialization_lock",
    "waits that a test makes short": "_FORM_TIMEOUT_S _HEARING_S _KEPT _PATIENCE_S",
    "tables of what is refused, each entry of which is tried": """_ARGUMENTS _ElasticArguments _HOMES _OF_ACCELERATOR
        _REFUSED _missing_fields""",
    "formulas that are compared with another computation": """_Regression _climb _demand _error _exchange _fit
        _forecast _group_used _host_used _hull _lanes _masked _measured_again _set_state _signal _spread
        _state_of""",
    "sizes in memory and counts, which must stay bounded": """_ahead _bytes _buckets _buffers _cache _count_costs _held
        _left_out _pending _policies _promise _records _tables""",
    "what lies with each rank, which no rank shows another": """_debtors _tiles _gathered _holder _owed
        _reducer _shard _states _steps _sync _table _tracker""",
    "the inside of a communicator or a run, which a test breaks on purpose": """_above _core _form_gloo _gloo
        _gradient_backends _kind _meet _module _nccl _numbers _session _speak _vote""",
    "background work and peers of a saver, notifier or exchange, which a test waits for": """_background _busy
        _looking _making _parts _pulled _pulls""",
    "a job's supervisor, at times that a test sets": "_preemption _retry_s _save_in_time",
    "what a sweep adds to Tune's loop, here to one whose cluster is gone": "_claim_sweeps _watch_of",
    "a coordinator without Ray's data, driven from within": """_close _datasets _lock _loop _packed _readers
        _streams _wake _waiting""",
}
# Test modules whose helpers others still import; a helper belongs in a module that is no test.
LENDING_TESTS = 0
# Tests with names of more than nine words after `test_`; fewer from change to change.
LONG_NAMES, MOST_WORDS = 0, 9

# Words that a docstring does not begin with, since an editor shows its first line without the lines around it; and
# verbs that say too little.
DANGLING = re.compile(
    r"(it|its|itself|they|their|theirs|them|this|that|these|those|he|she|his|her|who|whom|whose|which|whether|what"
    r"|whatever|how|why|where|as|of|see|the same|the others?"
    r"|begin|take|follow|look|forget|tell|hear|settle|note)\b|.*\bsee the module's text",
    re.IGNORECASE,
)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(package: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax, the module first."""
    return tuple(ast.walk(ast.parse((ROOT / path).read_text())))


@pytest.fixture(scope="module", params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Iterator[str]:
    """One package after the other, as their syntax takes hundreds of MB together."""
    yield request.param
    nodes.cache_clear()


def written(function: _Function) -> Iterator[ast.Attribute]:
    """Attributes of objects that the function was given, not of its own object nor of one that it has made."""
    own = {"self", "cls", *FOREIGN}
    for node in ast.walk(function):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, (ast.AnnAssign, ast.AugAssign))
            else []
        )
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            own |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if not isinstance(each, ast.Attribute) or ast.unparse(each).endswith(FOREIGN_ATTRIBUTES):
                    continue
                if ast.unparse(each.value) not in own:
                    yield each


def test_modules_and_folders_are_small(package: str) -> None:
    long = {
        str(path): n for path in modules(package) if (n := len((ROOT / path).read_text().splitlines())) > MOST_LINES
    }
    folders = {path.parent for path in modules(package)}
    full = {
        str(folder): n
        for folder in folders
        if (n := len([each for each in (ROOT / folder).glob("*.py") if each.name != "__init__.py"])) > MOST_MODULES
    }
    assert not long and not full


def test_class_names_are_unique(package: str) -> None:
    places: dict[str, list[str]] = {}
    for path in modules(package):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert not {name: at for name, at in places.items() if len(at) > 1 and name not in SAME_NAMES}


def test_functions_are_short(package: str) -> None:
    long = [
        f"{path}: {node.name}"
        for path in modules(package)
        for node in nodes(path)
        if isinstance(node, _Function)
        for body in [node.body[1:] if ast.get_docstring(node) else node.body]
        if body and (node.end_lineno or 0) - body[0].lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert not long


def test_longer_private_functions_say_what_they_return(package: str) -> None:
    """Shorter ones are read as fast as a text about them."""
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path in modules(package)
        for node in nodes(path)
        if isinstance(node, _Function) and node.name.startswith("_") and not node.name.startswith("__")
        if (node.end_lineno or 0) - node.lineno + 1 > MOST_UNDOCUMENTED_LINES and not ast.get_docstring(node)
    ]
    assert not silent


def test_docstrings_stand_alone(package: str) -> None:
    dangling = [
        f"{path}:{line} {text.splitlines()[0]}"
        for path in modules(package)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | _Function) and (text := ast.get_docstring(node))
        for line in [getattr(node, "lineno", 1)]
        if DANGLING.match(text)
    ]
    assert not dangling


def test_private_fields_are_written_by_their_class(package: str) -> None:
    found = [
        f"{path}:{each.lineno} {ast.unparse(each)}"
        for path in modules(package)
        for node in nodes(path)
        if isinstance(node, _Function)
        for each in written(node)
        if each.attr.startswith("_")
    ]
    assert not sorted(set(found))


def modules_of_tests() -> list[Path]:
    """All modules of tests but the benchmarks, which are scripts beside them."""
    return [path for path in modules("tests") if "benchmarks" not in path.parts]


def private(path: Path) -> Iterator[tuple[int, str]]:
    """Private names of other modules' objects that a module uses, with their lines."""
    every = nodes(path)
    own = {node.name for node in every if isinstance(node, (_Function, ast.ClassDef))}
    stored = [each for each in every if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    own |= {each.attr for each in stored if ast.unparse(each.value) == "self"}
    own |= {each.target.id for each in every if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    for node in every:
        if isinstance(node, ast.Attribute) and node.attr not in own:
            used = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            used = [each.name for each in node.names]
        else:
            continue
        for name in used:
            if name.startswith("_") and not name.startswith("__"):
                yield node.lineno, name


def test_tests_use_private_names_for_listed_reasons() -> None:
    allowed = set(" ".join(PRIVATE_NAMES.values()).split())
    found = [(f"{path}:{line}", name) for path in modules_of_tests() for line, name in private(path)]
    assert not [(at, name) for at, name in found if name not in allowed], "list them in PRIVATE_NAMES with a reason"
    assert not allowed - {name for _, name in found}, "no test uses these any more"


def test_sleeps_of_tests_look_at_intervals_or_have_reasons() -> None:
    silent = []
    for path in modules_of_tests():
        lines = (ROOT / path).read_text().splitlines()
        looks = {id(each) for loop in nodes(path) if isinstance(loop, ast.While) for each in ast.walk(loop)}
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep" and id(node) not in looks:
                line, before = lines[node.lineno - 1], lines[node.lineno - 2].lstrip()
                silent += [f"{path}:{node.lineno}"] * ("#" not in line and not before.startswith("#"))
    assert not silent


def test_test_modules_lend_no_helpers() -> None:
    lending = {
        node.module
        for path in modules_of_tests()
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.startswith("tests.") and node.module.rpartition(".")[2].startswith("test_")
    }
    assert len(lending) <= LENDING_TESTS, sorted(lending)


def test_names_of_tests_are_short() -> None:
    long = [
        node.name
        for path in modules_of_tests()
        for node in nodes(path)
        if isinstance(node, _Function) and node.name.startswith("test_") and node.name.count("_") > MOST_WORDS
    ]
    assert len(long) <= LONG_NAMES, f"{len(long)} tests have names of more than {MOST_WORDS} words: rename yours"


def test_the_mutation_runs_patterns_each_match_a_file() -> None:
    """It is run by hand, and needs a tool that is not installed here, so that nobody else would notice."""
    tree = ast.parse((ROOT / "tests/mutation/score.py").read_text())
    (parts,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PARTS")
    for pattern in " ".join(" ".join(each) for each in ast.literal_eval(parts).values()).split():
        before, names, after = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", pattern).groups()
        for name in (names or "").split(","):
            assert list(ROOT.glob(f"{before}{name}{after}")), f"{before}{name}{after} matches no file"


def imported(path: Path) -> Iterator[Path]:
    """Folders of this tree that a module imports from when it is loaded, its own left out."""
    every = nodes(path)
    typing = [each for each in every if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test)]
    unloaded = {id(each) for node in typing for each in ast.walk(node)}
    for node in every:
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in unloaded:
            place = Path(*node.module.split("."))
            folder = place if (ROOT / place).is_dir() else place.parent
            if folder.parts and folder.parts[0] in PACKAGES and folder != path.parent:
                yield folder


def test_no_two_folders_import_each_other() -> None:
    """Also a folder and one inside it; ``__init__`` gathers public names, and does not count."""
    arrows = {
        (path.parent, folder)
        for package in PACKAGES
        for path in modules(package)
        if path.name != "__init__.py"
        for folder in imported(path)
    }
    assert not sorted({tuple(sorted(map(str, arrow))) for arrow in arrows if arrow[::-1] in arrows})
