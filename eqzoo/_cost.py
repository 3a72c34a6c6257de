"""What a function costs, read off its program: nothing is computed and no array is needed."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jaxtyping import PyTree

from eqzoo.nn._conv_primitives import conv_dw_p, conv_dx_p, conv_p


class Cost(NamedTuple):
    """Multiply-adds of matrix products and convolutions, and the number of elements these put out.

    Norms, activations and sums are left out, as all published figures leave them out.
    """

    macs: int
    activations: int

    @property
    def flops(self) -> int:
        return 2 * self.macs


def cost(function: Callable[..., Any], *args: PyTree) -> Cost:
    """The cost of `function(*args)`; arrays, also those inside `function`, may be `jax.ShapeDtypeStruct`s."""
    arrays, static = eqx.partition((function, args), _is_array)

    def call(arrays: PyTree) -> PyTree:
        function, args = eqx.combine(arrays, static)
        return eqx.filter(function(*args), eqx.is_array)

    return _of_program(jax.make_jaxpr(call)(arrays).jaxpr)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def _of_program(program: Jaxpr) -> Cost:
    costs = [_of_equation(equation) for equation in program.eqns]
    return Cost(sum(each.macs for each in costs), sum(each.activations for each in costs))


def _of_equation(equation: JaxprEqn) -> Cost:
    name, params = equation.primitive.name, equation.params
    if name in _MACS:
        operands, (out,) = [each.aval for each in equation.invars], [each.aval for each in equation.outvars]
        return Cost(_MACS[name](*operands, out, params), out.size)  # pyright: ignore[reportAttributeAccessIssue]
    parts = [_of_program(program) for program in jaxprs_in_params(params)]
    if name == "scan":
        (body,) = parts
        return Cost(body.macs * params["length"], body.activations * params["length"])
    if name == "cond":
        platforms = params.get("branches_platforms")
        # The branch for all other platforms is the plain definition; one platform's own may use products as a trick.
        return parts[platforms.index(None)] if platforms and None in platforms else max(parts)
    total = Cost(sum(each.macs for each in parts), sum(each.activations for each in parts))
    if name == "while" and total.activations:
        raise ValueError(
            "cost: a `while_loop` with matrix products or convolutions takes an unknown number of turns; "
            "use `lax.scan`, or take the cost of one turn"
        )
    return total


def _dot(a: Any, b: Any, out: Any, params: dict[str, Any]) -> int:
    (contracted, _), _ = params["dimension_numbers"]
    return out.size * prod(a.shape[axis] for axis in contracted)


def _lax_conv(x: Any, w: Any, out: Any, params: dict[str, Any]) -> int:
    out_axis, in_axis, *_ = params["dimension_numbers"].rhs_spec
    if (
        max(params["lhs_dilation"]) > 1
    ):  # transposed: each element of x meets every tap, and the zeros between don't count
        return x.size * w.size // w.shape[in_axis] // params["feature_group_count"]
    return out.size * w.size // w.shape[out_axis]


# Each of the three transposes multiplies the same pairs of numbers: every element of y with its window of x.


def _conv(x: Any, w: Any, y: Any, params: dict[str, Any]) -> int:
    return y.size * prod(w.shape[1:])


def _conv_dx(y: Any, w: Any, x: Any, params: dict[str, Any]) -> int:
    return _conv(x, w, y, params)


def _conv_dw(x: Any, y: Any, w: Any, params: dict[str, Any]) -> int:
    return _conv(x, w, y, params)


_MACS: dict[str, Callable[..., int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _lax_conv,
    conv_p.name: _conv,
    conv_dx_p.name: _conv_dx,
    conv_dw_p.name: _conv_dw,
}
