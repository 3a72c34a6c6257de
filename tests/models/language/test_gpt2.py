"""GPT-2 against transformers' GPT2LMHeadModel and GPT2Model: names, outputs, gradients, training."""

import functools
import re
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

import eqzoo
from eqzoo._model import _skeleton
from eqzoo._save import _stored
from eqzoo.checkpoint import unfill
from eqzoo.models.language.gpt2 import FAMILY, GPT2, SHARDING, TRANSFORMERS, VARIANTS, Block, GPT2Config
from eqzoo.tree import leaves_with_paths
from tests.parity import assert_close, assert_names_and_shapes, assert_same_gradients, filled, from_torch, randomise

TINY = GPT2Config(dim=24, depth=3, heads=3, vocab=61, context=16)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab, (2, TINY.context))

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
}

# Each option, and upstream's name for it.
OPTIONS = {
    "default": ({}, {}),
    "hidden": ({"hidden": 40}, {"n_inner": 40}),
    "gelu": ({"activation": "gelu"}, {"activation_function": "gelu"}),
    "relu": ({"activation": "relu"}, {"activation_function": "relu"}),
    "silu": ({"activation": "silu"}, {"activation_function": "silu"}),
    "tanh": ({"activation": "tanh"}, {"activation_function": "tanh"}),
    "norm_eps": ({"norm_eps": 0.1}, {"layer_norm_epsilon": 0.1}),
    "unscaled": ({"scale_by_width": False}, {"scale_attn_weights": False}),
    "scale_by_layer": ({"scale_by_layer": True}, {"scale_attn_by_inverse_layer_idx": True}),
    "untied_head": ({"tied_head": False}, {"tie_word_embeddings": False}),
}


def hf_config(config: GPT2Config, **options) -> transformers.GPT2Config:
    return transformers.GPT2Config(
        vocab_size=config.vocab,
        n_positions=config.context,
        n_embd=config.dim,
        n_layer=config.depth,
        n_head=config.heads,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        **options,
    )


def tiny_pair(option: str) -> tuple[GPT2Config, transformers.GPT2LMHeadModel]:
    """A config of ours, and upstream's model for it, in evaluation mode."""
    ours, theirs = OPTIONS[option]
    return replace(TINY, **ours), randomise(transformers.GPT2LMHeadModel(hf_config(TINY, **theirs)), seed=1).eval()


def converted(config: GPT2Config, upstream: torch.nn.Module) -> GPT2:
    return eqx.nn.inference_mode(from_torch((FAMILY, config), upstream)[0])


def loaded(config: GPT2Config, tensors: dict[str, np.ndarray]) -> GPT2:
    stored = {name: _stored(array) for name, array in tensors.items()}
    skeleton = _skeleton(functools.partial(GPT2, config))
    return eqx.nn.inference_mode(filled(stored, skeleton, FAMILY.rules)[0])


created = eqx.filter_jit(lambda config: GPT2(config, key=jax.random.key(0)))


def arrays(upstream: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in upstream.state_dict().items()}


