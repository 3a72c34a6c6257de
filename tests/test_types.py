"""`typed` turns a wrong argument of a public method into one sentence with the remedy."""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, TypeCheckError

from eqzoo._types import check_choices, typed


class Net(eqx.Module):
    channels: int = eqx.field(static=True)

    @typed
    def __call__(self, x: Float[Array, "height width {self.channels}"]) -> Float[Array, " channels"]:
        return jnp.mean(x, (0, 1))

    @typed
    def embed(self, tokens: Int[Array, " tokens"]) -> Int[Array, " tokens"]:
        return tokens

    @typed
    def wrong_result(self, x: Float[Array, "height width {self.channels}"]) -> Float[Array, "height"]:
        return x

    @typed
    def calls_on(self, x: Float[Array, "height width {self.channels}"]) -> Int[Array, " tokens"]:
        return self.embed(x)


NET = Net(3)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (
            jnp.zeros((3, 8, 8)),
            "Net: x is an array of shape (3, 8, 8) and dtype float32, "
            "expected a float array of shape (height, width, 3); images are channels-last: `jnp.moveaxis(x, 0, -1)`",
        ),
        (jnp.zeros((2, 8, 8, 3)), "a model takes one example, so map it over the batch: `jax.vmap(model)`"),
        (jnp.zeros((8, 8, 1)), "pass 3 channels, or create the model with `in_channels=1`"),
        (jnp.zeros((8, 8)), "pass an array with 3 axes"),
        (jnp.zeros((8, 8, 3), jnp.uint8), "for example `x.astype(jnp.float32) / 255`"),
        (np.zeros((8, 8, 3), np.float32), "x is a numpy array of shape (8, 8, 3) and dtype float32, expected"),
        (None, "x is None, expected a float array of shape (height, width, 3); pass a JAX array: `jnp.asarray(x)`"),
    ],
)
def test_an_image_that_does_not_fit(x, sentence):
    with pytest.raises(TypeError) as caught:
        NET(x)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokens_that_are_no_integers():
    with pytest.raises(
        TypeError, match=r"Net: tokens is an array .* token ids are integers: `tokens.astype\(jnp.int32\)`"
    ):
        NET.embed(jnp.zeros(4))


def test_the_check_runs_while_tracing_too():
    with pytest.raises(TypeError, match="channels-last"):
        jax.jit(lambda x: NET(x))(jnp.zeros((3, 8, 8)))
    with pytest.raises(TypeError, match="channels-last"):
        jax.vmap(NET)(jnp.zeros((2, 3, 8, 8)))


def test_an_error_of_a_method_called_within_names_that_method():
    with pytest.raises(TypeError, match="Net: tokens is an array"):
        NET.calls_on(jnp.zeros((8, 8, 3)))


def test_a_wrong_result_stays_a_type_check_error():
    with pytest.raises(TypeCheckError, match="return value"):
        NET.wrong_result(jnp.zeros((8, 8, 3)))


@dataclass(frozen=True)
class Config:
    size: int = 3
    block: Literal["basic", "bottleneck"] = "basic"


def test_a_choice_that_is_none():
    check_choices(Config(block="bottleneck"))
    with pytest.raises(ValueError, match="Config: block='basik' is unknown; choose 'basic', 'bottleneck'"):
        check_choices(Config(block="basik"))


def test_a_right_argument_passes():
    assert NET(jnp.ones((4, 5, 3))).shape == (3,)
