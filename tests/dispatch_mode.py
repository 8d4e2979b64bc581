"""TorchDispatchMode with annotations: what sees every operation of torch while it is entered.

Knows: that torch's own class has none of its methods annotated. Does not know: what a mode does with an operation.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's, see above
    """To be derived from in its place; ``__torch_dispatch__`` calls ``func``, an operation, or raises."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, see above

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]  # torch's, see above

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and what hides a mode from the compiler imports it, for three seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError
