"""BERT, RoBERTa, XLM-R and DistilBERT against transformers: names, hidden states, heads, gradients, folders."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo.checkpoint import CheckpointError, open_checkpoint
from eqzoo.models.language.bert import FAMILY, VARIANTS, Bert, BertConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    from_torch,
    number_of_parameters,
    randomise,
)

HEADS = {
    "masked_lm": "ForMaskedLM",
    "classifier": "ForSequenceClassification",
    "token_classifier": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    None: "Model",
}
KINDS = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm-roberta", "DistilBert": "distilbert"}
LIBRARIES = tuple(KINDS)
PAD = 3
LENGTHS = (16, 9, 1)  # of the three texts in the batch


def batch(vocab: int = 61) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    tokens = generator.integers(PAD + 1, vocab, (len(LENGTHS), LENGTHS[0]))
    mask = np.arange(LENGTHS[0]) < np.array(LENGTHS)[:, None]
    return {
        "tokens": np.where(mask, tokens, PAD),
        "mask": mask,
        "token_types": generator.integers(0, 2, tokens.shape),
        "weights": generator.standard_normal((*tokens.shape, 1)) * mask[..., None],
    }


BATCH = batch()


def tiny(library: str, head: str | None = "masked_lm", **options: Any) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    if library == "DistilBert":
        sizes = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40}
    else:
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    sizes |= {"vocab_size": 61, "max_position_embeddings": 20, "pad_token_id": PAD, "num_labels": 2}
    config = getattr(transformers, f"{library}Config")(**sizes | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{library}{HEADS[head]}")(config)
    if library == "XLMRoberta" and head == "masked_lm":  # whose tied weight goes by the name of the first module
        model.lm_head = model._modules.pop("lm_head")
    return randomise(model.eval(), 0)


def theirs(upstream: Any, *, types: bool = False, masked: bool = True) -> torch.Tensor:
    """What the model's class gives first; of an answer's two ends, both."""
    arguments = {"attention_mask": torch.tensor(BATCH["mask"]).long()} if masked else {}
    arguments |= {"token_type_ids": torch.tensor(BATCH["token_types"])} if types else {}
    output = upstream(torch.tensor(BATCH["tokens"]), **arguments)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits if "logits" in output else output.last_hidden_state


def described(upstream: Any) -> BertConfig:
    upstream.config.architectures = [type(upstream).__name__]
    return from_config_json(upstream.config.to_dict()).config


def converted(upstream: Any, **changes: Any) -> Any:
    return eqx.nn.inference_mode(from_torch((FAMILY, replace(described(upstream), **changes)), upstream)[0])


def outputs(model: Bert, arrays: dict[str, jax.Array]) -> jax.Array:
    call = lambda tokens, mask, types: model(tokens, mask=mask, token_types=types)
    return jax.vmap(call)(arrays["tokens"], arrays["mask"], arrays.get("token_types"))


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def loss_and_gradients(model: Bert, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """A loss that sees real tokens only."""
    y = outputs(model, {name: array for name, array in arrays.items() if name != "weights"})
    return jnp.sum(y**2 * (arrays["weights"] if y.ndim == 3 else 1)), y


predict = eqx.filter_jit(outputs)


def arrays(*, types: bool) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in BATCH.items() if types or name != "token_types"}


def real(y: Any) -> Any:
    """Without what comes out for padding."""
    return y[BATCH["mask"]] if y.ndim == 3 else y


def assert_same(model: Any, upstream: Any, *, types: bool = False) -> None:
    with torch.no_grad():
        expected = theirs(upstream, types=types)
    given = {name: array for name, array in arrays(types=types).items() if name != "weights"}
    assert_close(real(predict(model, given)), real(expected), 1e-4)


def upstream_rules(library: str, head: str | None) -> Any:
    if head is None:
        return FAMILY.rules[f"transformers_{KINDS[library]}_body"]
    return FAMILY.rules[f"transformers_{KINDS[library]}"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_and_gradients_of_a_padded_batch_are_upstreams(library, head):
    upstream = tiny(library, head)
    types = library == "Bert"
    expected = theirs(upstream, types=types)
    weights = torch.tensor(BATCH["weights"], dtype=torch.float32) if expected.ndim == 3 else 1
    (expected**2 * weights).sum().backward()
    (_, found), gradients = loss_and_gradients(converted(upstream), arrays(types=types))
    assert_close(real(found), real(expected), 1e-4)
    if head is None and library != "DistilBert":
        for parameter in upstream.pooler.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(gradients, upstream, upstream_rules(library, head))


@pytest.mark.parametrize(
    ("library", "option", "field"),
    [
        ("Bert", {"hidden_act": "gelu_new"}, "activation"),
        ("Bert", {"hidden_act": "relu"}, "activation"),
        ("Bert", {"hidden_act": "silu"}, "activation"),
        ("Bert", {"layer_norm_eps": 0.1}, "norm_eps"),
        ("Bert", {"type_vocab_size": 4}, "token_types"),
        ("Roberta", {"layer_norm_eps": 0.1}, "norm_eps"),
        ("Roberta", {"pad_token_id": 5, "max_position_embeddings": 22}, "padding"),
        ("DistilBert", {"activation": "relu"}, "activation"),
    ],
    ids=str,
)
def test_every_option_counts(library, option, field):
    """With it the outputs are upstream's; without it they differ, or the weights don't fit."""
    upstream = tiny(library, **option)
    assert_same(converted(upstream), upstream, types=library == "Bert")
    default = getattr(described(tiny(library)), field)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same(converted(upstream, **{field: default}), upstream, types=library == "Bert")


def test_types_and_mask_count():
    upstream = tiny("Bert")
    model, given = converted(upstream), arrays(types=True)
    with torch.no_grad():
        expected = theirs(upstream, types=True)
    for name, other in (("mask", jnp.ones_like(given["mask"])), ("token_types", jnp.zeros_like(given["tokens"]))):
        found = predict(model, {**{each: given[each] for each in ("tokens", "mask", "token_types")}, name: other})
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(real(found), real(expected), 1e-3)


def test_padding_changes_nothing():
    """What fills a text up leaves its real tokens as they are, whatever it is."""
    model = converted(tiny("Bert"))
    tokens, mask = jnp.asarray(BATCH["tokens"][1]), jnp.asarray(BATCH["mask"][1])
    call = eqx.filter_jit(lambda model, tokens, mask: model.hidden(tokens, mask=mask))
    whole = eqx.filter_jit(lambda model, tokens: model.hidden(tokens))(model, tokens[mask])
    for fill in (PAD, 7):
        assert_close(call(model, jnp.where(mask, tokens, fill), mask)[mask], np.asarray(whole), 1e-6)


@pytest.mark.parametrize("library", ["Bert", "Roberta", "XLMRoberta"])
def test_pooled_is_upstreams(library):
    upstream = tiny(library, None)
    model = converted(upstream)
    tokens = torch.tensor(BATCH["tokens"][:1])
    with torch.no_grad():
        expected = upstream(tokens).pooler_output[0]
    found = eqx.filter_jit(lambda model, tokens: model.pooled(model.hidden(tokens)))(model, jnp.asarray(tokens[0]))
    assert_close(found, expected, 1e-4)


def published(name: str) -> tuple[str, dict[str, Any]]:
    """The library and what its config.json says of this variant's size."""
    config = VARIANTS[name]
    labels = {"vocab_size": config.vocab, "num_labels": 2}
    if config.style == "distilbert":
        sizes = {"dim": config.dim, "n_layers": config.depth, "n_heads": config.heads, "hidden_dim": config.hidden}
        return "DistilBert", {**labels, **sizes}
    sizes = {
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
    }
    if config.style == "bert":
        return "Bert", {**labels, **sizes}
    sizes |= {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    return "XLMRoberta" if name.startswith("xlm") else "Roberta", {**labels, **sizes}


PARAMETERS = {  # of the published bodies, with their poolers
    "bert-base-uncased": 109_482_240,
    "bert-large-uncased": 335_141_888,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
    "xlm-roberta-base": 278_043_648,
    "distilbert-base-uncased": 66_362_880,
    "all-MiniLM-L6-v2": 22_713_216,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_shapes_and_config(name):
    library, options = published(name)
    config = getattr(transformers, f"{library}Config")(**options)
    head = VARIANTS[name].head
    with torch.device("meta"):
        upstream = getattr(transformers, f"{library}{HEADS[head]}")(config)
    assert described(upstream) == replace(VARIANTS[name], head_dropout=0.2 if library == "DistilBert" else 0.1)
    assert_names_and_shapes(name, upstream.state_dict())
    if name in PARAMETERS:
        body = replace(VARIANTS[name], head=None, pooler=library != "DistilBert")
        assert number_of_parameters(FAMILY, body) == PARAMETERS[name]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_head_has_upstreams_names_and_shapes(library):
    for head in HEADS:
        upstream = tiny(library, head)
        assert_names_and_shapes((FAMILY, described(upstream)), upstream.state_dict())


def test_a_published_model_at_its_real_size():
    library, options = published("all-MiniLM-L6-v2")
    upstream = tiny(library, None, **options, max_position_embeddings=512)
    model = converted(upstream)
    assert model.config == VARIANTS["all-MiniLM-L6-v2"]
    assert_same(model, upstream, types=True)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_folders_load_and_transformers_reads_what_is_exported(library, head, tmp_path, saved):
    upstream = tiny(library, head)
    folder = saved(upstream)
    model = eqzoo.load(folder)
    assert_same(model, upstream)
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    reader = type(upstream)
    if library == "XLMRoberta":  # whose models are RoBERTa's
        reader = getattr(transformers, reader.__name__.replace("XLM", ""))
    back, report = reader.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    state = upstream.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items())
    assert set(open_checkpoint(tmp_path / "ours")[0]) <= set(state)  # a body's names have no prefix
    with torch.no_grad():
        assert_close(theirs(back.eval()).numpy(), theirs(upstream), 1e-6)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


def test_old_files_names_and_leftovers(tmp_path):
    """As the published `bert-base-uncased` is stored: TensorFlow's names, the pooler, the next sentence's head."""
    upstream = tiny("Bert")
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in upstream.state_dict().items()
    }
    tensors |= {"cls.seq_relationship.weight": torch.zeros(2, 24), "cls.seq_relationship.bias": torch.zeros(2)}
    tensors |= {"bert.pooler.dense.weight": torch.zeros(24, 24), "bert.pooler.dense.bias": torch.zeros(24)}
    tensors |= {"bert.embeddings.position_ids": torch.arange(20)[None]}
    upstream.save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "old"), converted(upstream))


