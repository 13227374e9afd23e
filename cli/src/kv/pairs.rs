//! Keys, values and queries of a file, found by name.

use super::options::KvArgs;
use crate::failure::{Failure, Result};
use crate::input::Archive;
use crate::names;
use crate::operands::{Order, Tensor, lengths, meant, tensor};
use crate::options::Layout;
use crate::report;
use flashtile::{Dims, Dtype, Problem, ProblemDesc, Sequence, Sequences};
use flashtile_bench::elements::extend_f32;
use std::collections::BTreeSet;

/// Answers in the files of `flashtile run`, which are not inputs.
const ANSWERS: [&str; 2] = ["out", "lse"];

/// Keys and values of one layer, with queries if there are any.
pub(super) struct Pair<'a> {
    /// The common part of the names, or both names if there is none.
    pub(super) name: String,
    /// Names of keys, values and queries.
    pub(super) tensors: [String; 3],
    /// True if the keys are used as queries.
    pub(super) keys_as_queries: bool,
    /// True if there are queries.
    pub(super) has_queries: bool,
    /// The problem has dtype f32, whatever the dtypes of the tensors. Without queries, it has as many query heads as
    /// key/value heads, and no query rows.
    pub(super) problem: Problem,
    order: Order,
    k: Tensor<'a>,
    v: Tensor<'a>,
    q: Option<Tensor<'a>>,
}

/// Tensors that do not form a pair, and why.
pub(super) struct Refusal {
    pub(super) name: String,
    pub(super) why: Failure,
}

/// The pairs of a file.
pub(super) struct Listing<'a> {
    pub(super) pairs: Vec<Pair<'a>>,
    pub(super) refused: Vec<Refusal>,
    /// Names of tensors that belong to no pair.
    pub(super) unread: Vec<String>,
}

impl<'a> Listing<'a> {
    /// Finds every pair. Only a file without any is refused as a whole.
    pub(super) fn read(archive: &Archive<'a>, args: &KvArgs) -> Result<Self> {
        if let Some(name) = archive.names().find(|name| PACKED.contains(name)) {
            let what = format_args!(
                "{name} makes the tensors packed, expected [batch, heads, rows, dim] as --layout says"
            );
            return Err(archive.refuse(what));
        }
        let (names, mut unread) = names::group(archive.names()).map_err(|twice| archive.refuse(twice))?;
        if let Some(name) = unread.iter().find(|name| meant(name) == Some("kv_lens")) {
            return Err(archive.refuse(format_args!("tensor {name} is not known, did you mean kv_lens?")));
        }
        let mut listing = Listing { pairs: Vec::new(), refused: Vec::new(), unread: Vec::new() };
        let mut used = BTreeSet::new();
        for names in names {
            let name = names.label();
            match (&names.k, &names.v) {
                (None, None) => unread.extend(names.q),
                (Some(alone), None) | (None, Some(alone)) => {
                    let missing = if names.k.is_none() { "keys" } else { "values" };
                    let what = format_args!("tensor {alone} has no {missing} beside it");
                    listing.refused.push(Refusal { name, why: archive.refuse(what) });
                    unread.extend(names.q);
                }
                (Some(k), Some(v)) => {
                    let tensors = [k.clone(), v.clone(), names.q.clone().unwrap_or_default()];
                    match Pair::read(archive, args, (&name, &names.prefix, tensors), &mut used) {
                        Ok(pair) => listing.pairs.push(pair),
                        Err(why) => listing.refused.push(Refusal { name, why }),
                    }
                }
            }
        }
        if listing.pairs.is_empty() && listing.refused.is_empty() {
            let has: Vec<&str> = archive.names().collect();
            let what = format!(
                "no keys and values, expected tensors such as layer.0.k and layer.0.v, or k and v (it has {})",
                if has.is_empty() { "no tensor".to_owned() } else { report::some(&has) }
            );
            return Err(archive.refuse(what));
        }
        unread.retain(|name| !used.contains(name) && !ANSWERS.contains(&name.as_str()));
        listing.unread = unread;
        Ok(listing)
    }
}

/// Tensors that say where packed sequences begin.
const PACKED: [&str; 2] = ["cu_seqlens_q", "cu_seqlens_k"];

