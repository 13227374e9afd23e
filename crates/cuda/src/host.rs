//! Attention over tensors in host memory, on a device.

#![allow(unsafe_code)]

use super::array::DeviceArray;
use super::cudarc::driver::CudaStream;
use super::device::Cuda;
use super::error::CudaError;
use super::session::Session;
use super::tensor::{
    DeviceCodes, DeviceInputs, DeviceKv, DeviceList, DeviceListMut, DeviceMask, DeviceOutputs,
};
use flashtile_core::codec::{Codec, KvView};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::problem::ProblemDesc;
use flashtile_core::tensor::{MaskView, TensorView, dense};
use flashtile_kernel::cuda::Memory;
use flashtile_kernel::{ScalarType, bf16, f16};
use std::sync::Arc;

impl Session {
    /// Opens a session on a new stream of CUDA device `ordinal`.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let cuda = Cuda::new(ordinal)?;
        let stream = cuda.context().new_stream().map_err(CudaError::driver("stream"))?;
        Ok(Self::new(&cuda, &stream))
    }

    /// Computes what a description says over tensors in host memory: copies them to the device, runs, waits, and copies the results
    /// back. Where tensors stay on the device, [`Session::run`] has no copies.
    ///
    /// ```no_run
    /// use flashtile::cuda::Session;
    /// use flashtile::{Attention, Outputs, TensorView, TensorViewMut};
    /// let (q, kv) = (vec![0.1f32; 32 * 128 * 64], vec![0.2f32; 8 * 128 * 64]);
    /// let mut out = vec![0.0f32; 32 * 128 * 64];
    /// let q = TensorView::bhsd(&q, [1, 32, 128, 64])?;
    /// let kv = TensorView::bhsd(&kv, [1, 8, 128, 64])?;
    /// let causal = Attention::causal();
    /// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 32, 128, 64])?);
    /// Session::open(0)?.compute(&causal.desc(&q, &kv, &kv), &causal.inputs(q, kv, kv), &mut outputs)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::run`]; [`CudaError::Inputs`] also where block tables do not describe pages of the pool.
    pub fn compute(
        &mut self,
        desc: &ProblemDesc,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), CudaError> {
        let problem = desc.clone().validate()?;
        inputs::check(&problem, inputs, outputs)?;
        let stream = Arc::clone(self.stream());
        let tensor = |view: &TensorView<'_>| DeviceArray::upload(&stream, view);
        let (q, k, v) =
            (tensor(&inputs.q)?, Pages::new(&stream, &inputs.k)?, Pages::new(&stream, &inputs.v)?);
        let mask = inputs.mask.as_ref().map(|mask| Mask::new(&stream, mask)).transpose()?;
        let tree = inputs.tree.as_ref().map(|mask| Mask::new(&stream, mask)).transpose()?;
        let list = |list: Option<&[f32]>| list.map(|list| List::new(&stream, list)).transpose();
        let (slopes, sinks) = (list(inputs.alibi_slopes)?, list(inputs.sinks)?);
        let mut out = DeviceArray::zeros(&stream, outputs.out.dtype(), outputs.out.shape())?;
        let lse =
            outputs.lse.as_ref().map(|lse| DeviceArray::zeros(&stream, Dtype::F32, [1, 1, 1, lse.len()]));
        let lse = lse.transpose()?;

        let mut on_device = DeviceInputs::new(q.view(), k.view()?, v.view()?);
        on_device.mask = mask.as_ref().map(Mask::view).transpose()?;
        on_device.tree = tree.as_ref().map(Mask::view).transpose()?;
        on_device.alibi_slopes = slopes.as_ref().map(List::view).transpose()?;
        on_device.sinks = sinks.as_ref().map(List::view).transpose()?;
        let mut results = DeviceOutputs::new(out.view_mut());
        if let Some(lse) = &lse {
            // SAFETY: the memory is the array's, which nothing else accesses until it is read.
            results.lse = Some(unsafe { DeviceListMut::from_raw_parts(lse.at(), lse.shape()[3])? });
        }
        match inputs.tables {
            Some(tables) => self.run_paged(desc, &on_device, tables, &mut results)?,
            None => self.run(desc, &on_device, &mut results)?,
        }
        out.download(&mut outputs.out)?;
        if let (Some(lse), Some(to)) = (&lse, &mut outputs.lse) {
            for (to, bytes) in to.iter_mut().zip(lse.read()?.as_chunks().0) {
                *to = f32::from_ne_bytes(*bytes);
            }
        }
        Ok(())
    }
}

/// Keys or values on the device.
enum Pages {
    Elements(DeviceArray),
    Codes(Codes),
}

