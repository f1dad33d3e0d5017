"""The shape of the tree: small modules and folders, and no writes into other objects. Imports: pyproject.toml."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("placement", "elastic_ray", "tuning")
MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES, MOST_UNDOCUMENTED_LINES = 20, 600, 60, 8

# Objects of Ray and NNI, which are set up by writing into them.
FOREIGN = ("TuneController", "launcher", "nni.trial", "theirs", "self._tuner")
# Attributes of Python's, torch's, NumPy's and Ray's objects that are there to be written, or that we patch on purpose.
FOREIGN_ATTRIBUTES = (
    *("__class__", "__traceback__", ".loader.exec_module"),
    *(".grad", "optimizer.step", "optimizer.zero_grad", "layer.sparse", "ctx.param", ".bit_generator.state"),
    "Queue._on_queue_feeder_error",
    *("optimizer.state_dict", "optimizer.load_state_dict", "optimizer.state", "optimizer.param_groups", "view.data"),
    *("ray.get_actor", "actor_class._remote", "sys.excepthook"),
)

# Classes that share their name with another of their package, and why.
SAME_NAMES = {
    "Pause": "elastic_ray.events.Pause is what a change takes, elastic_ray.adaptation.Pause asks to pause a job",
    "Report": "elastic_ray.Report is what a loop has reported, elastic_ray.adaptation.Report what a policy reports",
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(package: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


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


@pytest.mark.parametrize("package", PACKAGES)
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


@pytest.mark.parametrize("package", PACKAGES)
def test_class_names_are_unique(package: str) -> None:
    places: dict[str, list[str]] = {}
    for path in modules(package):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert not {name: at for name, at in places.items() if len(at) > 1 and name not in SAME_NAMES}


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short(package: str) -> None:
    long = [
        f"{path}: {node.name}"
        for path in modules(package)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, _Function)
        for body in [node.body[1:] if ast.get_docstring(node) else node.body]
        if body and (node.end_lineno or 0) - body[0].lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert not long


@pytest.mark.parametrize("package", PACKAGES)
def test_longer_private_functions_say_what_they_return(package: str) -> None:
    """Shorter ones are read as fast as a text about them."""
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path in modules(package)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, _Function) and node.name.startswith("_") and not node.name.startswith("__")
        if (node.end_lineno or 0) - node.lineno + 1 > MOST_UNDOCUMENTED_LINES and not ast.get_docstring(node)
    ]
    assert not silent


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_writes_into_another_object(package: str) -> None:
    found = [
        f"{path}:{each.lineno} {ast.unparse(each)}"
        for path in modules(package)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, _Function)
        for each in written(node)
    ]
    assert not sorted(set(found))


def imported(path: Path) -> Iterator[Path]:
    """Folders of this tree that a module imports from when it is loaded, its own left out."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    typing = [each for each in nodes if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test)]
    unloaded = {id(each) for node in typing for each in ast.walk(node)}
    for node in nodes:
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
