//! A device and the kernels compiled for it.

use super::compile::{Access, Compiler, Kernels, Source};
use super::error::CudaError;
use super::library;
use super::module::Function;
use super::prepared::{DeviceMemory, Prepared};
use crate::Problem;
use crate::plan::{CudaFacts, CudaPlan, PlanOptions, Unsupported};
use cudarc::driver::{CudaContext, CudaStream, sys};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A CUDA device: what it can do, and the kernels that are loaded on it. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Cuda {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Arc<CudaContext>,
    name: String,
    facts: CudaFacts,
    kernels: Kernels,
    loaded: Mutex<HashMap<(Source, &'static str), Arc<Function>>>,
}

impl Cuda {
    /// Number of devices of this machine.
    ///
    /// # Errors
    /// [`CudaError::Missing`] where there is no driver, [`CudaError::Driver`] where it does not answer.
    pub fn count() -> Result<usize, CudaError> {
        library::driver()?;
        cudarc::driver::result::init().map_err(CudaError::driver("start of the driver"))?;
        let count = CudaContext::device_count().map_err(CudaError::driver("count of devices"))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The device of a number, in its primary context: the one that other libraries use too.
    ///
    /// # Errors
    /// As [`Cuda::count`], [`CudaError::NoDevice`], and [`CudaError::Unsupported`] where it is older than the kernels.
    pub fn new(ordinal: usize) -> Result<Self, CudaError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(CudaError::driver("context"))?;
        Self::with_context(context)
    }

    /// The device of a context.
    ///
    /// # Errors
    /// [`CudaError::Driver`], and [`CudaError::Unsupported`] where the device is older than the kernels.
    pub fn with_context(context: Arc<CudaContext>) -> Result<Self, CudaError> {
        use sys::CUdevice_attribute as Attribute;
        let get = |attribute: Attribute| {
            let value = context.attribute(attribute).map_err(CudaError::driver("facts of the device"))?;
            Ok::<usize, CudaError>(usize::try_from(value).unwrap_or(0))
        };
        let facts = CudaFacts {
            capability: (
                get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
                get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
            ),
            multiprocessors: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_multiprocessor: get(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            registers_per_multiprocessor: get(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            )?,
            l2: get(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        };
        let least = crate::plan::LEAST_CAPABILITY;
        if facts.capability < least {
            return Err(Unsupported::Capability { got: facts.capability, least }.into());
        }
        let name = context.name().map_err(CudaError::driver("name of the device"))?;
        let loaded = Mutex::new(HashMap::new());
        Ok(Self { inner: Arc::new(Inner { context, name, facts, kernels: Kernels::new(), loaded }) })
    }

    /// The device's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Facts of the device, for the planner.
    #[must_use]
    pub fn facts(&self) -> &CudaFacts {
        &self.inner.facts
    }

    /// The context in which everything happens.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Folder of compiled kernels; none where they are not kept.
    #[must_use]
    pub fn cache_folder(&self) -> Option<&Path> {
        self.inner.kernels.disk.folder()
    }

    /// Version of the compiler, and where it was found.
    ///
    /// # Errors
    /// [`CudaError::Missing`].
    pub fn compiler(&self) -> Result<((i32, i32), String), CudaError> {
        let compiler: Arc<Compiler> = self.inner.kernels.compiler()?;
        Ok((compiler.version(), compiler.place.clone()))
    }

    /// Plans a problem for this device.
    ///
    /// # Errors
    /// As [`CudaPlan::new`].
    pub fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<CudaPlan, Unsupported> {
        CudaPlan::new(problem, &self.inner.facts, options)
    }

    /// Compiles the kernels of plans, keeps them on disk and loads them, so that no later call waits for the compiler: those for
    /// rows that start on 16 bytes, and those for any others. Several are compiled at a time.
    ///
    /// # Errors
    /// [`CudaError::Missing`], [`CudaError::Compile`], [`CudaError::Driver`], or [`CudaError::KernelFolder`] where they could not be
    /// kept; they are loaded then.
    pub fn prewarm(&self, plans: &[CudaPlan]) -> Result<(), CudaError> {
        use rayon::prelude::*;
        let mut wanted: Vec<(Source, &'static str, usize)> = Vec::new();
        for plan in plans {
            for kernel in plan.kernels() {
                for access in [Access::Vector, Access::Element] {
                    wanted.push((Source::forward(kernel, access), "forward", kernel.shared_bytes()));
                }
            }
            if !plan.class_tables().is_empty() {
                wanted.push((Source::classify(), "classify", 0));
            }
        }
        wanted.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        wanted.dedup();
        let kept: Vec<Result<(), CudaError>> = wanted
            .into_par_iter()
            .map(|(source, entry, shared)| self.load(source, entry, shared).map(|(_, kept)| kept))
            .collect::<Result<_, _>>()?;
        kept.into_iter().collect()
    }

    /// A function of a kernel, compiled and loaded if it is not yet; and what became of keeping it on disk.
    fn load(
        &self,
        source: Source,
        entry: &'static str,
        shared: usize,
    ) -> Result<(Arc<Function>, Result<(), CudaError>), CudaError> {
        let loaded = || self.inner.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (source, entry);
        if let Some(function) = loaded().get(&key) {
            return Ok((function.clone(), Ok(())));
        }
        // Not under the lock: other kernels may be compiled meanwhile. Of two threads that compile the same one, the later
        // drops its own.
        let (code, kept) = self.inner.kernels.code(&key.0, self.inner.facts.capability)?;
        let function = Function::load(&self.inner.context, &key.0.name, &code, entry, shared)?;
        Ok((loaded().entry(key).or_insert_with(|| Arc::new(function)).clone(), kept))
    }

    pub(super) fn function(
        &self,
        source: Source,
        entry: &'static str,
        shared: usize,
    ) -> Result<Arc<Function>, CudaError> {
        self.load(source, entry, shared).map(|(function, _)| function)
    }

    /// What runs of a plan need: its kernels loaded, its schedule in device memory, room for partial results. Allocates
    /// [`CudaPlan::workspace_bytes`] on the device and copies the schedule there on the stream.
    ///
    /// # Errors
    /// [`CudaError::OtherDevice`], [`CudaError::Missing`], [`CudaError::Compile`] or [`CudaError::Driver`].
    pub fn prepare(&self, plan: &CudaPlan, stream: &Arc<CudaStream>) -> Result<Prepared, CudaError> {
        Prepared::new(self, plan, stream, None)
    }

    /// [`Cuda::prepare`] in memory that the caller owns, of [`CudaPlan::workspace_bytes`] at least.
    ///
    /// # Errors
    /// As [`Cuda::prepare`], [`CudaError::Scratch`] or [`CudaError::ScratchAlignment`].
    pub fn prepare_in(
        &self,
        plan: &CudaPlan,
        stream: &Arc<CudaStream>,
        memory: DeviceMemory,
    ) -> Result<Prepared, CudaError> {
        Prepared::new(self, plan, stream, Some(memory))
    }
}
