"""Transformations compose

JAX has a few functions that take a function and return a function: `jit` compiles it, `grad` differentiates it, `vmap`
runs it on a batch. Because each of them gives back a plain function again, they can be put together in any order. The
order decides what is computed, and what it costs. This lesson shows both, and measures the second.
"""

# %%
# ## A pure function of one example
#
# Everything begins with a function that has no batch in it. Its parameters are a dict of arrays, its input is one
# vector, its result one number. It reads nothing but its arguments and changes nothing.

import os
import time

# Only for the last part: pretend that this CPU is eight devices. JAX reads it when it starts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqzoo.tree.gradients import hvp, per_example_grads, private_mean

keys = jax.random.split(jax.random.key(0), 4)
parameters = {
    "W": jax.random.normal(keys[0], (16, 8)) / 3,
    "b": jnp.zeros(16),
    "w": jax.random.normal(keys[1], (16,)) / 4,
}
xs = jax.random.normal(keys[2], (10_000, 8))
ys = jnp.sin(xs[:, 0])


def loss(parameters, x, y):
    hidden = jnp.tanh(parameters["W"] @ x + parameters["b"])
    return (parameters["w"] @ hidden - y) ** 2


print(loss(parameters, xs[0], ys[0]))

# %%
# `jax.grad(loss)` is a function of the same arguments. It returns the gradient with respect to the first one, in the
# same form: a dict of three arrays.

gradient = jax.grad(loss)(parameters, xs[0], ys[0])
print(jax.tree.map(jnp.shape, gradient))

# %%
# `jax.vmap` takes a function of one example to a function of a batch. `in_axes` says which arguments have a batch axis,
# and which are the same for every example:

over_examples = (None, 0, 0)
losses = jax.vmap(loss, over_examples)(parameters, xs, ys)
print(losses.shape)

# %%
# Nothing was looped over. `vmap` runs the function once, with placeholders in place of the example, and replaces each
# operation by its batched form. The matrix times a vector becomes a matrix times a matrix. `jax.make_jaxpr` shows the
# operations that a function consists of, first for one example, then for five:

matvec = lambda W, x: W @ x
print(jax.make_jaxpr(matvec)(parameters["W"], xs[0]))
print(jax.make_jaxpr(jax.vmap(matvec, (None, 0)))(parameters["W"], xs[:5]))

# %%
# ## Per-example gradients
#
# What most libraries find hard is now one line: the gradient of each example by itself.

per_example = jax.jit(jax.vmap(jax.grad(loss), over_examples))
gradients = per_example(parameters, xs, ys)
print(jax.tree.map(jnp.shape, gradients))

# %%
# It agrees with a loop over single examples:

for index in range(3):
    alone = jax.grad(loss)(parameters, xs[index], ys[index])
    for name in alone:
        assert jnp.allclose(gradients[name][index], alone[name], rtol=1e-4, atol=1e-6)

# %% timing
# ## The order decides what it costs
#
# `vmap(grad(loss))` can be compiled in two places: outside, `jit(vmap(grad(loss)))`, or inside,
# `vmap(jit(grad(loss)))`. Or not at all. We time these three and a Python loop over the compiled gradient of one
# example, for 1, 100 and 10,000 examples. The first call compiles, so it is timed apart; after that, the best of
# several calls counts. JAX returns before the result is there, hence `block_until_ready`.

gradient = jax.grad(loss)
jitted = jax.jit(gradient)
variants = {
    "loop of jit(grad)": lambda p, xs, ys: [jitted(p, x, y) for x, y in zip(xs, ys, strict=True)],
    "vmap(grad)": jax.vmap(gradient, over_examples),
    "vmap(jit(grad))": jax.vmap(jax.jit(gradient), over_examples),
    "jit(vmap(grad))": jax.jit(jax.vmap(gradient, over_examples)),
}
sizes = [1, 100, 10_000]


def seconds(function, *arguments):
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


