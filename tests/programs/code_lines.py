"""Lines and statements of the code that serves: ``python -m tests.programs.code_lines [FOLDER]``.

Blank lines, comments and docstrings do not count. Offline packages, the load generator, the
compressed KV formats and benchmarks are left out. The number of statements does not depend on how
code is wrapped; an assignment of several values counts once for each. FOLDER is the root of a
source tree, by default the one of this file.
"""

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

_PACKAGES = ("codec", "runtime", "services")
_OFFLINE = {"offline", "sizing", "bench", "quality", "convert", "compress"}
_FORMATS = {"calibration", "fdc", "int4", "k4v2", "kvquant", "lowrank", "palu", "shard", "stream"}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def serves(path: Path) -> bool:
    """Return whether a file is on the path that serves, with the KV format ``dense``.

    Args:
        path: path of a Python file, relative to the root of the source tree.
    """
    if set(path.parts) & _OFFLINE or path.stem.endswith("bench"):
        return False
    return path.parts[:2] != ("runtime", "kv") or not set(path.parts) & _FORMATS


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is the docstring of a module, class, function or constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def count(path: Path) -> tuple[int, int]:
    """Return the numbers of lines of code and of statements of a Python file."""
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    statements = 0
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.stmt):
            continue
        if is_docstring(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            continue
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=values)):
                statements += len(values)
            case _:
                statements += 1
    return len(lines), statements


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    lines: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    for path in (path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        relative = path.relative_to(root)
        if serves(relative):
            package = "/".join(relative.parts[:-1][:2])
            counted = count(path)
            lines[package] += counted[0]
            statements[package] += counted[1]
    sys.stdout.write("  lines  statements\n")
    for package in sorted(lines):
        sys.stdout.write(f"{lines[package]:7,} {statements[package]:11,}  {package}\n")
    sys.stdout.write(f"{lines.total():7,} {statements.total():11,}  total\n")


if __name__ == "__main__":
    main()