@pytest.mark.parametrize("library", LIBRARIES)
def test_config_json_of_either_generation(library):
    """`dtype` or `torch_dtype`; labels counted or named; and what is not stated is transformers' default."""
    kind = KINDS[library]
    config = getattr(transformers, f"{library}Config")()
    stated = {**config.to_dict(), "architectures": [f"{library}Model"]}
    bare = from_config_json({"model_type": kind, "vocab_size": config.vocab_size}).config
    assert from_config_json(stated).config == bare
    labels = {"architectures": [f"{library}ForTokenClassification"], "id2label": {0: "a", 1: "b", 2: "c"}}
    assert from_config_json({**stated, **labels, "torch_dtype": "float16"}).config.num_classes == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported; eqzoo has 'gelu', "),
        ({"architectures": ["BertForNextSentencePrediction"]}, "'BertForNextSentencePrediction' is not supported"),
        ({"new_attention": 3}, "option 'new_attention' .of value 3. is not known"),
        ({"num_attention_heads": 5}, "dim=24 is not a multiple of heads=5"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny("Bert"), changes))


def test_a_new_head_for_other_classes(saved):
    for head in ("classifier", "token_classifier"):
        model = eqzoo.load(saved(tiny("Bert", head)), num_classes=5)
        found = predict(model, {name: array for name, array in arrays(types=False).items() if name != "weights"})
        assert found.shape[-1] == 5
        assert not found.any()
    with pytest.raises(ValueError, match="num_classes=5 means nothing to head='masked_lm'; choose the head 'class"):
        eqzoo.load(saved(tiny("Bert")), num_classes=5)


