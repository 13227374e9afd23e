"""KV caches."""

import json

import numpy

from . import _flashtile
from ._arrays import checked, is_torch, lent, maker, padded_masks, written
from ._options import Options, integer


_KEYS = "of the keys (tokens, kv_heads, head_dim) of a representative prompt for each layer, stacked; or None"
_MEANS = "center=True names no mean: expected {}, such as k.mean(axis=0) " + _KEYS
_FACTORS = "equalize=True names no factors: expected {}, such as flashtile.key_factors(k, k.mean(axis=0)) " + _KEYS


def _of_layers(name, given, layers, without):
    """For each layer its means, or its factors, as a list, or None where it has none; an empty list where no layer has any. `layers` are
    `Layers`; `without` is the message for True."""
    if given is None or given is False:
        return []
    counts, shapes = [each._count for each in layers], [(each._desc["kv_heads"], each._desc["head_dim"]) for each in layers]
    alike = len(set(shapes)) == 1
    whole = (sum(counts), *shapes[0]) if alike else None
    if given is True:
        expected = f"an array (layers, kv_heads, head_dim), {whole}" if alike else "a list with an array (kv_heads, head_dim) for each layer"
        raise ValueError(without.format(expected))
    if isinstance(given, (list, tuple)):
        if len(given) != sum(counts):
            raise ValueError(f"{name} has {len(given)} entries, expected an array or None for each of {sum(counts)} layers")
        of_layers = [shape for count, shape in zip(counts, shapes) for _ in range(count)]
        return [None if one is None else _of_layer(f"{name}[{layer}]", one, shape) for layer, (one, shape) in enumerate(zip(given, of_layers))]
    if not alike:
        raise ValueError(f"{name} is an array, and layers differ: expected a list with an array (kv_heads, head_dim) or None for each layer")
    array = numpy.asarray(given, numpy.float32)
    if array.shape != whole:
        raise ValueError(f"{name} has shape {array.shape}, expected (layers, kv_heads, head_dim), {whole}")
    return array.reshape(whole[0], -1).tolist()


def _of_layer(name, array, shape):
    array = numpy.asarray(array, numpy.float32)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected (kv_heads, head_dim), {shape}")
    return array.ravel().tolist()


def _placed(device):
    """A CUDA device and the module of these, or None for main memory."""
    if device is None or (isinstance(device, str) and device == "cpu"):
        return None, None
    try:
        from . import _cuda
    except ImportError as error:
        raise ImportError(f"device is {device!r}, and a cache there needs PyTorch, whose streams order its work: {error}") from None
    if _cuda.torch.device(device).type == "cpu":
        return None, None
    return _cuda.device_of(device), _cuda


