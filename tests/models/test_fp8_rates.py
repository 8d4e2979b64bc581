"""What FP8 changes in the tokens of the demo model: in bfloat16 no more than bfloat16 itself and the bound together."""

from __future__ import annotations

import pytest
import torch

from tests.models.fp8_rates import SETTINGS, differing, likeliest


@pytest.mark.long
def test_rates_on_a_cpu() -> None:
    """Against float32 that quantises alike; against torch in bfloat16 a GPU's kernels are held (fp8_rates.py)."""
    torch.set_num_threads(1)
    plain = likeliest("cpu", "float32", {})
    alone = differing(likeliest("cpu", "bfloat16", {}), plain)
    for name, (options, most) in SETTINGS.items():
        exact = likeliest("cpu", "float32", options)
        assert differing(likeliest("cpu", "bfloat16", options), exact) <= alone + most, name
        assert 0 < differing(exact, plain) < 6, name
