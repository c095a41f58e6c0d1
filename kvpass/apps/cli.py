"""Define the command `kvpass`."""

from __future__ import annotations

import argparse
import importlib
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
COMMANDS = {
    "demo": ("demo", "the demo", "demo.run:run_command"),
    "align": ("align", "training an aligner", "align.command:train"),
    "calibrate": ("align", "calibrating a model", "policy_weights:write_calibration"),
    "gates": ("align", "measuring a model", "policy_weights:write_gates"),
    "eval": ("eval", "evaluation", "evaluation.run:main"),
    "serve": ("serve", "the server", "serving.command:main"),
    "lm-eval": ("lm-eval", "lm-evaluation-harness", "evaluation.harness:run"),
}
"""The extra that a command needs, the name of its work for messages, and the function that runs it."""


def int_at_least(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Return a converter for argparse that takes whole numbers of at least `least`, and at most `most`."""

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


def float_between(least: float, most: float, complaint: str = "") -> Callable[[str], float]:
    """Return a converter for argparse that takes numbers from `least` up to `most`."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is {complaint or f'not a number from {least:g} to {most:g}'}")
        return number

    return convert


def _share(complaint: str) -> Callable[[str], float]:
    """Return a converter for argparse that takes shares above 0 and up to 1."""
    return float_between(math.ulp(0), 1, f"{complaint} share above 0 and up to 1")


def _budget(text: str) -> int | float:
    """Convert an argument to a number of tokens, or to a share above 0 and up to 1."""
    return int_at_least(1)(text) if text.isdigit() else _share("neither a number of tokens nor a")(text)


SEED = int_at_least(0, 2**32 - 1)

_SHARED: dict[str, dict[str, Any]] = {
    "--device": dict(default="cpu", help="cpu, cuda, cuda:1, ..." + DEFAULT),
    "--dtype": dict(choices=["auto", "float32", "bfloat16", "float16"], default="float32", help=DEFAULT[1:]),
    "--inner": dict(default="inductor", help="what compiles: inductor, eager, ..." + DEFAULT),
    "--kv-dtype": dict(choices=KV_DTYPES, help="format of stored keys and values (default: the model's)"),
    "--policy": dict(
        metavar="P", nargs="+", default=["full", "streaming", "h2o"], help="NAME or NAME:OPTION=VALUE,..." + DEFAULT
    ),
    "--threads": dict(metavar="N", type=int_at_least(1, 4096), help="threads of torch (default: its own choice)"),
}
"""Options of several commands."""


