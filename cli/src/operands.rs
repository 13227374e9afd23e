//! The tensors of a file as operands of attention.

use crate::buffer::{Buffer, Bytes, convert};
use crate::failure::{Failure, Result};
use crate::input::{Archive, Stored};
use crate::names;
use crate::options::{Layout, Reading, Semantics};
use crate::report;
use flashtile::{
    Dims, Dtype, Inputs, MaskKind, MaskView, Problem, ProblemDesc, ProblemError, RunError, Sequence,
    Sequences, TensorView,
};
use flashtile_bench::elements::to_f32;
use safetensors::tensor::Dtype as StoredDtype;

/// Names of tensors that are read.
const READ: [&str; 9] =
    ["q", "k", "v", "mask", "alibi_slopes", "sinks", "kv_lens", "cu_seqlens_q", "cu_seqlens_k"];

/// Names of gradients that are read for a backward pass.
const UPSTREAM: [&str; 2] = ["d_out", "d_lse"];

/// Names of answers, which example files contain beside their inputs.
const ANSWERS: [&str; 8] = ["out", "lse", "d_q", "d_k", "d_v", "d_sinks", "d_bias", "d_alibi_slopes"];

/// Largest number of batch entries without rows. They take no bytes of a file, so their number needs its own limit.
const MAX_EMPTY_BATCH: usize = 1 << 20;

/// Order of the axes of q, k, v and out in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Bhsd,
    Bshd,
    Packed,
}

impl Order {
    const fn axes(self) -> &'static str {
        match self {
            Self::Bhsd => "[batch, heads, rows, dim]",
            Self::Bshd => "[batch, rows, heads, dim]",
            Self::Packed => "[total, heads, dim]",
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bhsd => "bhsd",
            Self::Bshd => "bshd",
            Self::Packed => "packed",
        }
    }

    /// Converts a shape in the file to `[batch, heads, rows, dim]`.
    fn logical(self, stored: &[usize]) -> Option<[usize; 4]> {
        match (self, stored) {
            (Self::Bhsd, &[b, h, s, d]) | (Self::Bshd, &[b, s, h, d]) => Some([b, h, s, d]),
            (Self::Packed, &[s, h, d]) => Some([1, h, s, d]),
            _ => None,
        }
    }

    /// Converts `[batch, heads, rows, dim]` to the shape in the file.
    pub(crate) fn stored(self, [b, h, s, d]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Bhsd => vec![b, h, s, d],
            Self::Bshd => vec![b, s, h, d],
            Self::Packed => vec![s, h, d],
        }
    }

    /// Converts `[batch, heads, rows]` to the shape of lse in the file.
    pub(crate) fn stored_lse(self, [b, h, s]: [usize; 3]) -> Vec<usize> {
        match self {
            Self::Bhsd | Self::Bshd => vec![b, h, s],
            Self::Packed => vec![h, s],
        }
    }

    /// A hint for an error about heads, if their numbers fit in the other layout.
    const fn hint(self, q: [usize; 4], k: [usize; 4]) -> &'static str {
        let fit = k[2] > 0 && q[2] > 0 && q[2].is_multiple_of(k[2]);
        match self {
            Self::Bhsd if fit => " (is the file --layout bshd?)",
            Self::Bshd if fit => " (is the file --layout bhsd?)",
            _ => "",
        }
    }

    /// Strides in elements of `[batch, heads, rows, dim]`.
    pub(crate) fn strides(self, [_, h, s, d]: [usize; 4]) -> [usize; 4] {
        let (row, head) = match self {
            Self::Bhsd => (d, s.saturating_mul(d)),
            Self::Bshd | Self::Packed => (h.saturating_mul(d), d),
        };
        [h.saturating_mul(s).saturating_mul(d), head, row, 1]
    }
}

