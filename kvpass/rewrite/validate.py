"""Translation validation: what a step graph became is held against the model's own graph before anything runs on it.

Both are run once, uncompiled, on the same small conversation that is made up: some tokens with random keys and values,
the arguments of the call at hand cut to that length.  In the model's graph the past lies in order; in the rewritten
one the same rows lie in slots that are drawn at random among free ones.  Nothing is evicted, so whatever the policy,
all outputs must be equal.  A difference means that the graph was read wrongly, and is refused.

A model may answer a change in the last place with a larger one, as where activations are rounded to whole numbers, or
tokens go to the expert of the highest score.  Where outputs differ, the model's own graph is run with the past changed
by its rounding, and what that changes is no error of ours.

What is proven about a graph (`kvpass.capture`) holds for all arguments; this holds for one, but assumes nothing.

Where rows are stored in fewer bits than the model has, no step can equal the model's: the new row is rounded when it
is written.  So the graph is rewritten twice.  With rows as the model makes them it is held against the model's, as
strictly as any; with rows as they are stored it is held against that, more loosely.  The made-up rows are such as the
format holds exactly, so that only the new token's differ between the two.

Likewise a policy that changes logits (sage, buzz with `log_n`) is held against the model without what it does to them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import compat, graphs
from kvpass.capture.rotary import find_rotary
from kvpass.capture.sites import AttentionSite
from kvpass.errors import UnsupportedGraph
from kvpass.graphs import Sizes, value
from kvpass.layer.slots import FREE, Layout, Slots, first_state
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.result import StepRewrite
from kvpass.rewrite.rotary_slice import RotarySlice
from kvpass.storage import KVDtype, Rows, Sections, base_of, plain

TOKENS = 61
"""Most tokens of the conversation."""
FEW = 7
"""As many are made up where the call at hand has seen fewer: of one token nothing shows in which order they are."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""By how much of the largest number outputs may differ; those of half precision are compared on average."""
ON_AVERAGE = 0.1
NUDGES, ULPS = 4, 8
"""How often the past is changed to see what rounding does to a model's own outputs, and by how many units in the last
place."""
ROUNDED: dict[str, float] = {"int8": 0.1, "int4": 0.5}
"""By how much of the mean number outputs may differ on average where the new token's rows are rounded."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step graph, what it became, and the call at hand.

    Attributes:
        gm: the model's own graph.
        sites: those of its canonical form.
        context, rewrite: what the passes left, and the result.
        layouts, slots: of each layer, at hand; nothing is written to them.
        arguments: of the call.
        pasts: for each layer the places of its keys and values among these.
        told: the inputs that tell padding, and their places.
        seen: the tokens before the call.
        kv_dtype: the made-up rows are such as are stored so without a loss.
        plain: the same with rows stored as the model makes them, if they are not.
    """

    gm: fx.GraphModule
    sites: Sequence[AttentionSite]
    context: StepContext
    rewrite: StepRewrite
    layouts: Sequence[Layout]
    slots: Sequence[Slots]
    arguments: tuple[Any, ...]
    pasts: Sequence[tuple[int, int]]
    told: dict[fx.Node, int]
    seen: int
    kv_dtype: KVDtype | None = None
    plain: Step | None = None

    @property
    def sizes(self) -> Sizes:
        return self.context.sizes

    @property
    def ranked(self) -> bool:
        return self.layouts[0].ranked


@dataclasses.dataclass(frozen=True)
class Validation:
    """What came of it.

    Attributes:
        seconds: how long it took.
        skipped: why it was left out; None if both graphs were run and agree.
    """

    seconds: float
    skipped: str | None = None


def validate(step: Step) -> Validation:
    """Run both graphs and compare.

    Raises:
        UnsupportedGraph: they differ; names the first attention call that does.
    """
    began = time.perf_counter()
    count = _tokens(step)
    why = _unfit(step, count)
    if why is None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            why = _compare(step, count)
    return Validation(time.perf_counter() - began, why)


def _tokens(step: Step) -> int:
    """How many tokens there are before those of the call: as fit into the slots of every layer.

    More than there are only where no layer would leave some of them out.  Where layers store their last tokens only,
    at least so many that they have begun to.
    """
    windows = [window for window in step.context.windows if window is not None]
    if windows:
        return min(step.seen, max(windows) + FEW) if _past_lengths(step) else step.seen
    more = all(site.window is None for site in step.sites) and _serves(step, FEW)
    return min(max(step.seen, FEW) if more else step.seen, _room(step), TOKENS)


