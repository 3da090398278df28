"""The import rule: folders do not import each other, and some files know nothing of torch."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jobrunner"
FILES = sorted(PACKAGE.rglob("*.py"))
SHARED = {"records", "errors", "config", "user_cache", "cores", "leaving"}
FOLDERS = ("data", "engine", "console", "simulate", "cluster")
# the simulator drives the scheduler
MAY_IMPORT = {"simulate": {"engine"}}
NO_TORCH = (
    *("strategies", "scheduler", "admission", "policies", "blocks", "sequence", "stopping"),
    *("draws", "repetition", "memory", "weights", "plan", "running", "holding", "pace"),
    "watchdog",
)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_folders_import_only_themselves_and_what_is_shared(path):
    folder = path.relative_to(PACKAGE).parts[0]
    if folder not in FOLDERS:
        return
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("jobrunner.")}
    assert ours <= {folder, *SHARED, *MAY_IMPORT.get(folder, ())}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_decisions_and_files_know_nothing_of_torch(path):
    relative = path.relative_to(PACKAGE)
    if relative.parts[0] in ("data", "console", "simulate", "cluster") or relative.stem in NO_TORCH:
        assert "torch" not in {name.split(".")[0] for name in imports(path)}


def test_every_file_says_its_job_in_its_first_line():
    for path in FILES:
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        assert first.endswith("."), path