/// One of q, k, v and d_out.
#[derive(Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) dtype: Dtype,
    /// `[batch, heads, rows, dim]`.
    pub(crate) shape: [usize; 4],
    pub(crate) bytes: Bytes<'a>,
    /// True if elements of the file were rounded to the dtype.
    is_rounded: bool,
}

impl Tensor<'_> {
    pub(crate) fn view(&self, order: Order) -> Result<TensorView<'_>> {
        let strides = order.strides(self.shape);
        TensorView::from_bytes(self.dtype, self.bytes.get(), self.shape, strides).map_err(Failure::new)
    }

    /// The keys or values of a sequence, which may have none.
    fn rows(&self, order: Order, sequence: &Sequence) -> Result<TensorView<'_>> {
        let strides = order.strides(self.shape);
        let first = sequence.batch * strides[0] + sequence.kv_start * strides[2];
        let bytes = self.bytes.get().get(first * self.dtype.bytes()..).unwrap_or_default();
        let [_, heads, _, dim] = self.shape;
        let shape = [1, heads, sequence.kv_len, dim];
        TensorView::from_bytes(self.dtype, bytes, shape, strides).map_err(Failure::new)
    }
}

/// A mask.
#[derive(Debug)]
struct Mask<'a> {
    kind: MaskKind,
    /// With four axes.
    shape: [usize; 4],
    /// In the file.
    stored: Vec<usize>,
    bytes: Bytes<'a>,
}

/// Everything that a forward run reads, and the problem that it describes.
#[derive(Debug)]
pub(crate) struct Operands<'a> {
    pub(crate) problem: Problem,
    pub(crate) order: Order,
    /// Tensors of the file that are not recognised.
    pub(crate) ignored: Vec<String>,
    q: Tensor<'a>,
    k: Tensor<'a>,
    v: Tensor<'a>,
    mask: Option<Mask<'a>>,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
}

impl<'a> Operands<'a> {
    /// Finds and checks every tensor, and validates the problem.
    pub(crate) fn read(archive: &Archive<'a>, reading: &Reading, semantics: &Semantics) -> Result<Self> {
        if let Some(name) = ["q", "k", "v"].into_iter().find(|name| !archive.has(name)) {
            let layers = names::layers(archive);
            if !layers.is_empty() {
                let layers = report::some(&layers);
                let what =
                    format_args!("tensor {name} is missing, expected q, k and v, or --prefix for {layers}");
                return Err(archive.refuse(what));
            }
        }
        if let Some((name, meant)) = archive.names().find_map(|name| Some((name, meant(name)?))) {
            return Err(archive.refuse(format_args!("tensor {name} is not known, did you mean {meant}?")));
        }
        let packed = archive.has("cu_seqlens_q") || archive.has("cu_seqlens_k");
        let order = match (packed, reading.layout) {
            (true, Some(_)) => {
                return Err(archive.refuse(
                    "cu_seqlens mean packed tensors [total, heads, dim], which --layout does not apply to",
                ));
            }
            (true, None) => Order::Packed,
            (false, Some(Layout::Bshd)) => Order::Bshd,
            (false, _) => Order::Bhsd,
        };
        let operand = |name| tensor(archive, name, order, reading.dtype);
        let (q, k, v) = (operand("q")?, operand("k")?, operand("v")?);
        let dims = dims(archive, order, [&q, &k, &v])?;
        for (name, tensor) in [("k", &k), ("v", &v)] {
            if tensor.dtype != q.dtype {
                let what = format_args!(
                    "tensor {} is {}, expected {} as {} (--dtype converts all three)",
                    archive.called(name),
                    tensor.dtype,
                    q.dtype,
                    archive.called("q"),
                );
                return Err(archive.refuse(what));
            }
        }

        let mask = archive.get("mask")?.map(|stored| mask(archive, stored)).transpose()?;
        let alibi_slopes = floats(archive, "alibi_slopes")?;
        let sinks = floats(archive, "sinks")?;
        let mut desc = ProblemDesc::new(dims, q.dtype);
        desc.visibility = semantics.visibility();
        desc.q_offset = semantics.q_offset;
        desc.scale = semantics.scale;
        desc.softcap = semantics.softcap;
        desc.alibi = alibi_slopes.is_some();
        desc.sinks = sinks.is_some();
        desc.mask = mask.as_ref().map(|mask| mask.kind);
        desc.sequences = sequences(archive, packed)?;
        let problem = desc.validate().map_err(|e| {
            let hint = if matches!(e, ProblemError::HeadsNotDivisible { .. }) {
                order.hint(q.shape, k.shape)
            } else {
                ""
            };
            archive.refuse(format_args!("{e}{hint}"))
        })?;

        let known = |name: &&str| [&READ[..], &UPSTREAM, &ANSWERS].iter().any(|names| names.contains(name));
        let ignored = archive.names().filter(|name| !known(name)).map(str::to_owned).collect();
        Ok(Self { problem, order, ignored, q, k, v, mask, alibi_slopes, sinks })
    }

