"""Hooks of the documentation site: pages from outside of docs/, and links to them.

MkDocs reads docs/ alone.  These hooks add CONTRIBUTING.md as a page, and turn links to other files of the checkout into
plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = {"CONTRIBUTING.md": "contributing.md", "README.md": "README.md"}
"""Files of the checkout that are pages of the site, and the page of each."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add CONTRIBUTING.md to the pages."""
    with open(os.path.join(ROOT, "CONTRIBUTING.md"), encoding="utf-8") as file:
        text = file.read()
    files.append(File.generated(config, PAGES["CONTRIBUTING.md"], content=_moved(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page of docs/ at pages of the site."""
    if page.file.src_uri == PAGES["CONTRIBUTING.md"]:
        return markdown  # its links have been moved already
    return _moved(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def _moved(markdown: str, folder: str) -> str:
    """Return the text of a file in a folder of the checkout, with links as they are on the site."""

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target)) if target else ""
        if not path:
            return link[0]
        if path in PAGES:
            path, anchor = posixpath.join("docs", PAGES[path]), anchor if path != "README.md" else ""
        if os.path.isfile(os.path.join(ROOT, path, "README.md")):
            path = f"{path}/README.md"
        if not path.startswith("docs/") or path.endswith(".py"):
            return text
        here = folder if folder.startswith("docs") else "docs"
        return f"[{text}]({posixpath.relpath(path, here)}{anchor})"

    return LINK.sub(replaced, markdown)
