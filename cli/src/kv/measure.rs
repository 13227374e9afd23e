//! Measurement of the errors that codecs cause in the heads of every pair.

use super::diagnosis::Diagnosis;
use super::options::KvArgs;
use super::pairs::Pair;
use crate::failure::{self, Failure};
use crate::progress::ticking;
use flashtile::codec::{EncodeError, key_factors, key_mean};
use flashtile::quality::{
    Comparison, Deviation, Head, HeadAttention, KeyCodec, KeyErrors, MEAN_ROWS, RefusedRow, compare,
};
use flashtile::{Codec, Sequence, TensorView};
use rayon::prelude::*;
use std::ops::Range;

/// Codecs to compare: those that support the dimensions of every pair.
pub(super) struct Codecs {
    /// Plain elements, quantized ones with and without centering, and equalized ones where asked for.
    pub(super) keys: Vec<KeyCodec>,
    pub(super) values: Vec<Codec>,
    /// Codecs that are left out because they do not support a pair's dimensions.
    pub(super) left_out: Vec<(Codec, String)>,
    /// The power of the deviations of channels for the factors of equalized keys; `None`: no keys are equalized.
    pub(super) power: Option<f32>,
    /// First and last tokens that stay in 16 bits.
    pub(super) keep: [usize; 2],
}

impl Codecs {
    /// The codecs asked for, or by default all that support any dimension and have fewer bits than f32. `rot16` has as many bits as
    /// f16, and is for rows beside codes.
    pub(super) fn of(pairs: &[Pair<'_>], args: &KvArgs) -> failure::Result<Self> {
        let (asked, power) = (&args.codecs, args.equalize);
        let keep = [args.keep_first, args.keep_last];
        let mut codecs = Self { keys: Vec::new(), values: Vec::new(), left_out: Vec::new(), power, keep };
        let has_kept = |codec: Codec| codec.dtype().is_some() || codec.kept() != codec;
        let usual = |codec: &Codec| codec.supports(1) && ![Codec::F32, Codec::Rot16].contains(codec);
        let wanted = |codec: &Codec| if asked.is_empty() { usual(codec) } else { asked.contains(codec) };
        for codec in Codec::ALL.into_iter().filter(wanted) {
            let without = pairs.iter().find_map(|pair| {
                let dims = pair.problem.dims();
                let rows = [("key", dims.head_dim), ("value", dims.value_dim)];
                let (row, dim) = rows.into_iter().find(|(_, dim)| !codec.supports(*dim))?;
                Some(format!("a {row} of {} {}", pair.name, EncodeError::Dim { codec, dim }))
            });
            let unkept = (keep != [0; 2] && !has_kept(codec))
                .then(|| format!("{codec}: a cache keeps no rows of it in 16 bits"));
            if let Some(why) = without.or(unkept) {
                codecs.left_out.push((codec, why));
                continue;
            }
            codecs.values.push(codec);
            codecs.keys.push(KeyCodec::plain(codec));
            if codec.dtype().is_none() {
                codecs.keys.push(KeyCodec::centered(codec));
            }
            if power.is_some() && codec.supports_key_factors() {
                codecs.keys.push(KeyCodec::equalized(codec));
            }
        }
        match codecs.left_out.first() {
            Some((_, why)) if codecs.values.is_empty() => Err(Failure::at("--codecs", why)),
            _ => Ok(codecs),
        }
    }
}

/// Errors, summed over the queries of one or more heads.
#[derive(Debug, Clone)]
pub(super) struct Sums {
    pub(super) queries: usize,
    /// For each codec of keys, its errors, or the row that it cannot store.
    pub(super) keys: Vec<Result<KeyErrors, String>>,
    pub(super) values: Vec<Result<Deviation, String>>,
    /// `[codecs of keys][codecs of values]`.
    pub(super) out: Vec<Vec<Option<Deviation>>>,
}

impl Sums {
    fn of(found: Comparison, place: impl Fn(&str, RefusedRow) -> String) -> Self {
        Self {
            queries: found.queries,
            keys: found.keys.into_iter().map(|of| of.map_err(|row| place("k", row))).collect(),
            values: found.values.into_iter().map(|of| of.map_err(|row| place("v", row))).collect(),
            out: found.out,
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.queries += other.queries;
        add(&mut self.keys, &other.keys, KeyErrors::add);
        add(&mut self.values, &other.values, |mine, theirs| mine.add(*theirs));
        for (mine, theirs) in self.out.iter_mut().flatten().zip(other.out.iter().flatten()) {
            *mine = mine.zip(*theirs).map(|(mut mine, theirs)| {
                mine.add(theirs);
                mine
            });
        }
    }

    /// The sum over heads; `None` if there are none.
    pub(super) fn total<'s>(all: impl IntoIterator<Item = &'s Self>) -> Option<Self> {
        let mut all = all.into_iter();
        let mut total = all.next()?.clone();
        all.for_each(|sums| total.add(sums));
        Some(total)
    }