def _room(step: Step) -> int:
    """The tokens that fit into the slots of each layer whose past is held whole."""
    whole = [slots.capacity for slots, window in zip(step.slots, step.context.windows, strict=True) if window is None]
    return min(whole, default=step.seen + 1) - step.context.decodes


def _serves(step: Step, count: int) -> bool:
    """Whether Dynamo's guards leave the graph for so many tokens in every past that is held whole."""
    return all(compat.may_be(length, count) for length in _past_lengths(step))


def _past_lengths(step: Step) -> list[Any]:
    """The lengths of the layers' pasts that are held whole, as the graph has them."""
    whole = [site for site, window in zip(step.sites, step.context.windows, strict=True) if window is None]
    return [value(past).shape[2] for site in whole for past in (site.past_key, site.past_value)]  # type: ignore[arg-type]


def _unfit(step: Step, count: int) -> str | None:
    """Why a conversation of so many tokens cannot be made up."""
    for slots, window in zip(step.slots, step.context.windows, strict=True):
        if window is not None and window > slots.capacity - step.context.decodes:
            return "there are fewer slots than a layer's own window has tokens"
    if count > _room(step):
        return "a layer's own window is longer than there are slots in others"
    if count < 1 or (count != step.seen and not _serves(step, count)):
        return "the graph does not serve a length that fits into the slots"
    return None


def _compare(step: Step, count: int) -> str | None:
    why = _compare_plain(step.plain or step, count)
    if why is None and step.plain is not None:
        _compare_stored(step, step.plain, count)
    return why


def _compare_stored(step: Step, plain: Step, count: int) -> None:
    """Hold the graph that stores rows in its own format against the one that stores them as they are."""
    ours, wanted = (each.rewrite.gm(*_Conversation(each, count).flat()) for each in (step, plain))
    for place, there in enumerate(step.rewrite.outputs):
        if there is None or not isinstance(wanted[there], Tensor) or not wanted[there].is_floating_point():
            continue
        by = _on_average(ours[there], wanted[there])
        if by > max(ROUNDED[base_of(layout.kv_dtype)] for layout in step.layouts if layout.kv_dtype):
            _refuse(step, count, place, by)


def _compare_plain(step: Step, count: int) -> str | None:
    made = _Conversation(step, count)
    try:
        theirs = step.gm(*made.arguments())
    except Exception as error:  # the model's own code, on arguments that are made up
        return f"the model's own graph does not run on a made-up conversation: {error}"
    try:
        ours = step.rewrite.gm(*made.flat())
    except Exception as error:
        line = graphs.source_line(step.sites[0].call)
        raise UnsupportedGraph(f"{line}: what the model's graph was rewritten to does not run: {error}") from error
    places = [place for place, there in enumerate(step.rewrite.outputs) if there is not None]
    apart = [place for place in places if not agree(ours[step.rewrite.outputs[place]], theirs[place])]
    moved = _moved_by_rounding(step, made, theirs) if apart else []
    for place in apart:
        by = difference(ours[step.rewrite.outputs[place]], theirs[place])
        if not by <= min(2 * moved[place], ON_AVERAGE):
            _refuse(step, count, place, by)
    return None


def _moved_by_rounding(step: Step, made: _Conversation, theirs: Sequence[Any]) -> list[float]:
    """By how much each output of the model's own graph changes, at most, when the past changes in its last places."""
    moved = [0.0] * len(theirs)
    for number in range(NUDGES):
        again = step.gm(*made.nudged(number))
        changes = [_change(one, other) for one, other in zip(again, theirs, strict=True)]
        moved = [max(most, change) for most, change in zip(moved, changes, strict=True)]
    return moved


def _change(one: Any, other: Any) -> float:
    comparable = isinstance(other, Tensor) and other.is_floating_point() and other.numel() and one.shape == other.shape
    return difference(one, other) if comparable else 0.0


