"""The model zoo of JAX and Equinox: every model a pytree, every training loop in sight."""

from typing import Any

from eqzoo import checkpoint as checkpoint
from eqzoo import data as data
from eqzoo import generation as generation
from eqzoo import nn as nn
from eqzoo import sharding as sharding
from eqzoo import train as train
from eqzoo import tree as tree
from eqzoo._load import load as load
from eqzoo._model import Frozen as Frozen
from eqzoo._model import apply as apply
from eqzoo._model import create as create
from eqzoo._model import freeze as freeze
from eqzoo._model import is_stateful as is_stateful
from eqzoo._preprocessing import Preprocessing as Preprocessing
from eqzoo._preprocessing import preprocessing as preprocessing
from eqzoo._registry import list_models as list_models
from eqzoo._registry import public_classes as _public_classes
from eqzoo._save import export as export
from eqzoo._save import save as save
from eqzoo.checkpoint import CheckpointError as CheckpointError
from eqzoo.embedding import SentenceEncoder as SentenceEncoder
from eqzoo.embedding import embed as embed
from eqzoo.embedding import load_encoder as load_encoder


def __getattr__(name: str) -> Any:
    """Every family's model and config, such as `eqzoo.ResNet` and `eqzoo.ResNetConfig`."""
    if name.startswith("_") or name not in _public_classes():
        raise AttributeError(f"module 'eqzoo' has no attribute {name!r}")
    return _public_classes()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_public_classes()])
