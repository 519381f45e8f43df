"""Pages: what the built documentation shows: the index as navigation, files from outside docs/, the examples' programs."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# Pages outside docs/ -> their paths in the built documentation.
OUTSIDE = {
    name: f"project/{name.removesuffix('.md').lower()}.md"
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
}
OUTSIDE["README.md"] = "project/overview.md"
ORIGINS = {built: name for name, built in OUTSIDE.items()}

LANGUAGES = {".py": "python", ".sh": "bash"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The index of docs/ is the navigation: a section for each of its headings, a page for each link, once."""
    seen: set[str] = set()
    config.nav = [{"Documentation": "README.md"}]
    for heading, body in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", text_of("README.md"), re.MULTILINE | re.DOTALL):
        pages: list[Any] = []
        for _, _, target, _ in LINK.findall(body):
            if (built := outside_or_here(target)) not in seen:
                seen.add(built)
                pages.append(built)
        config.nav.append({heading.partition(":")[0]: pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages from outside docs/ are pages like the others."""
    for name, built in OUTSIDE.items():
        files.append(File.generated(config, built, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links and pictures lead to the files of the built documentation; an example's page ends with its programs."""
    source = page.file.src_uri
    if source.startswith(("decisions", "project/")):
        page.meta.setdefault("search", {"boost": 0.2})  # below the pages that say how something is done
    home = Path(ORIGINS.get(source, f"docs/{source}")).parent

    def moved(link: re.Match[str]) -> str:
        target = normpath((home / link[3]).as_posix())
        if target in OUTSIDE:
            built = OUTSIDE[target]
        elif target.startswith("docs/") and (ROOT / target).is_file():
            built = target.removeprefix("docs/")
        elif (ROOT / target).exists():  # a source file, which is not part of the pages
            return link[2]
        else:
            return link[0]  # reported by the build
        return f"{link[1]}[{link[2]}]({relpath(built, Path(source).parent.as_posix())}{link[4] or ''})"

    return LINK.sub(moved, markdown) + programs_beside(source)


def programs_beside(source: str) -> str:
    """The programs in the folder of an example's page."""
    if not source.startswith("examples/"):
        return ""
    files = [file for file in sorted((DOCS / source).parent.iterdir()) if file.suffix in LANGUAGES]
    blocks = [f"\n## {file.name}\n\n```{LANGUAGES[file.suffix]}\n{file.read_text('utf-8')}```\n" for file in files]
    return "".join(blocks)


def text_of(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def outside_or_here(target: str) -> str:
    """Path in the built documentation of a page that the index links to."""
    return OUTSIDE[target.removeprefix("../")] if target.startswith("../") else target
