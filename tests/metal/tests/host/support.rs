//! Devices and cases of tests.

use flashtile::PlanOptions;
use flashtile_metal::objc2::rc::autoreleasepool;
use flashtile_metal::{
    GpuInputs, GpuKv, GpuOutputs, GpuTensor, GpuTensorMut, Memory, Metal, ScalarType, dense,
};
use flashtile_metal_standin::{Control, Order, Profile, Timing, control, device};
use flashtile_testkit::{Answer, Case, CaseData, Guarded, MetalPath, MetalRunner, Runner};

/// A new device of a profile. Devices of one system are made by one test, as the system is the process's.
pub(crate) fn metal(profile: Profile) -> Metal {
    autoreleasepool(|_| Metal::with_device(device(profile))).unwrap()
}

/// The control by which a test steers the device.
pub(crate) fn control_of(metal: &Metal) -> Control {
    control(metal.gpu().device())
}

/// Devices that are as late as they may be, and that run what nothing orders in random order.
pub(crate) fn runners(profile: &Profile) -> Vec<MetalRunner> {
    use flashtile_metal::DispatchType::{Concurrent, Serial};
    let (late, random) = (MetalRunner::new(metal(profile.clone())), metal(profile.clone()));
    control_of(&random).set_timing(Timing::Immediate);
    control_of(&random).set_order(Order::Random(1));
    let random = MetalRunner::new(random);
    vec![
        late.clone(),
        random.clone().odd().by(MetalPath::CommandBuffer(Concurrent)),
        late.clone().odd().by(MetalPath::CommandBuffer(Serial)),
        random.clone().by(MetalPath::Encoder(Concurrent)),
        late.by(MetalPath::Encoder(Serial)).odd(),
        random,
    ]
}

/// Everything that tests of external data run on.
pub(crate) fn all_runners(options: PlanOptions) -> Vec<Box<dyn Runner>> {
    let queue = runners(&Profile::m3_max()).swap_remove(0);
    // Metal computes what it skips nowhere.
    let takes = options.skip_tiles;
    takes.then(|| Box::new(queue.with(options)) as Box<dyn Runner>).into_iter().collect()
}

/// The answer of a runner, with memory checked and values not compared.
pub(crate) fn answer(built: &CaseData, runner: &dyn Runner) -> Answer {
    built.run(runner).unwrap_or_else(|failure| panic!("{}: {failure}", runner.name()))
}

pub(crate) fn build(case: &Case) -> CaseData {
    case.build().unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

/// Sets every element.
pub(crate) fn fill(tensor: &mut Guarded, value: impl Fn([usize; 4]) -> f32) {
    for index in tensor.indices() {
        tensor.set(index, value(index));
    }
}

/// The tensor of these strides at the start of a memory.
pub(crate) fn view(memory: &Memory, shape: [usize; 4], strides: [usize; 4]) -> GpuTensor<'_, Memory> {
    GpuTensor::new(memory.view(), shape, strides).unwrap()
}

/// Tensors of a decode step or a prefill in the memory of a device, of 8 query heads, 2 key/value heads and rows of 64 in f32.
pub(crate) struct Tensors {
    pub(crate) q: Memory,
    pub(crate) k: Memory,
    pub(crate) v: Memory,
    pub(crate) out: Memory,
    pub(crate) q_shape: [usize; 4],
    pub(crate) kv_shape: [usize; 4],
}

impl Tensors {
    pub(crate) fn new(metal: &Metal, q_len: usize, kv_len: usize) -> Self {
        let (q_shape, kv_shape) = ([1, 8, q_len, 64], [1, 2, kv_len, 64]);
        let values = |shape: [usize; 4], step: usize| -> Vec<f32> {
            (0..shape.iter().product()).map(|n: usize| ((n * step) % 17) as f32 / 8.0 - 1.0).collect()
        };
        let filled = |shape, step| metal.gpu().buffer_from(&values(shape, step)).unwrap();
        Self {
            q: filled(q_shape, 5),
            k: filled(kv_shape, 7),
            v: filled(kv_shape, 3),
            out: metal.zeros(ScalarType::F32, q_shape).unwrap(),
            q_shape,
            kv_shape,
        }
    }

    /// The description of causal attention at the end of the keys.
    pub(crate) fn desc(&self) -> flashtile::ProblemDesc {
        let dims = flashtile::Dims {
            batch: 1,
            q_heads: 8,
            kv_heads: 2,
            q_len: self.q_shape[2],
            kv_len: self.kv_shape[2],
            head_dim: 64,
            value_dim: 64,
        };
        let mut desc = flashtile::ProblemDesc::new(dims, flashtile::Dtype::F32);
        desc.visibility = flashtile::Visibility::causal();
        desc.q_offset = Some(flashtile::QOffset::BottomRight);
        desc
    }

    pub(crate) fn tensors(&mut self) -> (GpuInputs<'_, Memory>, GpuOutputs<'_, Memory>) {
        let [q, k, v] = [(&self.q, self.q_shape), (&self.k, self.kv_shape), (&self.v, self.kv_shape)]
            .map(|(memory, shape)| view(memory, shape, dense(shape)));
        let inputs = GpuInputs::new(q, GpuKv::elements(k).unwrap(), GpuKv::elements(v).unwrap());
        let out = GpuTensorMut::new(self.out.view_mut(), self.q_shape, dense(self.q_shape)).unwrap();
        (inputs, GpuOutputs::new(out))
    }

    /// The results, once the queue has completed.
    pub(crate) fn out(&self, metal: &Metal) -> Vec<f32> {
        metal.gpu().to_vec(&self.out).unwrap()
    }
}

/// The output of a session of its own on the device, for a problem of these lengths.
pub(crate) fn expected(metal: &Metal, q_len: usize, kv_len: usize) -> Vec<f32> {
    let mut tensors = Tensors::new(metal, q_len, kv_len);
    let desc = tensors.desc();
    let (inputs, mut outputs) = tensors.tensors();
    metal.session().run(&desc, &inputs, &mut outputs).unwrap();
    tensors.out(metal)
}
