"""Generate small random models: attention as a program of a few lines, and its calls.

A program depends on its seed alone. Hypothesis also draws constants from imported modules, so the same seed would
give different programs next to different tests. A program is source text: a failing example reads like a model,
refusals name its lines, and tracing costs no more than its operations. Most parts are ordinary; rare parts are drawn
sometimes.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.adversary import families
from tests.adversary.models import DIM, INDICES, Attend, Bare, Feed, Small, later, seen
from tests.adversary.oracle import Case

PADS = {
    "left": [[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 12],
    "right": [[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]],
    "later": [[1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]],
    "none": [[1] * 12] * 2,
}
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 0, 1], [1, 0, 0, 1, 1, 2, 2, 0, 0, 0, 1, 1]])
WEIGHTS = torch.tensor([[3.0, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2.0, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]) / 5
TABLE = torch.tensor([0.0, 1.0, -0.5, 0.25, -1.0, 0.75])
INPUTS: dict[str, Tensor] = {"s": SEGMENTS, "w": WEIGHTS}

PIECES = [(5, 1, 1), (5, 1, 1), (4, 1, 1), (6, 1, 1), (2, 1, 1), (1, 1, 1), (5, 3), (4, 2), (1, 4), (5, 1, 3)]
LOWS = ["torch.finfo(torch.float32).min", "-1e9", "-1e4", "-torch.inf"]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model's attention and its calls.

    Attributes:
        source: code of `attend`, see `tests.adversary.models.Attend`.
        names: the inputs for each token that it takes, among p, s and w.
        pad: the value of p, a key of `PADS`.
        changes: the input whose values change after the prompt, or None.
        grow: the cache update as an expression of past and new.
        pieces: numbers of tokens fed in each call.
        model: settings of `Small`.
        policy: name of the policy, and its setting of positions if it has one.
    """

    source: str
    names: tuple[str, ...]
    pad: str
    changes: str | None
    grow: str
    pieces: tuple[int, ...]
    model: tuple[tuple[str, Any], ...]
    policy: tuple[str, ...]

    def __str__(self) -> str:
        how = f"pad={self.pad} changes={self.changes} grow={self.grow} pieces={self.pieces} {dict(self.model)}"
        return f"{self.source}# {' '.join(self.policy)} {how}"

    def case(self) -> Case:
        settings = dict(self.model)
        dtypes = {name: DTYPES[settings.pop(name)] for name in ("dtype", "kept") if name in settings}
        grow = eval(f"lambda past, new: {self.grow}", {"torch": torch})
        inputs = {name: self._feed(name) for name in self.names}
        how: dict[str, Any] = {"real": inputs.get("p"), "late": self.changes is not None}
        attend = compiled(self.source)
        if {"layers", "rotary"} & settings.keys():
            model = Small(attend, grow=grow, tables={"table": TABLE.clone()}, **settings, **dtypes)
            return Case(model, inputs, self.pieces, **how)
        bare = Bare(attend, grow=grow, table=TABLE, **settings, **dtypes)
        return Case(bare, inputs, self.pieces, wrap=bare.call, **how)

    def _feed(self, name: str) -> Feed:
        table = torch.tensor(PADS[self.pad]) if name == "p" else INPUTS[name]
        other = table.roll(1, -1) if name != "p" else torch.tensor(PADS["later"])
        return later(table, other, self.pieces[0]) if name == self.changes else seen(table)

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of the policy other than its name."""
        return {"positions": self.policy[1]} if len(self.policy) > 1 else {}


_numbers = itertools.count()


def compiled(source: str) -> Attend:
    """Compile the function, and register its lines so that tracebacks show them."""
    name = f"/generated/program_{next(_numbers)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(source, name, "exec"), space)
    attend: Attend = space["attend"]
    return attend


def odd(draw: Random, ordinary: Sequence[Any], rare: Sequence[Any], percent: int = 6) -> Any:
    """Draw one of the ordinary choices, or a rare one with the given percentage."""
    return draw.choice(rare if draw.randrange(100) < percent else ordinary)


# -- expressions over i, j, heads and inputs for each token ------------------------------------------------

KEYS = ["{0}[:, None, None, :]", "{0}[:, None, None]", "{0}.unsqueeze(1).unsqueeze(2)", "{0}[:, j][:, None, None]"]
COMPARED = ["<", "<=", "==", "!=", ">", ">="]


@dataclasses.dataclass
class Expressions:
    """Draws expressions of shape [B or 1, H or 1, q or 1, S or 1]."""

    draw: Random

    def pick(self, *choices: str) -> str:
        return self.draw.choice(choices)

    def of_key(self, name: str) -> str:
        return odd(self.draw, KEYS[:3], KEYS[3:], 15).format(name)

    def of_query(self, name: str) -> str:
        return f"{name}[:, None, -q.shape[2]:, None]"

    def whole(self, depth: int) -> str:
        """Draw an integer expression."""
        if depth == 0:
            kind = self.pick("i", "j", "j", "s of key", "s of query", "p of key", "h")
            if kind == "h":
                return "h"
            return (self.of_key if kind.endswith("key") else self.of_query)(kind[0]) if " " in kind else kind
        inner, c = self.whole(depth - 1), self.pick("2", "3", "4")
        return self.pick(f"({inner} % {c})", f"({inner} // {c})", "(i - j)", f"({inner} + {c})", inner)

    def same(self, name: str) -> str:
        return f"({self.of_key(name)} == {self.of_query(name)})"

    def truth(self, depth: int) -> str:
        """Draw a boolean expression."""
        if depth == 0:
            kind = self.pick("near", "near", "segments", "segments", "compare", "compare", "constant", "weights")
            if kind == "near":
                return f"(i - j < {self.pick('2', '3', '4')})"
            if kind == "segments":
                return self.same("s")
            if kind == "weights":
                return f"({self.of_key('w')} {self.pick('>', '<')} 0.9)"
            other = str(self.draw.randrange(5)) if kind == "constant" else self.whole(1)
            return f"({self.whole(1)} {self.pick(*COMPARED)} {other})"
        one, other = self.truth(depth - 1), self.truth(0)
        return self.pick(f"({one} & {other})", f"({one} | {other})", f"~{one}", one, f"({one} ^ {other})")

    def bias(self, depth: int) -> str:
        """Draw a number to add to logits."""
        kind = odd(self.draw, ["alibi", "distance", "weight", "pair", "table", "type", "choice"], list(ODD_BIASES))
        if kind == "alibi":
            return "(j - i) * 0.25 ** (h + 1)"
        if kind == "distance":
            return self.pick("-0.1 * (i - j).abs()", "-0.2 * (i - j).clamp(max=4)", "(i - j + 9).abs().float().log()")
        if kind == "weight":
            return self.pick("{0}", "{0} * 0.5", "({0} + 1).log()", "{0}.tanh()").format(self.of_key("w"))
        if kind == "pair":
            return f"{self.of_key('w')} * {self.of_query('w')} * 0.2"
        if kind == "table":
            return "table[(i - j).clamp(0, 5)]"
        if kind == "type":
            return f"table[{self.of_key('s')}]"
        if kind == "choice" and depth:
            return f"torch.where({self.truth(0)}, {self.bias(0)}, {self.pick('0.0', '-0.5')})"
        return f"({ODD_BIASES.get(kind, ODD_BIASES['w.mean'])})[:, None, None]"


ODD_BIASES = {
    "w.mean": "w * w.mean(-1, keepdim=True)",
    "w.cumsum": "w.cumsum(-1) * 0.2",
    "w.cummax": "w.cummax(-1).values",
    "w.max": "w * w.max(-1, keepdim=True).values",
    "w.argmax": "(w - w.argmax(-1, keepdim=True)) * j * 0.1",
    "w.norm": "w / w.norm(dim=-1, keepdim=True)",
    "w.roll": "w.roll(1, -1)",
    "w.flip": "w.flip(0)",
    "w.first": "w * w[:, :1]",
    "w.last": "w * w[:, -1:]",
    "w.half": "w[:, j // 2]",
    "w.gather": "w.gather(1, (j // 2).expand(2, -1))",
    "w.sort": "w.sort(-1).values",
    "w.softmax": "w.softmax(-1) * 4",
    "w.pool": "F.avg_pool1d(w[:, None], 3, 1, 1)[:, 0]",
}

ALLOWED = [
    "(j <= i)",
    "(j <= i)",
    "((j <= i) & {p})",
    "((j <= i) & {p})",
    "((j <= i) & ({e} | (i == j)))",
    "((j <= i) & ({e} | (i == j)))",
    "((j <= i) & ({e} | (i == j)) & {p})",
    "(((j <= i) & {e}) | (i == j))",
]
ODD_ALLOWED = [
    "((j < i) | (j == 0))",
    "(j // 3 <= i // 3)",
    "(((j <= i) & {p}) | (i == j))",
    "((j <= i) | {p})",
    "((j <= i) & ({p} | {e} | (i == j)))",
    "((j <= i) | ({e} & (i // 6 == j // 6)))",
    "((j <= i) & ((h > 0) | (i != j) | (j == 0)))",
    "(j <= i + 1)",
    "(j >= 0)",
]
PADDING = ["{0}.bool()", "({0} > 0)", "({0} != 0)", "({0} == 1)", "{0}.to(torch.bool)"]


# -- spellings ---------------------------------------------------------------------------------------------

HEADS = {
    "same": (2, 2, "{0}"),
    "repeated": (4, 2, "{0}.repeat_interleave(2, 1)"),
    "spread": (4, 2, "{0}[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)"),
    "reshaped": (4, 2, "{0}.unsqueeze(2).expand({0}.shape[0], 2, 2, {0}.shape[2], 8).reshape({0}.shape[0], 4, -1, 8)"),
    "one": (2, 1, "{0}.expand(-1, 2, -1, -1)"),
    "one of many": (4, 1, "{0}.repeat_interleave(4, dim=1)"),
}
ODD_HEADS = {
    "exchanged": (2, 2, "{0}[:, [1, 0]]"),
    "tiled": (4, 2, "{0}.repeat(1, 2, 1, 1)"),
    "tiled by expanding": (4, 2, "{0}[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2)"),
    "first": (2, 2, "{0}[:, :1].expand(-1, 2, -1, -1)"),
    "uneven": (4, 2, "{0}[:, [0, 0, 0, 1]]"),
    "flipped": (2, 2, "{0}.flip(1)"),
    "rows": (2, 2, "{0}[[1, 0]]"),
    "rounded": (2, 2, "{0}.to(torch.int32).to(q.dtype)"),
    "dims": (2, 2, "{0}[..., [1, 0, 3, 2, 5, 4, 7, 6]]"),
}
GROW = ["torch.cat([past, new], -2)", "torch.cat([past, new], dim=2)", "torch.cat((past, new), dim=-2)",
        "torch.cat(tensors=[past, new], dim=2)", "torch.concat([past, new], -2)"]  # fmt: skip
ODD_GROW = [
    "torch.cat([past.transpose(1, 2), new.transpose(1, 2)], 1).transpose(1, 2)",
    "torch.cat([past, new], axis=2)",
    "torch.cat([past, new * 1.0], -2)",
    "torch.cat([past, new, new[:, :, :0]], -2)",
    "torch.hstack([past.transpose(1, 2), new.transpose(1, 2)]).transpose(1, 2)",
]
CHANGES = [
    "", "", "", "", "", "a = a * 0.7", "a = a / 1.5", "a = 2.0 * torch.tanh(a / 2.0)", "a = a.float()"
]  # fmt: skip
ODD_CHANGES = [
    "a = a.clamp(-0.1, 0.1)", "a = a.clamp(min=-0.05)", "a = a.relu()", "a = torch.maximum(a, torch.zeros_like(a))",
    "a = a - a.amax(-2, keepdim=True)", "a = a.square()", "a = a - a.mean(-1, keepdim=True)", "a = a * (j + 1)",
    "a = a * torch.tensor([0.5, 2.0] * (q.shape[1] // 2))[:, None, None]", "a = a.round(decimals=1)",
]  # fmt: skip
SOFTMAX = ["a.softmax(-1)", "torch.softmax(a, -1)", "F.softmax(a, dim=-1)",
           "F.softmax(a, dim=-1, dtype=torch.float32)", "(a - a.amax(-1, keepdim=True)).softmax(-1)"]  # fmt: skip
ODD_SOFTMAX = [
    "a.softmax(-2)", "a.softmax(1)", "a.sigmoid() / a.shape[-1]", "torch.exp(a) / torch.exp(a).sum(-1, keepdim=True)",
    "a.softmax(-1) * 0.5", "a.softmax(-1).clamp(max=0.4)", "a.log_softmax(-1).exp()",
]  # fmt: skip


def mentioned(source: str) -> set[str]:
    """Return the names in a piece of source."""
    return set(re.findall(r"[a-z]\w*", source))


def spelled_mask(e: Expressions, bias: str | None, read: set[str], additive_only: bool = False) -> str:
    """Write the assignment of `m`, a bool or additive mask, from `allowed` and a bias that read these names."""
    low = e.pick(*LOWS)
    additive = e.pick(
        f"torch.zeros(()).masked_fill(~allowed, {low})",
        f"torch.where(allowed, 0.0, {low})",
        "(1.0 - allowed.float()) * -1e9",
    )
    if not additive_only and bias is None and e.pick("bool", "bool", "additive") == "bool":
        made = "allowed"
    else:
        made = additive if bias is None else f"{bias} + {additive}"
    shape = ["", ""]
    if not read & {"p", "s", "w"}:
        shape += ["[0]"] if "h" in read else ["[0, 0]", "[0]", ".expand(2, -1, -1, -1)"]
    cut = e.pick(*shape)
    return f"m = ({made}){cut}" if made == "allowed" else f"m = ({made}){cut}.to(q.dtype)"


def by_sdpa(e: Expressions, bias: str | None, read: set[str], gqa: bool) -> list[str]:
    scale = odd(e.draw, ["", "", ", scale=0.3"], [", is_causal=q.shape[2] > 1"], 3)
    mask = "attn_mask=m" if "is_causal" not in scale else "attn_mask=None"
    more = ", enable_gqa=True" if gqa else ""
    return [
        spelled_mask(e, bias, read),
        f"return F.scaled_dot_product_attention(q, k, v, {mask}{scale}{more})",
    ]


def spelled_out(e: Expressions, bias: str | None, read: set[str]) -> list[str]:
    """Write attention as matrix products and a softmax."""
    product = e.pick("q @ k.transpose(-1, -2) * 0.35", "(q * 0.35) @ k.transpose(-2, -1)", "q @ k.mT * 0.35",
                     "torch.matmul(q, k.transpose(2, 3)) / 2.83")  # fmt: skip
    lines = [f"a = {product}", odd(e.draw, CHANGES, ODD_CHANGES)]
    low = e.pick(*LOWS)
    hide = odd(
        e.draw,
        ["a = a + m", "a = m + a", f"a = a.masked_fill(~allowed, {low})", f"a = torch.where(allowed, a, {low})"],
        ["a = torch.where(allowed, a, 0.0)", "a = a.masked_fill(~allowed, 0.0)", "a = a.add(m, alpha=2)",
         f"a = torch.where(~allowed, {low}, a)", f"a = a.masked_fill(mask=~allowed, value={low})"],
    )  # fmt: skip
    if "m" in mentioned(hide):
        lines += [spelled_mask(e, bias, read, additive_only=True), hide]
    else:
        lines += [f"a = a + {bias}" if bias else "", hide]
    softmax = odd(e.draw, SOFTMAX, ODD_SOFTMAX)
    if e.pick("", "", "", "", "sink"):
        lines += [
            "a = torch.cat([a, table[:1].to(a.dtype).expand(q.shape[0], q.shape[1], q.shape[2], 1)], -1)",
            f"return ({softmax})[..., :-1].to(q.dtype) @ v",
        ]
    else:
        lines += [f"return ({softmax}).to(q.dtype) @ v"]
    return [line for line in lines if line]


# -- programs ----------------------------------------------------------------------------------------------


def program(seed: str) -> Program:
    """Return the program of a seed, the same in every process; one in four belongs to a family."""
    chosen = Random(f"family {seed}")
    return of_family(families.member(chosen)) if chosen.randrange(4) == 0 else mixed(Random(seed))


def of_family(made: families.Member) -> Program:
    lines = [f"def attend({', '.join(['q', 'k', 'v', 'i', 'j', *made.names, 'table'])}):"]
    lines += [f"    {line}" for line in ["i = i[None, None]", *made.body]]
    usual: dict[str, Any] = {
        "names": made.names, "pad": "none", "changes": None, "grow": GROW[0], "pieces": PIECES[0],
        "model": (("heads", 2), ("kv_heads", 2)), "policy": ("full",),
    }  # fmt: skip
    return Program(source="\n".join(lines) + "\n", **{**usual, **made.others})


def mixed(draw: Random) -> Program:
    """Draw a program of mostly ordinary parts."""
    e = Expressions(draw)
    allowed = odd(draw, ALLOWED, ODD_ALLOWED, 20)
    if "{p}" in allowed:
        allowed = allowed.replace("{p}", odd(draw, PADDING[:3], PADDING[3:], 20).format(e.of_key("p")))
    if "{e}" in allowed:
        allowed = allowed.replace("{e}", e.truth(draw.choice([0, 0, 1, 1, 2])))
    bias = e.bias(1) if draw.randrange(4) == 0 else None
    table = HEADS if odd(draw, [True], [False]) else ODD_HEADS
    heads, kv_heads, mapped = table[draw.choice(list(table))]
    read = mentioned(f"{allowed} {bias or ''}")
    body = ["i = i[None, None]"]
    body += ["h = torch.arange(q.shape[1])[:, None, None]"] if "h" in read else []
    kept = odd(draw, [False], [True], 5)
    body += ["k, v = k.to(q.dtype), v.to(q.dtype)"] if kept else []
    gqa = heads == 2 * kv_heads and kv_heads == 2 and table is HEADS and draw.random() < 0.5
    sdpa = gqa or draw.random() < 0.5
    body += [] if gqa or mapped == "{0}" else [f"k, v = {mapped.format('k')}, {mapped.format('v')}"]
    body += [f"allowed = {allowed}"]
    body += by_sdpa(e, bias, read, gqa) if sdpa else spelled_out(e, bias, read)
    names = tuple(sorted(mentioned(" ".join(body)) & {"p", "s", "w"}))
    lines = [f"def attend({', '.join(['q', 'k', 'v', 'i', 'j', *names, 'table'])}):", *(f"    {x}" for x in body)]
    model: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
    if odd(draw, [False], [True], 5):
        model["layers"] = 2
    model["dtype"] = odd(draw, ["float32"], ["float64", "bfloat16"], 10)
    if kept:
        model["kept"] = "bfloat16"
    policies = [("streaming", "absolute"), ("h2o",)]
    if odd(draw, [False], [True], 10):
        model["rotary"] = draw.choice(list(INDICES))
        policies += [("streaming", "cache")] * 2
    policy = odd(draw, [("full",)], policies, 30 if "rotary" in model else 12)
    result = Program(
        source="\n".join(lines) + "\n",
        names=names,
        pad=draw.choice(["left", "left", "right", "later"]) if "p" in names else "none",
        changes=odd(draw, [None], list(names) or [None], 6),
        grow=odd(draw, GROW, ODD_GROW, 4),
        pieces=draw.choice(PIECES),
        model=tuple(model.items()),
        policy=policy,
    )
    if draw.randrange(8):
        return result
    return dataclasses.replace(result, model=(*result.model, ("tokens_first", True)), grow="torch.cat([past, new], 1)")


assert DIM == 8  # the programs contain the number
