"""Small tools on FX graphs: values and sizes of nodes, walks, and cutting a subgraph out."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.fx.node import map_arg

from kvpass import compat
from kvpass.errors import KVPassError, UnreadableGraph, UnsupportedGraph


def value(node: fx.Node) -> Any:
    """The fake tensor, symbolic size or constant that Dynamo recorded for a node."""
    return node.meta.get("example_value")


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def is_size(node: Any) -> bool:
    """A node that stands for a size and not for a tensor."""
    return (
        isinstance(node, fx.Node) and isinstance(value(node), (torch.SymInt, int)) and not isinstance(value(node), bool)
    )


def expr(size: Any) -> sympy.Expr:
    """A size, symbolic or not, as a sympy expression."""
    if isinstance(size, fx.Node):
        size = value(size)
    return compat.expression(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def constant(gm: fx.GraphModule, argument: Any) -> float | None:
    """A number, or that of a tensor of one number that the code spells out; None for anything else."""
    if isinstance(argument, (bool, int, float)):
        return float(argument)
    if not is_tensor(argument) or value(argument).numel() != 1:
        return None
    if argument.op == "get_attr":
        held = getattr(gm, argument.target, None)
        return float(held) if isinstance(held, torch.Tensor) and type(held) is torch.Tensor else None
    args = [*argument.args, *argument.kwargs.values()]
    if name_of(argument) in ("tensor", "scalar_tensor", "full"):
        number = args[1] if name_of(argument) == "full" else args[0]
        return float(number) if isinstance(number, (int, float)) else None
    if name_of(argument) in ("to", "type_as", "expand", "view"):
        return constant(gm, argument.args[0])
    return None


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def results(graph: fx.Graph) -> list[Any]:
    """What the graph returns, in order."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def let_go_of_data(graph: fx.Graph) -> None:
    """Describe inputs that real tensors stand for without their data: a graph outlives what it was compiled with."""
    for node in placeholders(graph):
        example = value(node)
        if isinstance(example, torch.Tensor) and not compat.is_fake(example):
            kind: dict[str, Any] = dict(dtype=example.dtype, device="meta")
            node.meta["example_value"] = torch.empty_strided(example.shape, example.stride(), **kind)


def past_of(grown: fx.Node) -> fx.Node:
    """The first part of a concatenation."""
    return grown.all_input_nodes[0]


