"""The list of modules in docs/architecture.md, made from their docstrings: `python -m tools.modules`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FLOORS = ("cli", "sessions", "serialization", "engine")
HEAD = "## Modules\n"


def render() -> str:
    """The page as it should be: all above the list as it is, then one line a module."""
    above = PAGE.read_text("utf-8").split(HEAD)[0]
    parts = [above + HEAD, "\nMade by `make docs` from the modules themselves.\n"]
    for floor in FLOORS:
        parts += [f"\n### {floor}\n\n", *(_line(path) for path in _modules(floor))]
    return "".join(parts)


def _modules(floor: str) -> list[Path]:
    found = (path for path in (ROOT / floor).rglob("*.py") if path.name != "__init__.py")
    return sorted(found, key=lambda path: (len(path.parts), path))


def _line(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    summary = " ".join(doc.split("\n\n")[0].split())
    return f"- `{path.relative_to(ROOT)}`: {summary.rstrip('.')}\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
