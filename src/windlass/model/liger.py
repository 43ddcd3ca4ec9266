"""Liger's Triton kernels for norms, rotary embeddings and gated layers of a model of `transformers`.

Liger's own losses are not used: Windlass computes the loss in chunks (`loss.py`).
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch

from windlass.errors import UserError
from windlass.model.hf import HfModel

NAME = 'model.kernels = "liger"'
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "relu2")
"""Liger's kernels compute these, whatever a configuration names."""


def use_liger(model: HfModel, device: torch.device, stack: ExitStack) -> None:
    """Replace the forward passes of a model's parts by Liger's, in place.

    Liger also replaces functions and classes in the files of the architecture. Networks that are
    built later get the classes of `transformers`, and `stack` restores the functions.
    UserError without a GPU, or if Liger has no kernels for the architecture.
    """
    if device.type != "cuda":
        raise UserError(f'{NAME} needs a GPU: write "torch"')
    from liger_kernel.transformers import monkey_patch as liger

    kind, text = model.config.model_type, model.config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", "")
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN or activation not in ACTIVATIONS:
        problem = f"Liger has no kernels for {kind} with the activation {activation}"
        raise UserError(f'{NAME}: {problem}; write "torch"')
    files = {sys.modules[type(part).__module__] for part in model.model.modules()}
    before = [(file, dict(vars(file))) for file in files]
    liger._apply_liger_kernel_to_instance(
        model=model.model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    for file, names in before:
        for name, value in names.items():
            if isinstance(value, type):
                setattr(file, name, value)
            elif vars(file)[name] is not value:
                stack.callback(setattr, file, name, value)
