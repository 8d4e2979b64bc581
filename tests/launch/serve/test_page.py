"""The page at /, as a browser shows and uses it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from tests.launch.serve.rig import Client, ServedFake, listening, served

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
REQUIRED = os.environ.get("LOCKSTRIDE_BROWSER_TESTS") == "required"  # as in CI: a missing browser fails, not skips
# A seed of its own: of the answers that a random one draws, some have no text.
PROBE = """<script>
const ask_page = window.fetch;
window.fetch = (url, options) => ask_page(
  url, options && options.body ? {...options, body: JSON.stringify({...JSON.parse(options.body), seed: 1})} : options);
addEventListener("load", async () => {
  const sleep = ms => new Promise(done => setTimeout(done, ms));
  const until = async condition => { while (!condition()) await sleep(20); };
  await until(() => document.getElementById("model").textContent !== "-");
  const found = {};
  for (const chat of [false, true]) {
    document.getElementById("chat").checked = chat;
    document.getElementById("tokens").value = 5;
    document.getElementById("told").textContent = "";
    document.getElementById("send").click();
    await until(() => document.getElementById("told").textContent);
    found[chat] = [document.getElementById("answer").textContent, document.getElementById("told").textContent];
  }
  for (const id of ["state", "model", "context", "running"]) found[id] = document.getElementById(id).textContent;
  document.body.dataset.probe = JSON.stringify(found);
  await fetch("seen");
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None and not REQUIRED, reason="no browser here; Debian: apt-get install chromium-headless-shell"
)
def test_a_browser_shows_the_model_and_streams_an_answer(tmp_path: Path) -> None:
    assert CHROMIUM is not None, f"none of {BROWSERS} is here: apt-get install chromium-headless-shell"

    async def body(client: Client) -> None:
        client.app._page = client.app._page.replace(b"</html>", PROBE.encode() + b"</html>")
        async with listening(client) as port:
            shown = await asyncio.to_thread(_dump, f"http://127.0.0.1:{port}/", tmp_path)
            probe = re.search(r'data-probe="([^"]*)"', shown)
            assert probe is not None, shown[-2000:]
            found = json.loads(unescape(probe[1]))
            assert found["state"] == "ready"
            assert (found["model"], found["context"]) == ("m", "64 tokens")
            for chat in ("false", "true"):
                text, told = found[chat]
                assert text
                assert re.match(r"[1-5] tokens in ", told), told

    async def run() -> None:
        async with served(ServedFake(pause=0.002)) as client:
            await body(client)

    asyncio.run(run())


def _dump(url: str, folder: Path) -> str:
    """The page after its scripts have run for some seconds of its own clock."""
    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    words += ["--timeout=60000", "--virtual-time-budget=8000", url]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, check=False).stdout
