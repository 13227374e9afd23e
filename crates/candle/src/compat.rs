//! Functions with the names, parameters and conventions of candle-flash-attn and candle-nn: a program changes one import. candle chose
//! their parameters, which is why clippy's limit on the number of parameters is off here and nowhere else.

#![allow(clippy::too_many_arguments)]

use crate::dispatch::apply;
use crate::options::{Mask, Options};
use crate::storage::{Qkv, TensorLayout, check_readable, list_usize, refused};
use candle_core::{DType, Device, Result, Tensor, bail};
use flashtile::{BlockTables, QOffset, Visibility};
use std::ops::Range;

/// The common arguments of candle-flash-attn's functions.
struct Flash {
    options: Options,
    left: Option<usize>,
    right: Option<usize>,
}

impl Flash {
    fn new(softmax_scale: f32) -> Self {
        let options =
            Options::full().layout(TensorLayout::Bshd).q_offset(QOffset::BottomRight).scale(softmax_scale);
        Self { options, left: None, right: None }
    }

    const fn causal(self, causal: bool) -> Self {
        self.window(None, if causal { Some(0) } else { None })
    }

    const fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        (self.left, self.right) = (left, right);
        self
    }

    fn alibi(mut self, slopes: Option<&Tensor>) -> Self {
        self.options.alibi_slopes = slopes.cloned();
        self
    }

    /// A softcap of 0 is off.
    fn softcap(mut self, softcap: Option<f32>) -> Self {
        self.options.softcap = softcap.filter(|&c| c != 0.0);
        self
    }

    /// The window as candle-flash-attn defines it for at most `max_k` keys: a side longer than that is unbounded, and an unbounded right
    /// side next to a bounded left side reaches `max_k` keys. Only rows before the first key show the difference.
    fn visibility(&self, max_k: usize) -> Visibility {
        let [left, right] = [self.left, self.right].map(|side| side.filter(|&n| n <= max_k));
        Visibility::window(left, if left.is_some() { right.or(Some(max_k)) } else { right })
    }

    fn dense(mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let &[_, max_k, _, _] = k.dims() else {
            bail!("k has shape {:?}, expected (batch, seq, heads, dim)", k.dims())
        };
        self.options.visibility = self.visibility(max_k);
        Ok(apply("flash-attn", Qkv { q, k, v }, self.options)?.0)
    }

    fn varlen(mut self, q: &Tensor, k: &Tensor, v: &Tensor, lens: &Cumulative) -> Result<Tensor> {
        self.options.visibility = self.visibility(lens.max_k);
        let options = self.options.cu_seqlens(&lens.q, &lens.k);
        Ok(apply("flash-attn-varlen", Qkv { q, k, v }, options)?.0)
    }

    fn paged(
        mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        lens: &Cumulative,
        pages: Pages<'_>,
    ) -> Result<Tensor> {
        self.options.visibility = self.visibility(lens.max_k);
        let tables = pages.tables(k, lens)?;
        if let Some(ranges) = pages.mm_prefix_ranges {
            lens.check_rows(q)?;
            // Ranges make keys visible that a window hides, so the mask includes both.
            let mask = lens.mask(self.options.visibility, &ranges_of(ranges, lens.q.len() - 1)?)?;
            self.options.visibility = Visibility::full();
            self.options.mask = Some(Mask::Visible(mask.to_device(q.device())?));
        }
        let options = self.options.paged(&lens.q, tables);
        Ok(apply("flash-attn-varlen", Qkv { q, k, v }, options)?.0)
    }
}

/// Cumulative lengths of packed sequences, from 0.
struct Cumulative {
    q: Vec<usize>,
    k: Vec<usize>,
    max_k: usize,
}

impl Cumulative {
    /// Reads both lists, and checks that no sequence is longer than `max_q` and `max_k` say.
    fn new(seqlens_q: &Tensor, seqlens_k: &Tensor, max_q: usize, max_k: usize) -> Result<Self> {
        let q = list_usize("seqlens_q", seqlens_q)?;
        let k = list_usize("seqlens_k", seqlens_k)?;
        for (name, list, max) in [("q", &q, max_q), ("k", &k, max_k)] {
            if list.len() < 2 {
                bail!(
                    "seqlens_{name} has {} elements, expected 2 or more: 0, then the end of each sequence",
                    list.len()
                )
            }
            let longest = list.windows(2).map(|w| w[1].saturating_sub(w[0])).max().unwrap_or(0);
            if longest > max {
                bail!("max_seqlen_{name} is {max}, the longest sequence of seqlens_{name} has {longest}")
            }
        }
        if q.len() != k.len() {
            bail!("seqlens_q has {} elements, seqlens_k {}, expected equal numbers", q.len(), k.len())
        }
        Ok(Self { q, k, max_k })
    }

    /// Lengths of queries and keys of each sequence.
    fn lens(&self) -> impl Iterator<Item = (usize, usize)> {
        let len = |w: &[usize]| w[1].saturating_sub(w[0]);
        self.q.windows(2).map(len).zip(self.k.windows(2).map(len))
    }