    /// A note about tensors that are not recognised, if there are any.
    ///
    /// # Errors
    /// If there are any and `strict` is set.
    pub(crate) fn remark(&self, archive: &Archive<'_>, strict: bool) -> Result<Option<Failure>> {
        if self.ignored.is_empty() {
            return Ok(None);
        }
        let (names, read) = (report::some(&self.ignored), [&READ[..], &UPSTREAM].concat().join(", "));
        if strict {
            let what = format_args!("unknown tensors: {names}, expected names among {read}");
            return Err(archive.refuse(what));
        }
        Ok(Some(archive.refuse(format_args!("note: tensors not read: {names} (known are {read})"))))
    }

    /// The operands as inputs of the library.
    pub(crate) fn inputs(&self) -> Result<Inputs<'_>> {
        let order = self.order;
        let mut inputs = Inputs::new(self.q.view(order)?, self.k.view(order)?, self.v.view(order)?);
        self.add_biases(&mut inputs, self.problem.mask_shape())?;
        Ok(inputs)
    }

    /// Adds all inputs except q, k and v. The problem of `mask_shape` may have fewer rows and keys than this one: masks
    /// are cut to that shape.
    pub(crate) fn add_biases<'s>(&'s self, inputs: &mut Inputs<'s>, mask_shape: [usize; 4]) -> Result<()> {
        if let Some(Mask { kind, shape: stored, bytes, .. }) = &self.mask {
            let strides = Order::Bhsd.strides(*stored);
            let whole = self.problem.mask_shape();
            if stored.iter().zip(whole).any(|(got, expected)| *got != expected && *got != 1) {
                return Err(Failure::new(RunError::MaskShape { expected: whole, got: *stored }));
            }
            let mut shape = *stored;
            for axis in [2, 3] {
                if shape[axis] == whole[axis] && shape[axis] > 1 {
                    shape[axis] = mask_shape[axis];
                }
            }
            let view = match kind {
                MaskKind::Bool => MaskView::bool_bytes(bytes.get(), shape, strides),
                MaskKind::Additive(dtype) => {
                    TensorView::from_bytes(*dtype, bytes.get(), shape, strides).map(MaskView::additive)
                }
            };
            inputs.mask = Some(view.map_err(Failure::new)?);
        }
        inputs.alibi_slopes = self.alibi_slopes.as_deref();
        inputs.sinks = self.sinks.as_deref();
        Ok(())
    }

    /// True if elements of q, k or v were rounded to the dtype of the problem.
    pub(crate) fn is_rounded(&self) -> bool {
        [&self.q, &self.k, &self.v].into_iter().any(|tensor| tensor.is_rounded)
    }

    /// q, k and v with their dtype and bytes.
    pub(crate) fn tensors(&self) -> [(&'static str, Dtype, &[u8]); 3] {
        [("q", &self.q), ("k", &self.k), ("v", &self.v)].map(|(name, of)| (name, of.dtype, of.bytes.get()))
    }

    /// Shape of the mask in the file.
    pub(crate) fn mask_shape(&self) -> Option<&[usize]> {
        self.mask.as_ref().map(|mask| mask.stored.as_slice())
    }

    /// Out in a buffer, in the order of the file.
    pub(crate) fn out_view<'b>(&self, out: &'b Buffer) -> Result<TensorView<'b>> {
        let shape = self.problem.dims().out_shape();
        let strides = self.order.strides(shape);
        TensorView::from_bytes(self.problem.dtype(), out.bytes(), shape, strides).map_err(Failure::new)
    }

    /// Bytes of q, in the order of the file.
    pub(crate) fn q_bytes(&self) -> &[u8] {
        self.q.bytes.get()
    }

    /// Keys of a sequence, `[1, heads, its keys, dim]`.
    pub(crate) fn k_rows(&self, sequence: &Sequence) -> Result<TensorView<'_>> {
        self.k.rows(self.order, sequence)
    }

    /// Values of a sequence, `[1, heads, its keys, dim]`.
    pub(crate) fn v_rows(&self, sequence: &Sequence) -> Result<TensorView<'_>> {
        self.v.rows(self.order, sequence)
    }
}

