"""Steps of a matrix product that fit a GPU's shared memory.

Knows: what Triton's pipeline keeps there on GPUs without wgmma. Does not know: which tiles are fast, or any kernel.
"""

from __future__ import annotations

_FEWEST_STAGES, _FEWEST_COLUMNS = 3, 32


def fitting_steps(columns: int, stages: int, *, rows: int, element_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """(columns of a step, pipeline stages) of a product whose two tiles have ``rows`` rows together: those given, or
    fewer if they would not fit ``shared_bytes``. Stages go first, down to 3, then columns, by halves down to 32.

    Neither changes the order of a sum: one accumulator takes the columns in ascending order.
    """

    def fits() -> bool:
        return (stages - 1) * rows * columns * element_bytes <= shared_bytes  # the last stage's step is in registers

    while not fits() and stages > _FEWEST_STAGES:
        stages -= 1
    while not fits() and columns > _FEWEST_COLUMNS:
        columns //= 2
    return columns, stages
