//! A device.

use crate::check::check;
use crate::error::MetalError;
use crate::facts::{MetalFacts, facts_of};
use crate::plan::MetalPlan;
use crate::session::{MetalKvCache, MetalStore, Session};
use flashtile_core::cache::{CacheDesc, HybridCache, KvCache};
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_gpu::SessionError;
use flashtile_gpu::cache::StoreError;
use flashtile_gpu::engine::PortableEngine;
use flashtile_gpu::plan::USUAL_PAGE_SIZE;
use flashtile_kernel::metal::objc2_metal::{MTLDevice, MTLGPUFamily};
use flashtile_kernel::metal::{CommandQueue, Error, Gpu, Memory, MetalDevice};
use flashtile_kernel::{Device, HostAccess, ScalarType};
use std::sync::{Arc, OnceLock};

/// A Metal device: its facts, and its compiled kernels. A clone refers to the same device and queue.
#[derive(Debug, Clone)]
pub struct Metal {
    gpu: Gpu,
    facts: MetalFacts,
    /// Set when the device has passed the self-check.
    checked: Arc<OnceLock<()>>,
}

fn device(error: Error) -> MetalError {
    SessionError::device(error)
}

impl Metal {
    /// The system's default device, and a new queue.
    ///
    /// # Errors
    /// [`Error::NoDevice`], or [`Unsupported::Device`] where it is not one of Apple's own GPUs.
    pub fn new() -> Result<Self, MetalError> {
        Self::with_gpu(Gpu::system_default().map_err(device)?)
    }

    /// A device of the caller's, and a new queue.
    ///
    /// # Errors
    /// [`Error::NoObject`], or [`Unsupported::Device`] where it is not one of Apple's own GPUs.
    pub fn with_device(of: MetalDevice) -> Result<Self, MetalError> {
        Self::with_gpu(Gpu::new(of).map_err(device)?)
    }

    /// A queue of the caller's, and its device. The caller's command buffers on the queue and the sessions' follow each other in
    /// the order of their commits.
    ///
    /// # Errors
    /// [`Unsupported::Device`] where the device is not one of Apple's own GPUs.
    pub fn with_queue(queue: CommandQueue) -> Result<Self, MetalError> {
        Self::with_gpu(Gpu::with_queue(queue))
    }

    /// A device of the kernel language, and where its launches go.
    ///
    /// # Errors
    /// [`Unsupported::Device`] where the device is not one of Apple's own GPUs.
    pub fn with_gpu(gpu: Gpu) -> Result<Self, MetalError> {
        let limits = gpu.limits();
        let facts = facts_of(gpu.name(), limits.threads as usize, limits.shared_bytes)
            .filter(|_| gpu.device().supportsFamily(MTLGPUFamily::Apple7))
            .ok_or(Unsupported::Device {
                why: "it is not one of Apple's own GPUs of the family Apple7 or later",
            })?;
        Ok(Self { gpu, facts, checked: Arc::default() })
    }

    /// The device's own name: `Apple M3 Max`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.gpu.name()
    }

    /// Facts of the device, for the planner.
    #[must_use]
    pub const fn facts(&self) -> &MetalFacts {
        &self.facts
    }

    /// The device of the kernel language, to launch its kernels by and to order, time and capture work.
    #[must_use]
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Plans a problem for this device.
    ///
    /// # Errors
    /// As [`MetalPlan::new`].
    pub fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<MetalPlan, Unsupported> {
        MetalPlan::new(problem, &self.facts, options)
    }

    /// Compiles the kernels of a plan for rows that start on 16 bytes, if they are not yet.
    ///
    /// # Errors
    /// The compiler's, with line numbers of the printed source.
    pub fn prepare(&self, plan: &MetalPlan) -> Result<(), MetalError> {
        for (instance, constants) in plan.portable().loads(16, USUAL_PAGE_SIZE)? {
            // Running does not need the kernels on disk.
            let (_, _kept) = self.gpu.prewarm(&instance, &constants).map_err(device)?;
        }
        Ok(())
    }

    /// A session on the device's queue.
    #[must_use]
    pub fn session(&self) -> Session {
        self.session_with(PlanOptions::default())
    }

    /// [`Metal::session`] with options of the planner.
    #[must_use]
    pub fn session_with(&self, options: PlanOptions) -> Session {
        Session::new(self.gpu.clone(), PortableEngine::with_options(self.facts.0, options))
    }

    /// An empty cache in the device's memory, whose pools are zero. Its operations follow each other, and the runs of sessions, on the
    /// device's queue.
    ///
    /// # Errors
    /// [`StoreError::Cache`] where the description is refused, [`StoreError::Unsupported`] where no kernel stores such rows,
    /// [`StoreError::Launch`] where the device lacks the memory.
    pub fn kv_cache(&self, desc: CacheDesc) -> Result<MetalKvCache, StoreError<Error>> {
        KvCache::with_store(MetalStore::new(self.gpu.clone(), &desc)?)
    }

    /// An empty cache of layers that differ, described as [`HybridCache::new`] takes them, on the device's queue.
    ///
    /// # Errors
    /// As [`Metal::kv_cache`].
    pub fn hybrid_cache(&self, layers: &[CacheDesc]) -> Result<HybridCache<MetalStore>, StoreError<Error>> {
        HybridCache::with_stores(layers, |desc| MetalStore::new(self.gpu.clone(), desc))
    }

    /// Memory of zeros for a dense tensor of a shape.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn zeros(&self, element: ScalarType, shape: [usize; 4]) -> Result<Memory, MetalError> {
        let len = shape.into_iter().fold(1, usize::saturating_mul);
        self.gpu.zeroed(element, len).map_err(device)
    }

    /// Checks that the device computes a small problem of prefill and one of decode as the reference does.
    ///
    /// A compiler or a driver that breaks a kernel shows here, and not in a model's answers. The check
    /// compiles three kernels and takes a few milliseconds, once: the result is kept in the folder of
    /// compiled kernels for the device, its system and the version of this crate.
    ///
    /// # Errors
    /// The first problem whose result differs, in one sentence.
    pub fn self_check(&self) -> Result<(), String> {
        if self.checked.get().is_none() {
            check(&self.gpu, self.facts)?;
            let _ = self.checked.set(());
        }
        Ok(())
    }
}
