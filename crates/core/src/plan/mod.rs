//! Plans: how a device computes a problem.
//!
//! A plan is a pure function of a problem and of facts about a device. Planning touches neither memory nor the
//! device, so that plans can be made, printed and tested for absent machines.

mod any;
mod backward;
mod explanation;
mod facts;
mod options;
mod unsupported;

pub use any::{AnyFacts, AnyPlan};
pub use backward::{AnyBackwardPlan, BackwardPlan};
pub use explanation::{Explanation, Field, Fields};
pub use facts::{Facts, Plan, Rates, TileSize};
pub use options::{KernelChoice, PlanOptions};
pub use unsupported::Unsupported;
