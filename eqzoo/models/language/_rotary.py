"""transformers' options for rotary positions, of both its generations, as an `nn.Rotary` and back."""

from math import log, sqrt
from typing import Any

from eqzoo import nn

_ANY = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_KNOWN = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"}
    | {"mscale", "mscale_all_dim"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}


def read_rotary(
    options: dict[str, Any],
    *,
    context: int,
    base: float = 10000.0,
    partial: float = 1.0,
    longrope: tuple[str, ...] = ("longrope",),
) -> dict[str, Any]:
    """Options in which one, `rotary`, stands for all about rotary positions.

    `context`, `base` and `partial` count where no option says otherwise, and `longrope` are that kind's names.
    """
    options = dict(options)
    context = options.get("max_position_embeddings", context)
    outside = {name: options.pop(name, None) for name in ("rope_theta", "partial_rotary_factor", "rope_type")}
    scaling, parameters = options.pop("rope_scaling", None), options.pop("rope_parameters", None)
    said = {name: value for name, value in outside.items() if value is not None} | (scaling or parameters or {})
    kind = said.get("rope_type", said.get("type", "default"))
    kind = "longrope" if kind in longrope else kind
    if kind not in _KNOWN:
        raise ValueError(f"rope_type={kind!r} is not supported; eqzoo has {', '.join(_KNOWN)}")
    # transformers writes the original context beside any kind, and reads it for some.
    unknown = said.keys() - _ANY - _KNOWN[kind] - {"original_max_position_embeddings"}
    if unknown:
        name = min(unknown)
        raise ValueError(f"option {name!r} (of value {said[name]!r}) is not known to eqzoo for rope_type={kind!r}")
    original = options.pop("original_max_position_embeddings", said.get("original_max_position_embeddings")) or context
    stated = said.get("factor")
    factor = float(context / original if stated is None and kind in ("yarn", "longrope") else stated or 1)
    fields: dict[str, Any] = {}
    if kind == "yarn":
        fields = {"fast": float(said.get("beta_fast") or 32), "slow": float(said.get("beta_slow") or 1)}
        fields |= {"truncate": said.get("truncate", True), "scale": _yarn_scale(said, factor)}
    elif kind == "longrope":
        scale = said.get("attention_factor")
        if scale is None:
            scale = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
        fields = {name: tuple(map(float, said[f"{name}_factor"])) for name in ("short", "long")} | {"scale": scale}
    elif kind == "llama3":
        fields = {"low": float(said["low_freq_factor"]), "high": float(said["high_freq_factor"])}
    if kind != "default":
        fields["factor"] = factor
    if kind not in ("default", "linear"):
        fields["context"] = context if kind == "dynamic" else original
    rotary = nn.Rotary(
        base=float(said.get("rope_theta", base)),
        kind=kind,
        partial=float(said.get("partial_rotary_factor", partial)),
        **fields,
    )
    return options | {"rotary": rotary}


def _yarn_scale(said: dict[str, Any], factor: float) -> float:
    if said.get("attention_factor") is not None:
        return said["attention_factor"]
    grown = lambda by: 0.1 * by * log(factor) + 1 if factor > 1 else 1.0
    by, by_all = said.get("mscale"), said.get("mscale_all_dim")
    return grown(by) / grown(by_all) if by and by_all else grown(1)


def write_rotary(options: dict[str, Any]) -> dict[str, Any]:
    """Options that say for both generations what `rotary` says."""
    options = dict(options)
    rotary: nn.Rotary = options.pop("rotary")
    scaling: dict[str, Any] = {"rope_type": rotary.kind}
    if rotary.kind != "default":
        scaling["factor"] = rotary.factor
    if rotary.kind in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = rotary.context
    if rotary.kind == "llama3":
        scaling |= {"low_freq_factor": rotary.low, "high_freq_factor": rotary.high}
    if rotary.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rotary.scale
    if rotary.kind == "yarn":
        scaling |= {"beta_fast": rotary.fast, "beta_slow": rotary.slow, "truncate": rotary.truncate}
    if rotary.kind == "longrope":
        scaling |= {"short_factor": list(rotary.short or ()), "long_factor": list(rotary.long or ())}
    outside: dict[str, Any] = {"rope_theta": rotary.base}
    if rotary.partial != 1:
        outside["partial_rotary_factor"] = rotary.partial
    options |= outside | {"rope_parameters": scaling | outside}
    return options if rotary.kind == "default" else options | {"rope_scaling": scaling}