    /// Checks that the last sequence ends where q does.
    fn check_rows(&self, q: &Tensor) -> Result<()> {
        let (&[total, _, _], Some(&end)) = (q.dims(), self.q.last()) else {
            bail!("q has shape {:?}, expected (total, heads, dim)", q.dims())
        };
        if end != total {
            bail!("seqlens_q ends at {end}, expected {total}, the rows of q")
        }
        Ok(())
    }

    /// A mask `(sequences, 1, longest q_len, longest kv_len)`. Visible keys lie in the window, or in the same range as the query.
    fn mask(&self, window: Visibility, ranges: &[Vec<Range<i64>>]) -> Result<Tensor> {
        let (rows, keys) = self.lens().fold((0, 0), |(q, k), (q_len, kv_len)| (q.max(q_len), k.max(kv_len)));
        let sequences = self.q.len() - 1;
        let bytes = sequences.saturating_mul(rows).saturating_mul(keys);
        let mut mask = Vec::new();
        if mask.try_reserve_exact(bytes).is_err() {
            bail!(
                "mm_prefix_ranges need a mask of {sequences} x {rows} x {keys} bytes, for which there is no memory"
            )
        }
        mask.resize(bytes, 0u8);
        for (sequence, ((q_len, kv_len), ranges)) in self.lens().zip(ranges).enumerate() {
            for i in 0..q_len {
                let row = &mut mask[(sequence * rows + i) * keys..][..kv_len];
                let position = (kv_len + i) as i64 - q_len as i64;
                row[window.keys(position, kv_len)].fill(1);
                for range in ranges.iter().filter(|range| range.contains(&position)) {
                    let key = |at: i64| usize::try_from(at).unwrap_or(0).min(kv_len);
                    row[key(range.start)..key(range.end)].fill(1);
                }
            }
        }
        Tensor::from_vec(mask, (sequences, 1, rows, keys), &Device::Cpu)
    }
}

/// Ranges of positions of each sequence, `(sequences, ranges, 2)`.
fn ranges_of(tensor: &Tensor, sequences: usize) -> Result<Vec<Vec<Range<i64>>>> {
    check_readable("mm_prefix_ranges", tensor)?;
    match (tensor.dtype(), tensor.dims()) {
        (DType::I32, &[batch, _, 2]) if batch == sequences => {}
        (dtype, dims) => {
            bail!("mm_prefix_ranges is {dtype:?} of shape {dims:?}, expected I32 of ({sequences}, ranges, 2)")
        }
    }
    let range = |of: &Vec<i32>| i64::from(of[0])..i64::from(of[1]);
    Ok(tensor.to_vec3::<i32>()?.iter().map(|ranges| ranges.iter().map(range).collect()).collect())
}

/// Pages of a cache.
struct Pages<'a> {
    block_table: &'a Tensor,
    page_block_size: usize,
    mm_prefix_ranges: Option<&'a Tensor>,
}

impl Pages<'_> {
    fn tables(&self, k: &Tensor, lens: &Cumulative) -> Result<BlockTables> {
        let sequences = lens.q.len() - 1;
        let table = self.block_table;
        check_readable("block_table", table)?;
        match *table.dims() {
            [rows, _] if rows == sequences => {}
            _ => bail!("block_table has shape {:?}, expected ({sequences}, blocks)", table.dims()),
        }
        let page = self.page_block_size;
        match *k.dims() {
            [_, size, _, _] if size == page => {}
            _ => bail!(
                "k has shape {:?}, expected (blocks, {page}, heads, dim), as page_block_size is {page}",
                k.dims()
            ),
        }
        // Unused entries may be -1.
        let table = match table.dtype() {
            DType::I32 => {
                table.flatten_all()?.to_vec1::<i32>()?.into_iter().map(i32::cast_unsigned).collect()
            }
            DType::U32 => table.flatten_all()?.to_vec1::<u32>()?,
            dtype => bail!("block_table is {dtype:?}, expected U32 or I32"),
        };
        let kv_lens: Vec<usize> = lens.lens().map(|(_, kv_len)| kv_len).collect();
        let blocks = self.block_table.dims()[1];
        let room = blocks.saturating_mul(page);
        if let Some(len) = kv_lens.iter().max().filter(|&&len| len > room) {
            bail!(
                "seqlens_k has a sequence of {len} keys, block_table has room for {room}: {blocks} blocks of {page}"
            )
        }
        BlockTables::from_rows(&table, &kv_lens, page).map_err(refused)
    }
}

/// Attention over q `(batch, q_len, q_heads, dim)`, k and v `(batch, kv_len, kv_heads, dim)`, into `(batch, q_len, q_heads, dim)`, as
/// `candle_flash_attn::flash_attn` computes it. With `causal`, the last query sits at the last key. F32 is accepted too, and any `dim` up
/// to 512.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashtile_candle::flash_attn; // was: use candle_flash_attn::flash_attn;
/// let q = Tensor::rand(-1f32, 1.0, (2, 10, 8, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let kv = Tensor::rand(-1f32, 1.0, (2, 10, 2, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let out = flash_attn(&q, &kv, &kv, 0.125, true)?;
/// assert_eq!((out.dims(), out.dtype()), ([2, 10, 8, 64].as_slice(), DType::BF16));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    Flash::new(softmax_scale).causal(causal).dense(q, k, v)
}

