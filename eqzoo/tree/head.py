"""A new head on a model that is otherwise kept."""

import dataclasses
import inspect
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
from jaxtyping import PRNGKeyArray, PyTree

from eqzoo.tree.paths import leaves_with_paths

Model = TypeVar("Model")


def swap_head(model: Model, num_classes: int, *, key: PRNGKeyArray) -> Model:
    """The model with a freshly drawn head for `num_classes`, or without one for 0. All else is kept; so its state fits.

    That is for every model that `type(model)(config, key=key)` makes of a dataclass with the field `num_classes`, and
    that keeps it as its `config`. The fields whose shapes depend on `num_classes` are drawn anew, as the model's own
    initialisation draws them; the others are the same objects as before.

    ```python
    model, state = eqzoo.create("mlp", key=jax.random.key(0))
    model = swap_head(model, 3, key=jax.random.key(1))
    model(jnp.ones((28, 28, 1))).shape  # (3,)
    ```
    """
    config = _config(model, num_classes, key)
    more = dataclasses.replace(config, num_classes=num_classes + 1)
    make = lambda config, key: eqx.nn.make_with_state(partial(type(model), config))(key=key)[0]
    new, other = (eqx.filter_eval_shape(make, each, key) for each in (config, more))
    names = [field.name for field in dataclasses.fields(new)]
    changed = [name for name in names if _shapes(getattr(new, name)) != _shapes(getattr(other, name))]
    # Under `jit`, what isn't returned isn't drawn.
    drawn = eqx.filter_jit(lambda key: {name: getattr(make(config, key), name) for name in changed})(key)
    replaced = {"config": config, **drawn}
    copy = object.__new__(type(model))
    for field in dataclasses.fields(new):
        kept = new if field.metadata.get("static") else model
        value = replaced[field.name] if field.name in replaced else getattr(kept, field.name)
        object.__setattr__(copy, field.name, value)  # static fields are out of `eqx.tree_at`'s reach
    return copy


def _config(model: Any, num_classes: int, key: PRNGKeyArray) -> Any:
    """The model's config with another number of classes."""
    from eqzoo._model import Frozen  # which imports this package

    name = type(model).__name__
    if isinstance(model, Frozen):
        raise ValueError(
            "swap_head: a frozen model has its state built in; swap the head of the model you froze, or of the one "
            "that `eqzoo.load(..., trainable=True)` returns, and freeze the result"
        )
    config = getattr(model, "config", None)
    if not dataclasses.is_dataclass(config) or isinstance(config, type) or not hasattr(config, "num_classes"):
        raise ValueError(
            f"swap_head: a {name} has no `config` with a field num_classes; put a head of your own in its place: "
            f"`eqzoo.tree.replace(model, {{'head': head}})`"
        )
    try:
        inspect.signature(type(model)).bind(config, key=key)
    except TypeError as error:
        raise ValueError(
            f"swap_head: a {name} isn't made by {name}(config, key=key) ({error}); put a head of your own in its "
            f"place: `eqzoo.tree.replace(model, {{'head': head}})`"
        ) from error
    if num_classes < 0:
        raise ValueError(f"swap_head: num_classes={num_classes} is negative; pass 0 to remove the head")
    return dataclasses.replace(config, num_classes=num_classes)


def _shapes(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    return [(path, leaf.shape) for path, leaf in leaves_with_paths(tree) if hasattr(leaf, "shape")]
