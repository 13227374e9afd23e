//! Options of a call, as the Python functions document them.

use crate::memory::{Axes, DeviceList, Memory, OnDevice, Stream};
use flashtile::problem::MAX_SEQUENCES;
use flashtile::{Attention, MaskKind, ProblemDesc, QOffset, Sequences, SequencesRef, Visibility};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// How tensors divide into sequences.
enum Lengths {
    Dense,
    Padded(Vec<usize>),
    Packed(Packed),
}

/// Packed sequences.
struct Packed {
    q: Vec<usize>,
    k: Vec<usize>,
    /// True if unused rows behind the sequences of the caller are sequences too.
    has_unused: bool,
}

/// A number for each query head, or for each query head of each sequence.
pub(crate) enum Numbers {
    Host { list: Vec<f32>, shape: Vec<usize> },
    Device(Memory),
}

impl Numbers {
    fn of(name: &'static str, object: &Bound<'_, PyAny>, stream: Option<Stream>) -> PyResult<Self> {
        match stream {
            None => {
                let numbers = listed(object)?;
                if let Ok(list) = numbers.extract::<Vec<f32>>() {
                    return Ok(Self::Host { shape: vec![list.len()], list });
                }
                let expected = match name {
                    "sinks" => "a number for each query head",
                    _ => "a number for each query head, or a list of them for each sequence",
                };
                let rows: Vec<Vec<f32>> = list(name, &numbers, expected)?;
                let heads = rows.first().map_or(0, Vec::len);
                if name == "sinks" || rows.iter().any(|row| row.len() != heads) {
                    return Err(wrong(name, object, expected));
                }
                Ok(Self::Host { shape: vec![rows.len(), heads], list: rows.concat() })
            }
            Some(_) => Ok(Self::Device(Memory::on(stream, name, object)?)),
        }
    }

    fn host(&self) -> Option<&[f32]> {
        match self {
            Self::Host { list, .. } => Some(list),
            Self::Device(_) => None,
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Self::Host { shape, .. } => shape,
            Self::Device(memory) => memory.shape(),
        }
    }

    fn device(&self, on: OnDevice<'_>) -> PyResult<Option<DeviceList<'_>>> {
        match self {
            Self::Host { .. } => Ok(None),
            Self::Device(memory) => memory.device_list(on).map(Some),
        }
    }
}

/// The options, with everything that they borrow from Python.
pub(crate) struct Options {
    causal: bool,
    window: (Option<usize>, Option<usize>),
    /// Keys of a chunk; 0 is no chunks.
    chunk: usize,
    q_offset: Option<QOffset>,
    scale: Option<f32>,
    softcap: Option<f32>,
    mask: Option<Memory>,
    /// Queries and keys by turns, of the masks of each sequence that the mask was padded from.
    mask_lens: Option<Vec<usize>>,
    alibi_slopes: Option<Numbers>,
    sinks: Option<Numbers>,
    lengths: Lengths,
    layout: Axes,
    /// True if the call asks for the logsumexp.
    pub(crate) lse: bool,
    /// The stream of a call over tensors of a CUDA device, which has the mask, the slopes and the sinks too.
    pub(crate) stream: Option<Stream>,
}

/// Names of the options, in the order of the tuple that holds them. The last is a pair: a CUDA device and a handle.
pub(crate) const NAMES: [&str; 16] = [
    "causal",
    "window",
    "attention_chunk",
    "q_offset",
    "scale",
    "softcap",
    "mask",
    "alibi_slopes",
    "sinks",
    "q_lens",
    "kv_lens",
    "cu_seqlens",
    "layout",
    "return_lse",
    "mask_lens",
    "stream",
];

/// An option that is not `None`.
struct Named<'py> {
    name: &'static str,
    value: Bound<'py, PyAny>,
}

impl<'py> Named<'py> {
    fn extract<T>(self, expected: &str) -> PyResult<T>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        self.value.extract().map_err(|_| wrong(self.name, &self.value, expected))
    }
}

/// The options of a tuple that are not `None`.
fn named<'py>(of: &Bound<'py, PyTuple>) -> PyResult<[Option<Named<'py>>; NAMES.len()]> {
    if of.len() != NAMES.len() {
        return Err(PyTypeError::new_err(format!("there are {} options, expected {NAMES:?}", of.len())));
    }
    let mut options = [const { None }; NAMES.len()];
    for ((option, name), value) in options.iter_mut().zip(NAMES).zip(of) {
        *option = (!value.is_none()).then_some(Named { name, value });
    }
    Ok(options)
}

