//! Inputs and expected answers of kernel benchmarks.
//!
//! A kernel's `bench(..)` gives the shapes, the bytes read and written, the operations and the tolerance. A
//! [`Workload`] makes inputs for a shape, launches the kernel, and computes the expected answer independently: by the
//! f64 oracle of attention, by sums and transforms in f64, or from how a mask was made.

use crate::machine::{Machine, Values};
use crate::rng::Rng;
use crate::staging::{Layout, StagedInputs};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::{CodePages, Side};
use flashtile_core::codec::{Codec, KvView};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::Inputs;
use flashtile_core::problem::{Dims, HeadShape, Problem, ProblemDesc, SeqLens};
use flashtile_core::reference;
use flashtile_core::tensor::TensorView;
use flashtile_gpu::codecs::{factors, format_id};
use flashtile_gpu::encoding::{self, Appended};
use flashtile_gpu::kernels::encode::Rows;
use flashtile_gpu::kernels::formats::{BF16, TQ4};
use flashtile_gpu::kernels::mask_tiles::{Mask, mask_tiles};
use flashtile_gpu::kernels::merge::{self as merging, Merge};
use flashtile_gpu::kernels::rotation::hadamard;
use flashtile_gpu::kernels::{copy, decode, encode, mask_tiles as tiling, prefill, rotation};
use flashtile_gpu::launches::{Launches, Placed};
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_gpu::variant::Variant;
#[cfg(feature = "simulator")]
use flashtile_kernel::simulator::{Report, Simulator};
use flashtile_kernel::source::Shape;
use flashtile_kernel::{
    Bench, Device, DeviceMemory, Generic, Instance, Kernel, Launch, LaunchError, ScalarType,
};
use half::bf16;
use rayon::prelude::*;
#[cfg(feature = "simulator")]
use std::cell::RefCell;

/// How a kernel is benchmarked.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// Shapes, bytes, operations and tolerance.
    pub kernel: &'static Kernel,
    /// Shapes small enough for the simulator, with the same size parameters as the kernel's own.
    pub small: &'static [Shape],
    /// Makes the workload of a shape; if given a function that finds native code, only for an instance that has it.
    job: fn(&Shape, Option<Find>) -> Result<Job, String>,
}

/// The tile of prefill on the simulator: two SIMD groups of 16 rows, blocks of 16 keys.
pub(crate) const PREFILL_TILE: PortableTile = PortableTile::prefill(32, 16, 2, 1);

/// Finds the instance with native code, for the simulator.
type Find = fn(&Instance) -> Option<Instance>;

/// The benchmark of every kernel.
pub static WORKLOADS: [Workload; 7] = [
    Workload {
        kernel: &decode::decode::KERNEL,
        small: &[
            Shape {
                sizes: &[
                    ("batch", 2),
                    ("keys", 96),
                    ("q_heads", 8),
                    ("kv_heads", 2),
                    ("dim", 128),
                    ("format", BF16 as u64),
                    ("row", 256),
                    ("splits", 2),
                ],
            },
            Shape {
                sizes: &[
                    ("batch", 2),
                    ("keys", 96),
                    ("q_heads", 8),
                    ("kv_heads", 2),
                    ("dim", 128),
                    ("format", TQ4 as u64),
                    ("row", 66),
                    ("splits", 2),
                ],
            },
        ],
        job: attention,
    },
    Workload {
        kernel: &merging::merge::KERNEL,
        small: &[Shape { sizes: &[("rows", 8), ("splits", 5), ("dim", 128)] }],
        job: merged,
    },
    Workload {
        kernel: &prefill::prefill::KERNEL,
        small: &[Shape { sizes: &[("batch", 1), ("length", 80), ("heads", 2), ("dim", 64)] }],
        job: prefilled,
    },
    Workload {
        kernel: &encode::encode::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 128)] }],
        job: |shape, find| appended(shape, Codec::Tq4, find),
    },
    Workload {
        kernel: &encode::append::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 128)] }],
        job: |shape, find| appended(shape, Codec::BF16, find),
    },
    Workload {
        kernel: &rotation::hadamard::KERNEL,
        small: &[Shape { sizes: &[("rows", 10), ("dim", 128)] }],
        job: rotated,
    },
    Workload {
        kernel: &tiling::mask_tiles::KERNEL,
        small: &[Shape { sizes: &[("queries", 100), ("keys", 300)] }],
        job: mask_tile_job,
    },
];

/// Inputs of a kernel and the expected output.
struct Job {
    inputs: Vec<Values>,
    outputs: Vec<Written>,
    /// The output that is compared.
    answer: usize,
    /// Start and expected elements of each section that is compared.
    want: Vec<(usize, Vec<f64>)>,
    instance: Instance,
    work: Work,
}

