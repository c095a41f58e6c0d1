"""Collect every private name of torch that kvpass uses, by subsystem; no other room imports one.

Write each under its full name, or list it in `METHODS`: `kvpass doctor` reads the names from these sources.  The
docstring of the function that uses a name says what a missing one means.
"""

from __future__ import annotations

METHODS = (
    "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.bound_sympy",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.deserialize_symexpr",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.replace",
    "torch.fx.experimental.symbolic_shapes.SymExprPrinter.doprint",
    "torch._inductor.output_code.CompiledFxGraph.current_callable",
    "torch._inductor.output_code.CompiledFxGraph.output_strides",
    "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor",
    "torch._inductor.config.combo_kernels",
    "torch._inductor.config.realize_acc_reads_threshold",
    "torch._inductor.config.realize_opcount_threshold",
    "torch._inductor.config.realize_reads_threshold",
    "torch._inductor.config.reorder_for_locality",
)
"""Methods, fields and settings that appear nowhere else in this room with their full names."""
