"""Packages of the wheel: the top folders of the checkout are the sub-packages of spaceport."""

from setuptools import find_packages, setup

PARTS = ("exporter", "graphs", "kernels", "runtime", "serving", "tools")

setup(
    packages=["spaceport", *(f"spaceport.{part}" for part in find_packages(include=[f"{part}*" for part in PARTS]))],
    package_dir={"spaceport": "src/spaceport", **{f"spaceport.{part}": part for part in PARTS}},
)
