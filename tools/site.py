"""Hooks of mkdocs: what the pages need on the site and not on GitHub.

A link to a file outside docs/ becomes the file's path, because the site does not have that file.
The notebook becomes a page.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

log = get_plugin_logger("site")
ROOT = Path(__file__).parent.parent
NOTEBOOK = "tutorials/notebook.ipynb"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the page of the notebook."""
    cells = json.loads((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    name = posixpath.basename(NOTEBOOK)
    parts.insert(1, f"[The notebook itself]({name}) runs in Jupyter.")
    content = "\n\n".join(parts)
    files.append(File.generated(config, NOTEBOOK.replace(".ipynb", ".md"), content=content + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links that the site can follow."""
    here = posixpath.dirname(page.file.src_uri)

    def outside(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", here, match[2]))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            log.warning(f"{page.file.src_uri}: there is no {path}")
        text = match[1].strip("`")
        return f"`{path}`" if text in path else f"{match[1]} (`{path}`)"

    if page.file.src_uri != NOTEBOOK.replace(".ipynb", ".md"):
        markdown = markdown.replace("notebook.ipynb)", "notebook.md)")
    return LINK.sub(outside, markdown)
