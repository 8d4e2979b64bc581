"""What torch leaves without annotations, in some of its versions or in all of them, by names that may be called.

Knows: which these are, of those that the tests on GPUs call. Does not know: what they are called for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.spawn import spawn as _spawn

Stream: Any = torch.cuda.Stream
Event: Any = torch.cuda.Event
spawn: Any = _spawn
sleep: Any = torch.cuda._sleep  # on the device, for a number of its cycles
