"""Store recordings in one compressed file, and describe how others differ from them."""

from __future__ import annotations

import difflib
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.golden.record import Recording, close, digest

FILE = Path(__file__).parent / "golden.json.xz"
WITH_TEXTS = frozenset({"Llama", "GPT2", "gpt_oss", "bart (reading)", "deepseek_v2", "jamba"})
"""Models whose texts are all in the file; for other models it has hashes."""
FINAL = "handed to the compiler"

Case = tuple[str, str]
"""A model and a policy."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that graphs depend on."""
    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def load() -> dict[str, Any]:
    """Return the stored recordings, or an empty store if there is no file."""
    if not FILE.exists():
        return {"versions": versions(), "cases": {}, "texts": {}}
    stored: dict[str, Any] = json.loads(lzma.decompress(FILE.read_bytes()))
    return stored


def save(recordings: Mapping[Case, Recording], stored: dict[str, Any], quickly: bool = False) -> int:
    """Replace the recordings of the given cases, and return the size of the file in bytes."""
    cases, texts = dict(stored["cases"]), dict(stored["texts"])
    for (model, policy), recording in recordings.items():
        cases[f"{model} | {policy}"] = {
            "stages": [[title, digest(text)] for title, text in recording.stages],
            "outputs": recording.outputs,
        }
        if model in WITH_TEXTS:
            texts.update({digest(text): text for _, text in recording.stages})
    used = {stage[1] for recording in cases.values() for stage in recording["stages"]}
    texts = {name: text for name, text in texts.items() if name in used}
    content = {
        "versions": versions(),
        "cases": dict(sorted(cases.items())),
        "texts": dict(sorted(texts.items(), key=_sort_key)),
    }
    packed = lzma.compress(
        json.dumps(content, separators=(",", ":")).encode(), preset=1 if quickly else 9 | lzma.PRESET_EXTREME
    )
    FILE.write_bytes(packed)
    return len(packed)


def _sort_key(item: tuple[str, str]) -> tuple[int, str]:
    """Sort texts with the same inputs together, because similar texts compress well in sequence."""
    return item[1].count(" = input"), item[1]


def difference(case: Case, ours: Recording, stored: Mapping[str, Any]) -> str:
    """Describe how a recording differs from the stored one; "" if only titles of stages differ."""
    recording = stored["cases"].get(" | ".join(case))
    if recording is None:
        return "nothing is recorded of it"
    parts = [_of_graphs(ours, recording["stages"], stored["texts"]), _of_outputs(ours.outputs, recording["outputs"])]
    return "\n".join(part for part in parts if part)


def _of_graphs(ours: Recording, stages: list[list[str]], texts: Mapping[str, str]) -> str:
    hashes = [digest(text) for _, text in ours.stages]
    recorded = [stage[1] for stage in stages]
    if hashes == recorded:
        return ""
    equal = [text_digest for (title, _), text_digest in zip(ours.stages, hashes, strict=True) if title == FINAL] == [
        text_digest for title, text_digest in stages if title == FINAL
    ]
    lines = [f"graphs handed to the compiler: {'equal' if equal else 'different'}"]
    pairs = enumerate(zip(hashes, recorded, strict=False))
    index = next((number for number, (own, stored) in pairs if own != stored), None)
    if index is None:
        return "\n".join([*lines, f"{len(hashes)} stages, recorded were {len(recorded)}"])
    title, text = ours.stages[index]
    lines.append(f"first different graph: number {index}, {title!r}, recorded as {stages[index][0]!r}")
    if recorded[index] not in texts:
        return "\n".join([*lines, "its text is not stored: compare two checkouts with --texts FOLDER and diff -r"])
    recorded_text = texts[recorded[index]]
    changes = difflib.unified_diff(recorded_text.splitlines(), text.splitlines(), "recorded", "now", lineterm="", n=2)
    return "\n".join([*lines, *changes])


def _of_outputs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    lines = []
    for name in sorted({*ours, *theirs}):
        own, recorded = ours.get(name), theirs.get(name)
        if not (close(own, recorded) if name == "logits" and own and recorded else own == recorded):
            lines.append(f"{name}: {str(own)[:300]}\n  recorded: {str(recorded)[:300]}")
    return "\n".join(lines)
