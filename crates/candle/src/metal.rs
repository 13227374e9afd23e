//! Tensors on Metal devices: read where they are, by launches in the encoder of candle's device.
//!
//! candle allocates buffers whose hazards Metal does not track, and gives one concurrent encoder to all of its kernels. Its
//! [`ComputeCommandEncoder`] puts a barrier where a launch uses what another writes, and fences between encoders, by what it is told of each
//! buffer. Launches go through it, so that it knows theirs as it knows candle's own.

#![allow(unsafe_code, reason = "flashtile borrows buffers, and an encoder, of candle's")]

use crate::gpu::{check_inside, desc, prepare};
use crate::options::{Mask, Options};
use crate::storage::{Axes, Qkv, logical, logical_mask, lse_dims, refused_shape};
use candle_core::backend::BackendStorage;
use candle_core::metal_backend::DeviceId;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp3, DType, Device, Error, Layout, MetalDevice, MetalStorage, Result, Shape,
    Storage, Tensor, bail,
};
use candle_metal_kernels::metal::{Buffer, ComputeCommandEncoder, ComputePipeline};
use flashtile::kernel::Span;
use flashtile::metal::objc2::Message;
use flashtile::metal::objc2::rc::Retained;
use flashtile::metal::objc2::runtime::ProtocolObject;
use flashtile::metal::objc2_metal::{MTLBuffer, MTLComputePipelineState, MTLSize};
use flashtile::metal::{
    ForeignEncoder, Gpu, Memory, Metal, MetalError, MetalInputs, MetalKv, MetalMask, MetalOutputs,
    ScalarType, Session, SessionError, View, kv, tensor, tensor_mut,
};
use flashtile::{Dtype, MaskKind, ProblemDesc};
use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Devices of candle whose sessions are kept: more than a program uses at a time.
const MAX_DEVICES: usize = 4;

/// A session for each device of candle, most recently used first. Threads share it: all encode into the device's one encoder, in order.
static SESSIONS: Mutex<Vec<(DeviceId, Session)>> = Mutex::new(Vec::new());

/// Attention over tensors of a device, and the logsumexp where the options ask for it.
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
    let lse = Tensor::from_storage(Storage::Metal(lse), lse_dims(axes.q, q)?, BackpropOp::none(), false);
    Ok((out, Some(lse)))
}

/// Calls a function with the session of a device.
fn with_session<T>(device: &MetalDevice, run: impl FnOnce(&mut Session) -> Result<T>) -> Result<T> {
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let at = match sessions.iter().position(|(id, _)| *id == device.id()) {
        Some(at) => at,
        None => {
            let metal = Metal::with_device(device.metal_device().as_ref().retain()).map_err(refused)?;
            sessions.truncate(MAX_DEVICES - 1);
            sessions.push((device.id(), metal.session()));
            sessions.len() - 1
        }
    };
    sessions[..=at].rotate_right(1);
    run(&mut sessions[0].1)
}

/// An error of the backend as one of candle.
fn refused(error: MetalError) -> Error {
    crate::storage::refused(error)
}

/// Metal's own buffer.
fn own(buffer: &Buffer) -> Retained<ProtocolObject<dyn MTLBuffer>> {
    let own: &ProtocolObject<dyn MTLBuffer> = buffer.as_ref();
    own.retain()
}

/// An error of a view of a tensor.
fn of(name: &str, error: impl fmt::Display) -> Error {
    Error::msg(format!("{name}: {error}"))
}

/// The encoder of candle's device.
struct Encoder(ComputeCommandEncoder);

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").finish_non_exhaustive()
    }
}

// SAFETY: candle lends its encoder under a lock, which is held while this value exists, so that one thread at a time uses it; counting
// references of Objective-C objects is atomic.
unsafe impl Send for Encoder {}

// SAFETY: every call is candle's own function for it, in order. candle's encoder puts a barrier before a launch that uses a buffer which one
// before it writes, or writes one that is used, and its device has encoders wait for the fences of those before.
unsafe impl ForeignEncoder for Encoder {
    fn set_pipeline(&mut self, pipeline: &ProtocolObject<dyn MTLComputePipelineState>) {
        self.0.set_compute_pipeline_state(&ComputePipeline::new(pipeline.retain()));
    }