class Layers:
    """A number of layers of a `KvCache` that follow each other and are alike.

    Args:
        count, kv_heads, head_dim: layers, and as the model has them.
        value_dim: elements of a value; None is `head_dim`.
        layout: `"paged"`: pages as sequences grow, which forks share; `"contiguous"`: a slot of `capacity` tokens a sequence; `"ring"`: a
            slot that overwrites its oldest tokens, for sliding windows.
        pages, page_size: pages and tokens of a page, of `"paged"`.
        slots, capacity: sequences at a time and tokens of each, of `"contiguous"` and `"ring"`, which require them.
        k, v: codecs of keys and values: f32, f16, bf16, rot16, fp8, int8, tq6, tq5, tq4, tq3, tq2. int8 with tq4 cost a language model 0.2 % of its
            perplexity (docs/kv.md).
        keep_first: first tokens of each sequence that stay in 16 bits beside their codes, such as attention sinks; 0 in a ring.
        keep_last: tokens up to a query's own that it reads in 16 bits: 128 take most of what 2 to 4 bits cost. Each sequence takes the memory of 64 rows more;
            a step of more than 64 tokens is computed 64 at a time, and takes no mask and no slopes of each sequence.
        keep_slots: sequences at a time whose tokens stay in 16 bits, of `"paged"` with `keep_first` or `keep_last`, which requires it.

    Raises:
        ValueError, TypeError: where an argument is wrong.
    """

    def __init__(
        self,
        count,
        kv_heads,
        head_dim,
        *,
        value_dim=None,
        layout="paged",
        pages=1024,
        page_size=16,
        slots=None,
        capacity=None,
        k="int8",
        v="tq4",
        keep_first=0,
        keep_last=0,
        keep_slots=None,
    ):
        keeps = {"keep_first": integer("keep_first", keep_first), "keep_last": integer("keep_last", keep_last)}
        if layout == "paged" and any(keeps.values()) != (keep_slots is not None):
            raise ValueError("layout='paged' takes keep_slots, the number of sequences at a time, with keep_first or keep_last, and only then")
        if layout != "paged" and keep_slots is not None:
            raise ValueError(f"keep_slots is of layout='paged', this one is {layout!r}, whose slots are as many")
        keeps["keep_slots"] = 0 if keep_slots is None else integer("keep_slots", keep_slots)
        if layout == "paged":
            if slots is not None or capacity is not None:
                raise ValueError("slots and capacity are of layout='contiguous' and 'ring', this one is 'paged'")
            tokens = {"pages": pages, "page_size": page_size}
        elif layout in ("contiguous", "ring"):
            if slots is None or capacity is None:
                raise ValueError(f"layout={layout!r} needs slots and capacity")
            tokens = {"slots": slots, "capacity": capacity}
        else:
            raise ValueError(f"layout is {layout!r}, expected 'paged', 'contiguous' or 'ring'")
        for name, codec in (("k", k), ("v", v)):
            if codec not in _flashtile.CODECS:
                raise ValueError(f"{name} is {codec!r}, expected a codec: {', '.join(_flashtile.CODECS)}")
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
        sizes, tokens = ({name: integer(name, size) for name, size in of.items()} for of in (sizes, tokens))
        self._count = integer("count", count)
        self._desc = {"layout": {layout: tokens}, **sizes, "k": k, "v": v, **keeps}

    def __repr__(self):
        return f"<Layers {_described(self._count, self._desc)}>"


def _described(count, desc):
    ((layout, tokens),) = desc["layout"].items()
    (name, of), (_, size) = tokens.items()
    dims = desc["head_dim"] if desc["head_dim"] == desc["value_dim"] else f"{desc['head_dim']} and {desc['value_dim']}"
    kept = [f"{of} {desc[name]}" for name, of in (("keep_first", "first"), ("keep_last", "last")) if desc[name]]
    kept = f", the {' and '.join(kept)} tokens in 16 bits" if kept else ""
    return f"{layout}, {of} {name} of {size} tokens; {count} layers, {desc['kv_heads']} heads of {dims}; k {desc['k']}, v {desc['v']}{kept}"