fn wrong(name: &str, got: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    let got = got.repr().map(|text| text.to_string()).unwrap_or_default();
    PyTypeError::new_err(format!("{name} is {got}, expected {expected}"))
}

/// Refuses options that `attention` refuses, of a call that an operator of PyTorch computes: its own words name neither the option nor what was
/// expected.
#[pyfunction]
pub(crate) fn check_options(options: &Bound<'_, PyTuple>) -> PyResult<()> {
    Options::of(options).map(|_| ())
}

impl Options {
    /// The options of a tuple, in the order of [`NAMES`].
    pub(crate) fn of(tuple: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let [
            causal,
            window,
            chunk,
            q_offset,
            scale,
            softcap,
            mask,
            slopes,
            sinks,
            q_lens,
            kv_lens,
            cu_seqlens,
            layout,
            lse,
            mask_lens,
            stream,
        ] = named(tuple)?;
        let stream = stream.map(|stream| stream.extract("a device and a handle")).transpose()?;
        let stream = stream.map(|(device, handle)| Stream { device, handle });
        let numbers =
            |of: Option<Named<'_>>| of.map(|of| Numbers::of(of.name, &of.value, stream)).transpose();
        let flag = |of: Option<Named<'_>>| of.map(|of| of.extract("True or False")).transpose();
        let number = |of: Option<Named<'_>>| of.map(|of| of.extract("a number")).transpose();
        let pair = |of: Named<'_>| of.extract("two integers, (left, right)");
        if mask.is_some() && (q_lens.is_some() || kv_lens.is_some() && cu_seqlens.is_some()) {
            return Err(PyValueError::new_err(
                "a mask was given with q_lens or kv_lens of packed sequences, which the mask can hide by itself",
            ));
        }
        let options = Self {
            causal: flag(causal)?.unwrap_or_default(),
            window: sides(window.map(pair).transpose()?.unwrap_or((-1, -1)))?,
            chunk: chunk.map(keys_of_chunk).transpose()?.unwrap_or_default(),
            q_offset: q_offset.map(|of| offset(&of.value)).transpose()?,
            scale: number(scale)?,
            // As other libraries say that there is none.
            softcap: number(softcap)?.filter(|c| *c != 0.0),
            mask: mask.map(|of| Memory::on(stream, of.name, &of.value)).transpose()?,
            mask_lens: mask_lens.map(|of| of.extract("queries and keys by turns")).transpose()?,
            alibi_slopes: numbers(slopes)?,
            sinks: numbers(sinks)?,
            lengths: lengths(q_lens, kv_lens, cu_seqlens)?,
            layout: axes(layout.map(|of| of.extract::<String>("a name")).transpose()?)?,
            lse: flag(lse)?.unwrap_or_default(),
            stream,
        };
        let has_unused = matches!(&options.lengths, Lengths::Packed(Packed { has_unused: true, .. }));
        let is_positional = !options.visibility().is_full() || options.alibi_slopes.is_some();
        if has_unused && is_positional && options.q_offset.is_none() {
            return Err(PyValueError::new_err(
                "q_offset is missing: q_lens or kv_lens leave rows of packed sequences unused, so give 'top_left' or 'bottom_right'",
            ));
        }
        Ok(options)
    }

    /// Refuses ALiBi slopes of another shape than `[heads]` and `[sequences, heads]`: of a call over a batch, or of packed sequences.
    pub(crate) fn check_slopes(&self, batch: usize, heads: usize) -> PyResult<()> {
        match &self.lengths {
            Lengths::Dense | Lengths::Padded(_) => self.check_slopes_of(batch, heads, false),
            Lengths::Packed(Packed { q, has_unused, .. }) => {
                self.check_slopes_of(q.len().saturating_sub(1), heads, *has_unused)
            }
        }
    }

    /// True if options may be lists of something for each sequence.
    pub(crate) const fn is_of_sequences(&self) -> bool {
        self.alibi_slopes.is_some() || self.mask_lens.is_some()
    }

