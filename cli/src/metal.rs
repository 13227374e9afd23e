//! The Metal device for commands. Systems other than Apple's have none: its type has no values there.

#[cfg(not(any(target_vendor = "apple", metal_standin)))]
pub(crate) use elsewhere::*;
#[cfg(any(target_vendor = "apple", metal_standin))]
pub(crate) use on_apple::*;

#[cfg(any(target_vendor = "apple", metal_standin))]
mod on_apple {
    use crate::failure::{Failure, Result};
    pub(crate) use flashtile::metal::{Metal, TimedRun};
    use flashtile::metal::{MetalError, limits};
    use flashtile::{Backend, Dtype, Inputs, Outputs, PlanOptions, Problem};
    #[cfg(feature = "check")]
    use flashtile_testkit::{MetalPath, MetalRunner, Runner};

    /// The system's default device.
    pub(crate) fn device() -> Result<Metal> {
        Metal::new().map_err(Failure::new)
    }

    /// The backend of the device.
    pub(crate) fn backend() -> Result<Backend> {
        Ok(Backend::Metal(device()?))
    }

    /// The device of a backend.
    pub(crate) const fn of(backend: &Backend) -> Option<&Metal> {
        match backend {
            Backend::Metal(metal) => Some(metal),
            _ => None,
        }
    }

    /// The device's own name.
    pub(crate) fn name(metal: &Metal) -> &str {
        metal.name()
    }

    /// The device, where its compiled kernels are kept, and whether it passes the self-check.
    pub(crate) fn described(metal: &Metal) -> String {
        let kept = match metal.gpu().cache_folder() {
            Some(folder) => format!("kernels are kept in {}", folder.display()),
            None => "kernels are not kept".to_owned(),
        };
        let checked = match metal.self_check() {
            Ok(()) => "passes the self-check".to_owned(),
            Err(why) => format!("fails the self-check: {why}"),
        };
        format!("{}, about {} cores; {checked}; {kept}", metal.name(), metal.facts().cores)
    }

    /// Operations a second of products of matrices of a dtype.
    pub(crate) fn matrix_peak(metal: &Metal, dtype: Dtype) -> Result<f64> {
        Ok(limits::matrix_peak(metal, dtype)?)
    }

    /// Bytes a second that copies move.
    pub(crate) fn copy_bandwidth(metal: &Metal) -> Result<f64> {
        Ok(limits::copy_bandwidth(metal)?)
    }

    /// Name of the kernel of a problem.
    pub(crate) fn kernel(metal: &Metal, problem: &Problem) -> Result<String> {
        let plan = metal.plan(problem, PlanOptions::default()).map_err(Failure::new)?;
        Ok(plan.kernel())
    }

    /// A problem with its tensors on the device.
    pub(crate) fn timed(
        metal: &Metal,
        problem: &Problem,
        options: PlanOptions,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
    ) -> Result<TimedRun> {
        Ok(TimedRun::new(metal, problem, options, inputs, outputs)?)
    }

    /// The device with aligned tensors, with tensors at odd addresses, and by a concurrent encoder.
    #[cfg(feature = "check")]
    pub(crate) fn runners(metal: Metal, options: PlanOptions) -> Vec<Box<dyn Runner>> {
        let runner = MetalRunner::new(metal).with(options);
        let concurrent = MetalPath::CommandBuffer(flashtile::metal::DispatchType::Concurrent);
        vec![Box::new(runner.clone()), Box::new(runner.clone().odd()), Box::new(runner.by(concurrent))]
    }

    impl From<MetalError> for Failure {
        fn from(error: MetalError) -> Self {
            Self::new(error)
        }
    }
}

#[cfg(not(any(target_vendor = "apple", metal_standin)))]
mod elsewhere {
    use crate::failure::{Failure, Result};
    use flashtile::{Backend, BackendName, Dtype, Inputs, Outputs, PlanOptions, Problem};
    #[cfg(feature = "check")]
    use flashtile_testkit::Runner;

    /// No device.
    #[derive(Debug, Clone)]
    pub(crate) struct Metal(Never);

    /// No run.
    pub(crate) struct TimedRun(Never);

    #[derive(Debug, Clone)]
    enum Never {}

    /// Why there is none.
    pub(crate) fn device() -> Result<Metal> {
        let systems = "a system of Apple's";
        let why = flashtile::Error::System { asked: BackendName::Metal.to_string(), systems };
        Err(Failure::at("--backend", why))
    }

    pub(crate) fn backend() -> Result<Backend> {
        match device()?.0 {}
    }

    pub(crate) const fn of(_: &Backend) -> Option<&Metal> {
        None
    }

    pub(crate) fn name(metal: &Metal) -> &str {
        match metal.0 {}
    }

    pub(crate) fn described(metal: &Metal) -> String {
        match metal.0 {}
    }

    pub(crate) fn matrix_peak(metal: &Metal, _: Dtype) -> Result<f64> {
        match metal.0 {}
    }

    pub(crate) fn copy_bandwidth(metal: &Metal) -> Result<f64> {
        match metal.0 {}
    }

    pub(crate) fn kernel(metal: &Metal, _: &Problem) -> Result<String> {
        match metal.0 {}
    }

    pub(crate) fn timed(
        metal: &Metal,
        _: &Problem,
        _: PlanOptions,
        _: &Inputs<'_>,
        _: &Outputs<'_>,
    ) -> Result<TimedRun> {
        match metal.0 {}
    }

    #[cfg(feature = "check")]
    pub(crate) fn runners(metal: Metal, _: PlanOptions) -> Vec<Box<dyn Runner>> {
        match metal.0 {}
    }

    impl TimedRun {
        pub(crate) fn compute(&mut self, _: &mut Outputs<'_>) -> std::result::Result<(), flashtile::Error> {
            match self.0 {}
        }

        pub(crate) fn launch(&mut self) -> std::result::Result<(), flashtile::Error> {
            match self.0 {}
        }

        pub(crate) fn wait(&self) -> std::result::Result<(), flashtile::Error> {
            match self.0 {}
        }

        pub(crate) fn seconds(&mut self) -> std::result::Result<f64, flashtile::Error> {
            match self.0 {}
        }
    }

    impl From<flashtile::Error> for Failure {
        fn from(error: flashtile::Error) -> Self {
            Self::new(error)
        }
    }
}
