"""Show me the loop

Every training is the same few lines: take a batch, compute the loss and its gradient, update the weights, now and then
print something. One can write them out, or hide them in a Trainer. This lesson does both with the same network and the
same data. It shows that they end with the same weights, and says what speaks for and against each.
"""

# %%
# ## Data
#
# scikit-learn's 1797 handwritten digits, enlarged from 8x8 to 16x16 pixels. Both trainings see the same batches in the
# same order.
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import eqzoo
from eqzoo.train import TrainState
from eqzoo.tree import decay_mask, diff

pixels, labels = load_digits(return_X_y=True)
images = jnp.asarray(pixels.reshape(-1, 8, 8, 1) / 8 - 1, jnp.float32)
images = jax.image.resize(images, (len(images), 16, 16, 1), "linear")
test, train = np.split(np.random.default_rng(0).permutation(len(images)), [360])
labels = jnp.asarray(labels)

STEPS, BATCH = 300, 64


def batches():
    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        batch = draw.choice(train, BATCH, replace=False)
        yield images[batch], labels[batch]


# %%
# ## The loop
#
# A small ResNet, AdamW with warm-up and cosine decay, gradients clipped, no decay on biases and norms.
#
# `eqzoo.train.TrainState` is the one thing that goes around: model, running statistics of the batch norms, the
# optimizer's state, a step counter and a random key. It is a pytree and does nothing by itself.


def make_network():
    config = {"depths": (1,), "widths": (32,), "in_channels": 1, "num_classes": 10}
    return eqzoo.create("resnet18", key=jax.random.key(0), **config)


def make_optimizer():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, STEPS // 10, STEPS)
    decaying = optax.adamw(schedule, weight_decay=0.05, mask=decay_mask)
    return optax.chain(optax.clip_by_global_norm(1.0), decaying)


# %%
# The loss comes with what else one wants to know. `has_aux=True` means: differentiate the first result, hand on the
# second. Each image gets a key of its own, here for a little noise. `"batch"` is the name under which batch norm finds
# the other images.


def loss_fn(model, state, images, labels, key):
    def forward(image, key):
        key_noise, key_model = jax.random.split(key)
        image = image + 0.1 * jax.random.normal(key_noise, image.shape)
        return eqzoo.apply(model, state, image, key=key_model)

    keys = jax.random.split(key, len(images))
    logits, state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(images, keys)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
    loss = optax.softmax_cross_entropy(logits, targets).mean()
    accuracy = jnp.mean(logits.argmax(axis=-1) == labels)
    return loss, (state, {"loss": loss, "accuracy": accuracy})


# %%
# The step is a pure function: a state and a batch go in, a state and the metrics come out. The key of a step comes from
# the key of the run and the number of the step. `donate="all"` lets the new state take the memory of the old one.


@eqx.filter_jit(donate="all")
def train_step(train_state, images, labels):
    model, key = train_state.model, jax.random.fold_in(train_state.key, train_state.step)
    grads, (state, metrics) = eqx.filter_grad(loss_fn, has_aux=True)(model, train_state.state, images, labels, key)
    updates, opt_state = optimizer.update(grads, train_state.opt_state, eqx.filter(model, eqx.is_inexact_array))
    model = eqx.apply_updates(model, updates)
    return TrainState(model, state, opt_state, train_state.step + 1, train_state.key), metrics


def show(step, recent):
    loss, accuracy = (np.mean([metrics[name] for metrics in recent]) for name in ("loss", "accuracy"))
    print(f"step {step}  loss {loss:.2f}  accuracy {accuracy:.0%}")


# %%
# And the loop. The metrics stay on the device until somebody prints them, so that Python runs ahead and the device
# never waits.
optimizer = make_optimizer()
train_state = TrainState.create(*make_network(), optimizer, key=jax.random.key(1))
history = []
for step, (x, y) in enumerate(batches(), start=1):
    train_state, metrics = train_step(train_state, x, y)
    history.append(metrics)
    if step % 100 == 0:
        show(step, history[-100:])

# %%
# A test takes two more lines.
predict = eqx.filter_jit(eqx.filter_vmap(eqzoo.freeze(train_state.model, train_state.state)))
print(f"test accuracy {jnp.mean(predict(images[test]).argmax(axis=-1) == labels[test]):.1%}")

# %%
# ## The Trainer
#
# The same in the style of a framework. The Trainer owns the loop and calls back at fixed points. What else should
# happen goes into callbacks.


class Callback:
    def on_fit_start(self, trainer):
        pass

    def on_step_end(self, trainer, metrics):
        pass


class History(Callback):
    def on_fit_start(self, trainer):
        self.metrics = []

    def on_step_end(self, trainer, metrics):
        self.metrics.append(metrics)


