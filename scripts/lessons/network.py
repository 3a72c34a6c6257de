"""A network from nothing

A network that reads digits, with nothing but JAX: the weights are a list of dicts, everything else is a function. It
has 784 inputs, two hidden layers of 128 and 64, and 10 outputs. Then the same with Equinox and Optax, in a third of the
lines, and a proof that both compute the same numbers.
"""

# %%
# ## Digits
#
# scikit-learn comes with 1797 handwritten digits of 8x8 pixels. We enlarge them to 28x28, which makes 784 inputs, and
# keep 360 of them for the test.
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import eqzoo
from eqzoo.tree import decay_mask

pixels, labels = load_digits(return_X_y=True)
images = jnp.asarray(pixels.reshape(-1, 8, 8, 1) / 16, jnp.float32)
images = jax.image.resize(images, (len(images), 28, 28, 1), "linear")
test, train = np.split(np.random.default_rng(0).permutation(len(images)), [360])
train_x, train_y, test_x, test_y = images[train], jnp.asarray(labels[train]), images[test], jnp.asarray(labels[test])
print(train_x.shape, test_x.shape)

# %%
# ## The weights
#
# A layer is a matrix `W` and a vector `b`; a network is a list of layers. JAX sees a pytree with six arrays.
#
# Random weights should neither blow up the numbers on their way through the layers nor let them die out. A sum of `n`
# inputs times weights of variance `v` has a mean square `n * v` times theirs, and a ReLU halves it. So `v = 2 / n`
# keeps the size. This is He's initialisation. `W` has the shape `(out, in)`.
WIDTHS = (784, 128, 64, 10)


def init(widths, key):
    params = []
    for inputs, outputs in pairwise(widths):
        key, key_W = jax.random.split(key)
        W = jnp.sqrt(2 / inputs) * jax.random.normal(key_W, (outputs, inputs))
        params.append({"W": W, "b": jnp.zeros(outputs)})
    return params


start = init(WIDTHS, jax.random.key(0))
print(jax.tree.map(jnp.shape, start))

# %%
# ## One image
#
# The network maps one image to ten numbers, the logits. There is no batch axis to think about.


def apply(params, image):
    *hidden, last = params
    x = image.reshape(-1)
    for layer in hidden:
        x = jax.nn.relu(layer["W"] @ x + layer["b"])
    return last["W"] @ x + last["b"]


print(apply(start, train_x[0]).shape)

# %%
# ## Many images
#
# `vmap` turns a function of one image into a function of a batch. `in_axes=(None, 0)` says that all images share the
# weights.
#
# The loss of one image is the cross-entropy: minus the logarithm of the probability given to the right digit. The
# probabilities are the softmax of the logits. `log_softmax` takes the logarithm before anything can overflow; a vector
# with a one at the right digit picks its entry.


def cross_entropy(logits, label):
    one_hot = jax.nn.one_hot(label, len(logits))
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits))


def loss(params, images, labels):
    logits = jax.vmap(apply, in_axes=(None, 0))(params, images)
    return jnp.mean(jax.vmap(cross_entropy)(logits, labels))


print(f"before training {loss(start, train_x, train_y):.1f}, blind guessing {np.log(10):.1f}")

# %%
# ## The gradient
#
# `jax.grad` makes, from a function that returns a number, the function that returns its gradient by the first argument.
# The gradient of a list of dicts is a list of dicts.
grads = jax.grad(loss)(start, train_x[:64], train_y[:64])
print(jax.tree.structure(grads) == jax.tree.structure(start))

# %%
# ## Clipping by the global norm
#
# Now and then a batch has a gradient that is far too large. If the norm of the whole gradient, over all its leaves, is
# above a limit, we scale the gradient down to the limit. Its direction stays.


def global_norm(tree):
    squares = jax.tree.map(lambda leaf: jnp.sum(leaf**2), tree)
    return jnp.sqrt(jax.tree.reduce(jnp.add, squares))


def clip(grads, limit):
    factor = jnp.minimum(1.0, limit / global_norm(grads))
    return jax.tree.map(lambda grad: factor * grad, grads)


print(f"{global_norm(grads):.1f} becomes {global_norm(clip(grads, 1.0)):.1f}")

