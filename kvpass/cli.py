"""The command `kvpass`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpass.errors import KVPassError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status, 2 for anything that the caller got wrong."""
    parsed = parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except KVPassError as error:
        print(f"kvpass: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="kvpass", description="Bounded KV caches through torch.compile.")
    commands = whole.add_subparsers(dest="command", required=True)
    job = commands.add_parser(
        "demo",
        help="perplexity, speed and memory of every policy on real text",
        description="Streams text through a model under each policy, and writes tables and pictures.",
    )
    shown = " (default: %(default)s)"
    job.add_argument("--model", metavar="NAME_OR_PATH", help="a Hugging Face causal model (default: the bundled one)")
    job.add_argument("--policy", metavar="P", nargs="+", default=[], help="policies to run (default: all of them)")
    job.add_argument("--budget", metavar="N", type=at_least(1), default=256, help="tokens kept" + shown)
    job.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text (default: standard-library source)")
    job.add_argument("--aligner", metavar="FILE", type=Path, help="for kv_align (default: that of the bundled model)")
    job.add_argument("--out", metavar="DIR", type=Path, default=Path("out"), help="where results go" + shown)
    job.add_argument("--documents", metavar="N", type=at_least(1), default=4, help="documents, one batch" + shown)
    job.add_argument("--length", metavar="N", type=at_least(8), default=2048, help="tokens of each document" + shown)
    job.add_argument("--stream", metavar="N", type=at_least(8), default=6000, help="tokens of the long stream" + shown)
    job.add_argument("--threads", metavar="N", type=at_least(1), help="threads of torch (default: its own choice)")
    job.add_argument("--jobs", metavar="N", type=at_least(1), default=1, help="policies at a time" + shown)
    job.add_argument("--kv-dtype", choices=["int8", "int4"], help="of stored keys and values (default: the model's)")
    job.set_defaults(run=demo)
    _add_align(commands)
    return whole


def _add_align(commands: Any) -> None:
    jobs = commands.add_parser("align", help="networks for the policy kv_align").add_subparsers(
        dest="job", required=True
    )
    job = jobs.add_parser(
        "train",
        help="train an aligner for a model",
        description="Trains the networks that repair keys and values for the policy kv_align.  A run that was "
        "stopped goes on from its last checkpoint, which lies beside the result until it is finished.",
    )
    shown = " (default: %(default)s)"
    job.add_argument("--model", metavar="NAME_OR_PATH", required=True, help="a Hugging Face causal model")
    job.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text (default: standard-library source)")
    job.add_argument("--window", metavar="M", type=at_least(6), default=255, help="largest budget" + shown)
    job.add_argument("--out", metavar="FILE", type=Path, required=True, help="the safetensors file to write")
    job.add_argument("--recipe", choices=["direct", "paper"], default="direct", help="see the policy's page" + shown)
    job.add_argument("--every", metavar="N", type=at_least(1), default=1, help="for paper: tokens that go at once")
    job.add_argument("--steps", metavar="N", type=at_least(1), default=1000, help="of the optimiser" + shown)
    job.add_argument("--tokens", metavar="N", type=at_least(1), default=1024, help="of each step" + shown)
    job.add_argument("--seed", metavar="N", type=int, default=0, help="of weights and windows" + shown)
    job.add_argument("--dtype", choices=["float32", "float16"], default="float32", help="of the file" + shown)
    job.add_argument("--threads", metavar="N", type=at_least(1), help="threads of torch (default: its own choice)")
    job.set_defaults(run=align)


def at_least(least: int) -> Callable[[str], int]:
    """A converter for argparse that takes whole numbers from `least` on."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return convert


def demo(parsed: argparse.Namespace) -> None:
    """The main job; its imports are heavy and need the extra `demo`."""
    try:
        from kvpass.demo import run
        from kvpass.demo.settings import Settings
    except ModuleNotFoundError as error:
        raise KVPassError(f"the demo needs {error.name}: pip install 'kvpass[demo]'") from error
    run.main(
        Settings(
            model=parsed.model,
            policies=tuple(parsed.policy),
            budget=parsed.budget,
            text=parsed.text,
            aligner=parsed.aligner,
            out=parsed.out,
            documents=parsed.documents,
            length=parsed.length,
            stream=parsed.stream,
            threads=parsed.threads,
            jobs=parsed.jobs,
            kv_dtype=parsed.kv_dtype,
        )
    )


def align(parsed: argparse.Namespace) -> None:
    """Train an aligner; needs the extra `align`."""
    try:
        from kvpass.align import command
    except ModuleNotFoundError as error:
        raise KVPassError(f"training an aligner needs {error.name}: pip install 'kvpass[align]'") from error
    settings = command.Settings(
        window=parsed.window,
        recipe=parsed.recipe,
        every=parsed.every,
        steps=parsed.steps,
        tokens=parsed.tokens,
        seed=parsed.seed,
    )
    command.train(parsed.model, parsed.text, parsed.out, settings, parsed.dtype, parsed.threads)


if __name__ == "__main__":
    sys.exit(main())
