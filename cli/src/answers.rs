//! Compares the computed answer with the one that a file holds beside its inputs.

use crate::buffer::{Buffer, Bytes};
use crate::failure::{Failure, Result};
use crate::input::{Archive, Stored};
use crate::operands::{Operands, Order, float_dtype};
use crate::report;
use flashtile::Dtype;
use flashtile::quality::{Answer, Report, score_errors};
use flashtile_bench::elements::{extend_f32, to_f32};
use safetensors::tensor::Dtype as StoredDtype;
use serde_json::{Value, json};

/// The expected `out` and `lse` of a file.
pub(crate) struct Answers<'a> {
    out: Option<(Dtype, Bytes<'a>)>,
    lse: Option<Bytes<'a>>,
}

/// The computed answer, in the order of the file.
pub(crate) struct Computed<'a> {
    pub(crate) out: &'a Buffer,
    pub(crate) lse: &'a Buffer,
    /// True if the inputs were rounded first. The error limits do not cover that rounding.
    pub(crate) is_rounded: bool,
}

impl<'a> Answers<'a> {
    /// Finds the answers and checks their shapes and dtypes.
    pub(crate) fn read(archive: &Archive<'a>, operands: &Operands<'_>) -> Result<Self> {
        let (dims, order) = (operands.problem.dims(), operands.order);
        let out = fitting(archive, "out", &order.stored(dims.out_shape()))?;
        let out = out.map(|stored| match float_dtype(stored.dtype) {
            Some(dtype) => Ok((dtype, stored.bytes)),
            None => {
                let got = stored.dtype;
                Err(archive.refuse(format_args!("tensor out is {got:?}, expected F32, F16 or BF16")))
            }
        });
        let lse = fitting(archive, "lse", &order.stored_lse(dims.lse_shape()))?;
        let lse = lse.map(|stored| match stored.dtype {
            StoredDtype::F32 => Ok(stored.bytes),
            got => Err(archive.refuse(format_args!("tensor lse is {got:?}, expected F32"))),
        });
        Ok(Self { out: out.transpose()?, lse: lse.transpose()? })
    }

    /// Compares the computed answer with the file's. Returns `None` if the file has none.
    pub(crate) fn compare(&self, operands: &Operands<'_>, got: &Computed<'_>) -> Result<Option<Compared>> {
        if self.out.is_none() && self.lse.is_none() {
            return Ok(None);
        }
        let (problem, order) = (&operands.problem, operands.order);
        let keys = problem.sequences().iter().map(|sequence| sequence.kv_len).max().unwrap_or(0);
        let shape = problem.dims().out_shape();
        let out = logical(got.out.bytes(), problem.dtype(), order, shape);
        let lse = floats(got.lse.bytes());
        let computed = Answer { out: &out, lse: &lse };
        let logical =
            |(dtype, bytes): &(Dtype, Bytes<'_>)| (*dtype, logical(bytes.get(), *dtype, order, shape));
        let want_out = self.out.as_ref().map(logical);
        let want_lse = self.lse.as_ref().map(|bytes| floats(bytes.get()));
        let with = |off: &[f64]| Compared {
            out: want_out.as_ref().map(|(dtype, want)| {
                computed.compare_out(want, less_precise(*dtype, problem.dtype()), keys, off)
            }),
            lse: want_lse.as_ref().map(|want| computed.compare_lse(want, problem.dtype(), keys, off)),
            is_limited: !got.is_rounded,
            shape,
            order,
        };
        let compared = with(&[]);
        // Computing the errors of scores takes as long as the reference, so it is done only where it can matter.
        if compared.may_be_rounding() {
            return Ok(Some(with(&score_errors(problem, &operands.inputs()?))));
        }
        Ok(Some(compared))
    }
}

/// Reads a tensor, which must have the expected shape. Returns `None` if the file lacks it.
pub(crate) fn fitting<'a>(
    archive: &Archive<'a>,
    name: &str,
    expected: &[usize],
) -> Result<Option<Stored<'a>>> {
    match archive.get(name)? {
        Some(stored) if stored.shape != expected => {
            let got = report::shape(&stored.shape);
            let what = format_args!("tensor {name} has shape {got}, expected {expected:?} to fit q, k and v");
            Err(archive.refuse(what))
        }
        found => Ok(found),
    }
}

const fn less_precise(a: Dtype, b: Dtype) -> Dtype {
    match (a, b) {
        (Dtype::BF16, _) | (_, Dtype::BF16) => Dtype::BF16,
        (Dtype::F16, _) | (_, Dtype::F16) => Dtype::F16,
        (Dtype::F32, Dtype::F32) => Dtype::F32,
    }
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    to_f32(Dtype::F32, bytes)
}

