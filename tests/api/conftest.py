"""The tests of the Python call compare it with the command."""

from tests.cli.conftest import aespa

__all__ = ["aespa"]
