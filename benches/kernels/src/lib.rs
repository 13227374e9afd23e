//! Workloads of the portable GPU kernels: seeded inputs and expected answers. The program of this crate measures them.
//!
//! A kernel's `bench(..)` gives the shapes, the bytes read and written, the operations and the tolerance. A
//! [`Workload`] makes inputs for a shape and computes the expected answer independently: by the f64 oracle of attention, by caches in
//! main memory, by sums and transforms in f64, or from how a mask was made. The library's own host code launches the kernel: sessions and
//! page stores, on a device that watches for it.
//!
//! ```
//! for workload in &flashtile_kernel_bench::WORKLOADS[4..] {
//!     let counted = workload.simulate(&workload.small[0])?;
//!     println!("{}: {} bytes read, error {:e}", counted.entry, counted.report.device_read, counted.error);
//! }
//! # Ok::<(), String>(())
//! ```

mod attention;
mod backward;
mod data;
mod device;
mod plain;
mod rows;

use backward::Answer;
use data::{Find, Want};
use device::Watched;
use flashtile_gpu::kernels::backward::{d_bias, d_kv, d_q, row_terms, sum_rows};
use flashtile_gpu::kernels::copy;
use flashtile_gpu::kernels::formats::{BF16, TQ4};
use flashtile_gpu::kernels::{cache, decode, encode, mask_tiles, merge, prefill, rotation};
use flashtile_kernel::LaunchError;
use flashtile_kernel::simulator::{Report, Simulator};
use flashtile_kernel::source::Shape;
use flashtile_kernel::{Bench, HostAccess, Kernel};
use rows::Operation;
use std::cell::RefCell;

/// How a kernel is benchmarked.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// Shapes, bytes, operations and tolerance.
    pub kernel: &'static Kernel,
    /// Shapes small enough for the simulator, with the same size parameters as the kernel's own.
    pub small: &'static [Shape],
    /// Makes the workload of a shape; if given a function that finds native code, for instances that have it.
    job: fn(&Shape, Option<Find>) -> Result<Job, String>,
}

/// The benchmark of every kernel.
pub static WORKLOADS: [Workload; 15] = [
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
        job: |shape, find| attention::decode(shape, find).map(Job::from),
    },
    Workload {
        kernel: &merge::merge::KERNEL,
        small: &[Shape { sizes: &[("rows", 8), ("splits", 5), ("dim", 128)] }],
        job: |shape, find| attention::merge(shape, find).map(Job::from),
    },
    Workload {
        kernel: &prefill::prefill::KERNEL,
        small: &[Shape { sizes: &[("batch", 1), ("length", 80), ("heads", 2), ("dim", 64)] }],
        job: |shape, find| attention::prefill(shape, find).map(Job::from),
    },
    Workload {
        kernel: &encode::encode::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 128)] }],
        job: |shape, _| rows::job(shape, Operation::Encode).map(Job::from),
    },
    Workload {
        kernel: &encode::append::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 128)] }],
        job: |shape, _| rows::job(shape, Operation::Append).map(Job::from),
    },
    Workload {
        kernel: &cache::copy_rows::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 128)] }],
        job: |shape, _| rows::job(shape, Operation::Copy).map(Job::from),
    },
    Workload {
        kernel: &cache::read_codes::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 128)] }],
        job: |shape, _| rows::job(shape, Operation::ReadCodes).map(Job::from),
    },
    Workload {
        kernel: &cache::read_elements::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 128)] }],
        job: |shape, _| rows::job(shape, Operation::ReadElements).map(Job::from),
    },
    Workload {
        kernel: &rotation::hadamard::KERNEL,
        small: &[Shape { sizes: &[("rows", 10), ("dim", 128)] }],
        job: |shape, _| plain::rotation(shape).map(Job::from),
    },
    Workload {
        kernel: &mask_tiles::mask_tiles::KERNEL,
        small: &[Shape { sizes: &[("queries", 100), ("keys", 300)] }],
        job: |shape, _| plain::mask_tiles(shape).map(Job::from),
    },
    Workload {
        kernel: &row_terms::row_terms::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("dim", 64)] }],
        job: |shape, _| backward::terms(shape).map(Job::from),
    },
    Workload {
        kernel: &d_q::backward_q::KERNEL,
        small: &[BACKWARD],
        job: |shape, _| backward::products(shape, Answer::DQ).map(Job::from),
    },
    Workload {
        kernel: &d_kv::backward_kv::KERNEL,
        small: &[BACKWARD],
        job: |shape, _| backward::products(shape, Answer::DK).map(Job::from),
    },
    Workload {
        kernel: &d_bias::backward_bias::KERNEL,
        small: &[BACKWARD],
        job: |shape, _| backward::products(shape, Answer::DBias).map(Job::from),
    },
    Workload {
        kernel: &sum_rows::sum_rows::KERNEL,
        small: &[Shape { sizes: &[("rows", 40), ("heads", 2)] }],
        job: |shape, _| backward::sums(shape).map(Job::from),
    },
];

/// The small shape of kernels of the backward pass that multiply.
const BACKWARD: Shape = Shape { sizes: &[("batch", 1), ("length", 40), ("heads", 2), ("dim", 64)] };

/// Inputs of a kernel and the expected answer.
struct Job {
    want: Want,
    work: Work,
}

/// The computation of a job, with its tensors on the host.
enum Work {
    Attention(Box<attention::Work>),
    Backward(Box<backward::Work>),
    Rows(Box<rows::Work>),
    Plain(Box<plain::Work>),
}