/// Memory that is written.
enum Written {
    /// This many uninitialised elements.
    Blank(ScalarType, usize),
    /// Memory that is read and written.
    Set(Values),
}

/// The launch.
enum Work {
    Attention(Box<Launches>, Box<Placed>),
    Merge(Merge, [u32; 3]),
    Encode(Rows, u32),
    Append(Rows, u32),
    Hadamard(u32),
    Classify(Mask, [u32; 3]),
}

/// Counts of a launch on the simulator.
#[cfg(feature = "simulator")]
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Simulated {
    /// The instance.
    pub entry: String,
    /// The shape.
    pub shape: Shape,
    /// Threads of all threadgroups.
    pub threads: u64,
    /// The counts.
    pub report: Report,
    /// Largest error relative to the largest magnitude.
    pub error: f64,
}

/// Time of a kernel on a device.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Timed {
    /// The instance.
    pub entry: String,
    /// The shape.
    pub shape: Shape,
    /// Median time of the runs.
    pub seconds: f64,
    /// Interquartile range relative to the median.
    pub spread: f64,
    /// Largest error relative to the largest magnitude.
    pub error: f64,
}

impl Workload {
    /// The kernel's shapes, bytes, operations and tolerance.
    #[must_use]
    pub fn bench(&self) -> Option<&'static Bench> {
        self.kernel.bench.as_ref()
    }

    /// Launches a small shape on the simulator, which checks every access, and compares the answer.
    ///
    /// # Errors
    /// Why the launch failed or the answer is wrong.
    #[cfg(feature = "simulator")]
    pub fn simulate(&self, shape: &Shape) -> Result<Simulated, String> {
        let job = (self.job)(shape, Some(crate::simulator::find))?;
        let simulator = Simulator::new();
        let counted = Counted { simulator: &simulator, kernel: self.kernel, found: RefCell::default() };
        let (inputs, mut outputs) = job.place(&simulator)?;
        job.launch(&counted, &inputs, &mut outputs).map_err(|e| e.to_string())?;
        let error = job.error(&Simulator::read(&outputs[job.answer])?);
        let (threads, report) = counted.found.into_inner().ok_or("the kernel was not launched")?;
        Ok(Simulated { entry: job.instance.entry(), shape: *shape, threads, report, error })
    }

    /// Launches a shape on a CUDA device, compares the answer, and times the kernel.
    ///
    /// Runs cycle through copies of the inputs that together exceed the caches.
    ///
    /// # Errors
    /// Why the launch failed or the answer is wrong.
    #[cfg(feature = "cuda")]
    pub fn time(
        &self,
        gpu: &flashtile_kernel::cuda::Gpu,
        shape: &Shape,
        runs: usize,
    ) -> Result<Timed, String> {
        use flashtile_kernel::cuda::Gpu;
        let job = (self.job)(shape, None)?;
        let bytes = self.bench().map_or(0, |bench| (bench.bytes)(shape)).max(1);
        let sets = BEYOND_CACHES.div_ceil(bytes).clamp(1, MAX_SETS) as usize;
        let mut memory = (0..sets).map(|_| job.place(gpu)).collect::<Result<Vec<_>, _>>()?;
        for (inputs, outputs) in &mut memory {
            job.launch(gpu, inputs, outputs).map_err(|e| e.to_string())?;
        }
        let error = memory.iter().try_fold(0.0f64, |worst, (_, outputs)| {
            Ok::<_, String>(worst.max(job.error(&Gpu::read(&outputs[job.answer])?)))
        })?;
        let only = Only { gpu, kernel: self.kernel };
        let mut turn = 0;
        let timing = gpu.time::<flashtile_kernel::cuda::Error>(runs, || {
            let (inputs, outputs) = &mut memory[turn % sets];
            turn += 1;
            job.launch(&only, inputs, outputs).map_err(|e| match e {
                LaunchError::Device(error) => error,
                // The same launch satisfied its contract before.
                _ => unreachable!("a contract that held"),
            })
        });
        let timing = timing.map_err(|e| e.to_string())?;
        let (seconds, spread) = (timing.median(), timing.spread());
        Ok(Timed { entry: job.instance.entry(), shape: *shape, seconds, spread, error })
    }
}

/// After this many bytes of other accesses, caches hold nothing of an input.
#[cfg(feature = "cuda")]
const BEYOND_CACHES: u64 = 256 << 20;

/// The largest number of copies of the inputs.
#[cfg(feature = "cuda")]
const MAX_SETS: u64 = 64;

