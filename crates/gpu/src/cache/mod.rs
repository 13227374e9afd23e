//! KV caches in the memory of a device: a [`GpuStore`] holds the rows of a
//! [`KvCache`](flashtile_core::cache::KvCache), in every layout and codec. Rows are encoded on the device, to the bytes that the
//! host would write.

mod error;
mod pool;
mod rows;
mod store;

pub use error::StoreError;
pub use rows::{GpuRows, GpuRowsMut};
pub use store::GpuStore;
