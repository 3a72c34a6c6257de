"""What a training loop calls; the loop itself stays in the script."""

from eqzoo.train.state import TrainState as TrainState
