"""Hooks of mkdocs: a page's link to a file or folder of the repository leads to a page that shows it.

In the repository ``[wrapper](../elastic_ray/parallel/wrapper.py)`` is an ordinary relative link. The site holds docs/
alone, so each linked file becomes the page ``source/<its path>.md``, and strict mode checks the link.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"\]\(\.\./([^)#\s]+)(?:#L\d+)?\)")  # a line of it is for the repository alone
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".md": "markdown"}
FENCE = "``````"  # longer than any fence within a file
# The search finds pages that explain. Listings have each word, and would come first.
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(<code>)~?")  # of docstrings, as Markdown leaves them


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file and folder that some page links to."""
    linked = {path.rstrip("/") for page in DOCS.glob("*.md") for path in LINK.findall(page.read_text())}
    for path in sorted(linked):
        if not (ROOT / path).exists():
            raise PluginError(f"a page of docs/ links to {path}, which is not in the repository")
        text = folder(path, linked) if (ROOT / path).is_dir() else source(path)
        files.append(File.generated(config, page_of(path), content=UNSEARCHED + text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page of docs/ to the pages made above."""
    if "/" in page.file.src_uri:
        return markdown
    return LINK.sub(lambda link: f"]({page_of(link[1].rstrip('/'))})", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show names in docstrings as code, without the role that Sphinx would read."""
    return ROLE.sub(r"\1", html)


def page_of(path: str) -> str:
    """Where the site shows a file or folder of the repository."""
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def source(path: str) -> str:
    """A file as a page."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n{FENCE}{language}\n{(ROOT / path).read_text()}\n{FENCE}\n"


def folder(path: str, linked: set[str]) -> str:
    """A folder as a page: what each module is for, in the first line of its docstring."""
    lines = [f"# {path}", ""]
    for module in sorted((ROOT / path).glob("*.py")):
        told = (ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n")[0]
        inside = module.relative_to(ROOT).as_posix()
        name = f"[`{module.name}`]({module.name}.md)" if inside in linked else f"`{module.name}`"
        lines.append(f"- {name}: {told}" if told else f"- {name}")
    return "\n".join(lines) + "\n"
