"""Text as vectors: sentence encoders, as sentence-transformers publishes them."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._describe import describe
from eqzoo._load import OWN_FORMAT, match_described, read
from eqzoo._model import _skeleton, freeze
from eqzoo._types import typed
from eqzoo.checkpoint.apply import Rules
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import Tensor, open_checkpoint
from eqzoo.checkpoint.hub import fetch, fetch_files
from eqzoo.checkpoint.rules import Drop
from eqzoo.data.tokenizer import FILES, Tokenizer

_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
)
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SHORTEST = 16  # the length of the smallest batches


class Dense(eqx.Module):
    """A layer on what was pooled."""

    linear: nn.Linear
    activation: Literal["Tanh", "Identity"] = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        activation: Literal["Tanh", "Identity"] = "Tanh",
        key: PRNGKeyArray,
    ):
        self.linear = nn.Linear(in_features, out_features, use_bias=use_bias, key=key)
        self.activation = activation

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " out"]:
        return jnp.tanh(self.linear(x)) if self.activation == "Tanh" else self.linear(x)


class SentenceEncoder(eqx.Module):
    """The tokens of one text to one vector: a language model's hidden states, pooled, through a `dense` layer if there
    is one, of length one if `normalize`.

    `pooling` takes the "mean" over the real tokens, the first ("cls") or the last of them ("lasttoken"), or the "max"
    of each channel; several are put one behind the other. `embed` takes texts: it uses the `tokenizer`, at most
    `length` tokens, and the `prompts`, which are put before a text by name.
    """

    model: Any
    dense: Dense | None
    tokenizer: Tokenizer = eqx.field(static=True)
    pooling: tuple[str, ...] = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    length: int = eqx.field(static=True)
    lower: bool = eqx.field(static=True)
    prompts: tuple[tuple[str, str], ...] = eqx.field(static=True)
    default_prompt: str | None = eqx.field(static=True)

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        pooling: str | Sequence[str] = "mean",
        dense: Dense | None = None,
        normalize: bool = True,
        length: int | None = None,
        lower: bool = False,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
    ):
        self.model = model
        self.dense = dense
        self.tokenizer = tokenizer
        self.pooling = (pooling,) if isinstance(pooling, str) else tuple(pooling)
        for mode in self.pooling:
            if mode not in _MODES.values():
                raise ValueError(f"SentenceEncoder: pooling={mode!r} is unknown; choose {', '.join(_MODES.values())}")
        self.normalize = normalize
        self.length = min(length or model.config.context, model.config.context)
        self.lower = lower
        self.prompts = tuple((prompts or {}).items())
        self.default_prompt = default_prompt

    @typed
    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " out"]:
        hidden = self.model.hidden(tokens, mask=mask, key=key)
        mask = jnp.ones(tokens.shape, bool) if mask is None else mask
        pooled = jnp.concatenate([_pool(hidden.astype(jnp.float32), mask, mode) for mode in self.pooling])
        pooled = pooled if self.dense is None else self.dense(pooled)
        if self.normalize:
            pooled = pooled / jnp.maximum(jnp.linalg.norm(pooled), 1e-12)
        return pooled.astype(hidden.dtype)

    def encode(self, text: str, *, prompt: str | None = None) -> Int[np.ndarray, " tokens"]:
        """The ids of a text after the prompt of this name, cut to the encoder's `length`."""
        name = self.default_prompt if prompt is None else prompt
        prompts = dict(self.prompts)
        if name is not None and name not in prompts:
            raise ValueError(f"the encoder has no prompt {name!r}; it has {', '.join(prompts) or 'none'}")
        text = text if name is None else prompts[name] + text
        return self.tokenizer.encode(text.lower() if self.lower else text, length=self.length)


def _pool(hidden: Float[Array, "tokens dim"], mask: Bool[Array, " tokens"], mode: str) -> Float[Array, " dim"]:
    if mode == "cls":
        return hidden[jnp.argmax(mask)]
    if mode == "lasttoken":
        return hidden[len(mask) - 1 - jnp.argmax(mask[::-1])]
    if mode == "max":
        return jnp.max(hidden, axis=0, where=mask[:, None], initial=-jnp.inf)
    places = jnp.cumsum(mask) if mode == "weightedmean" else jnp.ones(len(mask))
    weights = jnp.where(mask, places, 0).astype(hidden.dtype)
    total = jnp.maximum(jnp.sum(weights), 1e-9)
    return weights @ hidden / (jnp.sqrt(total) if mode == "mean_sqrt_len_tokens" else total)


