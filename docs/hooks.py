"""What `mkdocs build` does beyond the pages of this folder: the API reference, and files that lie outside of docs/.

The reference has one page per package. Which names a package makes public is read from its `__init__`, in its order;
mkdocstrings reads their docstrings from the sources, without importing them.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "smd_jax"

# Links in Markdown to a file of the repository, for example [text](../smd_jax/message/masks.py).
OUTWARD_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")
# A page that lies outside of docs/, where readers of the repository look for it.
REPORT = "REPORT.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference, and the files that pages link to outside of docs/, under their own paths."""
    files.append(File.generated(config, REPORT, content=report_page()))
    pages = [file for file in files if file.is_documentation_page()]
    for name, text in reference_pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for page in pages:
        for link in OUTWARD_LINK.findall(page.content_string):
            linked = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.src_uri), link))
            # MkDocs looks for the link's target from docs/ on: ../smd_jax/message/masks.py. In the site it lies inside.
            uri = posixpath.relpath(linked, "docs")
            if linked == REPORT:
                continue  # a page of the site
            if uri.startswith("../") and (ROOT / linked).is_file() and files.get_file_from_path(uri) is None:
                # Told to include it: MkDocs leaves out what begins with a dot.
                path = str(ROOT / linked)
                file = File.generated(config, uri, abs_src_path=path, inclusion=InclusionLevel.NOT_IN_NAV)
                file.dest_uri = file.dest_uri.removeprefix("../")
                files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to the report, as pages in the repository have them, lead to its page in the site."""
    inside = posixpath.relpath(REPORT, posixpath.dirname(page.file.src_uri) or ".")
    return re.sub(rf"\]\((?:\.\./)+{re.escape(REPORT)}", f"]({inside}", markdown)


def report_page() -> str:
    """The report with links as they are from docs/."""
    text = (ROOT / REPORT).read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace("](experiments/", "](../experiments/")


def reference_pages() -> dict[str, str]:
    """Name of a page -> its Markdown: one for the main path, one for the flat modules' names, one for each package."""
    packages = sorted(path.parent for path in LIBRARY.glob("*/__init__.py"))
    flat = sorted(path.stem for path in LIBRARY.glob("*.py") if path.stem != "__init__")
    pages = {
        "index": main_path_page(),
        "base": modules_page("Modules that all packages share", "smd_jax", flat),
        "kernels": modules_page("Kernels", "smd_kernels", public_kernels()),
    }
    for package in packages:
        pages[package.name] = package_page(f"smd_jax.{package.name}", public_names(package / "__init__.py"))
    # Other libraries reuse these modules, and other pages link to their functions: all of them are documented.
    pages["message"] = modules_page("message", "smd_jax.message", modules_of("message"))
    return pages


def modules_of(package: str) -> list[str]:
    return sorted(path.stem for path in (LIBRARY / package).glob("*.py") if path.stem != "__init__")


def main_path_page() -> str:
    names = "\n".join(f"* [`smd_jax.{name}`][{target}]" for name, target in public_targets(LIBRARY / "__init__.py"))
    return (
        f"# Reference\n\n::: smd_jax\n    options:\n      members: false\n      show_root_heading: false\n\n{names}\n"
    )


def modules_page(title: str, package: str, modules: list[str]) -> str:
    """Modules one after the other, each with what it defines."""
    blocks = "\n\n".join(f"::: {package}.{module}" for module in modules)
    return f"# {title}\n\n{blocks}\n"


def public_kernels() -> list[str]:
    """The modules of smd_kernels that run everywhere; those for one accelerator are reached through them."""
    return ["reference", "blocks", "segments", "intervals", "xla", "decode", "observed"]


def package_page(package: str, names: list[str]) -> str:
    listed = ", ".join(names)
    options = f"    options:\n      members: [{listed}]\n      show_root_heading: false"
    return f"# {package}\n\n::: {package}\n{options}\n"


def public_names(init: Path) -> list[str]:
    """The names that a package's `__init__` imports, in its order, without packages."""
    return [name for name, _ in public_targets(init)]


def public_targets(init: Path) -> list[tuple[str, str]]:
    """Name and anchor of each name that a package's `__init__` imports.

    The anchor of a class of smd_kernels is in its own package: mkdocstrings gives no anchor to an alias of an alias.
    """
    kernels = {"Segments": "smd_kernels.segments.Segments"}
    package = ".".join(init.parent.relative_to(ROOT).parts)
    return [
        (name, kernels.get(name, f"{package}.{name}"))
        for node in ast.parse(init.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module != "smd_jax"
        for alias in node.names
        for name in [alias.asname or alias.name]
    ]
