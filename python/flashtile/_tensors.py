"""Tensors of PyTorch as memory. A tensor that carries more than its elements is refused, or resolved to one that does not."""

import re

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Dispatch keys of a tensor that is its elements in memory and nothing else, and of one whose elements are computed from memory at a read.
_PLAIN_KEYS = {"DispatchKeySet", "CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"}
_LAZY_KEYS = {"Negative", "Conjugate", "ZeroTensor"}
_NO_OPERATORS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)
_NESTED = "give its sequences one after another, as torch.cat(x.unbind()) does of (tokens, heads, dim), with cu_seqlens"
_plain = {}

# True from PyTorch 2.10 on, whose tensors have DLPack's exchange API.
EXCHANGES = hasattr(Tensor, "__dlpack_c_exchange_api__")


def is_plain(x):
    """True if a tensor is its elements in memory: neither lazy, nor wrapped by a transform, nor in another layout than dense."""
    raw = torch._C._dispatch_keys(x).raw_repr()
    if raw not in _plain:
        _plain[raw] = _PLAIN_KEYS.issuperset(_keys(x))
    return _plain[raw]


def needs_grad(x):
    """True if autograd would differentiate by x, which may be anything."""
    return torch.is_grad_enabled() and getattr(x, "requires_grad", False)


def check_tangent(name, x, level=None):
    """Refuses a derivative of forward mode, of the current level where none is named."""
    if forward_ad.unpack_dual(x, level=level).tangent is not None:
        raise ValueError(f"{name} has a tangent, and flashtile computes no derivatives of forward mode: give its primal, as forward_ad.unpack_dual does")


def check(name, x):
    """Refuses a tensor that no operator of flashtile takes, in words that say what to do instead.

    Raises:
        ValueError: where x has a derivative of forward mode, or belongs to a transform of torch.func.
        TypeError: where its layout is not dense.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
    check_tangent(name, x)
    if is_plain(x):
        return
    if torch._C._functorch.is_gradtrackingtensor(x):
        raise ValueError(f"{name} is differentiated by torch.func, which flashtile does not support: use torch.autograd")
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor: {_NESTED if name in ('q', 'k', 'v', 'out') else 'give .to_padded_tensor(0)'}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}, expected torch.strided: call .to_dense()")
    if x.is_quantized:
        raise TypeError(f"{name} is quantized, {x.dtype}: call .dequantize()")


def readable(name, x):
    """x as a tensor that is its elements in memory, and from which no derivative is expected.

    Raises:
        ValueError: where x needs a gradient, and as `check`.
        TypeError: where x is of a subclass with operators of its own, and as `check`.
        BufferError: where x has no memory.
    """
    check(name, x)
    if needs_grad(x):
        raise ValueError(f"this call records no gradients of {name}, which requires one: call it under torch.no_grad(), or detach {name}")
    return _elements(name, x)


def _elements(name, x):
    """`readable`, of a tensor that may need a gradient."""
    function = type(x).__torch_function__
    if getattr(function, "__func__", function) not in _NO_OPERATORS:
        raise TypeError(f"{name} is a {type(x).__name__}, which has operators of its own: give .as_subclass(torch.Tensor)")
    if is_plain(x):
        return x
    if torch._C._functorch.is_batchedtensor(x):
        raise ValueError(f"{name} is batched by torch.vmap, which reaches attention without out alone: give the axis as the batch of q, k and v")
    if not (_PLAIN_KEYS | _LAZY_KEYS).issuperset(_keys(x)):
        raise BufferError(f"{name} is on {x.device}, a {type(x).__name__} without elements in memory: give a torch.Tensor on cpu or cuda")
    return torch.zeros_like(x) if torch._is_zerotensor(x) else x.resolve_conj().resolve_neg()


def check_mask(name, x, first):
    """Refuses one of several masks that is not on the device of the first, and as `readable`, but that it may need a gradient: autograd records
    the copy to one mask."""
    # Stand-ins of a compiler and tensors on meta have no memory; the operator checks the mask that comes of them.
    if not torch.compiler.is_compiling() and x.device.type != "meta":
        check(name, x)
        _elements(name, x)
    if x.device != first.device:
        raise BufferError(f'{name} is on {x.device}, expected {first.device}: move it, as .to("{first.device}") does')


def lent(name, x):
    """A tensor that the extension module reads memory from. Raises as `readable`."""
    elements = readable(name, x)
    if name == "out" and elements is not x:
        raise BufferError("out is a lazy view, whose memory holds other values than it: give memory of its own")
    # `__dlpack__` takes no tensor that says that it requires a gradient, also where none is recorded.
    return elements if EXCHANGES else elements.detach()


def maker(like):
    """As `_arrays.maker`, of tensors."""

    def made(name, shape):
        if name == "lse":
            return like.new_empty(shape, dtype=torch.float32)
        if like.shape == shape and like.is_contiguous():
            # Half of the time that `new_empty` takes, which is a part of a small call.
            return torch.empty_like(like)
        return like.new_empty(shape)

    return made


def count_write(x):
    """Tells autograd that x was written, as operators of PyTorch do: a gradient that needs the old elements raises then."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _keys(x):
    return re.findall(r"\w+", str(torch._C._dispatch_keys(x)))
