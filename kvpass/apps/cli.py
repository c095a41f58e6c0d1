"""Define the command `kvpass`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvpass.apps.demo.settings import PARTS
from kvpass.errors import KVPassError
from kvpass.lowering.formats import KV_DTYPES
from kvpass.versions import needing_extra

# The modules that define these names are heavy, so they are imported when a command runs.
MEASURES = ("perplexity", "stream", "agreement", "passkey", "needle", "ruler", "recall", "speed")
"""As in kvpass.apps.evaluation.run."""
RULER_TASKS = ("single", "multikey", "variables", "common", "frequent")
"""As in kvpass.apps.evaluation.ruler."""
DEFAULT = " (default: %(default)s)"


def at_least(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Return a converter for argparse that takes whole numbers of at least `least`, and of `most` at most."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        if number > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return number

    return convert


def between(least: float, most: float) -> Callable[[str], float]:
    """Return a converter for argparse that takes numbers from `least` up to `most`."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
        return number

    return convert


def _budget(text: str) -> int | float:
    """Convert an argument to a number of tokens, or to a share above 0 and up to 1."""
    if text.isdigit():
        return at_least(1)(text)
    return _share(text, "neither a number of tokens nor a share above 0 and up to 1")


def _share(text: str, complaint: str = "no share above 0 and up to 1") -> float:
    """Convert an argument to a share above 0 and up to 1."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is {complaint}")
    return share


SEED = at_least(0, 2**32 - 1)

_SHARED: dict[str, dict[str, Any]] = {
    "--device": dict(default="cpu", help="cpu, cuda, cuda:1, ..." + DEFAULT),
    "--dtype": dict(choices=["auto", "float32", "bfloat16", "float16"], default="float32", help=DEFAULT[1:]),
    "--inner": dict(default="inductor", help="what compiles: inductor, eager, ..." + DEFAULT),
    "--kv-dtype": dict(choices=KV_DTYPES, help="of stored keys and values (default: the model's)"),
    "--policy": dict(
        metavar="P", nargs="+", default=["full", "streaming", "h2o"], help="NAME or NAME:OPTION=VALUE,..." + DEFAULT
    ),
    "--threads": dict(metavar="N", type=at_least(1, 4096), help="threads of torch (default: its own choice)"),
}
"""Options of several commands."""


def _add_shared(command: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        command.add_argument(name, **_SHARED[name])


def _add_number(command: Any, name: str, default: Any, text: str, least: int = 1, metavar: str = "N") -> None:
    """Add an option that takes whole numbers of at least `least`: one, or several if the default is a list."""
    several: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
    text += DEFAULT if default is not None else ""
    command.add_argument(name, metavar=metavar, type=at_least(least), default=default, help=text, **several)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 2 for a wrong call, 1 if `doctor` finds that something is missing."""
    root = parser()
    parsed, rest = root.parse_known_args(arguments)
    if rest and parsed.command != "lm-eval":
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    parsed.rest = rest
    if getattr(parsed, "threads", None):
        torch.set_num_threads(parsed.threads)
    try:
        status: int | None = parsed.run(parsed)
    except KVPassError as error:
        print(f"kvpass: {error}", file=sys.stderr)
        return 2
    return status or 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    root = argparse.ArgumentParser(prog="kvpass", description="Bounded KV caches through torch.compile.")
    commands = root.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "demo",
        help="a chat, perplexity, retrieval, speed and memory of a few policies on a real model",
        description="Compares a few policies with the uncompiled model, and writes tables and pictures.",
    )
    command.add_argument(
        "--model", metavar="NAME_OR_PATH",
        help="a Hugging Face causal model (default: SmolLM2-135M-Instruct, or a bundled model where it is missing)",
    )  # fmt: skip
    _add_shared(command, "--policy")
    command.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to show" + DEFAULT)
    _add_number(command, "--budget", 256, "tokens kept")
    command.add_argument("--text", metavar="FILE", type=Path, help="the book, as UTF-8 (default: Python's manual)")
    command.add_argument("--out", metavar="DIR", type=Path, default=Path("out"), help="where results go" + DEFAULT)
    _add_shared(command, "--kv-dtype", "--threads")
    command.set_defaults(run=demo, policy=["window", "streaming", "h2o"])
    _add_align(commands)
    _add_calibrate(commands)
    _add_gates(commands)
    _add_eval(commands)
    _add_serve(commands)
    harness = commands.add_parser(
        "lm-eval",
        help="lm-evaluation-harness with bounded caches: its own command, with the model kvpass",
        add_help=False,  # all that follows is the harness's
    )
    harness.set_defaults(run=lm_eval)
    check = commands.add_parser(
        "doctor",
        help="what this installation lacks: versions and the C++ compiler",
        description="Checks the versions and the C++ compiler.  The exit status is 1 if something is missing.",
    )
    check.set_defaults(run=doctor)
    return root