def agree(ours: Any, theirs: Any) -> bool:
    """Whether two outputs are equal as far as their dtype lets them be."""
    if not isinstance(theirs, Tensor) or not theirs.is_floating_point() or not theirs.numel():
        return True
    if ours.shape != theirs.shape:
        return False
    return difference(ours, theirs) <= TOLERANCE.get(theirs.dtype, ON_AVERAGE)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference in shares of the largest number; in half precision the mean one of the mean number."""
    known = theirs.isfinite()
    if not torch.equal(known, ours.isfinite()):
        return float("inf")
    apart, size = (ours - theirs)[known].abs().double(), theirs[known].abs().double()
    if not apart.numel():
        return 0.0
    if theirs.dtype in TOLERANCE:
        return float(apart.max() / size.max().clamp(min=1e-6))
    return _on_average(ours, theirs)


def _on_average(ours: Tensor, theirs: Tensor) -> float:
    """The mean difference in shares of the mean number."""
    known = theirs.isfinite() & ours.isfinite()
    apart, size = (ours - theirs)[known].abs().double(), theirs[known].abs().double()
    return float(apart.mean() / size.mean().clamp(min=1e-6)) if apart.numel() else 0.0


def _refuse(step: Step, count: int, place: int, by: float) -> None:
    line = _first_different(step, count) or graphs.source_line(step.sites[0].call)
    raise UnsupportedGraph(
        f"{line}: the rewritten graph is not the model's: on a made-up conversation of {count} tokens output {place} "
        f"differs by {by:.1e} of its size, and this is the first attention call that does; the model is read wrongly "
        "by kvpass, which is a defect worth reporting; it cannot run on a bounded cache"
    )


def _first_different(step: Step, count: int) -> str | None:
    """The line of the first attention call whose output is not the model's."""
    made = _Conversation(step, count)
    calls = [each for site in step.sites for each in site.all]
    replaced = {each.call.name: step.context.replaced.get(each.call.name) for each in calls}
    theirs = _values(step.gm, {_in_model(each.call) for each in calls}, made.arguments())
    ours = _values(step.rewrite.gm, {node.name for node in replaced.values() if node is not None}, tuple(made.flat()))
    order = {node.name: i for i, node in enumerate(step.gm.graph.nodes)}
    for each in sorted(calls, key=lambda site: order[_in_model(site.call)]):
        node = replaced[each.call.name]
        if node is not None and not agree(ours[node.name], theirs[_in_model(each.call)]):
            return graphs.source_line(each.call)
    return None


def _in_model(call: fx.Node) -> str:
    """The name of the node of the model's own graph that an attention call stands for."""
    return str(call.meta["kvpass_stands_for"])


