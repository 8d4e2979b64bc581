"""The ladders of steps, and the bucket that keys a product of any number of rows."""

from __future__ import annotations

import pytest

from models.row_buckets import decode_ladder, every_bucket, power_of_two_from, product_bucket, token_ladder
from runtime.config import DEVICE_DEFAULTS
from runtime.execute.launch_spec import MOST_SPLIT_TOKENS


@pytest.mark.parametrize("most", [2048, DEVICE_DEFAULTS["max_prefill_tokens"]["cuda"], 16384])
def test_steps_with_chunks_are_few_graphs(most: int) -> None:
    """Keyed by all their tokens alone, with split keys once more for short ones: by rows as well they were hundreds."""
    buckets = token_ladder(most)
    assert len(buckets) + len([tokens for tokens in buckets if tokens <= MOST_SPLIT_TOKENS]) <= 64


def test_a_product_of_a_bucket_is_keyed_by_its_own_rows() -> None:
    for rows in (*every_bucket(256, 8192), *decode_ladder(1024)):
        assert product_bucket(rows) == rows


def test_any_other_number_of_rows_has_the_next_bucket() -> None:
    ladder = decode_ladder(1 << 14)
    for rows in range(1, 1 << 14):
        assert product_bucket(rows) == next(bucket for bucket in ladder if bucket >= rows)


def test_powers_of_two() -> None:
    assert [power_of_two_from(number) for number in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