times = {}
print(f"{'milliseconds':20}{'first call':>12}" + "".join(f"{size:>10,}" for size in sizes))
for name, function in variants.items():
    first = seconds(function, parameters, xs[:1], ys[:1])
    times[name] = []
    for size in sizes:
        batch = (parameters, xs[:size], ys[:size])
        seconds(function, *batch)  # compiles for this size
        repetitions = 3 if name.startswith("loop") else 50
        times[name].append(min(seconds(function, *batch) for _ in range(repetitions)))
    print(f"{name:20}{1e3 * first:12.0f}" + "".join(f"{1e3 * each:10.3f}" for each in times[name]))

# %%
# The same as a picture, both axes logarithmic:

plt.figure(figsize=(6, 4))
for name, each in times.items():
    plt.loglog(sizes, each, "o-", label=name)
plt.xlabel("examples")
plt.ylabel("seconds a call")
plt.grid(alpha=0.3)
plt.legend()
plt.tight_layout()
plt.savefig("transformations-times.png", dpi=100)
plt.close()

# %%
# ![Seconds a call against the number of examples, for the four variants](transformations-times.png)
#
# What do we see?
#
# - The loop takes tens of microseconds for every example, and hardly any of it is arithmetic: take a row out of the
#   batch, go from Python to the compiled program and back, keep three small arrays. For one example that is little. For
#   10,000 it is about a thousand times what the best variant takes.
# - `jit(vmap(grad))` is the fastest at every size. It is one compiled program, called once.
# - `vmap(grad)` takes milliseconds even for one example. Nothing is compiled as a whole: each call differentiates
#   `loss` anew in Python, and sends the operations to the device one by one. Each operation is a small program of its
#   own, so the first call is the slowest of all.
# - `vmap(jit(grad))` lies between them. It pays a fixed price a call, a few tenths of a millisecond. For one example
#   that is more than twenty times the work itself; for 10,000 it is less than the work.
#
# One might expect `vmap(jit(grad))` to call a small compiled program for every example, like the loop, or to send
# operations one by one, like `vmap(grad)`. It does neither. The operations it consists of are these:

small = (parameters, xs[:5], ys[:5])
for name in ("vmap(grad)", "vmap(jit(grad))"):
    operations = [equation.primitive.name for equation in jax.make_jaxpr(variants[name])(*small).eqns]
    print(f"{name}: {', '.join(operations)}")

# %%
# To `vmap`, a compiled function is an operation like any other, and it has a batched form: the compiled batched
# function. So `vmap` went *through* `jit`, and one operation is left. Inside of it are the operations of `vmap(grad)`,
# which the compiler sees together. (Had there been a multiplication by two around the `jit`, it would have been sent by
# itself.)
#
# What is left to pay is Python's part. `vmap` wraps the arguments in placeholders, and for these `jit` can't take its
# shortcut, which leads from arrays straight to the program and is written in C++. It finds its program in Python, over
# about a thousand function calls. It does not trace the function again, though. We can count that, because Python code
# in a function runs only while JAX traces it:

traces = 0


def counted(parameters, x, y):
    global traces
    traces += 1
    return loss(parameters, x, y)


orders = {
    "vmap(grad)": jax.vmap(jax.grad(counted), over_examples),
    "vmap(jit(grad))": jax.vmap(jax.jit(jax.grad(counted)), over_examples),
    "jit(vmap(grad))": jax.jit(jax.vmap(jax.grad(counted), over_examples)),
}
for name, function in orders.items():
    traces = 0
    for _ in range(10):
        function(*small)
    print(f"{name:16} ten calls, traces: {traces}")

# %%
# The rule that follows: put `jit` outermost, around as much as possible. But a library function that comes with its own
# `jit` inside does no harm. Under an outer `jit` its own disappears into the whole.
#
# ## What commutes, and what doesn't
#
# The gradient of a mean is the mean of the gradients. So two of these orders give the same numbers:

mean_loss = lambda parameters: jnp.mean(jax.vmap(loss, over_examples)(parameters, xs, ys))
of_the_mean = jax.jit(jax.grad(mean_loss))(parameters)
mean_of_them = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), gradients)
for name in parameters:
    assert jnp.allclose(of_the_mean[name], mean_of_them[name], rtol=1e-3, atol=1e-6)
print(of_the_mean["w"][:4])
print(mean_of_them["w"][:4])

# %%
# They agree but for rounding. What they cost differs. The second, as written here, stores 10,000 gradients before it
# averages them: a few megabytes for this model, and more memory than there is for a large one. The first never has
# them. (Under one `jit`, the compiler may find a way around storing them. Don't count on it.) If the mean is all you
# want, take the first.
#
# This holds as long as the examples don't see each other. In a batch norm they do, and then the gradient of an example
# depends on the batch it came in.
#
# `grad` wants a function with a single number as result. `grad(vmap(loss))` has to fail, for there are five:

try:
    jax.grad(jax.vmap(loss, over_examples))(*small)
except TypeError as error:
    print(error)

# %%
# Whatever isn't linear doesn't commute with the mean. To clip each gradient to norm 0.1 and then average is something
# else than to average and then clip:

clip = lambda tree: jax.tree.map(lambda leaf: leaf * jnp.minimum(1, 0.1 / optax.tree.norm(tree)), tree)
average = lambda trees: jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), trees)
print(f"norm, clipped then averaged: {optax.tree.norm(average(jax.vmap(clip)(gradients))):.4f}")
print(f"norm, averaged then clipped: {optax.tree.norm(clip(average(gradients))):.4f}")

# %%
# In the first, no example adds more than 0.1 / 10,000 to the result, however strange it is. With noise on top, that is
# differentially private training. eqzoo has both parts, for any model:

same_gradients = jax.jit(per_example_grads(loss))(parameters, xs, ys)
private = private_mean(same_gradients, jax.random.key(2), max_norm=0.1, noise_multiplier=0.0)
assert jnp.allclose(private["w"], average(jax.vmap(clip)(gradients))["w"], rtol=1e-3, atol=1e-6)

# %%
# `jit` commutes with the others, up to rounding. And the derivative of a derivative is just another composition.
# `jax.jvp` differentiates along a direction, in one forward pass. Around `grad`, it multiplies the Hessian with a
# vector without ever forming the Hessian. Batched and compiled, that is a product for each example:


def hessian_product(parameters, vector, x, y):
    return jax.jvp(lambda parameters: jax.grad(loss)(parameters, x, y), (parameters,), (vector,))[1]


ones = jax.tree.map(jnp.ones_like, parameters)
products = jax.jit(jax.vmap(hessian_product, (None, None, 0, 0)))(parameters, ones, xs, ys)
print(jax.tree.map(jnp.shape, products))

# %%
# `hvp` of `eqzoo.tree` is this for any model:

same_product = hvp(loss)(parameters, ones, xs[0], ys[0])
assert jnp.allclose(same_product["w"], products["w"][0], rtol=1e-3, atol=1e-5)

# %%
#
# ## Ensembles
#
# `vmap` doesn't care what an axis means. Over examples it makes a batch; over keys it makes an ensemble.
# `eqx.filter_vmap` is `vmap` for Equinox models, whose trees also hold things that are no arrays. `make` and `step`
# below speak of one model.

x_train = jnp.concatenate([jnp.linspace(-3, -1, 30), jnp.linspace(0.5, 2, 30)])[:, None]
y_train = jnp.sin(2 * x_train[:, 0]) + 0.05 * jax.random.normal(keys[3], (60,))
optimizer = optax.adam(1e-2)


def make(key):
    model = eqx.nn.MLP(in_size=1, out_size="scalar", width_size=32, depth=2, activation=jnp.tanh, key=key)
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def step(model, optimizer_state):
    batch_loss = lambda model: jnp.mean((jax.vmap(model)(x_train) - y_train) ** 2)
    updates, optimizer_state = optimizer.update(eqx.filter_grad(batch_loss)(model), optimizer_state)
    return eqx.apply_updates(model, updates), optimizer_state