    /// [`Options::check_slopes`], of a number of sequences.
    pub(crate) fn check_slopes_of(&self, sequences: usize, heads: usize, has_unused: bool) -> PyResult<()> {
        let Some(slopes) = &self.alibi_slopes else { return Ok(()) };
        let shape = slopes.shape();
        if shape.len() == 2 && has_unused {
            return Err(PyValueError::new_err(
                "alibi_slopes are of each sequence, whose rows q_lens or kv_lens leave unused: give rows without padding",
            ));
        }
        if shape != [heads] && shape != [sequences, heads] {
            return Err(PyValueError::new_err(format!(
                "alibi_slopes has shape {shape:?}, expected [{heads}], or [{sequences}, {heads}] for slopes of each sequence"
            )));
        }
        Ok(())
    }

    /// Refuses masks of each sequence that have other lengths than the sequences of a call, `q_len` and `kv_len` where it is over a batch.
    pub(crate) fn check_masks(&self, batch: usize, q_len: usize, kv_len: usize) -> PyResult<()> {
        let lens: Vec<(usize, usize)> = match &self.lengths {
            _ if self.mask_lens.is_none() => return Ok(()),
            // A larger batch is refused by its description.
            Lengths::Dense => vec![(q_len, kv_len); batch.min(MAX_SEQUENCES)],
            Lengths::Padded(kv_lens) => kv_lens.iter().map(|kv_len| (q_len, *kv_len)).collect(),
            Lengths::Packed(Packed { q, k, .. }) => {
                let spans = |starts: &[usize]| -> Vec<usize> {
                    starts.windows(2).map(|w| w[1].saturating_sub(w[0])).collect()
                };
                spans(q).into_iter().zip(spans(k)).collect()
            }
        };
        self.check_masks_of(&lens)
    }

    /// [`Options::check_masks`], of queries and keys of each sequence.
    pub(crate) fn check_masks_of(&self, lens: &[(usize, usize)]) -> PyResult<()> {
        let Some(of_masks) = &self.mask_lens else { return Ok(()) };
        let (of_masks, _) = of_masks.as_chunks::<2>();
        if of_masks.len() != lens.len() {
            return Err(PyValueError::new_err(format!(
                "mask is a list of {}, expected one for each of {} sequences",
                of_masks.len(),
                lens.len()
            )));
        }
        let differ = of_masks.iter().zip(lens).position(|(&[q, k], len)| (q, k) != *len);
        differ.map_or(Ok(()), |at| {
            let ([q, k], (q_len, kv_len)) = (of_masks[at], lens[at]);
            Err(PyValueError::new_err(format!(
                "mask[{at}] is of {q} queries and {k} keys, expected {q_len} and {kv_len} as sequence {at} has"
            )))
        })
    }

    /// Axes of q, k, v and out.
    pub(crate) const fn axes(&self) -> Axes {
        match self.lengths {
            Lengths::Packed(_) => Axes::Packed,
            Lengths::Dense | Lengths::Padded(_) => self.layout,
        }
    }

    pub(crate) const fn mask(&self) -> Option<&Memory> {
        self.mask.as_ref()
    }

    /// Shape of the ALiBi slopes.
    pub(crate) fn slopes_shape(&self) -> Option<&[usize]> {
        self.alibi_slopes.as_ref().map(Numbers::shape)
    }

    /// Shape of the sinks.
    pub(crate) fn sinks_shape(&self) -> Option<&[usize]> {
        self.sinks.as_ref().map(Numbers::shape)
    }

    /// Shape of the mask, if it is additive.
    pub(crate) fn bias_shape(&self) -> Option<&[usize]> {
        let mask = self.mask.as_ref()?;
        matches!(mask.mask_kind(), MaskKind::Additive(_)).then(|| mask.shape())
    }

