//! Tensors on GPUs, read in place by launches that are ordered with candle's kernels.

#![allow(unsafe_code, reason = "memory for results is uninitialised")]

use crate::options::{Mask, Options};
use crate::storage::{
    Axes, CallAxes, Qkv, Stored, check_inside, check_no_gradient, counted, logical, logical_mask, read,
};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Error, Result, Shape, Storage, Tensor, bail};
use flashtile::gpu::{
    Engine, GpuInputs, GpuKv, GpuMask, GpuTensor, GpuTensorMut, MemoryOf, Session, scalar_type,
};
use flashtile::kernel::{DeviceMemory, ScalarType, Span, View, ViewMut};
use flashtile::tensor::ViewError;
use flashtile::{Dtype, MaskKind, ProblemDesc};
use std::fmt;

/// candle's storage on devices of one kind, and how flashtile computes there.
pub(crate) trait GpuStorage: BackendStorage<Device: BackendDevice<Storage = Self>> + 'static {
    /// Computes attention on such a device.
    type Engine: Engine<Error: Into<flashtile::Error>>;
    /// Orders the use of lent memory with work elsewhere. It lives until the launches that use the memory are on the stream.
    type Guard<'a>;

    /// Calls a function with the session of a candle device, and with flashtile's device on the same stream.
    fn with_session<T>(
        device: &Self::Device,
        run: impl FnOnce(&mut Session<Self::Engine>, &DeviceOf<Self>) -> Result<T>,
    ) -> Result<T>;

    /// Calls a function whose launches go to the stream or the encoder of a candle device.
    fn launch(
        session: &mut Session<Self::Engine>,
        device: &Self::Device,
        run: impl FnOnce(&mut Session<Self::Engine>) -> Result<()>,
    ) -> Result<()>;

    /// Lends all bytes to launches that read them.
    fn lend<'a>(&'a self, on: &'a DeviceOf<Self>) -> Result<(Memory<Self>, Self::Guard<'a>)>;

    /// Lends all bytes of storage that nothing else refers to yet, to launches that write them.
    fn lend_mut<'a>(&'a mut self, on: &'a DeviceOf<Self>) -> Result<(Memory<Self>, Self::Guard<'a>)>;

    /// Converts to the storage that candle's tensors have.
    fn into_storage(self) -> Storage;
}

/// flashtile's device.
pub(crate) type DeviceOf<S> = <<S as GpuStorage>::Engine as Engine>::Device;

/// Memory of flashtile's device.
pub(crate) type Memory<S> = MemoryOf<<S as GpuStorage>::Engine>;

/// Checks that all tensors of a call are on its device, and that none needs a gradient that the call does not give; makes its lists dense.
pub(crate) fn prepare(tensors: Qkv<&Tensor>, options: &mut Options, device: &Device) -> Result<()> {
    tensors.each(|name, tensor| check_same_device(name, tensor, device))?;
    let list =
        |name, of: Option<Tensor>, axes| of.map(|tensor| dense_list(name, &tensor, axes, device)).transpose();
    options.alibi_slopes = list("alibi_slopes", options.alibi_slopes.take(), 2)?;
    options.sinks = list("sinks", options.sinks.take(), 1)?;
    match &options.mask {
        None => {}
        Some(Mask::Visible(mask)) => check_same_device("mask", mask, device)?,
        Some(Mask::Additive(mask)) => {
            check_no_gradient("mask", mask)?;
            check_same_device("mask", mask, device)?;
        }
    }
    if options.lse {
        tensors.each(check_no_gradient)?;
    }
    Ok(())
}

pub(crate) fn check_same_device(name: &str, tensor: &Tensor, device: &Device) -> Result<()> {
    if tensor.device().same_device(device) {
        return Ok(());
    }
    // Two candle devices may share one GPU and have their own streams or queues.
    let (got, expected) = (tensor.device(), device.location());
    if got.location() == expected {
        bail!("{name} is on another candle device of {expected:?} than q, k or v: make all tensors on one")
    }
    bail!("{name} is on {:?}, and q, k or v on {expected:?}: move it with to_device", got.location())
}

