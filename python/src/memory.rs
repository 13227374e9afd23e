//! Memory of arrays and tensors of Python, as views: the only unsafe code of the package.
//!
//! Arrays of numpy say where their memory is by `__array_interface__`, which knows every dtype of ml_dtypes too; everything else by
//! DLPack. Both are promises of the object: a pointer, a shape and strides that describe memory which stays where it is while the object,
//! or the capsule, lives. As in every extension that computes on arrays, nothing but the program itself keeps other threads of Python from
//! writing to an array during a call, or from freeing it by `resize(refcheck=False)`; the documentation of the package says so.

#![allow(unsafe_code)]

use crate::failure::refused;
use flashtile::{Dtype, MaskView, TensorView, TensorViewMut};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyTuple};
use std::ffi::c_void;
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

/// Memory of an array or tensor.
///
/// Invariant: as the object promised, every element that `shape` reaches from `ptr` with `strides` lies in one allocation, is aligned where
/// its address says so, and is readable until `owner` is dropped; writable unless `readonly`.
pub(crate) struct Memory {
    pub(crate) name: &'static str,
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
    /// The memory of an argument with this name.
    pub(crate) fn of(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
            return Self::of_array(name, object, interface.cast::<PyDict>()?);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            return Self::of_dlpack(name, object);
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
        Ok(Self { name, ptr, kind, shape, strides, readonly, _owner: object.clone().unbind() })
    }

    fn of_dlpack(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let (device, id): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        if !matches!(device, DL_CPU | DL_CUDA_HOST) {
            let device = device_name(device, id);
            let what = format!(
                "{name} is on {device}, and the Python package has flashtile's CPU backend alone: move it there, as .cpu() does"
            );
            return Err(PyBufferError::new_err(what));
        }
        let method = object.getattr(intern!(py, "__dlpack__"))?;
        let options = PyDict::new(py);
        options.set_item(intern!(py, "max_version"), (1, 0))?;
        let capsule = match method.call((), Some(&options)) {
            // Producers from before version 1 of DLPack do not know the argument.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call0()?,
            other => other?,
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let (tensor, readonly) = dl_tensor(&capsule)?;
        let kind = tensor.kind(name)?;
        let shape = tensor.shape(name)?;
        let strides = checked_strides(name, &shape, tensor.strides())?;
        let offset = usize::try_from(tensor.byte_offset)?;
        let ptr = tensor.data.cast::<u8>().wrapping_add(offset);
        Ok(Self { name, ptr, kind, shape, strides, readonly, _owner: capsule.into_any().unbind() })
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

    /// The memory as a tensor that is read.
    pub(crate) fn view(&self, axes: Axes) -> PyResult<TensorView<'_>> {
        let (dtype, shape, strides) = self.logical(axes)?;
        // SAFETY: by the invariant the elements lie in one allocation and are readable while `self`, which the view borrows, has their
        // owner; that nobody writes to them during a call is asked of the program (above), and `view_mut` refuses to overlap.
        unsafe { TensorView::from_raw_parts(dtype, self.ptr, shape, strides) }
            .map_err(|error| self.refuse(error))
    }

    /// The memory as a tensor that is written, and that has no memory in common with `others`.
    pub(crate) fn view_mut(&mut self, axes: Axes, others: &[&Self]) -> PyResult<TensorViewMut<'_>> {
        let (dtype, shape, strides) = self.logical(axes)?;
        self.check_exclusive(others)?;
        let ptr = self.ptr;
        // SAFETY: as for `view`; the memory is not read-only, and `check_exclusive` showed that no other argument of the call has an
        // address in common with it. `self` is borrowed exclusively.
        unsafe { TensorViewMut::from_raw_parts(dtype, ptr, shape, strides) }
            .map_err(|error| self.refuse(error))
    }

    /// Dense memory as a list of f32 that is written.
    pub(crate) fn list_mut(&mut self, others: &[&Self]) -> PyResult<&mut [f32]> {
        self.check_exclusive(others)?;
        let count = self.shape.iter().product::<usize>();
        let aligned = (self.ptr as usize).is_multiple_of(size_of::<f32>());
        if self.kind != Kind::Element(Dtype::F32) || self.span()? != count || !aligned {
            return Err(PyBufferError::new_err(format!("{} is not a dense array of float32", self.name)));
        }
        if count == 0 {
            return Ok(&mut []);
        }
        // SAFETY: `count` elements reach as far as the shape does, so that they are all of the memory of the invariant; aligned, and any
        // bytes are an f32. Exclusive as in `view_mut`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), count) })
    }

