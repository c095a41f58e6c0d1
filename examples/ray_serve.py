"""Serve a model by several replicas of `kvpass serve` under Ray Serve, which starts them and spreads the requests.

serve run examples.ray_serve:app model=SmolLM2-135M-Instruct replicas=2 cpus=4 budget=4096 rows=8

`model`, `replicas` and `cpus` (of a replica) are read here; all else are options of `kvpass serve`.  Conversations are
refused, because Ray Serve may give a conversation's next request to another replica.
"""

from __future__ import annotations

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette

from kvpass.apps import cli

QUEUE = 32  # requests that wait in a replica, as `kvpass serve` has it


def app(options: dict[str, str]) -> Application:
    """Return the application that `serve run` deploys."""
    rest = {"rows": "8", "queue": str(QUEUE), "drain": "30", **options}
    model, replicas, cpus = rest.pop("model"), int(rest.pop("replicas", 2)), float(rest.pop("cpus", 1))
    command = ["serve", model, "--conversations", "0"]
    for name, value in rest.items():
        command += [f"--{name.replace('_', '-')}", value]
    cli.parser().parse_args(command)  # a wrong option ends `serve run`, and not each replica

    def worker() -> Starlette:
        from kvpass.apps.serving.command import service_of
        from kvpass.apps.serving.routes import create_app

        return create_app(service_of(cli.parser().parse_args(command)))

    deployment = serve.deployment(
        name="kvpass",
        num_replicas=replicas,
        max_ongoing_requests=int(rest["rows"]) + int(rest["queue"]),
        graceful_shutdown_timeout_s=float(rest["drain"]),
        ray_actor_options={"num_cpus": cpus},
    )
    return deployment(serve.ingress(worker)()).bind()
