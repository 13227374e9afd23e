//! The kernels, written once over [`Simd`](super::simd::Simd).

pub(crate) mod backward;
pub(crate) mod forward;
pub(crate) mod shared;