/// Elements in the order `[batch, heads, rows, dim]`.
pub(crate) fn logical(bytes: &[u8], dtype: Dtype, order: Order, shape: [usize; 4]) -> Vec<f32> {
    let [batch, heads, rows, dim] = shape;
    let [sb, sh, ss, _] = order.strides(shape);
    let mut elements = Vec::with_capacity(shape.iter().product());
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..rows {
                let first = b * sb + h * sh + i * ss;
                extend_f32(&mut elements, dtype, &bytes[first * dtype.bytes()..][..dim * dtype.bytes()]);
            }
        }
    }
    elements
}

/// Differences between the computed answer and the file's.
pub(crate) struct Compared {
    out: Option<Report>,
    lse: Option<Report>,
    /// True if errors are held to limits.
    is_limited: bool,
    /// Shape of out, `[batch, heads, rows, dim]`.
    shape: [usize; 4],
    order: Order,
}

/// Largest NRMSE that rounding of scores can explain: no permitted error of a score widens the limit beyond this.
const MAX_NRMSE: f64 = 0.5;

impl Compared {
    fn reports(&self) -> impl Iterator<Item = (&'static str, &Report)> {
        let both = [("out", &self.out), ("lse", &self.lse)];
        both.into_iter().filter_map(|(name, report)| Some((name, report.as_ref()?)))
    }

    /// Names of the compared tensors that `is_chosen` accepts.
    fn names(&self, is_chosen: impl Fn(&Report) -> bool) -> String {
        let names = self.reports().filter(|(_, report)| is_chosen(report)).map(|(name, _)| name);
        names.collect::<Vec<_>>().join(" and ")
    }

    /// True if every tensor is within its error limit; `None` if errors are not held to limits.
    fn within(&self) -> Option<bool> {
        self.is_limited.then(|| self.reports().all(|(_, report)| report.within()))
    }

    /// True if the errors beyond the limits are small enough to be rounding of large scores.
    fn may_be_rounding(&self) -> bool {
        let small = |report: &Report| report.worst.is_finite() && report.nrmse <= MAX_NRMSE;
        self.within() == Some(false) && self.reports().all(|(_, report)| small(report))
    }

    /// The comparison in one line: `matches out and lse: nrmse 3.1e-7 (limit 4.0e-6), lse 2.0e-7`.
    pub(crate) fn words(&self) -> String {
        let all = self.names(|_| true);
        let (verdict, note) = match self.within() {
            Some(true) => (format!("matches {all}"), ""),
            Some(false) => (format!("differs from {}", self.names(|report| !report.within())), ""),
            None => (format!("compared with {all}"), " (no limit: inputs are rounded)"),
        };
        let out = self.out.map(|report| {
            let limit =
                if self.is_limited { format!(" (limit {:.1e})", report.limit) } else { String::new() };
            format!("nrmse {:.1e}{limit}", report.nrmse)
        });
        let lse = self.lse.map(|report| format!("lse {:.1e}", report.max_abs));
        let numbers: Vec<String> = [out, lse].into_iter().flatten().collect();
        format!("{verdict}: {}{note}", numbers.join(", "))
    }

    /// The failure to report if a tensor is beyond its limit.
    pub(crate) fn failure(&self, archive: &Archive<'_>) -> Option<Failure> {
        if self.within() != Some(false) {
            return None;
        }
        let (name, report) = self.reports().find(|(_, report)| !report.within())?;
        let at = self.place(name, report.worst_index);
        let limit = if report.worst.is_finite() && report.worst > 1.0 {
            format!(" ({:.3} times the limit of the difference)", report.worst)
        } else {
            String::new()
        };
        let what = format_args!(
            "the answer differs from tensor {name}: {name}{at:?} is {}, the file has {}{limit}; expected the options \
             that it was computed with (--causal, --window, --scale)",
            report.got as f32, report.want as f32
        );
        Some(archive.refuse(what).into_wrong())
    }

    /// Indices of an element in the order of the file.
    fn place(&self, name: &str, index: usize) -> Vec<usize> {
        let [_, heads, rows, dim] = self.shape;
        let dim = if name == "lse" { 1 } else { dim };
        let row = index / dim.max(1);
        let (head, at) = (row / rows.max(1), row % rows.max(1));
        let [b, h] = [head / heads.max(1), head % heads.max(1)];
        match name {
            "lse" => self.order.stored_lse([b, h, at]),
            _ => self.order.stored([b, h, at, index % dim.max(1)]),
        }
    }

    pub(crate) fn json(&self) -> Value {
        let limit = |limit: f64| (self.is_limited && limit.is_finite()).then_some(limit);
        let of_limit = |report: &Report| self.is_limited.then_some(report.worst);
        json!({
            "within": self.within(),
            "out": self.out.map(|report| json!({
                "nrmse": report.nrmse,
                "nrmse_limit": limit(report.limit),
                "max_abs": report.max_abs,
                "of_limit": of_limit(&report),
                "worst": self.place("out", report.worst_index),
            })),
            "lse": self.lse.map(|report| json!({
                "max_abs": report.max_abs,
                "of_limit": of_limit(&report),
                "worst": self.place("lse", report.worst_index),
            })),
        })
    }
}