    pub(crate) fn slopes_on(&self, on: OnDevice<'_>) -> PyResult<Option<DeviceList<'_>>> {
        Ok(self.alibi_slopes.as_ref().map(|slopes| slopes.device(on)).transpose()?.flatten())
    }

    pub(crate) fn sinks_on(&self, on: OnDevice<'_>) -> PyResult<Option<DeviceList<'_>>> {
        Ok(self.sinks.as_ref().map(|sinks| sinks.device(on)).transpose()?.flatten())
    }

    fn visibility(&self) -> Visibility {
        if self.causal { Visibility::causal() } else { Visibility::default() }
            .and(Visibility::window(self.window.0, self.window.1))
            .chunked(self.chunk)
    }

    /// Sets everything but the mask in the description of a problem.
    pub(crate) fn set(&self, desc: &mut ProblemDesc) {
        desc.visibility = self.visibility();
        desc.q_offset = self.q_offset;
        desc.scale = self.scale;
        desc.softcap = self.softcap;
        desc.alibi = self.alibi_slopes.is_some();
        desc.sinks = self.sinks.is_some();
        desc.sequences = match &self.lengths {
            Lengths::Dense => Sequences::Dense,
            Lengths::Padded(kv_lens) => Sequences::Padded { kv_lens: kv_lens.clone() },
            Lengths::Packed(Packed { q, k, .. }) => {
                Sequences::Packed { cu_seqlens_q: q.clone(), cu_seqlens_k: k.clone() }
            }
        };
    }

    /// The options as an [`Attention`] for tensors of the host.
    pub(crate) fn attention(&self) -> PyResult<Attention<'_>> {
        let mut attention = self.numbers();
        attention.mask = self.mask.as_ref().map(Memory::mask).transpose()?;
        attention.alibi_slopes = self.alibi_slopes.as_ref().and_then(Numbers::host);
        attention.sinks = self.sinks.as_ref().and_then(Numbers::host);
        Ok(attention)
    }

    /// The options without mask, slopes and sinks, which may be on a device.
    pub(crate) fn numbers(&self) -> Attention<'_> {
        let mut attention = if self.causal { Attention::causal() } else { Attention::full() };
        attention = attention.window(self.window.0, self.window.1).chunked(self.chunk);
        attention.q_offset = self.q_offset;
        attention.scale = self.scale;
        attention.softcap = self.softcap;
        attention.sequences = match &self.lengths {
            Lengths::Dense => SequencesRef::Dense,
            Lengths::Padded(kv_lens) => SequencesRef::Padded { kv_lens },
            Lengths::Packed(Packed { q, k, .. }) => SequencesRef::Packed { cu_seqlens_q: q, cu_seqlens_k: k },
        };
        attention
    }
}

fn lengths(
    q_lens: Option<Named<'_>>,
    kv_lens: Option<Named<'_>>,
    cu_seqlens: Option<Named<'_>>,
) -> PyResult<Lengths> {
    let of = |of: Named<'_>| list(of.name, &of.value, "a length for each batch entry or sequence");
    let (q_lens, kv_lens) = (q_lens.map(of).transpose()?, kv_lens.map(of).transpose()?);
    match (q_lens, kv_lens, cu_seqlens) {
        (None, None, None) => Ok(Lengths::Dense),
        (None, Some(kv_lens), None) => Ok(Lengths::Padded(kv_lens)),
        (Some(_), _, None) => Err(PyValueError::new_err(
            "q_lens were given without cu_seqlens, which say where the sequences begin; attention_with_cache takes q with an axis for the batch",
        )),
        (q_lens, kv_lens, Some(starts)) => {
            let (q, k) = packed(&starts.value)?;
            used_rows(q, k, q_lens, kv_lens)
        }
    }
}

/// Packed sequences of which the first rows are used. Rows after them are sequences too: queries without keys, whose result is 0, and keys
/// without queries.
fn used_rows(
    q: Vec<usize>,
    k: Vec<usize>,
    q_lens: Option<Vec<usize>>,
    kv_lens: Option<Vec<usize>>,
) -> PyResult<Lengths> {
    if q_lens.is_none() && kv_lens.is_none() {
        return Ok(Lengths::Packed(Packed { q, k, has_unused: false }));
    }
    let (q_ends, k_ends) = (used_ends("q_lens", &q, q_lens)?, used_ends("kv_lens", &k, kv_lens)?);
    let (Some(&first_q), Some(&first_k), true) = (q.first(), k.first(), q.len() == k.len()) else {
        // The description refuses them.
        return Ok(Lengths::Packed(Packed { q, k, has_unused: false }));
    };
    let (mut starts_q, mut starts_k) = (vec![first_q], vec![first_k]);
    for (at, (q_end, k_end)) in q_ends.into_iter().zip(k_ends).enumerate() {
        let (next_q, next_k) = (q[at + 1], k[at + 1]);
        let mut end = |of_q, of_k| {
            starts_q.push(of_q);
            starts_k.push(of_k);
        };
        end(q_end, k_end);
        if q_end < next_q {
            end(next_q, k_end);
        }
        if k_end < next_k {
            end(next_q, next_k);
        }
    }
    let has_unused = starts_q.len() > q.len();
    Ok(Lengths::Packed(Packed { q: starts_q, k: starts_k, has_unused }))
}