def ancestors(node: fx.Node, stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The node and all that it is computed from, not walking into `stop`."""
    halted, seen, todo = set(stop), set(), [node]
    while todo:
        current = todo.pop()
        if current not in seen and current not in halted:
            seen.add(current)
            todo.extend(current.all_input_nodes)
    return seen


@dataclasses.dataclass(frozen=True)
class Writers:
    """What writes in place in a graph, as the graph is when this is made.

    Attributes:
        memory: for each node that may be a view, the node whose memory it shares.
        to: the nodes that write to each such memory, in order.
    """

    memory: Mapping[fx.Node, fx.Node]
    to: Mapping[fx.Node, Sequence[fx.Node]]

    @classmethod
    def of(cls, graph: fx.Graph) -> Writers:
        memory = _memory(graph)
        to: dict[fx.Node, list[fx.Node]] = {}
        for node in memory:
            if writes(node):
                to.setdefault(memory[node], []).append(node)
        return cls(memory, to)

    def to_memory_of(self, node: fx.Node) -> Sequence[fx.Node]:
        """What writes to a node or to what it is a view of."""
        return self.to.get(self.memory.get(node, node), ())


def behind(
    results: Sequence[fx.Node],
    stop: Iterable[fx.Node] = (),
    reader: fx.Node | None = None,
    through: Mapping[fx.Node, fx.Node] | None = None,
    writers: Writers | None = None,
) -> set[fx.Node]:
    """The results and all that they are computed from, writes in place included; not walking into `stop`.

    Args:
        reader: what reads the results, after which writes no longer matter; by default the last of them.
        through: nodes of which only one operand is followed, and that operand.
        writers: of the graph, if they are known.
    """
    writers = writers or Writers.of(results[0].graph)
    last = reader or max(results)
    halted, seen, todo = set(stop), set(), list(results)
    while todo:
        current = todo.pop()
        if current not in seen and current not in halted:
            seen.add(current)
            todo.extend([through[current]] if through and current in through else current.all_input_nodes)
            todo.extend(writer for writer in writers.to_memory_of(current) if writer < last)
    return seen


def move_before(node: fx.Node, needed: fx.Node) -> None:
    """Move `needed`, and what it is computed from, to before a node that it must not depend on.

    Raises:
        UnsupportedGraph: it does.
    """
    behind = ancestors(needed)
    if node in behind:
        raise UnsupportedGraph(f"{source_line(needed)}: {name_of(needed)!r} depends on {name_of(node)!r}")
    order = list(node.graph.nodes)
    for later in order[order.index(node) :]:
        if later in behind:
            node.prepend(later)


def fix_floats(graph: fx.Graph) -> None:
    """Put numbers in place of symbolic floats, and have Dynamo compile again where they differ.

    Dynamo makes an attribute such as an attention scale symbolic once it has met two models in which it differs.
    """
    for node in graph.nodes:
        if isinstance(value(node), torch.SymFloat):
            number = float(value(node))
            for user in list(node.users):
                user.args, user.kwargs = map_arg((user.args, user.kwargs), _swap(node, number))


def _swap(node: fx.Node, number: float) -> Callable[[fx.Node], Any]:
    return lambda other: number if other is node else other


def name_of(node: fx.Node) -> str:
    """The bare name of what a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def source_line(node: fx.Node) -> str:
    """The innermost line of user code that made a node, as `file:line: code`."""
    trace = (node.meta.get("stack_trace") or node.stack_trace or "").strip().splitlines()
    for place, code in zip(reversed(trace[:-1]), reversed(trace[1:]), strict=True):
        if place.strip().startswith("File "):
            file, line = place.split('"')[1], place.split("line ")[1].split(",")[0]
            return f"{file}:{line}: {code.strip()}"
    return "an unknown line"


@contextlib.contextmanager
def reading(calls: Iterable[fx.Node]) -> Iterator[None]:
    """Errors that nobody foresaw while a graph is read and rewritten become refusals.

    Args:
        calls: the graph's attention calls, the first of which says where.

    Raises:
        UnreadableGraph: from any error that is not of kvpass.
    """
    try:
        yield
    except KVPassError:
        raise
    except Exception as error:
        line = next((source_line(node) for node in calls), "a graph without attention")
        raise UnreadableGraph(
            f"{line}: reading the graph failed with {type(error).__name__}: {error}. The model is spelled in a way "
            "that kvpass does not know; run it uncompiled, or report what is at that line"
        ) from error


def module_of(node: fx.Node) -> str:
    """The path of the module whose code made a node, empty if it is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.replace("L['self'].", "").replace("L['fn'].", "").replace("_modules['", "").replace("']", "")


_AUGMENTED = frozenset({"iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "setitem"})
_VIEWS = frozenset(
    {
        "getitem", "view", "reshape", "expand", "expand_as", "transpose", "permute", "unsqueeze", "squeeze", "flatten",
        "unflatten", "chunk", "split", "select", "narrow", "unbind", "diagonal", "contiguous", "to", "type_as", "float",
        "view_as", "swapaxes", "detach",
    }
)  # fmt: skip


def writes(node: fx.Node) -> bool:
    """Whether a node of Dynamo's writes to its first argument in place."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node)
    of_operators = node.op == "call_function" and getattr(operator, name, None) is node.target  # and_, or_, not_
    return name in _AUGMENTED or (name.endswith("_") and not name.endswith("__") and not of_operators)


def writers_to(nodes: set[fx.Node], writers: Writers | None = None) -> list[fx.Node]:
    """The nodes that write in place to the memory of any of `nodes`, views included, in order."""
    if not nodes:
        return []
    writers = writers or Writers.of(next(iter(nodes)).graph)
    return sorted({writer for node in nodes for writer in writers.to_memory_of(node)})


def overwritten(nodes: set[fx.Node], since: fx.Node | None = None, writers: Writers | None = None) -> fx.Node | None:
    """A node that writes to one of `nodes` and is not among them, so that they do not say what is computed.

    Args:
        since: look only at what comes after this node.
        writers: of the graph, if they are known.
    """
    late = [writer for writer in writers_to(nodes, writers) if writer not in nodes]
    return next((writer for writer in late if since is None or since < writer), None)


def eliminate_dead(graph: fx.Graph, among: set[fx.Node] | None = None) -> None:
    """Remove what nobody needs.  A write in place is needed if what it writes to is read afterwards.

    torch.fx's own pass takes a write without users for dead, and one by setitem for needed.

    Args:
        among: what may be removed; by default everything.
    """
    memory = _memory(graph)
    needed: set[fx.Node] = set()
    read: set[fx.Node] = set()
    mapped = _MappedRegions()
    for node in reversed(graph.nodes):
        owner = memory.get(node, node)
        stays = among is not None and node not in among
        lasting = stays or node.op in ("placeholder", "output") or compat.mutates(node)
        written = writes(node) and (owner in read or owner.op in ("placeholder", "get_attr"))
        if lasting or written or needed.intersection(node.users):
            needed.add(node)
            read.update(memory.get(parent, parent) for parent in node.all_input_nodes)
        needed.update(mapped.markers(node, node in needed))
    for node in reversed(list(graph.nodes)):
        if node not in needed and not node.users:
            graph.erase_node(node)


class _MappedRegions:
    """Find the calls that begin and end the regions of torch.vmap in which something is needed.

    Nothing uses the results of these calls, and what a region maps over fails without them.
    """

    def __init__(self) -> None:
        self._ends: list[fx.Node] = []
        self._used: list[bool] = []
        self._any = False

    def markers(self, node: fx.Node, needed: bool) -> list[fx.Node]:
        """Return the markers that turn out to be needed at a node, for the nodes of a graph from its end on."""
        kind = compat.batching_kind(node)
        if kind == "ends":
            self._ends.append(node)
            self._used.append(False)
        elif kind == "begins" and self._ends:
            end, used = self._ends.pop(), self._used.pop()
            return [node, end] if used else []
        elif kind == "prepares":
            return [node] if self._any else []
        elif kind == "maps" and needed:
            self._any, self._used = True, [True] * len(self._used)
        return []


def _memory(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node that may be a view, the node whose memory it shares."""
    memory: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        base = node.args[0] if node.args else None
        if isinstance(base, fx.Node) and (writes(node) or name_of(node) in _VIEWS):
            memory[node] = memory.get(base, base)
    return memory


def may_alias(node: fx.Node, parent: fx.Node) -> bool:
    """Whether a call may give memory of one of its arguments, as far as it is known.

    Operators say it in their schema, what Dynamo traced in the fake tensors that it recorded.  Of what was put in
    between the recorded tensor may be any of the right shape, so names of views count as well.
    """
    if compat.is_operator(node):
        return parent in compat.passes_on(node)
    made, taken = value(node), value(parent)
    if isinstance(taken, (torch.SymInt, int)):
        return False
    if not isinstance(made, torch.Tensor) or not isinstance(taken, torch.Tensor):
        return True
    recorded = compat.is_fake(made) and compat.is_fake(taken)
    return compat.share_memory(made, taken) or (not recorded and (writes(node) or name_of(node) in _VIEWS))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How the symbolic sizes of a step graph are to be read.

    Attributes:
        lengths: the expressions that stand for the cache's length, in each layer.
        known: what the symbols that do not grow are in this call.
        queries: q, the number of new tokens.
        least: what the lengths cannot fall below.
        totals: the lengths with the new tokens, as Dynamo has them.
        open: sizes that do not grow and yet are no numbers; `known` has their symbols.
    """

    lengths: tuple[sympy.Expr, ...]
    known: dict[sympy.Symbol, Any]
    queries: Any
    least: int = 0
    totals: tuple[Any, ...] = ()
    open: compat.OpenSizes | None = None

    def __post_init__(self) -> None:
        symbols = [length for length in self.lengths if length.is_Symbol]
        above = {s: sympy.Symbol(f"{s}_above", integer=True, nonnegative=True) for s in symbols}
        object.__setattr__(self, "_bounds", {s: self.least + t for s, t in above.items()})
        object.__setattr__(self, "_back", {t: s - self.least for s, t in above.items()})
        object.__setattr__(self, "_open", frozenset(self.open.symbols if self.open else ()))

    def _simple(self, size: Any) -> sympy.Expr:
        """A size without the maxima and minima that its bounds and the lengths' decide, and with what is known."""
        size = value(size) if isinstance(size, fx.Node) else size
        whole = compat.decided(size) if isinstance(size, torch.SymInt) else expr(size)
        for name, function in (("Max", sympy.Max), ("Min", sympy.Min)):  # torch has its own
            theirs = {part.func for part in sympy.preorder_traversal(whole) if part.func.__name__ == name}
            for kind in theirs:
                whole = whole.replace(kind, lambda *args, f=function: f(*(a.subs(self._bounds) for a in args)))  # type: ignore[attr-defined]
        return whole.subs(self._back).subs(self.known)  # type: ignore[attr-defined]

    def grows(self, size: Any) -> bool:
        """Whether a size is not the same at every step."""
        return self.grows_in(self._simple(size))

    def grows_in(self, expression: sympy.Expr) -> bool:
        """Whether an expression has symbols of what grows."""
        return bool(expression.free_symbols - self._open)  # type: ignore[attr-defined]

    def grown(self, tensor: Any) -> bool:
        """Whether any dimension of a fake tensor is not the same at every step."""
        return isinstance(tensor, torch.Tensor) and any(self.grows(size) for size in tensor.shape)

    def settled(self, size: Any) -> bool:
        """Whether a size is computed from open ones already, as what was traced for them has it."""
        symbols = expr(size).free_symbols
        return bool(symbols) and not self.grows_in(expr(size))

    def fixed(self, size: Any) -> Any:
        """A size that does not grow: a number, or an open size."""
        simple = self._simple(size)
        return self.open.size(sympy.expand(simple)) if self.open else int(simple)

    def is_total(self, size: Any) -> bool:
        """Whether a size is the cache's length plus the new tokens."""
        return self.grows(size) and (self._adds_up(size) or self._must_be_total(size))

    def _adds_up(self, size: Any) -> bool:
        return any(
            sympy.expand(self._simple(size) - length).subs(self.known) == expr(self.queries) and length.free_symbols
            for length in self.lengths
        )

    def _must_be_total(self, size: Any) -> bool:
        """Whether the model's code does with a size what is right for the number of keys alone, such as adding."""
        size = value(size) if isinstance(size, fx.Node) else size
        return any(compat.known_equal(size, total) for total in self.totals)

    def in_length(self, size: Any) -> sympy.Expr:
        """A size as an expression of one symbol, the cache's length."""
        expression = self._simple(size)
        for length in self.lengths:
            for symbol in length.free_symbols:
                expression = expression.subs(symbol, LENGTH - (length - symbol))
        if self.grows_in(expression.subs(LENGTH, 0)):
            raise UnsupportedGraph(f"the size {size} depends on more than the cache's length")
        return sympy.expand(expression)

    def beyond_length(self, size: Any) -> Any:
        """A size that is the cache's length plus a number, or an open size: the latter."""
        beyond = self.in_length(size) - LENGTH
        if self.grows_in(beyond):
            raise UnsupportedGraph(f"the graph returns {size}, which is not the cache's length plus a number")
        return self.fixed_part(beyond)

    def fixed_part(self, expression: sympy.Expr) -> Any:
        """What is left of sizes whose lengths have cancelled out: a number, or an open size."""
        return self.open.size(expression) if self.open else int(expression)

    def on_length(self, size: Any, length: fx.Node, graph: fx.Graph, number: Callable[[Any], Any]) -> Any:
        """Emit nodes that compute a size from the length, a tensor; returns the node or a number.

        Args:
            number: what stands in a graph for a number or an open size.
        """

        def emit(part: sympy.Expr) -> Any:
            if part == LENGTH:
                return length
            if part.is_integer and LENGTH not in part.free_symbols:
                return number(self.fixed_part(part))
            function = _ON_TENSORS.get(part.func.__name__)
            if function is None:
                raise UnsupportedGraph(
                    f"position arithmetic {part} on the cache's length is no sum, product, maximum or minimum"
                )
            terms = sorted((emit(term) for term in part.args), key=lambda term: not is_tensor(term))
            made = terms[0]
            for term in terms[1:]:
                made = graph.call_function(function, (made, term))
                made.meta["example_value"] = value(length)
            return made

        return emit(self.in_length(size))


LENGTH = sympy.Symbol("length", integer=True, nonnegative=True)


_ON_TENSORS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "Max": torch.clamp_min, "Min": torch.clamp_max
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Slice:
    """A subgraph cut out: `module(*replaced, *bound)` computes what `result` stood for.

    Attributes:
        module: the operations.
        bound: nodes of the original graph that it also reads.
        key: equal for slices that compute the same, whatever their nodes are called.
    """

    module: fx.GraphModule
    bound: tuple[fx.Node, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        place = {node: f"%{i}" for i, node in enumerate(self.module.graph.nodes)}
        steps = [(node.op, None if node.op == "placeholder" else node.target, _told(node, place)) for node in place]
        return (*steps, *((n.name, str(value(n))) for n in self.bound))


def _told(node: fx.Node, place: dict[fx.Node, str]) -> str:
    """The arguments of a node, with places instead of nodes."""
    return str(fx.node.map_arg((node.args, node.kwargs), lambda parent: place[parent]))


Resolve = Callable[[fx.Node], Any]


def cut(
    gm: fx.GraphModule,
    results: list[fx.Node],
    replaced: list[fx.Node],
    resolve: Resolve,
    *,
    unpack: bool = False,
    reader: fx.Node | None = None,
) -> Slice:
    """Cut out what computes `results` from `replaced`; nodes that do not depend on `replaced` are bound.

    Args:
        replaced: become the first inputs, in order.
        resolve: the number to put in place of a node that is a size; one that stays open is bound.
        unpack: return the one result itself and not a tuple.
        reader: see `behind`.
    """
    needed = behind(results, replaced, reader)
    moving = dependent(gm.graph, needed, replaced)
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in replaced}
    bound: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        if node in env:
            return
        number = resolve(node) if is_size(node) else None
        if isinstance(number, int):
            env[node] = number
        elif number is not None or node not in moving:
            env[node] = graph.placeholder(node.name)
            bound.append(node)
        else:
            for parent in node.all_input_nodes:
                place(parent)
            env[node] = graph.node_copy(node, lambda parent: env[parent])

    for node in gm.graph.nodes:  # in order, as some of them write in place
        if node in moving:
            place(node)
    for result in results:
        place(result)
    made = tuple(env[result] for result in results)
    graph.output(made[0] if unpack else made)
    placeholders_first(graph)
    return Slice(fx.GraphModule(gm, graph), tuple(bound))


def computing(gm: fx.GraphModule, wanted: list[fx.Node]) -> fx.GraphModule:
    """A graph of the same arguments that gives some of a graph's nodes, and computes nothing else."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = behind(wanted) if wanted else set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in wanted))
    return fx.GraphModule(gm, graph)


def dependent(graph: fx.Graph, among: set[fx.Node], roots: list[fx.Node]) -> set[fx.Node]:
    """The roots and those of `among` that are computed from them, memory that such are written to included."""
    memory, found = _memory(graph), set(roots)
    count = 0
    while count != len(found):
        count = len(found)
        for node in graph.nodes:
            if node in among and found.intersection(node.all_input_nodes):
                found.add(node)
                if writes(node):
                    found.update(among & {memory[node]})
    return found


def placeholders_first(graph: fx.Graph) -> None:
    put_first(graph, placeholders(graph))


def put_first(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Let these nodes begin the graph, in this order."""
    for node in reversed(nodes):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def splice(
    gm: fx.GraphModule, traced: fx.GraphModule, inputs: list[fx.Node], before: fx.Node, prefix: str
) -> list[Any]:
    """Copy a traced function into a graph before a node; returns what it outputs."""
    env: dict[fx.Node, Any] = dict(zip(placeholders(traced.graph), inputs, strict=True))
    with gm.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                name = f"{prefix}_{node.target}"
                setattr(gm, name, getattr(traced, node.target))
                env[node] = gm.graph.create_node("get_attr", name)  # `get_attr` would have it be a buffer
            elif node.op not in ("placeholder", "output"):
                env[node] = gm.graph.node_copy(node, lambda parent: env[parent])
                env[node].meta["example_value"] = node.meta.get("val")
    returned = traced.graph.output_node().args[0]
    return list(map_arg(returned if isinstance(returned, (list, tuple)) else [returned], lambda node: env[node]))


def call_aten(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A new node in a graph of aten's operators that knows its value, as later passes ask for it."""
    made = graph.call_function(target, args)
    made.meta["val"] = target(*map_arg(args, lambda x: x.meta["val"]))
    return made
