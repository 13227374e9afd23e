//! The CUDA device as commands use it. Where the backend is not part of the build, a type that has no values stands for it.

use crate::failure::{Failure, Result};
use flashtile::plan::CudaTile;
use flashtile::testkit::Runner;
use flashtile::{CudaPlan, Dtype, Inputs, Outputs};

pub(crate) use available::{Cuda, Run};

/// The first device of this machine.
pub(crate) fn device() -> Result<Cuda> {
    available::device()
}

#[cfg(feature = "cuda")]
mod available {
    use super::{CudaPlan, Dtype, Failure, Inputs, Outputs, Result, Runner};
    pub(crate) use flashtile::cuda::Cuda;
    use flashtile::cuda::limits;
    use flashtile::plan::CudaFacts;
    use flashtile::testkit::{CudaRunner, DevicePlacement, DeviceRun};

    pub(super) fn device() -> Result<Cuda> {
        Cuda::new(0).map_err(Failure::new)
    }

    /// The device with tensors on whole vectors, and at odd addresses.
    pub(crate) fn runners(cuda: Cuda, exact: bool) -> Vec<Box<dyn Runner>> {
        let runner = CudaRunner::new(cuda).exact(exact);
        vec![Box::new(runner.clone()), Box::new(runner.odd())]
    }

    pub(crate) fn name(cuda: &Cuda) -> &str {
        cuda.name()
    }

    pub(crate) fn facts(cuda: &Cuda) -> &CudaFacts {
        cuda.facts()
    }

    /// The compiler, and where its kernels are kept.
    pub(crate) fn compiler(cuda: &Cuda) -> Result<String> {
        let ((major, minor), place) = cuda.compiler().map_err(Failure::new)?;
        let kept = match cuda.cache_folder() {
            Some(folder) => format!("kernels are kept in {}", folder.display()),
            None => "kernels are not kept".to_owned(),
        };
        Ok(format!("NVRTC {major}.{minor} ({place}); {kept}"))
    }

    /// Loads the kernels of a plan, compiled if they are not yet.
    pub(crate) fn prepare(cuda: &Cuda, plan: &CudaPlan) -> Result<()> {
        let stream = cuda.context().new_stream().map_err(Failure::new)?;
        cuda.prepare(plan, &stream).map(|_| ()).map_err(Failure::new)
    }

    /// Operations a second of the matrix unit.
    pub(crate) fn matrix_peak(cuda: &Cuda, dtype: Dtype) -> Result<f64> {
        limits::matrix_peak(cuda, dtype).map_err(Failure::new)
    }

    /// Bytes a second from memory.
    pub(crate) fn read_bandwidth(cuda: &Cuda) -> Result<f64> {
        limits::read_bandwidth(cuda).map_err(Failure::new)
    }

    /// A plan with its tensors on the device.
    pub(crate) struct Run(DeviceRun);

    impl Run {
        pub(crate) fn new(
            cuda: &Cuda,
            plan: &CudaPlan,
            inputs: &Inputs<'_>,
            outputs: &mut Outputs<'_>,
        ) -> Result<Self> {
            let placement = DevicePlacement::default();
            DeviceRun::new(cuda, plan, inputs, outputs, placement).map(Self).map_err(Failure::new)
        }

        /// Runs once, and reads the results.
        pub(crate) fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
            self.launch()?;
            self.wait()?;
            self.0.read(outputs).map_err(Failure::new)
        }

        pub(crate) fn launch(&mut self) -> Result<()> {
            self.0.launch().map_err(Failure::new)
        }

        pub(crate) fn wait(&self) -> Result<()> {
            self.0.wait().map_err(Failure::new)
        }

        /// Seconds of a run of which the second-level cache holds nothing.
        pub(crate) fn seconds(&mut self) -> Result<f64> {
            self.0.seconds().map_err(Failure::new)
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod available {
    use super::{CudaPlan, Dtype, Failure, Inputs, Outputs, Result, Runner};
    use flashtile::plan::CudaFacts;

    #[derive(Debug, Clone)]
    pub(crate) enum Cuda {}

    pub(super) fn device() -> Result<Cuda> {
        Err(Failure::new("the cuda backend is not part of this build: its feature is off"))
    }

    pub(crate) fn runners(cuda: Cuda, _: bool) -> Vec<Box<dyn Runner>> {
        match cuda {}
    }

    pub(crate) fn name(cuda: &Cuda) -> &str {
        match *cuda {}
    }

    pub(crate) fn facts(cuda: &Cuda) -> &CudaFacts {
        match *cuda {}
    }

    pub(crate) fn compiler(cuda: &Cuda) -> Result<String> {
        match *cuda {}
    }

    pub(crate) fn prepare(cuda: &Cuda, _: &CudaPlan) -> Result<()> {
        match *cuda {}
    }

    pub(crate) fn matrix_peak(cuda: &Cuda, _: Dtype) -> Result<f64> {
        match *cuda {}
    }

    pub(crate) fn read_bandwidth(cuda: &Cuda) -> Result<f64> {
        match *cuda {}
    }

    pub(crate) enum Run {}

    impl Run {
        pub(crate) fn new(cuda: &Cuda, _: &CudaPlan, _: &Inputs<'_>, _: &mut Outputs<'_>) -> Result<Self> {
            match *cuda {}
        }

        pub(crate) fn compute(&mut self, _: &mut Outputs<'_>) -> Result<()> {
            match *self {}
        }

        pub(crate) fn launch(&mut self) -> Result<()> {
            match *self {}
        }

        pub(crate) fn wait(&self) -> Result<()> {
            match *self {}
        }

        pub(crate) fn seconds(&mut self) -> Result<f64> {
            match *self {}
        }
    }
}

pub(crate) use available::{compiler, facts, matrix_peak, name, prepare, read_bandwidth, runners};

/// A tile as `WARPS_Q,WARPS_K,FRAGMENTS,KEYS,STAGES,RESIDENT,Q_IN_REGISTERS`.
pub(crate) fn tile(text: &str) -> std::result::Result<CudaTile, String> {
    let numbers: Option<Vec<usize>> = text.split(',').map(|n| n.parse().ok()).collect();
    let numbers = numbers.and_then(|n| <[usize; 7]>::try_from(n).ok());
    let [q, k, fragments, keys, stages, resident, in_registers] =
        numbers.ok_or("expected seven whole numbers: warps of rows and of keys, fragments, keys, stages, resident, q in registers")?;
    let mut tile = CudaTile::new([q, k], fragments, keys, stages);
    tile.resident = resident;
    tile.q_in_registers = in_registers != 0;
    Ok(tile)
}
