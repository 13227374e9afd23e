//! Attention over a cache of the caller's: pages that a block table lists, or batch entries with room for more tokens.

use crate::attention::{Call, Made, Results, Shapes};
use crate::cuda as on_cuda;
use crate::failure::refused;
use crate::memory::{Axes, Memory, blocks};
use crate::options::{Options, cumulative, list};
use crate::process;
use flashtile::problem::MAX_SEQUENCES;
use flashtile::{BlockTables, HeadShape, ProblemDesc, Runner, SeqLens};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyTuple;
use std::collections::HashMap;

/// Where queries and keys are, as the arguments of Python say.
#[derive(FromPyObject)]
pub(crate) struct CacheArgs<'py> {
    cache_lens: Option<Bound<'py, PyAny>>,
    /// Bytes of u32 `[rows, width]`, and the rows.
    block_table: Option<(PyBackedBytes, usize)>,
    cache_batch_idx: Option<Bound<'py, PyAny>>,
    q_lens: Option<Bound<'py, PyAny>>,
    cu_seqlens: Option<Bound<'py, PyAny>>,
}

/// Rows of q that belong to one sequence, and rows after them that belong to none.
#[derive(Clone, Copy)]
struct QueryRows {
    used: usize,
    unused: usize,
}

/// New keys and values, and the function that writes them to pages and rows of the caches.
struct New<'py> {
    k: Memory,
    v: Memory,
    write: Bound<'py, PyAny>,
}

/// The problem of a call.
pub(crate) struct Paged {
    pub(crate) desc: ProblemDesc,
    pub(crate) tables: BlockTables,
    /// The first new token of each sequence, where there are new ones.
    first_new: Option<Vec<usize>>,
}

fn wrong(what: impl Into<String>) -> PyErr {
    PyValueError::new_err(what.into())
}

/// Numbers of rows, from the first row of each sequence and the total.
fn spans(of: &str, starts: &[usize], total: usize) -> PyResult<Vec<usize>> {
    let increasing = starts.windows(2).all(|w| w[0] <= w[1]);
    if starts.first() != Some(&0) || starts.last() != Some(&total) || !increasing {
        return Err(wrong(format!(
            "cu_seqlens of {of} is {starts:?}, expected to start at 0, never to decrease, and to end at {total}"
        )));
    }
    Ok(starts.windows(2).map(|w| w[1] - w[0]).collect())
}