# %%
# ## Weight decay, on the matrices only
#
# Weight decay pulls weights towards zero. It should do so for each `W`, but not for `b`, which has to be free to shift
# its unit. `tree_map_with_path` also tells where a leaf is, so its name can decide. The result is a mask: a tree of
# booleans.


def is_matrix(path, leaf):
    return path[-1].key == "W"


mask = jax.tree_util.tree_map_with_path(is_matrix, start)
print(mask)

# %%
# `eqzoo.tree.decay_mask` gives the mask for any tree. It knows layers by their type as well, such as norms, whose
# scales don't decay either.
assert decay_mask(start) == mask

# %%
# ## The step
#
# Stochastic gradient descent with momentum: a second tree like the first, the velocity, sums up past gradients. The
# rate falls along half a cosine from `RATE` to zero, so that the last steps no longer shake. Everything is a `tree.map`
# over one, two or three trees, compiled by `jit` into one program.
BATCH, EPOCHS = 64, 15
STEPS = EPOCHS * (len(train_x) // BATCH)
RATE, MOMENTUM, DECAY, LIMIT = 0.05, 0.9, 1e-3, 1.0


def rate(count):
    return RATE * (1 + jnp.cos(jnp.pi * count / STEPS)) / 2


@jax.jit
def step(params, velocity, count, images, labels):
    value, grads = jax.value_and_grad(loss)(params, images, labels)
    grads = clip(grads, LIMIT)
    grads = jax.tree.map(lambda g, p, decays: g + DECAY * p if decays else g, grads, params, mask)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - rate(count) * v, params, velocity)
    return params, velocity, value


# %%
# ## Training
#
# An epoch goes through the training images once, in a new order. (`count` is an argument of `step`, not a constant of
# its program, so a new count does not compile it again.)


def batches():
    shuffle = np.random.default_rng(0)
    for _ in range(EPOCHS):
        yield from shuffle.permutation(len(train_x))[: STEPS // EPOCHS * BATCH].reshape(-1, BATCH)


def accuracy(predict, images, labels):
    return jnp.mean(jax.vmap(predict)(images).argmax(axis=-1) == labels)


params = start
velocity = jax.tree.map(jnp.zeros_like, params)
losses, accuracies = [], []
for count, batch in enumerate(batches()):
    params, velocity, value = step(params, velocity, count, train_x[batch], train_y[batch])
    losses.append(value)
    if (count + 1) % (STEPS // EPOCHS) == 0:
        accuracies.append(accuracy(lambda image: apply(params, image), test_x, test_y))
print(f"test accuracy {accuracies[-1]:.0%}")
assert accuracies[-1] > 0.95

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(losses)
left.set(xlabel="step", ylabel="loss of the batch", yscale="log")
right.plot(range(1, EPOCHS + 1), accuracies, marker="o")
right.set(xlabel="epoch", ylabel="test accuracy")
figure.savefig("network-curves.png", dpi=100)
print("wrote network-curves.png")

# %%
# ![Loss and accuracy over training](network-curves.png)
#
# Here are some of the test images with the network's answers, those it gets wrong first.
predicted = jax.vmap(apply, in_axes=(None, 0))(params, test_x).argmax(axis=-1)
is_right = predicted == test_y
figure, axes = plt.subplots(2, 8, figsize=(9, 2.8), layout="constrained")
for panel, index in zip(axes.flat, jnp.argsort(is_right), strict=False):
    panel.imshow(test_x[index], cmap="gray_r")
    panel.set_title(f"{predicted[index]}, is {test_y[index]}", color="C0" if is_right[index] else "C3")
    panel.axis("off")
figure.savefig("network-digits.png", dpi=100)
print("wrote network-digits.png")

# %%
# ![Test digits with the network's answers](network-digits.png)
#
# ## The same as an `eqx.Module`
#
# An `eqx.Module` is a class whose fields make a pytree; called, it is the network. The zoo has this one. Optax has the
# recipe, piece by piece. What is left to write is how a loss comes from a model, and the step.
network = eqzoo.MLP(eqzoo.MLPConfig(hidden=(128, 64)), key=jax.random.key(0))
decay = optax.add_decayed_weights(DECAY, mask=decay_mask)
descent = optax.sgd(optax.cosine_decay_schedule(RATE, STEPS), MOMENTUM)
optimizer = optax.chain(optax.clip_by_global_norm(LIMIT), decay, descent)
opt_state = optimizer.init(eqx.filter(network, eqx.is_inexact_array))


def mean_loss(network, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(network)(images), labels).mean()


@eqx.filter_jit
def update(network, opt_state, images, labels):
    value, grads = eqx.filter_value_and_grad(mean_loss)(network, images, labels)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(network, eqx.is_inexact_array))
    return eqx.apply_updates(network, updates), opt_state, value


# %%
# These are 12 lines against 40; imports, blank lines and what both share are not counted. Where did the others go? They
# are in the libraries, where they are written once and tested. Nothing is out of reach: each of these names leads to
# code that one can read, much like ours.
#
# A network that no zoo has, you write as a class of your own. That makes 18 lines:


class Network(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __call__(self, image):
        first, second, third = self.layers
        return third(jax.nn.relu(second(jax.nn.relu(first(image.reshape(-1))))))


keys = jax.random.split(jax.random.key(0), 3)
own = Network([eqx.nn.Linear(*widths, key=key) for widths, key in zip(pairwise(WIDTHS), keys, strict=True)])

# %%
# ## Both give the same numbers
#
# Equinox and the zoo draw their random weights as PyTorch does, not as He. So we give the networks ours. All of these
# trees list the same six arrays in the same order, so the leaves of one fit into the structure of the other.
# `partition` sets aside what is no array: here, two flags of the zoo's network.


def with_weights_of(params, network):
    arrays, rest = eqx.partition(network, eqx.is_array)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), jax.tree.leaves(params)), rest)


