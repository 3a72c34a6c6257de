"""Your own nodes

JAX knows lists, tuples, dicts and a few more containers. It walks into them, and what it finds at the bottom are the
leaves. This lesson teaches it a class of ours: a dense layer with two arrays and the name of its activation. There are
three ways to do that. They give the same numbers, and the same rule decides for all of them when a function is compiled
again.
"""

# %%
# ## A layer JAX doesn't know
#
# A dense layer holds a weight, a bias, and a string. All our classes hold these three, so the arithmetic is one
# function.

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import eqzoo.tree


def apply(layer, x):
    activation = getattr(jax.nn, layer.activation)
    return activation(layer.weight @ x + layer.bias)


weight = jax.random.normal(jax.random.key(0), (3, 4))
bias = jnp.zeros(3)
x = jnp.arange(4.0) - 1.5


class PlainDense:
    def __init__(self, weight, bias, activation):
        self.weight = weight
        self.bias = bias
        self.activation = activation


plain = PlainDense(weight, bias, "relu")
print(apply(plain, x))

# %%
# As long as nothing is transformed, this is all one needs. But JAX can't look inside. To JAX the whole object is one
# leaf:

print([type(leaf).__name__ for leaf in jax.tree.leaves(plain)])

# %%
# A leaf that enters `jit` has to be an array or a number. This one is neither, and JAX refuses it:

try:
    jax.jit(apply)(plain, x)
except TypeError as error:
    print(str(error).partition(". ")[2])

# %%
# The message speaks of `static_argnums`. That would make the whole layer static, weights included, and is not what we
# want. We want to say: *the two arrays are data; the string belongs to the structure*.
#
# ## First way: register the class
#
# A node needs two functions. `flatten` takes an object apart: into its children, and into everything else, which JAX
# calls the auxiliary data. `unflatten` puts it together again. Registered *with keys*, each child also has a name, so
# that paths can be printed.


@jax.tree_util.register_pytree_with_keys_class
class KeyedDense:
    def __init__(self, weight, bias, activation):
        self.weight = weight
        self.bias = bias
        self.activation = activation

    def tree_flatten_with_keys(self):
        weight_key, bias_key = jax.tree_util.GetAttrKey("weight"), jax.tree_util.GetAttrKey("bias")
        return [(weight_key, self.weight), (bias_key, self.bias)], self.activation

    @classmethod
    def tree_unflatten(cls, activation, children):
        weight, bias = children
        return cls(weight, bias, activation)


keyed = KeyedDense(weight, bias, "relu")
print(eqzoo.tree.paths(keyed))
print(jax.jit(apply)(keyed, x))

# %%
# Most such classes are dataclasses. Then it is enough to say which fields are which, and JAX writes both functions:


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias"], meta_fields=["activation"])
@dataclass
class DataDense:
    weight: Array
    bias: Array
    activation: str


data = DataDense(weight, bias, "relu")
print(eqzoo.tree.paths(data))
print(jax.jit(apply)(data, x))

# %%
# ## Second way: register functions
#
# `PlainDense` might come from a library, where we can't decorate it. The two functions can also be given from outside:


def flatten(layer):
    return (layer.weight, layer.bias), layer.activation


def unflatten(activation, children):
    layer = object.__new__(PlainDense)
    layer.weight, layer.bias = children
    layer.activation = activation
    return layer


jax.tree_util.register_pytree_node(PlainDense, flatten, unflatten)
print(eqzoo.tree.paths(plain))
print(jax.jit(apply)(plain, x))

# %%
# The same object that `jit` refused above now goes through it. The paths are mere numbers, because we named no keys;
# `register_pytree_with_keys` takes them.
#
# Note that `unflatten` does not call the constructor. What comes back into a node need not be arrays:
# `jax.tree.map(jnp.shape, plain)` puts in tuples, and JAX itself sometimes puts in `None` or a placeholder. A
# constructor that computes, checks or converts would stumble over them. `unflatten` should store what it is given and
# do no more.
#
# ## Third way: `eqx.Module`
#
# An Equinox module is a dataclass that registers itself. A field is data unless it is marked static. Its methods can be
# transformed too, because the module is just their first argument.


class ModuleDense(eqx.Module):
    weight: Array
    bias: Array
    activation: str = eqx.field(static=True)

    def __call__(self, x):
        return apply(self, x)


module = ModuleDense(weight, bias, "relu")
print(eqzoo.tree.paths(module))
print(jax.jit(ModuleDense.__call__)(module, x))

# %%
# ## The same numbers
#
# All four classes are pytrees with the same two leaves. Values and gradients agree to the last bit. A gradient has the
# type of what was differentiated, so we read `gradient.weight` off each.

layers = [keyed, data, plain, module]


@jax.jit
def value_and_gradient(layer, x):
    return jax.value_and_grad(lambda layer: jnp.sum(apply(layer, x) ** 2))(layer)