impl CacheArgs<'_> {
    fn q_lens(&self) -> PyResult<Option<Vec<usize>>> {
        let of = |lens| list("q_lens", lens, "the number of queries of each sequence");
        self.q_lens.as_ref().map(of).transpose()
    }

    /// Rows of q: one sequence after another, or a batch entry for each.
    fn queries(&self, q: &Memory, axes: Axes) -> PyResult<Vec<QueryRows>> {
        let q_lens = self.q_lens()?;
        let sequences = match (q.shape(), &self.cu_seqlens) {
            (&[total, _, _], None) if q_lens.is_none() => total,
            ([_, _, _], _) | (_, Some(_)) => 0,
            _ => q.sizes(axes)?[0],
        };
        // A broadcast tensor may have more rows than a list.
        if sequences > MAX_SEQUENCES {
            return Err(wrong(format!("q has {sequences} sequences, expected at most {MAX_SEQUENCES}")));
        }
        let spans = match (q.shape(), &self.cu_seqlens) {
            ([_, _, _, _], Some(_)) => {
                return Err(wrong(
                    "cu_seqlens were given, and q has an axis for the batch: expected (total, heads, dim)",
                ));
            }
            (&[total, _, _], Some(starts)) => spans("q", &cumulative(starts)?.0, total)?,
            (&[total, _, _], None) => match &q_lens {
                Some(lens) if lens.iter().copied().fold(0, usize::saturating_add) != total => {
                    return Err(wrong(format!(
                        "q_lens is {lens:?}, expected {total} queries in all, as q has rows"
                    )));
                }
                Some(lens) => lens.clone(),
                None => vec![1; total],
            },
            _ => {
                let [batch, _, rows, _] = q.sizes(axes)?;
                vec![rows; batch]
            }
        };
        let used = q_lens.unwrap_or_else(|| spans.clone());
        let fits = used.len() == spans.len() && used.iter().zip(&spans).all(|(used, span)| used <= span);
        if !fits {
            return Err(wrong(format!(
                "q_lens is {used:?}, expected a number for each sequence, at most its rows {spans:?}"
            )));
        }
        Ok(used.iter().zip(&spans).map(|(&used, span)| QueryRows { used, unused: span - used }).collect())
    }

    /// New tokens of each sequence; none where k is not given.
    fn new_lens(
        &self,
        queries: &[QueryRows],
        k: Option<&Memory>,
        q: &Memory,
        axes: Axes,
    ) -> PyResult<Vec<usize>> {
        let pair = self.cu_seqlens.as_ref().map(cumulative).transpose()?.and_then(|(_, k)| k);
        let Some(k) = k else {
            return match pair {
                Some(_) => Err(wrong(
                    "cu_seqlens is a pair, and there are no new keys: expected the list of q alone",
                )),
                None => Ok(vec![0; queries.len()]),
            };
        };
        if queries.iter().any(|rows| rows.unused > 0) {
            return Err(wrong(
                "q_lens leave rows of q unused, and k has new tokens: give rows without padding, with cu_seqlens",
            ));
        }
        if k.shape().len() != q.shape().len() {
            return Err(wrong(format!(
                "k has shape {:?}, expected as many axes as q, {:?}",
                k.shape(),
                q.shape()
            )));
        }
        let lens = match (pair, k.shape()) {
            (Some(starts), &[total, _, _]) => spans("k", &starts, total)?,
            (None, [_, _, _]) => queries.iter().map(|rows| rows.used).collect(),
            _ => {
                let [batch, _, rows, _] = k.sizes(axes)?;
                vec![rows; batch.min(MAX_SEQUENCES)]
            }
        };
        if lens.len() != queries.len() {
            return Err(wrong(format!(
                "k has new tokens of {} sequences, q has queries of {}",
                lens.len(),
                queries.len()
            )));
        }
        Ok(lens)
    }

    /// Pages of each sequence, `[sequences, width]`, where the cache has `[pages, .., page_size, ..]`.
    fn pages(&self, sequences: usize, pages: usize) -> PyResult<Vec<u32>> {
        match (&self.block_table, &self.cache_batch_idx) {
            (Some(_), Some(_)) => {
                Err(wrong("block_table and cache_batch_idx were given, expected one of them"))
            }
            (Some((bytes, rows)), None) if *rows == sequences => {
                let of = |page: &[u8]| page.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte));
                Ok(bytes.chunks_exact(4).map(of).collect())
            }
            (Some((_, rows)), None) => Err(wrong(format!(
                "block_table has {rows} rows, expected one for each of {sequences} sequences"
            ))),
            (None, Some(of)) => {
                let entries: Vec<u32> =
                    list("cache_batch_idx", of, "a batch entry of the cache for each sequence")?;
                match entries.len() == sequences {
                    true => Ok(entries),
                    false => Err(wrong(format!(
                        "cache_batch_idx has {} entries, expected {sequences}",
                        entries.len()
                    ))),
                }
            }
            (None, None) if pages == sequences => Ok((0..pages).map(|page| page as u32).collect()),
            (None, None) => Err(wrong(format!(
                "k_cache has {pages} batch entries, and q has {sequences} sequences: give cache_batch_idx, or a block_table where these are pages"
            ))),
        }
    }

    /// Tokens that the cache holds of each sequence; all rows of an entry where nothing else is said.
    fn cache_lens(&self, sequences: usize, rows: usize, has_new: bool) -> PyResult<Vec<usize>> {
        let lens = match &self.cache_lens {
            Some(lens) => list("cache_lens", lens, "the tokens of each sequence in the cache")?,
            None if self.block_table.is_some() || has_new => {
                return Err(wrong(
                    "cache_lens is missing: the tokens of each sequence in the cache, without the new ones",
                ));
            }
            None => vec![rows; sequences],
        };
        match lens.len() == sequences {
            true => Ok(lens),
            false => Err(wrong(format!(
                "cache_lens has {} entries, expected one for each of {sequences} sequences",
                lens.len()
            ))),
        }
    }

    /// The problem of these caches, whose rows of q have been counted.
    fn paged(&self, call: &Call, queries: &[QueryRows], new_lens: Option<&[usize]>) -> PyResult<Paged> {
        let axes = call.options.axes();
        let ([_, q_heads, _, head_dim], [pages, kv_heads, page_size, _]) =
            (call.q.sizes(Axes::Packed)?, call.k.sizes(axes)?);
        let value_dim = call.v.sizes(axes)?[3];
        let first_new = self.cache_lens(queries.len(), page_size, new_lens.is_some())?;
        let table = self.pages(queries.len(), pages)?;
        let width = table.len().checked_div(queries.len()).unwrap_or(0);
        let (mut lens, mut rows) = (Vec::new(), Vec::new());
        for (at, (query, cached)) in queries.iter().zip(&first_new).enumerate() {
            let new = new_lens.map_or(0, |new| new[at]);
            lens.push(SeqLens { q_len: query.used, kv_len: cached.saturating_add(new) });
            rows.extend_from_slice(&table[at * width..][..width]);
            if query.unused > 0 {
                // A sequence without keys, whose rows are 0.
                lens.push(SeqLens { q_len: query.unused, kv_len: 0 });
                rows.resize(rows.len() + width, flashtile::cache::NO_PAGE);
            }
        }
        if lens.len() > queries.len() && call.options.mask().is_some() {
            return Err(wrong(
                "q_lens leave rows of q unused, and there is a mask: give rows without padding, with cu_seqlens",
            ));
        }
        let pairs: Vec<(usize, usize)> = lens.iter().map(|lens| (lens.q_len, lens.kv_len)).collect();
        call.options.check_masks_of(&pairs)?;
        call.options.check_slopes_of(queries.len(), q_heads, lens.len() > queries.len())?;
        let heads = HeadShape { q_heads, kv_heads, head_dim, value_dim };
        let mut desc = ProblemDesc::cached(heads, call.q.dtype()?, &lens);
        let sequences = std::mem::take(&mut desc.sequences);
        call.options.set(&mut desc);
        desc.sequences = sequences;
        desc.mask = call.options.mask().map(Memory::mask_kind);
        let kv_lens: Vec<usize> = lens.iter().map(|lens| lens.kv_len).collect();
        let tables =
            BlockTables::from_rows(&rows, &kv_lens, page_size).map_err(|error| wrong(error.to_string()))?;
        if call.options.stream.is_none() {
            desc.prefixes = tables.shared_prefixes(1);
        }
        Ok(Paged { desc, tables, first_new: new_lens.map(|_| first_new) })
    }
}

