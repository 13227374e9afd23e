//! The page store of a device.

use super::error::StoreError;
use super::pool::{DeviceTransform, Find, GpuPool, Lists, MAX_RUNS};
use super::rows::{GpuRows, GpuRowsMut};
use crate::tensors::GpuKv;
use flashtile_core::cache::{CacheDesc, CacheError, PageCopy, PageStore, RowRun};
use flashtile_core::codec::{KeyTransform, Side};
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::KvStorage;
use flashtile_kernel::{DeviceMemory, HostAccess, ScalarType};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Rows of a cache in the memory of a device, for [`KvCache::with_store`](flashtile_core::cache::KvCache::with_store).
///
/// Writing rows, copying pages and reading rows back enqueue launches and return. After the first write of a layer, a step of
/// decoding allocates no memory of the device and does not wait for it, as long as steps do not become larger. Snapshots and their
/// restoration wait, and copy whole pages, with one transfer for neighbouring ones.
///
/// The device cannot refuse a row before others are stored: a row that is not finite, or whose norm is too large, is stored with a NaN
/// as its scale, and [`PageStore::check_stored`] says so.
pub struct GpuStore<D: HostAccess> {
    desc: CacheDesc,
    device: D,
    find: Option<Find>,
    k: GpuPool<D::Memory>,
    v: GpuPool<D::Memory>,
    /// `[layers]`.
    transforms: Vec<LayerTransform<D::Memory>>,
    /// The rows of the last write or read, as lists on the device.
    lists: Mutex<Lists<D::Memory>>,
    copies: D::Memory,
}

/// The transform of the keys of a layer, on the host and on the device.
#[derive(Debug)]
struct LayerTransform<M> {
    host: KeyTransform,
    device: DeviceTransform<M>,
}

impl<D: HostAccess> fmt::Debug for GpuStore<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codecs = [self.k.codec(), self.v.codec()];
        let shapes = [self.k.shape(), self.v.shape()];
        f.debug_struct("GpuStore").field("codecs", &codecs).field("shapes", &shapes).finish_non_exhaustive()
    }
}

impl<D: HostAccess> GpuStore<D> {
    /// Zeroed pools for a description.
    ///
    /// # Errors
    /// [`StoreError::Cache`] where the description is refused, [`StoreError::Unsupported`] where no kernel encodes its codec and
    /// dimension or values are columns of the keys, [`StoreError::Launch`] where the device lacks the memory.
    pub fn new(device: D, desc: &CacheDesc) -> Result<Self, StoreError<D::Error>> {
        Self::with_native(device, desc, None)
    }

    /// [`GpuStore::new`] for a device that runs native code only, which `find` knows.
    ///
    /// # Errors
    /// As [`GpuStore::new`].
    pub fn with_native(
        device: D,
        desc: &CacheDesc,
        find: Option<Find>,
    ) -> Result<Self, StoreError<D::Error>> {
        desc.validate()?;
        if desc.kv_storage == KvStorage::KeyColumns {
            return Err(Unsupported::KeyColumns { codec: desc.k }.into());
        }
        let [k, v] = desc.pools();
        let limits = device.limits();
        if desc.kv_heads > limits.groups[0] as usize {
            let max = limits.groups[0] as usize;
            return Err(CacheError::Dimension { name: "kv_heads", got: desc.kv_heads, max }.into());
        }
        Ok(Self {
            k: GpuPool::new(&device, find, (desc.k, Side::Keys), k, desc.layers)?,
            v: GpuPool::new(&device, find, (desc.v, Side::Values), v, desc.layers)?,
            transforms: (0..desc.layers)
                .map(|_| LayerTransform { host: KeyTransform::default(), device: DeviceTransform::NONE })
                .collect(),
            lists: Mutex::new(Lists::empty(&device)?),
            copies: device.zeroed(ScalarType::U32, 64).map_err(StoreError::device)?,
            desc: *desc,
            device,
            find,
        })
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &D {
        &self.device
    }

    /// Replaces the device by another with the same memory, such as the same one with another place for its launches, and returns the one
    /// before: launches of both must follow each other.
    pub const fn replace_device(&mut self, device: D) -> D {
        std::mem::replace(&mut self.device, device)
    }

    /// Pages of keys and of values of a layer, as bytes: `[pages, kv_heads]`, of a head as its codec has them.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn pages(&self, layer: usize) -> [&D::Memory; 2] {
        [self.k.layer(layer), self.v.layer(layer)]
    }

    /// Keys and values of a layer, as inputs of a run.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn kv(&self, layer: usize) -> [GpuKv<'_, D::Memory>; 2] {
        let transform = &self.transforms[layer].device;
        let [mean, factors] = [&transform.mean, &transform.factors].map(Option::as_ref);
        [(&self.k, mean, factors), (&self.v, None, None)].map(|(pool, mean, factors)| {
            let ([page, head], shape) = (pool.strides(), pool.shape());
            let row = if pool.codec().dtype().is_some() { pool.row_bytes() } else { 0 };
            GpuKv {
                bytes: pool.layer(layer).view(),
                codec: pool.codec(),
                shape,
                strides: [page, head, row],
                means: mean.map(DeviceMemory::view),
                factors: factors.map(DeviceMemory::view),
            }
        })
    }

    /// Bytes from page to page and from head to head, of keys and of values.
    #[must_use]
    pub const fn strides(&self) -> [[usize; 2]; 2] {
        [self.k.strides(), self.v.strides()]
    }
}

