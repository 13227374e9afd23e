//! Memory of arrays and tensors of Python, as views: with `cuda`, the only unsafe code of the package.
//!
//! Arrays of numpy say where their memory is by `__array_interface__`, which knows every dtype of ml_dtypes too; everything else by
//! DLPack. Both are promises of the object: a pointer, a shape and strides that describe memory which stays where it is while the object,
//! or the capsule, lives. As in every extension that computes on arrays, nothing but the program itself keeps other threads of Python from
//! writing to an array during a call, or from freeing it by `resize(refcheck=False)`; the documentation of the package says so.

mod device;
mod dlpack;
mod host;

use crate::failure::refused;
use flashtile::Dtype;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::ops::Range;

/// Type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Element(Dtype),
    Bool,
}

impl Kind {
    const fn bytes(self) -> usize {
        match self {
            Self::Element(dtype) => dtype.bytes(),
            Self::Bool => 1,
        }
    }
}

/// Order of the axes of a tensor of Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axes {
    /// `(batch, heads, seq, dim)`.
    Bhsd,
    /// `(batch, seq, heads, dim)`.
    Bshd,
    /// `(total, heads, dim)`.
    Packed,
}

impl Axes {
    const fn names(self) -> &'static str {
        match self {
            Self::Bhsd => "(batch, heads, seq, dim)",
            Self::Bshd => "(batch, seq, heads, dim)",
            Self::Packed => "(total, heads, dim)",
        }
    }

    /// Sizes or strides in the order `[batch, heads, rows, dim]`. `batch` stands for a missing axis.
    fn logical(self, of: &[usize], batch: usize) -> Option<[usize; 4]> {
        match (self, of) {
            (Self::Bhsd, &[b, h, s, d]) | (Self::Bshd, &[b, s, h, d]) => Some([b, h, s, d]),
            (Self::Packed, &[s, h, d]) => Some([batch, h, s, d]),
            (Self::Bhsd | Self::Bshd | Self::Packed, _) => None,
        }
    }

    /// A shape `[batch, heads, rows, dim]` in the order of these axes.
    pub(crate) fn shape(self, [b, h, s, d]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Bhsd => vec![b, h, s, d],
            Self::Bshd => vec![b, s, h, d],
            Self::Packed => vec![s, h, d],
        }
    }

    /// The shape of the logsumexp `[batch, heads, rows]`.
    pub(crate) fn lse_shape(self, [b, h, s, _]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Bhsd | Self::Bshd => vec![b, h, s],
            Self::Packed => vec![h, s],
        }
    }
}

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// The CUDA device of this number.
    Cuda(i32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

/// A stream of a CUDA device, on which a call runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) device: i32,
    /// The driver's handle; 0 is the default stream.
    pub(crate) handle: usize,
}

/// Memory of an array or tensor.
///
/// Invariant: as the object promised, every element that `shape` reaches from `ptr` with `strides` lies in one allocation, is aligned where
/// its address says so, and is readable at its place until `owner` is dropped; writable unless `readonly`. On a device, that holds for
/// work on the stream that was named to the object.
pub(crate) struct Memory {
    pub(crate) name: &'static str,
    place: Place,
    ptr: *mut u8,
    kind: Kind,
    shape: Vec<usize>,
    /// In elements; 0 of axes with fewer than two elements.
    strides: Vec<usize>,
    readonly: bool,
    /// The array or the capsule, which owns the memory.
    _owner: Py<PyAny>,
}

impl Memory {
    /// The memory of an argument with this name, which the host reads.
    pub(crate) fn of(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::on(None, name, object)
    }

