//! Tensors on GPUs, read in place by launches that are ordered with candle's kernels.

#![allow(unsafe_code, reason = "memory for results is uninitialised")]

use crate::options::{Mask, Options};
use crate::storage::{
    Axes, Qkv, Stored, check_inside, check_no_gradient, counted, logical, logical_mask, lse_dims, read,
    refused, refused_shape,
};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
#[cfg(feature = "metal")]
use candle_core::MetalStorage;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp3, DType, Device, Error, Layout, Result, Shape, Storage, Tensor, bail,
};
use flashtile::gpu::{
    Engine, GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTensor, GpuTensorMut, MemoryOf, Session, scalar_type,
};
use flashtile::kernel::{DeviceMemory, ScalarType, Span, View, ViewMut};
use flashtile::{Dtype, MaskKind, ProblemDesc};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

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

/// Attention over tensors of a device, and the logsumexp if the options ask for it.
pub(crate) fn apply(
    name: &'static str,
    tensors: Qkv<&Tensor>,
    mut options: Options,
    device: &Device,
) -> Result<(Tensor, Option<Tensor>)> {
    prepare(tensors, &mut options, device)?;
    let (lse, wanted, axes) = (Arc::new(Mutex::new(None)), options.lse, options.axes());
    let Qkv { q, k, v } = tensors;
    let out = q.apply_op3(k, v, Op { name, options, lse: Arc::clone(&lse) })?;
    if !wanted {
        return Ok((out, None));
    }
    let lse = lse.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(lse) = lse else { bail!("{name} did not compute the logsumexp") };
    Ok((out, Some(Tensor::from_storage(lse, lse_dims(axes.q, q)?, BackpropOp::none(), false))))
}

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
fn of(name: &str, error: impl fmt::Display) -> Error {
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

/// Tensors of a call.
struct Tensors<'a, S> {
    qkv: Qkv<Stored<'a, S>>,
    slopes: Option<Stored<'a, S>>,
    sinks: Option<Stored<'a, S>>,
    mask: Option<Stored<'a, S>>,
}

/// Calls a function with the memory of a tensor, if there is a tensor.
pub(crate) fn read_option<S: 'static, T>(
    name: &'static str,
    tensor: Option<&Tensor>,
    run: impl FnOnce(Option<Stored<'_, S>>) -> Result<T>,
) -> Result<T> {
    match tensor {
        None => run(None),
        Some(tensor) => read(name, tensor, |stored| run(Some(stored))),
    }
}

/// Attention as an operator of candle. While it runs, the tensors are locked for reading.
struct Op {
    name: &'static str,
    options: Options,
    /// Receives the logsumexp.
    lse: Arc<Mutex<Option<Storage>>>,
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("{} was made for tensors on a GPU", self.name)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        s3: &CudaStorage,
        l3: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.forward(Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) })
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        s1: &MetalStorage,
        l1: &Layout,
        s2: &MetalStorage,
        l2: &Layout,
        s3: &MetalStorage,
        l3: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.forward(Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) })
    }
}

impl Op {
    fn forward<S: GpuStorage>(&self, tensors: Qkv<(&S, &Layout)>) -> Result<(S, Shape)> {
        let qkv = tensors.stored();
        let device = qkv.q.storage.device();
        let mask = self.options.mask.as_ref().map(|mask| match mask {
            Mask::Visible(tensor) | Mask::Additive(tensor) => tensor,
        });
        read_option("alibi_slopes", self.options.alibi_slopes.as_ref(), |slopes| {
            read_option("sinks", self.options.sinks.as_ref(), |sinks| {
                read_option("mask", mask, |mask| {
                    let tensors = Tensors { qkv, slopes, sinks, mask };
                    S::with_session(device, |session, on| self.run(session, on, &tensors))
                })
            })
        })
    }

    fn run<S: GpuStorage>(
        &self,
        session: &mut Session<S::Engine>,
        on: &DeviceOf<S>,
        tensors: &Tensors<'_, S>,
    ) -> Result<(S, Shape)> {
        let (axes, Qkv { q, k, v }) = (self.options.axes(), &tensors.qkv);
        let (q, k, v) = (q.elements(on, axes.q)?, k.elements(on, axes.kv)?, v.elements(on, axes.kv)?);
        let dtype = tensors.qkv.q.dtype("F32, F16 or BF16")?;
        self.options.check_slopes(q.shape[1])?;
        let mut desc = self.options.desc(dtype, Qkv { q: q.shape, k: k.shape, v: v.shape });
        let slopes = tensors.slopes.as_ref().map(|list| list.list(on)).transpose()?;
        let sinks = tensors.sinks.as_ref().map(|list| list.list(on)).transpose()?;
        let visible = matches!(self.options.mask, Some(Mask::Visible(_)));
        let mask = tensors.mask.as_ref().map(|mask| mask.mask(on, visible)).transpose()?;
        let mut inputs = GpuInputs::new(q.tensor()?, k.kv()?, v.kv()?);
        inputs.alibi_slopes = slopes.as_ref().map(Lent::view);
        inputs.sinks = sinks.as_ref().map(Lent::view);
        if let Some((mask, kind)) = &mask {
            let view = GpuMask::new(*kind, mask.view(), mask.shape, mask.strides);
            inputs.mask = Some(view.map_err(|error| of("mask", error))?);
            desc.mask = Some(*kind);
        }
        self.run_in(session, on, tensors.qkv.q.storage.device(), &desc, &inputs)
    }

    /// Launches the kernels of the problem, which write new tensors.
    fn run_in<S: GpuStorage>(
        &self,
        session: &mut Session<S::Engine>,
        on: &DeviceOf<S>,
        device: &S::Device,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, Memory<S>>,
    ) -> Result<(S, Shape)> {
        // An invalid problem is refused before memory is allocated for its result.
        session.plan(desc).map_err(refused)?;
        let (shape, axes) = (desc.dims.out_shape(), self.options.axes());
        let (dims, strides) = axes.q.dense(shape);
        let rows = shape[0] * shape[1] * shape[2];
        let mut out = uninit::<S>(device, &dims, desc.dtype)?;
        let lse = self.options.lse.then(|| uninit::<S>(device, &rows.into(), Dtype::F32));
        let mut lse = lse.transpose()?;
        {
            let (mut memory, _guard) = out.lend_mut(on)?;
            let mut lent_lse = lse.as_mut().map(|lse| lse.lend_mut(on)).transpose()?;
            let view = first(&mut memory, desc.dtype, dims.elem_count());
            let view = GpuTensorMut::new(view, shape, strides).map_err(|error| of("out", error))?;
            let mut outputs = GpuOutputs::new(view);
            outputs.lse = lent_lse.as_mut().map(|(memory, _)| first(memory, Dtype::F32, rows));
            S::launch(session, device, |session| {
                let done = match &self.options.tables {
                    None => session.run(desc, inputs, &mut outputs),
                    Some(tables) => session.run_paged(desc, inputs, tables, &mut outputs),
                };
                done.map_err(|error| refused_shape(error, axes))
            })?;
        }
        if let Some(lse) = lse {
            *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = Some(lse.into_storage());
        }
        Ok((out, dims))
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
