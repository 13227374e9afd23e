//! KV caches.

use crate::attention::{Call, Made, Results, Shapes};
use crate::cuda::borrowed;
use crate::cuda_cache::{CudaCache, CudaStep};
use crate::failure::{described_wrong, layouts, refused, step_refused};
use crate::memory::{Axes, DeviceList, DeviceMask, OnDevice, Stream};
use crate::process;
use flashtile::cache::{self as kv, PageStore};
use flashtile::gpu::GpuAttention;
use flashtile::{CacheDesc, HybridCache, KvCacheExt, SeqId, SeqLens, SequencesRef, StepTensors};
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use self_cell::{MutBorrow, self_cell};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// A sequence of a cache.
#[pyclass(frozen, eq, hash, module = "flashtile")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Sequence(SeqId);

#[pymethods]
impl Sequence {
    fn __repr__(&self) -> String {
        format!("<{}>", self.0)
    }
}

/// The stored rows of a sequence in all layers, in main memory.
#[pyclass(frozen, module = "flashtile")]
pub(crate) struct Snapshot(Vec<kv::Snapshot>);

#[pymethods]
impl Snapshot {
    fn __repr__(&self) -> String {
        format!("<Snapshot of {} tokens, {} bytes>", self.__len__(), self.nbytes())
    }

    /// Tokens of the sequence.
    fn __len__(&self) -> usize {
        self.0.first().map_or(0, kv::Snapshot::len)
    }

    /// Bytes of the rows.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.iter().map(kv::Snapshot::bytes).sum()
    }
}

/// A cache, wherever its rows are.
enum Held {
    Host(HybridCache),
    Cuda(Box<CudaCache>),
}

/// An expression over the cache of a [`Held`], which moves no rows.
macro_rules! with {
    ($held:expr, $cache:ident => $result:expr) => {
        match $held {
            Held::Host($cache) => $result,
            Held::Cuda(of) => {
                let $cache = &mut of.cache;
                $result
            }
        }
    };
}

/// An expression over the cache of a [`Held`], which moves rows, on a stream where the cache is on a device.
macro_rules! work {
    ($held:expr, $stream:expr, $cache:ident => $result:expr) => {
        match ($held, $stream) {
            (Held::Host($cache), None) => $result.map_err(refused),
            (Held::Cuda(of), Some(stream)) => of.work(stream, |$cache| $result),
            (held, _) => Err(held.elsewhere()),
        }
    };
}

impl Held {
    /// An empty cache in main memory, or on the device of a stream.
    fn new(layers: &[CacheDesc], of_keys: [&OfLayers; 2], stream: Option<Stream>) -> PyResult<Self> {
        let mut held = match stream {
            None => Self::Host(HybridCache::new(layers).map_err(refused)?),
            Some(stream) => Self::Cuda(Box::new(CudaCache::new(layers, stream)?)),
        };
        work!(&mut held, stream, cache => set_key_transforms(cache, of_keys))?;
        Ok(held)
    }

    fn step(&mut self, batch: &[(SeqId, usize)], stream: Option<Stream>) -> PyResult<Stepping<'_>> {
        match (self, stream) {
            (Self::Host(cache), None) => {
                let layouts = layouts(cache);
                cache.step(batch).map(Stepping::Host).map_err(|error| step_refused(error, &layouts))
            }
            (Self::Cuda(cache), Some(stream)) => cache.step(batch, stream).map(Stepping::Cuda),
            (held, _) => Err(held.elsewhere()),
        }
    }

    fn elsewhere(&self) -> PyErr {
        elsewhere(matches!(self, Self::Cuda(_)))
    }
}

/// The error of a call that is not where the cache is.
fn elsewhere(is_cuda: bool) -> PyErr {
    PyBufferError::new_err(match is_cuda {
        true => "the cache is on a CUDA device, and the call names no stream of it",
        false => "the cache is on the CPU, and the call names a stream of a CUDA device",
    })
}

/// Means, or factors, of the keys of each layer that has some; empty where no layer has any.
type OfLayers = [Option<Vec<f32>>];

fn set_key_transforms<S: PageStore>(
    cache: &mut HybridCache<S>,
    [means, factors]: [&OfLayers; 2],
) -> Result<(), S::Error> {
    for (layer, mean) in means.iter().enumerate() {
        mean.as_ref().map_or(Ok(()), |mean| cache.set_key_mean(layer, mean))?;
    }
    for (layer, factors) in factors.iter().enumerate() {
        factors.as_ref().map_or(Ok(()), |factors| cache.set_key_factors(layer, factors))?;
    }
    Ok(())
}

