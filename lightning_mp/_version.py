"""The version of the installed package, which the build derives from the git tag."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("lightning-mp")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
