"""tree.map and friends

The parameters of a model are many arrays, and much of what we do to them is one small operation on every array: set to
zero, add noise, clip, average, take a step. In JAX each of these is a line of `jax.tree.map`. This lesson writes them
by hand on a small network, and names the helper in `eqzoo.tree` that does the same for any tree. At the end the helpers
meet a vision transformer.
"""

# %%
# ## What a pytree is
#
# A pytree is a container with things in it, which may be containers again. Lists, tuples, dicts and `None` are
# containers; [lesson 3](nodes.md) adds classes. What isn't a container is a leaf: an array, a number, a string. That is
# all. Our network is a list of dicts:

import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import eqzoo
import eqzoo.tree


def init_layer(key, size_in, size_out):
    return {"W": jax.random.normal(key, (size_out, size_in)) * jnp.sqrt(2 / size_in), "b": jnp.zeros(size_out)}


def init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [init_layer(*each) for each in zip(keys, sizes[:-1], sizes[1:], strict=True)]


params = init(jax.random.key(0), (784, 128, 64, 10))

# %%
# `jax.tree.map` calls a function on every leaf and gives back a tree of the same structure, with the results in the
# leaves' places:

for layer in jax.tree.map(jnp.shape, params):
    print(layer)

# %%
# It does so in two steps. Flatten the tree into a list of leaves and a description of the structure; put the new leaves
# into that structure. Both steps are there by themselves. The leaves of a dict come in the order of its keys.

leaves, structure = jax.tree.flatten(params)
print(structure)
print([leaf.shape for leaf in leaves])
doubled = jax.tree.unflatten(structure, [2 * leaf for leaf in leaves])

# %%
# We will compare trees now and then. `eqzoo.tree.diff` lists where two trees differ; for equal trees the list is empty.

assert eqzoo.tree.diff(doubled, jax.tree.map(lambda leaf: 2 * leaf, params)) == []

# %%
# ## One tree: zero
#
# The start of a momentum, or of a sum of gradients. The helper is `eqzoo.tree.zeros_like`.

zeros = jax.tree.map(jnp.zeros_like, params)
assert eqzoo.tree.diff(zeros, eqzoo.tree.zeros_like(params)) == []

# %%
# ## One tree and keys: noise
#
# Every leaf needs a key of its own. With one key for all, leaves of the same shape would get the same noise. So we
# split the key into as many as there are leaves, and make a tree of them. `jax.tree.map` takes several trees, and calls
# the function with one leaf of each:


def add_noise(tree, key, scale):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))
    return jax.tree.map(lambda leaf, key: leaf + scale * jax.random.normal(key, leaf.shape), tree, keys)


noisy = add_noise(params, jax.random.key(1), 0.05)

weights, noisy_weights = params[0]["W"].ravel(), noisy[0]["W"].ravel()
plt.figure(figsize=(6, 3), layout="constrained")
plt.hist(weights, bins=100, range=(-0.3, 0.3), label=f"before: std {weights.std():.3f}", histtype="step")
plt.hist(noisy_weights, bins=100, range=(-0.3, 0.3), label=f"after: std {noisy_weights.std():.3f}", histtype="step")
plt.title("W of the first layer, noise of 0.05")
plt.legend()
plt.savefig("tree_map-noise.png", dpi=120)
plt.close()
print("wrote tree_map-noise.png")

# %%
# ![Two histograms of weights; the noisy one is wider](tree_map-noise.png)
#
# Variances add: the square root of 0.051² + 0.05² is 0.071.
#
# There is a catch. Which key a leaf gets depends on its place in the list of leaves. Give the first layer one more
# entry, and every leaf after it moves on by one place:

scaled = [params[0] | {"scale": jnp.ones(())}, *params[1:]]


def is_unchanged(first, second):
    return [bool(jnp.array_equal(first[i][name], second[i][name])) for i in range(3) for name in ("W", "b")]


print("keys by place:", is_unchanged(noisy, add_noise(scaled, jax.random.key(1), 0.05)))

# %%
# The entry changed the noise of layers that have nothing to do with it. `eqzoo.tree.add_noise` derives each key from
# the leaf's *path*, `1.W` say. The noise of a leaf then depends on the key and on its own name, and on nothing else in
# the tree:

by_path = eqzoo.tree.add_noise(params, jax.random.key(1), 0.05)
by_path_scaled = eqzoo.tree.add_noise(scaled, jax.random.key(1), 0.05)
print("keys by path: ", is_unchanged(by_path, by_path_scaled))

# %%
# ## One tree: clip
#
# Clipping each leaf to a norm is a map (`eqzoo.tree.clip_by_leaf_norm`):


def clip_leaf(leaf, max_norm):
    return leaf * jnp.minimum(1.0, max_norm / jnp.maximum(jnp.linalg.norm(leaf), 1e-12))