/// A CUDA device, and the handle of one of its streams, as Python gives them.
type DeviceStream = Option<(i32, usize)>;

fn named(stream: DeviceStream) -> Option<Stream> {
    stream.map(|(device, handle)| Stream { device, handle })
}

/// Where a cache is while no step is open.
type Home = Arc<Mutex<Option<Held>>>;

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A cache, which `KvCache` of the Python files wraps.
#[pyclass(frozen, module = "flashtile._flashtile")]
pub(crate) struct Cache {
    home: Home,
}

impl Cache {
    fn with<T>(&self, py: Python<'_>, run: impl FnOnce(&mut Held) -> PyResult<T>) -> PyResult<T> {
        process::check()?;
        // The interpreter is kept as long as the lock, so that no other thread forks meanwhile. A thread that waits for the lock gives the
        // interpreter to the one that has it.
        let mut home = loop {
            match self.home.try_lock() {
                Ok(home) => break home,
                Err(TryLockError::Poisoned(home)) => break home.into_inner(),
                Err(TryLockError::WouldBlock) => py.detach(|| drop(lock(&self.home))),
            }
        };
        home.as_mut().map(run).ok_or_else(open)?
    }

    /// As `with`, of a call that copies rows or waits for a device, while other threads run the interpreter.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut Held) -> PyResult<T> + Send,
    ) -> PyResult<T> {
        process::compute()?;
        py.detach(|| lock(&self.home).as_mut().map(run).ok_or_else(open)?)
    }
}

fn open() -> PyErr {
    PyRuntimeError::new_err("a step of this cache is open: finish it or leave its with block")
}

#[pymethods]
impl Cache {
    /// An empty cache with descriptions of its layers in JSON, and for each layer the mean and the factors `[kv_heads * head_dim]` of its keys, if
    /// there are some; in main memory, or on the device of a stream.
    #[new]
    fn new(
        layers: &str,
        means: Vec<Option<Vec<f32>>>,
        factors: Vec<Option<Vec<f32>>>,
        stream: DeviceStream,
    ) -> PyResult<Self> {
        let layers: Vec<CacheDesc> = serde_json::from_str(layers).map_err(|error| described_wrong(&error))?;
        let held = Held::new(&layers, [&means, &factors], named(stream))?;
        Ok(Self { home: Arc::new(Mutex::new(Some(held))) })
    }

    fn create(&self, py: Python<'_>) -> PyResult<Sequence> {
        self.with(py, |held| with!(held, cache => cache.create().map(Sequence).map_err(refused)))
    }

    /// A stream is that of a cache on a device, on which the work is, and `None` for a cache in main memory, here and in what follows.
    fn fork(&self, py: Python<'_>, sequence: &Sequence, stream: DeviceStream) -> PyResult<Sequence> {
        self.with(py, |held| Ok(Sequence(work!(held, named(stream), cache => cache.fork(sequence.0))?)))
    }

