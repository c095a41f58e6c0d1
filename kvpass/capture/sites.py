"""The attention calls on caches of a canonical graph, one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.fx as fx

from kvpass.capture.canonical import APPEND, ATTENTION, LOG_SUM_EXP, is_attention
from kvpass.fx import alias, walk
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, value
from kvpass.policies.heads import HeadSharding


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One attention call and its cache update.

    Attributes:
        call: the node of `kvpass::attention`.
        query: [B, Hq, q, D].
        key, value: the new tokens', [B, Hkv, q, D].
        past_key, past_value: the placeholders of the past, None when there is none (a prompt).
        grown_key, grown_value: what the model stores again, by `kvpass::append`: past and new tokens together.
        mask: the node of the mask, or None.
        scale: multiplies the products of query and key.
        causal: the call's own is_causal.
        keys_out, values_out: where the graph returns the key and value that the model stores.
        window: how many of the last tokens the model stores, None for all.
        cap, sink_logit: see `kvpass.capture.canonical.attention`.
        lse: the node of `kvpass::log_sum_exp` of the same logits, or None.
        computed: the keys and values that attention sees, [B, Ha, past + q, D], where they or the mask are computed
            from the grown ones; None where attention sees these and nothing else reads them.
        hidden: the logit of what a bool mask hides, if attention is spelled out.
        decomposed: whether attention is spelled out, and not a call of scaled_dot_product_attention.
        shared_by: later attention calls on the same cache, such as those of layers that share it.
        spread: where the other heads are, if other processes have some.
    """

    call: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    past_key: fx.Node | None
    past_value: fx.Node | None
    grown_key: fx.Node
    grown_value: fx.Node
    mask: fx.Node | None
    scale: float
    causal: bool
    keys_out: int
    values_out: int
    window: int | None = None
    cap: float | None = None
    sink_logit: fx.Node | None = None
    lse: fx.Node | None = None
    computed: tuple[fx.Node, fx.Node] | None = None
    hidden: float | None = None
    decomposed: bool = False
    shared_by: tuple[AttentionSite, ...] = ()
    spread: HeadSharding | None = None

    @property
    def all(self) -> tuple[AttentionSite, ...]:
        """The site and those that share its cache."""
        return (self, *self.shared_by)

    @property
    def has_row_masks(self) -> bool:
        """Whether the rows of a batch have masks of their own."""
        return self.mask is not None and value(self.mask).ndim == 4 and expr(value(self.mask).shape[0]) != 1

    def as_computed(self) -> AttentionSite:
        """The same, with what it attends to taken as computed from the cache."""
        return dataclasses.replace(self, computed=self.computed or (self.grown_key, self.grown_value))

    @property
    def attended_key(self) -> fx.Node:
        """The keys that attention sees, [B, Ha or Hkv, past + q, D]."""
        return self.computed[0] if self.computed else self.grown_key

    @property
    def queries(self) -> Any:
        """q, possibly symbolic."""
        return value(self.query).shape[2]

    def moved(self, to: dict[fx.Node, fx.Node]) -> AttentionSite:
        """The same site in a copy of the graph."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        there: dict[str, Any] = {name: to[v] if isinstance(v, fx.Node) else v for name, v in fields.items()}
        there["computed"] = self.computed and (to[self.computed[0]], to[self.computed[1]])
        there["shared_by"] = tuple(other.moved(to) for other in self.shared_by)
        return AttentionSite(**there)


def sites(graph: fx.Graph) -> list[AttentionSite]:
    """The first attention call on each cache, with the others on that cache, which share it.

    If one of them attends to what is computed from the cache, so do all.
    """
    outputs = {node: index for index, node in enumerate(walk.results(graph)) if isinstance(node, fx.Node)}
    found: dict[int, list[AttentionSite]] = {}
    ends = [node for node in graph.nodes if is_attention(node)]
    for call in ends:
        if call.target is ATTENTION:
            site = _site(call, outputs, ends)
            found.setdefault(site.keys_out, []).append(site)
    computed = {index for index, group in found.items() if any(site.computed for site in group)}
    alike = {
        index: [site.as_computed() if index in computed else site for site in group] for index, group in found.items()
    }
    return [dataclasses.replace(first, shared_by=tuple(rest)) for first, *rest in alike.values()]


def _site(call: fx.Node, outputs: dict[fx.Node, int], ends: list[fx.Node]) -> AttentionSite:
    given = arguments(call)
    attended = (given["key"], given["value"])
    grown = attended if all(node.target is APPEND for node in attended) else _appended(call, attended, outputs, ends)
    of_cache = grown == attended and not (given["mask"] and _reads(given["mask"], grown, ends))
    (past_key, key), (past_value, val) = grown[0].args, grown[1].args
    (keys_out, window), (values_out, _) = (stored(node, outputs) or (-1, None) for node in grown)
    beside = {name: given[name] for name in ("query", "mask", "scale", "causal", "cap", "sink_logit", "hidden")}
    lse, computed = _log_sum_exp(call, given), None if of_cache else attended
    return AttentionSite(
        call=call, key=key, value=val, past_key=past_key, past_value=past_value, grown_key=grown[0],  # type: ignore[arg-type]
        grown_value=grown[1], keys_out=keys_out, values_out=values_out, window=window, lse=lse, computed=computed,
        decomposed=given["scores"] is not None, **beside,
    )  # fmt: skip


def arguments(call: fx.Node) -> dict[str, Any]:
    """The arguments of an operator of ours, by name."""
    schema: Any = call.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return defaults | dict(zip(names, call.args, strict=False)) | call.kwargs


def _appended(
    call: fx.Node, attended: tuple[fx.Node, fx.Node], outputs: dict[fx.Node, int], ends: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """The two caches that keys and values are computed from, in the order in which the model's code grows them."""
    near = alias.behind(list(attended), ends, call)
    first, second = [
        node for node in call.graph.nodes if node in near and node.target is APPEND and stored(node, outputs)
    ]
    return first, second


def _reads(mask: fx.Node, grown: tuple[fx.Node, fx.Node], ends: list[fx.Node]) -> bool:
    """Whether a mask is computed from what is cached in this layer."""
    return not ancestors(mask, ends).isdisjoint(grown)


def _log_sum_exp(call: fx.Node, given: dict[str, Any]) -> fx.Node | None:
    same = ("query", "key", "mask", "scale", "cap", "hidden")
    sums = [node for node in given["query"].users if node.target is LOG_SUM_EXP]
    return next((node for node in sums if all(arguments(node)[name] == given[name] for name in same)), None)


def stored(grown: fx.Node, outputs: dict[fx.Node, int]) -> tuple[int, int | None] | None:
    """Where the graph returns a grown cache, and of how many of its last tokens if not of all."""
    if grown in outputs:
        return outputs[grown], None
    for user in grown.users:
        count = _last_tokens(user)
        if user in outputs and count is not None:
            return outputs[user], count
    return None


def _last_tokens(node: fx.Node) -> int | None:
    """n, if a node is x[:, :, -n:] of [B, H, S, D]."""
    if walk.name_of(node) != "getitem" or not isinstance(node.args[1], tuple):
        return None
    whole = slice(None)
    before, along, after = node.args[1][:2], node.args[1][2:3], node.args[1][3:]
    cut: Any = along[0] if along else whole
    others = all(part == whole for part in (*before, *after))
    if not others or not isinstance(cut, slice) or not isinstance(cut.start, int) or cut.start >= 0:
        return None
    return -cut.start if cut.stop is None and cut.step is None else None
