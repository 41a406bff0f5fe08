"""Floating-point operations of a program, counted in its jaxpr with the lengths of its loops.

The compiler's own cost analysis counts a loop's body once, however often it runs, so a model whose layers are
scanned shows a fraction of its work there. Here only matrix products and convolutions are counted (2 for each
multiply and add); what is element-wise is left out, as in 6ND. What no output depends on is left out, too, as every
compiler does: tracing leaves such equations behind (a kernel whose result a remat policy keeps), and
`Figures.repeated` and `Figures.kernels_repeated` hold the count against the compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations over all devices: `matmul` by XLA, `kernel` inside Pallas kernels, which run `kernel_calls` times.

    kernel_bytes: of the cache, that attention kernels read where every sequence is as long as it may be.
    """

    matmul: float = 0.0
    kernel: float = 0.0
    kernel_calls: float = 0.0
    kernel_bytes: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.matmul + self.kernel

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            matmul=self.matmul + other.matmul,
            kernel=self.kernel + other.kernel,
            kernel_calls=self.kernel_calls + other.kernel_calls,
            kernel_bytes=self.kernel_bytes + other.kernel_bytes,
        )

    def __mul__(self, times: float) -> Flops:
        return Flops(
            matmul=self.matmul * times,
            kernel=self.kernel * times,
            kernel_calls=self.kernel_calls * times,
            kernel_bytes=self.kernel_bytes * times,
        )


def count_flops(
    function: Callable[..., Any], *args: Any, while_steps: int = 1, **kwargs: Any
) -> Flops:
    """Count one call of `function` (jitted or not) on arrays or `jax.ShapeDtypeStruct`s.

    Of the branches of a `cond` the dearer one is counted. A `while` whose number of steps depends on data is taken
    to run `while_steps` times.
    """
    closed = jax.make_jaxpr(function, static_argnums=())(*args, **kwargs)
    return jaxpr_flops(closed.jaxpr, while_steps=while_steps)


def jaxpr_flops(jaxpr: core.Jaxpr, *, while_steps: int = 1) -> Flops:
    """As `count_flops`, for a jaxpr."""
    # From outside in: what a call within is not asked for, then what it does not need itself.
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    total = Flops()
    for equation in live.eqns:
        total = total + _equation(equation, while_steps)
    return total


def _equation(equation: core.JaxprEqn, while_steps: int) -> Flops:
    name, params = equation.primitive.name, equation.params

    def inside(jaxpr: Any) -> Flops:
        return jaxpr_flops(getattr(jaxpr, "jaxpr", jaxpr), while_steps=while_steps)

    if name == "dot_general":
        return Flops(matmul=_dot(equation))
    if name == "conv_general_dilated":
        return Flops(matmul=_convolution(equation))
    if name == "scan":
        return inside(params["jaxpr"]) * params["length"]
    if name == "while":
        return (inside(params["body_jaxpr"]) + inside(params["cond_jaxpr"])) * while_steps
    if name == "cond":
        return max((inside(branch) for branch in params["branches"]), key=lambda flops: flops.total)
    if name == "shard_map":
        # Shapes inside are those of one shard; every device of the manual axes runs the body.
        shape, manual = params["mesh"].shape, params.get("manual_axes", ())
        return inside(params["jaxpr"]) * math.prod(shape[axis] for axis in manual or shape)
    if name == "pallas_call":
        grid = params["grid_mapping"].grid
        calls = math.prod(size for size in grid if isinstance(size, int))
        kernel = params.get("name") or str(params["jaxpr"].debug_info.func_src_info)
        if kernel.startswith("ragged_paged_attention"):
            return _ragged(equation)
        pages, read = paged_blocks(kernel, equation)
        body = jaxpr_flops(params["jaxpr"], while_steps=pages)
        share = calls * visible_blocks(kernel, grid)
        return Flops(kernel=body.total * share, kernel_calls=1, kernel_bytes=read)
    total = Flops()
    for jaxpr in _jaxprs(params):  # jit, remat, custom derivatives: the body runs once
        total = total + inside(jaxpr)
    return total


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters (a derivative rule that is still a function is not one)."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _dot(equation: core.JaxprEqn) -> float:
    (left, right), _ = equation.params["dimension_numbers"]
    lhs = _shape(equation.invars[0])
    contracted = math.prod(lhs[axis] for axis in left)
    return 2.0 * contracted * math.prod(_shape(equation.outvars[0]))


def _convolution(equation: core.JaxprEqn) -> float:
    kernel = _shape(equation.invars[1])
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(_shape(equation.outvars[0])) * math.prod(kernel) / features


def visible_blocks(kernel: str, grid: tuple[Any, ...]) -> float:
    """The share of a splash attention kernel's grid that computes anything under our causal mask.

    Its grid is (heads, query blocks, key blocks), in the kernel of key gradients (key blocks, heads, query blocks),
    with the rows of the device before them where it has several. A block that lies wholly above the diagonal is
    skipped. Segments skip nothing: they are data.
    """
    if not kernel.startswith("splash_mha") or len(grid) < 3:
        return 1.0
    grid = grid[-3:]
    queries, keys = (grid[2], grid[0]) if "dkv" in kernel else (grid[1], grid[2])
    visible = sum(-(-(row + 1) * keys // queries) for row in range(queries))
    return visible / (queries * keys)


def paged_blocks(kernel: str, equation: core.JaxprEqn) -> tuple[int, float]:
    """(pages of a sequence, bytes of all of them) that a paged attention kernel goes through at most, a page a turn of
    its inner loop. (1, 0) for another kernel."""
    if not kernel.startswith("paged_flash_attention"):
        return 1, 0.0
    lengths, indices = (math.prod(_shape(variable)) for variable in equation.invars[:2])
    pool: Any = next(v.aval for v in equation.invars if len(_shape(v)) == 4 and _shape(v)[0] == 1)
    page_bytes = pool.shape[-2] * pool.shape[-1] * pool.dtype.itemsize
    return indices // lengths, 2.0 * indices * page_bytes


def _ragged(equation: core.JaxprEqn) -> Flops:
    """Of the ragged paged attention kernel, whose loops go by data: every token with all pages of a sequence."""
    shapes = [_shape(variable) for variable in equation.invars]
    indices = next(shape for shape in shapes if len(shape) == 2)
    pages: Any = next(v.aval for v in equation.invars if len(_shape(v)) == 4)
    tokens = math.prod(next(shape for shape in shapes if len(shape) == 3))  # × heads × width
    positions = indices[1] * pages.shape[1]
    page_bytes = math.prod(pages.shape[1:]) * pages.dtype.itemsize
    return Flops(
        kernel=4.0 * tokens * positions,
        kernel_calls=1,
        kernel_bytes=float(math.prod(indices) * page_bytes),
    )
