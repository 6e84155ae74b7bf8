"""How `make docs` builds the site: the Markdown pages as they are, the interfaces from their docstrings."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

project = "toc"
html_title = "toc"
html_theme = "furo"
html_show_copyright = False
html_sourcelink_suffix = ""  # so that links within the copied sources lead to each other
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.rst", "examples/*/*.md"]
include_patterns += ["benchmarks/*.md", "evidence/*.md", "spec/*.md"]  # other pages lead to these
exclude_patterns = [".*", "build"]
myst_heading_anchors = 4
highlight_language = "none"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "inherited-members": "BaseModel,tuple,str,int"}


def _menu(app: Sphinx, page: str, source: list[str]) -> None:
    """Have README's list of the documentation be the site's menu; pages that it does not name come last."""
    if page != root_doc:
        return
    listed: list[str] = []
    groups: list[tuple[str, list[str]]] = []
    for item in re.split(r"^- ", source[0].partition("\n## Documentation\n")[2], flags=re.MULTILINE)[1:]:
        pages = [name for name in re.findall(r"\]\(([^)#]+)\.(?:md|rst)\)", item) if name not in listed]
        groups.append((item.partition("[")[0].strip(" :"), pages))
        listed += pages
    groups.append(("More", sorted(app.env.found_docs - {*listed, root_doc})))
    for caption, pages in groups:
        names = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"


def _inherited(_app: Sphinx, _kind: str, name: str, member: object, *_more: object) -> bool | None:
    """Leave out what every exception has, and what Python says of a field of a tuple."""
    return hasattr(BaseException, name) or str(member.__doc__).startswith("Alias for field") or None


def _lists(app: Sphinx, failed: Exception | None) -> None:
    """Write llms.txt, the first sentence of each page, and the page that the directory opens with."""
    if failed or app.builder.name != "html":
        return
    lines = [f"# {project}", ""]
    for page in [root_doc, *app.env.toctree_includes[root_doc]]:
        paragraph = next(iter(app.env.get_doctree(page).findall(nodes.paragraph))).astext()
        sentence = re.split(r"(?<=\.)\s", paragraph)[0].replace("\n", " ").rstrip(":")
        path = f"_sources/{page}.md" if app.env.doc2path(page).suffix == ".md" else f"{page}.html"
        lines.append(f"- [{app.env.titles[page].astext()}]({path}): {sentence}")
    Path(app.outdir, "llms.txt").write_text("\n".join([*lines, ""]))
    refresh = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    Path(app.outdir, "index.html").write_text(f"<!doctype html>{refresh}<title>{project}</title>\n")


def setup(app: Sphinx) -> None:
    """Connect what configuration alone cannot say."""
    app.connect("source-read", _menu)
    app.connect("autodoc-skip-member", _inherited)
    app.connect("build-finished", _lists)
