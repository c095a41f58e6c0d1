"""Draw random programs, each aimed at one class of mistakes: a few lines of attention and their calls."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

LOWS = ["torch.finfo(torch.float32).min", "-1e9", "-1e9", "-1e4", "-torch.inf"]
EMPTY = "((j < i) & (j // 3 == i // 3))"  # the first of every three tokens attends to nothing
ALLOWED = ["(j <= i)", "(j <= i)", EMPTY, "((j <= i) & (i - j < 4))"]
CROSSING = [(62, 1, 1, 1, 1, 3), (60, 4, 1, 1), (5, 1, 1, 3, 1), (63, 3, 1)]
"""Lengths of calls that end before, at and after 64 tokens."""
FEW_CALLS = [(5, 1, 1, 3, 1), (1, 1, 1, 1, 1), (4, 2, 1, 1)]


@dataclasses.dataclass(frozen=True)
class Member:
    """A program of a family.

    Attributes:
        body: lines of `attend`, see `tests.adversary.models.Attend`; `i` is [1, 1, q, 1].
        names: the inputs for each token that it takes.
        others: fields of `tests.adversary.generator.Program` that differ from the defaults.
    """

    body: list[str]
    names: tuple[str, ...] = ()
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


def member(draw: Random) -> Member:
    """Draw a program from one of the families."""
    return draw.choice([of_logits, of_logits, of_logits, of_indices, of_parts, of_windows, of_rotations])(draw)


# -- order and form of operations on logits ----------------------------------------------------------------

FILLS = [
    "a = a.masked_fill(~{e}, {low})",
    "a = a.masked_fill(mask=~{e}, value={low})",
    "a = torch.where({e}, a, {low})",
    "a = torch.where(condition=~{e}, input={low}, other=a)",
    "a = a.where({e}, {low})",
    "a = a + torch.zeros(()).masked_fill(~{e}, {low})",
    "a = torch.add(a, other=torch.zeros_like({e}, dtype=a.dtype).where({e}, {low}))",
    "a = a.sub(torch.zeros(()).masked_fill(~{e}, -({low})))",
]
CHANGES = ["a = a * 0.5", "a = a.div(2.0)", "a = torch.mul(a, other=2.0)", "a = a + 0.1 * (j - i)",
           "a = torch.sub(a, 0.1 * (i - j), alpha=2)", "a = a.add(other=0.1 * (j - i))"]  # fmt: skip
ODD_CHANGES = ["a = a * 1e-4", "a = a / 1e4", "a = torch.div(a, 0.5, rounding_mode='floor')", "a = a.clamp(min={low})",
               "a = a.clamp_min(min={low})", "a = torch.max(a, torch.tensor({low}))", "a = a * 0.5",
               "a = a.masked_fill(i % 3 == 1, {low})"]  # fmt: skip
JOINED = "a = torch.cat([a, table[:1].to(a.dtype).expand(q.shape[0], q.shape[1], q.shape[2], 1)], -1)"
SLOPES = {
    "four": ["[0.5, 0.1, 0.2, 0.3])[:, None, None]"],
    "five": ["[0.5, 0.1]).view(2, 1, 1)", "[0.5, 0.1]).view(2, 1, 1, 1)", "[0.5, 0.1, 0.2, 0.3]).view(2, 2, 1, 1)"],
    "joined": ["[0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8])[:, None, None]"],
}


def of_logits(draw: Random) -> Member:
    """Draw masks, biases, factors and sinks in any order, on logits of three, four or five dimensions."""
    shape = draw.choice(["four", "four", "five", "joined"])
    lines = [draw.choice(FILLS), *draw.choices(CHANGES, k=draw.randrange(3))]
    lines += [draw.choice(FILLS)] if draw.randrange(4) == 0 else []
    lines += [draw.choice(ODD_CHANGES)] if draw.randrange(4) == 0 else []
    draw.shuffle(lines)
    if draw.randrange(4) == 0:
        lines.insert(
            draw.randrange(len(lines) + 1), f"a = a + torch.tensor({draw.choice(SLOPES[shape])} * (j - i[0, 0])"
        )
    lines = [line.format(e=draw.choice(ALLOWED), low=draw.choice(LOWS)) for line in lines]
    sink = shape == "four" and draw.randrange(4) == 0
    if sink:  # sometimes in the middle instead of at the end
        lines.insert(draw.choice([len(lines)] * 3 + [draw.randrange(len(lines) + 1)]), JOINED)
    repeated = "k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)"
    first = {
        "four": [repeated, "a = q @ k.mT * 0.35"],
        "five": ["a = q.view(q.shape[0], 2, 2, q.shape[2], 8) @ k[:, :, None].mT * 0.35"],
        "joined": [repeated, "a = (q @ k.mT * 0.35).flatten(0, 1)"],
    }[shape]
    last = {
        "four": "return a.softmax(-1)[..., :-1] @ v" if sink else "return a.softmax(-1) @ v",
        "five": "return (a.softmax(-1) @ v[:, :, None]).view(q.shape)",
        "joined": "return a.softmax(-1).view(q.shape[0], 4, q.shape[2], -1) @ v",
    }[shape]
    others = {"model": (("heads", 4), ("kv_heads", 2)), "policy": draw.choice([("full",), ("full",), ("h2o",)])}
    flat = ["i = i[0]"] if shape == "joined" else []
    return Member([*flat, *first, *lines, last], others={**others, "pieces": draw.choice(FEW_CALLS)})


# -- dtypes of indices -------------------------------------------------------------------------------------

DTYPES = ["bfloat16", "float16", "int8", "uint8", "int16", "int32", "float32"]
COUNTED = [
    "torch.arange(k.shape[2], dtype={d})",
    "j.to({d})",
    "torch.ones(k.shape[2], dtype={d}).cumsum(0)",
    "torch.ones(k.shape[2]).cumsum(-1, dtype={d})",
    "torch.arange(k.shape[2], dtype={d}).add(other=1)",
]
LONG = [(126, 1, 3, 1), (254, 1, 3, 1), (300, 1, 1)]


def of_indices(draw: Random) -> Member:
    """Draw a bias by key index, in a dtype that cannot hold all indices."""
    index = draw.choice(COUNTED).format(d=f"torch.{draw.choice(DTYPES)}")
    bias = draw.choice(["0.05 * (j - {x}).float()", "0.02 * ({x} - i)", "table[{x}.long() % 6]", "0.01 * {x}"])
    return Member(
        [
            "a = q @ k.mT * 0.35",
            f"a = a + {bias.format(x=index)}",
            "return a.masked_fill(j > i, -1e9).softmax(-1) @ v",
        ],
        others={"pieces": draw.choice(LONG)},
    )


# -- parts of caches, and lengths --------------------------------------------------------------------------

PARTS = [
    "k, v = k[:, :, -64:], v[:, :, -64:]",
    "k, v = k[:, :, :64], v[:, :, :64]",
    "k, v = (k[:, :, -64:], v[:, :, -64:]) if k.shape[2] > 64 else (k, v)",
    "k, v = k.narrow(2, 0, min(64, k.shape[2])), v.narrow(2, 0, min(64, v.shape[2]))",
    "k, v = k[:, :, : k.shape[2]], v[:, :, : v.shape[2]]",
]


def of_parts(draw: Random) -> Member:
    """Draw attention to a part of the cache, with a bound that some of the calls cross."""
    lines = [draw.choice(PARTS), "return F.scaled_dot_product_attention(q, k, v)"]
    return Member(lines, others={"pieces": draw.choice(CROSSING)})


WINDOWS = [
    "torch.cat([past, new], -2)[:, :, -12:]",
    "torch.cat([past, new], -2)[:, :, -64:]",
    "(lambda x: x[:, :, -12:] if x.shape[2] > 12 else x)(torch.cat([past, new], -2))",
    "(lambda x: x[:, :, -64:] if x.shape[2] > 64 else x)(torch.cat([past, new], -2))",
]


def of_windows(draw: Random) -> Member:
    """Draw a cache of the last tokens, whose window begins in the prompt or after it."""
    lines = ["return F.scaled_dot_product_attention(q, k, v)"]
    pieces = draw.choice([(10, 1, 1, 1, 1, 1), (14, 1, 1, 1), (5, 1, 1), (62, 1, 1, 1, 1)])
    return Member(lines, others={"grow": draw.choice(WINDOWS), "pieces": pieces})


# -- rotary embeddings -------------------------------------------------------------------------------------


def of_rotations(draw: Random) -> Member:
    """Draw rotations by rank with padding anywhere, or with factors that depend on all tokens of a call."""
    lines = ["m = (j <= i) & p[:, None, None, :].bool()", "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"]
    rotary = draw.choice(["[1, 1, q, 1]", "[B, 1, q, 1]", "long", "long"])
    return Member(
        lines,
        names=("p",),
        others={
            "pad": draw.choice(["left", "right", "later", "none"]),
            "model": (("heads", 2), ("kv_heads", 2), ("rotary", rotary)),
            "policy": ("streaming", draw.choice(["cache", "cache", "absolute"])),
            "pieces": draw.choice([*FEW_CALLS[:1], (5, 1, 1, 1, 1), (7, 1, 1)]),
        },
    )
