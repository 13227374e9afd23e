//! Caches of the keys and values of a file or of a described problem.

use crate::buffer::Buffer;
use crate::failure::{Failure, Result};
use crate::operands::{Operands, Order};
use crate::options::Storage;
use flashtile::quality::{KeyCodec, MEAN_ROWS};
use flashtile::{
    BlockTables, CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Inputs, KvCache, Problem, QOffset,
    SeqLens, Sequence, Sequences, TensorView, key_factors, key_mean,
};

/// How a cache stores keys and values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Stored {
    pub(crate) k: Codec,
    pub(crate) v: Codec,
    /// Subtract the mean of the first keys from quantized keys.
    pub(crate) centered: bool,
    /// Divide keys by this power of the deviations of their channels.
    pub(crate) equalized: Option<f32>,
}

impl Stored {
    /// The cache that the options ask for; `None` if attention reads the tensors directly.
    pub(crate) fn asked(storage: &Storage, problem: &Problem) -> Result<Option<Self>> {
        let (plain, center) = (Codec::of(problem.dtype()), storage.center);
        let (k, v) = (storage.k_codec.unwrap_or(plain), storage.v_codec.unwrap_or(plain));
        if center && k.dtype().is_some() {
            let what =
                format_args!("keys are stored as {k}, expected a --k-codec that quantizes, such as int8");
            return Err(Failure::at("--center-keys", what));
        }
        let equalized = storage.equalize;
        if equalized.is_some() && !k.supports_key_factors() {
            let what =
                format_args!("keys are stored as {k}, expected a --k-codec of int8, tq6 to tq2 or rot16");
            return Err(Failure::at("--equalize-keys", what));
        }
        Ok(((k, v) != (plain, plain)).then_some(Self { k, v, centered: center, equalized }))
    }

    /// The problem with its keys and values in a cache.
    pub(crate) fn problem(&self, problem: &Problem) -> Result<Problem> {
        let mut desc = problem.desc().clone();
        (desc.k_codec, desc.v_codec) = (Some(self.k), Some(self.v));
        if !matches!(desc.sequences, Sequences::Cached { .. }) {
            let lens = |sequence: &Sequence| SeqLens { q_len: sequence.q_len, kv_len: sequence.kv_len };
            let lens: Vec<SeqLens> = problem.sequences().iter().map(lens).collect();
            desc.sequences = Sequences::cached(&lens);
            desc.dims.batch = 1;
            desc.dims.q_len = lens.iter().fold(0, |n, lens| n.saturating_add(lens.q_len));
            desc.dims.kv_len = longest(problem);
            // A valid problem without an offset puts the first query at the first key.
            desc.q_offset = desc.q_offset.or(Some(QOffset::TopLeft));
        }
        desc.validate().map_err(Failure::new)
    }
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let key = KeyCodec { codec: self.k, centered: self.centered, equalized: self.equalized.is_some() };
        write!(f, "k {}{}, v {}", self.k, key.words(), self.v)
    }
}

/// Number of keys of the longest sequence.
fn longest(problem: &Problem) -> usize {
    problem.sequences().iter().map(|sequence| sequence.kv_len).max().unwrap_or(0)
}

/// A file's keys and values in a contiguous cache with one slot per sequence.
pub(crate) struct Cached {
    pub(crate) stored: Stored,
    pub(crate) problem: Problem,
    cache: KvCache,
    tables: BlockTables,
    /// Queries as `[total, heads, dim]`; `None` if the file has them in that order.
    q: Option<Buffer>,
}

impl Cached {
    /// Stores the keys and values of every sequence in order; padding is not read.
    pub(crate) fn fill(operands: &Operands<'_>, stored: Stored) -> Result<Self> {
        let problem = stored.problem(&operands.problem)?;
        let (dims, sequences) = (operands.problem.dims(), operands.problem.sequences());
        let (slots, capacity) = (sequences.len().max(1), longest(&operands.problem).max(1));
        let layout = CacheLayout::Contiguous { slots, capacity };
        let shape = CacheShape {
            layers: 1,
            kv_heads: dims.kv_heads,
            head_dim: dims.head_dim,
            value_dim: dims.value_dim,
        };
        let desc = CacheDesc::new(layout, shape, stored.k).with_codecs(stored.k, stored.v);
        let mut cache = KvCache::new(desc).map_err(Failure::new)?;
        transform(&mut cache, operands, stored)?;
        let mut ids = Vec::with_capacity(sequences.len());
        for (index, sequence) in sequences.iter().enumerate() {
            let id = cache.create().map_err(Failure::new)?;
            ids.push(id);
            if sequence.kv_len == 0 {
                continue;
            }
            let rows = (operands.k_rows(sequence)?, operands.v_rows(sequence)?);
            cache.append(&[(id, sequence.kv_len)], &[rows]).map_err(|e| {
                match (sequences.len(), refusal(&e)) {
                    (1, why) => Failure::new(why),
                    (_, why) => Failure::at(format_args!("sequence {index}"), why),
                }
            })?;
        }
        let tables = cache.tables(&ids).map_err(Failure::new)?;
        let q = match operands.order {
            Order::Bhsd => Some(packed(operands)?),
            Order::Bshd | Order::Packed => None,
        };
        Ok(Self { stored, problem, cache, tables, q })
    }

