//! Steps over caches in main memory, on the simulator and on this machine's CUDA device: one loop, other constructors.

use crate::decode_loop::{OnDevice, Place, cache_desc, decode, hybrid_descs};
use crate::support::cuda;
use flashtile::cache::HostStore;
use flashtile::gpu::{GpuAttention, GpuStore};
use flashtile::simulator::{DECODE_TILE, Simulator, find, session};
use flashtile::{
    Attention, Codec, CurrentRunner, Dtype, Error, HybridCache, KvCache, KvCacheExt as _, OwnedTensor,
    RunError, Runner, StepTensors, TensorView, TensorViewMut,
};

/// Main memory.
struct Host;

impl Place<HostStore> for Host {
    type Tensor = OwnedTensor;

    fn upload(&self, of: &OwnedTensor) -> OwnedTensor {
        OwnedTensor::copy_of(&of.view()).unwrap()
    }

    fn download(&self, of: &OwnedTensor, into: &mut OwnedTensor) {
        *into = self.upload(of);
    }

    fn rows(of: &OwnedTensor) -> TensorView<'_> {
        of.view()
    }

    fn rows_mut(of: &mut OwnedTensor) -> TensorViewMut<'_> {
        of.view_mut()
    }
}

#[test]
fn the_loop_runs_in_main_memory() {
    for (dtype, codec) in [(Dtype::F32, Codec::F32), (Dtype::BF16, Codec::Int8), (Dtype::F16, Codec::Tq4)] {
        decode(&mut KvCache::new(cache_desc(codec)).unwrap(), CurrentRunner, &Host, dtype);
        decode(&mut KvCache::new(cache_desc(codec)).unwrap(), Runner::new(), &Host, dtype);
    }
    let layers = hybrid_descs(Codec::Int8, Codec::BF16);
    decode(&mut HybridCache::new(&layers).unwrap(), CurrentRunner, &Host, Dtype::BF16);
}

#[test]
fn the_loop_runs_on_the_simulator() {
    let store = GpuStore::with_native(Simulator::new(), &cache_desc(Codec::BF16), Some(find)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    decode(&mut cache, session(DECODE_TILE), &OnDevice(Simulator::new()), Dtype::BF16);
    let layers = hybrid_descs(Codec::BF16, Codec::BF16);
    let store = |desc: &_| GpuStore::with_native(Simulator::new(), desc, Some(find));
    let mut cache = HybridCache::with_stores(&layers, store).unwrap();
    decode(&mut cache, session(DECODE_TILE), &OnDevice(Simulator::new()), Dtype::BF16);
}

#[test]
fn the_loop_runs_on_a_cuda_device() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context().new_stream().unwrap();
    let place = OnDevice(cuda.gpu().on(&stream));
    for (dtype, codec) in [(Dtype::F32, Codec::F32), (Dtype::BF16, Codec::Int8), (Dtype::F16, Codec::Tq4)] {
        decode(&mut cuda.kv_cache(cache_desc(codec), &stream).unwrap(), CurrentRunner, &place, dtype);
        decode(&mut cuda.kv_cache(cache_desc(codec), &stream).unwrap(), cuda.session(&stream), &place, dtype);
    }
    let layers = hybrid_descs(Codec::Int8, Codec::BF16);
    decode(&mut cuda.hybrid_cache(&layers, &stream).unwrap(), CurrentRunner, &place, Dtype::BF16);
}

#[test]
fn options_of_the_host_are_refused_on_a_device() {
    let store = GpuStore::with_native(Simulator::new(), &cache_desc(Codec::BF16), Some(find)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    let seq = cache.create().unwrap();
    let mut session = session(DECODE_TILE);
    let device = Simulator::new();
    let zeros = |heads| OwnedTensor::zeros(Dtype::BF16, [1, heads, 1, 64]).unwrap();
    let on_device = |of: OwnedTensor| flashtile::gpu::GpuArray::upload(&device, &of.view()).unwrap();
    let (q, kv, mut out) = (on_device(zeros(4)), on_device(zeros(2)), on_device(zeros(4)));
    let logits = [0.0; 4];
    let options = GpuAttention::from(Attention::decode().sinks(&logits));
    let mut step = cache.step(&[(seq, 1)]).unwrap().on(&mut session);
    let tensors = StepTensors { q: q.view(), k: kv.view(), v: kv.view() };
    let mut outputs = flashtile::gpu::GpuOutputs::new(out.view_mut());
    let error = step.attend_with(0, tensors, &options, &mut outputs).unwrap_err();
    assert!(matches!(error, Error::Run(RunError::HostMemory { tensor: "sinks" })), "{error}");
    drop(step);
    assert_eq!(cache.len(seq), Ok(0));
}
