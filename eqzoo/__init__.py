"""The model zoo of JAX and Equinox: every model a pytree, every training loop in sight."""

from eqzoo import checkpoint as checkpoint
from eqzoo import data as data
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
from eqzoo._save import export as export
from eqzoo._save import save as save
from eqzoo.checkpoint import CheckpointError as CheckpointError
from eqzoo.models.language.gpt2 import GPT2 as GPT2
from eqzoo.models.language.gpt2 import GPT2Config as GPT2Config
from eqzoo.models.vision.mlp import MLP as MLP
from eqzoo.models.vision.mlp import MLPConfig as MLPConfig
from eqzoo.models.vision.resnet import ResNet as ResNet
from eqzoo.models.vision.resnet import ResNetConfig as ResNetConfig
from eqzoo.models.vision.vit import ViT as ViT
from eqzoo.models.vision.vit import ViTConfig as ViTConfig
