"""Origin of a train function's exception, which shows whether two workers failed in the same way (pure)."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import errno
import os
import re
import sys
import sysconfig
import traceback
import types
from pathlib import Path

_OURS = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("elastic_ray", "placement", "tuning"))
_RAISES = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DEVICE_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO})
_ERRNO = re.compile(r"\[Errno (\d+)\]")
# CUDA's texts for broken hardware, and torch's for a DataLoader's process that something else has ended.
_NODE_TEXTS = re.compile(
    r"uncorrectable (ECC|NVLink) error|hardware (stack )?error|busy or unavailable|DataLoader worker \(pid"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorOrigin:
    """Type of an exception and the source location where it was raised."""

    kind: str  # module and name of its type
    place: str  # file and line of the innermost frame of the user's code
    refusal: bool = False  # elastic_ray itself raised it, as it does on every rank
    of_node: bool = False  # a disk, a GPU or a killed process of the node is the cause, as far as the exception says


def origin_of(error: BaseException) -> ErrorOrigin:
    """Return the origin of an exception, which must still have its traceback."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if _is_users(frame)]
    kind, places = type(error), own or frames
    of_node = _is_of_node(
        error
    )  # also where it surfaces in our frames, as CUDA's errors do at the next synchronisation
    ours = _is_ours(kind) or (_raised_by_us(error.__traceback__) and not isinstance(error, OSError))
    return ErrorOrigin(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        place=f"{places[-1][0].f_code.co_filename}:{places[-1][1]}" if places else "",
        refusal=ours and not of_node,
        of_node=of_node,
    )


def _is_ours(kind: type[BaseException]) -> bool:
    """True if a class belongs to elastic_ray, judging by its file, because a user's package may have the same name."""
    module = sys.modules.get(kind.__module__)
    return str(getattr(module, "__file__", None) or "").startswith(_OURS)


def _raised_by_us(trace: types.TracebackType | None) -> bool:
    """True if a ``raise`` in elastic_ray raised the error; errors in torch's C++ code have no frame of their own."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] in _RAISES


def _is_users(frame: types.FrameType) -> bool:
    """True unless the frame belongs to elastic_ray, to Python or to an installed library."""
    file = frame.f_code.co_filename
    return not (file.startswith(_OURS) or file.startswith("<") or file.startswith(_LIBRARIES))


def _is_of_node(error: BaseException) -> bool:
    """True if the exception, or one in its chain of causes, names a device or a killed process."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        text = ""
        if isinstance(seen, OSError | RuntimeError):
            with contextlib.suppress(Exception):  # a class of the user's may have a __str__ that raises
                text = str(seen)
        if isinstance(seen, OSError):
            # A DataLoader's process tells the number in the text alone.
            found = _ERRNO.search(text)
            number = seen.errno if seen.errno is not None else int(found[1]) if found is not None else None
            if number in _DEVICE_ERRORS:
                return True
        if _NODE_TEXTS.search(text):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
