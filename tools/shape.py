"""`make lint`: files of at most 500 lines, functions of at most 60, no import circle (imports in
functions counted), and a bound on what a reader of the trainer has to know.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "windlass"
FILE_LINES, FUNCTION_LINES = 500, 60
LONGER = {
    "training/trainer.py:loop": 85,
    "training/rank.py:set_up": 140,
    "training/api.py:train": 70,
}
"""The training loop and the set-up before it stay in one piece each; `train` documents its
arguments.
"""
TRAINER, TRAINER_IMPORTS, TRAINER_DEPTH = "windlass.training.trainer", 68, 12
"""The modules that the trainer imports, directly or not, and the longest chain of these imports."""


def main() -> int:
    """Print what is too long or goes in a circle; the exit code says whether anything does."""
    problems, imports = [], {}
    for path in sorted(ROOT.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        tree = ast.parse(text)
        if (lines := text.count("\n")) > FILE_LINES:
            problems.append(f"{name}: {lines} lines, more than {FILE_LINES}: it holds two things")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines, most = (
                    node.end_lineno - node.lineno + 1,
                    LONGER.get(f"{name}:{node.name}", FUNCTION_LINES),
                )
                if lines > most:
                    problems.append(
                        f"{name}:{node.lineno}: {node.name} has {lines} lines, more than {most}"
                    )
        if path.name != "__init__.py" or len(tree.body) > 1:  # more than the docstring of a room
            imports[module_name(path)] = imported(tree)
    modules = set(imports)
    graph = {
        name: {target for target in targets & modules if target != name}
        for name, targets in imports.items()
    }
    if closed := circles(graph):
        problems += [f"import circle: {' -> '.join(circle)}" for circle in closed]
    else:
        count, deep = len(reached(graph, TRAINER)), depth(graph, TRAINER)
        if count > TRAINER_IMPORTS or deep > TRAINER_DEPTH:
            most = f"at most {TRAINER_IMPORTS}, {TRAINER_DEPTH} deep"
            problems.append(f"{TRAINER} imports {count} modules, {deep} deep; {most}")
    print("\n".join(problems) or f"{len(modules)} modules: lengths and imports are fine")
    return bool(problems)


def module_name(path: Path) -> str:
    """`windlass.room.module` of a file."""
    return ".".join(("windlass", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def imported(tree: ast.Module) -> set[str]:
    """Everything a file imports, also inside functions and for types alone."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names - {"windlass"}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One circle for each group of modules that import each other."""
    found, done = [], set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that a module imports, directly or not."""
    below, left = set(), [start]
    while left:
        new = graph[left.pop()] - below
        below |= new
        left += new
    return below


def depth(graph: dict[str, set[str]], start: str) -> int:
    """The modules of the longest chain of imports from a module; the graph has no circle."""
    longest: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in longest:
            longest[name] = 1 + max(map(measure, graph[name]), default=0)
        return longest[name]

    return measure(start)


if __name__ == "__main__":
    sys.exit(main())
