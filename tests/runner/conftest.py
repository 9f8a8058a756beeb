"""One thread: the tests share the machine."""

import torch

torch.set_num_threads(1)
