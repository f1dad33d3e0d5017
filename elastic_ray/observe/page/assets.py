"""The files of the page, read once (pure but for reading them)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def read_assets() -> Mapping[str, tuple[bytes, str]]:
    """(content, content type) of every file by its name; there are no others, so that no path leads elsewhere."""
    folder = files("elastic_ray.observe.page") / "assets"
    found = {}
    for each in folder.iterdir():
        kind = _TYPES.get(each.name[each.name.rfind(".") :])
        if kind is not None:
            found[each.name] = each.read_bytes(), kind
    return found