/// Parts of names, in lower case without separators, and the tensor that they suggest.
const PARTS: [(&str, &str); 10] = [
    ("mask", "mask"),
    ("alibi", "alibi_slopes"),
    ("slope", "alibi_slopes"),
    ("sink", "sinks"),
    ("kvlen", "kv_lens"),
    ("kvseqlen", "kv_lens"),
    ("cachelen", "kv_lens"),
    ("cacheseqlen", "kv_lens"),
    ("seqused", "kv_lens"),
    ("seqlen", "cu_seqlens_q or cu_seqlens_k"),
];

/// Whole names, in lower case without separators, and the tensor that they suggest. Aliases suggest theirs too.
const WORDS: [(&str, &str); 4] = [
    ("bias", "mask"),
    ("attnbias", "mask"),
    ("attentionbias", "mask"),
    ("cuseqlens", "cu_seqlens_q or cu_seqlens_k"),
];

/// The known name that an unknown one resembles. Such a tensor must not be ignored, because that would answer another
/// question.
pub(crate) fn meant(name: &str) -> Option<&'static str> {
    if READ.contains(&names::canonical(name)) || UPSTREAM.contains(&name) || ANSWERS.contains(&name) {
        return None;
    }
    let plain = |name: &str| -> String {
        name.chars().filter(|c| c.is_alphanumeric()).map(|c| c.to_ascii_lowercase()).collect()
    };
    let name = plain(name);
    let close = |known: &&str| {
        let known = plain(known);
        name == known || (known.len() >= 4 && strsim::osa_distance(&name, &known) <= 1)
    };
    let alias = || READ.into_iter().find(|read| names::canonical(&name) == *read);
    let word = || WORDS.iter().find(|(word, _)| name == *word).map(|(_, meant)| *meant).or_else(alias);
    let part = || PARTS.iter().find(|(part, _)| name.contains(part)).map(|(_, meant)| *meant);
    word().or_else(|| READ.into_iter().chain(UPSTREAM).find(close)).or_else(part)
}

