"""What documents point at exists: links, headings, paths and tests; and documents that code names exist, too."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|<img src=\"([^\"]+)\"")
LINK_TO_HEADING = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED_DOCUMENT = re.compile(r"docs/[\w/.-]+\.(?:md|jsonl?)\b")
NAMED_PATH = re.compile(r"`((?:launch|runtime|models|parallel|tests|docs)/[\w./-]*)`")
NAMED_MODULE = re.compile(r"python3? -m ((?:launch|tests)(?:\.\w+)*)")
NAMED_TEST_OF_FILE = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
NAMED_TEST = re.compile(r"`(test_\w{12,})`")


def documents() -> list[Path]:
    """All but docs/lab, a record that names what was there on its day; its index is read."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, check=True, text=True)
    paths = [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]
    return [ROOT / path for path in paths if not path.startswith("docs/lab/") or path == "docs/lab/README.md"]


def test_links_lead_somewhere() -> None:
    broken = []
    for document in documents():
        for match in LINK.finditer(document.read_text()):
            target = match[1] or match[2]
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []


def test_links_to_headings_lead_to_one() -> None:
    broken = []
    for document in documents():
        for target, heading in LINK_TO_HEADING.findall(document.read_text()):
            path = document.parent / target if target else document
            if path.suffix == ".md" and path.exists() and heading not in headings(path.read_text()):
                broken.append(f"{document.relative_to(ROOT)}: {target}#{heading}")
    assert broken == []


def headings(text: str) -> set[str]:
    """As GitHub spells them in links: lower case, spaces as dashes, without punctuation."""
    return {re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-") for title in HEADING.findall(text)}


def test_documents_that_code_names_exist() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "*.py", "Makefile"], cwd=ROOT, capture_output=True, check=True)
    missing = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        named = NAMED_DOCUMENT.findall(source.read_text()) if source.is_file() else []
        missing += [f"{name}: {path}" for path in named if not (ROOT / path).exists()]
    assert missing == []


def test_named_paths_exist() -> None:
    missing = []
    for document in documents():
        for path in NAMED_PATH.findall(document.read_text()):
            if not (ROOT / path).exists():
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert missing == []


def test_named_commands_exist() -> None:
    """What follows ``python -m``: a file, or a folder with a __main__.py."""
    missing = []
    for document in documents():
        for module in NAMED_MODULE.findall(document.read_text()):
            path = ROOT / module.replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                missing.append(f"{document.relative_to(ROOT)}: {module}")
    assert missing == []


@pytest.mark.parametrize(("page", "heading"), [("serving", "Limits"), ("reliability", "Promises")])
def test_each_limit_and_each_promise_names_a_test_that_exists(page: str, heading: str) -> None:
    """In every table below the heading: file and function, of tests/launch/serve where no folder is named."""
    below = (ROOT / "docs" / f"{page}.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()[2:]]
    assert len(rows) > 8
    missing = []
    for row in rows:
        named = NAMED_TEST_OF_FILE.findall(row)
        for file, name in named:
            path = ROOT / (file if "/" in file else f"tests/launch/serve/{file}")
            if not path.is_file() or f"def {name}(" not in path.read_text():
                missing.append(f"{file}::{name}")
        if not named:
            missing.append(f"no test: {row}")
    assert missing == []


def test_named_tests_exist() -> None:
    tests = "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    named = {name for document in documents() for name in NAMED_TEST.findall(document.read_text())}
    assert {name for name in named if f"def {name}(" not in tests} == set()
