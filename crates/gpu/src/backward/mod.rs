//! The backward pass by the kernels of [`kernels::backward`](crate::kernels::backward), on every device.
//!
//! | module | |
//! |---|---|
//! | [`tensors`] | tensors of a backward run in the memory of a device |
//! | [`tile`] | how threadgroups divide their work, and which tiles a device gets |
//! | [`plan`] | the launches of a problem |
//! | [`planner`] | plans as backends report them: names, sizes, words |
//! | [`run`] | workspace and launches |
//! | [`upload`] | copies of host tensors, and the gradients' way back |

pub mod plan;
pub mod planner;
pub mod run;
pub mod tensors;
pub mod tile;
pub mod upload;
