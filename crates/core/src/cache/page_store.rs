//! The operations that a cache needs of the memory that holds its rows.

use super::desc::CacheDesc;
use super::error::CacheError;
use super::keep_error::KeepError;
use super::table::{PageCopy, RowRun};
use crate::codec::KeyTransform;

/// The memory of a cache: pages of keys and values of every layer, on the host or on a device.
///
/// [`KvCache`](super::KvCache) decides which token lies in which row; a store moves bytes. A cache calls a store with layers, runs and
/// shapes that it has checked. A store on a device may return before the work has ended, as long as its operations follow each other.
/// After an error of the memory itself, contents of the cache are unspecified. Runs outside the pages are a mistake of the caller, which a
/// store may panic on.
pub trait PageStore {
    /// Why an operation failed: refused by the cache, or by the memory.
    type Error: From<CacheError>;
    /// Rows `[1, kv_heads, tokens, dim]` to store.
    type Rows<'a>;
    /// Rows `[1, kv_heads, tokens, dim]` to fill.
    type RowsMut<'a>;

    /// The error with a refusal of the cache, if it is one, replaced by another.
    fn map_refusal(error: Self::Error, map: impl FnOnce(CacheError) -> CacheError) -> Self::Error;

    /// Zeroed pages for another description, in the same memory: of the tokens that a cache keeps in 16 bits.
    ///
    /// # Errors
    /// [`KeepError::Store`] where the store has no such pages, as by default; otherwise as the store is made.
    fn sibling(&self, desc: &CacheDesc) -> Result<Self, Self::Error>
    where
        Self: Sized,
    {
        // The pages would be for tokens that the store's own description keeps.
        let _ = desc;
        let CacheDesc { keep_first, keep_last, .. } = *self.desc();
        Err(CacheError::Keep(KeepError::Store { keep_first, keep_last }).into())
    }

    /// The description that the store was made for.
    fn desc(&self) -> &CacheDesc;

    /// The shape of rows.
    fn shape(rows: &Self::Rows<'_>) -> [usize; 4];

    /// The shape of rows to fill.
    fn shape_mut(rows: &Self::RowsMut<'_>) -> [usize; 4];

    /// Checks rows of a layer before anything changes, as far as the store can.
    ///
    /// # Errors
    /// [`CacheError::Row`], and [`CacheError::NotKeyColumns`] where values are columns of the keys.
    fn check(&self, layer: usize, k: &Self::Rows<'_>, v: &Self::Rows<'_>) -> Result<(), Self::Error>;

    /// The transform `[kv_heads, head_dim]` of the keys of a layer before they are encoded.
    fn key_transform(&self, layer: usize) -> &KeyTransform;

    /// Sets that transform, in a layer without rows whose keys are codes.
    ///
    /// # Errors
    /// Errors of the store's memory.
    fn set_key_transform(&mut self, layer: usize, transform: KeyTransform) -> Result<(), Self::Error>;

    /// Checks that every row written since the last call was stored. Waits for a device; a store that refuses rows in
    /// [`PageStore::check`] has nothing to report.
    ///
    /// # Errors
    /// [`CacheError::Row`]: the first of the rows that were not stored in the first layer that has any, in keys before values.
    fn check_stored(&mut self) -> Result<(), Self::Error>;

    /// Copies rows to the same rows of other pages, in all layers.
    ///
    /// # Errors
    /// Errors of the store's memory.
    fn copy(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error>;

    /// Stores rows of tensors in a layer.
    ///
    /// # Errors
    /// Errors of the store's memory.
    fn write(
        &mut self,
        layer: usize,
        runs: &[RowRun],
        k: &Self::Rows<'_>,
        v: &Self::Rows<'_>,
    ) -> Result<(), Self::Error>;

    /// Fills rows of tensors from a layer, decoded and with the transform undone.
    ///
    /// # Errors
    /// Errors of the store's memory.
    fn read(
        &self,
        layer: usize,
        runs: &[RowRun],
        k: &mut Self::RowsMut<'_>,
        v: &mut Self::RowsMut<'_>,
    ) -> Result<(), Self::Error>;

    /// Copies `tokens` rows to bytes: `[layers]` of K `[kv_heads, tokens, row]` and, where values have rows of their own, V `[kv_heads,
    /// tokens, row]`.
    ///
    /// # Errors
    /// Errors of the store's memory.
    fn export(&self, runs: &[RowRun], tokens: usize, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// The inverse of [`PageStore::export`]; runs may leave out rows of the bytes.
    ///
    /// # Errors
    /// Errors of the store's memory.
    fn import(&mut self, runs: &[RowRun], tokens: usize, bytes: &[u8]) -> Result<(), Self::Error>;
}