/// Bytes per second that a device copies, counting reads and writes: memory beyond its caches, the best of several
/// runs.
///
/// # Errors
/// Errors of the device.
#[cfg(feature = "cuda")]
pub fn copy_rate(gpu: &flashtile_kernel::cuda::Gpu) -> Result<f64, String> {
    use flashtile_kernel::cuda::Error;
    const ELEMENTS: usize = 128 << 20;
    let message = |e: &dyn std::fmt::Display| e.to_string();
    let mut from = gpu.uninit::<f32>(ELEMENTS).map_err(|e| message(&e))?;
    let mut to = gpu.uninit::<f32>(ELEMENTS).map_err(|e| message(&e))?;
    let mut once = |forth: bool| {
        let (x, out) = if forth { (&from, &mut to) } else { (&to, &mut from) };
        let (x, out) = (x.view(), out.view_mut());
        let n = (ELEMENTS / 4) as u32;
        let call = copy::copy::Call { x, out, n, groups: [n.div_ceil(256), 1, 1] };
        call.launch_instance(gpu, &copy::copy::instance())
    };
    once(true).map_err(|e| message(&e))?;
    let mut forth = false;
    let timing = gpu.time::<Error>(20, || {
        forth = !forth;
        once(forth).map_err(|e| match e {
            LaunchError::Device(error) => error,
            _ => unreachable!("a contract that held"),
        })
    });
    Ok(8.0 * ELEMENTS as f64 / timing.map_err(|e| message(&e))?.least())
}

/// A simulator that keeps the counts of one kernel's launches.
#[cfg(feature = "simulator")]
struct Counted<'a> {
    simulator: &'a Simulator,
    kernel: &'static Kernel,
    found: RefCell<Option<(u64, Report)>>,
}

#[cfg(feature = "simulator")]
impl Device for Counted<'_> {
    type Memory = <Simulator as Device>::Memory;
    type Error = <Simulator as Device>::Error;

    fn launch(&self, launch: Launch<'_, Self::Memory>) -> Result<(), Self::Error> {
        let counted = launch.instance().kernel().name == self.kernel.name;
        let groups = launch.groups().iter().map(|&n| u64::from(n)).product::<u64>();
        let threads = groups * u64::from(launch.threads());
        self.simulator.launch(launch)?;
        if counted {
            *self.found.borrow_mut() = Some((threads, self.simulator.report()));
        }
        Ok(())
    }
}

/// A device that only launches one kernel.
#[cfg(feature = "cuda")]
struct Only<'a> {
    gpu: &'a flashtile_kernel::cuda::Gpu,
    kernel: &'static Kernel,
}

#[cfg(feature = "cuda")]
impl Device for Only<'_> {
    type Memory = flashtile_kernel::cuda::Memory;
    type Error = flashtile_kernel::cuda::Error;

    fn limits(&self) -> flashtile_kernel::Limits {
        self.gpu.limits()
    }

    fn launch(&self, launch: Launch<'_, Self::Memory>) -> Result<(), Self::Error> {
        if launch.instance().kernel().name == self.kernel.name { self.gpu.launch(launch) } else { Ok(()) }
    }
}

type Memories<M> = (Vec<<M as Device>::Memory>, Vec<<M as Device>::Memory>);

impl Job {
    /// Memory of a device for inputs and outputs.
    fn place<M: Machine>(&self, machine: &M) -> Result<Memories<M>, String> {
        let inputs = self.inputs.iter().map(|values| machine.hold(values)).collect::<Result<_, _>>()?;
        let written = |written: &Written| match written {
            Written::Blank(element, len) => machine.blank(*element, *len),
            Written::Set(values) => machine.hold(values),
        };
        let outputs = self.outputs.iter().map(written).collect::<Result<_, _>>()?;
        Ok((inputs, outputs))
    }

