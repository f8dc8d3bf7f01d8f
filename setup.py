"""Build of the C++ extension; everything else about the package stands in pyproject.toml.

Neither torch nor a CUDA toolkit is needed to build: the sources include no header of either.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("ACTCKPT_BUILD_JOBS", default=2).install()

_WARNINGS = ["-Wall", "-Wextra", "-Wpedantic"]

setup(
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
