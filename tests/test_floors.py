"""The architecture, held by parsing imports: they only go down a floor, and the host's own logic runs without jax."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("pallas_kernels", "models", "jaxserve", "server")  # lowest first
SOURCES = sorted(
    path
    for floor in FLOORS
    for path in (ROOT / floor).rglob("*.py")
    if "_pb2" not in path.name  # generated
)

# Modules that run in a unit test or a simulator in microseconds.
WITHOUT_JAX = [
    "jaxserve.request",
    "jaxserve.errors",
    "jaxserve.config",
    "jaxserve.device.buckets",
    "jaxserve.scheduling.page_pool",
    "jaxserve.constraints",
    "jaxserve.scheduling.plan",
    "jaxserve.scheduling.host_tier",
    "jaxserve.scheduling.restore_rule",
    "jaxserve.scheduling.prefix_cache",
    "jaxserve.scheduling.policies",
    "jaxserve.scheduling.reservation",
    "jaxserve.scheduling.scheduler",
    "jaxserve.scheduling.setup",
    "jaxserve.scheduling.page_ledger",
    "jaxserve.scheduling.step_history",
    "jaxserve.scheduling.tree_outline",
    "jaxserve.scheduling.picture",
    "jaxserve.scheduling.admission",
]
# Arrays alone: a kernel knows no model, the host's logic no text.
FORBIDDEN = {
    "jaxserve/scheduling/scheduler.py": ("jax", "jaxserve.text", "numpy"),
    "jaxserve/scheduling/page_pool.py": ("jax", "jaxserve.text", "jaxserve.request", "jaxserve.scheduling.scheduler"),
    "jaxserve/scheduling/prefix_cache.py": (
        "jax",
        "jaxserve.text",
        "jaxserve.request",
        "jaxserve.scheduling.scheduler",
        "jaxserve.scheduling.plan",
    ),
    "jaxserve/scheduling/policies.py": (
        "jax",
        "jaxserve.text",
        "jaxserve.scheduling.page_pool",
        "jaxserve.scheduling.scheduler",
    ),
    "jaxserve/constraints.py": ("jax", "jaxserve.text", "jaxserve.scheduling.scheduler"),
    "jaxserve/engine.py": ("jax", "jaxserve.text"),
    "jaxserve/device/runner.py": ("jaxserve.text", "jaxserve.engine"),
    "jaxserve/device/sampling.py": ("jaxserve.text", "jaxserve.scheduling.scheduler", "jaxserve.engine"),
}


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Every imported module of a file: its dotted name, its line, and whether a function does it."""
    tree = ast.parse(path.read_text(), filename=str(path))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno, id(node) in inside


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_only_go_down_a_floor(path: Path) -> None:
    floor = FLOORS.index(path.relative_to(ROOT).parts[0])
    for module, line, _ in imports(path):
        top = module.partition(".")[0]
        assert top, f"{name_of(path)}:{line} imports relatively; imports are absolute here"
        assert top != "tests", f"{name_of(path)}:{line} imports the tests"
        if top in FLOORS:
            assert FLOORS.index(top) <= floor, f"{name_of(path)}:{line} imports {module}, which lies above it"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_function_imports(path: Path) -> None:
    lines = [line for _, line, in_function in imports(path) if in_function]
    assert not lines, f"{name_of(path)} imports inside functions at lines {lines}"


@pytest.mark.parametrize("name", FORBIDDEN)
def test_owners_of_state_know_only_their_own(name: str) -> None:
    for module, line, _ in imports(ROOT / name):
        for forbidden in FORBIDDEN[name]:
            assert module != forbidden, f"{name}:{line} imports {module}"
            assert not module.startswith(forbidden + "."), f"{name}:{line} imports {module}"


def test_the_hosts_own_logic_never_loads_jax_not_even_through_others() -> None:
    """One process imports them all, in order, and names the first after which jax is there."""
    program = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_JAX!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules, name + ' loads jax'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_stays_readable_in_one_sitting() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: length for name, length in lengths.items() if length > 450}


def test_every_module_opens_with_a_sentence() -> None:
    silent = [name_of(path) for path in SOURCES if path.read_text().strip() and not opening(path)]
    assert not silent


def opening(path: Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text()))