    fn launch<D: Device<Memory: DeviceMemory>>(
        &self,
        device: &D,
        inputs: &[D::Memory],
        outputs: &mut [D::Memory],
    ) -> Result<(), LaunchError<D::Error>> {
        let view = |n: usize| inputs[n].view();
        match &self.work {
            Work::Attention(launches, placed) => {
                let (Some(inputs), Some(outputs)) = (inputs.first_chunk(), outputs.first_chunk_mut()) else {
                    unreachable!("memories of {} inputs", self.inputs.len())
                };
                StagedInputs::launch(launches, placed, device, inputs, outputs)
            }
            Work::Merge(params, groups) => {
                let [out, lse] = outputs else { unreachable!("out and lse") };
                let call = merging::merge::Call {
                    partial_out: view(0),
                    partial_max_sum: view(1),
                    factors: view(2),
                    sinks: view(3),
                    params: *params,
                    out: out.view_mut(),
                    lse: lse.view_mut(),
                    has_sinks: false,
                    with_lse: true,
                    has_shift: false,
                    groups: *groups,
                };
                call.launch_instance(device, &self.instance)
            }
            Work::Encode(params, groups) => {
                let [pages, status] = outputs else { unreachable!("pages and status") };
                let call = encode::encode::Call {
                    x: view(0),
                    means: view(1),
                    factors: view(2),
                    numbers: view(3),
                    table: view(4),
                    runs: view(5),
                    params: *params,
                    pages: pages.view_mut(),
                    status: status.view_mut(),
                    centered: false,
                    unbiased: true,
                    groups: [*groups, 1, 1],
                };
                call.launch_instance(device, &self.instance)
            }
            Work::Append(params, groups) => {
                let call = encode::append::Call {
                    x: view(0),
                    table: view(1),
                    runs: view(2),
                    params: *params,
                    pages: outputs[0].view_mut(),
                    same: true,
                    groups: [*groups, 1, 1],
                };
                call.launch_instance(device, &self.instance)
            }
            Work::Hadamard(rows) => {
                let out = outputs[0].view_mut();
                let groups = [rows.div_ceil(4), 1, 1];
                let call =
                    hadamard::Call { x: view(0), factors: view(1), out, rows: *rows, back: false, groups };
                call.launch_instance(device, &self.instance)
            }
            Work::Classify(params, groups) => {
                let mask_tiles = outputs[0].view_mut();
                let call = mask_tiles::Call { mask: view(0), params: *params, mask_tiles, groups: *groups };
                call.launch_instance(device, &self.instance)
            }
        }
    }

    /// Largest difference of an answer from the expected one relative to the largest magnitude; infinite if an
    /// element is NaN.
    fn error(&self, got: &[f64]) -> f64 {
        let (mut error, mut max) = (0.0f64, 0.0f64);
        for (start, want) in &self.want {
            for (got, want) in got[*start..].iter().zip(want) {
                let difference = if got == want { 0.0 } else { (got - want).abs() };
                error = error.max(if difference.is_nan() { f64::INFINITY } else { difference });
                max = max.max(want.abs());
            }
        }
        if error == 0.0 { 0.0 } else { error / max }
    }
}

fn size(shape: &Shape, name: &str) -> Result<usize, String> {
    match usize::try_from(shape.get(name)) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("a shape without {name}")),
    }
}

/// The instance with native code, if the simulator is to run it.
fn native(instance: Instance, find: Option<Find>) -> Result<Instance, String> {
    match find {
        Some(find) => find(&instance).ok_or_else(|| format!("{} has no native code", instance.entry())),
        None => Ok(instance),
    }
}

/// Elements of a chunk, which has its own generator.
const CHUNK: usize = 1 << 20;

/// Fills memory in parallel, each chunk from its own generator.
fn fill<T: Send>(list: &mut [T], seed: u64, next: impl Fn(&mut Rng) -> T + Sync) {
    list.par_chunks_mut(CHUNK).enumerate().for_each(|(n, chunk)| {
        let mut rng = Rng::new(seed ^ (n as u64) << 32);
        chunk.iter_mut().for_each(|x| *x = next(&mut rng));
    });
}

/// A random value of variance about 1, cheaper than a normal one.
fn random_value(rng: &mut Rng) -> f32 {
    rng.uniform(-1.75, 1.75)
}

