"""Fixtures of the tests that connect to a server; the tests are ignored if its packages are missing."""

from importlib.util import find_spec

NEEDED = ("starlette", "uvicorn", "sse_starlette", "prometheus_client", "httpx", "safetensors")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py"]
if not collect_ignore_glob:
    from tests.apps.serving.small import fresh_dynamo as fresh_dynamo
    from tests.apps.serving.small import running as running