def next_token_loss(model: GPT2, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jax.vmap(model)(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), logits


loss_and_gradients = eqx.filter_jit(eqx.filter_value_and_grad(next_token_loss, has_aux=True))
predict = eqx.filter_jit(lambda model, tokens: jax.vmap(model)(tokens))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("upstream", [transformers.GPT2LMHeadModel, transformers.GPT2Model])
def test_every_variant_has_upstreams_names_shapes_and_size(name, upstream):
    with torch.device("meta"):
        model = upstream(hf_config(VARIANTS[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert_names_and_shapes(name, model.state_dict())


def test_variants_have_upstreams_defaults():
    """Every field that no variant sets is the published configs' value, which is transformers' default."""
    default = transformers.GPT2Config()
    config = VARIANTS["gpt2"]
    assert (config.vocab, config.context) == (default.vocab_size, default.n_positions)
    assert (config.hidden, config.norm_eps) == (default.n_inner, default.layer_norm_epsilon)
    assert (config.activation, default.activation_function) == ("gelu_tanh", "gelu_new")
    assert config.embedding_dropout == default.embd_pdrop
    assert config.attention_dropout == default.attn_pdrop
    assert config.residual_dropout == default.resid_pdrop
    assert config.tied_head == default.tie_word_embeddings
    assert config.scale_by_width == default.scale_attn_weights
    assert config.scale_by_layer == default.scale_attn_by_inverse_layer_idx
    assert all(replace(config, dim=c.dim, depth=c.depth, heads=c.heads) == c for c in VARIANTS.values())


def test_untied_head_has_upstreams_names_and_shapes():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(hf_config(TINY, tie_word_embeddings=False))
    assert_names_and_shapes((FAMILY, replace(TINY, tied_head=False)), model.state_dict())


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_loss_and_gradients_are_upstreams(option):
    config, upstream = tiny_pair(option)
    tokens = torch.from_numpy(TOKENS)
    theirs = upstream(tokens, labels=tokens)
    theirs.loss.backward()

    (loss, logits), gradients = loss_and_gradients(converted(config, upstream), jnp.asarray(TOKENS))
    assert_close(logits, theirs.logits, 1e-5)
    assert_close(loss, theirs.loss, 1e-5)
    assert_same_gradients(gradients, upstream, TRANSFORMERS)


@pytest.mark.parametrize("option", ["gelu", "relu", "silu", "tanh", "norm_eps", "unscaled", "scale_by_layer"])
def test_logits_differ_without_the_option(option):
    """The comparison above would fail, tenfold, if the model ignored the option. (The other options change shapes.)"""
    _, upstream = tiny_pair(option)
    logits = predict(converted(TINY, upstream), jnp.asarray(TOKENS))
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(logits, upstream(torch.from_numpy(TOKENS)).logits, 1e-4)


def test_hidden_is_upstreams_last_hidden_state():
    upstream = randomise(transformers.GPT2Model(hf_config(TINY)), seed=2).eval()
    ours = jax.jit(jax.vmap(converted(TINY, upstream).hidden))(jnp.asarray(TOKENS))
    assert_close(ours, upstream(torch.from_numpy(TOKENS)).last_hidden_state, 1e-4)


def test_fewer_tokens_than_context():
    config, upstream = tiny_pair("default")
    logits = predict(converted(config, upstream), jnp.asarray(TOKENS[:, :5]))
    assert_close(logits, upstream(torch.from_numpy(TOKENS[:, :5])).logits, 1e-4)


def test_gpt2_at_its_real_size():
    config = VARIANTS["gpt2"]
    upstream = randomise(transformers.GPT2LMHeadModel(hf_config(config)), seed=3).eval()
    tokens = np.random.default_rng(1).integers(0, config.vocab, (1, 32))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(tokens)).logits
    assert_close(predict(eqx.nn.inference_mode(from_torch("gpt2", upstream)[0]), jnp.asarray(tokens)), theirs, 1e-4)


def test_three_adamw_steps_are_upstreams():
    no_dropout = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "residual_dropout": 0.0}
    upstream = transformers.GPT2LMHeadModel(hf_config(TINY, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))
    upstream = randomise(upstream, seed=4).train()
    model, _ = from_torch((FAMILY, replace(TINY, **no_dropout)), upstream)

    # `eps` lies above the rounding noise in a key's bias, whose exact gradient is zero; Adam would scale that noise up.
    settings = {"b1": 0.9, "b2": 0.95, "eps": 1e-5, "weight_decay": 0.1}
    optimizer = optax.adamw(1e-2, **settings)
    torch_optimizer = torch.optim.AdamW(upstream.parameters(), 1e-2, (0.9, 0.95), eps=1e-5, weight_decay=0.1)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state, tokens):
        (loss, _), gradients = eqx.filter_value_and_grad(next_token_loss, has_aux=True)(model, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    before = arrays(upstream)
    for _ in range(3):
        model, opt_state, loss = step(model, opt_state, jnp.asarray(TOKENS))
        torch_optimizer.zero_grad()
        theirs = upstream(torch.from_numpy(TOKENS), labels=torch.from_numpy(TOKENS)).loss
        theirs.backward()
        torch_optimizer.step()
        assert_close(loss, theirs, 1e-4)
    for name, ours in unfill(model, TRANSFORMERS).items():
        after = upstream.state_dict()[name].numpy()
        assert np.abs(after - before[name]).max() > 1e-2, f"{name} was not trained"
        assert_close(ours, after, 1e-4)


def test_later_tokens_leave_earlier_logits_bit_identical():
    config, upstream = tiny_pair("default")
    model = converted(config, upstream)
    changed = TOKENS.copy()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab
    before, after = (np.asarray(predict(model, jnp.asarray(tokens))) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(axis=-1).all()


@pytest.mark.parametrize("place", ["embedding_dropout", "attention_dropout", "residual_dropout"])
def test_each_dropout_needs_a_key_and_changes_the_output(place):
    rates = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "residual_dropout": 0.0, place: 0.5}
    model = created(replace(TINY, **rates))
    with pytest.raises(ValueError, match=re.escape("Dropout(rate=0.5) got no key in training mode")):
        jax.eval_shape(model, jnp.asarray(TOKENS[0]))
    call = eqx.filter_jit(lambda model, key: model(jnp.asarray(TOKENS[0]), key=key))
    first, again, other = (call(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01 * np.abs(first).max()


def test_residual_dropout_falls_on_what_a_block_adds_and_nowhere_else():
    """Each element that attention or MLP adds is either dropped or doubled; the activations inside an MLP are whole."""
    make = functools.partial(
        Block, 24, 3, 96, activation="relu", norm_eps=1e-5, attention_dropout=0.0, residual_std=0.1
    )
    block = eqx.filter_jit(make)(residual_dropout=0.5, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 24))
    added = eqx.filter_jit(lambda block, key: block(x, jnp.ones(()), key=key) - x)
    for other_branch in (lambda block: block.attention.out.weight, lambda block: block.mlp.fc2.weight):
        alone = eqx.tree_at(other_branch, block, replace_fn=jnp.zeros_like)
        whole = np.asarray(added(eqx.nn.inference_mode(alone), None))
        thinned = np.asarray(added(alone, jax.random.key(2)))
        dropped = thinned == 0
        assert 0.4 < dropped.mean() < 0.6
        np.testing.assert_allclose(thinned[~dropped], 2 * whole[~dropped], rtol=1e-4, atol=1e-5)


def test_initialisation_is_upstreams():
    """Normal of 0.02, smaller by the root of twice the depth where a block writes to the residual stream; no biases."""
    config = GPT2Config(dim=64, depth=8, heads=4, vocab=500, context=100, tied_head=False)
    model = created(config)
    drawn = []
    for path, leaf in leaves_with_paths(eqx.filter(model, eqx.is_array)):
        leaf = np.asarray(leaf)
        if path.endswith("bias"):
            assert not leaf.any(), path
        elif "norm" in path:
            assert (leaf == 1).all(), path
        else:
            residual = path.endswith(("attention.out.weight", "mlp.fc2.weight"))
            np.testing.assert_allclose(leaf.std(), 0.02 / 4 if residual else 0.02, rtol=0.03, err_msg=path)
            assert abs(leaf.mean()) < 0.02 * leaf.std(), path
            drawn.extend(leaf.reshape(config.depth if "[*]" in path else 1, -1)[:, : config.dim**2])
    similarity = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(similarity).max() < 0.1, "two weights share their numbers"


def test_buffers_and_a_repeated_tied_head_are_known():
    """What old files also hold: the causal masks, and the tied weight under its second name."""
    config, upstream = tiny_pair("default")
    tensors = arrays(upstream)
    assert "lm_head.weight" in tensors
    for layer in range(config.depth):
        tensors[f"transformer.h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), bool))
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    unprefixed = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    expected = converted(config, upstream)
    assert eqx.tree_equal(loaded(config, tensors), expected)
    assert eqx.tree_equal(loaded(config, unprefixed), expected)
    del unprefixed["lm_head.weight"]
    assert eqx.tree_equal(loaded(config, unprefixed), expected)


def test_an_untied_file_is_refused_by_a_tied_model():
    _, upstream = tiny_pair("untied_head")
    with pytest.raises(
        eqzoo.CheckpointError, match=r"'lm_head.weight' should repeat 'transformer.wte.weight'.* not tied"
    ):
        loaded(TINY, arrays(upstream))


def test_missing_unexpected_and_misshapen_tensors_are_reported():
    _, upstream = tiny_pair("default")
    tensors = arrays(upstream)
    tensors["transformer.h.1.ln1.weight"] = tensors.pop("transformer.h.1.ln_1.weight")
    tensors["transformer.h.2.mlp.c_fc.weight"] = tensors["transformer.h.2.mlp.c_fc.weight"].T
    with pytest.raises(eqzoo.CheckpointError) as error:
        loaded(TINY, tensors)
    report = str(error.value)
    assert "the checkpoint does not fit the model: 1 missing, 1 unexpected, 1 of a wrong shape or kind" in report
    assert "transformer.h.1.ln_1.weight (24,) (near transformer.h.1.ln1.weight)" in report
    assert "transformer.h.2.mlp.c_fc.weight: shape (96, 24) in the file" in report


def test_a_saved_model_loads_from_its_file_alone(tmp_path):
    config, upstream = tiny_pair("untied_head")
    model = converted(config, upstream)
    eqzoo.save(tmp_path / "gpt2.safetensors", model)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "gpt2.safetensors"), model)


def test_too_many_tokens_float_tokens_and_odd_heads_are_refused():
    model = eqx.nn.inference_mode(created(TINY))
    with pytest.raises(ValueError, match=re.escape("GPT2: 17 tokens are more than context=16; pass at most that many")):
        model(jnp.zeros(17, jnp.int32))
    with pytest.raises(ValueError, match="GPT2: tokens is empty; pass at least one"):
        model(jnp.zeros(0, jnp.int32))
    with pytest.raises(
        TypeError, match=r"GPT2: tokens is .* dtype float32, expected an? int array .*\.astype\(jnp\.int32\)"
    ):
        model(jnp.zeros(8))
    with pytest.raises(TypeError, match=re.escape("a model takes one example, so map it over the batch")):
        model(jnp.zeros((2, 8), jnp.int32))
    with pytest.raises(ValueError, match="dim=24 is not a multiple of heads=5"):
        replace(TINY, heads=5)


def test_every_sharding_rule_is_of_use():
    skeleton, _ = _skeleton(functools.partial(GPT2, replace(TINY, tied_head=False)))
    paths = [path for path, _ in leaves_with_paths(skeleton)]
    for pattern, _ in SHARDING:
        assert any(re.fullmatch(pattern, path) for path in paths), pattern
