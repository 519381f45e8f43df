"""Packages of the wheel, which are the top folders of the checkout, and the compiled library of native operators.

SPACEPORT_BUILD_FOR names another system of `TARGETS` in kernels/build.py to build a wheel for, or is `any`: a wheel
without a library, which runs everywhere.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from setuptools import Command, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import SetupError

PARTS = ("exporter", "graphs", "kernels", "runtime", "serving", "tools", "training", "verify")
PACKAGE = Path("spaceport", "kernels")


def _load() -> ModuleType:
    """kernels/build.py, whose package is not installed yet."""
    spec = importlib.util.spec_from_file_location("spaceport_kernels_build", Path(__file__).parent / "kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KERNELS = _load()
SYSTEM = os.environ.get("SPACEPORT_BUILD_FOR", "")
if SYSTEM not in ("", "any", *KERNELS.TARGETS):
    raise SetupError(f"SPACEPORT_BUILD_FOR is {SYSTEM}, expected any or one of {', '.join(KERNELS.TARGETS)}")
TARGET = KERNELS.TARGETS.get(SYSTEM)


class BuildKernels(Command):
    """Compiles the library beside its sources, where an editable installation uses it, and adds it to the package."""

    user_options: ClassVar[list[Any]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        name = KERNELS.library_name(TARGET and TARGET.system)
        folder = KERNELS.SOURCES if TARGET is None else Path(__file__).parent / "build" / "kernels" / SYSTEM
        compiled = SYSTEM != "any" and KERNELS.build_if_possible(folder / name, TARGET)
        if self.editable_mode:
            return
        package = Path(str(self.build_lib), PACKAGE)
        for earlier in package.glob("spaceport_kernels.*"):  # perhaps for another system
            earlier.unlink()
        if compiled:
            package.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, package / name)

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in names them

    def get_outputs(self) -> list[str]:
        name = KERNELS.library_name(TARGET and TARGET.system)
        return [str(Path(str(self.build_lib), PACKAGE, name))]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.editable_mode:
            return {}
        (output,) = self.get_outputs()
        source = Path("kernels", Path(output).name)
        return {output: str(source)} if source.is_file() else {}


class Build(build):
    sub_commands: ClassVar[list[Any]] = [*build.sub_commands, ("build_kernels", None)]


class Wheel(bdist_wheel):
    """A wheel with a library runs on one system, with every version of Python: the library does not use Python."""

    def _has_library(self) -> bool:
        return any(Path(self.bdist_dir, PACKAGE).glob("spaceport_kernels.*"))

    def get_tag(self) -> tuple[str, str, str]:
        if not self._has_library():
            return super().get_tag()
        platform = TARGET.wheel_tag if TARGET is not None else self.plat_name.replace("-", "_").replace(".", "_")
        return "py3", "none", platform

    def write_wheelfile(self, *arguments: Any, **options: Any) -> None:
        self.root_is_pure = not self._has_library()
        super().write_wheelfile(*arguments, **options)


setup(
    packages=["spaceport", *(f"spaceport.{part}" for part in find_packages(include=[f"{part}*" for part in PARTS]))],
    package_dir={"spaceport": "src/spaceport", **{f"spaceport.{part}": part for part in PARTS}},
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": Wheel},
)