/// A list of contiguous f32 elements on the device.
fn dense_list(name: &str, tensor: &Tensor, axes: usize, device: &Device) -> Result<Tensor> {
    check_same_device(name, tensor, device)?;
    check_no_gradient(name, tensor)?;
    match (tensor.dtype(), tensor.rank()) {
        (DType::F32, rank) if rank > 0 && rank <= axes => tensor.contiguous(),
        (dtype, _) => {
            bail!("{name} is {dtype:?} of shape {:?}, expected F32 of {}", tensor.dims(), counted(axes))
        }
    }
}

/// Names the tensor in an error of its view.
pub(crate) fn of(name: &str, error: impl fmt::Display) -> Error {
    Error::msg(format!("{name}: {error}"))
}

impl<'a, S: GpuStorage> Stored<'a, S> {
    pub(crate) fn dtype(&self, expected: &str) -> Result<Dtype> {
        match self.storage.dtype() {
            DType::F32 => Ok(Dtype::F32),
            DType::F16 => Ok(Dtype::F16),
            DType::BF16 => Ok(Dtype::BF16),
            _ => Err(self.unexpected(expected)),
        }
    }

    /// Lends the memory from the first element on, as elements of a type.
    fn lend(
        &self,
        on: &'a DeviceOf<S>,
        element: ScalarType,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Lent<'a, S>> {
        let (memory, guard) = self.storage.lend(on).map_err(|error| of(self.name, error))?;
        let (bytes, size) = (memory.view().len(), self.storage.dtype().size_in_bytes());
        let mut start = 0;
        // The offset of a tensor without elements may lie past the end.
        if self.layout.shape().elem_count() > 0 {
            check_inside(self.name, self.layout, bytes / size)?;
            start = self.layout.start_offset() * size;
        }
        let (offset, len) = (start / element.bytes(), (bytes - start) / element.bytes());
        let span = Span { element, offset, len };
        Ok(Lent { name: self.name, memory, span, shape, strides, _guard: guard })
    }

    /// Lends the tensor as elements, without a copy. Any strides are accepted, but elements of `dim` must be contiguous.
    pub(crate) fn elements(&self, on: &'a DeviceOf<S>, axes: Axes) -> Result<Lent<'a, S>> {
        let (shape, strides) = logical(self.name, self.layout, axes)?;
        self.lend(on, scalar_type(self.dtype("F32, F16 or BF16")?), shape, strides)
    }

    /// Lends the tensor as a list of f32; [`prepare`] has made it dense.
    pub(crate) fn list(&self, on: &'a DeviceOf<S>) -> Result<Lent<'a, S>> {
        let len = self.layout.shape().elem_count();
        let mut list = self.lend(on, ScalarType::F32, [1, 1, 1, len], [len, len, len, 1])?;
        list.span.len = len;
        Ok(list)
    }

    /// Lends the tensor as a mask: its elements are added to scores or, if `visible`, are bytes that say which keys are visible.
    pub(crate) fn mask(&self, on: &'a DeviceOf<S>, visible: bool) -> Result<(Lent<'a, S>, MaskKind)> {
        let (shape, strides) = logical_mask(self.layout)?;
        let kind = match (visible, self.storage.dtype()) {
            (true, DType::U8) => MaskKind::Bool,
            (true, _) => return Err(self.unexpected("U8, where 1 is visible")),
            (false, _) => MaskKind::Additive(self.dtype("F32, F16 or BF16, which is added to scores")?),
        };
        Ok((self.lend(on, ScalarType::U8, shape, strides)?, kind))
    }
}

/// A tensor as flashtile sees it, in memory that the launches of a call use.
pub(crate) struct Lent<'a, S: GpuStorage> {
    name: &'static str,
    memory: Memory<S>,
    /// The elements from the tensor's first one on.
    span: Span,
    pub(crate) shape: [usize; 4],
    pub(crate) strides: [usize; 4],
    _guard: S::Guard<'a>,
}

impl<S: GpuStorage> Lent<'_, S> {
    pub(crate) fn view(&self) -> View<'_, Memory<S>> {
        View::new(&self.memory, self.span)
    }

    pub(crate) fn tensor(&self) -> Result<GpuTensor<'_, Memory<S>>> {
        GpuTensor::new(self.view(), self.shape, self.strides).map_err(|error| of(self.name, error))
    }

    fn kv(&self) -> Result<GpuKv<'_, Memory<S>>> {
        GpuKv::elements(self.tensor()?).map_err(|error| of(self.name, error))
    }
}