    fn set_buffer(
        &mut self,
        index: usize,
        buffer: &ProtocolObject<dyn MTLBuffer>,
        offset: usize,
        writes: bool,
    ) {
        // candle knows a buffer by the address of Metal's object.
        let buffer = Buffer::new(buffer.retain());
        if writes {
            self.0.set_output_buffer(index, Some(&buffer), offset);
        } else {
            self.0.set_input_buffer(index, Some(&buffer), offset);
        }
    }

    fn set_bytes(&mut self, index: usize, bytes: &[u8]) {
        self.0.set_bytes_directly(index, bytes.len(), bytes.as_ptr().cast());
    }

    fn dispatch(&mut self, groups: MTLSize, threads: MTLSize) {
        self.0.dispatch_thread_groups(groups, threads);
    }
}

/// A tensor of a device, and how it is laid out.
#[derive(Debug, Clone, Copy)]
struct Stored<'a> {
    name: &'static str,
    storage: &'a MetalStorage,
    layout: &'a Layout,
}

impl Stored<'_> {
    fn unexpected(&self, expected: &str) -> Error {
        Error::msg(format!("{} is {:?}, expected {expected}", self.name, self.storage.dtype()))
    }

    fn dtype(&self, expected: &str) -> Result<Dtype> {
        match self.storage.dtype() {
            DType::F32 => Ok(Dtype::F32),
            DType::F16 => Ok(Dtype::F16),
            DType::BF16 => Ok(Dtype::BF16),
            _ => Err(self.unexpected(expected)),
        }
    }

    /// The buffer from the first element on, as elements of this type.
    fn memory(&self, gpu: &Gpu, element: ScalarType) -> Result<Memory> {
        let (buffer, size) = (self.storage.buffer(), self.storage.dtype().size_in_bytes());
        let mut start = 0;
        // The offset of a tensor without elements may lie past the end.
        if self.layout.shape().elem_count() > 0 {
            check_inside(self.name, self.layout, buffer.length() / size)?;
            start = self.layout.start_offset() * size;
        }
        let len = (buffer.length() - start) / element.bytes();
        // SAFETY: candle's encoder orders all work on the buffer, which is hazard-untracked, as it is told of each launch; the CPU writes to
        // no buffer of a tensor.
        unsafe { gpu.borrow(own(buffer), start, element, len) }.map_err(|e| of(self.name, e))
    }

    /// The tensor, one of those that [`prepare`] has made dense, as a list of f32.
    fn list(&self, gpu: &Gpu) -> Result<List> {
        let (memory, len) = (self.memory(gpu, ScalarType::F32)?, self.layout.shape().elem_count());
        Ok(List { memory, len })
    }

    /// The tensor as elements: no copy, whatever its strides, except that elements of `dim` are contiguous.
    fn elements(&self, gpu: &Gpu, axes: Axes) -> Result<Elements> {
        let (shape, strides) = logical(self.name, self.layout, axes)?;
        let dtype = self.dtype("F32, F16 or BF16")?;
        let memory = self.memory(gpu, scalar_type(dtype))?;
        Ok(Elements { name: self.name, memory, dtype, shape, strides })
    }

    /// The tensor as a mask whose elements are added to scores, or, of bytes, say which keys are visible.
    fn mask(&self, gpu: &Gpu, visible: bool) -> Result<Masking> {
        let (shape, strides) = logical_mask(self.layout)?;
        let kind = match (visible, self.storage.dtype()) {
            (true, DType::U8) => MaskKind::Bool,
            (true, _) => return Err(self.unexpected("U8, where 1 is visible")),
            (false, _) => MaskKind::Additive(self.dtype("F32, F16 or BF16, which is added to scores")?),
        };
        Ok(Masking { memory: self.memory(gpu, ScalarType::U8)?, kind, shape, strides })
    }
}

const fn scalar_type(dtype: Dtype) -> ScalarType {
    match dtype {
        Dtype::F32 => ScalarType::F32,
        Dtype::F16 => ScalarType::F16,
        Dtype::BF16 => ScalarType::Bf16,
    }
}

