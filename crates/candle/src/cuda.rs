//! Tensors on CUDA devices: read where they are, on the stream of their device.

#![allow(unsafe_code, reason = "flashtile takes device memory by its address")]

use crate::gpu::{check_inside, desc, prepare};
use crate::options::{Mask, Options};
use crate::storage::{Axes, CallAxes, Qkv, logical, logical_mask, lse_dims, refused, refused_shape};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, CustomOp3, DType, Device, Error, Layout, Result, Shape,
    Storage, Tensor, bail,
};
use flashtile::cuda::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use flashtile::cuda::{
    CudaError, DeviceInputs, DeviceList, DeviceListMut, DeviceMask, DeviceOutputs, DeviceTensor,
    DeviceTensorMut, Session,
};
use flashtile::{BlockTables, Dtype, MaskKind, ProblemDesc};
use half::{bf16, f16};
use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

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
    let lse = Tensor::from_storage(Storage::Cuda(lse), lse_dims(axes.q, q)?, BackpropOp::none(), false);
    Ok((out, Some(lse)))
}

/// Memory of a tensor on a device, and how it is laid out.
#[derive(Debug, Clone, Copy)]
struct Stored<'a> {
    name: &'static str,
    storage: &'a CudaStorage,
    layout: &'a Layout,
}

/// The stream of a call, and what keeps memory from other streams until its launches are on this one.
struct Order<'a> {
    stream: &'a Arc<CudaStream>,
    used: Vec<SyncOnDrop<'a>>,
}

impl<'a> Order<'a> {
    /// Address and length of memory that the call reads.
    fn read<T>(&mut self, slice: &'a CudaSlice<T>) -> (u64, usize) {
        let (at, used) = slice.device_ptr(self.stream);
        self.used.push(used);
        (at, slice.len())
    }
}

impl<'a> Stored<'a> {
    /// The address of the first element. Every element lies in the tensor's memory.
    fn address(&self, order: &mut Order<'a>) -> Result<u64> {
        let (at, len) = match &self.storage.slice {
            CudaStorageSlice::U8(slice) => order.read(slice),
            CudaStorageSlice::F32(slice) => order.read(slice),
            CudaStorageSlice::F16(slice) => order.read(slice),
            CudaStorageSlice::BF16(slice) => order.read(slice),
            _ => return Err(self.unexpected("U8, F32, F16 or BF16")),
        };
        if self.layout.shape().elem_count() == 0 {
            // Its offset may lie past the end.
            return Ok(at);
        }
        check_inside(self.name, self.layout, len)?;
        let bytes = self.layout.start_offset() * self.storage.dtype().size_in_bytes();
        Ok(at + bytes as u64)
    }

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

    /// The tensor as a view: no copy, whatever its strides, except that elements of `dim` are contiguous.
    fn view(&self, axes: Axes, order: &mut Order<'a>) -> Result<View<'a>> {
        let (shape, strides) = logical(self.name, self.layout, axes)?;
        let dtype = self.dtype("F32, F16 or BF16")?;
        let at = self.address(order)?;
        // SAFETY: `address` has checked that every element lies in the tensor's memory. candle frees memory on its stream, after the
        // work that is there, and has it locked against writing until the launch is there; later writes follow on the stream.
        let tensor = unsafe { DeviceTensor::from_raw_parts(dtype, at, shape, strides) };
        let tensor = tensor.map_err(|error| Error::msg(format!("{}: {error}", self.name)))?;
        Ok(View { tensor, dtype, shape })
    }

    /// The tensor as a mask whose elements are added to scores, or, of bytes, say which keys are visible.
    fn mask(&self, visible: bool, order: &mut Order<'a>) -> Result<(DeviceMask<'a>, MaskKind)> {
        let (shape, strides) = logical_mask(self.layout)?;
        let kind = match (visible, self.storage.dtype()) {
            (true, DType::U8) => MaskKind::Bool,
            (true, _) => return Err(self.unexpected("U8, where 1 is visible")),
            (false, _) => MaskKind::Additive(self.dtype("F32, F16 or BF16, which is added to scores")?),
        };
        let at = self.address(order)?;
        let mask = match kind {
            // SAFETY: as in `view`.
            MaskKind::Bool => unsafe { DeviceMask::bool(at, shape, strides) },
            // SAFETY: as in `view`.
            MaskKind::Additive(dtype) => unsafe { DeviceMask::additive_strided(dtype, at, shape, strides) },
        };
        Ok((mask.map_err(|error| Error::msg(format!("mask: {error}")))?, kind))
    }

    /// The tensor, one of [`dense_list`], as a list.
    fn list(&self, order: &mut Order<'a>) -> Result<DeviceList<'a>> {
        let at = self.address(order)?;
        // SAFETY: the elements are contiguous f32; otherwise as in `view`.
        unsafe { DeviceList::from_raw_parts(at, self.layout.shape().elem_count()) }.map_err(refused)
    }
}

/// A tensor as flashtile sees it.
struct View<'a> {
    tensor: DeviceTensor<'a>,
    dtype: Dtype,
    /// `[batch, heads, rows, dim]`
    shape: [usize; 4],
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
    lse: Arc<Mutex<Option<CudaStorage>>>,
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
        bail!("{} was made for tensors on a CUDA device", self.name)
    }

    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        s3: &CudaStorage,
        l3: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let tensors = Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) };
        let tensors = tensors.each(|name, (storage, layout)| Ok(Stored { name, storage, layout }))?;
        let mask = self.options.mask.as_ref().map(|mask| match mask {
            Mask::Visible(tensor) | Mask::Additive(tensor) => tensor,
        });
        read("alibi_slopes", self.options.alibi_slopes.as_ref(), |slopes| {
            read("sinks", self.options.sinks.as_ref(), |sinks| {
                read("mask", mask, |mask| self.run(tensors, &Extras { slopes, sinks, mask }))
            })
        })
    }
}