    /// The memory of an argument with this name, of the host, or of the device of a stream. Work on the stream may access it, which a
    /// capsule's maker sees to.
    pub(crate) fn on(
        stream: Option<Stream>,
        name: &'static str,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = object.py();
        if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
            return Self::of_array(name, object, interface.cast::<PyDict>()?);
        }
        if let Ok(capsule) = object.cast::<PyCapsule>() {
            return Self::of_capsule(stream, name, capsule);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            return Self::of_dlpack(stream, name, object);
        }
        let got = object.get_type().name()?;
        let what = format!("{name} is a {got}, expected a numpy array or a tensor with __dlpack__");
        Err(PyTypeError::new_err(what))
    }

    fn of_array(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let field = |key: &str| {
            let missing = || PyBufferError::new_err(format!("{name}.__array_interface__ has no {key}"));
            interface.get_item(key)?.ok_or_else(missing)
        };
        let (address, readonly): (usize, bool) = field("data")?.extract()?;
        let shape: Vec<usize> = field("shape")?.extract()?;
        let kind = kind_of_array(name, object, &field("typestr")?.extract::<String>()?)?;
        let strides = match interface.get_item("strides")? {
            Some(strides) if !strides.is_none() => {
                let bytes = kind.bytes() as isize;
                let strides: Vec<isize> = strides.extract()?;
                if strides.len() != shape.len() {
                    return Err(PyBufferError::new_err(format!(
                        "{name} has strides {strides:?} of shape {shape:?}"
                    )));
                }
                if strides.iter().zip(&shape).any(|(stride, n)| *n > 1 && stride % bytes != 0) {
                    let what = format!(
                        "{name} has strides {strides:?}, which are no multiples of its {bytes} bytes"
                    );
                    return Err(PyBufferError::new_err(what));
                }
                Some(strides.into_iter().map(|stride| stride / bytes).collect())
            }
            _ => None,
        };
        let strides = checked_strides(name, &shape, strides)?;
        let ptr = std::ptr::with_exposed_provenance_mut(address);
        let (place, owner) = (Place::Host, object.clone().unbind());
        Ok(Self { name, place, ptr, kind, shape, strides, readonly, _owner: owner })
    }

    fn of_dlpack(stream: Option<Stream>, name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let device = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        place(name, device, stream)?;
        let options = PyDict::new(py);
        if let Some(stream) = stream {
            options.set_item(intern!(py, "stream"), dlpack::stream(stream))?;
        }
        let method = object.getattr(intern!(py, "__dlpack__"))?;
        options.set_item(intern!(py, "max_version"), (1, 0))?;
        let capsule = match method.call((), Some(&options)) {
            // Producers from before version 1 of DLPack do not know the argument.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                options.del_item(intern!(py, "max_version"))?;
                method.call((), Some(&options))?
            }
            other => other?,
        };
        Self::of_capsule(stream, name, &capsule.cast_into::<PyCapsule>()?)
    }

    fn of_capsule(
        stream: Option<Stream>,
        name: &'static str,
        capsule: &Bound<'_, PyCapsule>,
    ) -> PyResult<Self> {
        let (tensor, readonly) = dlpack::tensor(capsule)?;
        let place = place(name, tensor.device(), stream)?;
        let kind = tensor.kind(name)?;
        let shape = tensor.shape(name)?;
        let strides = checked_strides(name, &shape, tensor.strides())?;
        let (ptr, owner) = (tensor.start()?, capsule.clone().into_any().unbind());
        Ok(Self { name, place, ptr, kind, shape, strides, readonly, _owner: owner })
    }

    /// Refuses memory that is anywhere else.
    fn check_place(&self, expected: Place) -> PyResult<()> {
        if self.place == expected {
            return Ok(());
        }
        Err(elsewhere(self.name, self.place, expected))
    }

    /// Dtype, shape and strides in the order `[batch, heads, rows, dim]`.
    fn logical(&self, axes: Axes) -> PyResult<(Dtype, [usize; 4], [usize; 4])> {
        let (name, shape) = (self.name, &self.shape);
        let Kind::Element(dtype) = self.kind else {
            return Err(PyTypeError::new_err(format!(
                "{name} is bool, expected float32, float16 or bfloat16"
            )));
        };
        let (Some(sizes), Some(strides)) = (axes.logical(shape, 1), axes.logical(&self.strides, 0)) else {
            let what = format!("{name} has shape {shape:?}, expected {}", axes.names());
            return Err(PyValueError::new_err(what));
        };
        if sizes[3] > 1 && strides[3] != 1 && !sizes.contains(&0) {
            let what = format!(
                "{name} has strides {:?}, expected 1 for the last axis: copy it, as numpy.ascontiguousarray or .contiguous() does",
                self.strides
            );
            return Err(PyBufferError::new_err(what));
        }
        // The axis may have one element, whose stride says nothing.
        let [b, h, s, _] = strides;
        Ok((dtype, sizes, [b, h, s, 1]))
    }

    /// Shape and strides of a mask `[batch, heads, queries, keys]`, of two axes or four.
    fn mask_axes(&self) -> PyResult<([usize; 4], [usize; 4])> {
        let four = |of: &[usize], missing| match *of {
            [q, k] => Some([missing, missing, q, k]),
            [b, h, q, k] => Some([b, h, q, k]),
            _ => None,
        };
        let name = self.name;
        let (Some(shape), Some(strides)) = (four(&self.shape, 1), four(&self.strides, 0)) else {
            let what = format!(
                "{name} has shape {:?}, expected (queries, keys) or (batch, heads, queries, keys)",
                self.shape
            );
            return Err(PyValueError::new_err(what));
        };
        if strides[3] > 1 {
            let what = format!("{name} has strides {strides:?}, expected 0 or 1 for the last axis: copy it");
            return Err(PyBufferError::new_err(what));
        }
        Ok((shape, strides))
    }

    /// Refuses what is not dense memory of f32.
    fn check_list(&self) -> PyResult<usize> {
        let count = self.shape.iter().product::<usize>();
        let aligned = (self.ptr as usize).is_multiple_of(size_of::<f32>());
        if self.kind != Kind::Element(Dtype::F32) || self.span()? != count || !aligned {
            return Err(PyBufferError::new_err(format!("{} is not a dense array of float32", self.name)));
        }
        Ok(count)
    }

    /// Elements from the first to one past the last that the shape reaches.
    fn span(&self) -> PyResult<usize> {
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let last = self
            .shape
            .iter()
            .zip(&self.strides)
            .try_fold(0usize, |last, (n, stride)| last.checked_add((n - 1).checked_mul(*stride)?));
        let count = last.and_then(|last| last.checked_add(1));
        let fits = |count: &usize| {
            count.checked_mul(self.kind.bytes()).is_some_and(|bytes| isize::try_from(bytes).is_ok())
        };
        let overflow =
            || PyBufferError::new_err(format!("{}: shape times strides is not addressable", self.name));
        count.filter(fits).ok_or_else(overflow)
    }

    /// Addresses of the elements.
    fn addresses(&self) -> PyResult<Range<usize>> {
        let start = self.ptr as usize;
        Ok(start..start.saturating_add(self.span()? * self.kind.bytes()))
    }

    /// Refuses memory that may not be written, or that lies between the first and the last element of another argument.
    pub(crate) fn check_exclusive(&self, others: &[&Self]) -> PyResult<()> {
        if self.readonly {
            return Err(PyBufferError::new_err(format!("{} is read-only", self.name)));
        }
        let mine = self.addresses()?;
        for other in others {
            let theirs = other.addresses()?;
            if mine.start < theirs.end && theirs.start < mine.end {
                let what = format!("{} overlaps {} in memory", self.name, other.name);
                return Err(PyBufferError::new_err(what));
            }
        }
        Ok(())
    }

    fn refuse(&self, error: flashtile::ViewError) -> PyErr {
        PyBufferError::new_err(format!("{}: {}", self.name, refused(error).value_text()))
    }
}

