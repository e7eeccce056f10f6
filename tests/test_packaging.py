"""The wheel: what is in it, that an installed copy is whole, and that nothing heavy comes along."""

import email
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

from pallas_kernels.paged_attention import cpu
from pallas_kernels.quantized_matmul import cpu as cpu_matmul

ROOT = Path(__file__).parent.parent
PACKAGES = {"jaxserve", "pallas_kernels", "models", "server"}
HEAVY = {"torch", "torchvision", "tensorflow", "transformers", "vllm", "triton"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def requirement_name(requirement: str) -> str:
    """`"jax[cuda12]>=0.10; extra == 'x'"` -> `"jax"`, normalised as PEP 503 says."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    (dist_info,) = (name for name in top if name.endswith(".dist-info"))
    assert top - {dist_info} == PACKAGES
    packed = {name for name in names if name.endswith(".py")}
    assert packed == {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert any(name.endswith("LICENSE") for name in names)
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "server/dashboard/static").iterdir()}
    assert "server/dashboard/static/index.html" in page
    assert page <= set(names)
    sources = (*cpu.SOURCES, *cpu_matmul.SOURCES)
    assert {str(source.relative_to(ROOT)) for source in sources} <= set(names)


def test_an_unpacked_wheel_imports_all_four_from_one_place(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "\n".join(
        [
            "import importlib",
            f"for name in {sorted(PACKAGES)!r}:",
            "    print(importlib.import_module(name).__file__)",
            "from server.cli.main import main",
            "assert callable(main)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {Path(line).parent.parent.resolve() for line in done.stdout.split()} == {tmp_path.resolve()}


def test_the_console_script_is_the_servers(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "jaxserve = server.__main__:main" in archive.read(name).decode()


def runtime_requirements(wheel: Path) -> list[str]:
    return [line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]


def test_tools_of_development_are_no_runtime_dependencies(wheel: Path) -> None:
    needed = {requirement_name(line) for line in runtime_requirements(wheel)}
    development = {
        requirement_name(line)
        for line in metadata(wheel).get_all("Requires-Dist", [])
        if "extra == 'dev'" in line or 'extra == "dev"' in line
    }
    assert {"pytest", "hypothesis", "openai", "mypy", "ruff"} <= development
    assert not needed & development


def test_versions_of_jax_that_return_wrong_sums_or_hang_are_excluded(wheel: Path) -> None:
    for package in ("jax", "jaxlib"):
        (line,) = (line for line in runtime_requirements(wheel) if requirement_name(line) == package)
        for excluded in ("!=0.10.2", "!=0.11.0"):
            assert excluded in line


def test_nothing_that_is_installed_with_it_needs_a_second_framework(wheel: Path) -> None:
    """Walks the declared requirements of everything installed, from the wheel's own."""
    seen: set[str] = set()
    todo = [requirement_name(line) for line in runtime_requirements(wheel)]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += required_by(name)
    assert {"jax", "flax", "numpy", "tokenizers"} <= seen
    assert not seen & HEAVY


def required_by(name: str) -> Iterator[str]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # another platform's
        return
    yield from (requirement_name(line) for line in lines if "extra ==" not in line)