/// A tensor as flashtile sees it: `[batch, heads, rows, dim]`.
struct Elements {
    name: &'static str,
    memory: Memory,
    dtype: Dtype,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Elements {
    fn kv(&self) -> Result<MetalKv<'_, Memory>> {
        kv(&self.memory, self.shape, self.strides).map_err(|error| of(self.name, error))
    }
}

/// A list of f32.
struct List {
    memory: Memory,
    len: usize,
}

impl List {
    fn view(&self) -> View<'_, Memory> {
        View::new(&self.memory, Span { element: ScalarType::F32, offset: 0, len: self.len })
    }
}

/// A mask as flashtile sees it.
struct Masking {
    memory: Memory,
    kind: MaskKind,
    shape: [usize; 4],
    strides: [usize; 4],
}

/// Optional inputs of a call.
struct Extras<'a> {
    slopes: Option<Stored<'a>>,
    sinks: Option<Stored<'a>>,
    mask: Option<Stored<'a>>,
}

/// Attention as an operator of candle. While it runs, the tensors are locked for reading.
struct Op {
    name: &'static str,
    options: Options,
    /// Where the logsumexp is put.
    lse: Arc<Mutex<Option<MetalStorage>>>,
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
        bail!("{} was made for tensors on a Metal device", self.name)
    }

    fn metal_fwd(
        &self,
        s1: &MetalStorage,
        l1: &Layout,
        s2: &MetalStorage,
        l2: &Layout,
        s3: &MetalStorage,
        l3: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        let tensors = Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) };
        let tensors = tensors.each(|name, (storage, layout)| Ok(Stored { name, storage, layout }))?;
        let mask = self.options.mask.as_ref().map(|mask| match mask {
            Mask::Visible(tensor) | Mask::Additive(tensor) => tensor,
        });
        let device = s1.device();
        read("alibi_slopes", self.options.alibi_slopes.as_ref(), |slopes| {
            read("sinks", self.options.sinks.as_ref(), |sinks| {
                read("mask", mask, |mask| {
                    let extras = Extras { slopes, sinks, mask };
                    with_session(device, |session| self.run(session, device, tensors, &extras))
                })
            })
        })
    }
}

impl Op {
    fn run(
        &self,
        session: &mut Session,
        device: &MetalDevice,
        tensors: Qkv<Stored<'_>>,
        extras: &Extras<'_>,
    ) -> Result<(MetalStorage, Shape)> {
        let (gpu, axes) = (session.gpu().clone(), self.options.axes());
        let q = tensors.q.elements(&gpu, axes.q)?;
        let (k, v) = (tensors.k.elements(&gpu, axes.kv)?, tensors.v.elements(&gpu, axes.kv)?);
        let mut desc = desc(&self.options, q.dtype, Qkv { q: q.shape, k: k.shape, v: v.shape });
        let list = |of: Option<Stored<'_>>| of.map(|list| list.list(&gpu)).transpose();
        let (slopes, sinks) = (list(extras.slopes)?, list(extras.sinks)?);
        let visible = matches!(self.options.mask, Some(Mask::Visible(_)));
        let mask = extras.mask.map(|mask| mask.mask(&gpu, visible)).transpose()?;
        desc.mask = mask.as_ref().map(|mask| mask.kind);
        let view = tensor(&q.memory, q.shape, q.strides).map_err(|error| of("q", error))?;
        let mut inputs = MetalInputs::new(view, k.kv()?, v.kv()?);
        inputs.alibi_slopes = slopes.as_ref().map(List::view);
        inputs.sinks = sinks.as_ref().map(List::view);
        inputs.mask = mask.as_ref().map(|mask| MetalMask {
            bytes: mask.memory.view(),
            kind: mask.kind,
            shape: mask.shape,
            strides: mask.strides,
        });
        self.run_in(session, device, &desc, &inputs)
    }