clipped = jax.tree.map(lambda leaf: clip_leaf(leaf, 5.0), params)
print([f"{jnp.linalg.norm(leaf):.2f}" for leaf in leaves])
print([f"{jnp.linalg.norm(leaf):.2f}" for leaf in jax.tree.leaves(clipped)])
assert eqzoo.tree.diff(clipped, eqzoo.tree.clip_by_leaf_norm(params, 5.0), rtol=1e-6) == []

# %%
# ## One tree, one number: reduce
#
# `jax.tree.reduce` folds all leaves into one value. A map before it makes numbers of the leaves:

count = jax.tree.reduce(operator.add, jax.tree.map(jnp.size, params))
norm = jnp.sqrt(jax.tree.reduce(operator.add, jax.tree.map(lambda leaf: jnp.sum(leaf**2), params)))
print(f"{count:,} numbers of norm {norm:.2f}")
assert count == eqzoo.tree.count(params)
assert jnp.allclose(norm, eqzoo.tree.norm(params))

# %%
# The global norm is what gradients are usually clipped by. All leaves shrink by one factor, and the direction of the
# gradient stays. The helper is `eqzoo.tree.clip_by_global_norm`:

factor = jnp.minimum(1.0, 5.0 / norm)
clipped = jax.tree.map(lambda leaf: factor * leaf, params)
assert eqzoo.tree.diff(clipped, eqzoo.tree.clip_by_global_norm(params, 5.0), rtol=1e-6) == []

# %%
# ## Statistics, and trees inside out
#
# The function of a map may return a container. Its results then become part of the tree: here each leaf turns into a
# pair. `jax.tree.transpose` turns a tree of pairs into a pair of trees. We tell it the structure outside and the one
# inside.

pairs = jax.tree.map(lambda leaf: (jnp.mean(leaf), jnp.std(leaf)), params)
means, stds = jax.tree.transpose(structure, jax.tree.structure(("mean", "std")), pairs)
for i, layer in enumerate(stds):
    print(f"layer {i}: std of W {layer['W']:.3f}, of b {layer['b']:.3f}")

# %%
# `eqzoo.tree.stats` gives these and a few more for each leaf. To read rather than to compute, print a summary:

print(eqzoo.tree.summary(params))

# %%
# ## Path and leaf: masks
#
# Weight decay should shrink the matrices and leave the biases alone. What a leaf is, its path tells. A path in JAX is a
# tuple of keys, one for each container on the way; the last one of ours is a dict's key.

mask = jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key == "W", params)
print(mask)

decayed = jax.tree.map(lambda leaf, decays: 0.99 * leaf if decays else leaf, params, mask)

# %%
# With `eqzoo.tree.map_with_path` a path is a string such as `0.W`. `eqzoo.tree.select` makes a mask from a pattern, and
# `eqzoo.tree.decay_mask` knows the usual names and layers. Optax takes that function as it is, as the `mask` of
# `optax.adamw`.

assert eqzoo.tree.map_with_path(lambda path, leaf: path.endswith("W"), params) == mask
assert eqzoo.tree.select(params, "*.W") == mask
assert eqzoo.tree.decay_mask(params) == mask

# %%
# ## Two trees: a step, an average
#
# The gradient of a loss has the structure of the parameters, because `jax.grad` is a function from trees to trees. So a
# step of gradient descent is one line, and so is a moving average of the parameters (`eqzoo.tree.ema`):


def apply(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(layer["W"] @ x + layer["b"])
    return params[-1]["W"] @ x + params[-1]["b"]


def loss(params, x, label):
    return -jax.nn.log_softmax(apply(params, x))[label]


x, label = jnp.linspace(0.0, 1.0, 784), 3
grads = jax.grad(loss)(params, x, label)
stepped = jax.tree.map(lambda param, grad: param - 0.01 * grad, params, grads)
average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, params, stepped)
print(f"loss {loss(params, x, label):.2f}, after a step {loss(stepped, x, label):.2f}")
assert eqzoo.tree.diff(average, eqzoo.tree.ema(params, stepped, 0.9), rtol=1e-5, atol=1e-6) == []

# %%
# ## Several trees: a mean, an ensemble
#
# The mean of several models (`eqzoo.tree.mean`) is a map over all of them. Stacked, they are one tree whose arrays have
# one more axis (`eqzoo.tree.stack`), and `vmap` runs them all in one call:

models = [init(key, (784, 128, 64, 10)) for key in jax.random.split(jax.random.key(2), 3)]
mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *models)
stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
logits = jax.vmap(apply, in_axes=(0, None))(stacked, x)
print(logits.shape)
assert eqzoo.tree.diff(mean, eqzoo.tree.mean(models), atol=1e-6) == []
assert eqzoo.tree.diff(stacked, eqzoo.tree.stack(models)) == []

# %%
# ## Trees that don't match
#
# Let two things be wrong with the gradients: the second layer's bias is missing, and the last one's has another shape.

wrong = [grads[0], {"W": grads[1]["W"]}, {"W": grads[2]["W"], "b": jnp.ones(1)}]
try:
    jax.tree.map(lambda param, grad: param - 0.01 * grad, params, wrong)