/// Tensors of a call, locked for reading.
pub(crate) struct Tensors<'a, S> {
    pub(crate) qkv: Qkv<Stored<'a, S>>,
    slopes: Option<Stored<'a, S>>,
    sinks: Option<Stored<'a, S>>,
    mask: Option<Stored<'a, S>>,
}

/// Calls a function with the memory of a tensor, if there is a tensor.
fn read_option<S: 'static, T>(
    name: &'static str,
    tensor: Option<&Tensor>,
    run: impl FnOnce(Option<Stored<'_, S>>) -> Result<T>,
) -> Result<T> {
    match tensor {
        None => run(None),
        Some(tensor) => read(name, tensor, |stored| run(Some(stored))),
    }
}

/// Calls a function with the tensors of a call: q, k, v and the options'.
pub(crate) fn with_options<S: 'static, T>(
    options: &Options,
    qkv: Qkv<Stored<'_, S>>,
    run: impl FnOnce(&Tensors<'_, S>) -> Result<T>,
) -> Result<T> {
    let mask = options.mask.as_ref().map(|mask| match mask {
        Mask::Visible(tensor) | Mask::Additive(tensor) => tensor,
    });
    read_option("alibi_slopes", options.alibi_slopes.as_ref(), |slopes| {
        read_option("sinks", options.sinks.as_ref(), |sinks| {
            read_option("mask", mask, |mask| run(&Tensors { qkv, slopes, sinks, mask }))
        })
    })
}

/// Tensors of a call, in memory that its launches read.
pub(crate) struct LentTensors<'a, S: GpuStorage> {
    pub(crate) dtype: Dtype,
    pub(crate) q: Lent<'a, S>,
    pub(crate) k: Lent<'a, S>,
    pub(crate) v: Lent<'a, S>,
    pub(crate) slopes: Option<Lent<'a, S>>,
    pub(crate) sinks: Option<Lent<'a, S>>,
    mask: Option<(Lent<'a, S>, MaskKind)>,
}

impl<'a, S: GpuStorage> Tensors<'a, S> {
    /// Lends the tensors of a call with these options, whose q, k and v have these axes.
    pub(crate) fn lend(
        &self,
        on: &'a DeviceOf<S>,
        axes: CallAxes,
        options: &Options,
    ) -> Result<LentTensors<'a, S>> {
        let Qkv { q, k, v } = &self.qkv;
        let list = |list: &Option<Stored<'a, S>>| list.as_ref().map(|list| list.list(on)).transpose();
        let visible = matches!(options.mask, Some(Mask::Visible(_)));
        Ok(LentTensors {
            dtype: q.dtype("F32, F16 or BF16")?,
            q: q.elements(on, axes.q)?,
            k: k.elements(on, axes.kv)?,
            v: v.elements(on, axes.kv)?,
            slopes: list(&self.slopes)?,
            sinks: list(&self.sinks)?,
            mask: self.mask.as_ref().map(|mask| mask.mask(on, visible)).transpose()?,
        })
    }
}