/// Where a tensor of a DLPack device is: there, where a call on this stream expects it, or the error.
fn place(name: &str, (device, id): (i32, i32), stream: Option<Stream>) -> PyResult<Place> {
    match (device, stream) {
        (dlpack::CPU | dlpack::CUDA_HOST, None) => Ok(Place::Host),
        (dlpack::CUDA, Some(stream)) if id == stream.device => Ok(Place::Cuda(id)),
        (_, stream) => {
            let expected = stream.map_or(Place::Host, |stream| Place::Cuda(stream.device));
            Err(elsewhere(name, dlpack::device_name(device, id), expected))
        }
    }
}

fn elsewhere(name: &str, got: impl std::fmt::Display, expected: Place) -> PyErr {
    let what = format!("{name} is on {got}, expected {expected}: move it, as .to(\"{expected}\") does");
    PyBufferError::new_err(what)
}

/// The words of an exception.
trait ValueText {
    fn value_text(&self) -> String;
}

impl ValueText for PyErr {
    fn value_text(&self) -> String {
        Python::attach(|py| self.value(py).to_string())
    }
}

/// Strides, or the ones of dense memory, none negative, and 0 where an axis has fewer than two elements.
fn checked_strides(name: &str, shape: &[usize], strides: Option<Vec<isize>>) -> PyResult<Vec<usize>> {
    let Some(strides) = strides else {
        let mut dense = vec![1usize; shape.len()];
        for axis in (1..shape.len()).rev() {
            dense[axis - 1] = dense[axis].saturating_mul(shape[axis]);
        }
        return checked_strides(name, shape, Some(dense.into_iter().map(|stride| stride as isize).collect()));
    };
    let empty = shape.contains(&0);
    let one = |(n, stride): (&usize, &isize)| if *n < 2 || empty { Ok(0) } else { usize::try_from(*stride) };
    shape.iter().zip(&strides).map(one).collect::<Result<_, _>>().map_err(|_| {
        let what = format!(
            "{name} has strides {strides:?}, expected none below 0: copy it, as numpy.ascontiguousarray does"
        );
        PyBufferError::new_err(what)
    })
}

fn kind_of_array(name: &str, object: &Bound<'_, PyAny>, typestr: &str) -> PyResult<Kind> {
    const NATIVE: char = if cfg!(target_endian = "big") { '>' } else { '<' };
    let (order, code) = typestr.split_at(typestr.len().min(1));
    let native = order.starts_with(NATIVE) || order == "|";
    let dtype = || -> PyResult<String> { object.getattr(intern!(object.py(), "dtype"))?.str()?.extract() };
    match code {
        "f4" if native => Ok(Kind::Element(Dtype::F32)),
        "f2" if native => Ok(Kind::Element(Dtype::F16)),
        "b1" => Ok(Kind::Bool),
        // Extension types of numpy, such as bfloat16 of ml_dtypes, are bytes to the protocol.
        "V2" if native && dtype()? == "bfloat16" => Ok(Kind::Element(Dtype::BF16)),
        _ => Err(wrong_dtype(name, &dtype().unwrap_or_else(|_| typestr.to_owned()))),
    }
}

fn wrong_dtype(name: &str, got: &str) -> PyErr {
    let expected =
        if name == "mask" { "bool, float32, float16 or bfloat16" } else { "float32, float16 or bfloat16" };
    PyTypeError::new_err(format!("{name} is {got}, expected {expected}"))
}
