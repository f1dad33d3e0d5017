"""What came from a peer, a file or a socket is never unpickled: where the packages do unpickle, and why they may."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("elastic_ray", "placement", "tuning")

# Everything that comes through Ray's calls is unpickled by Ray before we see it; its own authentication guards that.
ALLOWED = {
    "elastic_ray/worker/train_loop.py": "the user's function and its config, which came through Ray to be run",
    "elastic_ray/job/journal.py": "the same, which the job's controller has put into Ray's control store itself",
    "elastic_ray/errors.py": "the user's exception, which comes through Ray as part of a pickle of Ray's",
    "elastic_ray/sealed.py": "what the user's function returned, in the user's driver; a copy of an exception",
    "elastic_ray/data/arrow.py": "a copy of an object of this process",
    "elastic_ray/driver/trainer.py": "a copy of an object of this process: whether it can be sent at all",
    "elastic_ray/observe/trackers/callbacks.py": "the user's callbacks, which came through Ray to be called",
    "placement/allocator/packed_policy.py": "the user's policy, which came through Ray to be run in the allocator",
    "elastic_ray/integrations/ray_data/packing.py": "the user's datasets and function, which came through Ray, or "
    "which the driver has put into Ray's control store itself, beside the journal",
    "elastic_ray/integrations/ray_data/coordinator.py": "the user's datasets, unpacked from the same, and copies of "
    "objects of this process: each execution takes its own",
    "tuning/nni/searching.py": "the tuner's memory that Tuner.restore() asks for, as it does of every Searcher: Tune "
    "itself unpickles the files beside it",
}
_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "_pickle")
_UNPICKLING = ("loads", "load", "Unpickler", "open")


def unpickles(source: str) -> list[str]:
    """Calls in this code that may run what they read."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Attribute, ast.Name)):
            continue
        text = ast.unparse(node)
        head, _, rest = text.partition(".")
        module, _, name = (names.get(head, head) + ("." + rest if rest else "")).rpartition(".")
        if module.rpartition(".")[2] in _MODULES and name in _UNPICKLING:
            found.append(f"line {node.lineno}: {text}")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        text = ast.unparse(call.func)
        if text in ("torch.load", "torch.package.PackageImporter") and options.get("weights_only") != "True":
            found.append(f"line {call.lineno}: {text} without weights_only=True")
        if options.get("allow_pickle") == "True" or text in ("eval", "exec", "yaml.load", "yaml.unsafe_load"):
            found.append(f"line {call.lineno}: {text}")
    return found


def test_only_what_came_through_ray_to_run_is_unpickled() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): calls
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (calls := unpickles(path.read_text()))
    }
    assert {path: calls for path, calls in found.items() if path not in ALLOWED} == {}
    assert sorted(found) == sorted(ALLOWED), "an exception that is not needed any more"


def test_this_test_sees_what_it_looks_for() -> None:
    for code in (
        "import pickle\npickle.loads(b'')",
        "from pickle import loads as read\nread(b'')",
        "import ray.cloudpickle\nray.cloudpickle.load(f)",
        "import cloudpickle as cp\ncp.loads(b'')",
        "import pickle\nclass Reader(pickle.Unpickler): pass",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ):
        assert unpickles(code), code
    assert not unpickles("import torch, pickle\ntorch.load('x', weights_only=True)\npickle.dumps(1)\nopen('x')")
