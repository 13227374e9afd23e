//! Loops of the command line over many elements: seeded data, and conversion. The command line itself is compiled without optimization.
//! Unstable: no semver promise.

pub mod elements;
pub mod seeded;