/// Attention of one query per sequence over all of its keys: [`decode()`](decode::decode), then
/// [`merge()`](merging::merge).
fn attention(shape: &Shape, find: Option<Find>) -> Result<Job, String> {
    let [batch, keys, q_heads, kv_heads, dim, splits] =
        ["batch", "keys", "q_heads", "kv_heads", "dim", "splits"].map(|name| size(shape, name));
    let (batch, keys, q_heads, kv_heads, dim, splits) = (batch?, keys?, q_heads?, kv_heads?, dim?, splits?);
    let codec = Codec::ALL.into_iter().find(|&codec| u64::from(format_id(codec)) == shape.get("format"));
    let codec = codec.ok_or("a shape without a format")?;
    if codec.row_bytes(dim) as u64 != shape.get("row") {
        return Err(format!("a row of {codec} has {} bytes", codec.row_bytes(dim)));
    }
    let dtype = codec.dtype().unwrap_or(Dtype::BF16);
    let message = |e: &dyn std::fmt::Display| e.to_string();
    let problem = |lengths: &[SeqLens]| -> Result<Problem, String> {
        let mut desc = ProblemDesc::cached(
            HeadShape { q_heads, kv_heads, head_dim: dim, value_dim: dim },
            dtype,
            lengths,
        );
        (desc.k_codec, desc.v_codec) = (Some(codec), Some(codec));
        desc.validate().map_err(|e| message(&e))
    };
    let mut q = vec![0u8; batch * q_heads * dim * dtype.bytes()];
    elements(&mut q, dtype, 1);
    let stored = [2, 3].map(|seed| Stored::new(codec, dtype, [batch, kv_heads, keys, dim], seed));
    let [k, v] = stored;
    let (k, v) = (k?, v?);
    let tables = |pages: std::ops::Range<usize>| BlockTables {
        table: pages.clone().map(|page| page as u32).collect(),
        width: 1,
        page_size: keys,
        wraps: false,
        lens: vec![keys; pages.len()],
        first: vec![0; pages.len()],
    };
    // Queries are stored as [heads, sequences, dim]; a range of sequences is a view with the strides of all.
    let strides = [batch * q_heads * dim, batch * dim, dim, 1];
    let queries = |from: usize, count: usize| {
        let bytes = &q[from * dim * dtype.bytes()..];
        TensorView::from_bytes(dtype, bytes, [1, q_heads, count, dim], strides).map_err(|e| message(&e))
    };

    // The oracle computes the first and the last sequence.
    let mut want = Vec::new();
    for sequence in [0, batch - 1] {
        let tables = tables(sequence..sequence + 1);
        let inputs = paged(queries(sequence, 1)?, [&k, &v], &tables)?;
        let answer =
            reference::attention(&problem(&[SeqLens::decode(keys)])?, &inputs).map_err(|e| message(&e))?;
        let rows = answer.out.chunks_exact(dim).enumerate();
        want.extend(rows.map(|(head, row)| ((head * batch + sequence) * dim, row.to_vec())));
    }

    let whole = problem(&vec![SeqLens::decode(keys); batch])?;
    let all = tables(0..batch);
    let inputs = paged(queries(0, batch)?, [&k, &v], &all)?;
    let tile = if find.is_some() {
        PortableTile::new(8, 16, 2, 1)
    } else {
        PortableTile::default_decode(codec, dim)
    };
    staged_job(&whole, &inputs, tile.with_splits(splits), want, find)
}

/// Attention of all rows of dense sequences over all of their keys: [`prefill()`](prefill::prefill()).
fn prefilled(shape: &Shape, find: Option<Find>) -> Result<Job, String> {
    let [batch, length, heads, dim] = ["batch", "length", "heads", "dim"].map(|name| size(shape, name));
    let (batch, length, heads, dim) = (batch?, length?, heads?, dim?);
    let message = |e: &dyn std::fmt::Display| e.to_string();
    let problem = |batch: usize, heads: usize| {
        let (kv_heads, q_len, kv_len) = (heads, length, length);
        let dims = Dims { batch, q_heads: heads, kv_heads, q_len, kv_len, head_dim: dim, value_dim: dim };
        ProblemDesc::new(dims, Dtype::BF16).validate().map_err(|e| message(&e))
    };
    let head = length * dim;
    let tensors = [1, 2, 3].map(|seed| {
        let mut bytes = vec![0u8; 2 * batch * heads * head];
        elements(&mut bytes, Dtype::BF16, seed);
        bytes
    });
    let view = |n: usize, first: usize, [batch, heads]: [usize; 2]| {
        let strides = [heads * head, head, dim, 1];
        let bytes = &tensors[n][2 * first * head..];
        TensorView::from_bytes(Dtype::BF16, bytes, [batch, heads, length, dim], strides)
    };
    let inputs = |first: usize, shape: [usize; 2]| {
        let [q, k, v] = [0, 1, 2].map(|n| view(n, first, shape).map_err(|e| message(&e)));
        Ok::<_, String>(Inputs::new(q?, k?, v?))
    };
    // The oracle computes the first and the last head.
    let mut want = Vec::new();
    for at in [0, batch * heads - 1] {
        let answer = reference::attention(&problem(1, 1)?, &inputs(at, [1, 1])?).map_err(|e| message(&e))?;
        want.push((at * head, answer.out));
    }
    let tile = if find.is_some() { PREFILL_TILE } else { PortableTile::default_prefill(dim) };
    staged_job(&problem(batch, heads)?, &inputs(0, [batch, heads])?, tile.into(), want, find)
}

/// The job of a problem whose answer is known in parts.
fn staged_job(
    problem: &Problem,
    inputs: &Inputs<'_>,
    tiling: Tiling,
    want: Vec<(usize, Vec<f64>)>,
    find: Option<Find>,
) -> Result<Job, String> {
    let staged = StagedInputs::new(problem, inputs, Layout { tiling, aligned: 16, padded: true });
    let staged = staged.map_err(|e| e.to_string())?;
    let launches = match find {
        Some(find) => {
            staged.launches.with_native(find).ok_or("the simulator has no native code of the shape")?
        }
        None => staged.launches,
    };
    let instance = launches.instances()[0].clone();
    let work = Work::Attention(Box::new(launches), Box::new(staged.placed));
    Ok(Job {
        inputs: staged.inputs.into(),
        outputs: staged.outputs.map(|(element, len)| Written::Blank(element, len)).into(),
        answer: 2,
        want,
        instance,
        work,
    })
}

