//! Memory of arrays and tensors of Python, as views: with `cuda`, the only unsafe code of the package.
//!
//! DLPack describes memory: by a function in C where the library of a tensor has the exchange API, else by capsules. Arrays that numpy
//! does not describe so, such as read-only ones and dtypes of ml_dtypes, have `__array_interface__`. All are promises of the object: a
//! pointer, a shape and strides of memory that stays where it is while the object, or the capsule, lives. As in every extension that
//! computes on arrays, nothing but the program itself keeps other threads of Python from writing to an array during a call, or from
//! freeing it by `resize(refcheck=False)`; the documentation of the package says so.

#![allow(unsafe_code)]

mod block;
mod device;
mod dlpack;
mod exchange;
mod host;

pub(crate) use block::{Axes, Block};
pub(crate) use device::{DeviceList, DeviceMask, DeviceTensor, OnDevice};

use block::{ArrayInterface, Kind, Refusal, wrong_dtype};
use dlpack::Managed;
use flashtile::{Dtype, MaskKind, MaskView, TensorView, TensorViewMut};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyType};

impl From<Refusal> for PyErr {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Buffer(what) => PyBufferError::new_err(what),
            Refusal::Type(what) => PyTypeError::new_err(what),
            Refusal::Value(what) => PyValueError::new_err(what),
        }
    }
}

impl Axes {
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

/// True for a `numpy.ndarray`, and false for its subclasses.
pub(crate) fn is_numpy(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    Ok(object.get_type().is(NDARRAY.import(object.py(), "numpy", "ndarray")?))
}

/// Memory of an array or tensor.
///
/// Invariant: as the object promised, every element of the block lies in one allocation, and is readable at its place until `owner` is
/// dropped; writable unless the block is read-only. On a device, that holds for work on the stream that was named to the object.
pub(crate) struct Memory {
    pub(crate) block: Block,
    place: Place,
    /// The array, the tensor, its storage or its capsule, which owns the memory.
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
        // Checks of the type come first: a missing attribute costs an exception with its text.
        if is_numpy(object)? {
            // DLPack is ten times as fast, but refuses read-only arrays and dtypes of ml_dtypes.
            return match object.call_method0(intern!(py, "__dlpack__")) {
                Ok(capsule) => Self::of_capsule(stream, name, capsule.cast::<PyCapsule>()?, None),
                Err(_) => Self::of_array(name, object),
            };
        }
        if let Ok(capsule) = object.cast::<PyCapsule>() {
            return Self::of_capsule(stream, name, capsule, None);
        }
        if let Some((described, place)) = exchange::borrow(stream, name, object)? {
            let storage = Storage::of(name, object)?;
            let available = storage.as_ref().map(|storage| storage.bytes_from(described.ptr));
            let block = Block::new(name, described, available)?;
            // The storage stays where it is, where a tensor may be given another one.
            let owner = storage.map_or_else(|| object.clone(), |storage| storage.object);
            return Ok(Self { block, place, _owner: owner.unbind() });
        }
        if object.hasattr(intern!(py, "__array_interface__"))? {
            return Self::of_array(name, object);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            return Self::of_dlpack(stream, name, object);
        }
        let got = object.get_type().name()?;
        let what = format!("{name} is a {got}, expected a numpy array or a tensor with __dlpack__");
        Err(PyTypeError::new_err(what))
    }

    /// The memory of a result that the package has just allocated. Its storage is as large as its shape says, and is not asked.
    pub(crate) fn made(
        stream: Option<Stream>,
        name: &'static str,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        if !is_numpy(object)?
            && let Some((described, place)) = exchange::borrow(stream, name, object)?
        {
            let block = Block::new(name, described, None)?;
            return Ok(Self { block, place, _owner: object.clone().unbind() });
        }
        Self::on(stream, name, object)
    }

    fn of_array(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let interface = object.getattr(intern!(object.py(), "__array_interface__"))?;
        let interface = interface.cast::<PyDict>()?;
        let value = |key: &str| Ok::<_, PyErr>(interface.get_item(key)?.filter(|value| !value.is_none()));
        let missing = |key: &str| PyBufferError::new_err(format!("{name}.__array_interface__ has no {key}"));
        let field = |key: &str| value(key)?.ok_or_else(|| missing(key));
        if value("mask")?.is_some() {
            let what = format!("{name} hides elements by a mask of its own, which would be lost: fill them");
            return Err(PyTypeError::new_err(what));
        }
        let (address, readonly) = field("data")?.extract().map_err(|_| missing("address in data"))?;
        let typestr: String = field("typestr")?.extract()?;
        let dtype = match typestr.get(1..) {
            Some("f4" | "f2" | "b1") => None,
            _ => object.getattr_opt(intern!(object.py(), "dtype"))?,
        };
        let dtype = dtype.map(|dtype| dtype.str()?.extract::<String>()).transpose()?;
        let described = ArrayInterface {
            address,
            readonly,
            shape: field("shape")?.extract()?,
            strides: value("strides")?.map(|strides| strides.extract()).transpose()?,
            typestr: &typestr,
            dtype: dtype.as_deref(),
        };
        let block = Block::new(name, described.described(name)?, None)?;
        Ok(Self { block, place: Place::Host, _owner: object.clone().unbind() })
    }