members, states = eqx.filter_vmap(make)(jax.random.split(jax.random.key(1), 8))
step_of_all = eqx.filter_jit(eqx.filter_vmap(step))

for _ in range(400):
    members, states = step_of_all(members, states)
print("weights of the first layer:", members.layers[0].weight.shape)

# %%
# Eight models were trained in one program. One step of the eight takes about a third longer than a step of one. To ask
# them all about the same points, the members are mapped over and the points are not. The inner `vmap` is over points,
# the outer over members:

points = jnp.linspace(-4, 4, 200)[:, None]
answer = lambda model, points: jax.vmap(model)(points)
answers = eqx.filter_jit(eqx.filter_vmap(answer, in_axes=(eqx.if_array(0), None)))(members, points)
print(answers.shape)

plt.figure(figsize=(6, 3))
plt.plot(points[:, 0], answers.T, color="tab:blue", alpha=0.5, linewidth=1)
plt.plot(x_train[:, 0], y_train, ".", color="black")
plt.ylim(-2.5, 2.5)
plt.tight_layout()
plt.savefig("transformations-ensemble.png", dpi=100)
plt.close()

spread = jnp.std(answers, axis=0)
near, far = spread[jnp.abs(points[:, 0] + 2) < 0.8], spread[jnp.abs(points[:, 0]) > 3.5]
assert jnp.mean(far) > 3 * jnp.mean(near)

# %%
# ![Eight curves that agree where there are data and part where there are none](transformations-ensemble.png)
#
# The members agree where there are data (the dots), and part where there are none.
#
# ## Many devices
#
# The last transformation changes no function at all. An array can be spread over several devices, and a compiled
# function computes where its arguments are. This page was written on a CPU that pretends to be eight devices, by the
# line at its very beginning; on a machine with accelerators, leave that line out.
#
# A mesh gives the devices names. Each has its part of the examples, and all have the parameters:

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("data"))
everywhere = NamedSharding(mesh, PartitionSpec())
xs_split, ys_split = jax.device_put((xs, ys), split)
parameters_everywhere = jax.device_put(parameters, everywhere)

print(f"{jax.device_count()} devices")
print("all examples:", xs_split.shape, "on each device:", xs_split.addressable_shards[0].data.shape)

# %%
# The same `per_example` as above, not a line changed, now runs on all of them. Its result stays where it was computed:

gradients_split = per_example(parameters_everywhere, xs_split, ys_split)
W = gradients_split["W"]
print("all gradients:", W.shape, "on each device:", W.addressable_shards[0].data.shape)
for name in parameters:
    assert jnp.allclose(gradients_split[name], gradients[name], rtol=1e-4, atol=1e-6)

# %%
# The gradient of the mean needs all examples, so here the devices have to talk. Nobody wrote down that they should. The
# compiler put an all-reduce into the program, a sum over devices, because the examples are split and the result is not:


def mean_gradient(parameters, xs, ys):
    return jax.grad(lambda parameters: jnp.mean(jax.vmap(loss, over_examples)(parameters, xs, ys)))(parameters)


arguments = (parameters_everywhere, xs_split, ys_split)
for name, function in {"per example": per_example, "of the mean": jax.jit(mean_gradient)}.items():
    program = str(function.lower(*arguments).compile().as_text())
    print(f"{name}: {'an' if 'all-reduce' in program else 'no'} all-reduce")

over_devices = jax.jit(mean_gradient)(*arguments)
for name in parameters:
    assert jnp.allclose(over_devices[name], of_the_mean[name], rtol=1e-3, atol=1e-6)
print(over_devices["w"][:4])

# %%
# The numbers are those of one device. That is data-parallel training, and it is why a model in eqzoo never mentions a
# batch or a mesh: one example is enough to say what it does, and the rest is composed around it. `eqzoo.sharding` makes
# meshes and places whole models.
