"""Classifiers of the zoo as the backbones of other models."""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from eqzoo._model import is_stateful
from eqzoo._registry import variant

Read = Literal["features", "first_features", "features_and_stem"]


def make_backbone(name: str, *, in_channels: int, output_stride: int = 32, key: PRNGKeyArray) -> Any:
    """The model called `name`, without what comes after its maps; below an `output_stride` of 32, dilated to keep them
    larger."""
    family, config = variant(name)
    known = {field.name for field in dataclasses.fields(config)}
    if "num_classes" not in known or not hasattr(family.model, "features"):
        raise ValueError(f"backbone={name!r} is no vision model with feature maps; choose one such as 'resnet50'")
    changes = {"num_classes": 0, "in_channels": in_channels, **({"top": "none"} if "top" in known else {})}
    if output_stride != 32:
        if "output_stride" not in known:
            raise ValueError(
                f"backbone={name!r} can't be dilated; pass output_stride=32, or choose a ResNet or MobileNet"
            )
        changes["output_stride"] = output_stride
    return family.model(dataclasses.replace(config, **changes), key=key)


def feature_maps(
    backbone: Any, x: Array, state: eqx.nn.State, *, read: Read = "features", key: PRNGKeyArray | None = None
) -> tuple[tuple[Array, ...], eqx.nn.State]:
    """The backbone's maps, one a stage, whether or not it has a state; by another method if one is to `read` them."""
    method = getattr(backbone, read, None)
    if method is None:
        raise ValueError(f"read={read!r} is no method of {type(backbone).__name__}; pass read='features'")
    return method(x, state, key=key) if is_stateful(backbone) else (method(x, key=key), state)


def feature_channels(backbone: Any, *, read: Read = "features") -> tuple[int, ...]:
    """The channels of each of a backbone's maps."""
    return tuple(channels for _, channels in feature_sizes(backbone, read=read))


def feature_sizes(backbone: Any, *, read: Read = "features") -> tuple[tuple[float, int], ...]:
    """How many times smaller than an image each of a backbone's maps is, and its channels."""
    config, quiet = backbone.config, eqx.nn.inference_mode(backbone)
    size = getattr(config, "image_size", 224)
    image = jax.ShapeDtypeStruct((size, size, config.in_channels), jnp.float32)
    maps, _ = eqx.filter_eval_shape(lambda x: feature_maps(quiet, x, eqx.nn.State(quiet), read=read), image)
    if any(len(each.shape) != 3 for each in maps):
        raise ValueError(f"{type(backbone).__name__} gives tokens, not maps; choose a backbone such as 'resnet50'")
    return tuple((size / each.shape[0], each.shape[2]) for each in maps)
