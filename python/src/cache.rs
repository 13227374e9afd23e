//! KV caches.

use crate::attention::{Made, Results, Shapes};
use crate::failure::{described_wrong, refused, step_refused};
use crate::memory::{Axes, Memory};
use crate::options::Options;
use crate::process;
use flashtile::cache::CacheLayout;
use flashtile::{CacheDesc, HybridCache, KvCacheExt, SeqId, SequencesRef, StepTensors};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
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

/// Where a cache is while no step is open.
type Home = Arc<Mutex<Option<HybridCache>>>;

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A cache, which `KvCache` of the Python files wraps.
#[pyclass(frozen, module = "flashtile._flashtile")]
pub(crate) struct Cache {
    home: Home,
}

impl Cache {
    fn with<T>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut HybridCache) -> flashtile::Result<T>,
    ) -> PyResult<T> {
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
        home.as_mut().map(run).ok_or_else(open)?.map_err(refused)
    }
}

fn open() -> PyErr {
    PyRuntimeError::new_err("a step of this cache is open: finish it or leave its with block")
}

#[pymethods]
impl Cache {
    /// An empty cache with descriptions of its layers in JSON, and for each layer the mean `[kv_heads * head_dim]` of its keys, if there is one.
    #[new]
    fn new(layers: &str, means: Vec<Option<Vec<f32>>>) -> PyResult<Self> {
        let layers: Vec<CacheDesc> = serde_json::from_str(layers).map_err(|error| described_wrong(&error))?;
        let mut cache = HybridCache::new(&layers).map_err(refused)?;
        for (layer, mean) in means.iter().enumerate() {
            if let Some(mean) = mean {
                cache.set_key_mean(layer, mean).map_err(refused)?;
            }
        }
        Ok(Self { home: Arc::new(Mutex::new(Some(cache))) })
    }

    fn create(&self, py: Python<'_>) -> PyResult<Sequence> {
        self.with(py, |cache| Ok(Sequence(cache.create()?)))
    }

    fn fork(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<Sequence> {
        self.with(py, |cache| Ok(Sequence(cache.fork(sequence.0)?)))
    }

    fn remove(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<()> {
        self.with(py, |cache| Ok(cache.remove(sequence.0)?))
    }

    fn len(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<usize> {
        self.with(py, |cache| Ok(cache.len(sequence.0)?))
    }

    fn truncate(&self, py: Python<'_>, sequence: &Sequence, len: usize) -> PyResult<()> {
        self.with(py, |cache| Ok(cache.truncate(sequence.0, len)?))
    }

    fn forget(&self, py: Python<'_>, sequence: &Sequence, before: usize) -> PyResult<()> {
        self.with(py, |cache| Ok(cache.forget(sequence.0, before)?))
    }

    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let memory = self.with(py, |cache| Ok(cache.memory()))?;
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
    fn step(&self, py: Python<'_>, batch: Vec<(Py<Sequence>, usize)>) -> PyResult<Step> {
        process::compute()?;
        let batch: Vec<(SeqId, usize)> =
            batch.iter().map(|(sequence, tokens)| (sequence.get().0, *tokens)).collect();
        let home = Arc::clone(&self.home);
        let running = py.detach(|| {
            let mut place = lock(&home);
            let cache = place.take().ok_or_else(open)?;
            let layouts: Vec<CacheLayout> = cache.groups().iter().map(|group| group.desc().layout).collect();
            let begun = Running::try_new_or_recover(MutBorrow::new(cache), |cache| {
                cache.borrow_mut().step(&batch).map(Some)
            });
            begun.map_err(|(cache, error)| {
                *place = Some(cache.into_inner());
                step_refused(error, &layouts)
            })
        })?;
        Ok(Step { running: Mutex::new(Some(running)), home })
    }
}

/// A step, until it ends.
type Begun<'c> = Option<flashtile::Step<'c>>;

self_cell!(
    struct Running {
        owner: MutBorrow<HybridCache>,

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

#[pymethods]
impl Step {
    /// Stores the rows of a layer and attends. `tensors` are q, k, v and out `(tokens, heads, dim)`; the rest is as for `attention`.
    fn attend(
        &self,
        layer: usize,
        tensors: [Bound<'_, PyAny>; 4],
        options: &Bound<'_, PyTuple>,
        make: &Bound<'_, PyAny>,
    ) -> PyResult<Results> {
        let py = make.py();
        process::check()?;
        let axes = Axes::Packed;
        let [q, k, v, out] = &tensors;
        let options = Options::of(options)?;
        let (q, k, v) = (Memory::of("q", q)?, Memory::of("k", k)?, Memory::of("v", v)?);
        let views = StepTensors { q: q.view(axes)?, k: k.view(axes)?, v: v.view(axes)? };
        let attention = options.attention()?;
        if !matches!(attention.sequences, SequencesRef::Dense) {
            return Err(PyValueError::new_err(
                "q_lens, kv_lens and cu_seqlens divide tensors into sequences: a step does that",
            ));
        }
        let [batch, heads, tokens, _] = views.q.shape();
        if options.has_slopes() {
            options.check_slopes_of(self.lens(py)?.len(), heads, false)?;
        }
        let shape = [batch, heads, tokens, views.v.shape()[3]];
        let mut made = Made::new(out, &options, Shapes::of(axes, shape), make)?;
        let mut others = vec![&q, &k, &v];
        others.extend(options.mask());
        let mut outputs = made.outputs(axes, &others)?;
        let done = py.detach(|| {
            let mut running = lock(&self.running);
            running.as_mut()?.with_dependent_mut(|_, step| {
                Some(step.as_mut()?.attend_with(layer, views, &attention, &mut outputs))
            })
        });
        done.ok_or_else(ended)?.map_err(refused)?;
        Ok(made.results())
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
            let lens = |step: &flashtile::Step<'_>| {
                step.lens().iter().map(|lens| (lens.q_len, lens.kv_len)).collect()
            };
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
