"""A hook of mkdocs.yml: files outside docs/ are pages of the site, with links that work there as on GitHub.

Examples with prompts are marked as such, so that site.css can leave prompts and output out of what is copied.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SAME = ["LICENSE", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/*.py")))]
ON_THE_SITE = PAGES | {path: path for path in SAME} | {"docs/decisions": "decisions/0000-what-a-decision-page-is.md"}
PROMPT = re.compile(r"^```python\n(?=>>> )", re.MULTILINE)
LINK = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")(?![a-z]+:|#)([^)#"\s]+)""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is outside of docs/."""
    for path, uri in (PAGES | dict.fromkeys(SAME)).items():
        files.append(File.generated(config, uri or path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them."""
    here = _in_the_repository(page.file.src_uri)

    def linked(match: re.Match[str]) -> str:
        asked = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        found = ON_THE_SITE.get(asked, asked.removeprefix("docs/"))
        return match[1] + posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(linked, PROMPT.sub("```pycon\n", markdown))


def _in_the_repository(uri: str) -> str:
    """Where a page of the site comes from."""
    return next((path for path, found in PAGES.items() if found == uri), f"docs/{uri}")