/// [`flash_attn`] with a window: a query sees at most `window_size_left` keys before and `window_size_right` keys after its own. `None`
/// is unbounded; `(None, Some(0))` is causal.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    Flash::new(softmax_scale).window(window_size_left, window_size_right).dense(q, k, v)
}

/// [`flash_attn`] with ALiBi slopes `(q_heads)` in F32: the bias is `-slope * |position of the query - position of the key|`.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    Flash::new(softmax_scale).causal(causal).alibi(Some(alibi_slopes)).dense(q, k, v)
}

/// [`flash_attn_windowed`] with ALiBi.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    Flash::new(softmax_scale)
        .window(window_size_left, window_size_right)
        .alibi(Some(alibi_slopes))
        .dense(q, k, v)
}

/// [`flash_attn_windowed`] with optional ALiBi and a softcap, which is off at 0.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let flash = Flash::new(softmax_scale).window(window_size_left, window_size_right).alibi(alibi_slopes);
    flash.softcap(Some(softcap)).dense(q, k, v)
}

/// [`flash_attn`] over packed sequences: q `(total_q, q_heads, dim)`, k and v `(total_k, kv_heads, dim)`. `seqlens_q` and `seqlens_k`
/// are a 0 and then the ends of the sequences, in U32, I32 or I64. The longest sequences may be shorter than `max_seqlen_q` and
/// `max_seqlen_k`, but not longer.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let lens = Cumulative::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    Flash::new(softmax_scale).causal(causal).varlen(q, k, v, &lens)
}

/// [`flash_attn_varlen`] with the window of [`flash_attn_windowed`].
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let lens = Cumulative::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    Flash::new(softmax_scale).window(window_size_left, window_size_right).varlen(q, k, v, &lens)
}

/// [`flash_attn_varlen_windowed`] over pages: k and v are `(blocks, page_block_size, kv_heads, dim)`, and block `n` of sequence `s` is
/// `block_table[s, n]`, `(sequences, blocks)` in U32 or I32. Entries after the last block of a sequence are not read. A softcap of
/// `None` or 0 is off. Any page size is accepted.
///
/// `mm_prefix_ranges` `(sequences, ranges, 2)` are ranges of positions whose tokens see each other regardless of the window. They become a
/// mask of `sequences * longest q_len * longest kv_len` bytes.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let lens = Cumulative::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    let pages = Pages { block_table, page_block_size, mm_prefix_ranges };
    let flash = Flash::new(softmax_scale).window(window_size_left, window_size_right);
    flash.softcap(softcap).paged(q, k, v, &lens, pages)
}

/// [`flash_attn_varlen`] with ALiBi.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let lens = Cumulative::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    Flash::new(softmax_scale).causal(causal).alibi(Some(alibi_slopes)).varlen(q, k, v, &lens)
}

/// [`flash_attn_varlen_windowed`] with ALiBi.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let lens = Cumulative::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    Flash::new(softmax_scale)
        .window(window_size_left, window_size_right)
        .alibi(Some(alibi_slopes))
        .varlen(q, k, v, &lens)
}

/// [`flash_attn_varlen_windowed`] with optional ALiBi and a softcap, which is off at 0.
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let lens = Cumulative::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    let flash = Flash::new(softmax_scale).window(window_size_left, window_size_right).alibi(alibi_slopes);
    flash.softcap(Some(softcap)).varlen(q, k, v, &lens)
}

/// Attention over q `(batch, q_heads, q_len, dim)`, k `(batch, kv_heads, kv_len, dim)` and v `(batch, kv_heads, kv_len, value_dim)`, into
/// `(batch, q_heads, q_len, value_dim)`, with the parameters of `candle_nn::ops::sdpa`, which runs only on Metal.
///
/// `mask` is added to scores, and `softcapping` is off at 1. `do_causal` puts the last query at the last key. This function obeys arguments
/// that candle ignores:
///
/// | | `candle_nn::ops::sdpa` | here |
/// |---|---|---|
/// | `mask` and `do_causal` | the mask alone | both |
/// | `mask` with one query | ignored | added |
/// | `softcapping` with several queries | refused | applied |
/// | axes of the mask | all four, of full size | `(queries, keys)` or four, each 1 or of full size |
/// | gradient | none, silently | of q, k and v |
///
/// # Errors
/// The errors of [`attention`](crate::attention).
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let mut options = if do_causal { Options::decode() } else { Options::full() }.scale(scale);
    options.softcap = Some(softcapping).filter(|&c| c != 1.0);
    options.mask = mask.cloned().map(Mask::Additive);
    Ok(apply("sdpa", Qkv { q, k, v }, options)?.0)
}