    fn of_dlpack(stream: Option<Stream>, name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let device = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        place(name, device, stream)?;
        let options = PyDict::new(py);
        if let Some(stream) = stream {
            // The default stream, which is 0 to the driver, is 1 to DLPack.
            options.set_item(intern!(py, "stream"), stream.handle.max(1))?;
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
        Self::of_capsule(stream, name, &capsule.cast_into::<PyCapsule>()?, Some(object))
    }

    /// `tensor` is the object that gave the capsule. The capsule is not renamed: it stays the owner, and
    /// frees its memory when it is dropped.
    fn of_capsule(
        stream: Option<Stream>,
        name: &'static str,
        capsule: &Bound<'_, PyCapsule>,
        tensor: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let versioned = c"dltensor_versioned";
        let managed = match capsule.is_valid_checked(Some(versioned)) {
            true => Managed::Versioned(capsule.pointer_checked(Some(versioned))?.cast()),
            false => Managed::Plain(capsule.pointer_checked(Some(c"dltensor"))?.cast()),
        };
        // SAFETY: a capsule of the name holds a pointer to such a tensor, valid until the capsule's destructor, hence while it is borrowed.
        let (memory, readonly) = unsafe { managed.tensor()? };
        let place = place(name, memory.device(), stream)?;
        // SAFETY: DLPack promises `ndim` sizes and strides while the capsule lives.
        let described = unsafe { memory.described(name, readonly)? };
        let storage = tensor.map(|tensor| Storage::of(name, tensor)).transpose()?.flatten();
        let available = storage.map(|storage| storage.bytes_from(described.ptr));
        let block = Block::new(name, described, available)?;
        Ok(Self { block, place, _owner: capsule.clone().into_any().unbind() })
    }

    /// Refuses memory that is anywhere else.
    fn check_place(&self, expected: Place) -> PyResult<()> {
        if self.place == expected {
            return Ok(());
        }
        Err(elsewhere(self.block.name, self.place, expected))
    }

    /// The memory as a tensor that is read.
    pub(crate) fn view(&self, axes: Axes) -> PyResult<TensorView<'_>> {
        self.check_place(Place::Host)?;
        // SAFETY: the invariant, while `self`, which the view borrows, has the owner. That nobody writes to the elements during a call is
        // asked of the program, and `view_mut` refuses to overlap.
        Ok(unsafe { self.block.view(axes)? })
    }

    /// The memory as a tensor that is written, and that has no memory in common with `others`: all other arguments of the call.
    pub(crate) fn view_mut(&mut self, axes: Axes, others: &[&Self]) -> PyResult<TensorViewMut<'_>> {
        self.check_place(Place::Host)?;
        // SAFETY: as for `view`; read-only memory and memory of `others` are refused.
        Ok(unsafe { self.block.view_mut(axes, &blocks(others))? })
    }

    /// Memory of a shape, dense and in the order of its axes, as a list of f32 that is read.
    pub(crate) fn list(&self, shape: &[usize]) -> PyResult<&[f32]> {
        self.check_place(Place::Host)?;
        // SAFETY: as for `view`.
        Ok(unsafe { self.block.list(shape)? })
    }

    /// Sizes of the axes.
    pub(crate) fn shape(&self) -> &[usize] {
        self.block.shape()
    }

    /// Type of the elements of a tensor.
    pub(crate) fn dtype(&self) -> PyResult<Dtype> {
        match self.block.kind {
            Kind::Element(dtype) => Ok(dtype),
            Kind::Bool => Err(wrong_dtype(self.block.name, "bool").into()),
        }
    }

    /// Type of the elements of a mask.
    pub(crate) const fn mask_kind(&self) -> MaskKind {
        match self.block.kind {
            Kind::Element(dtype) => MaskKind::Additive(dtype),
            Kind::Bool => MaskKind::Bool,
        }
    }

    /// The shape `[batch, heads, rows, dim]` of a tensor.
    pub(crate) fn sizes(&self, axes: Axes) -> PyResult<[usize; 4]> {
        Ok(self.block.logical(axes)?.1)
    }

    /// Dense memory as a list of f32 that is written.
    pub(crate) fn list_mut(&mut self, others: &[&Self]) -> PyResult<&mut [f32]> {
        self.check_place(Place::Host)?;
        // SAFETY: as for `view_mut`.
        Ok(unsafe { self.block.list_mut(&blocks(others))? })
    }

    /// The memory as a mask of one, two or four axes.
    pub(crate) fn mask(&self) -> PyResult<MaskView<'_>> {
        self.check_place(Place::Host)?;
        // SAFETY: as for `view`; the first element and the last are in one allocation, and so is what lies between them.
        Ok(unsafe { self.block.mask()? })
    }
}

/// The storage of a tensor of PyTorch, which may be smaller than the tensor since it was resized.
struct Storage<'py> {
    object: Bound<'py, PyAny>,
    start: usize,
    bytes: usize,
}

impl<'py> Storage<'py> {
    /// `None` where the library has no such thing.
    fn of(name: &str, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let py = tensor.py();
        let without_memory = |error| PyBufferError::new_err(format!("{name} has no memory: {error}"));
        let object = match tensor.call_method0(intern!(py, "untyped_storage")) {
            Err(error) if error.is_instance_of::<PyAttributeError>(py) => return Ok(None),
            object => object.map_err(without_memory)?,
        };
        let start = object.call_method0(intern!(py, "data_ptr")).map_err(without_memory)?.extract()?;
        let bytes = object.call_method0(intern!(py, "nbytes"))?.extract()?;
        Ok(Some(Self { object, start, bytes }))
    }

    /// Bytes from an element on: none where the storage does not have it, as after it was freed.
    fn bytes_from(&self, first: *mut u8) -> usize {
        let end = self.start.saturating_add(self.bytes);
        if (self.start..=end).contains(&(first as usize)) { end - first as usize } else { 0 }
    }
}

pub(crate) fn blocks<'a>(of: &[&'a Memory]) -> Vec<&'a Block> {
    of.iter().map(|memory| &memory.block).collect()
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