    fn remove(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<()> {
        self.with(py, |held| with!(held, cache => cache.remove(sequence.0).map_err(refused)))
    }

    fn len(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<usize> {
        self.with(py, |held| with!(held, cache => cache.len(sequence.0).map_err(refused)))
    }

    fn truncate(&self, py: Python<'_>, sequence: &Sequence, len: usize) -> PyResult<()> {
        self.with(py, |held| with!(held, cache => cache.truncate(sequence.0, len).map_err(refused)))
    }

    fn forget(&self, py: Python<'_>, sequence: &Sequence, before: usize) -> PyResult<()> {
        self.with(py, |held| with!(held, cache => cache.forget(sequence.0, before).map_err(refused)))
    }

    /// Refuses a cache with rows that could not be stored, which a device finds out as it encodes them.
    fn check_stored(&self, py: Python<'_>, stream: DeviceStream) -> PyResult<()> {
        self.wait(py, |held| work!(held, named(stream), cache => cache.check_stored()))
    }

    /// Copies the rows of a sequence to main memory.
    fn snapshot(&self, py: Python<'_>, sequence: &Sequence, stream: DeviceStream) -> PyResult<Snapshot> {
        self.wait(py, |held| Ok(Snapshot(work!(held, named(stream), cache => cache.snapshot(sequence.0))?)))
    }

    /// A new sequence with the rows of a snapshot.
    fn restore(&self, py: Python<'_>, snapshot: &Snapshot, stream: DeviceStream) -> PyResult<Sequence> {
        self.wait(py, |held| Ok(Sequence(work!(held, named(stream), cache => cache.restore(&snapshot.0))?)))
    }

    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let memory = self.with(py, |held| Ok(with!(held, cache => cache.memory())))?;
        let fields = [
            ("bytes_reserved", memory.bytes_reserved),
            ("bytes_used", memory.bytes_used),
            ("pages", memory.pages),
            ("pages_free", memory.pages_free),
            ("pages_shared", memory.pages_shared),
            ("sequences", memory.sequences),
            ("tokens", memory.tokens),
        ];
        let dict = PyDict::new(py);
        fields.into_iter().try_for_each(|(name, value)| dict.set_item(name, value))?;
        Ok(dict)
    }

    /// Begins a step: takes the cache from its place until the step ends.
    fn step(
        &self,
        py: Python<'_>,
        batch: Vec<(Py<Sequence>, usize)>,
        stream: DeviceStream,
    ) -> PyResult<Step> {
        process::compute()?;
        let batch: Vec<(SeqId, usize)> =
            batch.iter().map(|(sequence, tokens)| (sequence.get().0, *tokens)).collect();
        let home = Arc::clone(&self.home);
        let running = py.detach(|| {
            let mut place = lock(&home);
            let held = place.take().ok_or_else(open)?;
            let begun = Running::try_new_or_recover(MutBorrow::new(held), |held| {
                held.borrow_mut().step(&batch, named(stream)).map(Some)
            });
            begun.map_err(|(held, error)| {
                *place = Some(held.into_inner());
                error
            })
        })?;
        Ok(Step { running: Mutex::new(Some(running)), home })
    }
}

/// A step over a cache, wherever its rows are.
enum Stepping<'c> {
    Host(flashtile::Step<'c>),
    Cuda(CudaStep<'c>),
}

impl Stepping<'_> {
    fn finish(self) -> flashtile::Result<()> {
        match self {
            Self::Host(step) => step.finish(),
            Self::Cuda(step) => step.step.finish(),
        }
    }

    fn lens(&self) -> &[SeqLens] {
        match self {
            Self::Host(step) => step.lens(),
            Self::Cuda(step) => step.step.lens(),
        }
    }

    fn elsewhere(&self) -> PyErr {
        elsewhere(matches!(self, Self::Cuda(_)))
    }
}

/// A step, until it ends.
type Begun<'c> = Option<Stepping<'c>>;

self_cell!(
    struct Running {
        owner: MutBorrow<Held>,

        #[covariant]
        dependent: Begun,
    }
);

/// A step of a cache. Ended without `finish`, it takes its tokens back.
#[pyclass(frozen, module = "flashtile._flashtile")]
pub(crate) struct Step {
    running: Mutex<Option<Running>>,
    home: Home,
}

impl Step {
    /// Ends the step, and puts the cache back.
    fn end(&self, keep: bool) -> PyResult<()> {
        process::check()?;
        let mut running = lock(&self.running).take().ok_or_else(ended)?;
        let result = running.with_dependent_mut(|_, step| match step.take() {
            Some(step) if keep => step.finish(),
            _ => Ok(()),
        });
        *lock(&self.home) = Some(running.into_owner().into_inner());
        result.map_err(refused)
    }
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("the step has ended")
}

impl Step {
    /// Calls a function with the step, unless that has ended, while other threads run the interpreter.
    fn with(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut Stepping<'_>) -> PyResult<()> + Send,
    ) -> PyResult<()> {
        py.detach(|| {
            let mut running = lock(&self.running);
            let running = running.as_mut().ok_or_else(ended)?;
            running.with_dependent_mut(|_, step| run(step.as_mut().ok_or_else(ended)?))
        })
    }

