"""Start `kvpass serve`, ask it with OpenAI's client, and end it.

python examples/serve.py           # needs the extras: pip install 'kvpass[serve,clients]'
"""

import re
import signal
import subprocess
import sys
import threading
import time

import httpx
from openai import OpenAI

MODEL = "SmolLM2-135M-Instruct"
COMMAND = [sys.executable, "-m", "kvpass.apps.cli", "serve", MODEL, "--policy", "h2o", "--budget", "256", "--rows", "4"]

server = subprocess.Popen([*COMMAND, "--port", "0"], stderr=subprocess.PIPE, text=True)
try:
    for line in server.stderr:  # the address is in the log, because the port is a free one
        if found := re.search(r"running on (http://\S+)", line):
            url = found[1]
            break
    else:
        sys.exit("the server has not started")
    threading.Thread(target=server.stderr.read, daemon=True).start()  # what it writes later is not shown
    while httpx.get(f"{url}/health").status_code != 200:  # it compiles
        time.sleep(0.5)

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    how = {"model": MODEL, "max_tokens": 60, "temperature": 0}
    for question in ("Name three colours.", "Name three more."):
        stream = client.chat.completions.create(
            messages=[{"role": "user", "content": question}],  # the server has the earlier ones in its slots
            extra_body={"conversation": "example"},
            stream=True,
            **how,
        )
        print(f"\n{question}\n  ", end="")
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    metrics = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("kvpass_tokens_total")]
    print("\n", *metrics, sep="\n")
finally:
    server.send_signal(signal.SIGTERM)  # it finishes what runs
    server.wait(60)
