"""The start of a machine that has nothing compiled yet, measured on one that has: every cache in a fresh folder.

One GPU: python3 -m tests.bench.cold_start --out FOLDER [--model qwen3-8b] [--starts 2] [--prefill-attention auto]
One prompt through `bench latency`, whose ``startup s`` is from the start of its process to its first token; with more
``--starts`` the second finds what the first has kept, and so on. After each: what FlashInfer's build beside it has
finished, and whether any of its processes is left, which none may be.

Knows: which caches a start reads. Does not know: what a start does. What the driver or the disk keep in memory stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_COMPILERS_END = 2.0  # seconds that compilers have to end after the start that they ran beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--prefill-attention", default="auto")
    args = parser.parse_args()
    ready = _built_into_package()
    if ready:
        parser.error(f"FlashInfer's package holds compiled modules ({ready[0]}): no start is cold with them")
    args.out.mkdir(parents=True, exist_ok=True)
    caches = Path(tempfile.mkdtemp(prefix="cold-", dir=args.out)).resolve()
    # Of Triton, FlashInfer, the driver's own compiler, torch's, and whatever follows the convention.
    environ = os.environ | {
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(caches),
        "CUDA_CACHE_PATH": str(caches / "driver"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "XDG_CACHE_HOME": str(caches / "xdg"),
    }
    command = [sys.executable, "-m", "launch", "bench", "latency", "--model", args.model]
    command += ["--batch-size", "1", "--num-iters", "1", "--num-warmups", "0"]
    command += ["--prefill-attention", args.prefill_attention, "--kernel-cache", str(caches / "lockstride")]
    failed = 0
    for number in range(1, args.starts + 1):
        folder = args.out / "results" / f"start-{number}-{args.prefill_attention}"
        began = time.monotonic()
        code = subprocess.run([*command, "--result-dir", str(folder)], env=environ, check=False).returncode
        print(f"start {number}, {args.prefill_attention}: exit code {code}, {time.monotonic() - began:.1f} s in all")
        time.sleep(_COMPILERS_END)
        left = _running(caches)
        print(f"FlashInfer's build: {_finished(caches)}; processes left: {left or 'none'}", flush=True)
        failed += bool(code) or bool(left)
    return min(failed, 1)


def _built_into_package() -> list[Path]:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.glob("data/aot/batch_prefill*/*.so"))


def _finished(caches: Path) -> str:
    objects, libraries = (sorted(caches.glob(f".cache/flashinfer/**/*{end}")) for end in (".o", ".so"))
    return f"{len(objects)} objects, {len(libraries)} libraries"


def _running(caches: Path) -> list[str]:
    """Command lines that name the folder: compilers are given their files in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if str(caches) in words:
            found.append(f"{entry.name}: {words[:100]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