def _add_align(commands: Any) -> None:
    group = commands.add_parser("align", help="networks for the policy kv_align")
    command = group.add_subparsers(dest="job", required=True).add_parser(
        "train",
        help="train an aligner for a model",
        description="Trains the networks that repair keys and values for the policy kv_align.  A run that was "
        "stopped goes on from its last checkpoint, which is next to the result until the run has finished.",
    )
    command.add_argument("--model", metavar="NAME_OR_PATH", required=True, help="a Hugging Face causal model")
    command.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text (default: standard-library source)")
    _add_number(command, "--window", 255, "largest budget", least=6, metavar="M")
    command.add_argument("--out", metavar="FILE", type=Path, required=True, help="the safetensors file to write")
    command.add_argument(
        "--recipe", choices=["direct", "paper"], default="direct", help="see the policy's page" + DEFAULT
    )
    _add_number(command, "--every", 1, "for paper: tokens that go at once")
    _add_number(command, "--steps", 1000, "of the optimiser")
    _add_number(command, "--tokens", 1024, "of each step")
    command.add_argument(
        "--rate", metavar="X", type=between(0, 1), default=2e-3, help="the highest learning rate" + DEFAULT
    )
    sizes: dict[str, Any] = dict(metavar=("N", "M"), nargs=2, type=at_least(1))
    command.add_argument(
        "--hidden", **sizes, help="sizes of the hidden layers (default: 96 96; paper, of keys: 256 64)"
    )
    command.add_argument("--hidden-values", **sizes, help="for paper, of values (default: --hidden, or else 64 128)")
    command.add_argument("--seed", metavar="N", type=SEED, default=0, help="of weights and windows" + DEFAULT)
    command.add_argument("--dtype", choices=["float32", "float16"], default="float32", help="of the file" + DEFAULT)
    command.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)")
    _add_shared(command, "--threads")
    command.set_defaults(run=align)


def _add_calibrate(commands: Any) -> None:
    command = commands.add_parser(
        "calibrate",
        help="statistics of a model's queries, for the policies tri_attention and expected_attention",
        description="Runs a model on a text and writes the statistics of its queries before their rotary embedding.",
    )
    _add_reading(command, command, window=1024)
    command.set_defaults(run=calibrate)