    fn attend_on_host(
        &self,
        layer: usize,
        call: &Call,
        out: &Bound<'_, PyAny>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Results> {
        let (Call { options, q, k, v }, axes) = (call, Axes::Packed);
        let rows = StepTensors { q: q.view(axes)?, k: k.view(axes)?, v: v.view(axes)? };
        let attention = options.attention()?;
        let [batch, heads, tokens, _] = rows.q.shape();
        let shape = [batch, heads, tokens, rows.v.shape()[3]];
        let mut made = Made::new(out, options, Shapes::of(axes, shape), make)?;
        let mut outputs = made.outputs(axes, &call.memory())?;
        self.with(make.py(), |step| match step {
            Stepping::Host(step) => step.attend_with(layer, rows, &attention, &mut outputs).map_err(refused),
            step => Err(step.elsewhere()),
        })?;
        Ok(made.results())
    }

    /// Returns before the work has ended.
    fn attend_on_device(
        &self,
        layer: usize,
        (call, stream): (&Call, Stream),
        out: &Bound<'_, PyAny>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Results> {
        let (Call { options, q, k, v }, axes) = (call, Axes::Packed);
        let (cuda, caller) = borrowed(stream).map_err(refused)?;
        let on = OnDevice { gpu: cuda.gpu(), stream };
        let [q_tensor, k_tensor, v_tensor] =
            [q.device_tensor(axes, on)?, k.device_tensor(axes, on)?, v.device_tensor(axes, on)?];
        let rows = StepTensors {
            q: q_tensor.view().map_err(refused)?,
            k: k_tensor.view().map_err(refused)?,
            v: v_tensor.view().map_err(refused)?,
        };
        let mask = options.mask().map(|mask| mask.device_mask(on)).transpose()?;
        let (slopes, sinks) = (options.slopes_on(on)?, options.sinks_on(on)?);
        let mut attention = GpuAttention::from(options.numbers());
        attention.mask = mask.as_ref().map(DeviceMask::view).transpose().map_err(refused)?;
        attention.alibi_slopes = slopes.as_ref().map(DeviceList::view);
        attention.sinks = sinks.as_ref().map(DeviceList::view);
        let [batch, heads, tokens, _] = q_tensor.shape;
        let shape = [batch, heads, tokens, v_tensor.shape[3]];
        let mut made = Made::new(out, options, Shapes::of(axes, shape), make)?;
        made.on_device(axes, &call.memory(), on, |outputs| {
            self.with(make.py(), |step| match step {
                Stepping::Cuda(step) => step.attend(layer, rows, &attention, outputs, &caller),
                step => Err(step.elsewhere()),
            })
        })?;
        Ok(made.results())
    }
}

#[pymethods]
impl Step {
    /// Stores the rows of a layer and attends. `tensors` are q, k, v and out `(tokens, heads, dim)`; the rest is as for `attention`. The
    /// options of a step over a device name a stream.
    fn attend(
        &self,
        layer: usize,
        tensors: [Bound<'_, PyAny>; 4],
        options: &Bound<'_, PyTuple>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Results> {
        process::check()?;
        let [q, k, v, out] = &tensors;
        let call = Call::new([q, k, v], options)?;
        if !matches!(call.options.numbers().sequences, SequencesRef::Dense) {
            return Err(PyValueError::new_err(
                "q_lens, kv_lens and cu_seqlens divide tensors into sequences: a step does that",
            ));
        }
        if call.options.is_of_sequences() {
            let (lens, heads) = (self.lens(make.py())?, call.q.sizes(Axes::Packed)?[1]);
            call.options.check_slopes_of(lens.len(), heads, false)?;
            call.options.check_masks_of(&lens)?;
        }
        match call.options.stream {
            None => self.attend_on_host(layer, &call, out, make),
            Some(stream) => self.attend_on_device(layer, (&call, stream), out, make),
        }
    }

    /// Ends the step and keeps its tokens.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.end(true))
    }

    /// Ends the step and takes its tokens back.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.end(false))
    }

    /// Queries and keys of each sequence in this step.
    fn lens(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize)>> {
        process::check()?;
        py.detach(|| {
            let running = lock(&self.running);
            let step = running.as_ref().and_then(|running| running.borrow_dependent().as_ref());
            let lens =
                |step: &Stepping<'_>| step.lens().iter().map(|lens| (lens.q_len, lens.kv_len)).collect();
            step.map(lens).ok_or_else(ended)
        })
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if process::is_forked() {
            // A thread of the parent may have been in the middle of the step.
            std::mem::forget(self.running.get_mut().map(Option::take));
            return;
        }
        // A step that nobody ended gives the cache back.
        let _ = self.end(false);
    }
}
