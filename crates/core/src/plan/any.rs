//! Facts and plans of any backend.

use super::backward::AnyBackwardPlan;
use super::explanation::Explanation;
use super::facts::{Facts, Plan, Rates};
use super::options::PlanOptions;
use super::unsupported::Unsupported;
use crate::problem::Problem;
use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// [`Facts`] of any backend. A clone refers to the same facts.
#[derive(Clone)]
pub struct AnyFacts(Arc<dyn ErasedFacts>);

impl AnyFacts {
    /// Facts of a device.
    #[must_use]
    pub fn new(facts: impl Facts) -> Self {
        Self(Arc::new(facts))
    }

    /// Name of the device's backend, with which the names of its kernels begin: `cpu`, `cuda`.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.0.backend()
    }

    /// Plans a problem for the device. Pure; the cost is that of [`Facts::plan`].
    ///
    /// # Errors
    /// [`Unsupported`] where the device has no kernels for the problem.
    pub fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<AnyPlan, Unsupported> {
        self.0.plan(problem, options)
    }

    /// Plans the backward pass of a problem for the device. Pure; the cost is that of [`Facts::plan_backward`].
    ///
    /// # Errors
    /// [`Unsupported`] where the device has no backward kernels, or none for the problem.
    pub fn plan_backward(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> Result<AnyBackwardPlan, Unsupported> {
        self.0.plan_backward(problem, options)
    }

    /// The facts, if they are of this type.
    #[must_use]
    pub fn of<F: Facts>(&self) -> Option<&F> {
        self.0.as_any().downcast_ref()
    }
}

impl fmt::Debug for AnyFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for AnyFacts {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(other.0.as_any())
    }
}

/// A [`Plan`] of any backend, and the facts from which it was made. A clone refers to the same plan.
///
/// ```
/// use flashtile::plan::{AnyFacts, machines};
/// use flashtile::{CpuPlan, Dims, Dtype, PlanOptions, ProblemDesc};
/// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
/// let problem = ProblemDesc::new(dims, Dtype::F32).validate()?;
/// let plan = AnyFacts::new(machines::AVX2_8).plan(&problem, PlanOptions::default())?;
/// assert_eq!((plan.backend(), plan.kernel().as_str()), ("cpu", "cpu-prefill-f32-d64-avx2"));
/// assert!(plan.of::<CpuPlan>().is_some_and(|plan| plan.threads() == 8));
/// # Ok::<(), flashtile::Error>(())
/// ```
#[derive(Clone)]
pub struct AnyPlan(Arc<dyn ErasedPlan>);

impl AnyPlan {
    /// A plan that was made from these facts.
    #[must_use]
    pub fn new<F: Facts>(facts: F, plan: F::Plan) -> Self {
        Self(Arc::new(Planned { facts, plan }))
    }

    /// Name of the backend that runs the plan.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.0.backend()
    }

    /// The facts from which it was made.
    #[must_use]
    pub fn facts(&self) -> AnyFacts {
        self.0.facts()
    }

    /// The plan, if it is of this type.
    #[must_use]
    pub fn of<P: Plan>(&self) -> Option<&P> {
        let plan: &dyn Any = self.0.plan();
        plan.downcast_ref()
    }

    /// The rates that the device reaches with the plan.
    #[must_use]
    pub fn rates(&self) -> Rates {
        self.0.rates()
    }

    /// The device and the plan in words, with reasons.
    #[must_use]
    pub fn explain(&self) -> Explanation {
        self.0.explain()
    }
}

impl Deref for AnyPlan {
    type Target = dyn Plan;

    fn deref(&self) -> &dyn Plan {
        self.0.plan()
    }
}

impl fmt::Debug for AnyPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0.plan(), f)
    }
}

impl fmt::Display for AnyPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.0.plan(), f)
    }
}

impl PartialEq for AnyPlan {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(other.0.as_any())
    }
}

/// Kernel, sizes, the fields of [`AnyPlan::explain`], the description and the options, for logs and tools. There is no way back: plan again
/// from the description and the options.
#[cfg(feature = "serde")]
impl serde::Serialize for AnyPlan {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("backend", self.backend())?;
        map.serialize_entry("kernel", &self.kernel())?;
        for (name, field) in self.explain().fields {
            map.serialize_entry(name, &field)?;
        }
        map.serialize_entry("tasks", &self.task_count())?;
        map.serialize_entry("splits", &self.splits())?;
        map.serialize_entry("workspace_bytes", &self.workspace_bytes())?;
        map.serialize_entry("problem", self.problem().desc())?;
        map.serialize_entry("options", &self.options())?;
        map.end()
    }
}

trait ErasedFacts: fmt::Debug + Send + Sync {
    fn backend(&self) -> &'static str;
    fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<AnyPlan, Unsupported>;
    fn plan_backward(&self, problem: &Problem, options: PlanOptions) -> Result<AnyBackwardPlan, Unsupported>;
    fn as_any(&self) -> &dyn Any;
    fn equals(&self, other: &dyn Any) -> bool;
}

impl<F: Facts> ErasedFacts for F {
    fn backend(&self) -> &'static str {
        F::BACKEND
    }

    fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<AnyPlan, Unsupported> {
        Ok(AnyPlan::new(self.clone(), Facts::plan(self, problem, options)?))
    }

    fn plan_backward(&self, problem: &Problem, options: PlanOptions) -> Result<AnyBackwardPlan, Unsupported> {
        Facts::plan_backward(self, problem, options)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<F>() == Some(self)
    }
}

/// A plan and its facts, whose types fit each other.
#[derive(Debug, PartialEq)]
struct Planned<F: Facts> {
    facts: F,
    plan: F::Plan,
}

trait ErasedPlan: Send + Sync {
    fn backend(&self) -> &'static str;
    fn facts(&self) -> AnyFacts;
    fn plan(&self) -> &dyn Plan;
    fn rates(&self) -> Rates;
    fn explain(&self) -> Explanation;
    fn as_any(&self) -> &dyn Any;
    fn equals(&self, other: &dyn Any) -> bool;
}

impl<F: Facts> ErasedPlan for Planned<F> {
    fn backend(&self) -> &'static str {
        F::BACKEND
    }

    fn facts(&self) -> AnyFacts {
        AnyFacts::new(self.facts.clone())
    }

    fn plan(&self) -> &dyn Plan {
        &self.plan
    }

    fn rates(&self) -> Rates {
        self.facts.rates(&self.plan)
    }

    fn explain(&self) -> Explanation {
        self.facts.explain(&self.plan)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<Self>() == Some(self)
    }
}