class Print(Callback):
    def __init__(self, history, every):
        self.history = history
        self.every = every

    def on_step_end(self, trainer, metrics):
        if trainer.step % self.every == 0:
            show(trainer.step, self.history.metrics[-self.every :])


class Trainer:
    def __init__(self, loss_fn, optimizer, callbacks):
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.callbacks = callbacks

    def training_step(self, train_state, images, labels):
        model, key = train_state.model, jax.random.fold_in(train_state.key, train_state.step)
        gradient = eqx.filter_grad(self.loss_fn, has_aux=True)
        grads, (state, metrics) = gradient(model, train_state.state, images, labels, key)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = self.optimizer.update(grads, train_state.opt_state, parameters)
        model = eqx.apply_updates(model, updates)
        return TrainState(model, state, opt_state, train_state.step + 1, train_state.key), metrics

    def fit(self, model, state, batches, *, key):
        self.train_state = TrainState.create(model, state, self.optimizer, key=key)
        self.step = 0
        step_fn = eqx.filter_jit(self.training_step, donate="all")
        for callback in self.callbacks:
            callback.on_fit_start(self)
        for images, labels in batches:
            self.train_state, metrics = step_fn(self.train_state, images, labels)
            self.step += 1
            for callback in self.callbacks:
                callback.on_step_end(self, metrics)


# %%
# Using it takes four lines. (The network is made anew from its key, for the loop has donated the first one.)
recorded = History()
trainer = Trainer(loss_fn, make_optimizer(), callbacks=[recorded, Print(recorded, every=100)])
model, state = make_network()
trainer.fit(model, state, batches(), key=jax.random.key(1))

# %%
# ## The same weights
#
# `diff` lists what differs between two trees: values, shapes, structure. Here nothing does, neither the weights and
# statistics nor the optimizer's state; the numbers are equal bit for bit. `jit` compiled the same program twice, and
# how the Python around it is arranged makes no difference to it.
assert diff(train_state, trainer.train_state) == []

figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
    axis.plot([metrics[name] for metrics in history], label="loop", linewidth=3, alpha=0.4)
    axis.plot([metrics[name] for metrics in recorded.metrics], label="Trainer", linewidth=1)
    axis.set(xlabel="step", ylabel=f"{name} of the batch")
    axis.legend()
figure.savefig("loop-curves.png", dpi=100)
print("wrote loop-curves.png")

# %%
# ![The curves of the loop and of the Trainer lie on each other](loop-curves.png)
#
# ## What speaks for which
#
# The loop has 29 lines, the loss and the printing among them. The Trainer with its callbacks has 41 without these. But
# the next script needs only a loss and the four lines that use it.
#
# For the loop:
#
# 1. What happens, happens where you read it, in that order.
# 2. A wish is a line in its place. The norm of the gradient in the log: `metrics["norm"] = optax.global_norm(grads)`.
# 3. The step is a pure function. `vmap` trains five seeds at once; a test calls it twice and compares.
# 4. An error's traceback leads to your own lines.
# 5. There is nothing to learn beyond JAX, Equinox and Optax, and no further framework whose next version changes it.
#
# Against it:
#
# 1. You write it again for each project, and the copies drift apart.
# 2. Evaluation, checkpoints, resuming, logs: whatever you don't write, you don't have.
# 3. Its mistakes are yours. Drop the new `state`, and the statistics never move; use one key for all steps, and the
#    noise is always the same. Neither raises an error.
# 4. No two loops are alike. To read somebody else's takes time.
# 5. An improvement to one loop reaches no other.
#
# For the Trainer:
#
# 1. A training is a few lines.
# 2. The loop is written and tested once, and a repair reaches everybody.
# 3. Callbacks can be shared and combined: early stopping, checkpoints, a progress bar.
# 4. All projects have the same logs, options and files.
# 5. It remembers what one forgets: the new state, the key of each step, the donation.
#
# Against it:
#
# 1. The order of events is in another file. So is the answer to "when is this called?".
# 2. Callbacks see what the Trainer hands out. The gradient isn't among it: to log its norm, you override
#    `training_step`, and have a copy of the loop's inside after all.
# 3. Two optimizers, two models, a step in two halves: each needs a hook that somebody foresaw. Options pile up.
# 4. The run is an object that changes. It can't be passed through `vmap` or compared with an earlier self.
# 5. Callbacks depend on each other's order, as `Print` does on `History` here, and nothing says so.
#
# So the loop gives up what is shared: each project pays for its own. The Trainer gives up what is open: the unforeseen
# is hard. Many trainings of one kind are a case for a Trainer. Research, where each training is a little different, is
# one for the loop. eqzoo has no Trainer. It has functions that a loop calls, so that what is shared is written once and
# the loop stays yours.