    /// Encodes the kernels of the problem, which write new tensors.
    fn run_in(
        &self,
        session: &mut Session,
        device: &MetalDevice,
        desc: &ProblemDesc,
        inputs: &MetalInputs<'_, Memory>,
    ) -> Result<(MetalStorage, Shape)> {
        // A wrong problem is refused before there is memory for its result.
        session.plan(desc).map_err(refused)?;
        let shape = desc.dims.out_shape();
        let (dims, strides) = self.options.axes().q.dense(shape);
        let (out, mut memory) = new(session.gpu(), device, desc.dtype, dims.elem_count())?;
        let view = tensor_mut(&mut memory, shape, strides).map_err(|error| of("out", error))?;
        let mut outputs = MetalOutputs::new(view);
        let rows = shape[0] * shape[1] * shape[2];
        let lse = self.options.lse.then(|| new(session.gpu(), device, Dtype::F32, rows));
        let (lse, mut lse_memory) = lse.transpose()?.unzip();
        outputs.lse = lse_memory.as_mut().map(Memory::view_mut);
        self.encode(session, device, desc, inputs, &mut outputs)?;
        if let Some(lse) = lse {
            *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = Some(lse);
        }
        Ok((out, dims))
    }

    /// Encodes the kernels of the problem into candle's encoder.
    fn encode(
        &self,
        session: &mut Session,
        device: &MetalDevice,
        desc: &ProblemDesc,
        inputs: &MetalInputs<'_, Memory>,
        outputs: &mut MetalOutputs<'_, Memory>,
    ) -> Result<()> {
        let commands = device.command_encoder()?;
        let encoder = Box::new(Encoder(commands.as_ref().clone()));
        // SAFETY: the encoder is candle's open one, which `commands` keeps from others, and candle's command buffers retain what they use.
        let encoded = unsafe {
            session.encode_in_foreign(encoder, |session| match &self.options.tables {
                None => session.run(desc, inputs, outputs),
                Some(tables) => session.run_paged(desc, inputs, tables, outputs),
            })
        };
        // Until here, nothing else may encode.
        drop(commands);
        encoded.map_err(|error| match error {
            SessionError::Inputs(error) => refused_shape(error, self.options.axes()),
            error => refused(error),
        })
    }
}

/// New memory of candle's for `len` elements, and the same to write to.
fn new(gpu: &Gpu, device: &MetalDevice, dtype: Dtype, len: usize) -> Result<(MetalStorage, Memory)> {
    let of_candle = match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
    };
    let buffer = device.new_buffer_builder().with_size_for(len, of_candle).build()?;
    // SAFETY: no other tensor has the buffer. candle may have used it for one before: its encoder orders that work and the launch, as it is
    // told of both.
    let memory = unsafe { gpu.borrow(own(&buffer), 0, scalar_type(dtype), len) };
    let memory = memory.map_err(|error| of("out", error))?;
    Ok((MetalStorage::new(buffer, device.clone(), len, of_candle), memory))
}

/// A function that runs once, with the memory of a tensor.
struct Read<F> {
    name: &'static str,
    run: Cell<Option<F>>,
}

impl<F: FnOnce(Stored<'_>)> CustomOp1 for Read<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{} is not on a Metal device", self.name)
    }

    fn metal_fwd(&self, storage: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        if let Some(run) = self.run.take() {
            run(Stored { name: self.name, storage, layout });
        }
        // An operator gives a tensor. This one has none, and memory for it would be allocated in vain.
        Err(Error::Msg(String::new()))
    }
}

/// Calls a function with the memory of a tensor, if there is one, which is locked for reading. Unlike `Tensor::storage_and_layout`, this
/// cannot wait for itself where another tensor of the same memory is locked already.
fn read<T>(
    name: &'static str,
    tensor: Option<&Tensor>,
    run: impl FnOnce(Option<Stored<'_>>) -> Result<T>,
) -> Result<T> {
    let Some(tensor) = tensor else { return run(None) };
    let mut result = None;
    let keep = |stored: Stored<'_>| result = Some(run(Some(stored)));
    let ended = tensor.apply_op1_no_bwd(&Read { name, run: Cell::new(Some(keep)) });
    result.unwrap_or_else(|| match ended {
        Err(error) => Err(error),
        Ok(_) => Err(Error::msg(format!("{name} was not read"))),
    })
}