impl<'a> Pair<'a> {
    fn read(
        archive: &Archive<'a>,
        args: &KvArgs,
        (name, prefix, tensors): (&str, &str, [String; 3]),
        used: &mut BTreeSet<String>,
    ) -> Result<Self> {
        let order = match args.layout {
            Some(Layout::Bshd) => Order::Bshd,
            Some(Layout::Bhsd) | None => Order::Bhsd,
        };
        let read = |name: &str| tensor(archive, name, order, None);
        let [k_name, v_name, q_name] = &tensors;
        let (k, v) = (read(k_name)?, read(v_name)?);
        let q = if q_name.is_empty() { None } else { Some(read(q_name)?) };
        let [batch, kv_heads, kv_len, head_dim] = k.shape;
        let keys_as_queries = q.is_none() && args.keys_as_queries;
        let [q_heads, q_len] = match &q {
            Some(q) => [q.shape[1], q.shape[2]],
            None if keys_as_queries => [kv_heads, kv_len],
            None => [kv_heads, 0],
        };
        let value_dim = v.shape[3];
        let fit = [
            (v_name, v.shape, [batch, kv_heads, kv_len, value_dim]),
            (q_name, q.as_ref().map_or([0; 4], |q| q.shape), [batch, q_heads, q_len, head_dim]),
        ];
        for (name, got, expected) in fit.into_iter().take(if q.is_some() { 2 } else { 1 }) {
            if got != expected {
                let (got, expected) = (order.stored(got), order.stored(expected));
                let what =
                    format_args!("tensor {name} has shape {got:?}, expected {expected:?} to fit {k_name}");
                return Err(archive.refuse(what));
            }
        }
        if batch == 0 || kv_len == 0 {
            let shape = order.stored(k.shape);
            return Err(
                archive.refuse(format_args!("tensor {k_name} has shape {shape:?}, which has no rows"))
            );
        }
        let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        let mut desc = ProblemDesc::new(dims, Dtype::F32);
        let semantics = &args.semantics;
        // Keys without queries need no positions.
        if q_len > 0 {
            desc.visibility = semantics.visibility();
            desc.q_offset = semantics.q_offset;
        }
        (desc.scale, desc.softcap) = (semantics.scale, semantics.softcap);
        for name in [format!("{prefix}kv_lens"), "kv_lens".to_owned()] {
            if let Some(kv_lens) = lengths(archive, &name)? {
                used.insert(name);
                desc.sequences = Sequences::Padded { kv_lens };
                break;
            }
        }
        let problem = desc.validate().map_err(|e| archive.refuse(format_args!("{name}: {e}")))?;
        if problem.sequences().iter().all(|sequence| sequence.kv_len == 0) {
            return Err(archive.refuse(format_args!("{name}: kv_lens leave no rows of keys")));
        }
        let (name, has_queries) = (name.to_owned(), q_len > 0);
        Ok(Self { name, tensors, keys_as_queries, has_queries, problem, order, k, v, q })
    }

    /// Dtypes of keys and values.
    pub(super) const fn dtypes(&self) -> [Dtype; 2] {
        [self.k.dtype, self.v.dtype]
    }

    /// Keys of a sequence and key/value head.
    pub(super) fn keys(&self, sequence: &Sequence, head: usize) -> Vec<f32> {
        self.rows(&self.k, sequence, head, 0..sequence.kv_len)
    }

    /// Values of a sequence and key/value head.
    pub(super) fn values(&self, sequence: &Sequence, head: usize) -> Vec<f32> {
        self.rows(&self.v, sequence, head, 0..sequence.kv_len)
    }

    /// Number of query rows of a sequence that belong to tokens: as many as keys, if queries are padded like keys.
    pub(super) fn query_rows(&self, sequence: &Sequence) -> usize {
        let dims = self.problem.dims();
        if dims.q_len == dims.kv_len { sequence.kv_len } else { sequence.q_len }
    }

    /// Query rows of a sequence and query head.
    pub(super) fn queries(&self, sequence: &Sequence, head: usize, rows: &[usize]) -> Vec<f32> {
        let of = self.q.as_ref().unwrap_or(&self.k);
        self.rows(of, sequence, head, rows.iter().copied())
    }

    fn rows(
        &self,
        of: &Tensor<'_>,
        sequence: &Sequence,
        head: usize,
        rows: impl ExactSizeIterator<Item = usize>,
    ) -> Vec<f32> {
        let [batch, heads, row, _] = self.order.strides(of.shape);
        let dim = of.shape[3];
        let mut x = Vec::with_capacity(rows.len() * dim);
        for at in rows {
            let first = sequence.batch * batch + head * heads + at * row;
            let size = of.dtype.bytes();
            extend_f32(&mut x, of.dtype, &of.bytes.get()[first * size..][..dim * size]);
        }
        x
    }
}
