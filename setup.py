"""Keeps noxfile.py and this file out of the package, whose folder is the root; everything else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py

OUTSIDE = (("shardzoo", "noxfile"), ("shardzoo", "setup"))


class BuildPackage(build_py):
    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if entry[:2] not in OUTSIDE]


setup(cmdclass={"build_py": BuildPackage})