class KvCache:
    """Keys and values of many sequences, for all layers of a model, as elements or quantized.

        cache = KvCache(layers=2, kv_heads=2, head_dim=64, k="int8", v="int8")
        a, b = cache.create(), cache.create()
        with cache.step([(a, 40), (b, 1)]) as step:  # 40 tokens of a prompt, and one token of another sequence
            for layer in range(2):
                out = step.attend(layer, q, k, v)  # (41, q_heads, 64) from (41, heads, 64)

    Layers that differ are a list of `Layers`, in the order of the model: a window of 128 keys and all keys by turns, for steps of up to 64
    tokens, is

        window = Layers(1, 8, 64, layout="ring", slots=4, capacity=128 + 64, k="bf16", v="bf16")
        cache = KvCache([window, Layers(1, 8, 64, pages=1024)] * 12)

    Layers with equal descriptions share pages or slots, whatever lies between them; each kind of layers has its own. A sequence has the same length in
    all layers, of which rings keep the last tokens: it is truncated to what every layer keeps at most.

    Args:
        layers: the number of layers; `kv_heads`, `head_dim`, `value_dim`, `layout`, `pages`, `page_size`, `slots`, `capacity`, `k`, `v`,
            `keep_first`, `keep_last` and `keep_slots` are as for `Layers` then. Or a list of `Layers`, which have these.
        center: an array `(layers, kv_heads, head_dim)`, or a list with an array `(kv_heads, head_dim)` or None for each layer, subtracted
            from keys before they are quantized, which leaves softmax as it is: for keys with a large constant part. It is a constant of the
            model: for each layer `k.mean(axis=0)` over the tokens of a representative prompt. None or False: keys are stored as they are.
        equalize: arrays as for `center`, that keys are divided by after `center` is subtracted; queries are multiplied by them, which leaves
            softmax as it is. For keys in int8, tq6 to tq2 or rot16 whose channels differ in magnitude. Factors are constants of the model:
            `flashtile.key_factors(k, k.mean(axis=0))` for each layer. None or False: keys are not divided.
        device: where the rows are, and the tensors of steps: None or `"cpu"`, or an NVIDIA GPU, as PyTorch names it: `"cuda"`, the current one,
            `"cuda:1"`, or a `torch.device`.

    On a GPU all operations follow PyTorch's current stream, whichever that is at each of them, and return before their work has ended. The memory
    is the driver's, beside what PyTorch keeps. A row that is not finite, or too large for its codec, is refused on the CPU; a GPU stores it as NaN,
    and `check_stored` says so. CUDA graphs cannot capture operations that move rows.

    Raises:
        ValueError: where a description is wrong, or the device is neither the CPU nor one of CUDA.
        MemoryError: where the CPU has no memory.
        RuntimeError: where there is no such GPU, or it has no memory.
        ImportError: where the cache is to be on a GPU, and PyTorch is not installed.
    """

    def __init__(self, layers, kv_heads=None, head_dim=None, *, center=None, equalize=None, device=None, **of_all):
        if isinstance(layers, (list, tuple)):
            of_all |= {name: size for name, size in (("kv_heads", kv_heads), ("head_dim", head_dim)) if size is not None}
            if of_all:
                raise ValueError(f"layers is a list, whose Layers have {', '.join(of_all)} of their own: give it there")
            for at, each in enumerate(layers):
                if not isinstance(each, Layers):
                    raise TypeError(f"layers[{at}] is {each!r}, expected flashtile.Layers")
        else:
            layers = [Layers(integer("layers", layers), kv_heads, head_dim, **of_all)]
        self._layers = list(layers)
        self._device, self._cuda = _placed(device)
        descs = [{"layers": each._count, **each._desc} for each in layers]
        means, factors = _of_layers("center", center, layers, _MEANS), _of_layers("equalize", equalize, layers, _FACTORS)
        self._cache = self._ordered(_flashtile.Cache, json.dumps(descs), means, factors)

    def _ordered(self, call, *arguments):
        """The result of a call that takes as its last argument the stream of its work, None for a cache in main memory."""
        return call(*arguments, None) if self._cuda is None else self._cuda.ordered(self._device, call, *arguments)

    def __repr__(self):
        kinds = []
        for each in self._layers:
            kind = next((kind for kind in kinds if kind[1] == each._desc), None)
            if kind is None:
                kinds.append([each._count, each._desc])
            else:
                kind[0] += each._count
        try:
            memory = self.memory()
            held = f"{memory['sequences']} sequences, {memory['tokens']} tokens, {memory['bytes_used']} of {memory['bytes_reserved']} bytes"
        except RuntimeError as error:
            held = error
        place = "" if self._device is None else f"; on {self._device}"
        return f"<KvCache {' | '.join(_described(*kind) for kind in kinds)}{place}; {held}>"

    def create(self):
        """A new, empty sequence."""
        return self._cache.create()

    def fork(self, sequence):
        """A second sequence of the same tokens, in the same pages where there are pages."""
        return self._ordered(self._cache.fork, sequence)

    def snapshot(self, sequence):
        """The stored rows of a sequence in all layers, as they are, in main memory: as many bytes, and a wait for a GPU."""
        return self._ordered(self._cache.snapshot, sequence)

    def restore(self, snapshot):
        """A new sequence with the tokens of a snapshot, of this cache or of another one whose layers have the same heads, dimensions, codecs and means
        in the same order. Numbers of pages, slots and tokens may differ, and the device: this is how a cache moves to a larger one. A ring keeps
        the last tokens.

        Raises:
            ValueError: where a kind of layers differs from the snapshot's, or there is no room.
        """
        return self._ordered(self._cache.restore, snapshot)

    def remove(self, sequence):
        """Ends a sequence and frees the pages that only it holds."""
        self._cache.remove(sequence)

    def len(self, sequence):
        """Tokens of a sequence."""
        return self._cache.len(sequence)

    def truncate(self, sequence, length):
        """Keeps the first tokens of a sequence."""
        self._cache.truncate(sequence, length)

    def forget(self, sequence, before):
        """Drops the tokens of a sequence before a position."""
        self._cache.forget(sequence, before)

    def memory(self):
        """Bytes, pages, sequences and tokens of the cache, as a dict."""
        return self._cache.memory()

    def check_stored(self):
        """Checks that all rows of the steps since the last call were stored. Waits for a GPU; the CPU refuses such rows at once.

        Raises:
            ValueError: names the first row, in a layer of its kind, that was not finite, or whose norm is too large for its codec. Attention that reads
                it gives NaN, until its sequence is truncated to before it, or removed.
        """
        self._ordered(self._cache.check_stored)

    def step(self, batch):
        """Begins a step: adds a number of tokens to each listed sequence, `[(sequence, tokens), ..]`, for every layer to fill in and attend
        to. Until it ends, the cache answers to the step alone.

        Raises:
            ValueError: where there is no room for the tokens; the cache is unchanged then.
            RuntimeError: where another step of the cache is open, or the process was forked off one that has computed.
        """
        return Step(self._ordered(self._cache.step, list(batch)), self._device, self._cuda)


