//! A device and the kernels compiled for it.

use super::error::CudaError;
use super::sources::Source;
use crate::plan::{CudaFacts, CudaPlan, WGMMA_CAPABILITY, WGMMA_COMPILER};
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_kernel::cuda::cudarc::driver::{CudaContext, sys};
use flashtile_kernel::cuda::{Function, Gpu};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A CUDA device: its facts, and the kernels that are loaded on it. A clone refers to the same device and
/// kernels.
#[derive(Debug, Clone)]
pub struct Cuda {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    facts: CudaFacts,
    loaded: Mutex<HashMap<(Source, &'static str), Arc<Function>>>,
}

impl Cuda {
    /// Number of devices of this machine.
    ///
    /// # Errors
    /// [`CudaError::Device`] where there is no driver, or where it does not answer.
    pub fn count() -> Result<usize, CudaError> {
        Ok(Gpu::count()?)
    }

    /// The device of a number, in its primary context: the one that other libraries use too.
    ///
    /// # Errors
    /// As [`Cuda::count`], [`DeviceError::NoDevice`](super::DeviceError::NoDevice), and [`CudaError::Unsupported`] where it is older than the kernels.
    pub fn new(ordinal: usize) -> Result<Self, CudaError> {
        Self::with_context(Gpu::primary_context(ordinal)?)
    }

    /// The device of a context.
    ///
    /// # Errors
    /// [`CudaError::Device`], and [`CudaError::Unsupported`] where the device is older than the kernels.
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
            threads_per_multiprocessor: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            shared_per_block: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_multiprocessor: get(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            registers_per_multiprocessor: get(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            )?,
            l2: get(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            wgmma: false,
        };
        let min = crate::plan::MIN_CAPABILITY;
        if facts.capability < min {
            return Err(Unsupported::Capability { got: facts.capability, min }.into());
        }
        // Launches name their streams.
        let gpu = Gpu::with_stream(context.default_stream())?;
        // Loads the compiler, where its version counts.
        let compiles_wgmma = || gpu.compiler().is_ok_and(|compiler| compiler.version() >= WGMMA_COMPILER);
        let wgmma = facts.capability == WGMMA_CAPABILITY && compiles_wgmma();
        let facts = CudaFacts { wgmma, ..facts };
        let loaded = Mutex::new(HashMap::new());
        Ok(Self { inner: Arc::new(Inner { gpu, facts, loaded }) })
    }

    /// [`Cuda::with_context`], made once in each context of the process, which keeps it: kernels that one caller has loaded serve all.
    ///
    /// # Errors
    /// As [`Cuda::with_context`].
    pub fn shared(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        static DEVICES: Mutex<Vec<Cuda>> = Mutex::new(Vec::new());
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cuda) = devices.iter().find(|cuda| cuda.context().cu_ctx() == context.cu_ctx()) {
            return Ok(cuda.clone());
        }
        let cuda = Self::with_context(Arc::clone(context))?;
        devices.push(cuda.clone());
        Ok(cuda)
    }

    /// This device with other facts for the planner: with fewer multiprocessors, or without `wgmma`, to measure one kernel beside another. Kernels
    /// that the device cannot run are errors when they are loaded.
    #[must_use]
    pub fn with_facts(&self, change: impl FnOnce(&mut CudaFacts)) -> Self {
        let mut facts = *self.facts();
        change(&mut facts);
        let (gpu, loaded) = (self.inner.gpu.clone(), Mutex::new(HashMap::new()));
        Self { inner: Arc::new(Inner { gpu, facts, loaded }) }
    }

    /// The device's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.gpu.name()
    }

    /// Facts of the device, for the planner.
    #[must_use]
    pub fn facts(&self) -> &CudaFacts {
        &self.inner.facts
    }

    /// The context in which everything happens.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        self.inner.gpu.context()
    }

    /// The device of the kernel language, to launch its kernels by; [`Gpu::on`] gives them a stream.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    /// Folder of compiled kernels; none where they are not kept.
    #[must_use]
    pub fn cache_folder(&self) -> Option<&Path> {
        self.inner.gpu.cache_folder()
    }

    /// Version of the compiler, and where it was found.
    ///
    /// # Errors
    /// [`CudaError::Device`].
    pub fn compiler(&self) -> Result<((i32, i32), String), CudaError> {
        let compiler = self.inner.gpu.compiler()?;
        Ok((compiler.version(), compiler.place().to_owned()))
    }

    /// Plans a problem for this device.
    ///
    /// # Errors
    /// As [`CudaPlan::new`].
    pub fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<CudaPlan, Unsupported> {
        CudaPlan::new(problem, &self.inner.facts, options)
    }

    /// A function of a kernel, compiled and loaded if it is not yet, and the result of keeping it on disk.
    pub(super) fn load(
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
        let (function, kept) = self.inner.gpu.load(&key.0.program(), entry, shared)?;
        let function = loaded().entry(key).or_insert_with(|| Arc::new(function)).clone();
        Ok((function, kept.map_err(CudaError::from)))
    }

    pub(super) fn function(
        &self,
        source: Source,
        entry: &'static str,
        shared: usize,
    ) -> Result<Arc<Function>, CudaError> {
        self.load(source, entry, shared).map(|(function, _)| function)
    }
}
