"""What a command says to its user instead of a traceback.

Knows: the error that every command may raise. Does not know: commands; errors of one part stand beside that part.
"""

from __future__ import annotations


class UsageError(ValueError):
    """The command line asks for something that cannot be."""
