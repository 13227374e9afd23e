"""A batch of sequences in layers that are alike, with memory that grows."""

from ._cache import KvCache, Layers

# Tokens of a page.
PAGE = 16
# Tokens that a sequence may gain, at least, before its pages are copied to a larger cache.
MIN_ROOM = 256
# Tokens of a step that a ring takes beside its window, and that can be removed again.
SLACK = 64


class Batch:
    """Sequences of layers that are alike: in pages, or, where the layers have a window, in rings. They are copied to a larger `KvCache` where they
    need more room, which takes twice the memory meanwhile.

    Args:
        count: layers.
        window: the last tokens that a query sees, its own included, or None for all.
        reserve: tokens of each sequence for which there is memory from the start.
        transforms: `center` and `equalize` of `KvCache`, of these layers.
        options: of `flashtile.Layers`, but for the layout and the dimensions. Windows hide the first tokens, and keep none in 16 bits.
    """

    def __init__(self, count, window, reserve, transforms, options):
        self.window = window
        self._count, self._reserve, self._transforms, self._options = count, reserve, transforms, options
        self._cache = self._of = None
        self._sequences, self._lens = [], []
        # Where the rings begin: the first token that each sequence has.
        self._firsts = []
        # All pages, and how many of them are free, at least; tokens and sequences for which the rings have room.
        self._pages = self._free = self._capacity = self._slots = 0
        # True if sequences take slots: of rings, or of tokens that stay in 16 bits.
        self._has_slots = window is not None or bool(options.get("keep_first") or options.get("keep_last"))
        self._shares = False

    def __len__(self):
        return len(self._sequences)

    def begin(self, k, v, tokens):
        """A step that adds a number of tokens to each sequence, 0 to some but not to all; `kept` has to be called once it is finished. `k` and `v`
        `(batch, kv_heads, new, dim)` say what the layers store: they make the cache, where there is none.

        Raises:
            ValueError: where the heads, dimensions or the device are not the cache's.
            MemoryError, RuntimeError: where there is no memory for the tokens; the batch is unchanged then.
        """
        self._make(k, v, tokens)
        self._make_room(tokens)
        return self._cache.step([(sequence, n) for sequence, n in zip(self._sequences, tokens) if n])

    def kept(self, tokens):
        """Counts the tokens of a step that was finished."""
        self.taken_back(tokens)
        self._lens = [length + n for length, n in zip(self._lens, tokens)]

    def taken_back(self, tokens):
        """Counts what the rings have overwritten for a step."""
        if self.window is not None:
            lens = [length + n for length, n in zip(self._lens, tokens)]
            self._firsts = [max(first, length - self._capacity) for first, length in zip(self._firsts, lens)]

    def can_truncate(self, lens):
        """True if all tokens are kept that the queries after these lengths see."""
        return self.window is None or all(first <= max(0, length - self.window + 1) for first, length in zip(self._firsts, lens))

    def truncate(self, lens):
        """Keeps the first tokens of each sequence."""
        for sequence, length in zip(self._sequences, lens):
            self._cache.truncate(sequence, length)
        self._lens = list(lens)

    def select(self, indices):
        """Makes a batch of these sequences, of which some may be named twice, and some not at all."""
        kept = sorted(set(indices))
        for at in set(range(len(self))) - set(kept):
            self._cache.remove(self._sequences[at])
        self._take(kept)
        if self._has_slots and len(indices) > self._slots:
            self._move(self._capacity, len(indices), self._pages)
        self._take([kept.index(at) for at in indices])
        sequences, taken = [], set()
        for sequence in self._sequences:
            sequences.append(self._cache.fork(sequence) if sequence in taken else sequence)
            taken.add(sequence)
        self._sequences = sequences
        # Pages are counted again at the next step.
        self._free = 0

    def clear(self):
        """Removes the sequences. The memory is kept for the next ones."""
        for sequence in self._sequences:
            self._cache.remove(sequence)
        self._take([])
        self._free = 0

    def copy(self):
        """A batch with the same tokens, and memory of its own."""
        made = Batch(self._count, self.window, self._reserve, self._transforms, self._options)
        made.__dict__.update(self.__dict__)
        if self._cache is not None:
            # Pages that are shared are copied for each sequence.
            made._move(self._capacity, self._slots, max(self._pages, self._pages_for(max(self._lens, default=0), len(self))))
            made._free = 0
        return made

    def memory(self):
        """As `KvCache.memory`, or None where there is no cache yet."""
        return None if self._cache is None else self._cache.memory()

    def check_stored(self):
        """As `KvCache.check_stored`."""
        if self._cache is not None:
            self._cache.check_stored()

    def _take(self, indices):
        """Lists these sequences, in this order."""
        self._sequences, self._lens, self._firsts = ([of[at] for at in indices] for of in (self._sequences, self._lens, self._firsts))

    def _make(self, k, v, tokens):
        of = (*k.shape[1::2], v.shape[3], k.device)
        if self._sequences:
            if of != self._of:
                raise ValueError(f"a layer has {_described(of)}, and the cache {_described(self._of)}, of its first layer of this kind")
            return
        if of != self._of or (self._has_slots and len(tokens) > self._slots):
            self._of, self._cache = of, None
        if self._cache is None:
            longest = max(tokens)
            self._slots, self._capacity = len(tokens), self._least_capacity(longest)
            self._pages = self._pages_for(longest, len(tokens))
            self._cache = self._new()
        self._sequences = [self._cache.create() for _ in tokens]
        self._lens, self._firsts = [0] * len(tokens), [0] * len(tokens)

    def _new(self):
        kv_heads, head_dim, value_dim, device = self._of
        options = dict(self._options)
        if self.window is None:
            tokens = {"layout": "paged", "pages": self._pages, "page_size": PAGE}
            if self._has_slots:
                tokens["keep_slots"] = self._slots
        else:
            tokens = {"layout": "ring", "slots": self._slots, "capacity": self._capacity}
            options.pop("keep_first", None)
        layers = Layers(self._count, kv_heads, head_dim, value_dim=value_dim, **tokens, **options)
        return KvCache([layers], device=device, **self._transforms)

    def _least_capacity(self, tokens):
        return 0 if self.window is None else self.window - 1 + max(tokens, SLACK)

    def _pages_for(self, tokens, sequences):
        """Pages of sequences of this many tokens, and of half as many that may come."""
        return sequences * -(-max(tokens + max(tokens // 2, MIN_ROOM), self._reserve) // PAGE)

    def _make_room(self, tokens):
        if self.window is not None:
            capacity = self._least_capacity(max(tokens))
            # A prompt that is longer than the slack takes a larger ring, for one step.
            if capacity != self._capacity:
                self._move(capacity, self._slots, self._pages)
            return
        if self._pages_needed(tokens) > self._free:
            self._count_pages()
        if self._pages_needed(tokens) > self._free:
            longest = max(length + n for length, n in zip(self._lens, tokens))
            self._move(self._capacity, self._slots, self._pages_for(longest, len(tokens)))
            self._count_pages()
        self._free -= self._pages_needed(tokens)

    def _pages_needed(self, tokens):
        """Pages that begin, and where some are shared, a copy of the last one of each sequence."""
        begun = ((length + n - 1) // PAGE - (length - 1) // PAGE + self._shares for length, n in zip(self._lens, tokens) if n)
        return sum(begun)

    def _count_pages(self):
        memory = self._cache.memory()
        self._free, self._shares = memory["pages_free"], memory["pages_shared"] > 0

    def _move(self, capacity, slots, pages):
        """Copies the sequences to a new cache."""
        before, sequences = self._cache, self._sequences
        sizes = self._capacity, self._slots, self._pages
        self._capacity, self._slots, self._pages = capacity, slots, pages
        try:
            self._cache = self._new()
            self._sequences = [self._cache.restore(before.snapshot(sequence)) for sequence in sequences]
        except BaseException:
            self._cache, self._sequences = before, sequences
            self._capacity, self._slots, self._pages = sizes
            raise
        if self.window is not None:
            self._firsts = [max(first, length - capacity) for first, length in zip(self._firsts, self._lens)]


def _described(of):
    kv_heads, head_dim, value_dim, device = of
    return f"{kv_heads} heads of {head_dim} and {value_dim} elements on {device}"
