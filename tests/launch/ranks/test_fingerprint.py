"""Ranks with other drafters or other draft vocabularies are told apart before they guess differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.ranks.fingerprint import weights_digest
from runtime.config import EngineConfig


def test_ranks_with_other_weights_or_another_cache_are_told_apart() -> None:
    """Scales are in the checkpoint's files, which ``weights_digest`` compares as it does weights."""
    options: list[dict[str, Any]] = [
        {},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"fp8_activations": "never"},
    ]
    made = [EngineConfig(model="m", device="cpu", **one) for one in options]
    assert len({one.describe() for one in made}) == 4


def test_a_drafters_folder_and_its_ids_count(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2]", encoding="utf-8")

    def digest(**keys: Any) -> str:
        speculative = {"method": "mtp", "num_speculative_tokens": 2, **keys} if keys else None
        return weights_digest(
            EngineConfig(model=str(tmp_path / "target"), device="cpu", speculative_config=speculative)
        )

    drafter = {"model": str(tmp_path / "drafter")}
    before = [digest(), digest(**drafter), digest(**drafter, token_map=str(ids))]
    assert len(set(before)) == 3
    ids.write_text("[1, 3]", encoding="utf-8")
    assert [digest(), digest(**drafter), digest(**drafter, token_map=str(ids))][:2] == before[:2]
    assert digest(**drafter, token_map=str(ids)) != before[2]
    (tmp_path / "drafter" / "config.json").write_text("{ }", encoding="utf-8")
    assert digest(**drafter) != before[1]
