//! Caches in the memory of a CUDA device, and their steps over tensors there.

use crate::gpu::{GpuStorage, Lent, first, prepare, read_option, uninit};
use crate::options::{Mask, Options};
use crate::storage::{Axes, Qkv, Stored, check_no_gradient, read, refused};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Device, Error, Result, Tensor, bail};
use flashtile::cuda::{Cuda, CudaStore, Gpu};
use flashtile::gpu::{GpuAttention, GpuMask, GpuOutputs, GpuTensorMut};
use flashtile::{CacheDesc, Dtype, HybridCache, KvCacheExt, SeqId, SeqLens, StepTensors};

/// A cache on the stream of a candle device.
#[derive(Debug)]
pub(crate) struct CudaCache {
    pub(crate) cache: HybridCache<CudaStore>,
    device: Device,
    on: Gpu,
}

impl CudaCache {
    /// An empty cache on a device, which is one of CUDA.
    pub(crate) fn new(layers: &[CacheDesc], device: &Device) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        let on = Cuda::with_context(stream.context().clone()).map_err(refused)?.gpu().on(&stream);
        let store = |desc: &CacheDesc| CudaStore::new(on.clone(), desc);
        let cache = HybridCache::with_stores(layers, store).map_err(refused)?;
        Ok(Self { cache, device: device.clone(), on })
    }

    pub(crate) fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<CudaStep<'_>> {
        let step = self.cache.step(batch).map_err(refused)?;
        Ok(CudaStep { step, device: &self.device, on: &self.on })
    }
}

/// A step over a [`CudaCache`].
#[derive(Debug)]
pub(crate) struct CudaStep<'c> {
    pub(crate) step: flashtile::Step<'c, CudaStore>,
    device: &'c Device,
    on: &'c Gpu,
}

/// The tensors of a layer, locked for reading.
struct Tensors<'a> {
    qkv: Qkv<Stored<'a, CudaStorage>>,
    slopes: Option<Stored<'a, CudaStorage>>,
    sinks: Option<Stored<'a, CudaStorage>>,
    mask: Option<Stored<'a, CudaStorage>>,
}

impl CudaStep<'_> {
    pub(crate) fn lens(&self) -> &[SeqLens] {
        self.step.lens()
    }

    /// Attends in a layer over packed tensors. The launches are on the stream of the cache.
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        tensors: Qkv<&Tensor>,
        options: &Options,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let mut options = options.clone();
        tensors.each(check_no_gradient)?;
        prepare(tensors, &mut options, self.device)?;
        let mask = options.mask.as_ref().map(|mask| match mask {
            Mask::Visible(tensor) | Mask::Additive(tensor) => tensor,
        });
        read("q", tensors.q, |q| {
            read("k", tensors.k, |k| {
                read("v", tensors.v, |v| {
                    read_option("alibi_slopes", options.alibi_slopes.as_ref(), |slopes| {
                        read_option("sinks", options.sinks.as_ref(), |sinks| {
                            read_option("mask", mask, |mask| {
                                let tensors = Tensors { qkv: Qkv { q, k, v }, slopes, sinks, mask };
                                self.launch(layer, &tensors, &options)
                            })
                        })
                    })
                })
            })
        })
    }

    fn launch(
        &mut self,
        layer: usize,
        tensors: &Tensors<'_>,
        options: &Options,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (on, qkv) = (self.on, &tensors.qkv);
        let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|tensor| tensor.elements(on, Axes::Packed));
        let (q, k, v) = (q?, k?, v?);
        let slopes = tensors.slopes.as_ref().map(|list| list.list(on)).transpose()?;
        let sinks = tensors.sinks.as_ref().map(|list| list.list(on)).transpose()?;
        let visible = matches!(options.mask, Some(Mask::Visible(_)));
        let mask = tensors.mask.as_ref().map(|mask| mask.mask(on, visible)).transpose()?;
        let mask = mask.as_ref().map(|(mask, kind)| {
            let view = GpuMask::new(*kind, mask.view(), mask.shape, mask.strides);
            view.map_err(|error| Error::msg(format!("mask: {error}")))
        });
        let ([_, heads, tokens, _], [_, _, _, value_dim]) = (q.shape, v.shape);
        options.check_slopes(heads)?;
        let expected: usize = self.lens().iter().map(|lens| lens.q_len).sum();
        if tokens != expected {
            bail!("q has {tokens} tokens, the step has {expected}")
        }
        let (dtype, device) = (qkv.q.dtype("F32, F16 or BF16")?, self.device.as_cuda_device()?);
        let (dims, strides) = Axes::Packed.dense([1, heads, tokens, value_dim]);
        let mut out = uninit::<CudaStorage>(device, &dims, dtype)?;
        let rows = (heads, tokens);
        let lse = options.lse.then(|| uninit::<CudaStorage>(device, &rows.into(), Dtype::F32));
        let mut lse = lse.transpose()?;
        {
            let (mut memory, _guard) = out.lend_mut(on)?;
            let mut lent_lse = lse.as_mut().map(|lse| lse.lend_mut(on)).transpose()?;
            let view = first(&mut memory, dtype, dims.elem_count());
            let view = GpuTensorMut::new(view, [1, heads, tokens, value_dim], strides).map_err(refused)?;
            let mut outputs = GpuOutputs::new(view);
            outputs.lse = lent_lse.as_mut().map(|(memory, _)| first(memory, Dtype::F32, heads * tokens));
            let mut attend = GpuAttention::from(options.numbers());
            attend.mask = mask.transpose()?;
            attend.alibi_slopes = slopes.as_ref().map(Lent::view);
            attend.sinks = sinks.as_ref().map(Lent::view);
            let rows = StepTensors { q: q.tensor()?, k: k.tensor()?, v: v.tensor()? };
            self.step.attend_with(layer, rows, &attend, &mut outputs).map_err(refused)?;
        }
        let tensor = |storage: CudaStorage, dims| {
            Tensor::from_storage(storage.into_storage(), dims, BackpropOp::none(), false)
        };
        Ok((tensor(out, dims), lse.map(|lse| tensor(lse, rows.into()))))
    }
}