/// One of the tensors q, k, v and d_out, converted to a dtype if one is given.
pub(crate) fn tensor<'a>(
    archive: &Archive<'a>,
    name: &str,
    order: Order,
    to: Option<Dtype>,
) -> Result<Tensor<'a>> {
    let stored = archive.get(name)?.ok_or_else(|| {
        archive.refuse(format_args!("tensor {name} is missing, expected {name} {}", order.axes()))
    })?;
    let dtype = float_dtype(stored.dtype).ok_or_else(|| {
        let (name, got) = (archive.called(name), stored.dtype);
        archive.refuse(format_args!("tensor {name} is {got:?}, expected F32, F16 or BF16"))
    })?;
    let shape = order.logical(&stored.shape).ok_or_else(|| {
        archive.refuse(format_args!(
            "tensor {} has shape {}, expected {}",
            archive.called(name),
            report::shape(&stored.shape),
            order.axes()
        ))
    })?;
    match to {
        Some(to) if to != dtype => {
            let bytes = Bytes::Owned(convert(stored.bytes.get(), dtype, to)?);
            // Conversion to f32 does not round, because f32 holds every element of the other dtypes.
            Ok(Tensor { dtype: to, shape, bytes, is_rounded: to != Dtype::F32 })
        }
        _ => {
            let bytes = stored.bytes.aligned(dtype.bytes())?;
            Ok(Tensor { dtype, shape, bytes, is_rounded: false })
        }
    }
}

/// Dimensions, if the shapes of q, k and v agree.
fn dims(archive: &Archive<'_>, order: Order, [q, k, v]: [&Tensor<'_>; 3]) -> Result<Dims> {
    let [batch, q_heads, q_len, head_dim] = q.shape;
    let [_, kv_heads, kv_len, _] = k.shape;
    let value_dim = v.shape[3];
    let agree = [
        ("k", k.shape, [batch, kv_heads, kv_len, head_dim], "q"),
        ("v", v.shape, [batch, kv_heads, kv_len, value_dim], "k"),
    ];
    for (name, got, expected, of) in agree {
        if got != expected {
            let (got, expected) = (order.stored(got), order.stored(expected));
            let (name, of) = (archive.called(name), archive.called(of));
            let what = format_args!("tensor {name} has shape {got:?}, expected {expected:?} to fit {of}");
            return Err(archive.refuse(what));
        }
    }
    if batch > MAX_EMPTY_BATCH && q_len == 0 && kv_len == 0 {
        let what = format_args!("{batch} batch entries without rows, expected at most {MAX_EMPTY_BATCH}");
        return Err(archive.refuse(what));
    }
    Ok(Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim })
}

fn mask<'a>(archive: &Archive<'a>, stored: Stored<'a>) -> Result<Mask<'a>> {
    let shape = match *stored.shape.as_slice() {
        [queries, keys] => [1, 1, queries, keys],
        [batch, queries, keys] => [batch, 1, queries, keys],
        [batch, heads, queries, keys] => [batch, heads, queries, keys],
        _ => {
            let (name, shape) = (archive.called("mask"), report::shape(&stored.shape));
            let expected = "[queries, keys], [batch, queries, keys] or [batch, heads, queries, keys]";
            return Err(archive.refuse(format_args!("tensor {name} has shape {shape}, expected {expected}")));
        }
    };
    let (kind, bytes) = match (stored.dtype, float_dtype(stored.dtype)) {
        (StoredDtype::BOOL, _) => (MaskKind::Bool, stored.bytes),
        (_, Some(dtype)) => (MaskKind::Additive(dtype), stored.bytes.aligned(dtype.bytes())?),
        (other, None) => {
            let name = archive.called("mask");
            let what = format_args!("tensor {name} is {other:?}, expected BOOL, F32, F16 or BF16");
            return Err(archive.refuse(what));
        }
    };
    Ok(Mask { kind, shape, stored: stored.shape, bytes })
}

fn sequences(archive: &Archive<'_>, packed: bool) -> Result<Sequences> {
    if !packed {
        return Ok(match lengths(archive, "kv_lens")? {
            None => Sequences::Dense,
            Some(kv_lens) => Sequences::Padded { kv_lens },
        });
    }
    if archive.has("kv_lens") {
        return Err(
            archive.refuse("tensors kv_lens and cu_seqlens_q or cu_seqlens_k, expected one or the other")
        );
    }
    let list = |name| {
        let missing = || archive.refuse(format_args!("tensor {name} is missing, packed tensors need it"));
        lengths(archive, name)?.ok_or_else(missing)
    };
    Ok(Sequences::Packed { cu_seqlens_q: list("cu_seqlens_q")?, cu_seqlens_k: list("cu_seqlens_k")? })
}

