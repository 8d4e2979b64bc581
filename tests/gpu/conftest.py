"""For all tests on GPUs: how many threads the CPU's side of a comparison takes.

torch counts the cores of the host. In a container with a share of them, and with several workers, that is so many
threads for so few cores that a reference of a few hundred small operations takes minutes.
"""

from __future__ import annotations

import torch

torch.set_num_threads(min(torch.get_num_threads(), 2))