def test_a_classifier_without_classes_gives_what_it_would_see(tmp_path, saved):
    model = eqzoo.load(saved(tiny("Roberta", "classifier")), num_classes=0)
    assert model(jnp.asarray(BATCH["tokens"][0])).shape == (24,)
    with pytest.raises(ValueError, match="upstream has no RobertaForSequenceClassification without classes"):
        eqzoo.export(tmp_path / "ours", model, format="transformers")


def test_mistakes():
    model = converted(tiny("Bert"))
    with pytest.raises(ValueError, match="Bert: 21 tokens, but it takes 1 to context=20; cut or split the text"):
        model(jnp.zeros(21, jnp.int32))
    with pytest.raises(
        TypeError, match=r"Bert: mask is .* int32, expected a bool array of shape .*`mask.astype.bool.`"
    ):
        model(jnp.zeros(4, jnp.int32), mask=jnp.ones(4, jnp.int32))
    with pytest.raises(TypeError, match=r"a model takes one example, so map it over the batch: `jax.vmap"):
        model(jnp.zeros(4, jnp.int32), mask=jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match="Bert: a bert with head='masked_lm' and pooler=False has no pooled output"):
        model.pooled(jnp.zeros((3, 24)))
    with pytest.raises(ValueError, match="token_types were given, but a distilbert knows none"):
        converted(tiny("DistilBert"))(jnp.zeros(4, jnp.int32), token_types=jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="token_types=2 does not go with style='distilbert'"):
        replace(VARIANTS["distilbert-base-uncased"], token_types=2)


@pytest.mark.parametrize("style", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "head_dropout"])
def test_each_dropout_needs_a_key_and_changes_the_output(style, rate):
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0, rate: 0.5}
    types = 0 if style == "distilbert" else 2
    config = BertConfig(
        dim=8,
        depth=2,
        heads=2,
        hidden=8,
        vocab=9,
        style=style,
        token_types=types,
        head="classifier",
        num_classes=3,
        **rates,
    )
    model = eqx.filter_jit(Bert)(config, key=jax.random.key(0))
    tokens = jnp.arange(1, 7)
    with pytest.raises(ValueError, match=r"Dropout.rate=0.5. got no key in training mode"):
        jax.eval_shape(model, tokens)
    call = eqx.filter_jit(lambda model, key: model(tokens, key=key))
    first, again, other = (call(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