except ValueError as error:
    print(error)

# %%
# JAX stops at the first difference of structure. It says nothing about shapes, and could not: they are the function's
# business. Here broadcasting would have taken the wrong bias without a word. `eqzoo.tree.diff` lists everything:

for difference in eqzoo.tree.diff(grads, wrong):
    print(difference)

# %%
# The helpers that take several trees check first, and report in this form:

try:
    eqzoo.tree.lerp(grads, wrong, 0.5)
except ValueError as error:
    print(error)

# %%
# ## None is no leaf
#
# `None` is an empty container. A map doesn't see it, and it belongs to the structure. That is handy for "nothing here":
# a missing bias, a parameter without a gradient.

without_bias = {"W": 1.0, "b": None}
print(jax.tree.leaves(without_bias), jax.tree.map(lambda leaf: 2 * leaf, without_bias))

# %%
# With two trees, the first one decides. If it has a `None` where the second has a leaf, they don't match. The other way
# round they do, and the function gets the `None` as its second argument, as it would get any container there. Where the
# function should see the first tree's `None`, or a whole container of it, `is_leaf` says where to stop:

is_none = lambda node: node is None
defaults = {"W": 0.0, "b": 0.0}
fill = lambda leaf, default: default if leaf is None else leaf
print(jax.tree.map(fill, without_bias, defaults, is_leaf=is_none))

is_layer = lambda node: isinstance(node, dict)
print(jax.tree.map(lambda layer: layer["W"].shape[0], params, is_leaf=is_layer))

# %%
# ## The same on a model of the zoo
#
# A model of eqzoo is a pytree like any other. This is a vision transformer with twelve blocks, for small images:

model, _ = eqzoo.create("vit_tiny_patch16_224", image_size=32, patch_size=4, num_classes=10, key=jax.random.key(0))
print(eqzoo.tree.summary(model))

# %%
# Its twelve blocks are one block whose arrays have a leading axis of twelve; the `[*]` in a path stands for it. And two
# things about it trip up the lines that we wrote by hand.
#
# First, not every leaf is an array. Dropout's flag `inference` is a `bool`. A naive map makes an array of it, and the
# layer's `if self.inference` no longer works under `jit`. The helpers leave alone what isn't a number.

flag = model.dropout.inference
naive_flag = jax.tree.map(jnp.zeros_like, model).dropout.inference
helped_flag = eqzoo.tree.zeros_like(model).dropout.inference
print("before:", repr(flag), " naive:", repr(naive_flag), " helper:", repr(helped_flag))

# %%
# By hand, one takes the arrays out first and puts them back afterwards. What was taken out is `None` on the other side,
# so that both parts keep the structure:

arrays, rest = eqx.partition(model, eqx.is_inexact_array)
zeros = eqx.combine(jax.tree.map(jnp.zeros_like, arrays), rest)
assert eqzoo.tree.diff(zeros, eqzoo.tree.zeros_like(model)) == []

# %%
# Second, shapes mislead. A bias has one axis; in the stack it has two, like a matrix. A mask "decay what has two axes"
# would decay it, and the class token and the positions besides. The helpers count the `[*]`, and know the names:

by_shape = jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, model)
by_rule = eqzoo.tree.decay_mask(model)
pairs = zip(eqzoo.tree.paths(model), jax.tree.leaves(by_shape), jax.tree.leaves(by_rule), strict=True)
print("decayed by shape alone:", *[path for path, shape, rule in pairs if shape and not rule], sep="\n  ")

# %%
# The same holds for norms and noise: each layer of a stack has its own. Here is the norm of each block's first matrix
# in the MLP; and noise on all MLPs, and only there:

norms = eqzoo.tree.norms(model)
print([f"{norm:.2f}" for norm in norms.blocks.block.mlp.fc1.weight])

noisy = eqzoo.tree.add_noise(model, jax.random.key(1), 0.01, where="*.mlp.*")
print("changed:", *[difference.path for difference in eqzoo.tree.diff(model, noisy)], sep="\n  ")

# %%
# ## What to remember
#
# | pattern | by hand | in `eqzoo.tree` |
# | --- | --- | --- |
# | one tree | `jax.tree.map(f, tree)` | `zeros_like`, `cast`, `clip_by_leaf_norm` |
# | a tree and a key | keys in a tree, then map | `add_noise` |
# | to one number | `jax.tree.reduce` | `count`, `nbytes`, `norm` |
# | one result a leaf | map, then `jax.tree.transpose` | `norms`, `stats`, `summary` |
# | by path | `jax.tree_util.tree_map_with_path` | `paths`, `map_with_path`, `select`, `decay_mask` |
# | two trees | `jax.tree.map(f, a, b)` | `lerp`, `ema`, `diff` |
# | several trees | `jax.tree.map(f, *trees)` | `mean`, `stack`, `unstack` |
#
# Most helpers are a few lines over `jax.tree_util`. If one does not do what you need, read it and write your own.