    /// Relative mean square error of the keys in a codec.
    pub(super) fn k_error(&self, key: usize) -> Option<f64> {
        self.keys[key].as_ref().ok().map(|errors| errors.rows.relative())
    }

    /// Relative mean square error of the values in a codec.
    pub(super) fn v_error(&self, value: usize) -> Option<f64> {
        self.values[value].as_ref().ok().map(|errors| errors.relative())
    }

    /// Root mean square error of the logits, over queries.
    pub(super) fn logit_rmse(&self, key: usize) -> Option<f64> {
        self.of_queries(self.keys[key].as_ref().ok()?.logits).map(f64::sqrt)
    }

    /// Mean divergence over queries.
    pub(super) fn kl(&self, key: usize) -> Option<f64> {
        self.of_queries(self.keys[key].as_ref().ok()?.kl)
    }

    /// Relative root mean square error of the output.
    pub(super) fn nrmse(&self, key: usize, value: usize) -> Option<f64> {
        let out = self.out[key][value].filter(|_| self.queries > 0)?;
        Some(number(out.relative().sqrt()))
    }

    fn of_queries(&self, sum: f64) -> Option<f64> {
        (self.queries > 0).then(|| number(sum / self.queries as f64))
    }
}

/// Adds errors by codec, or keeps the first refusal.
fn add<T: Clone>(mine: &mut [Result<T, String>], theirs: &[Result<T, String>], sum: impl Fn(&mut T, &T)) {
    for pair in mine.iter_mut().zip(theirs) {
        match pair {
            (Ok(mine), Ok(theirs)) => sum(mine, theirs),
            (mine @ Ok(_), theirs @ Err(_)) => mine.clone_from(theirs),
            (Err(_), _) => {}
        }
    }
}

/// A NaN error, which infinite elements cause, counts as the largest.
fn number(x: f64) -> f64 {
    if x.is_nan() { f64::INFINITY } else { x }
}

/// Results for a pair.
pub(super) struct Measured {
    /// For each key/value head.
    pub(super) heads: Vec<Sums>,
    /// Over all heads.
    pub(super) all: Sums,
    pub(super) diagnosis: Diagnosis,
    /// Tokens of all sequences.
    pub(super) tokens: usize,
}

impl Measured {
    /// The head with the largest mean divergence, and that divergence.
    pub(super) fn worst_head(&self, key: usize) -> Option<(usize, f64)> {
        let heads = self.heads.iter().enumerate().filter_map(|(head, sums)| Some((head, sums.kl(key)?)));
        heads.max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// One head of one sequence of one pair.
#[derive(Clone, Copy)]
struct Unit {
    pair: usize,
    sequence: usize,
    head: usize,
}

/// Results for a head, or why there are none.
type Found = Result<(Sums, Diagnosis), String>;

/// Compares every codec on every head of every pair. Returns for each pair its results, or why there are none.
pub(super) fn measure(pairs: &[Pair<'_>], codecs: &Codecs, rows: usize) -> Vec<Result<Measured, String>> {
    let units: Vec<Unit> = pairs.iter().enumerate().flat_map(|(pair, of)| units(pair, of)).collect();
    let progress = ticking(units.len() as u64);
    progress.set_message("heads");
    let found: Vec<Found> = units
        .par_iter()
        .map(|unit| {
            let found = compare_head(&pairs[unit.pair], *unit, codecs, rows);
            progress.inc(1);
            found
        })
        .collect();
    progress.finish_and_clear();
    let mut found = units.into_iter().zip(found);
    pairs
        .iter()
        .enumerate()
        .map(|(pair, of)| {
            let count = units_of(of).count();
            let found: Vec<_> = found.by_ref().take(count).collect();
            debug_assert!(found.iter().all(|(unit, _)| unit.pair == pair));
            gather(of, codecs, found)
        })
        .collect()
}

fn units(pair: usize, of: &Pair<'_>) -> impl Iterator<Item = Unit> {
    units_of(of).map(move |(sequence, head)| Unit { pair, sequence, head })
}

/// A (sequence, head) pair for each head of each sequence with tokens.
fn units_of(of: &Pair<'_>) -> impl Iterator<Item = (usize, usize)> {
    let heads = of.problem.dims().kv_heads;
    let sequences = of.problem.sequences().iter().enumerate().filter(|(_, sequence)| sequence.kv_len > 0);
    sequences.flat_map(move |(index, _)| (0..heads).map(move |head| (index, head)))
}

/// Combines the heads of a pair.
fn gather(pair: &Pair<'_>, codecs: &Codecs, found: Vec<(Unit, Found)>) -> Result<Measured, String> {
    let mut heads: Vec<Option<Sums>> = vec![None; pair.problem.dims().kv_heads];
    let mut diagnosis: Option<Diagnosis> = None;
    for (unit, found) in found {
        let (sums, of) = found?;
        diagnosis = Some(diagnosis.map_or(of, |worst| worst.worse(of)));
        match &mut heads[unit.head] {
            Some(head) => head.add(&sums),
            head => *head = Some(sums),
        }
    }
    let heads: Vec<Sums> = heads.into_iter().flatten().collect();
    let (Some(all), Some(diagnosis)) = (Sums::total(&heads), diagnosis) else {
        return Err("it has no rows".to_owned());
    };
    // A pair that no quantizing codec can store has no result.
    let quantized = |codec: &Codec| codec.dtype().is_none();
    let of_keys = codecs.keys.iter().zip(&all.keys).filter(|(key, _)| quantized(&key.codec));
    let of_values = codecs.values.iter().zip(&all.values).filter(|(codec, _)| quantized(codec));
    let reason = refusal(of_keys.map(|(_, of)| of)).or_else(|| refusal(of_values.map(|(_, of)| of)));
    if let Some(why) = reason {
        return Err(why);
    }
    let tokens = pair.problem.sequences().iter().map(|sequence| sequence.kv_len).sum();
    Ok(Measured { heads, all, diagnosis, tokens })
}

/// The reason of the last refusal, if all codecs refuse.
fn refusal<'s, T: 's>(all: impl Iterator<Item = &'s Result<T, String>>) -> Option<String> {
    let mut last = None;
    for one in all {
        last = Some(one.as_ref().err()?.clone());
    }
    last
}

/// At most `max` evenly spaced integers below `count`.
fn sample(count: usize, max: usize) -> Vec<usize> {
    let max = max.min(count);
    (0..max).map(|n| ((2 * n as u128 + 1) * count as u128 / (2 * max as u128)) as usize).collect()
}

/// Numbers of measured query rows and of all query rows of a pair, for each query head.
pub(super) fn sampled(pair: &Pair<'_>, rows: usize) -> (usize, usize) {
    let rows_of = |sequence: &Sequence| pair.query_rows(sequence);
    let all = pair.problem.sequences().iter().map(rows_of);
    all.fold((0, 0), |(some, all), of| (some + of.min(rows), all + of))
}

/// The mean of the first keys of a head, and factors where keys are equalized.
fn transform_of(
    keys: &[f32],
    dim: usize,
    power: Option<f32>,
) -> Result<(Vec<f32>, Option<Vec<f32>>), String> {
    let rows = (keys.len() / dim).min(MEAN_ROWS);
    let keys = TensorView::bhsd(keys, [1, 1, rows, dim]).map_err(|e| e.to_string())?;
    let mean = key_mean(&keys);
    let factors = power.map(|power| key_factors(&keys, &mean, power));
    Ok((mean, factors))
}

fn compare_head(pair: &Pair<'_>, unit: Unit, codecs: &Codecs, rows: usize) -> Found {
    let problem = &pair.problem;
    let (dims, sequence) = (problem.dims(), &problem.sequences()[unit.sequence]);
    let of_batch = if dims.batch > 1 { format!(" of batch entry {}", sequence.batch) } else { String::new() };
    let (k, v) = (pair.keys(sequence, unit.head), pair.values(sequence, unit.head));
    for (tensor, x, dim) in [("k", &k, dims.head_dim), ("v", &v, dims.value_dim)] {
        if let Some(at) = x.iter().position(|x| !x.is_finite()) {
            let (row, head) = (at / dim, unit.head);
            return Err(format!("row {row} of head {head}{of_batch} of {tensor} holds a NaN or an infinity"));
        }
    }

    let group = dims.q_heads / dims.kv_heads;
    let chosen = sample(pair.query_rows(sequence), rows);
    let (mut q, mut seen) = (Vec::new(), Vec::<Range<usize>>::new());
    for head in unit.head * group..(unit.head + 1) * group {
        let of_head = pair.queries(sequence, head, &chosen);
        if let Some(at) = of_head.iter().position(|x| !x.is_finite()) {
            let row = chosen[at / dims.head_dim];
            return Err(format!("row {row} of head {head}{of_batch} of q holds a NaN or an infinity"));
        }
        q.extend(of_head);
        seen.extend(chosen.iter().map(|row| problem.visible(sequence, *row)));
    }

    // All sequences share one mean and factors, as in a cache: of the first sequence with rows.
    let first = problem.sequences().iter().find(|sequence| sequence.kv_len > 0).unwrap_or(sequence);
    let of_first = if std::ptr::eq(first, sequence) { None } else { Some(pair.keys(first, unit.head)) };
    let (mean, factors) = transform_of(of_first.as_ref().unwrap_or(&k), dims.head_dim, codecs.power)?;
    let (head_dim, value_dim) = (dims.head_dim, dims.value_dim);
    let head = Head { k: &k, v: &v, q: &q, head_dim, value_dim, scale: problem.scale() };
    let mut attention = HeadAttention::new(head);
    attention.seen = Some(&seen);
    attention.softcap = problem.desc().softcap;
    attention.key_mean = Some(&mean);
    attention.key_factors = factors.as_deref();
    [attention.keep_first, attention.keep_last] = codecs.keep;
    let found = compare(&attention, &codecs.keys, &codecs.values).map_err(|e| e.to_string())?;
    let place = |tensor: &str, refused: RefusedRow| {
        format!("row {} of head {}{of_batch} of {tensor} {}", refused.row, unit.head, refused.why)
    };
    Ok((Sums::of(found, place), Diagnosis::of(&k, dims.head_dim, unit.head)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_evenly_spaced() {
        assert_eq!(sample(5, 8), [0, 1, 2, 3, 4]);
        assert_eq!(sample(8, 4), [1, 3, 5, 7]);
        assert_eq!(sample(9, 1), [4]);
        assert!(sample(0, 3).is_empty());
        assert_eq!(sample(usize::MAX, 2).len(), 2);
    }

    #[test]
    fn sums_keep_the_first_refusal() {
        let sums = |queries, keys: Result<KeyErrors, String>| Sums {
            queries,
            keys: vec![keys],
            values: vec![Ok(Deviation { error: 1.0, energy: 4.0 })],
            out: vec![vec![Some(Deviation { error: 1.0, energy: 16.0 })]],
        };
        let errors = KeyErrors { rows: Deviation { error: 1.0, energy: 2.0 }, logits: 8.0, kl: 2.0 };
        let total = Sums::total(&[sums(1, Ok(errors)), sums(3, Ok(errors))]).unwrap();
        assert_eq!((total.kl(0), total.logit_rmse(0), total.k_error(0)), (Some(1.0), Some(2.0), Some(0.5)));
        assert_eq!((total.v_error(0), total.nrmse(0, 0)), (Some(0.25), Some(0.25)));
        let refused = || sums(1, Err("why".to_owned()));
        let total = Sums::total(&[sums(1, Ok(errors)), refused(), sums(1, Err("other".to_owned()))]).unwrap();
        assert_eq!((total.kl(0), total.keys[0].clone()), (None, Err("why".to_owned())));
        let none = sums(0, Ok(KeyErrors::default()));
        assert_eq!((none.kl(0), none.nrmse(0, 0)), (None, None));
    }
}
