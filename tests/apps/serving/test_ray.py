"""Test two replicas under Ray Serve in a separate process, with the file in examples/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.apps.serving.small import model, tokenizer

ROOT = Path(__file__).parents[3]
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120"}
"""Longer timeouts, because Ray's proxy starts slowly on a shared machine."""
SCRIPT = """
import asyncio, json, sys
import httpx, ray
from ray import serve
from ray.serve._private import api
from examples.ray_serve import app

api.HTTP_PROXY_TIMEOUT = 600  # seconds that it waits for its proxy, which no setting changes
ray.init(num_cpus=2, include_dashboard=False, configure_logging=True, logging_level="ERROR")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
options = dict(model=sys.argv[1], replicas="2", cpus="1", rows="2", budget="24", inner="eager", threads="1")
options |= dict(prefill_chunk="16", name="small")
serve.run(app(options), route_prefix="/")
url = f"http://127.0.0.1:{sys.argv[2]}"

async def ask(client, prompt):
    fields = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    found = await client.post("/v1/completions", json=fields)
    return found.json()["choices"][0]["text"]

async def stream(client, prompt):
    fields = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=fields) as response:
        lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

async def main():
    prompts = [[5 + i] * (3 + 4 * i) for i in range(6)]
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        alone = [await ask(client, prompt) for prompt in prompts]
        together = await asyncio.gather(*(ask(client, prompt) for prompt in prompts * 4))
        streamed = await asyncio.gather(*(stream(client, prompt) for prompt in prompts))
        talk = await client.post("/v1/completions", json={"prompt": "a", "conversation": "c"})
        text = (await client.get("/metrics")).text
    name = 'kvpass_tokens_total{kind="prompt"}'
    (here,) = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]
    total = 6 * sum(map(len, prompts))
    found = dict(alone=alone, together=together, streamed=streamed, talk=talk.status_code, here=here, total=total)
    open(sys.argv[3], "w").write(json.dumps(found))

asyncio.run(main())
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[serve]'")
def test_two_replicas(tmp_path: Path) -> None:
    """Check that either replica gives the same answer, and that both have worked."""
    model().save_pretrained(tmp_path / "small")
    tokenizer().save_pretrained(tmp_path / "small")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "small"), "8123", str(tmp_path / "found")],
        cwd=ROOT, env={**os.environ, **PATIENT, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-5000:]
    found = json.loads((tmp_path / "found").read_text())
    assert len(set(found["alone"])) == 6
    assert found["together"] == found["alone"] * 4
    assert found["streamed"] == found["alone"]
    assert found["talk"] == 400
    assert 0 < found["here"] < found["total"]  # prompt tokens of one replica; the other has processed the rest