/// A tensor with one axis and one of the expected dtypes.
fn list<'a>(archive: &Archive<'a>, name: &str, expected: &[StoredDtype]) -> Result<Option<Stored<'a>>> {
    let Some(stored) = archive.get(name)? else { return Ok(None) };
    if stored.shape.len() != 1 {
        return Err(archive.refuse(format_args!(
            "tensor {name} has shape {}, expected one axis",
            report::shape(&stored.shape)
        )));
    }
    if !expected.contains(&stored.dtype) {
        let expected: Vec<String> = expected.iter().map(|dtype| format!("{dtype:?}")).collect();
        let what = format_args!("tensor {name} is {:?}, expected {}", stored.dtype, expected.join(" or "));
        return Err(archive.refuse(what));
    }
    Ok(Some(stored))
}

fn floats(archive: &Archive<'_>, name: &str) -> Result<Option<Vec<f32>>> {
    let Some(stored) = list(archive, name, &[StoredDtype::F32])? else { return Ok(None) };
    Ok(Some(to_f32(Dtype::F32, stored.bytes.get())))
}

/// A list of lengths.
pub(crate) fn lengths(archive: &Archive<'_>, name: &str) -> Result<Option<Vec<usize>>> {
    let Some(stored) = list(archive, name, &[StoredDtype::I64, StoredDtype::I32])? else { return Ok(None) };
    let wide = stored.dtype == StoredDtype::I64;
    let size = if wide { size_of::<i64>() } else { size_of::<i32>() };
    let entries = stored.bytes.get().chunks_exact(size).map(|bytes| {
        if wide {
            bytemuck::pod_read_unaligned(bytes)
        } else {
            i64::from(bytemuck::pod_read_unaligned::<i32>(bytes))
        }
    });
    let length = |(index, n): (usize, i64)| {
        let negative = |_| archive.refuse(format_args!("{name}[{index}] is {n}, expected 0 or more"));
        usize::try_from(n).map_err(negative)
    };
    entries.enumerate().map(length).collect::<Result<_>>().map(Some)
}

pub(crate) const fn float_dtype(dtype: StoredDtype) -> Option<Dtype> {
    match dtype {
        StoredDtype::F32 => Some(Dtype::F32),
        StoredDtype::F16 => Some(Dtype::F16),
        StoredDtype::BF16 => Some(Dtype::BF16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_names() {
        let cases = [
            ("Attn-Mask", "mask"),
            ("key_padding_mask", "mask"),
            ("Mask", "mask"),
            ("msak", "mask"),
            ("attn_bias", "mask"),
            ("alibi", "alibi_slopes"),
            ("slopes", "alibi_slopes"),
            ("alibi-slopes", "alibi_slopes"),
            ("sink", "sinks"),
            ("kv_len", "kv_lens"),
            ("kvlens", "kv_lens"),
            ("cu_seqlens", "cu_seqlens_q or cu_seqlens_k"),
            ("cu_seqlen_q", "cu_seqlens_q"),
            ("cu_seqlens_kv", "cu_seqlens_k"),
            ("dout", "d_out"),
            ("d_outs", "d_out"),
            ("D_LSE", "d_lse"),
            ("Q", "q"),
            ("Values", "v"),
        ];
        for (name, expected) in cases {
            let meant = meant(name);
            assert!(meant == Some(expected), "{name}: {meant:?}");
        }
        let others = [
            "notes",
            "out",
            "lse",
            "d_q",
            "d_out",
            "d_lse",
            "d_sinks",
            "d_bias",
            "positions",
            "weight",
            "odd",
            "x",
            "",
            "key",
            "attn_mask",
        ];
        assert!(READ.iter().chain(&others).all(|name| meant(name).is_none()));
    }
}