impl<D: HostAccess + Clone> PageStore for GpuStore<D>
where
    D::Memory: 'static,
{
    type Error = StoreError<D::Error>;
    type Rows<'a> = GpuRows<'a, D::Memory>;
    type RowsMut<'a> = GpuRowsMut<'a, D::Memory>;

    fn map_refusal(error: Self::Error, map: impl FnOnce(CacheError) -> CacheError) -> Self::Error {
        match error {
            StoreError::Cache(refusal) => StoreError::Cache(map(refusal)),
            other => other,
        }
    }

    fn sibling(&self, desc: &CacheDesc) -> Result<Self, Self::Error> {
        Self::with_native(self.device.clone(), desc, self.find)
    }

    fn desc(&self) -> &CacheDesc {
        &self.desc
    }

    fn shape(rows: &Self::Rows<'_>) -> [usize; 4] {
        rows.shape
    }

    fn shape_mut(rows: &Self::RowsMut<'_>) -> [usize; 4] {
        rows.shape
    }

    /// Checks types and numbers of rows: values are checked on the device, as they are encoded.
    fn check(&self, _: usize, k: &Self::Rows<'_>, v: &Self::Rows<'_>) -> Result<(), Self::Error> {
        self.k.check(k)?;
        self.v.check(v)
    }

    fn check_stored(&mut self) -> Result<(), Self::Error> {
        for pool in [&mut self.k, &mut self.v] {
            // The status of values stays for the next call.
            if let Some(error) = pool.refused(&self.device)? {
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn key_transform(&self, layer: usize) -> &KeyTransform {
        &self.transforms[layer].host
    }

    fn set_key_transform(&mut self, layer: usize, host: KeyTransform) -> Result<(), Self::Error> {
        let device = DeviceTransform::new(&self.device, &self.desc, &host)?;
        self.transforms[layer] = LayerTransform { host, device };
        Ok(())
    }

    fn copy(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error> {
        let run =
            |page, copy: &PageCopy| RowRun { page, row: copy.rows.start, tokens: copy.rows.len(), at: 0 };
        let runs: Vec<RowRun> =
            copies.iter().flat_map(|copy| [run(copy.from, copy), run(copy.to, copy)]).collect();
        self.k.assert_inside(runs.iter());
        let max = self.device.limits().groups[1] as usize;
        for copies in copies.chunks(max) {
            let words = copies
                .iter()
                .flat_map(|copy| [copy.from, copy.to, copy.rows.start, copy.rows.len()].map(|n| n as u32));
            let bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
            if self.copies.view().len() < bytes.len() / 4 {
                let len = (bytes.len() / 4).next_power_of_two();
                self.copies = self.device.zeroed(ScalarType::U32, len).map_err(StoreError::device)?;
            }
            self.device.write(&mut self.copies, 0, &bytes).map_err(StoreError::device)?;
            for pool in [&mut self.k, &mut self.v] {
                pool.copy(&self.device, self.copies.view(), copies.len() as u32)?;
            }
        }
        Ok(())
    }

    fn write(
        &mut self,
        layer: usize,
        runs: &[RowRun],
        k: &Self::Rows<'_>,
        v: &Self::Rows<'_>,
    ) -> Result<(), Self::Error> {
        self.k.assert_inside(runs.iter());
        let (device, lists) = (&self.device, self.lists.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (transform, none) = (&self.transforms[layer].device, DeviceTransform::NONE);
        for runs in runs.chunks(MAX_RUNS) {
            lists.refill(device, self.desc.kv_heads, runs)?;
            self.k.write(device, layer, lists, (k, transform))?;
            self.v.write(device, layer, lists, (v, &none))?;
        }
        Ok(())
    }

    fn read(
        &self,
        layer: usize,
        runs: &[RowRun],
        k: &mut Self::RowsMut<'_>,
        v: &mut Self::RowsMut<'_>,
    ) -> Result<(), Self::Error> {
        self.k.assert_inside(runs.iter());
        k.check().and_then(|()| v.check()).map_err(StoreError::Memory)?;
        let (device, transform, none) = (&self.device, &self.transforms[layer].device, DeviceTransform::NONE);
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        for runs in runs.chunks(MAX_RUNS) {
            lists.refill(device, self.desc.kv_heads, runs)?;
            self.k.read(device, layer, &lists, (k, transform))?;
            self.v.read(device, layer, &lists, (v, &none))?;
        }
        Ok(())
    }

    fn export(&self, runs: &[RowRun], tokens: usize, bytes: &mut [u8]) -> Result<(), Self::Error> {
        let mut rest = bytes;
        for layer in 0..self.desc.layers {
            for pool in [&self.k, &self.v] {
                let (section, after) = rest.split_at_mut(pool.bytes_of(tokens));
                pool.export(&self.device, layer, runs, section)?;
                rest = after;
            }
        }
        Ok(())
    }

    fn import(&mut self, runs: &[RowRun], tokens: usize, bytes: &[u8]) -> Result<(), Self::Error> {
        let mut rest = bytes;
        for layer in 0..self.desc.layers {
            for pool in [&mut self.k, &mut self.v] {
                let (section, after) = rest.split_at(pool.bytes_of(tokens));
                pool.import(&self.device, layer, runs, section)?;
                rest = after;
            }
        }
        Ok(())
    }
}