/// Pages of codes, one after another.
struct Codes {
    memory: Memory,
    codec: Codec,
    shape: [usize; 4],
    strides: [usize; 2],
    means: Option<List>,
}

/// Pages of codes start at multiples of this many bytes, so that they are read in vectors.
const ALIGN: usize = 16;

impl Pages {
    fn new(stream: &Arc<CudaStream>, view: &KvView<'_>) -> Result<Self, CudaError> {
        let codes = match view {
            KvView::Elements(view) => return Ok(Self::Elements(DeviceArray::upload(stream, view)?)),
            KvView::Codes(codes) => codes,
        };
        let [pages, heads, ..] = codes.shape();
        let places = || (0..pages).flat_map(|page| (0..heads).map(move |head| (page, head)));
        let page = places().next().map_or(0, |(page, head)| codes.page(page, head).len());
        let stride = page.next_multiple_of(ALIGN);
        let mut bytes = vec![0u8; pages * heads * stride];
        for ((page, head), to) in places().zip(bytes.chunks_exact_mut(stride.max(1))) {
            let from = codes.page(page, head);
            to[..from.len()].copy_from_slice(from);
        }
        let memory = upload(stream, ScalarType::U8, &bytes)?;
        let means = codes.means().map(|means| List::new(stream, means)).transpose()?;
        let (codec, shape, strides) = (codes.codec(), codes.shape(), [heads * stride, stride]);
        Ok(Self::Codes(Codes { memory, codec, shape, strides, means }))
    }

    fn view(&self) -> Result<DeviceKv<'_>, CudaError> {
        let codes = match self {
            Self::Elements(array) => return Ok(array.view().into()),
            Self::Codes(codes) => codes,
        };
        let Codes { memory, codec, shape, strides, means } = codes;
        // SAFETY: the pages lie there, and nothing writes them any more.
        let view = unsafe { DeviceCodes::from_raw_parts(*codec, memory.address(), *shape, *strides)? };
        Ok(match means {
            None => view.into(),
            Some(means) => view.centered(means.view()?)?.into(),
        })
    }
}

/// A materialised mask on the device, with every axis of 1 broadcast.
struct Mask {
    memory: Memory,
    kind: MaskKind,
    shape: [usize; 4],
}

impl Mask {
    fn new(stream: &CudaStream, mask: &MaskView<'_>) -> Result<Self, CudaError> {
        let shape = mask.shape();
        let [batch, heads, rows, keys] = shape;
        let mut bytes = Vec::new();
        for n in 0..batch * heads * rows * keys {
            let bias =
                mask.bias([n / keys / rows / heads, n / keys / rows % heads, n / keys % rows, n % keys]);
            match mask.kind() {
                MaskKind::Bool => bytes.push(u8::from(bias == 0.0)),
                MaskKind::Additive(Dtype::F32) => bytes.extend(bias.to_ne_bytes()),
                MaskKind::Additive(Dtype::F16) => bytes.extend(f16::from_f32(bias).to_ne_bytes()),
                MaskKind::Additive(Dtype::BF16) => bytes.extend(bf16::from_f32(bias).to_ne_bytes()),
            }
        }
        let memory = upload(stream, ScalarType::U8, &bytes)?;
        Ok(Self { memory, kind: mask.kind(), shape })
    }

    fn view(&self) -> Result<DeviceMask<'_>, CudaError> {
        let (at, shape, strides) = (self.memory.address(), self.shape, dense(self.shape));
        Ok(match self.kind {
            // SAFETY: the memory has the mask, which nothing writes any more.
            MaskKind::Bool => unsafe { DeviceMask::bool(at, shape, strides)? },
            // SAFETY: as above.
            MaskKind::Additive(dtype) => unsafe { DeviceMask::additive_strided(dtype, at, shape, strides)? },
        })
    }
}

/// A list of f32 on the device.
struct List(Memory);

impl List {
    fn new(stream: &CudaStream, list: &[f32]) -> Result<Self, CudaError> {
        let bytes: Vec<u8> = list.iter().flat_map(|x| x.to_ne_bytes()).collect();
        Ok(Self(upload(stream, ScalarType::F32, &bytes)?))
    }

    fn view(&self) -> Result<DeviceList<'_>, CudaError> {
        // SAFETY: the memory has the list, which nothing writes any more.
        Ok(unsafe { DeviceList::from_raw_parts(self.0.address(), self.0.len())? })
    }
}

/// Memory that holds the bytes of some elements, once the stream has come to it.
fn upload(stream: &CudaStream, element: ScalarType, bytes: &[u8]) -> Result<Memory, CudaError> {
    let mut memory = Memory::uninit(stream.context(), element, bytes.len() / element.bytes())?;
    memory.write_on(stream, 0, bytes)?;
    Ok(memory)
}
