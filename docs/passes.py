"""Write docs/passes.md, which shows a decode step of a model with two layers after every pass.

python docs/passes.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.diagnostics.report import ExplainReport
from kvpass.rewrite.context import PassRecord

PAGE = Path(__file__).with_name("passes.md")
HEADS, DIM = 2, 4
MOST = 40  # lines of a pass that are shown
Past = list[tuple[Tensor, Tensor]] | None

HEAD = f"""# Passes

The graph of one decode step of a model with two layers, after every pass. The policy is `streaming` with a budget of 4
and positions in the cache. `python docs/passes.py` writes this page. `KVPASS_LOGS=passes,graphs` and
`kvpass.explain(model, policy, graphs=True)(ids, cache=cache)` print the same for any model. The purpose of each pass is
in its file in `kvpass/rewrite/passes`. A section shows the lines that a pass adds, at most {MOST} of them, and counts
the lines that it removes.

```python
"""


class Model(nn.Module):
    """Two layers of attention with a rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, HEADS * DIM)
        self.project = nn.ModuleList(nn.Linear(HEADS * DIM, 3 * HEADS * DIM) for _ in range(2))

    def forward(self, ids: Tensor, past: Past = None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, present = self.embed(ids), []
        seen = 0 if past is None else past[0][0].shape[2]
        position = torch.arange(seen, seen + ids.shape[1])[None]  # [1, q]
        for layer, project in enumerate(self.project):
            q, k, v = project(x).unflatten(-1, (3 * HEADS, DIM)).transpose(1, 2).chunk(3, 1)
            q, k = rotated(q, position), rotated(k, position)
            if past is not None:
                k, v = torch.cat([past[layer][0], k], 2), torch.cat([past[layer][1], v], 2)
            present.append((k, v))
            mask = torch.arange(k.shape[2]) <= position[:, None, :, None]
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return x, present


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, q, D] by positions [1, q]."""
    angle = position[:, None, :, None] / 10.0 ** torch.arange(0, 1, 2 / DIM)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


@torch.no_grad()
def report() -> ExplainReport:
    """Return the report on one step after a prompt of five tokens."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, ids = Model().eval(), torch.arange(6)[None]
    settings = dict(policy="streaming", budget=4, sinks=1, positions="cache", inner="eager")
    _, past = torch.compile(model, backend=kvpass.backend(**settings))(ids[:, :5], None)
    return kvpass.explain(model, graphs=True, **settings)(ids[:, 5:], past)


def page(found: ExplainReport) -> str:
    """Return the text of the page."""
    source = Path(__file__).read_text()
    code = source[source.index("class Model") : source.index("@torch.no_grad()")].rstrip()
    (first, dynamos), *rest = found.programs
    parts, before = [HEAD + code + "\n```\n", f"## {first.capitalize()}\n", _fenced(dynamos.splitlines())], dynamos
    records = {f"after {record.name}": record for record in found.passes}
    for title, program in rest:
        parts += [f"## {title.capitalize()}\n", _summary(records.get(title)), _changes(before, program)]
        before = program
    return "\n".join(part for part in parts if part)


def _summary(record: PassRecord | None) -> str:
    """Return what a pass reports: how many nodes it rewrote, and why it left others."""
    if record is None:
        return ""
    left = ", ".join(f"{name} ({reason})" for name, reason in record.left.items())
    return f"Nodes rewritten: {len(record.matched)}." + (f" Unchanged: {left}." if left else "") + "\n"


def _changes(before: str, program: str) -> str:
    """Return the lines that a program adds to the one before it, and counts of the others."""
    old, new = _lines(before), _lines(program)
    added = [line for line in program.splitlines() if _line(line) not in old]
    removed = sum(_line(line) not in new for line in before.splitlines())
    more = f", {len(added) - MOST} of them not shown" if len(added) > MOST else ""
    counts = f"Lines added: {len(added)}{more}; removed: {removed}.\n"
    return (_fenced(added[:MOST]) + "\n" if added else "") + counts


def _lines(program: str) -> set[str]:
    return {_line(line) for line in program.splitlines()}


def _line(line: str) -> str:
    """Return a line without its `= None` assignments, which free values and move from line to line."""
    return line.split(";  ")[0].strip()


def _fenced(lines: list[str]) -> str:
    return "```python\n" + "\n".join(_line(line) for line in lines if line.strip()) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(report()))