expected, expected_gradient = value_and_gradient(module, x)
for layer in layers:
    value, gradient = value_and_gradient(layer, x)
    assert type(gradient) is type(layer)
    assert value == expected
    assert np.array_equal(gradient.weight, expected_gradient.weight)
    assert np.array_equal(gradient.bias, expected_gradient.bias)
    print(f"{type(layer).__name__:12} {value:.4f}")

# %%
# ## Static or dynamic
#
# Under `jit`, JAX runs the Python code once with placeholders and records what happens to them. That is tracing. The
# record is compiled and kept. The next call looks for a record that fits, and what has to fit is:
#
# - the shape and dtype of every leaf. Its values play no role;
# - the structure of the tree, auxiliary data included. It is compared with `==`.
#
# So an array may change as often as you like. A change of static data is another program, and is traced again. We count
# it. A Python statement in the function runs only while it is traced:


def count_traces(function, layers):
    traces = 0

    @jax.jit
    def call(layer, x):
        nonlocal traces
        traces += 1
        return function(layer, x)

    for layer in layers:
        call(layer, x)
    return traces


for Dense in (KeyedDense, DataDense, PlainDense, ModuleDense):
    first = Dense(weight, bias, "relu")
    other_arrays = [Dense(weight * scale, bias + scale, "relu") for scale in range(5)]
    other_static = Dense(weight, bias, "tanh")
    assert count_traces(apply, [first, *other_arrays]) == 1
    assert count_traces(apply, [first, other_static]) == 2
    assert count_traces(apply, [first, other_static, first, other_static]) == 2
    print(f"{Dense.__name__:12} other arrays: 1 trace, another activation: 2")

# %%
# The third assertion is worth a look. Going back to "relu" costs nothing, because the old program is still there.
#
# This also tells what should be static: whatever Python has to know while tracing. A name that selects a function, a
# number of heads, a flag in an `if`. A learning rate that changes every step should not be: as a static field it would
# compile the function at every step.
#
# ## An array in a static field
#
# It seems harmless to mark an array static so that no optimizer will touch it. But JAX has to compare static data, and
# `==` of two arrays is an array, not an answer:


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["mask"])
@dataclass
class Masked:
    weight: Array
    mask: np.ndarray


@jax.jit
def masked_sum(layer):
    return jnp.sum(layer.weight * layer.mask)


print(masked_sum(Masked(jnp.ones(2), np.array([1.0, 0.0]))))
try:
    masked_sum(Masked(jnp.ones(2), np.array([1.0, 0.0])))
except ValueError as error:
    print(error)

# %%
# The first call worked: there was nothing to compare with. The second call, with an equal mask, fails. Tests that call
# a function once don't find this. Equinox warns when such a module is made. The remedy: make the mask an ordinary
# field, and tell the *optimizer* what not to train (`eqzoo.tree.freeze`), or use `jax.lax.stop_gradient`.
#
# ## Hashable and comparable
#
# Static data should be what a dict accepts as a key: immutable, with an `==` that compares contents. Strings, numbers,
# tuples of them, frozen dataclasses. Two things go wrong otherwise.
#
# A list can be changed in place. The kept program holds the very same list, so JAX sees no difference, and the old
# program answers:


class Scaled(eqx.Module):
    factors: list[float] | tuple[float, ...] = eqx.field(static=True)

    def __call__(self, x):
        return sum(self.factors) * x


call = jax.jit(Scaled.__call__)
scaled = Scaled([1.0, 2.0])
print(call(scaled, 1.0))
scaled.factors.append(10.0)  # pyright: ignore[reportAttributeAccessIssue]
print(call(scaled, 1.0), "but without jit:", scaled(1.0))
assert call(scaled, 1.0) != scaled(1.0)

# %%
# With a tuple nobody can write that line.
#
# And an object that compares by identity equals nothing but itself. A `lambda` is such an object: two of them with the
# same text are different. A layer that is made anew with a new `lambda` is traced anew:


class Activation(eqx.Module):
    function: Callable[[Array], Array] = eqx.field(static=True)

    def __call__(self, x):
        return self.function(x)


one_function = count_traces(Activation.__call__, [Activation(jax.nn.relu) for _ in range(3)])
new_functions = count_traces(Activation.__call__, [Activation(lambda x: jax.nn.relu(x)) for _ in range(3)])
assert (one_function, new_functions) == (1, 3)
print(f"one function: {one_function} trace; a new one each time: {new_functions}")

# %%
# ## Which one
#
# - For a class of your own, `eqx.Module`: the fewest lines, and the warning above.
# - Without Equinox, `register_dataclass`.
# - For a class whose arrays aren't attributes, `register_pytree_with_keys_class`: you decide what the children are.
# - For a class that you can't change, `register_pytree_with_keys` or `register_pytree_node`.
#
# Models of eqzoo are `eqx.Module`s, and its configs are frozen dataclasses in static fields. That is why a model trains
# for a million steps on one trace, and why `depth=13` is another program than `depth=12`.