impl Op {
    fn run(&self, tensors: Qkv<Stored<'_>>, extras: &Extras<'_>) -> Result<(CudaStorage, Shape)> {
        let device = &tensors.q.storage.device;
        let stream = device.cuda_stream();
        let mut order = Order { stream: &stream, used: Vec::new() };
        let axes = self.options.axes();
        let q = tensors.q.view(axes.q, &mut order)?;
        let k = tensors.k.view(axes.kv, &mut order)?;
        let v = tensors.v.view(axes.kv, &mut order)?;
        let mut desc = desc(&self.options, q.dtype, Qkv { q: q.shape, k: k.shape, v: v.shape });
        let mut inputs = DeviceInputs::new(q.tensor, k.tensor, v.tensor);
        inputs.alibi_slopes = extras.slopes.map(|list| list.list(&mut order)).transpose()?;
        inputs.sinks = extras.sinks.map(|list| list.list(&mut order)).transpose()?;
        if let Some(mask) = extras.mask {
            let visible = matches!(self.options.mask, Some(Mask::Visible(_)));
            let (mask, kind) = mask.mask(visible, &mut order)?;
            (inputs.mask, desc.mask) = (Some(mask), Some(kind));
        }
        let (lse, tables) = (self.options.lse.then_some(&*self.lse), self.options.tables.as_ref());
        let call = Call { device, stream: &stream, axes, desc: &desc, tables, lse };
        match q.dtype {
            Dtype::F32 => call.run::<f32>(&inputs),
            Dtype::F16 => call.run::<f16>(&inputs),
            Dtype::BF16 => call.run::<bf16>(&inputs),
        }
    }
}

/// A problem, and where its results go.
struct Call<'a> {
    device: &'a CudaDevice,
    stream: &'a Arc<CudaStream>,
    axes: CallAxes,
    desc: &'a ProblemDesc,
    tables: Option<&'a BlockTables>,
    lse: Option<&'a Mutex<Option<CudaStorage>>>,
}

impl Call<'_> {
    /// Puts the kernels of the problem on the stream, which write new tensors.
    fn run<T: CudaDType + DeviceRepr>(&self, inputs: &DeviceInputs<'_>) -> Result<(CudaStorage, Shape)> {
        Session::with_current(self.stream, |session| self.run_in::<T>(session, inputs)).map_err(refused)?
    }

    fn run_in<T: CudaDType + DeviceRepr>(
        &self,
        session: &mut Session,
        inputs: &DeviceInputs<'_>,
    ) -> Result<(CudaStorage, Shape)> {
        // A wrong problem is refused before there is memory for its result.
        let problem = session.plan(self.desc).map_err(refused)?.problem();
        let (shape, dtype) = (problem.dims().out_shape(), self.desc.dtype);
        let (dims, strides) = self.axes.q.dense(shape);
        let rows = shape[0] * shape[1] * shape[2];
        let mut run = |outputs: &mut DeviceOutputs<'_>| {
            let done = match self.tables {
                None => session.run(self.desc, inputs, outputs),
                Some(tables) => session.run_paged(self.desc, inputs, tables, outputs),
            };
            done.map_err(|error| match error {
                CudaError::Inputs(error) => refused_shape(error, self.axes),
                error => refused(error),
            })
        };
        let out = self.fill::<T>(dims.elem_count(), |at| {
            // SAFETY: the new memory has this many elements, and nothing else knows it yet.
            let out = unsafe { DeviceTensorMut::from_raw_parts(dtype, at, shape, strides) };
            let mut outputs = DeviceOutputs::new(out.map_err(refused)?);
            let Some(place) = self.lse else { return run(&mut outputs) };
            let lse = self.fill::<f32>(rows, |at| {
                // SAFETY: as above.
                outputs.lse = Some(unsafe { DeviceListMut::from_raw_parts(at, rows) }.map_err(refused)?);
                run(&mut outputs)
            })?;
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(lse);
            Ok(())
        })?;
        Ok((out, dims))
    }

    /// New memory, all of which the work that `write` puts on the stream writes.
    fn fill<T: CudaDType + DeviceRepr>(
        &self,
        len: usize,
        write: impl FnOnce(u64) -> Result<()>,
    ) -> Result<CudaStorage> {
        // SAFETY: it is written before anything on the stream reads it.
        let mut slice = unsafe { self.device.alloc::<T>(len)? };
        let (at, written) = slice.device_ptr_mut(self.stream);
        write(at)?;
        drop(written);
        Ok(CudaStorage::wrap_cuda_slice(slice, self.device.clone()))
    }
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
        bail!("{} is not on a CUDA device", self.name)
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        if let Some(run) = self.run.take() {
            run(Stored { name: self.name, storage, layout });
        }
        // An operator gives a tensor. This one has none, and device memory for it would be allocated in vain.
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
