"""The tested versions of Tunix. Importing this module raises ImportError for any other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

TESTED_VERSIONS = ">=0.1.7,<0.1.8"


def check_version(found: str) -> None:
    """Raises ImportError for a version of google-tunix outside of the tested range."""
    if found not in SpecifierSet(TESTED_VERSIONS):
        raise ImportError(f"google-tunix: expected a tested version, {TESTED_VERSIONS}; got {found}")


try:
    check_version(version("google-tunix"))
except PackageNotFoundError:
    raise ImportError(f"google-tunix: expected {TESTED_VERSIONS} (pip install 'smd_jax[tunix]'); got none") from None