def _add_shared(command: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        command.add_argument(name, **_SHARED[name])


def _add(command: Any, name: str, text: str, default: Any = None, **options: Any) -> None:
    """Add an option whose help ends with its default, and which takes several values if the default is a list."""
    options |= {"nargs": "+"} if isinstance(default, list) else {}
    command.add_argument(name, default=default, help=text + ("" if default in (None, []) else DEFAULT), **options)


def _add_number(command: Any, name: str, default: Any, text: str, least: int = 1, metavar: str = "N") -> None:
    """Add an option that takes whole numbers of at least `least`."""
    _add(command, name, text, default, metavar=metavar, type=int_at_least(least))


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
    root.set_defaults(run=run_command)
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
    _add(command, "--part", "what to show", list(PARTS), choices=PARTS)
    _add_number(command, "--budget", 256, "tokens kept")
    _add(command, "--text", "the book, as UTF-8 (default: Python's manual)", metavar="FILE", type=Path)
    _add(command, "--out", "where results go", Path("out"), metavar="DIR", type=Path)
    _add_shared(command, "--kv-dtype", "--threads")
    command.set_defaults(policy=["window", "streaming", "h2o"])
    _add_align(commands)
    _add_calibrate(commands)
    _add_gates(commands)
    _add_eval(commands)
    _add_serve(commands)
    commands.add_parser(
        "lm-eval",
        help="lm-evaluation-harness with bounded caches: its own command, with the model kvpass",
        add_help=False,  # the other arguments are the harness's
    )
    check = commands.add_parser(
        "doctor",
        help="missing parts of this installation: versions and the C++ compiler",
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
        "stopped continues from its last checkpoint, which is next to the result until the run has finished.",
    )
    command.add_argument("--model", metavar="NAME_OR_PATH", required=True, help="a Hugging Face causal model")
    command.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text (default: standard-library source)")
    _add_number(command, "--window", 255, "largest budget", least=6, metavar="M")
    command.add_argument("--out", metavar="FILE", type=Path, required=True, help="the safetensors file to write")
    _add(command, "--recipe", "see the policy's page", "direct", choices=["direct", "paper"])
    _add_number(command, "--every", 1, "for paper: tokens evicted together")
    _add_number(command, "--steps", 1000, "of the optimiser")
    _add_number(command, "--tokens", 1024, "of each step")
    _add(command, "--rate", "the highest learning rate", 2e-3, metavar="X", type=float_between(0, 1))
    sizes: dict[str, Any] = dict(metavar=("N", "M"), nargs=2, type=int_at_least(1))
    _add(command, "--hidden", "sizes of the hidden layers (default: 96 96; paper, of keys: 256 64)", **sizes)
    _add(command, "--hidden-values", "for paper, of values (default: --hidden, or else 64 128)", **sizes)
    _add(command, "--seed", "seed of weights and windows", 0, metavar="N", type=SEED)
    _add(command, "--dtype", "of the file", "float32", choices=["float32", "float16"])
    _add(command, "--device", "cpu, cuda, cuda:1, ... (default: a GPU where there is one)")
    _add_shared(command, "--threads")


def _add_calibrate(commands: Any) -> None:
    command = commands.add_parser(
        "calibrate",
        help="statistics of a model's queries, for the policies tri_attention and expected_attention",
        description="Runs a model on a text and writes the statistics of its queries before their rotary embedding.",
    )
    _add_reading(command, command, window=1024)


def _add_gates(commands: Any) -> None:
    command = commands.add_parser(
        "gates",
        help="gates of a model's KV heads, for the policy duo_attention",
        description="Measures how much attention each KV head of a model pays to tokens that a streaming head lacks, "
        "and writes its gates; or converts a table of gates, as DuoAttention publishes them.",
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument("--table", metavar="FILE", type=Path, help="gates as text, a line for each layer; not measured")
    _add_reading(command, source, window=2048)


def _add_reading(command: Any, source: Any, window: int) -> None:
    """Add the arguments of a command that runs a model on a text and writes its measurements."""
    command.add_argument("model", metavar="MODEL", help="name or path of a Hugging Face causal model")
    source.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text (default: prose of Python's manual)")
    command.add_argument("--out", metavar="FILE", type=Path, required=True, help="the safetensors file to write")
    _add_number(command, "--window", window, "tokens run together", least=8)
    _add_shared(command, "--dtype", "--threads")


def _add_eval(commands: Any) -> None:
    command = commands.add_parser(
        "eval",
        help="perplexity, retrieval and speed under policies and budgets, on any checkpoint",
        description="Measures each policy under each budget, and writes JSON, Markdown and plots.  Results already in "
        "the folder are not measured again.",
    )
    _add(command, "--model", "a Hugging Face causal model (default: the bundled one)", metavar="NAME_OR_PATH")
    _add_shared(command, "--dtype", "--policy")
    budgets = command.add_mutually_exclusive_group()
    _add(budgets, "--budget", "tokens, or a share of the prompt", [256], metavar="N", type=_budget)
    text = "budgets with these shares of the bytes of a full cache, metadata and scales included"
    _add(budgets, "--bytes", text, metavar="X", type=_share("no"), nargs="+")
    _add(command, "--prefill", "how texts are fed", "token", choices=["whole", "chunk", "token"])
    _add_number(command, "--chunk", 512, "for --prefill chunk", least=2)
    _add(command, "--measure", "what to measure", ["perplexity"], choices=MEASURES)
    text = "UTF-8 files (default: Python's manual; its source for the bundled model)"
    _add(command, "--text", text, [], metavar="FILE", type=Path)
    _add_number(command, "--rows", 1, "files or prompts in a batch")
    _add(command, "--seed", "seed of planted facts and of bootstraps", 0, metavar="N", type=SEED)
    _add(command, "--out", "where results go", Path("out/eval"), metavar="DIR", type=Path)
    _add_shared(command, "--device", "--inner", "--kv-dtype", "--threads")
    _add_measures(command)


def _add_measures(command: argparse.ArgumentParser) -> None:
    """Add the options of `kvpass eval` that belong to some measures only."""
    _add_number(command, "--tokens", 2048, "tokens of a text", least=4)
    command.add_argument(
        "--restart", metavar="N", type=int_at_least(0), default=0, help="empty a stream's cache after N tokens"
    )
    _add_number(command, "--length", [1024], "tokens of prompts; speed is measured on the longest", least=8)
    _add(command, "--depth", "0 (first) to 1", [0.0, 0.25, 0.5, 0.75, 1.0], metavar="X", type=float_between(0, 1))
    _add(command, "--task", "tasks of ruler", list(RULER_TASKS), choices=RULER_TASKS)
    text = "questions of ruler: in the prompt, or a separate turn after the prompt is compressed"
    _add(command, "--question", text, "inside", choices=["inside", "after"])
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
    _add(command, "--name", "name of the model in requests (default: the last part of MODEL)")
    _add(command, "--policy", "NAME or NAME:OPTION=VALUE,...", "h2o", metavar="P")
    _add_number(command, "--budget", 4096, "tokens kept")
    _add_number(command, "--rows", 8, "requests at a time")
    _add_number(command, "--queue", 32, "requests that may wait", least=0)
    _add_shared(command, "--dtype")
    _add_number(command, "--prefill-chunk", 512, "tokens of a chunk of a prompt", least=2)
    _add_number(command, "--read-interval", 4, "decode steps between two reads of the tokens")
    _add_number(command, "--max-tokens", 512, "tokens of an answer")
    text = "tokens of a request with its answer (default: the positions that the model was trained on)"
    _add_number(command, "--context", None, text)
    _add(command, "--host", "address to listen at", "127.0.0.1")
    _add(command, "--port", "0 for a free one", 8000, metavar="N", type=int_at_least(0, 65535))
    text = "a key that requests must have; may be repeated; also the variable KVPASS_API_KEY"
    command.add_argument("--api-key", metavar="KEY", action="append", default=[], help=text)
    _add(command, "--drain", "seconds to finish at the end", 30.0, metavar="S", type=float_between(0, 86_400))
    command.add_argument("--access-log", action="store_true", help="log every request")
    _add_number(command, "--conversations", 1024, "conversations kept, in memory and in files", least=0)
    _add_number(command, "--kept-rows", None, "conversations kept in memory (default: twice --rows)")
    _add_number(command, "--kept-bytes", 2**30, "bytes of the conversations kept in memory", least=0)
    text = "folder of compiled code: written by the first server, and loaded by later servers (default: none)"
    _add(command, "--artifact", text, metavar="DIR", type=Path)
    _add(command, "--folder", "folder of saved conversations (default: a temporary one)", metavar="DIR", type=Path)
    _add_shared(command, "--device", "--inner", "--kv-dtype", "--threads")
    command.set_defaults(dtype="auto")


def doctor(parsed: argparse.Namespace) -> int:
    """Print the findings about this installation; return 1 if something is missing."""
    from kvpass.diagnostics.doctor import examine_installation

    findings = examine_installation()
    print(*findings, sep="\n")
    return int(any(finding.missing for finding in findings))


def run_command(parsed: argparse.Namespace) -> None:
    """Run a command of `COMMANDS`; its imports are heavy and need its extra."""
    extra, user, path = COMMANDS[parsed.command]
    module, _, function = path.partition(":")
    with needing_extra(extra, user):
        imported = importlib.import_module(f"kvpass.apps.{module}")
    getattr(imported, function)(parsed)


if __name__ == "__main__":
    sys.exit(main())
