"""Hooks of mkdocs.yml: pages and files of the site that are not in docs/.

README.md, CHANGELOG.md and CONTRIBUTING.md are pages, the API page lists the public names, and result files and
examples are part of the site. Links are rewritten for their places there.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
#: Links to files of the repository that are not in the site.
_SOURCE = re.compile(r"\[([^\]]+)\]\((\.\./)?(actckpt|csrc|tests|scripts|benchmarks/(?!results/))[^)]*\)")
_MODULES = ("actckpt", *(f"actckpt.{name}" for name in ("policies", "errors", "planner", "memory", "rng", "te")))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, the result files and the examples."""
    for name, source in _PAGES.items():
        files.append(File.generated(config, name, content=_rewritten((_ROOT / source).read_text(), at_root=True)))
    files.append(File.generated(config, "api.md", content=_api()))
    for path in sorted((_ROOT / "benchmarks" / "results").glob("*.json")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for path in sorted((_ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/."""
    return markdown if page.file.src_uri in _PAGES else _rewritten(markdown, at_root=False)


def _rewritten(text: str, *, at_root: bool) -> str:
    """Return a page with links as they are in the site."""
    up = "" if at_root else r"\.\./"
    text = re.sub(rf"\]\({up}benchmarks/results/", "](results/", text)
    text = re.sub(rf"\]\({up}examples/", "](examples/", text)
    for name, source in _PAGES.items():
        text = re.sub(rf"\]\({up}{re.escape(source)}", f"]({name}", text)
    if at_root:
        text = re.sub(r"\]\(docs/", "](", text)
    return _SOURCE.sub(r"\1", text)


def _api() -> str:
    """Return a page with every public name, under the first module that has it."""
    lines, listed = ["# API", ""], set[str]()
    for module in _MODULES:
        lines += [f"## {module}", ""]
        for name in _public(module):
            if name not in listed:
                lines += [f"::: {module}.{name}", "    options:", "      heading_level: 3", ""]
                listed.add(name)
    return "\n".join(lines)


def _public(module: str) -> list[str]:
    """Return the names in `__all__` of a module, without modules and without names of other packages."""
    folder = _ROOT.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    names: list[str] = []
    others = {"__version__"}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("actckpt"):
            others |= {name.name for name in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return [name for name in names if name not in others and not _is_module(module, name)]


def _is_module(module: str, name: str) -> bool:
    folder = _ROOT.joinpath(*module.split("."), name)
    return folder.is_dir() or folder.with_suffix(".py").is_file()
