"""What public functions accept, as their annotations say it, which beartype holds callers to."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def checked_functions():
    """The functions whose arguments are checked in every program, not in tests alone."""
    for folder in ("zoo", "kernels", "checkpoints", "convert"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and any("beartype" in ast.unparse(d) for d in node.decorator_list):
                    yield file, node


def names(annotation):
    return {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)}


def test_numbers_may_be_whole():
    """A caller writes `temperature=1`; beartype takes no int for a float."""
    found = list(checked_functions())
    assert len(found) > 20
    for file, function in found:
        for argument in (*function.args.args, *function.args.kwonlyargs):
            used = names(argument.annotation) if argument.annotation else set()
            assert "float" not in used or "int" in used, f"{file.name}: {function.name}: {argument.arg}"
