"""What the documents point at exists: relative links, and paths and tests that they name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|<img src=\"([^\"]+)\"")
NAMED_PATH = re.compile(r"`((?:launch|runtime|models|parallel|tests|docs)/[\w./-]*)`")
NAMED_TEST = re.compile(r"`(test_\w{12,})`")


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, check=True, text=True)
    return [ROOT / path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


def test_links_lead_somewhere() -> None:
    broken = []
    for document in documents():
        for match in LINK.finditer(document.read_text()):
            target = match[1] or match[2]
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []


def test_named_paths_exist() -> None:
    missing = []
    for document in documents():
        for path in NAMED_PATH.findall(document.read_text()):
            if not (ROOT / path).exists():
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert missing == []


def test_named_tests_exist() -> None:
    tests = "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    named = {name for document in documents() for name in NAMED_TEST.findall(document.read_text())}
    assert {name for name in named if f"def {name}(" not in tests} == set()
