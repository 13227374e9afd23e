//! Caches in the memory of a CUDA device, and their steps over tensors there.

use crate::gpu::{GpuStorage, Lent, NewTensor, Tensors, first, prepare, uninit, with_options};
use crate::options::Options;
use crate::storage::{Axes, CallAxes, Qkv, check_no_gradient, read_qkv, refused};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Device, Result, Tensor, bail};
use flashtile::cuda::{Cuda, CudaStore, Gpu};
use flashtile::gpu::{GpuAttention, GpuOutputs};
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
        read_qkv(tensors, |qkv| with_options(&options, qkv, |tensors| self.launch(layer, tensors, &options)))
    }

    fn launch(
        &mut self,
        layer: usize,
        tensors: &Tensors<'_, CudaStorage>,
        options: &Options,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (on, axes) = (self.on, CallAxes { q: Axes::Packed, kv: Axes::Packed });
        let given = tensors.lend(on, axes, options)?;
        let ([_, heads, tokens, _], [_, _, _, value_dim]) = (given.q.shape, given.v.shape);
        options.check_slopes(heads)?;
        let expected: usize = self.lens().iter().map(|lens| lens.q_len).sum();
        if tokens != expected {
            bail!("q has {tokens} tokens, the step has {expected}")
        }
        let device = self.device.as_cuda_device()?;
        let mut out =
            NewTensor::<CudaStorage>::new(device, [1, heads, tokens, value_dim], axes.q, given.dtype)?;
        let rows = (heads, tokens);
        let lse = options.lse.then(|| uninit::<CudaStorage>(device, &rows.into(), Dtype::F32));
        let mut lse = lse.transpose()?;
        {
            let mut lent = out.lend(on)?;
            let mut lent_lse = lse.as_mut().map(|lse| lse.lend_mut(on)).transpose()?;
            let mut outputs = GpuOutputs::new(lent.tensor().map_err(refused)?);
            outputs.lse = lent_lse.as_mut().map(|(memory, _)| first(memory, Dtype::F32, heads * tokens));
            let mut attend = GpuAttention::from(options.numbers());
            attend.mask = given.mask()?;
            attend.alibi_slopes = given.slopes.as_ref().map(Lent::view);
            attend.sinks = given.sinks.as_ref().map(Lent::view);
            let rows = StepTensors { q: given.q.tensor()?, k: given.k.tensor()?, v: given.v.tensor()? };
            self.step.attend_with(layer, rows, &attend, &mut outputs).map_err(refused)?;
        }
        let tensor =
            |lse: CudaStorage| Tensor::from_storage(lse.into_storage(), rows, BackpropOp::none(), false);
        Ok((out.into_tensor(), lse.map(tensor)))
    }
}