impl Paged {
    /// Pages and rows of the new tokens, one sequence after another. The tables have been checked.
    ///
    /// # Errors
    /// Two tokens would lie in one place.
    fn new_rows(&self) -> PyResult<(Vec<usize>, Vec<usize>)> {
        let tables = &self.tables;
        let (mut pages, mut rows) = (Vec::new(), Vec::new());
        // The sequence and the block that write to a page, and the first row that they write.
        let mut writers: HashMap<usize, (usize, usize, usize)> = HashMap::new();
        let twice = |page, (a, b)| {
            wrong(format!(
                "page {page} gets new tokens of sequence {a}, and holds tokens of sequence {b} there: give each a page of its own"
            ))
        };
        for (sequence, &first) in self.first_new.iter().flatten().enumerate() {
            for token in first..tables.lens[sequence] {
                let Some((page, row)) = tables.locate(sequence, token) else { continue };
                let block = token / tables.page_size;
                let &mut (other, of, _) = writers.entry(page).or_insert((sequence, block, row));
                if (other, of) != (sequence, block) {
                    return Err(twice(page, (other, sequence)));
                }
                pages.push(page);
                rows.push(row);
            }
        }
        for (sequence, &len) in tables.lens.iter().enumerate() {
            for (block, token) in (0..len).step_by(tables.page_size.max(1)).enumerate() {
                let Some((page, _)) = tables.locate(sequence, token) else { continue };
                match writers.get(&page) {
                    Some(&(other, of, row)) if (other, of) != (sequence, block) && token + row < len => {
                        return Err(twice(page, (other, sequence)));
                    }
                    _ => {}
                }
            }
        }
        Ok((pages, rows))
    }
}

impl New<'_> {
    /// Refuses rows that are not as the caches have them.
    fn check(&self, call: &Call, axes: Axes, total: usize) -> PyResult<()> {
        let [of_k, of_v] = [self.k.sizes(axes)?, self.v.sizes(axes)?];
        if (of_v[0], of_v[2]) != (of_k[0], of_k[2]) {
            let (k, v) = (self.k.shape(), self.v.shape());
            return Err(wrong(format!("v has shape {v:?}, expected the tokens of k, {k:?}")));
        }
        for (new, cache) in [(&self.k, &call.k), (&self.v, &call.v)] {
            let name = new.block.name;
            if new.dtype()? != cache.dtype()? {
                return Err(PyTypeError::new_err(format!(
                    "{name} is {}, expected {} as the cache has",
                    new.dtype()?,
                    cache.dtype()?
                )));
            }
            let ([_, heads, _, dim], [b, h, s, d]) = (cache.sizes(call.options.axes())?, new.sizes(axes)?);
            if (h, d) != (heads, dim) || b.saturating_mul(s) != total {
                let got = new.shape();
                return Err(wrong(format!(
                    "{name} has shape {got:?}, expected {total} new tokens of {heads} heads of {dim} elements"
                )));
            }
        }
        Ok(())
    }
}

