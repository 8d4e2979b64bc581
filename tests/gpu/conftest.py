"""For all tests on GPUs: how many threads the CPU's side of a comparison takes; Triton's interpreter is the quick one.

Other tests have one (tests/conftest.py). As many as the host has cores are too many for a container with a share of
them and several workers: a reference of a few hundred small operations takes minutes.
"""

from __future__ import annotations

import os

import torch

torch.set_num_threads(2)
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.models.kernels import quick_interpreter  # noqa: F401  it need only be there

    torch.set_num_threads(1)
