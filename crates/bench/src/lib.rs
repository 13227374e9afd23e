//! Loops of the command line over many elements: seeded data, and conversion. The command line itself is compiled without optimization.
//! Unstable: no semver promise.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod elements;
pub mod seeded;
