"""Row counts that steps are padded to: the ladder of decode rows, the ladder of total tokens, and where a product lies.

Knows: both ladders, and which bucket keys a product of any number of rows. Does not know: which steps are captured
(runtime/execute), or which kernel a bucket gets (models/kernels/matmul/choice_table.py). Imports nothing: the
command line reads it before torch is there.
"""

from __future__ import annotations

# Steps of more tokens keep their activations small, by slices and in place: at 8192 tokens of an 8B model the widest
# would take 600 MiB of every start's memory. 2048 rows are enough for a product to run at full speed.
LARGE_STEP = 2048


def decode_ladder(most: int) -> tuple[int, ...]:
    """Rows of decode steps: 1, 2, 4, 8, then every 8 to 64, every 16 to 128, every 32 beyond; ``most`` is last."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most, 32)]
    return (*(rows for rows in ladder if rows < most), most)


def token_ladder(most: int) -> tuple[int, ...]:
    """Tokens of steps with prompts: 32, 64, then four to each doubling up to 1024, eight beyond; ``most`` is last."""
    ladder = [32, 64]
    while ladder[-1] < most:
        below = 1 << (ladder[-1].bit_length() - 1)
        ladder.append(ladder[-1] + below // (4 if below < 1024 else 8))
    return (*(tokens for tokens in ladder if tokens < most), most)


def every_bucket(most_rows: int, most_tokens: int) -> tuple[int, ...]:
    """Both ladders together, ascending: every row count that a product of a captured step may have."""
    return tuple(sorted({*decode_ladder(most_rows), *token_ladder(most_tokens)}))


def product_bucket(rows: int) -> int:
    """The row count by which the kernel of a product is chosen: ``rows`` where either ladder has it, else the next one.

    The ladder of decode rows has every rung of the other one, so it alone decides.
    """
    step = 8 if rows <= 64 else 16 if rows <= 128 else 32
    return 1 << max(0, rows - 1).bit_length() if rows <= 8 else -(-rows // step) * step


def power_of_two_from(number: int) -> int:
    """The least power of two that is at least ``number``, itself at least 1."""
    return 1 << max(0, number - 1).bit_length()