def load_encoder(
    source: str | os.PathLike, *, revision: str | None = None, dtype: DTypeLike | None = None
) -> SentenceEncoder:
    """The encoder in a folder of sentence-transformers, or in its repository on the Hugging Face hub.

    It is in inference mode; `eqx.nn.inference_mode(encoder, value=False)` is one to train.
    """
    fetch_files(source, (*_FILES, *FILES), revision=revision)
    folder = fetch(source, revision=revision)
    if not (folder / "modules.json").is_file():
        raise CheckpointError(
            f"{source} has no modules.json, so how its tokens become one vector is not stated: load its model and "
            f"tokenizer, and choose: `SentenceEncoder(model, tokenizer, pooling='mean')`"
        )
    listed = [(each["type"].rpartition(".")[2], folder / each["path"]) for each in _json(folder / "modules.json")]
    modules, names = dict(listed), [name for name, _ in listed]
    if names != [name for name in _MODULES if name in names] or not {"Transformer", "Pooling"} <= {*names}:
        raise CheckpointError(
            f"{source} is made of {', '.join(names)}; eqzoo takes a Transformer and a Pooling, then perhaps one "
            f"Dense and a Normalize"
        )
    transformer = _json(modules["Transformer"] / "sentence_bert_config.json")
    texts = _json(folder / "config_sentence_transformers.json")
    return SentenceEncoder(
        _load_body(source, modules["Transformer"], dtype),
        Tokenizer.load(modules["Transformer"]),
        pooling=_pooling(source, _json(modules["Pooling"] / "config.json")),
        dense=_load_dense(source, modules["Dense"], dtype) if "Dense" in modules else None,
        normalize="Normalize" in modules,
        length=transformer.get("max_seq_length"),
        lower=transformer.get("do_lower_case", False),
        prompts={name: prompt for name, prompt in texts.get("prompts", {}).items() if prompt},
        default_prompt=texts.get("default_prompt_name"),
    )


def _load_body(source: str | os.PathLike, folder: Path, dtype: DTypeLike | None) -> Any:
    """The model in a folder, without the heads and poolers that may be there too."""
    tensors, metadata = open_checkpoint(folder)
    description = describe(source, folder, metadata)
    family, config = description.family, description.config
    bare = {field.name: None if field.name == "head" else False for field in dataclasses.fields(config)}
    config = dataclasses.replace(config, **{name: bare[name] for name in ("head", "pooler") if name in bare})
    namings = {naming: (*rules, Drop(r".*")) for naming, rules in family.rules.items()}
    make = lambda key: family.model(config, key=key)
    return _filled(source, description.label, tensors, make, namings, dtype)


def _load_dense(source: str | os.PathLike, folder: Path, dtype: DTypeLike | None) -> Dense:
    config = _json(folder / "config.json")
    activation = config.get("activation_function", "Tanh").rpartition(".")[2]
    if activation not in ("Tanh", "Identity"):
        raise CheckpointError(
            f"{source}: activation_function={activation!r} is not supported; eqzoo has Tanh, Identity"
        )
    for name, value in (("use_residual", False), ("module_input_name", "sentence_embedding")):
        if config.get(name, value) != value:
            raise CheckpointError(f"{source}: {name}={config[name]!r} is not supported; eqzoo has {value!r}")
    make = lambda key: Dense(
        config["in_features"],
        config["out_features"],
        use_bias=config.get("bias", True),
        activation=activation,
        key=key,
    )
    return _filled(source, "Dense", open_checkpoint(folder)[0], make, {"own": OWN_FORMAT}, dtype)


def _filled(
    source: str | os.PathLike,
    label: str,
    tensors: Mapping[str, Tensor],
    make: Callable[..., Any],
    namings: Mapping[str, Rules],
    dtype: DTypeLike | None,
) -> Any:
    match = match_described(tensors, _skeleton(make), namings)
    if match.plan.problems:
        raise CheckpointError(match.plan.report(os.fspath(source), label))
    return freeze(*read(tensors, match, [], jnp.float32 if dtype is None else dtype, None))


def _pooling(source: str | os.PathLike, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Stated by sentence-transformers 6 as names, and before as a flag for each."""
    if not config.get("include_prompt", True):
        raise CheckpointError(f"{source}: include_prompt=False is not supported; eqzoo pools over the prompt too")
    stated = config.get("pooling_mode")
    if stated is None:
        stated = [mode for flag, mode in _MODES.items() if config.get(flag)] or ["mean"]
    return (stated,) if isinstance(stated, str) else tuple(stated)


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def embed(
    encoder: SentenceEncoder, texts: str | Sequence[str], *, prompt: str | None = None, batch_size: int = 32
) -> Float[Array, "*texts dim"]:
    """The vector of each text, or of the one text; the dot product of two says how near they are.

    Texts of like length are encoded together, filled up to one of few lengths, so that few programs are compiled.
    """
    if isinstance(texts, str):
        return embed(encoder, [texts], prompt=prompt)[0]
    if not len(texts):
        raise ValueError("embed: there are no texts; give one or more")
    tokens = [encoder.encode(text, prompt=prompt) for text in texts]
    order = np.argsort([len(each) for each in tokens], kind="stable")
    found = []
    for start in range(0, len(texts), batch_size):
        chosen = [tokens[index] for index in order[start : start + batch_size]]
        rows = min(batch_size, 1 << (len(chosen) - 1).bit_length())
        columns = max(_SHORTEST, 1 << (len(chosen[-1]) - 1).bit_length())
        filled = np.full((rows, min(columns, encoder.length)), encoder.tokenizer.pad or 0, np.int32)
        mask = np.zeros(filled.shape, bool)
        for row, each in enumerate(chosen):
            filled[row, : len(each)] = each
            mask[row, : len(each)] = True
        found.append(_encode(encoder, jnp.asarray(filled), jnp.asarray(mask))[: len(chosen)])
    return jnp.concatenate(found)[np.argsort(order)]


@eqx.filter_jit
def _encode(
    encoder: SentenceEncoder, tokens: Int[Array, "texts tokens"], mask: Bool[Array, "texts tokens"]
) -> Float[Array, "texts dim"]:
    return jax.vmap(lambda tokens, mask: encoder(tokens, mask=mask))(tokens, mask)
