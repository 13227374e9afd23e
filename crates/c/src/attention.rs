//! Attention over tensors of the caller, and its plan in words.

#![allow(unsafe_code, reason = "memory of the caller is an address")]

use crate::status::{Failure, FlashtileStatus, guard};
use crate::tensors::{
    FlashtileFloats, FlashtileMask, FlashtileSizes, FlashtileTensors, Views, flag, given, known, list,
};
use flashtile::{
    Attention, Cpu, Dims, PlanOptions, ProblemDesc, QOffset, RunError, Runner, SequencesRef, Visibility,
};
use std::ffi::{CString, c_char};
use std::fmt::Write as _;
use std::ptr;

/// Key position of query row 0. Where causality, a window or ALiBi meets `q_len != kv_len` or `kv_lens`, it has to be said.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a header has all values")]
pub enum FlashtileQOffset {
    /// Not said. In a step of a cache each token sits at its place in its sequence.
    None = 0,
    /// Row 0 sits at key 0.
    TopLeft = 1,
    /// The last row sits at the last key of its sequence.
    BottomRight = 2,
    /// Row 0 sits at the key `q_offset_at`.
    At = 3,
}

/// Options of an attention. All bytes 0 are the defaults: every query sees every key, the scale is `1 / sqrt(head_dim)`.
///
/// ```text
/// score[i,j] = softcap(scale * q[i] . k[j]) + bias[i,j]      lse[i] = ln(exp(sink) + sum_j exp(score[i,j]))
/// out[i]     = sum_j exp(score[i,j] - lse[i]) * v[j]         bias    = -slope * |p(i) - j| + mask[i,j]
/// ```
///
/// `j` runs over the visible keys, and `p(i)` is the key position of query `i`. A row that sees no key is 0, its lse minus infinity.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileOptions {
    /// 1: a query sees the keys up to its own position.
    pub causal: u32,
    /// 1: a query sees `window_left` keys before and `window_right` keys after its own; -1 is unbounded. A causal window of 1024 keys
    /// is 1023 and 0. If 0, both are 0.
    pub has_window: u32,
    /// Keys before the query's own.
    pub window_left: i64,
    /// Keys after the query's own.
    pub window_right: i64,
    /// A `FlashtileQOffset`.
    pub q_offset: u32,
    /// The key of row 0 with `FLASHTILE_Q_OFFSET_AT`, or else 0. It may be negative.
    pub q_offset_at: i64,
    /// Multiplier of `q . k`; 0 is `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// `c` of `softcap(x) = c * tanh(x / c)`; 0 is no softcap.
    pub softcap: f32,
    /// Slopes of ALiBi, `[q_heads]` or `[sequences, q_heads]`.
    pub alibi_slopes: FlashtileFloats,
    /// Logits that join the denominator of the softmax, `[q_heads]`.
    pub sinks: FlashtileFloats,
    /// A mask, or null. It broadcasts to `[batch, q_heads, q_len, kv_len]`; for packed sequences and steps of a cache to
    /// `[sequences, q_heads, longest q_len, longest kv_len]`.
    pub mask: *const FlashtileMask,
    /// Keys of each batch entry, `[batch]`: rows of k and v past it are padding, and not read.
    pub kv_lens: FlashtileSizes,
    /// Packed sequences lie one after another in the rows of q, in a single batch entry: the first row of each, then the total.
    pub cu_seqlens_q: FlashtileSizes,
    /// The first row of k and v of each packed sequence, then the total. Both lists are given, or none.
    pub cu_seqlens_k: FlashtileSizes,
}

impl FlashtileOptions {
    fn visibility(&self) -> Result<Visibility, Failure> {
        let causal = if flag("causal", self.causal)? { Visibility::causal() } else { Visibility::full() };
        let Self { window_left: left, window_right: right, .. } = *self;
        if !flag("has_window", self.has_window)? {
            return if (left, right) == (0, 0) {
                Ok(causal)
            } else {
                Err(Failure::invalid(format_args!(
                    "the window is {left} and {right}, and has_window is 0: nothing would be hidden"
                )))
            };
        }
        Ok(causal.and(Visibility::window(side("window_left", left)?, side("window_right", right)?)))
    }

