"""Writes docs/passes.md: one step of a two-layer model, as it stands after every pass.

python docs/passes.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.diagnostics.report import ExplainReport
from kvpass.rewrite.record import Record

PAGE = Path(__file__).with_name("passes.md")
HEADS, DIM = 2, 4
MOST = 40  # lines shown of a pass
Past = list[tuple[Tensor, Tensor]] | None

HEAD = """# The passes, on a real graph

What becomes of one decode step of a model of two layers: `python docs/passes.py` writes this page. Policy `streaming`
with a budget of 4 and positions by rank. Any model's own are printed with `KVPASS_LOGS=passes,graphs`, or by
`kvpass.explain(model, policy, graphs=True)(ids, cache=cache)`. What each pass is for stands in its file in
`kvpass/rewrite/passes`. Of what a pass changes only the lines that are new are shown, the first of them where there are
many, and how many went.

```python
"""


class Model(nn.Module):
    """Attention with a rotary embedding, twice."""

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
    """A rotary embedding of [B, H, q, D] at [1, q]."""
    angle = position[:, None, :, None] / 10.0 ** torch.arange(0, 1, 2 / DIM)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


@torch.no_grad()
def report() -> ExplainReport:
    """One step after a prompt of five tokens."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, ids = Model().eval(), torch.arange(6)[None]
    settings = dict(policy="streaming", budget=4, sinks=1, positions="cache", inner="eager")
    _, past = torch.compile(model, backend=kvpass.backend(**settings))(ids[:, :5], None)
    return kvpass.explain(model, graphs=True, **settings)(ids[:, 5:], past)


def page(found: ExplainReport) -> str:
    """The whole page."""
    source = Path(__file__).read_text()
    code = source[source.index("class Model") : source.index("@torch.no_grad()")].rstrip()
    (first, dynamos), *rest = found.programs
    parts, before = [HEAD + code + "\n```\n", f"## {first.capitalize()}\n", _fenced(dynamos.splitlines())], dynamos
    records = {f"after {record.name}": record for record in found.passes}
    for title, program in rest:
        parts += [f"## {title.capitalize()}\n", _said(records.get(title)), _changes(before, program)]
        before = program
    return "\n".join(part for part in parts if part)


def _said(record: Record | None) -> str:
    if record is None:
        return ""
    return (
        f"{len(record.matched)} rewritten" + "".join(f"; left {w}, as {why}" for w, why in record.left.items()) + ".\n"
    )


def _changes(before: str, program: str) -> str:
    old, new = _lines(before), _lines(program)
    made = [line for line in program.splitlines() if _line(line) not in old]
    gone = sum(_line(line) not in new for line in before.splitlines())
    more = f" {len(made) - MOST} more lines are new." if len(made) > MOST else ""
    return (_fenced(made[:MOST]) + "\n" if made else "") + f"{gone} lines went.{more}\n"


def _lines(program: str) -> set[str]:
    return {_line(line) for line in program.splitlines()}


def _line(line: str) -> str:
    """A line without what says that values are let go of, which moves from line to line."""
    return line.split(";  ")[0].strip()


def _fenced(lines: list[str]) -> str:
    return "```python\n" + "\n".join(_line(line) for line in lines if line.strip()) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(report()))
