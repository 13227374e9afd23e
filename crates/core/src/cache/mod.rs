//! KV caches: keys and values of sequences that grow token by token.
//!
//! A cache is a layout times a codec. Whatever the layout, a token's row lies in a page, and one formula finds it
//! ([`BlockTables`](crate::block_tables::BlockTables)). A slot of a contiguous cache is one page; a ring is one page
//! that is overwritten; in a paged cache, sequences take pages as they grow and share the pages of a common prefix.
//! Positions are counted from the start of the sequence and do not change when older tokens are dropped.
//!
//! One table serves all layers. [`KvCache::append`] is the usual step; [`KvCache::extend`] followed by
//! [`KvCache::write`] for each layer does the same for a model that computes one layer after another.
//!
//! ```
//! use flashtile::cache::{CacheDesc, CacheLayout, CacheShape, Codec, KvCache};
//! use flashtile::TensorView;
//! let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
//! let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 8, value_dim: 8 };
//! let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::BF16))?;
//! let prompt = cache.create()?;
//! let rows = vec![0.5f32; 40 * 2 * 8];
//! let kv = TensorView::packed(&rows, [40, 2, 8])?;
//! cache.append(&[(prompt, 40)], &[(kv, kv)])?;
//! let answer = cache.fork(prompt)?; // with three shared pages
//! let kv = TensorView::packed(&rows[..16], [1, 2, 8])?;
//! cache.append(&[(answer, 1)], &[(kv, kv)])?; // copies the third
//! assert_eq!((cache.len(prompt)?, cache.len(answer)?), (40, 41));
//! assert_eq!(cache.memory().pages_free, 60);
//! let (k, v) = cache.pages(0)?;
//! assert_eq!((k.shape(), v.shape()), ([64, 2, 16, 8], [64, 2, 16, 8]));
//! assert_eq!(cache.tables(&[prompt, answer])?.table, [0, 1, 2, 0, 1, 3]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod desc;
mod error;
mod hybrid;
mod keep_error;
mod kept;
mod kept_tables;
mod key_checks;
mod key_error;
mod kv;
mod page_store;
mod seq_id;
mod snapshot;
mod store;
mod table;

pub use desc::{CacheDesc, CacheLayout, CacheShape, KEPT_STEP};
pub use error::CacheError;
pub use hybrid::{GroupLayer, HybridCache, name_layer};
pub use keep_error::KeepError;
pub use kept_tables::KeptTables;
pub use key_error::KeyTransformError;
pub use kv::{CacheMemory, KvCache};
pub use page_store::PageStore;
pub use seq_id::SeqId;
pub use snapshot::Snapshot;
pub use store::{HostStore, Pool};
pub use table::{PageCopy, RowRun, SequenceTable, total_tokens};
