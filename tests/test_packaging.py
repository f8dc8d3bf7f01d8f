"""What is built and shipped: no test code, every source, a build that says what it lacks, and the hosted workflow."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import actckpt
from actckpt import _C

_ROOT = Path(__file__).parents[1]


def _setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=_ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_the_extension_holds_no_test_code() -> None:
    content = Path(_C.__file__).read_bytes()
    assert not [name for name in (b"MockCuda", b"FaultyFileIo", b"run_on_mock_cuda") if name in content]


def test_the_source_distribution_holds_what_the_build_reads_and_no_tests(tmp_path: Path) -> None:
    done = _setup("egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "actckpt"):
        sources = [path for path in (_ROOT / folder).rglob("*") if path.suffix in (".cpp", ".h", ".py", ".pyi")]
        assert {str(path.relative_to(_ROOT)) for path in sources} <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "actckpt/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


_OLD = "#!/bin/sh\necho 'g++: error: unrecognized command-line option -std=c++17' >&2\nexit 1\n"


@pytest.mark.parametrize("content", [None, _OLD], ids=["no compiler", "an old compiler"])
def test_the_first_line_of_a_failed_build_says_what_to_install(tmp_path: Path, content: str | None) -> None:
    compiler = tmp_path / "a-compiler"
    if content is not None:
        compiler.write_text(content)
        compiler.chmod(0o755)
    done = _setup("build", "--build-base", str(tmp_path), CXX=str(compiler))
    assert done.returncode != 0
    first = (done.stdout + done.stderr).splitlines()[0]
    assert first.startswith("actckpt is built with a C++17 compiler, and ") and str(compiler) in first
    for command in ("apt install g++", "dnf install gcc-c++", "conda install -c conda-forge gxx"):
        assert command in first


def test_a_clone_that_is_not_built_says_so(tmp_path: Path) -> None:
    """It hides the package that is installed from whoever runs Python in it."""
    shutil.copytree(_ROOT / "actckpt", tmp_path / "actckpt", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    found = subprocess.run(
        [sys.executable, "-c", "import actckpt"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    last = found.stderr.splitlines()[-1]
    assert f"imported from {tmp_path / 'actckpt'}, where its C++ extension is not built" in last
    assert "pip install -e ." in last


def test_the_hosted_workflow_runs_targets_of_the_makefile() -> None:
    jobs = yaml.safe_load((_ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    named: list[str] = []
    for job in jobs.values():
        chosen = " ".join(job["strategy"]["matrix"].get("target", []))
        for step in job["steps"]:
            called = step.get("run", "").replace("${{ matrix.target }}", chosen)
            for arguments in re.findall(r"\bmake ([^\n&|;]*)", called):
                named += [word for word in arguments.split() if "=" not in word]
    targets = re.findall(r"^([\w-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE)
    suites = re.findall(r'Suite\(".*", [\d.]+, \'?"?make ([a-z ]+)', (_ROOT / ".ci/suites.py").read_text())
    assert set(named) <= set(targets)
    assert {word for suite in suites for word in suite.split()} <= set(named)  # all that .ci/run runs


def test_the_changelog_is_that_of_the_version() -> None:
    text = (_ROOT / "CHANGELOG.md").read_text()
    unreleased, released = re.findall(r"^## \[(.*?)\](?: - \d{4}-\d\d-\d\d)?$", text, re.MULTILINE)[:2]
    assert (unreleased, released) == ("Unreleased", actckpt.__version__)
    section = text.partition(f"## [{released}]")[2].partition("\n## [")[0]
    assert len(section.split()) <= 500 and len(section.splitlines()) <= 60
