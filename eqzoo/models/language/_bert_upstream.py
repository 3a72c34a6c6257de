"""How transformers writes BERT, RoBERTa, XLM-R and DistilBERT down."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from eqzoo.checkpoint import Alias, Drop, Rule, prefixed
from eqzoo.models._family import Option, Options
from eqzoo.models.language._transformers import NOT_MATHEMATICS


def _norm(source: str, target: str) -> tuple[Rule, ...]:
    """BERT's own files have the names that TensorFlow gave to weight and bias."""
    return (
        Rule(rf"{source}\.(weight|bias)", f"{target}.{{0}}"),
        Rule(rf"{source}\.gamma", f"{target}.weight"),
        Rule(rf"{source}\.beta", f"{target}.bias"),
    )


_BLOCK = (
    Rule(r"attention\.self\.(query|key|value)\.(weight|bias)", "attention.{0}.{1}"),
    Rule(r"attention\.output\.dense\.(weight|bias)", "attention.out.{0}"),
    *_norm(r"attention\.output\.LayerNorm", "norm1"),
    Rule(r"intermediate\.dense\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"output\.dense\.(weight|bias)", "mlp.fc2.{0}"),
    *_norm(r"output\.LayerNorm", "norm2"),
)
_EMBEDDINGS = (
    Rule(r"embeddings\.word_embeddings\.weight", "embedding.weight"),
    Rule(r"embeddings\.position_embeddings\.weight", "positions"),
    *_norm(r"embeddings\.LayerNorm", "norm"),
)
_BODY = (
    *_EMBEDDINGS,
    Rule(r"embeddings\.token_type_embeddings\.weight", "token_types.weight"),
    *prefixed(r"encoder\.layer\.(\d+)\.", "blocks[{0}].", _BLOCK),
    Rule(r"pooler\.dense\.(weight|bias)", "pooler.{0}"),
)
_DISTILBERT_BLOCK = (
    Rule(r"attention\.q_lin\.(weight|bias)", "attention.query.{0}"),
    Rule(r"attention\.k_lin\.(weight|bias)", "attention.key.{0}"),
    Rule(r"attention\.v_lin\.(weight|bias)", "attention.value.{0}"),
    Rule(r"attention\.out_lin\.(weight|bias)", "attention.out.{0}"),
    *_norm(r"sa_layer_norm", "norm1"),
    Rule(r"ffn\.lin1\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"ffn\.lin2\.(weight|bias)", "mlp.fc2.{0}"),
    *_norm(r"output_layer_norm", "norm2"),
)
_DISTILBERT_BODY = (*_EMBEDDINGS, *prefixed(r"transformer\.layer\.(\d+)\.", "blocks[{0}].", _DISTILBERT_BLOCK))

_CLASSES = (
    Rule(r"classifier\.(weight|bias)", "head.{0}"),
    Rule(r"classifier\.(weight|bias)", "token_head.{0}"),
)
_ANSWERS = Rule(r"qa_outputs\.(weight|bias)", "answer_head.{0}")
_UNUSED = Drop(r"(\w+\.)?(embeddings\.position_ids|pooler\.dense\.(weight|bias))|cls\.seq_relationship\.(weight|bias)")

BERT = (
    *prefixed(r"bert\.", "", _BODY),
    Rule(r"cls\.predictions\.transform\.dense\.(weight|bias)", "masked_head.dense.{0}"),
    *_norm(r"cls\.predictions\.transform\.LayerNorm", "masked_head.norm"),
    Rule(r"cls\.predictions\.bias", "masked_head.bias"),
    Alias(r"cls\.predictions\.decoder\.weight", "bert.embeddings.word_embeddings.weight"),
    Alias(r"cls\.predictions\.decoder\.bias", "cls.predictions.bias"),
    *_CLASSES,
    _ANSWERS,
    _UNUSED,
)
ROBERTA = (
    *prefixed(r"roberta\.", "", _BODY),
    Rule(r"lm_head\.dense\.(weight|bias)", "masked_head.dense.{0}"),
    *_norm(r"lm_head\.layer_norm", "masked_head.norm"),
    Rule(r"lm_head\.bias", "masked_head.bias"),
    Alias(r"lm_head\.decoder\.weight", "roberta.embeddings.word_embeddings.weight"),
    Alias(r"lm_head\.decoder\.bias", "lm_head.bias"),
    Rule(r"classifier\.dense\.(weight|bias)", "pre_head.{0}"),
    Rule(r"classifier\.out_proj\.(weight|bias)", "head.{0}"),
    Rule(r"classifier\.(weight|bias)", "token_head.{0}"),
    _ANSWERS,
    _UNUSED,
)
DISTILBERT = (
    *prefixed(r"distilbert\.", "", _DISTILBERT_BODY),
    Rule(r"vocab_transform\.(weight|bias)", "masked_head.dense.{0}"),
    *_norm(r"vocab_layer_norm", "masked_head.norm"),
    Rule(r"vocab_projector\.bias", "masked_head.bias"),
    Alias(r"vocab_projector\.weight", "distilbert.embeddings.word_embeddings.weight"),
    Rule(r"pre_classifier\.(weight|bias)", "pre_head.{0}"),
    *_CLASSES,
    _ANSWERS,
    _UNUSED,
)
# As a model without a head is stored.
BERT_BODY = (*_BODY, _UNUSED)
DISTILBERT_BODY = (*_DISTILBERT_BODY, _UNUSED)

_HEADS = {
    "ForMaskedLM": "masked_lm",
    "ForPreTraining": "masked_lm",
    "ForSequenceClassification": "classifier",
    "ForTokenClassification": "token_classifier",
    "ForQuestionAnswering": "question_answering",
    "Model": None,
}
CLASSIFIERS = ("classifier", "token_classifier")
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_ACTIVATIONS |= {"silu": "silu", "swish": "silu"}
_FIXED = {
    "is_decoder": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
    "pruned_heads": {},
}
_IGNORED = (
    *NOT_MATHEMATICS,
    "(cls|mask)_token_id",
    "pooler_.*",
    "directionality",
    "sinusoidal_pos_embds",
    "tie_weights_",
    "output_past",
    "language",
)


def _heads(library: str) -> Option:
    return Option("head", {f"{library}{suffix}": head for suffix, head in _HEADS.items()})


def _stated(options: dict[str, Any], library: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """With what transformers takes for granted, the one architecture, and the number of labels where any are told."""
    (architecture, *_) = options.get("architectures") or [f"{library}Model"]
    has_classes = _HEADS.get(architecture.removeprefix(library)) in CLASSIFIERS
    labels = options.get("id2label")
    number = options.get("num_labels", 2 if labels is None else len(labels)) if has_classes else 0
    return {**defaults, **options, "architectures": architecture, "num_labels": number}


_DEFAULTS = {"hidden_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12}


def _prepare_bert(options: dict[str, Any], *, library: str) -> dict[str, Any]:
    options = _stated(options, library, _DEFAULTS)
    options["pooler"] = options["architectures"] == f"{library}Model"
    if options.get("classifier_dropout") is None:
        options["classifier_dropout"] = options["hidden_dropout_prob"]
    return options


def _prepare_roberta(options: dict[str, Any], *, library: str) -> dict[str, Any]:
    """Its first tokens have the position after that of padding."""
    options = _prepare_bert({"pad_token_id": 1, **options}, library=library)
    options["max_position_embeddings"] -= options["pad_token_id"] + 1
    return options


def _prepare_distilbert(options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"dropout": 0.1, "seq_classif_dropout": 0.2, "qa_dropout": 0.1}
    options = _stated(options, "DistilBert", defaults)
    of_classifier, of_answers = options.pop("seq_classif_dropout"), options.pop("qa_dropout")
    rates = {"DistilBertForTokenClassification": options["dropout"], "DistilBertForQuestionAnswering": of_answers}
    return {**options, "head_dropout": rates.get(options["architectures"], of_classifier)}


def written_labels(options: dict[str, Any], heads: Mapping[str, str | None]) -> dict[str, Any]:
    """The architecture in a list, and the number of labels only where any are told."""
    architecture, number = options["architectures"], options.pop("num_labels")
    if heads[architecture] not in CLASSIFIERS:
        return {**options, "architectures": [architecture]}
    if number == 0:
        raise ValueError(f"upstream has no {architecture} without classes; use `eqzoo.save`")
    return {**options, "architectures": [architecture], "num_labels": number}


def _restore_bert(options: dict[str, Any], *, library: str) -> dict[str, Any]:
    del options["pooler"]
    return written_labels(options, _heads(library).values)


def _restore_roberta(options: dict[str, Any], *, library: str) -> dict[str, Any]:
    options["max_position_embeddings"] += options["pad_token_id"] + 1
    return _restore_bert(options, library=library)


def _restore_distilbert(options: dict[str, Any]) -> dict[str, Any]:
    rate = options.pop("head_dropout")
    name = "qa_dropout" if options["architectures"] == "DistilBertForQuestionAnswering" else "seq_classif_dropout"
    return written_labels({**options, name: rate}, _heads("DistilBert").values)


_TABLE = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "max_position_embeddings": "context",
    "type_vocab_size": "token_types",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "classifier_dropout": "head_dropout",
    "num_labels": "num_classes",
    "pooler": "pooler",
}


def _roberta_options(library: str) -> Options:
    return Options(
        {
            **_TABLE,
            "architectures": _heads(library),
            "hidden_act": Option("activation", {"gelu": "gelu"}),  # its head has no other
            "pad_token_id": "padding",
        },
        fixed=_FIXED,
        ignored=_IGNORED,
        prepare=partial(_prepare_roberta, library=library),
        restore=partial(_restore_roberta, library=library),
    )


BERT_OPTIONS = Options(
    {**_TABLE, "architectures": _heads("Bert"), "hidden_act": Option("activation", _ACTIVATIONS)},
    fixed=_FIXED,
    ignored=_IGNORED,
    prepare=partial(_prepare_bert, library="Bert"),
    restore=partial(_restore_bert, library="Bert"),
)
ROBERTA_OPTIONS = _roberta_options("Roberta")
XLM_ROBERTA_OPTIONS = _roberta_options("XLMRoberta")
DISTILBERT_OPTIONS = Options(
    {
        "vocab_size": "vocab",
        "dim": "dim",
        "n_layers": "depth",
        "n_heads": "heads",
        "hidden_dim": "hidden",
        "max_position_embeddings": "context",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "head_dropout": "head_dropout",
        "num_labels": "num_classes",
        "architectures": _heads("DistilBert"),
        "activation": Option("activation", _ACTIVATIONS),
    },
    fixed=_FIXED,
    ignored=_IGNORED,
    prepare=_prepare_distilbert,
    restore=_restore_distilbert,
)


def of_body(options: Options) -> Options:
    """Those of a model without a head, which alone is stored without a prefix."""
    heads = options.table["architectures"]
    assert isinstance(heads, Option)
    bare = {architecture: head for architecture, head in heads.values.items() if head is None}
    return replace(options, table={**options.table, "architectures": Option("head", bare)})