class Step:
    """A step of a batch over a cache, begun by `KvCache.step`. A `with` block keeps the tokens at its end, and takes them back where it is
    left by an exception, or where a layer did not attend."""

    def __init__(self, step, device, cuda):
        self._step, self._device, self._cuda = step, device, cuda
        self._ended = False

    def __repr__(self):
        try:
            lens = self.lens()
        except RuntimeError as error:
            return f"<Step, {error}>"
        return f"<Step of {len(lens)} sequences, {sum(queries for queries, _ in lens)} new tokens of {sum(keys for _, keys in lens)}>"

    def attend(
        self,
        layer,
        q,
        k,
        v,
        *,
        causal=True,
        window=(-1, -1),
        attention_chunk=None,
        q_offset=None,
        scale=None,
        softcap=None,
        mask=None,
        alibi_slopes=None,
        sinks=None,
        return_lse=False,
        out=None,
    ):
        """Stores k and v of a layer, and attends to them and to what the cache holds.

        q `(tokens, q_heads, dim)`, k `(tokens, kv_heads, dim)` and v `(tokens, kv_heads, value_dim)` hold the tokens sequence by sequence, as
        the step listed them, and give out `(tokens, q_heads, value_dim)`, and with `return_lse` a logsumexp `(q_heads, tokens)`. Options
        are as for `flashtile.attention`; each token sits at its place in its sequence. A mask is `(sequences, heads, longest queries,
        longest keys)`, or a list with a mask for each sequence. Raises as `flashtile.attention`; a tensor that requires a gradient is refused.

        Where the cache is on a GPU, tensors are there, and results are tensors of PyTorch. It follows the current stream, and returns before its work has
        ended.
        """
        mask, mask_lens = padded_masks(mask)
        options = Options(
            causal=causal,
            window=window,
            attention_chunk=attention_chunk,
            q_offset=q_offset,
            scale=scale,
            softcap=softcap,
            mask=mask,
            mask_lens=mask_lens,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=return_lse,
        )
        tensors = [lent(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))]
        options = checked(options)
        if self._cuda is not None:
            made, lse = self._cuda.attend(self._device, layer, self._step, tensors, options, q, maker(q))
        elif is_torch(q) and q.is_cuda:
            raise BufferError(f'q is on {q.device}, expected cpu: make the cache with device="{q.device}", or move q, as .to("cpu") does')
        else:
            made, lse = self._step.attend(layer, tensors, options, maker(q))
        out = made if out is None else written(out)
        return (out, lse) if return_lse else out

    def lens(self):
        """`(queries, keys)` of each sequence in this step."""
        return self._step.lens()

    def finish(self):
        """Keeps the tokens. Raises ValueError where a layer did not attend; the tokens are taken back then."""
        self._ended = True
        self._step.finish()

    def cancel(self):
        """Takes the tokens back."""
        self._ended = True
        self._step.cancel()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self._ended:
            return
        if kind is None:
            self.finish()
        else:
            self.cancel()
