"""Four hundred mutated checkpoints; the long form is `python -m tests.models.weights_fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.weights_header import header_fault, refuse_repeated_names
from tests.models.weights_fuzz import KINDS, LoadedWrongly, attempt, fuzz
from tests.models.weights_mutations import Mutation, store

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.slow
def test_a_mutated_checkpoint_is_refused_by_name_or_loads_what_it_holds(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, 0, 8 * len(KINDS))
    assert outcomes.total() == 8 * len(KINDS)
    assert outcomes["harmless loaded"] == outcomes["other_values loaded"] == 8
    assert outcomes["cut_in_header refused"] == outcomes["leads_out refused"] == 8


def test_the_fuzzer_bites(tmp_path: Path) -> None:
    """What it expects is compared: a refusal where a load should be, and one that does not name what it should."""
    store(tmp_path, {"a": ENTRY}, bytes(16))
    with pytest.raises(LoadedWrongly, match="it was refused"):
        attempt(Mutation({}, must_load=True), tmp_path)
    with pytest.raises(LoadedWrongly, match="names none"):
        attempt(Mutation(named=("another",)), tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [2**40, 2**40]}, "tensor 'a' of dtype F32 and shape [1099511627776, 1099511627776] does not take"),
        ({"shape": [-2, -2]}, "tensor 'a' has the shape [-2, -2]"),
        ({"data_offsets": [0, 2**50]}, "tensor 'a' has the data_offsets [0, 1125899906842624], but the file has 16"),
        ({"data_offsets": [4, 20]}, "tensor 'a' has the data_offsets [4, 20], but the file has 16"),
        ({"dtype": "X9"}, "tensor 'a' has the dtype 'X9'"),
        ({"shape": [3], "data_offsets": [4, 16]}, "tensor 'a' begins at byte 4, but the data before it ends at 0"),
        ({"shape": [3], "data_offsets": [0, 12]}, "its tensors end at byte 12, but it has 16 bytes of data"),
    ],
)
def test_what_is_wrong_with_a_header(tmp_path: Path, change: dict[str, object], words: str) -> None:
    store(tmp_path, {"a": {**ENTRY, **change}}, bytes(16))
    assert words in str(header_fault(tmp_path / "model.safetensors"))


def test_a_name_that_stands_twice(tmp_path: Path) -> None:
    """safetensors itself takes the last one."""
    entry = b'"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}'
    store(tmp_path, b"{" + entry + b", " + entry + b"}", bytes(16))
    with pytest.raises(ValueError, match="tensor 'a' stands twice"):
        refuse_repeated_names(tmp_path / "model.safetensors")
