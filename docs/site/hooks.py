"""Hooks of mkdocs: an API page per package, with an entry for each public name; the list of decisions."""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

STRATEGIES = ["data", "tensor", "sequence", "pipeline", "expert"]

# Page -> packages, text above the entries.
PAGES = {
    "pycomm": (["pycomm"], "The runtime: a group of ranks, its collectives, its errors."),
    "fused": (["pycomm.fused"], "Matrix products with communication. [What runs](../fused.md)."),
    "parallel": (
        ["pycomm.parallel", *(f"pycomm.parallel.{name}" for name in STRATEGIES)],
        "Parallel strategies. [What each one does](../strategies.md).",
    ),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    decisions = sorted(Path(config.docs_dir, "decisions").glob("*.md"))
    for section in config.nav or ():
        if "Decisions" in section:
            section["Decisions"] = [f"decisions/{path.name}" for path in decisions]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, (packages, text) in PAGES.items():
        content = f"# {packages[0]}\n\n{text}\n\n"
        shown: set[str] = set()
        for package in packages:
            heading = f"\n## {package}\n\n" if package != packages[0] else ""
            content += heading + "\n".join(entries(importlib.import_module(package), shown))
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def entries(package: ModuleType, shown: set[str]) -> Iterator[str]:
    """Markdown of the public names that are not in the set `shown`, which they join. A class or function is
    documented where it is defined.
    """
    for name in sorted(set(package.__all__) - shown):
        thing = getattr(package, name)
        shown.add(name)
        if inspect.ismodule(thing):
            yield f"### {name}\n\n```\n{inspect.getdoc(thing)}\n```\n"
        elif inspect.isclass(thing) or inspect.isfunction(thing):
            yield f"::: {thing.__module__}.{thing.__qualname__}\n"
        elif not name.startswith("__"):
            doc = textwrap.indent(inspect.getdoc(thing) or "", "    ")
            yield f"### {name}\n\n{doc}\n"
