"""Build numadist/_core.so: plain C++17 with a C interface, no Python and no torch header.

Everything declarative is in pyproject.toml; this file exists for the two things it cannot say:
how the core is compiled, and that the wheel fits every Python 3 on its platform.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("numadist/csrc")
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
]


class BuildCore(build_ext):
    """Compile without Python's include path and name the result `_core.so` on every Python."""

    def get_ext_filename(self, ext_name: str) -> str:
        return os.path.join(*ext_name.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        self.compiler.set_include_dirs([])
        self.include_dirs = []
        super().build_extension(ext)


class AnyPythonWheel(bdist_wheel):
    """The core is loaded by ctypes, so one wheel serves every Python 3 of the platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "numadist._core",
            sources=sorted(str(p) for p in CSRC.rglob("*.cpp")),
            depends=sorted(str(p) for p in CSRC.rglob("*.h")),
            include_dirs=[str(CSRC)],
            extra_compile_args=CXX_FLAGS,
            extra_link_args=["-Wl,--no-undefined", "-Wl,-z,relro,-z,now"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": AnyPythonWheel},
)
