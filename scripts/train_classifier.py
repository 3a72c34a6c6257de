"""Train any image classifier on scikit-learn's digits, with the whole loop in sight. For example:

python scripts/train_classifier.py

python scripts/train_classifier.py --model mlp --options image_size 32 in_channels 3

python scripts/train_classifier.py --model my_package.my_module:MyNet
"""

from dataclasses import dataclass, field

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import eqzoo


@dataclass
class Options:
    model: str = "resnet18"
    """A name from eqzoo.list_models(), or package.module:Class for your own (it gets num_classes and key)."""
    options: dict[str, int] = field(default_factory=dict)
    """Changes to the model's config, as in `--options image_size 32 patch_size 4`."""
    image_size: int = 32
    """The 8x8 digits are enlarged to this."""
    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    seed: int = 0


def digits(image_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train images, train labels, test images, test labels; images are (batch, size, size, 3) in [-1, 1]."""
    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray(images.reshape(-1, 8, 8, 1) / 8 - 1, jnp.float32)
    images = np.asarray(jax.image.resize(images, (len(images), image_size, image_size, 3), "linear"))
    test, train = np.split(np.random.default_rng(0).permutation(len(images)), [360])
    return images[train], labels[train], images[test], labels[test]


def shift(image, key):
    """The image moved by up to a sixteenth of its size: the only augmentation digits need."""
    reach = image.shape[0] // 16
    padded = jnp.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    top, left = jax.random.randint(key, (2,), 0, 2 * reach + 1)
    return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)


def main(options: Options) -> None:
    console = Console()
    train_x, train_y, test_x, test_y = digits(options.image_size)
    key_model, key = jax.random.split(jax.random.key(options.seed))
    model, state = eqzoo.create(options.model, num_classes=10, key=key_model, **options.options)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    console.print(f"{options.model}: {parameters:,} parameters; {len(train_x)} training and {len(test_x)} test images")

    steps_per_epoch = len(train_x) // options.batch_size
    steps = options.epochs * steps_per_epoch
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, steps // 10, steps)
    optimizer = optax.adamw(schedule, weight_decay=options.weight_decay)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, state, images, labels, key):
        def forward(image, key):
            key_shift, key_model = jax.random.split(key)
            return eqzoo.apply(model, state, shift(image, key_shift), key=key_model)

        keys = jax.random.split(key, len(images))
        logits, state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(images, keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    @eqx.filter_jit(donate="all")
    def train_step(model, state, opt_state, images, labels, key):
        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state, images, labels, key)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    @eqx.filter_jit
    def accuracy(model, state, images, labels):
        predicted = jax.vmap(eqzoo.freeze(model, state))(images).argmax(axis=-1)
        return jnp.mean(predicted == labels)

    shuffle = np.random.default_rng(options.seed)
    for epoch in range(options.epochs):
        losses = []
        batches = shuffle.permutation(len(train_x))[: steps_per_epoch * options.batch_size]
        batches = batches.reshape(steps_per_epoch, options.batch_size)
        for batch in track(batches, description=f"epoch {epoch + 1:2}/{options.epochs}", console=console):
            key, key_step = jax.random.split(key)
            model, state, opt_state, loss = train_step(
                model, state, opt_state, jnp.asarray(train_x[batch]), jnp.asarray(train_y[batch]), key_step
            )
            losses.append(loss)
        test_accuracy = accuracy(model, state, jnp.asarray(test_x), jnp.asarray(test_y))
        console.print(f"  loss {np.mean(losses):.4f}   test accuracy {test_accuracy:.2%}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