/// The ends of the rows that are used, of sequences that begin at these rows; all rows where there are no lengths.
fn used_ends(name: &str, starts: &[usize], lens: Option<Vec<usize>>) -> PyResult<Vec<usize>> {
    let Some(lens) = lens else { return Ok(starts.iter().skip(1).copied().collect()) };
    let end = |(at, len): (usize, &usize)| {
        starts[at].checked_add(*len).filter(|end| starts.get(at + 1).is_some_and(|next| end <= next))
    };
    let fits = lens.len() + 1 == starts.len();
    let ends = fits.then(|| lens.iter().enumerate().map(end).collect::<Option<_>>()).flatten();
    ends.ok_or_else(|| {
        PyValueError::new_err(format!(
            "{name} is {lens:?}, expected a number for each sequence, at most its rows by cu_seqlens, {starts:?}"
        ))
    })
}

/// The lists of `cu_seqlens` for queries and keys.
fn packed(starts: &Bound<'_, PyAny>) -> PyResult<(Vec<usize>, Vec<usize>)> {
    let (q, k) = cumulative(starts)?;
    let k = k.unwrap_or_else(|| q.clone());
    Ok((q, k))
}

/// The list of `cu_seqlens`, or the pair of them.
pub(crate) fn cumulative(starts: &Bound<'_, PyAny>) -> PyResult<(Vec<usize>, Option<Vec<usize>>)> {
    let of = |of: &Bound<'_, PyAny>| {
        list("cu_seqlens", of, "the first row of each sequence, then the total, or a pair of such lists")
    };
    // A tuple of two lists is a pair, a tuple of two numbers one list.
    match pair(starts).filter(|(q, _)| q.extract::<usize>().is_err()) {
        Some((q, k)) => Ok((of(&q)?, Some(of(&k)?))),
        None => Ok((of(starts)?, None)),
    }
}

fn sides((left, right): (i64, i64)) -> PyResult<(Option<usize>, Option<usize>)> {
    let side = |keys: i64| match keys {
        -1 => Ok(None),
        _ => usize::try_from(keys).map(Some).map_err(|_| {
            PyValueError::new_err(format!(
                "window is ({left}, {right}), expected keys, or -1 for an unbounded side"
            ))
        }),
    };
    Ok((side(left)?, side(right)?))
}

fn keys_of_chunk(of: Named<'_>) -> PyResult<usize> {
    let keys: i64 = of.extract("the keys of a chunk, or 0 for no chunks")?;
    usize::try_from(keys).map_err(|_| {
        PyValueError::new_err(format!(
            "attention_chunk is {keys}, expected the keys of a chunk, or 0 for no chunks"
        ))
    })
}

fn offset(value: &Bound<'_, PyAny>) -> PyResult<QOffset> {
    if let Ok(at) = value.extract::<i64>() {
        return Ok(QOffset::At(at));
    }
    match value.extract::<String>().as_deref() {
        Ok("top_left") => Ok(QOffset::TopLeft),
        Ok("bottom_right") => Ok(QOffset::BottomRight),
        _ => {
            let got = value.repr()?;
            let what = format!(
                "q_offset is {got}, expected 'top_left', 'bottom_right' or the key position of query 0"
            );
            Err(PyValueError::new_err(what))
        }
    }
}

fn axes(layout: Option<String>) -> PyResult<Axes> {
    match layout.as_deref() {
        None | Some("bhsd") => Ok(Axes::Bhsd),
        Some("bshd") => Ok(Axes::Bshd),
        Some(name) => Err(PyValueError::new_err(format!("layout is '{name}', expected 'bhsd' or 'bshd'"))),
    }
}

/// The list of an array, whatever its device; anything else as it is.
fn listed<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    match object.getattr_opt(intern!(object.py(), "tolist"))? {
        Some(tolist) => tolist.call0(),
        None => Ok(object.clone()),
    }
}

/// A list of numbers: a list, a tuple, or any array with `tolist`, on whatever device.
pub(crate) fn list<'py, T>(name: &str, object: &Bound<'py, PyAny>, expected: &str) -> PyResult<Vec<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    listed(object)?.extract().map_err(|_| {
        let got = object.repr().map(|text| text.to_string()).unwrap_or_default();
        PyTypeError::new_err(format!("{name} is {got}, expected {expected}"))
    })
}

/// A pair of Python objects.
fn pair<'py>(object: &Bound<'py, PyAny>) -> Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let tuple = object.cast::<PyTuple>().ok()?;
    (tuple.len() == 2).then(|| Some((tuple.get_item(0).ok()?, tuple.get_item(1).ok()?)))?
}
