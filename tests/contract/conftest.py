"""What the battery's tests share of a row, made once: a model in training mode, its inputs, and what it computes.

By the session, so that pytest runs all tests of a row one after the other.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, PRNGKeyArray, PyTree

import eqzoo
from tests.contract.table import BATCH, ROWS, Row, cast, jitted_train_step, randomised


class Subject(NamedTuple):
    row: Row
    model: Any
    state: eqx.nn.State
    xs: Array
    keys: PRNGKeyArray

    @property
    def frozen(self) -> Any:
        return eqzoo.freeze(self.model, self.state)


class Step(NamedTuple):
    outputs: Array
    state: eqx.nn.State
    gradients: PyTree


@pytest.fixture(scope="session", params=ROWS, ids=lambda row: row.model.__name__)
def row(request) -> Row:
    return request.param


@pytest.fixture(scope="session")
def subject(row) -> Iterator[Subject]:
    model, state = randomised(row, seed=0)
    yield Subject(row, model, state, row.batch(1), jax.random.split(jax.random.key(2), BATCH))
    jax.clear_caches()  # no other row runs these programs


@pytest.fixture(scope="session")
def step(subject) -> Step:
    """One training step on one device, without options."""
    return Step(*jitted_train_step(*subject[1:]))


@pytest.fixture(scope="session")
def exact_step(subject) -> Step:
    """That in double precision, for what rounding would hide: batch norms over small maps enlarge it."""
    with jax.enable_x64(True):
        return Step(*jitted_train_step(*cast(subject[1:4], jnp.float64), subject.keys))


@pytest.fixture(scope="session")
def predictions(subject) -> Array:
    """The batch's outputs in inference mode."""
    return eqx.filter_jit(eqx.filter_vmap(subject.frozen))(subject.xs)
