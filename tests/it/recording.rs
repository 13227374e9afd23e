//! A backend that computes nothing and records what it is asked for, written from docs/adding-a-backend.md: with it, the front door's
//! own part of every call is tested.

use flashtile::plan::{AnyFacts, Explanation, Facts, Plan, Rates, TileSize};
use flashtile::problem::Sequence;
use flashtile::quality::Accumulation;
use flashtile::{
    AnyPlan, Backend, Choice, Dims, Dtype, Error, HostSession, Inputs, Outputs, OwnedTensor, PlanOptions,
    Problem, ProblemDesc, RunError, TimedRun, Unsupported,
};
use std::fmt;
use std::sync::{Arc, Mutex};

type Result<T> = flashtile::Result<T>;

/// Calls, in order.
type Log = Arc<Mutex<Vec<String>>>;

#[derive(Debug, Clone, PartialEq)]
struct RecordingPlan(Problem, PlanOptions);

impl fmt::Display for RecordingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("recording workspace 0")
    }
}

impl Plan for RecordingPlan {
    fn problem(&self) -> &Problem {
        &self.0
    }
    fn options(&self) -> PlanOptions {
        self.1
    }
    fn kernel(&self) -> String {
        "recording".to_owned()
    }
    fn tile(&self, _: &Sequence) -> TileSize {
        TileSize { rows: 1, keys: 1 }
    }
    fn accumulation(&self) -> Accumulation {
        Accumulation::F32
    }
}

/// The device computes f32 only.
#[derive(Debug, Clone, PartialEq)]
struct RecordingFacts;

impl Facts for RecordingFacts {
    type Plan = RecordingPlan;
    const BACKEND: &'static str = "recording";

    fn plan(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> std::result::Result<RecordingPlan, Unsupported> {
        match problem.dtype() {
            Dtype::F32 => Ok(RecordingPlan(problem.clone(), options)),
            _ => Err(Unsupported::Device { why: "it records f32 only" }),
        }
    }
    fn rates(&self, _: &RecordingPlan) -> Rates {
        Rates { start: 0.0, copy: 1.0, flops: 1.0, bandwidth: 1.0 }
    }
    fn explain(&self, _: &RecordingPlan) -> Explanation {
        Explanation::default()
    }
}

#[derive(Debug, Clone, Default)]
struct Recording(Log);

impl Recording {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }
}

impl Backend for Recording {
    fn name(&self) -> String {
        "recording".to_owned()
    }
    fn device(&self) -> String {
        "a log".to_owned()
    }
    fn facts(&self) -> AnyFacts {
        AnyFacts::new(RecordingFacts)
    }
    fn session(&self, _: PlanOptions) -> Result<Box<dyn HostSession>> {
        self.note("session");
        Ok(Box::new(self.clone()))
    }
    fn timed<'t>(
        &'t self,
        plan: &'t AnyPlan,
        inputs: &[Inputs<'t>],
        _: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>> {
        let Some(RecordingPlan(..)) = plan.of() else {
            return Err(Error::Run(RunError::OtherBackend { kernel: plan.kernel() }));
        };
        self.note(format!("timed {}", inputs.len()));
        Ok(Box::new(self.clone()))
    }
}

impl HostSession for Recording {
    fn compute(&mut self, desc: &ProblemDesc, _: &Inputs<'_>, _: &mut Outputs<'_>) -> Result<()> {
        RecordingFacts.plan(&desc.clone().validate()?, PlanOptions::default())?;
        self.note("compute");
        Ok(())
    }
}

impl TimedRun for Recording {
    fn launch(&mut self, _: &mut Outputs<'_>) -> Result<()> {
        self.note("launch");
        Ok(())
    }
}

#[test]
fn a_backend_is_planned_run_and_timed_through_the_trait_alone() {
    let recording = Recording::default();
    let backend: Arc<dyn Backend> = Arc::new(recording.clone());
    let dims = Dims { batch: 1, q_heads: 1, kv_heads: 1, q_len: 2, kv_len: 2, head_dim: 4, value_dim: 4 };
    let x = OwnedTensor::zeros(Dtype::F32, dims.q_shape()).unwrap();
    let mut out = OwnedTensor::zeros(Dtype::F32, dims.out_shape()).unwrap();
    let (inputs, mut outputs) = (Inputs::new(x.view(), x.view(), x.view()), Outputs::new(out.view_mut()));
    let desc = ProblemDesc::new(dims, Dtype::F32);
    let choice = Choice::of(backend, &desc.clone().validate().unwrap(), PlanOptions::default(), "asked for");
    assert_eq!(choice.to_string(), "recording: asked for");
    let plan = choice.plan.unwrap();
    assert_eq!((plan.backend(), plan.kernel().as_str()), ("recording", "recording"));
    choice.backend.prepare(&plan).unwrap();
    choice.backend.run(&plan, &inputs, &mut outputs).unwrap();
    choice.backend.compute(&desc, &inputs, &mut outputs).unwrap();
    let mut run = choice.backend.timed(&plan, &[inputs, inputs], &outputs).unwrap();
    assert!(run.seconds(&mut outputs).unwrap() >= 0.0 && run.host_seconds().unwrap().is_none());
    assert_eq!(
        *recording.0.lock().unwrap(),
        ["timed 1", "launch", "session", "compute", "timed 2", "launch"]
    );
    let half = ProblemDesc::new(dims, Dtype::F16).validate().unwrap();
    assert!(choice.backend.plan(&half, PlanOptions::default()).is_err());
}
