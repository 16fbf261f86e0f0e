"""What the process that others are forked from imports: everything that none of them should wait for, and no device."""

from __future__ import annotations

import gc
import importlib
import pkgutil

import scipy.optimize  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers

import lowtide
from attacks import catalogue

__all__ = ["MODELS"]

torch.set_num_threads(1)
MODELS = tuple(getattr(transformers, name) for name in catalogue.TRANSFORMERS)
for _module in pkgutil.walk_packages(lowtide.__path__, "lowtide."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
gc.collect()
gc.freeze()  # so that a child's collections look at what the child made
