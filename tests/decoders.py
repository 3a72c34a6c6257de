"""What the tests of decoders share: comparison with transformers, of models and of the folders it writes."""

import functools
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers

import eqzoo
from eqzoo._model import _skeleton
from eqzoo.models._family import Family, Option, Options
from eqzoo.tree import leaves_with_paths
from tests.parity import assert_close, assert_same_gradients, randomise

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 14))


def tiny_model(config: Any) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    return randomise(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), 0)


def names_of(options: Options, name: str) -> list[str]:
    """The values that an option of upstream's may have."""
    entry = options.table[name]
    assert isinstance(entry, Option)
    return list(entry.values)


def assert_every_sharding_rule_is_of_use(family: Family, config: Any) -> None:
    paths = [path for path, _ in leaves_with_paths(_skeleton(functools.partial(family.model, config))[0])]
    for pattern, _ in family.sharding:
        assert any(re.fullmatch(pattern, path) for path in paths), pattern


def _next_token_loss(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jax.vmap(model)(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), logits


loss_and_gradients = eqx.filter_jit(eqx.filter_value_and_grad(_next_token_loss, has_aux=True))
predict = eqx.filter_jit(lambda model, tokens: jax.vmap(model)(tokens))


def assert_same_logits_and_gradients(model: Any, upstream: torch.nn.Module, rules: Any) -> None:
    tokens = torch.from_numpy(TOKENS)
    theirs: Any = upstream(tokens, labels=tokens)
    theirs.loss.backward()
    (loss, logits), gradients = loss_and_gradients(model, jnp.asarray(TOKENS))
    assert_close(logits, theirs.logits, 1e-5)
    assert_close(loss, theirs.loss, 1e-5)
    assert_same_gradients(gradients, upstream, rules)


def assert_same_logits(model: Any, upstream: torch.nn.Module) -> None:
    with torch.no_grad():
        theirs: Any = upstream(torch.from_numpy(TOKENS))
    assert_close(predict(model, jnp.asarray(TOKENS)), theirs.logits, 1e-4)


def assert_upstream_reads_the_export(model: Any, upstream: Any, folder: Path) -> None:
    """Strictly, with the same numbers and logits; and so does eqzoo."""
    eqzoo.export(folder, model, format="transformers")
    back, report = type(upstream).from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(report.values())
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in upstream.state_dict().items())
    with torch.no_grad():
        tokens = torch.from_numpy(TOKENS)
        assert_close(back.eval()(tokens).logits.numpy(), upstream(tokens).logits, 1e-6)
    again = eqzoo.load(folder)
    assert again.config == model.config
    assert eqx.tree_equal(again, model)
