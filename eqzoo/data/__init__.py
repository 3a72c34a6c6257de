"""Sources of examples, and the batches a training loop takes from them."""

from eqzoo.data.augment import Augment as Augment
from eqzoo.data.augment import cutmix as cutmix
from eqzoo.data.augment import erase as erase
from eqzoo.data.augment import flip as flip
from eqzoo.data.augment import mixup as mixup
from eqzoo.data.augment import prepare as prepare
from eqzoo.data.augment import rand_augment as rand_augment
from eqzoo.data.augment import resized_crop as resized_crop
from eqzoo.data.augment import shift as shift
from eqzoo.data.images import Images as Images
from eqzoo.data.images import Photos as Photos
from eqzoo.data.images import load_image_folder as load_image_folder
from eqzoo.data.images import load_images as load_images
from eqzoo.data.loader import Source as Source
from eqzoo.data.loader import batches as batches
from eqzoo.data.loader import on_device as on_device
from eqzoo.data.text import BPE as BPE
from eqzoo.data.text import Bytes as Bytes
from eqzoo.data.text import Tokens as Tokens
from eqzoo.data.text import load_text as load_text
from eqzoo.data.text import load_tokenizer as load_tokenizer
from eqzoo.data.tokenizer import Tokenizer as Tokenizer