/// Fills elements of a dtype.
fn elements(bytes: &mut [u8], dtype: Dtype, seed: u64) {
    match dtype {
        Dtype::F32 => fill(bytes.as_chunks_mut::<4>().0, seed, |rng| random_value(rng).to_le_bytes()),
        Dtype::F16 => fill(bytes.as_chunks_mut::<2>().0, seed, |rng| {
            half::f16::from_f32(random_value(rng)).to_le_bytes()
        }),
        Dtype::BF16 => {
            fill(bytes.as_chunks_mut::<2>().0, seed, |rng| bf16::from_f32(random_value(rng)).to_le_bytes())
        }
    }
}

/// Keys or values, one page per sequence.
enum Stored {
    Elements(Vec<u8>, Dtype, [usize; 4]),
    Codes(Box<CodePages>),
}

impl Stored {
    /// Random elements, or random codes of finite values with scales near 1.
    fn new(codec: Codec, dtype: Dtype, shape: [usize; 4], seed: u64) -> Result<Self, String> {
        if codec.dtype().is_some() {
            let mut bytes = vec![0; shape.iter().product::<usize>() * dtype.bytes()];
            elements(&mut bytes, dtype, seed);
            return Ok(Self::Elements(bytes, dtype, shape));
        }
        let mut pages = CodePages::new(codec, Side::Keys, shape).map_err(|e| e.to_string())?;
        let [entries, heads, rows, _] = shape;
        for place in 0..entries * heads {
            let bytes = pages.bytes_mut(place / heads, place % heads);
            let scales = bytes.len() - 2 * rows;
            let seed = seed ^ (place as u64 + 1) << 16;
            fill(&mut bytes[..scales], seed, |rng| rng.bits() as u8);
            let scale = |rng: &mut Rng| half::f16::from_f32(rng.uniform(0.5, 1.5)).to_le_bytes();
            fill(bytes[scales..].as_chunks_mut::<2>().0, !seed, scale);
        }
        Ok(Self::Codes(Box::new(pages)))
    }

    fn view(&self) -> Result<KvView<'_>, String> {
        match self {
            Self::Elements(bytes, dtype, [a, b, c, d]) => {
                let strides = [b * c * d, c * d, *d, 1];
                let view = TensorView::from_bytes(*dtype, bytes, [*a, *b, *c, *d], strides);
                Ok(view.map_err(|e| e.to_string())?.into())
            }
            Self::Codes(pages) => Ok(KvView::Codes(pages.view())),
        }
    }
}

/// Queries over pages of keys and values.
fn paged<'a>(
    q: TensorView<'a>,
    [k, v]: [&'a Stored; 2],
    tables: &'a BlockTables,
) -> Result<Inputs<'a>, String> {
    Ok(Inputs::paged_kv(q, k.view()?, v.view()?, tables))
}

/// Heads of the rows to merge.
const MERGED_HEADS: usize = 32;

fn merged(shape: &Shape, find: Option<Find>) -> Result<Job, String> {
    let (rows, splits, dim) = (size(shape, "rows")?, size(shape, "splits")?, size(shape, "dim")?);
    // One query, or a batch if there are more rows than heads.
    let heads = rows.min(MERGED_HEADS);
    if !rows.is_multiple_of(heads) {
        return Err(format!("{rows} rows are not a multiple of {heads} heads"));
    }
    let mut partial_out = vec![0.0f32; rows * splits * dim];
    let mut partial_max_sum = vec![0.0f32; rows * splits * 2];
    fill(&mut partial_out, 1, random_value);
    fill(partial_max_sum.as_chunks_mut::<2>().0, 2, |rng| [rng.uniform(-6.0, 6.0), rng.uniform(0.5, 4.0)]);
    let mut want = vec![0.0f64; rows * dim];
    want.par_chunks_mut(dim).enumerate().for_each(|(row, out)| {
        let partial_max_sum = &partial_max_sum[2 * row * splits..][..2 * splits];
        let row_max = partial_max_sum.iter().step_by(2).fold(f32::NEG_INFINITY, |row_max, &x| row_max.max(x));
        let mut row_sum = 0.0;
        for split in 0..splits {
            let factor = (f64::from(partial_max_sum[2 * split]) - f64::from(row_max)).exp2();
            row_sum += factor * f64::from(partial_max_sum[2 * split + 1]);
            for (out, x) in out.iter_mut().zip(&partial_out[(row * splits + split) * dim..][..dim]) {
                *out += factor * f64::from(*x);
            }
        }
        out.iter_mut().for_each(|x| *x /= row_sum);
    });
    let variant = Variant {
        dtype: Dtype::BF16,
        head_dim: dim,
        value_dim: dim,
        k_codec: Codec::BF16,
        v_codec: Codec::BF16,
    };
    let instance = variant.merge().map_err(|e| e.to_string())?;
    let params = Merge {
        out: [heads * dim, dim, dim].map(|n| n as u64),
        q_heads: heads as u32,
        queries: 1,
        splits: splits as u32,
        simds: 1,
    };
    let groups = [1, heads as u32, (rows / heads) as u32];
    Ok(Job {
        inputs: vec![
            Values::F32(partial_out),
            Values::F32(partial_max_sum),
            Values::F32(vec![0.0]),
            Values::F32(vec![0.0]),
        ],
        outputs: vec![Written::Blank(ScalarType::Bf16, rows * dim), Written::Blank(ScalarType::F32, rows)],
        answer: 0,
        want: vec![(0, want)],
        instance: native(instance, find)?,
        work: Work::Merge(params, groups),
    })
}

