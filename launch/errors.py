"""What a command says to its user instead of a traceback.

Knows: the errors that several parts raise. Does not know: commands; errors of one part stand with that part.
"""

from __future__ import annotations


class UsageError(ValueError):
    """The command line asks for something that cannot be."""


class BenchError(RuntimeError):
    """A run did not do what was to be measured; the text says what happened instead."""
