"""Frames that are filled into a form are those that the codec writes."""

from __future__ import annotations

import random

import pytest

from parallel.control.wire.frames import EVERYONE, MAX_PAYLOAD, Codec, FrameTemplate, Kind

CODEC = Codec(0x1234_5678_9ABC_DEF0, 3, 8)


@pytest.mark.parametrize(
    ("kind", "rank", "horizon"), [(Kind.RECORD, EVERYONE, 2), (Kind.ACK, 5, 0), (Kind.MESSAGE, 1, 0)]
)
def test_a_form_writes_what_the_codec_writes(kind: Kind, rank: int, horizon: int) -> None:
    form, rng = FrameTemplate(CODEC, kind, rank, horizon), random.Random(1)
    for bits in range(65):
        step, digest = rng.getrandbits(bits), rng.getrandbits(64)
        payload = b"" if kind is Kind.ACK else rng.randbytes(rng.randrange(200))
        frame = form.fill(step, digest, payload)
        assert frame == CODEC.encode(kind, rank, step, digest, horizon=horizon, payload=payload)
        assert CODEC.decode(frame).step == step


@pytest.mark.parametrize(("step", "digest"), [(-1, 0), (1 << 64, 0), (0, -1), (0, 1 << 64)])
def test_a_number_without_a_place_is_refused(step: int, digest: int) -> None:
    with pytest.raises(ValueError, match=f"RECORD with rank 65535, step {step}, horizon 2, digest {digest} does not"):
        FrameTemplate(CODEC, Kind.RECORD, EVERYONE, 2).fill(step, digest)


def test_a_payload_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=f"RECORD at step 7 has {MAX_PAYLOAD + 1} bytes"):
        FrameTemplate(CODEC, Kind.RECORD, EVERYONE, 2).fill(7, 0, bytes(MAX_PAYLOAD + 1))