/// Heads of the rows to append.
const APPENDED_HEADS: usize = 8;

/// Rows of bf16 `[tokens, heads, dim]` are appended to one page.
fn appended(shape: &Shape, codec: Codec, find: Option<Find>) -> Result<Job, String> {
    let (rows, dim) = (size(shape, "rows")?, size(shape, "dim")?);
    let (heads, tokens) = (APPENDED_HEADS, rows / APPENDED_HEADS);
    if tokens * heads != rows {
        return Err(format!("{rows} rows are not a multiple of {heads} heads"));
    }
    let message = |e: &dyn std::fmt::Display| e.to_string();
    let dtype = Dtype::BF16;
    let mut x = vec![0u8; rows * dim * dtype.bytes()];
    elements(&mut x, dtype, 1);
    let view = TensorView::from_bytes(dtype, &x, [1, heads, tokens, dim], [rows * dim, dim, heads * dim, 1]);
    let view = view.map_err(|e| message(&e))?;
    let want: Vec<u8> = if codec.dtype().is_some() {
        (0..rows).flat_map(|row| view.row_bytes([0, row / tokens, row % tokens]).to_vec()).collect()
    } else {
        let pages = CodePages::new(codec, Side::Keys, [1, heads, tokens, dim]);
        let mut pages = pages.map_err(|e| message(&e))?;
        CodePages::check(&view, None).map_err(|(e, _)| message(&e))?;
        pages.write(0, 0..tokens, &view, 0);
        (0..heads).flat_map(|head| pages.view().page(0, head).to_vec()).collect()
    };
    let page_bytes = (want.len() / heads) as u64;
    let row_bytes = if codec.dtype().is_some() { (dim * dtype.bytes()) as u64 } else { 0 };
    let count = |n: usize| u32::try_from(n).map_err(|e| message(&e));
    let params = Rows {
        x: [rows * dim, heads * dim, dim].map(|n| n as u64),
        pages: [heads as u64 * page_bytes, page_bytes, row_bytes],
        heads: count(heads)?,
        dim: count(dim)?,
        page: count(tokens)?,
        width: 1,
    };
    let run = Appended { batch: 0, first: 0, rows: count(tokens)?, sequence: 0, position: 0 };
    let runs = encoding::runs(&[run], params.heads).ok_or("more rows than a kernel counts")?;
    let groups = encoding::encode_groups(codec, dim, count(rows)?);
    let (x, table, runs) = (Values::elements(dtype, &x), Values::U32(vec![0]), Values::U32(runs));
    let pages = Written::Blank(ScalarType::U8, want.len());
    let generics = encoding::encode_generics(codec, dtype, dim);
    let (inputs, outputs, instance, work) = if codec.dtype().is_some() {
        let instance = encode::append::specialise(&generics);
        (vec![x, table, runs], vec![pages], instance, Work::Append(params, groups))
    } else {
        let instance = encode::encode::specialise(&generics);
        let (means, numbers) = (Values::F32(vec![0.0]), Values::U32(encoding::encode_table(codec, dim)));
        let inputs = vec![x, means, Values::F32(factors(codec, dim)), numbers, table, runs];
        let outputs = vec![pages, Written::Set(Values::U32(vec![u32::MAX]))];
        (inputs, outputs, instance, Work::Encode(params, groups))
    };
    Ok(Job {
        inputs,
        outputs,
        answer: 0,
        want: vec![(0, want.into_iter().map(f64::from).collect())],
        instance: native(instance.map_err(|e| message(&e))?, find)?,
        work,
    })
}

