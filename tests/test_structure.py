"""The rooms of docs/structure.md import each other in one direction only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "octavo"

MAY_IMPORT = {
    "kv": set(),
    "kernels": set(),
    "scheduler": {"kv"},
    "model": {"kernels", "kv"},  # the layout of a block, the arena it lies in
    "text": {"model"},  # what a damaged file raises
    "engine": {"kernels", "kv", "model", "scheduler"},
    "api": {"engine", "text"},
    "bench": {"engine", "kernels", "kv", "llm", "model", "scheduler", "text"},
    "llm": {"engine", "model", "text"},
    "cli": {"api", "bench", "engine", "llm", "model", "text"},
    "__init__": {"engine", "llm"},
}


def room_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else file.stem


def imported_rooms(file: Path) -> set[str]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
        elif isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
    return {name.split(".")[1] for name in modules if name.startswith("octavo.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    for file in SOURCE.rglob("*.py"):
        if room_of(file) == room:
            strangers = imported_rooms(file) - MAY_IMPORT[room] - {room}
            assert not strangers, f"{file.relative_to(SOURCE)} imports {strangers}"


def test_every_room_is_named_here() -> None:
    assert {room_of(file) for file in SOURCE.rglob("*.py")} == set(MAY_IMPORT)
