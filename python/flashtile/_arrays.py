"""Results of the kind that the arguments have."""

import numpy

# Classes of arrays that are their elements.
_ARRAYS = (numpy.ndarray, numpy.memmap, numpy.matrix, numpy.recarray)

# Options that are numbers or lists of them.
_NUMBERS = ("scale", "softcap", "alibi_slopes", "sinks", "q_lens", "kv_lens", "cu_seqlens")

_tensors = None


def is_torch(x):
    """True if something is a tensor of PyTorch, which need not be installed."""
    return hasattr(x, "__torch_function__")


def tensors():
    """The module for tensors of PyTorch, which is imported where there are some."""
    global _tensors
    # An import statement takes as long as a small problem, each time.
    if _tensors is None:
        from . import _tensors
    return _tensors


def numpy_dtype(like):
    """The dtype of numpy with the name that the dtype of an array has."""
    if isinstance(like, numpy.ndarray):
        return like.dtype
    name = str(like.dtype).rpartition(".")[2]
    if name == "bfloat16":
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise TypeError("results in bfloat16 are arrays of ml_dtypes, which is not installed: pip install ml_dtypes") from None
        return numpy.dtype(bfloat16)
    return numpy.dtype(name)


def maker(like):
    """A function of a name and a shape that makes a result: `out` in the dtype of `like`, `lse` in float32."""
    if is_torch(like):
        return tensors().maker(like)

    def made(name, shape):
        return numpy.empty(shape, numpy_dtype(like) if name == "out" else numpy.float32)

    return made


def lent(name, x):
    """The object from which the extension module reads the memory of an argument."""
    if is_torch(x):
        return tensors().lent(name, x)
    check_array(name, x)
    return x


def check_numbers(name, x):
    """Refuses numbers, or lists of them, of which the extension module would read the elements alone. Raises as `lent`."""
    if isinstance(x, (list, tuple)):
        for each in x:
            if not isinstance(each, (int, float)):
                check_numbers(name, each)
    elif is_torch(x):
        tensors().readable(name, x)
    else:
        check_array(name, x)


def checked(options):
    """The options, refused where the extension module would lose what a tensor or an array says beside its elements."""
    for name in _NUMBERS:
        value = getattr(options, name)
        if value is not None:
            check_numbers(name, value)
    return options if options.mask is None else options._replace(mask=lent("mask", options.mask))


def padded_masks(masks, keys=0):
    """`(mask, mask_lens)` of an option `mask`. A list of masks, `(queries, keys)` or `(heads, queries, keys)` for each sequence, becomes one
    `(sequences, heads, most queries, most keys)`, of at least `keys` keys, and the queries and keys of each by turns; any other mask stays
    as it is, with None.

    Raises:
        TypeError: where masks are of several kinds or dtypes. ValueError: where a mask has other axes, or other heads than the rest.
        BufferError: where they are on several devices.
    """
    if not isinstance(masks, (list, tuple)):
        return masks, None
    if not masks:
        raise ValueError("mask is an empty list, expected a mask for each sequence")
    first = masks[0]
    shapes = []
    for at, mask in enumerate(masks):
        name = f"mask[{at}]"
        if is_torch(mask) != is_torch(first) or not (is_torch(mask) or isinstance(mask, numpy.ndarray)):
            raise TypeError(f"{name} is a {type(mask).__name__}, expected all masks to be arrays of numpy, or all tensors of PyTorch")
        if is_torch(mask):
            tensors().check_mask(name, mask, first)
        else:
            check_array(name, mask)
        if mask.dtype != first.dtype:
            raise TypeError(f"{name} is {mask.dtype}, expected {first.dtype} as mask[0]")
        if mask.ndim not in (2, 3):
            raise ValueError(f"{name} has shape {list(mask.shape)}, expected (queries, keys) or (heads, queries, keys)")
        shapes.append((1, *mask.shape)[-3:])
    heads = max(heads for heads, _, _ in shapes)
    for at, (of, _, _) in enumerate(shapes):
        if of not in (1, heads):
            raise ValueError(f"mask[{at}] has {of} heads, expected 1 or {heads}")
    shape = (len(masks), heads, max(queries for _, queries, _ in shapes), max(keys, *(keys for _, _, keys in shapes)))
    whole = first.new_zeros(shape) if is_torch(first) else numpy.zeros(shape, first.dtype)
    for at, (mask, (_, rows, columns)) in enumerate(zip(masks, shapes)):
        whole[at, :, :rows, :columns] = mask
    return whole, [length for _, *lengths in shapes for length in lengths]


def check_array(name, x):
    """Refuses arrays of subclasses whose meaning a call would lose, such as the mask of a masked array, or a unit."""
    if isinstance(x, numpy.ndarray) and type(x) not in _ARRAYS:
        kind = f"{type(x).__module__}.{type(x).__name__}"
        instead = "fill it, and give what it hides by mask" if isinstance(x, numpy.ma.MaskedArray) else "give .view(numpy.ndarray)"
        raise TypeError(f"{name} is a {kind}, and what that says beside its elements would be lost: {instead}")


def written(x):
    """The result of a call that was told to write to x."""
    if is_torch(x):
        tensors().count_write(x)
    return x
