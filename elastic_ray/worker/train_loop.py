"""Checks and pickling of the user's train function before it is sent to the workers."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import os
import pickle
import socket
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray.cloudpickle
from ray.util import inspect_serializability

from elastic_ray.adaptation.policy import Policy, name_of
from elastic_ray.run.current import session_of_thread
from elastic_ray.worker.in_ray_train import in_ray_train

_MAIN = "__main__"
_MAKERS = ("_make_skeleton_class", "_make_skeleton_enum", "_make_function")  # cloudpickle's
_given: set[str] = set()


def load(packed: bytes) -> Any:
    """Unpickle a train function; its script's classes and functions are added to this process's ``__main__``.

    Names that already exist in ``__main__`` are not replaced.
    """
    unpickler = _Unpickler(io.BytesIO(packed))
    loaded = unpickler.load()
    main = sys.modules[_MAIN]
    for each in unpickler.made:
        name = getattr(each, "__qualname__", "")
        of_the_script = getattr(each, "__module__", None) == _MAIN and name.isidentifier()
        if of_the_script and (name in _given or not hasattr(main, name)):
            _given.add(name)
            setattr(main, name, each)
    return loaded


class _Unpickler(pickle.Unpickler):
    """Unpickler that records the classes and functions that cloudpickle recreates."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """Find a class as ``pickle`` does, and wrap cloudpickle's constructors to record their results."""
        found = super().find_class(module, name)
        return self._noting(found) if name in _MAKERS and "cloudpickle" in module else found

    def _noting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            self.made.append(make(*args, **kwargs))
            return self.made[-1]

        return made


logger = logging.getLogger(__name__)

_LARGE_BYTES = 50_000_000
_KINDS = inspect.Parameter
_POSITIONAL = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD, _KINDS.VAR_POSITIONAL)
_VARIADIC = (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)
_RUNS_NOTHING = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_MAIN_THREAD = "signal only works in main thread"  # Python's words
_OTHER_THREAD = (
    "a train function runs in another thread of its worker, as in Ray Train. Leave the handler out: a job saves itself "
    "before it is stopped or preempted, and a node's workers leave it when it drains (docs/checkpoints.md). A script "
    "that also runs without a trainer may ask threading.current_thread() is threading.main_thread()"
)


def pack(train_loop: Callable[..., Any], config: Mapping[str, Any] | None, policies: Sequence[Policy] = ()) -> bytes:
    """Pickle ``(train_loop, config)`` by value; the config is None if the function accepts no argument.

    Args:
        policies: Adaptation policies that the run consults between steps, before the policies of its models.

    Raises TypeError if the function requires more than one argument or cannot be pickled; the message names the
    captured objects. Raises ValueError if a config is given that the function does not accept.
    """
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"train_loop_config must be a dict or None, but got {config!r}")
    takes_config = _accepts_config(train_loop, bool(config))
    if config and not takes_config:
        raise ValueError(
            f"train_loop_config has {sorted(map(str, config))}, but {_name(train_loop)} takes no argument; "
            "give it one parameter for the config, or leave train_loop_config out"
        )
    passed = dict(config or {}) if takes_config else None
    for policy in policies:
        if (why := _pickling_error(policy)) is not None:
            raise TypeError(f"policy {name_of(policy)} of adaptation cannot be sent to the workers: {why}")
    called = AdaptedTrainLoop(train_loop, policies) if policies else train_loop
    try:
        file = io.BytesIO()
        _ByValue(file).dump((called, passed))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise TypeError(_unpicklable(train_loop, passed, error)) from error
    if file.tell() > _LARGE_BYTES:
        logger.warning("%s", _large(train_loop, passed, file.tell()))
    return file.getvalue()


class _ByValue(ray.cloudpickle.CloudPickler):
    """Pickler that stores a script's definitions by value, and modules by name, whatever their class.

    cloudpickle includes each submodule whose name appears in the code. For code that uses ``torch`` and any attribute
    ``classes``, that is ``torch.classes``, a module object of a custom class that cannot be pickled.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object; see ``pickle.Pickler``."""
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            name = next((name for name, each in sys.modules.items() if each is obj), "")
            if name:
                return importlib.import_module, (name,)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


class AdaptedTrainLoop:
    """Train function whose run consults adaptation policies between steps."""

    def __init__(self, train_loop: Callable[..., Any], policies: Sequence[Policy]) -> None:
        self._train_loop = train_loop
        self._policies = tuple(policies)

    def __call__(self, *config: Any) -> Any:
        session = session_of_thread()
        assert session is not None, "a worker makes one before it calls the function"
        session.add_policies(self._policies)
        return self._train_loop(*config)


