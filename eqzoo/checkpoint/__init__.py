"""Checkpoints: file formats read without torch, and the rules that map upstream's names to a model's leaves."""

from eqzoo.checkpoint import adapt as adapt
from eqzoo.checkpoint.apply import Plan as Plan
from eqzoo.checkpoint.apply import fill as fill
from eqzoo.checkpoint.apply import plan as plan
from eqzoo.checkpoint.apply import unfill as unfill
from eqzoo.checkpoint.errors import CheckpointError as CheckpointError
from eqzoo.checkpoint.formats import Tensor as Tensor
from eqzoo.checkpoint.formats import open_checkpoint as open_checkpoint
from eqzoo.checkpoint.formats import write_safetensors as write_safetensors
from eqzoo.checkpoint.rules import BATCH_NORM as BATCH_NORM
from eqzoo.checkpoint.rules import SAME as SAME
from eqzoo.checkpoint.rules import SPLIT as SPLIT
from eqzoo.checkpoint.rules import SPLIT_EACH as SPLIT_EACH
from eqzoo.checkpoint.rules import TRANSPOSE as TRANSPOSE
from eqzoo.checkpoint.rules import TRANSPOSE_SPLIT as TRANSPOSE_SPLIT
from eqzoo.checkpoint.rules import Alias as Alias
from eqzoo.checkpoint.rules import Drop as Drop
from eqzoo.checkpoint.rules import Rule as Rule
from eqzoo.checkpoint.rules import Transform as Transform
from eqzoo.checkpoint.rules import flattened as flattened
from eqzoo.checkpoint.rules import prefixed as prefixed
from eqzoo.checkpoint.rules import staged as staged
