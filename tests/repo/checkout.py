"""What the tests of the repository ask about the checkout."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files of the repository as they lie here; new ones that git doesn't ignore are among them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(sorted({ROOT / name for name in names if name and (ROOT / name).is_file()}))


def python_files(package: str | None = None) -> list[Path]:
    """Python files of one package, or of all."""
    within = ROOT / package if package else ROOT
    return [path for path in tracked_files() if path.suffix == ".py" and path.is_relative_to(within)]


def imports_of(path: Path) -> Iterator[str]:
    """Full names of what a file imports: at its top, inside functions, for types only, and by `import_module`."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def within(name: str, package: str) -> bool:
    """`ray.serve.llm` lies within `ray` and `ray.serve`, not within `ray.ser`."""
    return name == package or name.startswith(f"{package}.")