macro_rules! jobs {
    ($($Variant:ident $module:ident)*) => {$(
        impl From<(Want, $module::Work)> for Job {
            fn from((want, work): (Want, $module::Work)) -> Self {
                Self { want, work: Work::$Variant(Box::new(work)) }
            }
        }
    )*};
}
jobs!(Attention attention Backward backward Rows rows Plain plain);

/// A [`Work`] whose tensors lie in the memory of a device.
enum Placed<D: HostAccess + Clone>
where
    D::Memory: 'static,
{
    Attention(Box<attention::Placed<D>>),
    Backward(Box<backward::Placed<D>>),
    Rows(Box<rows::Placed<D>>),
    Plain(Box<plain::Placed<D>>),
}

impl Work {
    fn place<D: HostAccess<Memory: 'static> + Clone>(
        &self,
        device: D,
        find: Option<Find>,
    ) -> Result<Placed<D>, String> {
        Ok(match self {
            Self::Attention(work) => Placed::Attention(Box::new(work.place(device, find)?)),
            Self::Backward(work) => Placed::Backward(Box::new(work.place(device, find)?)),
            Self::Rows(work) => Placed::Rows(Box::new(work.place(device, find)?)),
            Self::Plain(work) => Placed::Plain(Box::new(work.place(device, find)?)),
        })
    }
}

impl<D: HostAccess<Memory: 'static> + Clone> Placed<D> {
    fn launch(&mut self) -> Result<(), String> {
        match self {
            Self::Attention(placed) => placed.launch(),
            Self::Backward(placed) => placed.launch(),
            Self::Rows(placed) => placed.launch(),
            Self::Plain(placed) => placed.launch(),
        }
    }

    fn answer(&mut self) -> Result<Vec<f64>, String> {
        match self {
            Self::Attention(placed) => placed.answer(),
            Self::Backward(placed) => placed.answer(),
            Self::Rows(placed) => placed.answer(),
            Self::Plain(placed) => placed.answer(),
        }
    }
}

impl Job {
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

/// Counts of a launch on the simulator.
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

    /// Launches a small shape on the simulator, which checks every access, and compares the answer. Counts are sums over the
    /// launches of the kernel.
    ///
    /// # Errors
    /// Why the launch failed or the answer is wrong.
    pub fn simulate(&self, shape: &Shape) -> Result<Simulated, String> {
        let find: Find = flashtile_gpu::simulator::find;
        let job = (self.job)(shape, Some(find))?;
        let (simulator, counts) = (Simulator::new(), RefCell::new((0, Report::default())));
        let after = |threads| {
            let (all, sum) = &mut *counts.borrow_mut();
            *all += threads;
            add(sum, &simulator.report());
        };
        let watched = Watched::new(&simulator, self.kernel.name, &after);
        let mut placed = job.work.place(&watched, Some(find))?;
        // Making the input of a kernel may launch it too.
        counts.take();
        placed.launch()?;
        let error = job.error(&placed.answer()?);
        let entry = watched.entry.take().ok_or("the kernel was not launched")?;
        let (threads, report) = counts.take();
        Ok(Simulated { entry, shape: *shape, threads, report, error })
    }

    /// Launches a shape on a CUDA device, compares the answer, and times the kernel.
    ///
    /// Runs cycle through copies of the inputs that together exceed the caches.
    ///
    /// # Errors
    /// Why the launch failed or the answer is wrong.
    pub fn time(
        &self,
        gpu: &flashtile_kernel::cuda::Gpu,
        shape: &Shape,
        runs: usize,
    ) -> Result<Timed, String> {
        let job = (self.job)(shape, None)?;
        let bytes = self.bench().map_or(0, |bench| (bench.bytes)(shape)).max(1);
        let sets = BEYOND_CACHES.div_ceil(bytes).clamp(1, MAX_SETS) as usize;
        let watched = Watched::new(gpu, self.kernel.name, &|_| {});
        let mut all = (0..sets).map(|_| job.work.place(&watched, None)).collect::<Result<Vec<_>, _>>()?;
        all.iter_mut().try_for_each(Placed::launch)?;
        let error = all
            .iter_mut()
            .try_fold(0.0f64, |worst, placed| Ok::<_, String>(worst.max(job.error(&placed.answer()?))))?;
        watched.only.set(true);
        let mut turn = 0;
        let timing = gpu.time::<TimeError>(runs, || {
            turn += 1;
            all[(turn - 1) % sets].launch().map_err(TimeError)
        });
        let timing = timing.map_err(|TimeError(why)| why)?;
        let (seconds, spread) = (timing.median(), timing.spread());
        let entry = watched.entry.take().ok_or("the kernel was not launched")?;
        Ok(Timed { entry, shape: *shape, seconds, spread, error })
    }
}

/// Why a measurement failed.
struct TimeError(String);

impl From<flashtile_kernel::cuda::Error> for TimeError {
    fn from(error: flashtile_kernel::cuda::Error) -> Self {
        Self(error.to_string())
    }
}

/// Adds the counts of a launch.
fn add(sum: &mut Report, of: &Report) {
    sum.device_read += of.device_read;
    sum.device_written += of.device_written;
    sum.shared_read += of.shared_read;
    sum.shared_written += of.shared_written;
    sum.atomics += of.atomics;
    sum.simd_operations += of.simd_operations;
    sum.barriers += of.barriers;
}

/// After this many bytes of other accesses, caches hold nothing of an input.
const BEYOND_CACHES: u64 = 256 << 20;

/// The largest number of copies of the inputs.
const MAX_SETS: u64 = 64;

/// Bytes per second that a device copies, counting reads and writes: memory beyond its caches, the best of several
/// runs.
///
/// # Errors
/// Errors of the device.
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
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
