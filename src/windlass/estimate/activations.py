"""The activations of a model of `transformers`, by a pass with fake tensors. Needs torch.

The results of each operation count until their last reference is gone. The kernels are CPU kernels.
"""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windlass.model.quantised import Linear4bit
from windlass.model.sharding import blocks_of
from windlass.model.size import CHUNK_BYTES, Peaks
from windlass.parallel.parallelize import LOW, checkpoint_activations
from windlass.recipe import Recipe

FLASH = 1  # of `torch.nn.attention.SDPBackend`
RAISED_ON_CUDA = {"pow", "__pow__", "rsqrt", "exp", "expm1", "log", "log1p", "norm", "sum", "prod"}
RAISED_ON_CUDA |= {"cumsum", "cumprod", "softmax", "log_softmax", "layer_norm", "group_norm"}
"""Operations of models that autocast raises to float32 on CUDA; see
https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32."""


def measure_peaks(
    network: nn.Module,
    recipe: Recipe,
    precision: str,
    micro_batch: int,
    device: str = "cpu",
    several: bool = True,
) -> Peaks:
    """The bytes of a step beside weights and state for `micro_batch`.

    With `several` also for another size, from which the rest follow. `network` is on the meta
    device, as `build_model` returns it, and cannot be used afterwards.
    """
    model: Any = network.train()
    checkpoint_activations(blocks_of(model) or [], recipe.parallel.activation_checkpointing)

    def matrix(layer: Linear4bit, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A matrix of the size of a quantised one, without `bitsandbytes`."""
        return torch.empty(layer.out_features, layer.in_features, dtype=dtype)

    unpacked = mock.patch.object(Linear4bit, "matrix", matrix)
    chunk = mock.patch.dict(CHUNK_BYTES, cpu=CHUNK_BYTES[device])
    low = LOW.get(precision)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, unpacked, chunk:
        new: dict[nn.Parameter, nn.Parameter] = {}  # on the CPU; ties stay
        for module in model.modules():
            for name, old in module._parameters.items():
                if old is not None and old.is_meta:
                    if old not in new:
                        fake = FakeTensor(mode, old.data, torch.device("cpu"))
                        new[old] = nn.Parameter(fake, old.requires_grad)
                    module._parameters[name] = new[old]
        peaks = []  # micro-batch, and the most bytes without and with the weights' gradients
        for size in sorted({1, max(2, micro_batch)}) if several else [micro_batch]:
            with Meter(model) as meter, Attention(), Raised(device == "cuda"):
                tokens = torch.zeros(size, recipe.model.context, dtype=torch.int64)
                with torch.autocast("cpu", dtype=low, enabled=low is not None):
                    loss = model(tokens, tokens)
                loss.backward()
                del loss
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            gradients = {meter.live[grad.untyped_storage()._cdata][0] for grad in grads}
            without = together = most_without = most = 0
            for number, change in meter.events:
                without += 0 if number in gradients else change
                together += change
                most_without, most = max(most_without, without), max(most, together)
            model.zero_grad()
            peaks.append((size, most_without, most))
        return tuple(peaks)


class Meter(TorchDispatchMode):
    """Records each storage's number and bytes in `events`, with negative bytes at its end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        # Number and bytes by address; addresses are used again.
        self.live: dict[int, tuple[int, int]] = {}
        self.events: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most calls, and none makes a tensor
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        for leaf in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            storage = leaf.untyped_storage()
            if storage._cdata not in self.weights and storage._cdata not in self.live:
                self.live[storage._cdata] = number, size = len(self.events), storage.nbytes()
                self.events.append((number, size))
                weakref.finalize(storage, self._free, storage._cdata)
        return out

    def _free(self, key: int) -> None:
        number, size = self.live.pop(key)
        self.events.append((number, -size))


class Attention(TorchFunctionMode):
    """Attention with the kernel of real tensors; fake ones on a CPU always take the plain one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention and detect_fake_mode() is not None:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
            with unset_fake_temporarily():  # memory that is never touched
                real = {
                    name: torch.empty(x.shape, dtype=x.dtype, requires_grad=x.requires_grad)
                    for name, x in tensors.items()
                }
                choice = torch._fused_sdp_choice(**(given | real))
            if choice == FLASH:
                mask = given.get("attn_mask")
                if mask is not None and mask.dtype == torch.bool:
                    wide = torch.zeros(mask.shape, dtype=given["query"].dtype)
                    given["attn_mask"] = wide.masked_fill_(mask.logical_not(), -torch.inf)
                arguments = {name: given[name] for name in (*names, "scale") if name in given}
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(**arguments)[0]
        return func(*args, **(kwargs or {}))


class Raised(TorchFunctionMode):
    """Autocast's float32 operations on CUDA; a pass on a CPU leaves them in half precision."""

    def __init__(self, on_cuda: bool) -> None:
        super().__init__()
        self.names = RAISED_ON_CUDA if on_cuda else set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def raised(value: Any) -> Any:
            low = isinstance(value, torch.Tensor) and value.dtype in LOW.values()
            return value.float() if low else value

        if func.__name__ in self.names and torch.is_autocast_enabled("cpu"):
            args = [raised(value) for value in args]
            kwargs = {name: raised(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)
