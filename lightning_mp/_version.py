"""The version of the installed package, which the build takes from the tag."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("lightning-mp")
except PackageNotFoundError:  # a tree on the path that was never installed
    __version__ = "0+unknown"