fn rotated(shape: &Shape, find: Option<Find>) -> Result<Job, String> {
    let (rows, dim) = (size(shape, "rows")?, size(shape, "dim")?);
    if !dim.is_power_of_two() {
        return Err(format!("a rotation of {dim} is not measured"));
    }
    let mut x = vec![0.0f32; rows * dim];
    fill(&mut x, 1, random_value);
    let factors = factors(Codec::Int8, dim);
    let mut want: Vec<f64> =
        x.iter().zip((0..rows).flat_map(|_| &factors[..dim])).map(|(x, sign)| f64::from(x * sign)).collect();
    want.par_chunks_mut(dim).for_each(|row| {
        let mut distance = 1;
        while distance < dim {
            for low in (0..dim).filter(|low| low & distance == 0) {
                let (a, b) = (row[low], row[low + distance]);
                (row[low], row[low + distance]) = (a + b, a - b);
            }
            distance *= 2;
        }
        row.iter_mut().for_each(|x| *x /= (dim as f64).sqrt());
    });
    let instance = hadamard::specialise(&[Generic::Usize(dim)]);
    Ok(Job {
        inputs: vec![Values::F32(x), Values::F32(factors)],
        outputs: vec![Written::Blank(ScalarType::F32, rows * dim)],
        answer: 0,
        want: vec![(0, want)],
        instance: native(instance.map_err(|e| e.to_string())?, find)?,
        work: Work::Hadamard(u32::try_from(rows).map_err(|e| e.to_string())?),
    })
}

/// Queries and keys of a block of a mask.
const BLOCK: [usize; 2] = [64, 128];

fn mask_tile_job(shape: &Shape, find: Option<Find>) -> Result<Job, String> {
    let (queries, keys) = (size(shape, "queries")?, size(shape, "keys")?);
    let blocks = [queries.div_ceil(BLOCK[0]), keys.div_ceil(BLOCK[1])];
    let mut rng = Rng::new(1);
    let tiles: Vec<u8> = (0..blocks[0] * blocks[1]).map(|_| rng.below(3) as u8).collect();
    let mut mask = vec![0u8; queries * keys];
    for (row, bytes) in mask.chunks_exact_mut(keys).enumerate() {
        for (column, keys) in bytes.chunks_mut(BLOCK[1]).enumerate() {
            let tile = tiles[row / BLOCK[0] * blocks[1] + column];
            keys.fill(u8::from(tile == 2));
            // In a block of a partial tile, only the first key of the first query is open.
            if tile == 1 && row.is_multiple_of(BLOCK[0]) {
                keys[0] = 1;
            }
        }
    }
    // A block of one key has nothing else to hide.
    let alone = |n: usize, all: usize, block: usize| all - n * block == 1;
    let want = tiles.iter().enumerate().map(|(n, &tile)| {
        let (row, column) = (n / blocks[1], n % blocks[1]);
        let open = tile == 1 && alone(row, queries, BLOCK[0]) && alone(column, keys, BLOCK[1]);
        if open { 2.0 } else { f64::from(tile) }
    });
    let count = |n: usize| u32::try_from(n).map_err(|e| e.to_string());
    let params = Mask {
        strides: [0, 0, keys as u64],
        step: 1,
        kind: 3,
        heads: 1,
        queries: count(queries)?,
        keys: count(keys)?,
        rows: BLOCK[0] as u32,
        columns: BLOCK[1] as u32,
        unused: 0,
    };
    Ok(Job {
        want: vec![(0, want.collect())],
        inputs: vec![Values::U8(mask)],
        outputs: vec![Written::Blank(ScalarType::U8, tiles.len())],
        answer: 0,
        instance: native(mask_tiles::specialise(&[]).map_err(|e| e.to_string())?, find)?,
        work: Work::Classify(params, [count(blocks[1])?, count(blocks[0])?, 1]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile_gpu::registry::KERNELS;

    #[test]
    fn every_kernel_has_a_workload() {
        for kernel in KERNELS {
            let workload = WORKLOADS.iter().find(|workload| workload.kernel.name == kernel.name);
            let workload = workload.unwrap_or_else(|| panic!("{} has no workload", kernel.name));
            let bench = workload.bench().unwrap_or_else(|| panic!("{} has no bench(..)", kernel.name));
            let names = |shape: &Shape| shape.sizes.iter().map(|(name, _)| *name).collect::<Vec<_>>();
            for shape in bench.shapes.iter().chain(workload.small) {
                assert_eq!(names(shape), names(&bench.shapes[0]), "{}", kernel.name);
                assert!((bench.bytes)(shape) > 0);
            }
        }
    }

    #[test]
    fn answers_on_the_simulator_are_right() {
        for workload in &WORKLOADS {
            for shape in workload.small {
                let simulated = workload.simulate(shape).unwrap();
                let bench = workload.bench().unwrap();
                assert!(simulated.error <= bench.tolerance, "{}: {}", simulated.entry, simulated.error);
                let moved = simulated.report.device_read + simulated.report.device_written;
                assert!(moved >= (bench.bytes)(shape), "{}: {moved} bytes", simulated.entry);
            }
        }
    }
}