/// Attention of `tensors`, which are q, the caches of keys and values, and out, which may be `None`. `new` is `None`, or new keys, new values, and
/// `write(pages, rows)`, which writes them to the caches once nothing refuses the call. The rest is as for `attention`; a logsumexp is
/// `(heads, total)` or `(heads, batch, rows)`.
#[pyfunction]
pub(crate) fn attention_with_cache(
    tensors: [Bound<'_, PyAny>; 4],
    new: Option<[Bound<'_, PyAny>; 3]>,
    args: CacheArgs<'_>,
    options: &Bound<'_, PyTuple>,
    make: &Bound<'_, PyAny>,
) -> PyResult<Results> {
    process::compute()?;
    let options = Options::of(options)?;
    let stream = options.stream;
    let on = |name, object: &Bound<'_, PyAny>| Memory::on(stream, name, object);
    let [q, k, v, out] = &tensors;
    let (q, k, v) = (on("q", q)?, on("k_cache", k)?, on("v_cache", v)?);
    let new = new.map(|[k, v, write]| Ok::<_, PyErr>(New { k: on("k", &k)?, v: on("v", &v)?, write }));
    let new = new.transpose()?;
    let mut call = Call { options, q, k, v };
    let axes = call.options.axes();
    let queries = args.queries(&call.q, axes)?;
    let new_lens = args.new_lens(&queries, new.as_ref().map(|new| &new.k), &call.q, axes)?;
    let is_packed = call.q.shape().len() == 3;
    let q_axes = if is_packed { Axes::Packed } else { axes };
    let mut shape = call.q.sizes(q_axes)?;
    shape[3] = call.v.sizes(axes)?[3];
    if !is_packed {
        call.q.block.join_batch(axes)?;
    }
    let paged = args.paged(&call, &queries, new.as_ref().map(|_| &new_lens[..]))?;
    if let Some(new) = &new {
        new.check(&call, q_axes, new_lens.iter().sum())?;
    }
    // A wrong problem is refused before there is memory for its result.
    paged.desc.clone().validate().map_err(refused)?;
    let [batch, heads, rows, _] = shape;
    let lse = if is_packed { vec![heads, rows] } else { vec![heads, batch, rows] };
    // Rows of a sequence that follow one another are one axis with the batch.
    let out_axes = if is_packed || !out.is_none() { q_axes } else { Axes::Bshd };
    let shapes = Shapes { out: out_axes.shape(shape), lse };
    let mut made = Made::new(out, &call.options, shapes, make)?;
    made.check_out(&out_axes.shape(shape))?;
    if !is_packed {
        made.join_batch(out_axes)?;
    }
    let mut others = vec![&call.q, &call.k, &call.v];
    others.extend(new.iter().flat_map(|new| [&new.k, &new.v]));
    others.extend(call.options.mask());
    Work { call: &call, paged: &paged, others }.run(new.as_ref(), &mut made, make.py())?;
    Ok(made.results())
}

/// A call whose arguments have been counted.
pub(crate) struct Work<'a> {
    pub(crate) call: &'a Call,
    pub(crate) paged: &'a Paged,
    /// Memory of all arguments that are read.
    pub(crate) others: Vec<&'a Memory>,
}

/// One half of a call.
#[derive(Clone, Copy)]
pub(crate) enum Action {
    /// Refuse what a run would refuse.
    Check,
    Run,
}

impl Work<'_> {
    /// Checks, writes new tokens, and computes.
    fn run(&self, new: Option<&New<'_>>, made: &mut Made<'_>, py: Python<'_>) -> PyResult<()> {
        if let Some(new) = new {
            self.act(Action::Check, made, py)?;
            let axes = self.call.options.axes();
            // The caches may be views of one array, whose elements alternate: what they have in common is for the caller to know.
            let caches = [&self.call.k, &self.call.v];
            let read: Vec<&Memory> = self
                .others
                .iter()
                .copied()
                .filter(|of| !caches.iter().any(|cache| std::ptr::eq(*of, *cache)))
                .collect();
            for cache in caches {
                cache.block.check_writable(axes, &blocks(&read))?;
            }
            new.write.call1(self.paged.new_rows()?)?;
        }
        self.act(Action::Run, made, py)
    }

    fn act(&self, action: Action, made: &mut Made<'_>, py: Python<'_>) -> PyResult<()> {
        match self.call.options.stream {
            None => self.on_host(action, made, py),
            Some(stream) => on_cuda::with_cache(self, action, made, (py, stream)),
        }
    }

    fn on_host(&self, action: Action, made: &mut Made<'_>, py: Python<'_>) -> PyResult<()> {
        let Self { call: Call { options, q, k, v }, paged, others } = self;
        let axes = options.axes();
        let attention = options.attention()?;
        let mut inputs = attention.inputs(q.view(Axes::Packed)?, k.view(axes)?, v.view(axes)?);
        inputs.tables = Some(&paged.tables);
        let mut outputs = made.outputs(Axes::Packed, others)?;
        py.detach(|| {
            Runner::with_current(|runner| match action {
                Action::Check => runner.prepare(&paged.desc, &inputs, &outputs),
                Action::Run => runner.run(&paged.desc, &inputs, &mut outputs),
            })
        })
        .map_err(refused)
    }
}