    fn q_offset(&self) -> Result<Option<QOffset>, Failure> {
        let at = self.q_offset_at;
        let offsets = [None, Some(QOffset::TopLeft), Some(QOffset::BottomRight), Some(QOffset::At(at))];
        match known("q_offset", self.q_offset, &offsets)? {
            Some(QOffset::At(at)) => Ok(Some(QOffset::At(at))),
            offset if at == 0 => Ok(offset),
            _ => Err(Failure::invalid(format_args!(
                "q_offset_at is {at}, and q_offset is not FLASHTILE_Q_OFFSET_AT: it would be ignored"
            ))),
        }
    }

    /// # Safety
    /// The contracts of the lists, for `'a`.
    unsafe fn sequences<'a>(&self) -> Result<SequencesRef<'a>, Failure> {
        // SAFETY: the contract is the same.
        let [kv_lens, q, k] = unsafe {
            [
                self.kv_lens.list("kv_lens")?,
                self.cu_seqlens_q.list("cu_seqlens_q")?,
                self.cu_seqlens_k.list("cu_seqlens_k")?,
            ]
        };
        match (kv_lens, q, k) {
            (None, None, None) => Ok(SequencesRef::Dense),
            (Some(kv_lens), None, None) => Ok(SequencesRef::Padded { kv_lens }),
            (None, Some(cu_seqlens_q), Some(cu_seqlens_k)) => {
                Ok(SequencesRef::Packed { cu_seqlens_q, cu_seqlens_k })
            }
            _ => Err(Failure::invalid("expected kv_lens, or cu_seqlens_q and cu_seqlens_k, or none of them")),
        }
    }

    /// # Safety
    /// The contracts of the lists and of the mask, for `'a`.
    unsafe fn attention<'a>(&self) -> Result<Attention<'a>, Failure> {
        let mut attention = Attention::full();
        attention.visibility = self.visibility()?;
        attention.q_offset = self.q_offset()?;
        attention.scale = (self.scale != 0.0).then_some(self.scale);
        attention.softcap = (self.softcap != 0.0).then_some(self.softcap);
        // SAFETY: the contract is the same.
        unsafe {
            attention.alibi_slopes = self.alibi_slopes.list("alibi_slopes")?;
            attention.sinks = self.sinks.list("sinks")?;
            attention.sequences = self.sequences()?;
            if !self.mask.is_null() {
                attention.mask = Some(given("mask", self.mask)?.view()?);
            }
        }
        Ok(attention)
    }
}

/// A side of a window: -1 is unbounded.
fn side(name: &str, keys: i64) -> Result<Option<usize>, Failure> {
    if keys == -1 {
        return Ok(None);
    }
    usize::try_from(keys).map(Some).map_err(|_| {
        Failure::invalid(format_args!(
            "{name} is {keys}, expected a number of keys, or -1 for an unbounded side"
        ))
    })
}

impl FlashtileFloats {
    /// # Safety
    /// The contract of [`list`].
    pub(crate) unsafe fn list<'a>(&self, name: &str) -> Result<Option<&'a [f32]>, Failure> {
        // SAFETY: the contract is the same.
        unsafe { list(name, self.data, self.len) }
    }
}

impl FlashtileSizes {
    /// # Safety
    /// The contract of [`list`].
    unsafe fn list<'a>(&self, name: &str) -> Result<Option<&'a [usize]>, Failure> {
        // SAFETY: the contract is the same.
        unsafe { list(name, self.data, self.len) }
    }
}

/// The options behind a pointer, which may be null.
///
/// # Safety
/// The contract of [`FlashtileOptions`], for `'a`.
pub(crate) unsafe fn options<'a>(options: *const FlashtileOptions) -> Result<Attention<'a>, Failure> {
    if options.is_null() {
        return Ok(Attention::full());
    }
    // SAFETY: the contract is the same.
    unsafe { given("options", options)?.attention() }
}