def _values(gm: fx.GraphModule, names: set[str], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What some nodes of a graph give."""
    found: dict[str, Any] = {}

    class Listening(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.name in names:
                found[n.name] = result.clone()
            return result

    Listening(gm).run(*arguments)
    return found


def _copied(argument: Any) -> Any:
    """A copy of a tensor that a graph may write to."""
    written = isinstance(argument, Tensor) and not isinstance(argument, torch.nn.Parameter)
    return argument.clone() if written else argument


class _Conversation:
    """A made-up conversation of `count` tokens, the same every time it is made."""

    def __init__(self, step: Step, count: int) -> None:
        self.step, self.count = step, count
        self.drawn = torch.Generator().manual_seed(count)
        self.batch = step.layouts[0].batch
        self.holders = graphs.placeholders(step.gm.graph)
        self.cut = step.seen - count
        self.valid = self._valid()  # bool [B, L]
        self.rotated: dict[Any, Tensor] = {}
        self.held = [min(count, window or count) for window in step.context.windows]
        self.stored = [self._stored(layout, held) for layout, held in zip(step.layouts, self.held, strict=True)]
        self.plain = self._plain()

    def _valid(self) -> Tensor:
        """Up to two tokens on the left of a row are padding, where that is known and no one gives positions."""
        valid = torch.ones(self.batch, self.count, dtype=torch.bool)
        if self.step.context.telling.known and not (self.step.ranked and self.step.rewrite.positions):
            for row in range(self.batch):
                valid[row, : (row + 1) % (min(self.count, 2) + 1)] = False
        return valid

    def _stored(self, layout: Layout, held: int) -> tuple[Rows, Rows]:
        """Keys and values [B, Hkv, held, D] as slots hold them; the same for layers that are alike."""
        fine = dataclasses.replace(layout, kv_dtype=self.step.kv_dtype)
        drawn = torch.Generator().manual_seed(layout.key_dim)
        shape = (layout.batch, layout.heads, held)
        pair = [torch.randn(*shape, dim, generator=drawn) for dim in (layout.key_dim, layout.value_dim)]
        key, value = (x.to(layout.device, layout.dtype) for x in pair)
        rows = Rows.of(fine.key_format, key), Rows.of(fine.value_format, value)
        if layout.kv_dtype is None:
            return plain(rows[0].read_as(layout.dtype)), plain(rows[1].read_as(layout.dtype))
        return rows

    # -- the model's own graph ---------------------------------------------------------------------------------------

    def _plain(self) -> tuple[Any, ...]:
        """The arguments of the call, cut, without the past."""
        made = [self._cut(i, node) for i, node in enumerate(self.holders)]
        for node, place in self.step.told.items():
            if node in self._known():
                made[place] = self._padded(node, made[place])
        for place in self.step.rewrite.positions:
            made[place] = self._counted(made[place])
        return tuple(made)

    def _known(self) -> set[fx.Node]:
        names = {node.name for node in self.step.context.telling.known}
        return {node for node in self.step.told if node.name in names}

    def _cut(self, place: int, node: fx.Node) -> Any:
        given, sizes = self.step.arguments[place], self.step.sizes
        if isinstance(given, int) and not isinstance(given, bool):
            return given - self.cut if sizes.grows(value(node)) else given
        if not isinstance(given, Tensor) or isinstance(given, torch.nn.Parameter) or place in self._pasts():
            return given
        for dim, size in enumerate(value(node).shape):
            if sizes.grows(size):
                given = given.index_select(dim, self._chosen(given.shape[dim]).to(given.device))
        return given.clone()

    def _pasts(self) -> set[int]:
        return {place for pair in self.step.pasts for place in pair}

    def _chosen(self, size: int) -> Tensor:
        """Which of the entries for all tokens are taken: some of those that went before, and all that are new.

        Where too few went before, theirs come several times.
        """
        seen, drawn = self.step.seen, torch.Generator().manual_seed(size)
        times = -(-self.count // seen)
        before = torch.cat([torch.randperm(seen, generator=drawn) for _ in range(times)])[: self.count]
        return torch.cat([before.sort().values, torch.arange(seen, size)])

    def _padded(self, node: fx.Node, column: Tensor) -> Tensor:
        """An input that tells padding, for this conversation; what comes is real."""
        made = torch.ones_like(column)
        valid = self.valid if column.ndim == 2 and column.shape[0] == self.batch else self.valid[-1:]
        made[..., : self.count] = valid.view(*column.shape[:-1], self.count).to(column.device, column.dtype)
        return made

    def _counted(self, positions: Tensor) -> Tensor:
        return torch.arange(self.count, self.count + self.step.rewrite.queries).expand(positions.shape).to(positions)

    def arguments(self) -> tuple[Any, ...]:
        """Those of the model's own graph, with a past."""
        return self._with_past(self._rotated)

    def nudged(self, number: int) -> tuple[Any, ...]:
        """Those with every number of the past changed by a few units in the last place."""
        made, drawn = list(self.arguments()), torch.Generator().manual_seed(number)
        for place in self._pasts():
            noise = torch.randn(made[place].shape, generator=drawn).to(made[place])
            made[place] = made[place] * (1 + ULPS * torch.finfo(noise.dtype).eps * noise)
        return tuple(made)

    def _with_past(self, key_of: Callable[[int, Tensor], Tensor]) -> tuple[Any, ...]:
        """The arguments with a past, whose keys are made of a layer's number and its stored ones."""
        made = [_copied(x) for x in self.plain]
        for i, (key_place, value_place) in enumerate(self.step.pasts):
            key, val = (rows.read() for rows in self.stored[i])
            made[key_place] = self._apart(key_of(i, key), self.step.arguments[key_place])
            made[value_place] = self._apart(val, self.step.arguments[value_place])
        return tuple(made)

    def _apart(self, rows: Tensor, like: Tensor) -> Tensor:
        """[B, 1, L, h * D] as the model's cache has it, [B, h, L, D]; see `kvpass.rewrite.computed_keys.joined`."""
        return torch.unflatten(rows[:, 0], -1, (like.shape[1], -1)).transpose(1, 2) if self._joins(rows, like) else rows

    def _joins(self, rows: Tensor, like: Tensor) -> bool:
        return rows.shape[1] != like.shape[1]

    def _rotated(self, layer: int, key: Tensor) -> Tensor:
        """Keys as the model caches them: rotated, where slots hold them before."""
        if not self.step.ranked:
            return key
        rotary = self.step.context.rotaries[layer].at_hand()
        nodes = [*rotary.angles.bound, *rotary.rotate.bound]
        follows = self._positions_follow_padding(layer)
        kind = (rotary.key, tuple(node.name for node in nodes), key.shape, key.dtype, follows)
        if kind not in self.rotated:
            self.rotated[kind] = self._rotate(rotary, key, follows, self._evaluated(nodes))
        return self.rotated[kind]

    def _positions_follow_padding(self, layer: int) -> bool:
        """Whether the model's own code counts real tokens, and not places in the padded sequence."""
        site = self.step.sites[layer]
        found = None if self.valid.all() else find_rotary(site.call.graph.owning_module, site)  # type: ignore[arg-type]
        return found is not None and not self.step.told.keys().isdisjoint(graphs.ancestors(found.position))

    def _rotate(self, rotary: RotarySlice, key: Tensor, follows: bool, bound: list[Any]) -> Tensor:
        table = rotary.table(self.count, bound[: len(rotary.angles.bound)], key.device)
        valid = self.valid if follows else torch.ones_like(self.valid)
        rank = (valid.cumsum(-1) - 1).clamp(min=0)[:, None].to(key.device)
        return torch.cat(rotary.on_slots(Sections((key,)), rank, table, bound[len(rotary.angles.bound) :]), -1)

    def _evaluated(self, nodes: list[fx.Node]) -> list[Any]:
        """What nodes give that depend on no token, such as frequencies."""
        found = dict(zip((n.name for n in self.holders), self.plain, strict=True))
        wanted = {node.name for node in nodes} - found.keys()
        if wanted:
            found |= _values(self.step.gm, wanted, self._with_past(lambda _, key: key))
        return [found[node.name] for node in nodes]

    # -- the rewritten graph -----------------------------------------------------------------------------------------

    def flat(self) -> list[Any]:
        """The arguments of the rewritten graph."""
        shared: dict[Any, tuple[Rows, Rows]] = {}
        slots = [self._slots(i, shared) for i in range(len(self.step.layouts))]
        plain = tuple(map(_copied, self.plain))
        return self.step.rewrite.flat(slots, plain, self.step.rewrite.on_all_tokens(plain), self.count)

    def _slots(self, layer: int, shared: dict[Any, tuple[Rows, Rows]]) -> Slots:
        """A layer's slots with the tokens in them; layers that are alike write to the same rows,
        unless some of them are read later on, or rewritten."""
        layout, given, count = self.step.layouts[layer], self.step.slots[layer], self.held[layer]
        place = torch.randperm(given.capacity, generator=torch.Generator().manual_seed(given.capacity)).to(
            layout.device
        )
        held = place[:count]
        policy = layout.policy
        apart = self.step.sites[layer].shared_by or policy.merges or policy.aligns != "never"
        alike = (layout.key_format, layout.value_format, given.key.shape, given.value.shape, count)
        kind = (layer,) if apart else alike
        if kind not in shared:
            key, value = (rows.scattered(held, given.capacity) for rows in self.stored[layer])
            shared[kind] = (key, value)
        valid = self.valid.to(layout.device)
        position = torch.where(valid, valid.cumsum(-1) - 1, FREE)
        index = torch.where(valid, torch.arange(self.count, device=layout.device), FREE)
        seen = valid.sum(-1)
        fixed = [torch.full_like(given.position, FREE) for _ in range(2)]
        for buffer, entries in zip(fixed, (position, index), strict=True):
            buffer[:, :, held] = entries[:, None, -count:]
        free = place[count] if count < given.capacity else place[0]
        rank = (fixed[0]).clamp(min=0)
        state = first_state(dataclasses.replace(layout, capacity=given.capacity))
        return Slots(
            key=shared[kind][0],
            value=shared[kind][1],
            position=fixed[0],
            index=fixed[1],
            free=free.expand_as(given.free).clone(),
            seen=seen,
            length=torch.full_like(given.length, self.count),
            rank=rank,
            state=state,
        )
