"""Define a hand-written decoder for Llama weights, with a cache [B, S, H, D] or [B, H, S, D]."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
LOWEST = -1e30


@dataclasses.dataclass
class Output:
    logits: Tensor
    past_key_values: tuple[Pair, ...]


def sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True).transpose(1, 2)


def repeated(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = q.movedim(1, 2), k.movedim(2, 1), v.permute(0, 2, 1, 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).permute(0, 2, 1, 3)


def products(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (x[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for x in (k, v))
    logits = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
    return (logits.masked_fill(~allowed, LOWEST).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def equations(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    logits = torch.einsum("bqhd,bshd->bhqs", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqs,bshd->bqhd", logits.masked_fill(~allowed, LOWEST).softmax(-1), v)


ATTENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": sdpa, "repeated": repeated, "products": products, "equations": equations,
}  # fmt: skip
"""(query [B, q, Hq, D], key and value [B, S, H, D], allowed [B or 1, 1, q, S]) -> [B, q, Hq, D]."""


def halves(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate x [B, q, H, D] by angles [B or 1, q, 1, D / 2], like Llama in transformers."""
    cos, sin = (torch.cat([each, each], -1).to(x.dtype) for each in (angle.cos(), angle.sin()))
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


def complexes(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs of neighbours, like Meta's Llama; the angles may already be complex numbers."""
    number = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turn = angle if angle.is_complex() else torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(number * turn).flatten(3).type_as(x)


ROTATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"halves": halves, "complexes": complexes}


def placed(x: Tensor, dim: int) -> Tensor:
    """Convert between [B, S, H, D] and the order of the cache, whose token dimension is `dim`."""
    return x if dim == 1 else x.transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Way:
    """Options for how the model stores and reads keys and values.

    Attributes:
        key_dim, value_dim: token dimensions of keys and values in the cache.
        attend, rotate: names in `ATTENDS` and `ROTATES`.
        empty: whether a prompt concatenates an empty past.
        late: whether keys are normalized after they are read.
        table: precomputed table that is sliced by the number of cached tokens: "angles", "pair" of cosines and sines,
            or "complex" numbers; "" computes angles from position ids.
    """

    key_dim: int = 1
    value_dim: int = 1
    attend: str = "sdpa"
    rotate: str = "halves"
    empty: bool = False
    late: bool = False
    table: str = ""


class OwnLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, eps: float, way: Way) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.way = heads, kv_heads, width // heads, way
        self.norm, self.norm_2 = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        kv_width = kv_heads * self.dim
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, kv_width, bias=False), nn.Linear(width, kv_width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, angle: Tensor, allowed: Tensor, past: Pair | None) -> tuple[Tensor, Pair]:
        """Return the hidden states and the cache; `angle` is [B or 1, q, D / 2]."""
        way, rotate, n = self.way, ROTATES[self.way.rotate], self.norm(x)
        q = self.q(n).view(*x.shape[:2], self.heads, self.dim)
        k = placed(self.k(n).view(*x.shape[:2], self.kv_heads, self.dim), way.key_dim)
        q, k = rotate(q, angle[:, :, None]), rotate(k, angle.unsqueeze(3 - way.key_dim))
        v = placed(self.v(n).view(*x.shape[:2], self.kv_heads, self.dim), way.value_dim)
        if past is not None:
            k, v = torch.cat([past[0], k], way.key_dim), torch.cat([past[1], v], way.value_dim)
        keys, values = placed(k, way.key_dim), placed(v, way.value_dim)
        keys = F.rms_norm(keys, keys.shape[-1:]) if way.late else keys
        x = x + self.out(ATTENDS[way.attend](q, keys, values, allowed).flatten(2))
        n = self.norm_2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n)), (k, v)


class OwnLlama(nn.Module):
    """A decoder: forward(ids [B, q], ...) returns logits and a tuple of keys and values.

    Without position ids all rows count tokens from the same start.
    """

    def __init__(
        self,
        way: Way,
        *,
        vocabulary: int = 128,
        width: int = 32,
        layers: int = 1,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int = 48,
        theta: float = 1e4,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.kv_heads, self.dim = way, kv_heads, width // heads
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width, eps)
        self.layers = nn.ModuleList(OwnLayer(width, heads, kv_heads, hidden, eps, way) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("frequency", theta ** -torch.arange(0, 1, 2 / self.dim))
        self.add_tables()
        self.eval()

    def add_tables(self, count: int = 128) -> None:
        """Precompute the tables that `Way.table` names, from the rotary frequencies."""
        angles = torch.arange(count)[:, None] * self.frequency.float()
        tables = {"angles": angles, "cos": angles.cos(), "sin": angles.sin()}
        if self.way.table == "complex":
            tables = {"turn": torch.polar(torch.ones_like(angles), angles)}
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def rows_of_tables(self, start: int, stop: int) -> Tensor:
        """Return the rotary angles [1, q, D / 2] of positions, or the complex numbers with these angles."""
        if self.way.table == "complex":
            return self.turn[start:stop][None]
        if self.way.table == "pair":
            return torch.atan2(self.sin[start:stop], self.cos[start:stop])[None]
        return self.angles[start:stop][None]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: tuple[Pair, ...] | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> Output:
        way, past = self.way, past_key_values
        if past is None and way.empty:
            past = tuple(self._empty(input_ids) for _ in self.layers)
        seen = 0 if past is None else past[0][0].shape[way.key_dim]
        i = torch.arange(seen, seen + input_ids.shape[1])
        j = torch.arange(seen + input_ids.shape[1])
        allowed = (j <= i[:, None])[None, None]
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None, None] != 0)
        if way.table:
            angle = self.rows_of_tables(seen, seen + input_ids.shape[1])
        else:
            angle = (i[None] if position_ids is None else position_ids)[..., None] * self.frequency.float()
        x, present = self.embed(input_ids), []
        for index, layer in enumerate(self.layers):
            x, pair = layer(x, angle, allowed, None if past is None else past[index])
            present.append(pair)
        return Output(self.head(self.norm(x[:, -logits_to_keep:])), tuple(present))

    def _empty(self, ids: Tensor) -> Pair:
        shapes = ([len(ids), 0, self.kv_heads, self.dim] for _ in range(2))
        key, value = (torch.empty(shape, dtype=self.head.weight.dtype) for shape in shapes)
        return placed(key, self.way.key_dim), placed(value, self.way.value_dim)


_NAMES = {
    "input_layernorm": "norm", "post_attention_layernorm": "norm_2", "self_attn.q_proj": "q", "self_attn.k_proj": "k",
    "self_attn.v_proj": "v", "self_attn.o_proj": "out", "mlp.gate_proj": "gate", "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}  # fmt: skip


def of_llama(model: Any, way: Way) -> OwnLlama:
    """Return a decoder with the weights of a `LlamaForCausalLM` of transformers."""
    config = model.config
    result = OwnLlama(
        way,
        vocabulary=config.vocab_size,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        hidden=config.intermediate_size,
        theta=config.rope_parameters["rope_theta"],
        eps=config.rms_norm_eps,
    ).to(model.dtype)
    weights = {"embed.weight": model.model.embed_tokens.weight, "norm.weight": model.model.norm.weight}
    weights |= {"head.weight": model.lm_head.weight}
    for index, layer in enumerate(model.model.layers):
        for theirs, ours in _NAMES.items():
            weights[f"layers.{index}.{ours}.weight"] = layer.get_submodule(theirs).weight
    result.load_state_dict(weights, strict=False)
    result.frequency = model.model.rotary_emb.inv_freq.float()
    result.add_tables(1024)
    return result
