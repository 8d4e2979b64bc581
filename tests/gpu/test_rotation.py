"""The rotation of a prefill's many tokens against float64 formulas and against the form for few tokens.

Without a GPU, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    interpreted = importlib.import_module(
        "tests.models.kernels.interpreted_kernels"
    )  # mends the interpreter for today's numpy

from models.kernels.attention import rope_decode, rope_prefill  # noqa: E402
from models.kernels.attention.rope_prefill import Blocks  # noqa: E402
from models.kernels.interface import Rotation  # noqa: E402
from models.ops.rows_nvidia import attention  # noqa: E402
from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
PDL = not INTERPRETED
MOST = 40 if INTERPRETED else 1500  # tokens
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PAGE = 16

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    made: Nvidia = interpreted.interpreted_kernels() if INTERPRETED else nvidia_kernels(DEVICE)
    return made


@dataclass(frozen=True)
class Case:
    """What a form is given. Pages hold NaN, the row behind the last token, too."""

    heads: int
    kv_heads: int
    dim: int
    qkv: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    angles: Tensor
    positions: Tensor
    slots: Tensor

    @staticmethod
    def random(
        tokens: int, heads: int, kv_heads: int, dim: int, rotary: int, norm: bool, dtype: torch.dtype, seed: int = 0
    ) -> Case:
        torch.manual_seed(seed)
        width = (heads + 2 * kv_heads) * dim
        qkv = torch.randn(tokens + 1, width).to(DEVICE, dtype)
        qkv[tokens:] = torch.nan
        q_norm, k_norm = torch.randn(2, dim).to(DEVICE, dtype)
        slots = torch.randperm((tokens // PAGE + 3) * PAGE)[:tokens]
        return Case(
            heads,
            kv_heads,
            dim,
            qkv[:tokens],
            (q_norm, k_norm) if norm else (None, None),
            torch.randn(500, rotary).to(DEVICE),
            torch.randint(0, 500, (tokens,)).to(DEVICE),
            slots.to(DEVICE),
        )

    def run(self, form: Any, **how: Blocks) -> tuple[Tensor, Tensor]:
        """(q, the pages as [2, slots, K, D]); whatever was not written is NaN."""
        tokens = len(self.qkv)
        kv = torch.full((2, tokens // PAGE + 3, PAGE, self.kv_heads, self.dim), torch.nan).to(DEVICE, self.qkv.dtype)
        rotation = Rotation(*self.norms, 1e-6, self.angles, self.positions, self.slots)
        return form(self.qkv, self.heads, kv, rotation, PDL, **how), kv.flatten(1, 2)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same in float64 from the definition."""
        tokens, rotary = len(self.qkv), self.angles.shape[1]
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        heads = list(torch.split(self.qkv.double().view(tokens, -1, self.dim), sizes, 1))
        cos, sin = self.angles.double()[self.positions][:, None].chunk(2, -1)
        for kind, norm in enumerate(self.norms):
            x = heads[kind]
            if norm is not None:
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
            first, second, rest = torch.split(x, [rotary // 2, rotary // 2, self.dim - rotary], -1)
            heads[kind] = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
        kv = torch.full((2, (tokens // PAGE + 3) * PAGE, self.kv_heads, self.dim), torch.nan).double().to(DEVICE)
        kv[:, self.slots] = torch.stack(heads[1:])
        return heads[0], kv

    def check(self, found: tuple[Tensor, Tensor]) -> None:
        dtype = self.qkv.dtype
        (q, kv), (q_expected, kv_expected) = found, self.expected()
        assert torch.equal(kv.isnan(), kv_expected.isnan()), "not written, or written where nobody asked"
        assert torch.equal(kv[1].nan_to_num(), kv_expected[1].nan_to_num().to(dtype)), "values are not copies"
        for name, one, other in (("q", q, q_expected), ("k", kv[0].nan_to_num(), kv_expected[0].nan_to_num())):
            if other.numel() == 0:  # keys and values alone
                assert one.shape == other.shape
                continue
            error = float((one.double() - other).norm() / other.norm())
            assert error < TOLERANCE[dtype], f"{name}: relative error {error:.1e}"


def cases(count: int) -> list[tuple[Any, ...]]:
    """Arguments of Case.random, and blocks: head counts from 1 to 64, last programs of every kind."""
    found: list[tuple[Any, ...]] = [
        (1, 1, 1, 128, True, torch.bfloat16, Blocks(8, 2)),
        (MOST, 64, 8, 128, True, torch.bfloat16, Blocks(8, 2)),
        (MOST - 7, 32, 8, 128, True, torch.float16, Blocks(4, 1)),
        (33, 13, 13, 16, False, torch.float32, Blocks(8, 4)),
        (9, 2, 1, 512, True, torch.float32, Blocks(4, 2)),
        (MOST - 3, 0, 8, 128, True, torch.bfloat16, Blocks(2, 4)),
    ]
    pick = random.Random(1)
    while len(found) < count:
        group, kv_heads = pick.choice([1, 2, 3, 4, 5, 7, 8, 16]), pick.choice([1, 2, 3, 4, 8])
        if group * kv_heads <= 64:
            shape = (pick.randint(1, MOST), group * kv_heads, kv_heads, pick.choice([16, 32, 64, 128, 256]))
            blocks = Blocks(pick.choice([1, 2, 4, 8]), pick.choice([1, 2, 4]))
            found.append((*shape, pick.random() < 0.7, pick.choice([*TOLERANCE]), blocks))
    return found


@pytest.mark.parametrize("case", cases(12 if INTERPRETED else 24), ids=str)
def test_rotation_of_many_tokens(case: tuple[Any, ...]) -> None:
    tokens, heads, kv_heads, dim, norm, dtype, blocks = case
    made = Case.random(tokens, heads, kv_heads, dim, dim, norm, dtype)
    made.check(made.run(rope_prefill.rope_and_cache, blocks=blocks))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter adds in numpy's order")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (4, 1, 128), (8, 2, 256)])
def test_both_forms_give_the_same_bits(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Sums are taken in the same order, and products are folded into sums alike."""
    made = Case.random(1111, heads, kv_heads, dim, dim, True, dtype)
    expected = made.run(rope_decode.rope_and_cache)
    for blocks in (rope_prefill.BLOCKS, Blocks(4, 4)):
        for one, other in zip(made.run(rope_prefill.rope_and_cache, blocks=blocks), expected, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("tokens", "dim", "rotary", "many"),
    [(9, 16, 16, True), (8, 16, 16, False), (9, 16, 8, False), (9, 24, 24, False)],
)
def test_the_form_follows_tokens_and_heads(
    kernels: Nvidia, tokens: int, dim: int, rotary: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens, and heads of which a part passes through or that are no power of two, go token by token."""
    taken: list[int] = []

    def chosen(qkv: Tensor, heads: int, kv: Tensor, turn: Rotation, pdl: bool) -> Tensor:
        assert kernels.pdl == pdl
        call = attention._rope_call(qkv, heads, kv, turn)
        rows = kernels.rows_of("rope_and_cache")
        taken.append(next(n for n, row in enumerate(rows) if not row.refuses or row.refuses(kernels, call) is None))
        return kernels.rope_and_cache(qkv, heads, kv, turn)

    monkeypatch.setattr(attention, "_MOST_FEW", 8)
    made = Case.random(tokens, 3, 1, dim, rotary, True, torch.float32)
    made.check(made.run(chosen))
    assert taken == [0 if many else 1]  # for many tokens, and for few


@pytest.mark.parametrize("form", [rope_prefill.rope_and_cache, rope_decode.rope_and_cache])
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (37, torch.bfloat16), (37, torch.float32)])
def test_columns_of_a_wider_tensor_are_rotated_as_if_they_were_alone(
    form: Any, tokens: int, dtype: torch.dtype
) -> None:
    """Keys and values of one layer among those of several, as a drafter's entries are made."""
    made = Case.random(tokens, 0, 8, 128, 128, True, dtype)
    wide = torch.full((tokens, 3 * made.qkv.shape[1]), torch.nan).to(DEVICE, dtype)
    columns = wide.chunk(3, 1)[1]
    columns.copy_(made.qkv)
    assert tokens == 1 or not columns.is_contiguous()
    found = replace(made, qkv=columns).run(form)
    made.check(found)
    for one, other in zip(found, made.run(form), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_no_tokens() -> None:
    made = Case.random(0, 2, 1, 16, 16, True, torch.float32)
    q, kv = made.run(rope_prefill.rope_and_cache)
    assert q.shape == (0, 2, 16)
    assert kv.isnan().all()