    /// The memory as a mask of two or four axes.
    pub(crate) fn mask(&self) -> PyResult<MaskView<'_>> {
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
            let what =
                format!("{name} has strides {:?}, expected 0 or 1 for the last axis: copy it", self.strides);
            return Err(PyBufferError::new_err(what));
        }
        let view = match self.kind {
            Kind::Bool => MaskView::bool_bytes(self.elements::<u8>()?, shape, strides),
            Kind::Element(Dtype::F32) => MaskView::additive_strided(self.elements::<f32>()?, shape, strides),
            Kind::Element(Dtype::F16) => {
                MaskView::additive_strided(self.elements::<half::f16>()?, shape, strides)
            }
            Kind::Element(Dtype::BF16) => {
                MaskView::additive_strided(self.elements::<half::bf16>()?, shape, strides)
            }
        };
        view.map_err(|error| self.refuse(error))
    }

    /// The elements from the first to the last that the shape reaches, gaps included.
    fn elements<T: Plain>(&self) -> PyResult<&[T]> {
        let count = self.span()?;
        if count == 0 {
            return Ok(&[]);
        }
        if size_of::<T>() != self.kind.bytes() || !(self.ptr as usize).is_multiple_of(align_of::<T>()) {
            return Err(PyBufferError::new_err(format!("{} is not aligned to its elements", self.name)));
        }
        // SAFETY: `T` has the size of an element, and any bytes are a `T`. By the invariant the first element and the last are in one
        // allocation, and so is what lies between them; it is readable while `self` is borrowed, and unwritten as for `view`.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr.cast(), count) })
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

/// The words of an exception.
trait ValueText {
    fn value_text(&self) -> String;
}

impl ValueText for PyErr {
    fn value_text(&self) -> String {
        Python::attach(|py| self.value(py).to_string())
    }
}

/// Types without padding of which any bytes are a value.
trait Plain {}
impl Plain for u8 {}
impl Plain for f32 {}
impl Plain for half::f16 {}
impl Plain for half::bf16 {}

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

const DL_CPU: i32 = 1;
const DL_CUDA_HOST: i32 = 3;

fn device_name(device: i32, id: i32) -> String {
    let name = match device {
        2 => "cuda",
        4 => "opencl",
        7 => "vulkan",
        8 => "metal",
        10 => "rocm",
        13 => "cuda_managed",
        14 => "oneapi",
        _ => return format!("a device of DLPack type {device}"),
    };
    format!("{name}:{id}")
}

/// `DLTensor` of DLPack.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned` of DLPack.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

impl DlTensor {
    fn kind(&self, name: &str) -> PyResult<Kind> {
        match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => Ok(Kind::Element(Dtype::F32)),
            (2, 16, 1) => Ok(Kind::Element(Dtype::F16)),
            (4, 16, 1) => Ok(Kind::Element(Dtype::BF16)),
            (6, 8, 1) => Ok(Kind::Bool),
            (code, bits, lanes) => {
                let base = match code {
                    0 => "int",
                    1 => "uint",
                    2 => "float",
                    4 => "bfloat",
                    5 => "complex",
                    6 => "bool",
                    _ => "an unknown type of bits ",
                };
                let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
                Err(wrong_dtype(name, &format!("{base}{bits}{lanes}")))
            }
        }
    }

    fn rank(&self) -> usize {
        usize::try_from(self.ndim).unwrap_or(0)
    }

    fn shape(&self, name: &str) -> PyResult<Vec<usize>> {
        let sizes = match self.rank() {
            0 => &[],
            // SAFETY: DLPack promises `ndim` sizes while the capsule lives, which this borrow does not outlive (`dl_tensor`).
            rank => unsafe { std::slice::from_raw_parts(self.shape, rank) },
        };
        let wrong = |_| PyBufferError::new_err(format!("{name} has shape {sizes:?}"));
        sizes.iter().map(|&n| usize::try_from(n)).collect::<Result<_, _>>().map_err(wrong)
    }

    /// `None` is dense.
    fn strides(&self) -> Option<Vec<isize>> {
        if self.strides.is_null() || self.rank() == 0 {
            return None;
        }
        // SAFETY: as for `shape`: strides that are not null are `ndim` numbers.
        let strides = unsafe { std::slice::from_raw_parts(self.strides, self.rank()) };
        Some(strides.iter().map(|&stride| stride as isize).collect())
    }
}

/// The tensor in a capsule, and whether it may not be written. The capsule is not renamed: it stays the owner, and frees the tensor when
/// it is dropped.
fn dl_tensor<'a>(capsule: &'a Bound<'_, PyCapsule>) -> PyResult<(&'a DlTensor, bool)> {
    let versioned = c"dltensor_versioned";
    if capsule.is_valid_checked(Some(versioned)) {
        let pointer = capsule.pointer_checked(Some(versioned))?.cast::<DlVersioned>();
        // SAFETY: a capsule of this name holds a pointer to `DLManagedTensorVersioned`, whose first field is the version in every version.
        // It is valid until the capsule's destructor, hence while the capsule is borrowed.
        let major = unsafe { (*pointer.as_ptr()).major };
        if major != 1 {
            return Err(PyBufferError::new_err(format!("DLPack has version {major}, expected 1")));
        }
        // SAFETY: the same, and version 1 has the fields of `DlVersioned`.
        let of = unsafe { pointer.as_ref() };
        return Ok((&of.tensor, of.flags & 1 != 0));
    }
    let pointer = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlTensor>();
    // SAFETY: a capsule of this name holds a pointer to `DLManagedTensor`, whose first field is a `DLTensor`; valid as above.
    Ok((unsafe { pointer.as_ref() }, false))
}

/// A list of numbers: a list, a tuple, or any array with `tolist`, on whatever device.
pub(crate) fn list<'py, T>(name: &str, object: &Bound<'py, PyAny>, expected: &str) -> PyResult<Vec<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let listed = match object.getattr_opt(intern!(object.py(), "tolist"))? {
        Some(tolist) => tolist.call0()?,
        None => object.clone(),
    };
    listed.extract().map_err(|_| {
        let got = object.repr().map(|text| text.to_string()).unwrap_or_default();
        PyTypeError::new_err(format!("{name} is {got}, expected {expected}"))
    })
}

/// A pair of Python objects.
pub(crate) fn pair<'py>(object: &Bound<'py, PyAny>) -> Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let tuple = object.cast::<PyTuple>().ok()?;
    (tuple.len() == 2).then(|| Some((tuple.get_item(0).ok()?, tuple.get_item(1).ok()?)))?
}