network, own = with_weights_of(start, network), with_weights_of(start, own)

# %%
# The outputs are equal bit for bit: it is the same arithmetic in the same order.
x, y = train_x[:BATCH], train_y[:BATCH]
logits = jax.vmap(apply, in_axes=(None, 0))(start, x)
assert jnp.array_equal(logits, jax.vmap(network)(x))
assert jnp.array_equal(logits, jax.vmap(own)(x))

# %%
# So are the gradients, through the same loss.


def our_loss(network, images, labels):
    return jnp.mean(jax.vmap(cross_entropy)(jax.vmap(network)(images), labels))


def error(tree, other):
    """The largest difference, relative to the largest number of its leaf."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(eqx.filter(other, eqx.is_array)), strict=True)
    return max(float(jnp.max(abs(a - b)) / jnp.max(abs(a))) for a, b in pairs)


grads = jax.grad(loss)(start, x, y)
assert error(grads, eqx.filter_grad(our_loss)(network, x, y)) == 0

# %%
# Optax's cross-entropy equals ours on paper. But it subtracts the right logit from the logarithm of the sum, and has no
# vector with a one. Another order of operations rounds differently, in the seventh digit. From here on, equal means: up
# to rounding.
assert error(grads, eqx.filter_grad(mean_loss)(network, x, y)) < 1e-5

# %%
# Training carries these differences on, and the compiler orders the operations of the two programs in its own way. We
# train both from the same weights, on the same batches, and compare the weights after every epoch.
params, velocity = start, jax.tree.map(jnp.zeros_like, start)
opt_state = optimizer.init(eqx.filter(network, eqx.is_inexact_array))
errors = []
for count, batch in enumerate(batches()):
    params, velocity, _ = step(params, velocity, count, train_x[batch], train_y[batch])
    network, opt_state, _ = update(network, opt_state, train_x[batch], train_y[batch])
    if (count + 1) % (STEPS // EPOCHS) == 0:
        errors.append(error(params, network))
assert max(errors) < 1e-4
print(f"by hand {accuracy(lambda image: apply(params, image), test_x, test_y):.1%}")
print(f"eqx.Module {accuracy(network, test_x, test_y):.1%}")

# %%
# After all 330 steps the weights agree to four digits and more, and the accuracy is the same. A network is a tree of
# arrays and a function. Whether the tree is made of dicts or of modules changes how it reads, not what it computes.
