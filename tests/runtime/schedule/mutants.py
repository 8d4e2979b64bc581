"""Plants a mutant of the scheduler: replaces one of its functions until the test ends.

Knows: functions of a module, methods and properties of a class. Does not know: what they do.

A mutant is called with the function that it replaces, then with that one's arguments (the object first for a method).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import pytest

Mutant = Callable[..., Any]


def plant(monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, name: str, mutant: Mutant) -> None:
    usual = getattr(owner, name)
    function: Mutant = usual.fget if isinstance(usual, property) else usual  # type: ignore[assignment]

    @wraps(function)
    def wrong(*given: Any, **named: Any) -> Any:
        return mutant(function, *given, **named)

    monkeypatch.setattr(owner, name, property(wrong) if isinstance(usual, property) else wrong)