class PickledTrainLoop:
    """Train function and its config, unpickled only when called, so that other processes need not import them."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __call__(self, config: Mapping[str, Any]) -> Any:
        train_loop, own = load(self._packed)
        return train_loop() if own is None else train_loop({**own, **config})


def with_config(packed: bytes, config: Mapping[str, Any]) -> bytes:
    """Return a packed train function whose config is updated with ``config``, which overrides equal keys.

    Raises TypeError if a value cannot be pickled; the message names the value.
    """
    try:
        return bytes(ray.cloudpickle.dumps((PickledTrainLoop(packed), dict(config))))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise TypeError(_unpicklable(PickledTrainLoop(packed), config, error)) from error


def with_policies(packed: bytes, policies: Sequence[Policy]) -> bytes:
    """Return a packed train function whose run consults ``policies`` before the policies of its models."""
    loop = AdaptedTrainLoop(PickledTrainLoop(packed), policies)
    return bytes(ray.cloudpickle.dumps((loop, {})))  # type: ignore[no-untyped-call]


def call(packed: bytes) -> Any:
    """Run a packed train function in a worker, with the functions of ``ray.train`` redirected to elastic_ray.

    The working directory is restored afterwards, so that relative paths still work for the next run in this process.
    """
    folder = os.open(".", os.O_RDONLY)
    try:
        with in_ray_train():
            train_loop, config = load(packed)
            return train_loop() if config is None else train_loop(config)
    except ModuleNotFoundError as error:
        raise _with_place(error).with_traceback(error.__traceback__) from None
    except ValueError as error:
        if not str(error).startswith(_MAIN_THREAD):
            raise
        raise ValueError(f"{error}: {_OTHER_THREAD}").with_traceback(error.__traceback__) from None
    finally:
        os.fchdir(folder)
        os.close(folder)


def _with_place(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error, adding which node and Python lack the package, and how to install it.

    An error about a package that is installed is returned unchanged.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in sys.modules or importlib.util.find_spec(package) is not None:
        return error
    return ModuleNotFoundError(
        f"{error.msg}: {sys.executable} on node {socket.gethostname()} has no {package}. Install it there, or send it "
        f'with RunConfig(worker_runtime_env={{"pip": ["{package}"]}}), a module of your own with {{"py_modules": [its '
        "folder]} or elastic-ray submit --working-dir",
        name=error.name,
        path=error.path,
    )


def _accepts_config(train_loop: Any, has_config: bool) -> bool:
    """True if the function accepts the config; raise TypeError if it cannot be called with or without one."""
    if not callable(train_loop):
        raise TypeError(f"train_loop_per_worker must be a function, but got {train_loop!r}")
    body = getattr(train_loop, "func", train_loop)  # of a functools.partial
    body = body if inspect.isroutine(body) else type(body).__call__
    if any(is_such(body) for is_such in _RUNS_NOTHING):
        raise TypeError(
            f"train_loop_per_worker must be a plain function, but {_name(train_loop)} is a coroutine or "
            "generator, and calling it would run nothing; remove async and yield"
        )
    try:
        parameters = inspect.signature(train_loop).parameters.values()
    except (TypeError, ValueError):  # written in C: no signature to read
        return has_config
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise TypeError(
            "train_loop_per_worker must be callable with no argument or one (the config), but "
            f"{_name(train_loop)} requires {', '.join(p.name for p in required)}; pass everything in "
            "train_loop_config"
        )
    return any(p.kind in _POSITIONAL for p in parameters)


def _name(train_loop: Any) -> str:
    name = getattr(train_loop, "__name__", None)
    return f"{name}()" if name else repr(train_loop)


def _large(train_loop: Callable[..., Any], config: Mapping[str, Any] | None, size: int) -> str:
    """Return a warning that names the largest object a train function carries, and says how to avoid it."""
    captured = {repr(name): value for name, value in _captured(train_loop)}
    values = {**captured, **{f"train_loop_config[{name!r}]": value for name, value in (config or {}).items()}}
    largest = max(values, key=lambda name: _room(values[name]), default="its code")
    return (
        f"{_name(train_loop)} takes {size / 1e6:.0f} MB along, most of it {largest}: the head node keeps it in memory "
        "while the job lives, and each worker that starts fetches it. Load it inside the function, from a path in "
        "train_loop_config"
    )


def _captured(train_loop: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(TypeError):  # no function of Python's
        variables = inspect.getclosurevars(train_loop)
        yield from variables.nonlocals.items()
        yield from variables.globals.items()


def _room(value: Any) -> int:
    """Return the approximate size of a value [bytes]; for a list, tuple or mapping, the total size of its contents."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_room, value))
    return int(getattr(value, "nbytes", 0) or sys.getsizeof(value))


def _unpicklable(train_loop: Any, config: Mapping[str, Any] | None, error: Exception) -> str:
    """Return an error message that names the objects that cannot be pickled."""
    for key, value in (config or {}).items():
        if (why := _pickling_error(value)) is not None:
            return (
                f"train_loop_config[{key!r}], a {_type(value)}, cannot be sent to the workers ({why}); pass "
                "what it is made from and create it inside the function"
            )
    name = _name(train_loop)
    culprits: list[str] = []
    with contextlib.suppress(Exception):  # Ray's search for the culprit is a courtesy
        _, failures = inspect_serializability(train_loop, name=name, print_file=io.StringIO())
        culprits = sorted({f"{failure.path[-1]!r} (a {_type(failure.obj)})" for failure in failures})
    if not culprits:
        return f"{name} cannot be sent to the workers: {error}"
    return (
        f"{name} cannot be sent to the workers: it captures {', '.join(culprits)}, which cannot be pickled "
        f"({error}); create it inside the function instead"
    )


def _pickling_error(value: Any) -> str | None:
    try:
        ray.cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        return str(error)
    return None


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