    /// The operands over the cache. Queries and out are `[total, heads, dim]`.
    pub(crate) fn inputs<'a>(&'a self, operands: &'a Operands<'_>) -> Result<Inputs<'a>> {
        let bytes = self.q.as_ref().map_or_else(|| operands.q_bytes(), Buffer::bytes);
        let shape = self.problem.dims().q_shape();
        let q = TensorView::from_bytes(self.problem.dtype(), bytes, shape, Order::Packed.strides(shape));
        let q = q.map_err(Failure::new)?;
        let mut inputs = self.cache.inputs(0, q, &self.tables).map_err(Failure::new)?;
        operands.add_biases(&mut inputs, self.problem.mask_shape())?;
        Ok(inputs)
    }

    /// Bytes of the stored rows.
    pub(crate) fn bytes(&self) -> usize {
        let tokens: usize = self.problem.sequences().iter().map(|sequence: &Sequence| sequence.kv_len).sum();
        tokens * self.cache.desc().token_bytes()
    }
}

/// Sets the key mean and the key factors of a cache, where they are asked for, as the first keys of the first sequence that has keys give
/// them. Factors are relative to the mean, subtracted or not.
fn transform(cache: &mut KvCache, operands: &Operands<'_>, stored: Stored) -> Result<()> {
    if !stored.centered && stored.equalized.is_none() {
        return Ok(());
    }
    let Some(mut first) = operands.problem.sequences().iter().find(|of| of.kv_len > 0).copied() else {
        return Ok(());
    };
    first.kv_len = first.kv_len.min(MEAN_ROWS);
    let keys = operands.k_rows(&first)?;
    let mean = key_mean(&keys);
    // Keys without a finite mean are refused when they are stored, by an error that names their row.
    if !mean.iter().all(|x| x.is_finite()) {
        return Ok(());
    }
    if stored.centered {
        cache.set_key_mean(0, &mean).map_err(Failure::new)?;
    }
    stored.equalized.map_or(Ok(()), |power| {
        let factors = key_factors(&keys, &mean, power);
        cache.set_key_factors(0, &factors).map_err(|why| Failure::at("--equalize-keys", why))
    })
}

/// Indices of rows `[batch, heads, rows]`, in the order of attention over a cache: `[batch * rows, heads]`.
fn indices([batch, heads, rows]: [usize; 3]) -> impl Iterator<Item = usize> {
    let of_token = move |b, i| (0..heads).map(move |h| (b * heads + h) * rows + i);
    (0..batch).flat_map(move |b| (0..rows).flat_map(move |i| of_token(b, i)))
}

/// Queries of `[batch, heads, rows, dim]` as `[batch * rows, heads, dim]`.
fn packed(operands: &Operands<'_>) -> Result<Buffer> {
    let dims = operands.problem.dims();
    let row = dims.head_dim * operands.problem.dtype().bytes();
    let from = operands.q_bytes();
    let mut buffer = Buffer::zeroed(from.len())?;
    let rows = buffer.bytes_mut().chunks_exact_mut(row);
    for (into, at) in rows.zip(indices([dims.batch, dims.q_heads, dims.q_len])) {
        into.copy_from_slice(&from[at * row..][..row]);
    }
    Ok(buffer)
}

/// Copies rows of `size` bytes each from `[total, heads]`, the order of attention over a cache, to `[batch, heads,
/// rows]`.
pub(crate) fn unpack(packed: &[u8], into: &mut [u8], shape: [usize; 3], size: usize) {
    for (from, at) in packed.chunks_exact(size).zip(indices(shape)) {
        into[at * size..][..size].copy_from_slice(from);
    }
}

/// Says why a cache refuses rows of a file. The layer is not named, because the cache has only one.
fn refusal(error: &CacheError) -> String {
    match error {
        CacheError::Row { tensor, head, row, why, .. } => {
            format!("row {row} of head {head} of {tensor} {why}")
        }
        other => other.to_string(),
    }
}