/// Computes attention on the processor, over the caller's memory. Reads and writes nothing past the elements that shapes and strides
/// reach, and computes on the threads of a pool that all calls of the process share: as many as there are processors, or as the
/// environment variable RAYON_NUM_THREADS says at the first call. Threads may call it at the same time. Each calling thread keeps the
/// plans of its last problems and the workspace of its largest until it ends. A child of `fork` has no pool: it must not compute.
///
/// `options` may be null: every query sees every key.
///
/// Returns `FLASHTILE_STATUS_INVALID` where options contradict shapes or tensors do not fit each other, `FLASHTILE_STATUS_UNSUPPORTED`
/// where the problem has too many tasks for a plan, `FLASHTILE_STATUS_MEMORY` where there is no memory for the workspace. `out` is not
/// written then.
///
/// # Safety
/// `tensors` points to tensors, and `options` to options or is null; both as their types say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_attention(
    tensors: *const FlashtileTensors,
    options: *const FlashtileOptions,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        let (views, mut outputs, attention) = unsafe {
            let tensors = given("tensors", tensors)?;
            (tensors.views()?, tensors.outputs()?, self::options(options)?)
        };
        let Views { q, k, v } = views;
        let (desc, inputs) = (attention.desc(&q, &k, &v), attention.inputs(q, k, v));
        Runner::with_current(|runner| runner.run(&desc, &inputs, &mut outputs))?;
        Ok(())
    })
}

/// Says how `flashtile_attention` would compute these tensors on this machine: instruction set, kernel, tiles, tasks, splits and workspace,
/// and why. Only shapes and dtypes of q, k and v are looked at; `data` may be null. Lists and the mask are as for `flashtile_attention`.
///
/// `*text` becomes a text of several lines in UTF-8, which `flashtile_text_free` frees, or null where the call is refused, for the
/// reasons of `flashtile_attention`.
///
/// # Safety
/// `tensors` points to tensors, and `options` to options or is null; both as their types say, but no `data` of a tensor is read. `text` points to a writable
/// pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_explain(
    tensors: *const FlashtileTensors,
    options: *const FlashtileOptions,
    text: *mut *mut c_char,
) -> FlashtileStatus {
    guard(|| {
        if text.is_null() || !text.is_aligned() {
            return Err(Failure::invalid("text is null or not aligned"));
        }
        // SAFETY: the pointer is not null, and aligned; it is writable by the contract.
        unsafe { text.write(ptr::null_mut()) };
        // SAFETY: the contract is the same; nothing reads elements.
        let explained = unsafe { explained(given("tensors", tensors)?, &self::options(options)?)? };
        let explained = CString::new(explained).map_err(Failure::invalid)?;
        // SAFETY: as above.
        unsafe { text.write(explained.into_raw()) };
        Ok(())
    })
}

/// Frees a text of `flashtile_explain`; null is ignored.
///
/// # Safety
/// `text` is null, or comes from `flashtile_explain` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: `flashtile_explain` made it by `into_raw`, and nobody has freed it.
        drop(unsafe { CString::from_raw(text) });
    }
}

fn explained(tensors: &FlashtileTensors, attention: &Attention<'_>) -> Result<String, Failure> {
    let FlashtileTensors { q, k, v, .. } = tensors;
    let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (q.shape, k.shape);
    let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: v.shape[3] };
    let dtype = q.dtype("q")?;
    for (tensor, of, expected) in [("k", k, dims.k_shape()), ("v", v, dims.v_shape())] {
        if of.shape != expected {
            return Err(RunError::Shape { tensor, expected, got: of.shape }.into());
        }
        let got = of.dtype(tensor)?;
        if got != dtype {
            return Err(RunError::Dtype { tensor, expected: dtype, got }.into());
        }
    }
    let problem = attention.desc_of(ProblemDesc::new(dims, dtype)).validate()?;
    let plan = flashtile::plan::AnyFacts::new(*Cpu::new().facts()).plan(&problem, PlanOptions::default())?;
    let explanation = plan.explain();
    let workspace = format!("{} bytes", plan.workspace_bytes());
    let lines = [("machine", explanation.machine)].into_iter().chain(explanation.lines);
    Ok(lines.chain([("workspace", workspace)]).fold(String::new(), |mut all, (name, line)| {
        // Writing to a text does not fail.
        let _ = writeln!(all, "{name:<10} {line}");
        all
    }))
}
