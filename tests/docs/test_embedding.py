"""The examples of docs/embedding.md run as they stand, on the demo model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.torchrun import torchrun

ROOT = Path(__file__).resolve().parents[2]
GCD = "def gcd(a, b):"


def examples() -> dict[str, str]:
    """The Python blocks by the heading above them."""
    found: dict[str, str] = {}
    for section in (ROOT / "docs/embedding.md").read_text().split("\n## ")[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if blocks:
            (found[section.partition("\n")[0]],) = blocks
    return found


def written(heading: str, folder: Path) -> Path:
    path = folder / "ask.py"
    path.write_text(examples()[heading])
    return path


def test_every_example_is_known_here() -> None:
    assert list(examples()) == ["All prompts at once", "A loop of your own", "Streams", "Several ranks"]


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["All prompts at once", "A loop of your own", "Streams"])
def test_an_example_runs_alone(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(written(heading, tmp_path)), run_name="__main__")
    printed = capfd.readouterr().out
    assert "return" in printed
    if heading in ("All prompts at once", "Streams"):
        assert GCD in printed
        assert "def is_prime(n):" in printed
    if heading == "A loop of your own":
        assert len(re.findall(r"^(gcd|lcm) '", printed, re.MULTILINE)) > 10
        assert set(re.findall(r"^(\w+) ended by (?:stop|length)$", printed, re.MULTILINE)) == {"gcd", "lcm"}


@pytest.mark.multiprocess
def test_the_example_of_several_ranks_runs_on_two(tmp_path: Path) -> None:
    ran = torchrun(2, str(written("Several ranks", tmp_path)))
    assert ran.returncode == 0, ran.errors[-3000:]
    assert "return" in ran.output