impl<S: GpuStorage> LentTensors<'_, S> {
    /// The problem of a call with these options.
    pub(crate) fn desc(&self, options: &Options) -> Result<ProblemDesc> {
        options.check_slopes(self.q.shape[1])?;
        let shapes = Qkv { q: self.q.shape, k: self.k.shape, v: self.v.shape };
        let mut desc = options.desc(self.dtype, shapes);
        desc.mask = self.mask.as_ref().map(|(_, kind)| *kind);
        Ok(desc)
    }

    pub(crate) fn mask(&self) -> Result<Option<GpuMask<'_, Memory<S>>>> {
        let Some((mask, kind)) = &self.mask else { return Ok(None) };
        let view = GpuMask::new(*kind, mask.view(), mask.shape, mask.strides);
        view.map(Some).map_err(|error| of("mask", error))
    }

    /// The inputs of a forward run.
    pub(crate) fn inputs(&self) -> Result<GpuInputs<'_, Memory<S>>> {
        let mut inputs = GpuInputs::new(self.q.tensor()?, self.k.kv()?, self.v.kv()?);
        inputs.alibi_slopes = self.slopes.as_ref().map(Lent::view);
        inputs.sinks = self.sinks.as_ref().map(Lent::view);
        inputs.mask = self.mask()?;
        Ok(inputs)
    }
}

/// A new tensor.
pub(crate) struct NewTensor<S> {
    storage: S,
    dims: Shape,
    dtype: Dtype,
    /// `[batch, heads, rows, dim]`.
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<S: GpuStorage> NewTensor<S> {
    /// A dense tensor of a shape `[batch, heads, rows, dim]`, in the order of these axes.
    pub(crate) fn new(device: &S::Device, shape: [usize; 4], axes: Axes, dtype: Dtype) -> Result<Self> {
        let (dims, strides) = axes.dense(shape);
        Ok(Self { storage: uninit::<S>(device, &dims, dtype)?, dims, dtype, shape, strides })
    }

    /// Lends the tensor to launches that write it.
    pub(crate) fn lend<'a>(&'a mut self, on: &'a DeviceOf<S>) -> Result<LentMut<'a, S>> {
        let Self { storage, dims, dtype, shape, strides } = self;
        let span = Span { element: scalar_type(*dtype), offset: 0, len: dims.elem_count() };
        let (memory, guard) = storage.lend_mut(on)?;
        Ok(LentMut { memory, span, shape: *shape, strides: *strides, _guard: guard })
    }

    /// Storage and shape, once launches that write the tensor are queued.
    pub(crate) fn into_parts(self) -> (S, Shape) {
        (self.storage, self.dims)
    }

    /// The tensor, once launches that write it are queued.
    pub(crate) fn into_tensor(self) -> Tensor {
        Tensor::from_storage(self.storage.into_storage(), self.dims, BackpropOp::none(), false)
    }
}

/// A [`NewTensor`], in memory that launches write.
pub(crate) struct LentMut<'a, S: GpuStorage> {
    memory: Memory<S>,
    span: Span,
    shape: [usize; 4],
    strides: [usize; 4],
    _guard: S::Guard<'a>,
}

impl<S: GpuStorage> LentMut<'_, S> {
    pub(crate) fn tensor(&mut self) -> std::result::Result<GpuTensorMut<'_, Memory<S>>, ViewError> {
        GpuTensorMut::new(ViewMut::new(&mut self.memory, self.span), self.shape, self.strides)
    }
}

/// New memory from candle.
pub(crate) fn uninit<S: GpuStorage>(device: &S::Device, dims: &Shape, dtype: Dtype) -> Result<S> {
    let dtype = match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
    };
    // SAFETY: nothing else refers to the memory until launches that write all of it are on the stream.
    unsafe { device.alloc_uninit(dims, dtype) }
}

/// The first elements of new memory.
pub(crate) fn first<M>(memory: &mut M, dtype: Dtype, len: usize) -> ViewMut<'_, M> {
    ViewMut::new(memory, Span { element: scalar_type(dtype), offset: 0, len })
}
