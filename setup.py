"""Build of the C++ extension; everything else about the package stands in pyproject.toml.

Neither torch nor a CUDA toolkit is needed to build: the sources include no header of either.

The sources are compiled as three files that include them: the engine, the binding, and the rest. A compiler takes 7 s
for pybind11's headers alone, and so reads them twice. Names in anonymous namespaces of the rest are therefore unique
over its folders.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile("ACTCKPT_BUILD_JOBS", default=2).install()

_WARNINGS = ["-Wall", "-Wextra", "-Wpedantic"]
_COMPILING = {"bdist_wheel", "editable_wheel", "build_ext", "build", "install", "develop"}
_INSTALL = "apt install g++ | dnf install gcc-c++ | conda install -c conda-forge gxx, or name another in CXX"


def _why_no_compiler() -> str:
    """Return what is missing to compile, empty if nothing is."""
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    probe = "#include <optional>\n#if __cplusplus < 201703L\n#error is older than C++17\n#endif\n"
    command = [*compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(command, input=probe, capture_output=True, text=True)
    except OSError:
        return f"'{compiler[0]}' is not found. Install one: {_INSTALL}"
    if done.returncode != 0:
        return f"'{compiler[0]}' is none: {done.stderr.strip().splitlines()[0]}. Install one: {_INSTALL}"
    return ""


class _BuildMerged(build_ext):
    def build_extension(self, ext: Pybind11Extension) -> None:
        units: dict[str, list[str]] = {"runtime": [], "bind": [], "engine": []}  # what takes longest first
        for source in ext.sources:
            folder = Path(source).parts[1]
            units[folder if folder in units else "runtime"].append(source)
        merged = Path(self.build_temp) / "merged"
        merged.mkdir(parents=True, exist_ok=True)
        ext.sources = []
        for unit, sources in units.items():
            text = "".join(f'#include "{Path(source).resolve()}"\n' for source in sources)
            (merged / f"{unit}.cpp").write_text(text)
            ext.sources.append(str(merged / f"{unit}.cpp"))
        super().build_extension(ext)


if _COMPILING & set(sys.argv):
    why = _why_no_compiler()
    if why:
        raise SystemExit(f"actckpt is built with a C++17 compiler, and {why}")

setup(
    cmdclass={"build_ext": _BuildMerged},
    ext_modules=[
        Pybind11Extension(
            "actckpt._C",
            sorted(glob("csrc/**/*.cpp", recursive=True)),
            depends=sorted(glob("csrc/**/*.h", recursive=True)),
            include_dirs=["csrc"],
            libraries=["dl"],
            cxx_std=17,
            extra_compile_args=["-O2", "-fvisibility=hidden", "-pthread", *_WARNINGS],
        ),
    ],
)
