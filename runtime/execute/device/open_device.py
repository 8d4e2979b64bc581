"""Which device a name means. Knows: both implementations. Does not know: what either does."""

from __future__ import annotations

import torch

from runtime.execute.device.protocol import Device


def open_device(name: str) -> Device:
    """``"cpu"`` gives the twin, ``"cuda"`` or ``"cuda:1"`` that GPU. ValueError for any other kind."""
    wanted = torch.device(name)
    if wanted.type == "cuda":
        from runtime.execute.device.cuda import CudaDevice

        return CudaDevice(wanted)
    if wanted.type == "cpu":
        from runtime.execute.device.cpu_twin import TwinDevice

        return TwinDevice()
    raise ValueError(f"no device layer for {name!r}: use 'cpu' or 'cuda:N'")