def _add_gates(commands: Any) -> None:
    command = commands.add_parser(
        "gates",
        help="gates of a model's KV heads, for the policy duo_attention",
        description="Measures how much attention each KV head of a model pays to tokens that a streaming head has not, "
        "and writes its gates; or converts a table of gates, as DuoAttention publishes them.",
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument("--table", metavar="FILE", type=Path, help="gates as text, a line for each layer; not measured")
    _add_reading(command, source, window=2048)
    command.set_defaults(run=gates)


def _add_reading(command: Any, source: Any, window: int) -> None:
    """Add the arguments of a command that runs a model on a text and writes what it has measured."""
    command.add_argument("model", metavar="MODEL", help="name or path of a Hugging Face causal model")
    source.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text (default: prose of Python's manual)")
    command.add_argument("--out", metavar="FILE", type=Path, required=True, help="the safetensors file to write")
    _add_number(command, "--window", window, "tokens run at once", least=8)
    _add_shared(command, "--dtype", "--threads")


def _add_eval(commands: Any) -> None:
    command = commands.add_parser(
        "eval",
        help="perplexity, retrieval and speed under policies and budgets, on any checkpoint",
        description="Measures each policy under each budget, and writes JSON, Markdown and plots.  Results that the "
        "folder has already are not measured again.",
    )
    command.add_argument(
        "--model", metavar="NAME_OR_PATH", help="a Hugging Face causal model (default: the bundled one)"
    )
    _add_shared(command, "--dtype", "--policy")
    budgets = command.add_mutually_exclusive_group()
    text = "tokens, or a share of the prompt" + DEFAULT
    budgets.add_argument("--budget", metavar="N", type=_budget, nargs="+", default=[256], help=text)
    budgets.add_argument(
        "--bytes", metavar="X", type=_share, nargs="+",
        help="budgets with these shares of the bytes of a full cache, metadata and scales included",
    )  # fmt: skip
    command.add_argument(
        "--prefill", choices=["whole", "chunk", "token"], default="token", help="how texts are fed" + DEFAULT
    )
    _add_number(command, "--chunk", 512, "for --prefill chunk", least=2)
    command.add_argument(
        "--measure", choices=MEASURES, nargs="+", default=["perplexity"], help="what to measure" + DEFAULT
    )
    text = "UTF-8 files (default: Python's manual; its source for the bundled model)"
    command.add_argument("--text", metavar="FILE", type=Path, nargs="+", default=[], help=text)
    _add_number(command, "--rows", 1, "files or prompts in a batch")
    text = "seed of planted facts and of bootstraps" + DEFAULT
    command.add_argument("--seed", metavar="N", type=SEED, default=0, help=text)
    command.add_argument("--out", metavar="DIR", type=Path, default=Path("out/eval"), help="where results go" + DEFAULT)
    _add_shared(command, "--device", "--inner", "--kv-dtype", "--threads")
    _add_measures(command)
    command.set_defaults(run=evaluate)


def _add_measures(command: argparse.ArgumentParser) -> None:
    """Add the options of `kvpass eval` that belong to some measures only."""
    _add_number(command, "--tokens", 2048, "tokens of a text", least=4)
    command.add_argument(
        "--restart", metavar="N", type=at_least(0), default=0, help="empty a stream's cache after N tokens"
    )
    _add_number(command, "--length", [1024], "tokens of prompts; speed is that of the longest", least=8)
    command.add_argument(
        "--depth", metavar="X", type=between(0, 1), nargs="+", default=[0, 0.25, 0.5, 0.75, 1],
        help="0 (first) to 1" + DEFAULT,
    )  # fmt: skip
    tasks = list(RULER_TASKS)
    command.add_argument("--task", choices=RULER_TASKS, nargs="+", default=tasks, help="tasks of ruler" + DEFAULT)
    command.add_argument(
        "--question", choices=["inside", "after"], default="inside",
        help="questions of ruler: in the prompt, or a turn of its own once the prompt is compressed" + DEFAULT,
    )  # fmt: skip
    distances = [32, 64, 128, 256, 512, 1024]
    _add_number(command, "--distance", distances, "tokens between a pair and its question, in recall")
    _add_number(command, "--trials", 4, "prompts of each kind")
    _add_number(command, "--documents", 8, "documents of agreement")


def _add_serve(commands: Any) -> None:
    command = commands.add_parser(
        "serve",
        help="an HTTP server with the endpoints of OpenAI's API, for many requests on one decode graph",
        description="Serves a model at /v1/chat/completions and /v1/completions.  The slots of a conversation stay "
        "between its requests.  SIGTERM and Ctrl-C finish the running requests first.",
    )
    command.add_argument("model", metavar="MODEL", help="a Hugging Face causal model, a name or a folder")
    command.add_argument("--name", help="name of the model in requests (default: the last part of MODEL)")
    command.add_argument("--policy", metavar="P", default="h2o", help="NAME or NAME:OPTION=VALUE,..." + DEFAULT)
    _add_number(command, "--budget", 4096, "tokens kept")
    _add_number(command, "--rows", 8, "requests at a time")
    _add_number(command, "--queue", 32, "requests that may wait", least=0)
    _add_shared(command, "--dtype")
    _add_number(command, "--prefill-chunk", 512, "tokens of a chunk of a prompt", least=2)
    _add_number(command, "--read-interval", 4, "decode steps between two reads of the tokens")
    _add_number(command, "--max-tokens", 512, "tokens of an answer")
    text = "tokens of a request with its answer (default: the positions that the model was trained on)"
    _add_number(command, "--context", None, text)
    command.add_argument("--host", default="127.0.0.1", help="address to listen at" + DEFAULT)
    command.add_argument(
        "--port", metavar="N", type=at_least(0, 65535), default=8000, help="0 for a free one" + DEFAULT
    )
    text = "a key that requests must have; may be repeated; also the variable KVPASS_API_KEY"
    command.add_argument("--api-key", metavar="KEY", action="append", default=[], help=text)
    command.add_argument(
        "--drain", metavar="S", type=between(0, 86_400), default=30.0, help="seconds to finish at the end" + DEFAULT
    )
    command.add_argument("--access-log", action="store_true", help="log every request")
    _add_number(command, "--conversations", 1024, "conversations kept, in memory and in files", least=0)
    _add_number(command, "--kept-rows", None, "conversations kept in memory (default: twice --rows)")
    _add_number(command, "--kept-bytes", 2**30, "bytes of the conversations kept in memory", least=0)
    text = "folder of saved conversations (default: a temporary one)"
    command.add_argument("--folder", metavar="DIR", type=Path, help=text)
    _add_shared(command, "--device", "--inner", "--kv-dtype", "--threads")
    command.set_defaults(run=serve, dtype="auto")


def doctor(parsed: argparse.Namespace) -> int:
    """Print the findings about this installation; return 1 if something is missing."""
    from kvpass.diagnostics.doctor import examine_installation

    findings = examine_installation()
    print(*findings, sep="\n")
    return int(any(finding.missing for finding in findings))


def demo(parsed: argparse.Namespace) -> None:
    """Run the demo; its imports are heavy and need the extra `demo`."""
    with needing_extra("demo", "the demo"):
        from kvpass.apps.demo import run
        from kvpass.apps.demo.settings import DemoSettings
    names = ("model", "budget", "text", "out", "kv_dtype")
    settings: dict[str, Any] = {name: getattr(parsed, name) for name in names}
    run.main(DemoSettings(policies=tuple(parsed.policy), parts=tuple(parsed.part), **settings))


def evaluate(parsed: argparse.Namespace) -> None:
    """Measure policies; the imports need the extra `eval`."""
    with needing_extra("eval", "evaluation"):
        from kvpass.apps.evaluation import run
    run.main(run.settings_of(parsed))


def serve(parsed: argparse.Namespace) -> None:
    """Serve a model over HTTP; the imports need the extra `serve`."""
    with needing_extra("serve", "the server"):
        from kvpass.apps.serving import command
    command.main(parsed)


def lm_eval(parsed: argparse.Namespace) -> None:
    """Run the command of lm-evaluation-harness; it needs the extra `lm-eval`."""
    with needing_extra("lm-eval", "lm-evaluation-harness"):
        from kvpass.apps.evaluation import harness
    harness.run(parsed.rest)


def align(parsed: argparse.Namespace) -> None:
    """Train an aligner; the imports need the extra `align`."""
    with needing_extra("align", "training an aligner"):
        from kvpass.apps.align import command, train
    names = ("window", "recipe", "every", "steps", "tokens", "rate", "seed")
    options: dict[str, Any] = {name: getattr(parsed, name) for name in names}
    options |= {name: tuple(getattr(parsed, name) or ()) or None for name in ("hidden", "hidden_values")}
    settings = train.TrainingSettings(**options)
    command.train(parsed.model, parsed.text, parsed.out, settings, parsed.dtype, parsed.device)


def calibrate(parsed: argparse.Namespace) -> None:
    """Calibrate a model; the imports need the extra `align`."""
    with needing_extra("align", "calibrating a model"):
        from kvpass.apps.policy_weights import write_calibration
    write_calibration(parsed.model, parsed.text, parsed.out, parsed.window, parsed.dtype)


def gates(parsed: argparse.Namespace) -> None:
    """Write the gates of a model; the imports need the extra `align`."""
    with needing_extra("align", "measuring a model"):
        from kvpass.apps.policy_weights import write_gates
    write_gates(parsed.model, parsed.text, parsed.table, parsed.out, parsed.window, parsed.dtype)


if __name__ == "__main__":
    sys.exit(main())
