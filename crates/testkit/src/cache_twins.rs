//! Random operations on a cache in main memory and on its twin in the memory of a device, whose bytes must
//! agree.

use super::rng::Rng;
use flashtile_core::cache::{CacheDesc, CacheError, KvCache, SeqId, Snapshot};
use flashtile_core::tensor::{TensorView, TensorViewMut};
use flashtile_gpu::cache::{GpuRows, GpuRowsMut, GpuStore, StoreError};
use flashtile_kernel::{DeviceMemory, HostAccess, Instance, ScalarType};

/// Two caches of a description, and the names of each sequence in both.
pub struct CacheTwins<D: HostAccess + Clone>
where
    D::Memory: 'static,
{
    host: KvCache,
    device: KvCache<GpuStore<D>>,
    sequences: Vec<(SeqId, SeqId)>,
    rng: Rng,
    /// Of the elements that are appended.
    element: ScalarType,
}

impl<D: HostAccess + Clone> std::fmt::Debug for CacheTwins<D>
where
    D::Memory: 'static,
{
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CacheTwins").field("host", &self.host).finish_non_exhaustive()
    }
}

/// The names of operations, in the order in which they are drawn, and how often.
const OPERATIONS: [(Operation, u32); 7] = [
    (Operation::Append, 10),
    (Operation::Truncate, 3),
    (Operation::Fork, 2),
    (Operation::Forget, 1),
    (Operation::Remove, 2),
    (Operation::Create, 2),
    (Operation::Restore, 1),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Append,
    Truncate,
    Fork,
    Forget,
    Remove,
    Create,
    Restore,
}

/// Elements on a device, of f32 or rounded to bf16.
fn on_device<D: HostAccess + Clone>(
    device: &D,
    element: ScalarType,
    values: &[f32],
) -> Result<D::Memory, String> {
    let bytes: Vec<u8> = if element == ScalarType::F32 {
        values.iter().flat_map(|x| x.to_ne_bytes()).collect()
    } else {
        values.iter().flat_map(|x| half::bf16::from_f32(*x).to_ne_bytes()).collect()
    };
    let mut memory = device.zeroed(element, values.len()).map_err(|e| e.to_string())?;
    device.write(&mut memory, 0, &bytes).map_err(|e| e.to_string())?;
    Ok(memory)
}

/// Strides of `[1, heads, tokens, dim]` where the heads of a token follow each other.
const fn packed(heads: usize, dim: usize) -> [usize; 4] {
    [0, dim, heads * dim, 1]
}

/// Agreement of two results: both fine, or both refused by the cache for the same reason.
fn agree<A, B, E: std::fmt::Display>(
    what: &str,
    host: Result<A, CacheError>,
    device: Result<B, StoreError<E>>,
) -> Result<Option<(A, B)>, String> {
    // Sequences have other names in the other cache.
    let kind = |error: &CacheError| std::mem::discriminant(error);
    match (host, device) {
        (Ok(a), Ok(b)) => Ok(Some((a, b))),
        (Err(a), Err(StoreError::Cache(b))) if kind(&a) == kind(&b) => Ok(None),
        (Err(a), Err(b)) => Err(format!("{what}: {a} on the host, {b} on the device")),
        (Ok(_), Err(b)) => Err(format!("{what}: {b} on the device only")),
        (Err(a), Ok(_)) => Err(format!("{what}: {a} on the host only")),
    }
}

impl<D: HostAccess + Clone> CacheTwins<D>
where
    D::Memory: 'static,
{
    /// Empty caches. Rows are appended as f32, or as bf16.
    ///
    /// # Errors
    /// The reason why one of the caches refuses the description.
    pub fn new(
        device: D,
        desc: CacheDesc,
        element: ScalarType,
        find: Option<fn(&Instance) -> Option<Instance>>,
    ) -> Result<Self, String> {
        let host = KvCache::new(desc).map_err(|e| e.to_string())?;
        let store = GpuStore::with_native(device, &desc, find).map_err(|e| e.to_string())?;
        let device = KvCache::with_store(store).map_err(|e| e.to_string())?;
        Ok(Self { host, device, sequences: Vec::new(), rng: Rng::new(7), element })
    }

    /// Gives both caches a mean of the keys of every layer.
    ///
    /// # Errors
    /// The reason why one of the caches refuses a mean.
    pub fn center(&mut self) -> Result<(), String> {
        let CacheDesc { layers, kv_heads, head_dim, .. } = *self.host.desc();
        for layer in 0..layers {
            let mean: Vec<f32> = (0..kv_heads * head_dim).map(|_| self.rng.normal()).collect();
            self.host.set_key_mean(layer, &mean).map_err(|e| e.to_string())?;
            self.device.set_key_mean(layer, &mean).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Gives both caches factors of the keys of every layer.
    ///
    /// # Errors
    /// The reason why one of the caches refuses factors.
    pub fn equalize(&mut self) -> Result<(), String> {
        let CacheDesc { layers, kv_heads, head_dim, .. } = *self.host.desc();
        for layer in 0..layers {
            // Of both signs, and not so small that rows become too long.
            let factor = |n: usize| if n % 3 == 1 { -1.0 } else { 1.0 } * (0.4 * self.rng.normal()).exp();
            let factors: Vec<f32> = (0..kv_heads * head_dim).map(factor).collect();
            self.host.set_key_factors(layer, &factors).map_err(|e| e.to_string())?;
            self.device.set_key_factors(layer, &factors).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Performs random operations, and compares all sequences after every `every` of them.
    ///
    /// # Errors
    /// The first disagreement.
    pub fn run(&mut self, operations: usize, every: usize) -> Result<(), String> {
        for n in 0..operations {
            let operation = self.draw();
            self.perform(operation).map_err(|why| format!("operation {n}, {operation:?}: {why}"))?;
            if n % every == every - 1 {
                self.compare().map_err(|why| format!("after operation {n}, {operation:?}: {why}"))?;
            }
        }
        self.compare()
    }

    fn draw(&mut self) -> Operation {
        let all: u32 = OPERATIONS.iter().map(|(_, weight)| weight).sum();
        let mut left = self.rng.below(all as usize) as u32;
        for (operation, weight) in OPERATIONS {
            if left < weight {
                return if self.sequences.is_empty() { Operation::Create } else { operation };
            }
            left -= weight;
        }
        Operation::Append
    }

    fn perform(&mut self, operation: Operation) -> Result<(), String> {
        if operation == Operation::Create {
            let made = agree("create", self.host.create(), self.device.create())?;
            self.sequences.extend(made);
            return Ok(());
        }
        let n = self.rng.below(self.sequences.len());
        let (host, device) = self.sequences[n];
        let (first, len) = self.kept(n)?;
        match operation {
            Operation::Create => {}
            Operation::Append => self.append()?,
            Operation::Truncate => {
                let to = first + self.rng.below(len - first + 2);
                agree("truncate", self.host.truncate(host, to), self.device.truncate(device, to))?;
            }
            Operation::Forget => {
                let before = self.rng.below(len + 1);
                agree("forget", self.host.forget(host, before), self.device.forget(device, before))?;
            }
            Operation::Fork => {
                let forked = agree("fork", self.host.fork(host), self.device.fork(device))?;
                self.sequences.extend(forked);
            }
            Operation::Remove => {
                agree("remove", self.host.remove(host), self.device.remove(device))?;
                self.sequences.swap_remove(n);
            }
            Operation::Restore => {
                // Each cache restores the snapshot of the other.
                let of_host = self.host.snapshot(host).map_err(|e| e.to_string())?;
                let of_device = self.device.snapshot(device).map_err(|e| e.to_string())?;
                let of_device = Snapshot::from_bytes(&of_device.to_bytes()).map_err(|e| e.to_string())?;
                let made = agree("restore", self.host.restore(&of_device), self.device.restore(&of_host))?;
                self.sequences.extend(made);
            }
        }
        Ok(())
    }

    fn kept(&self, n: usize) -> Result<(usize, usize), String> {
        let (host, device) = self.sequences[n];
        let of_host = (self.host.first(host), self.host.len(host));
        let (Ok(first), Ok(len)) = of_host else { return Err(format!("{of_host:?}")) };
        let of_device = [self.device.first(device), self.device.len(device)];
        match of_device {
            [Ok(a), Ok(b)] if (a, b) == (first, len) => Ok((first, len)),
            _ => Err(format!("tokens {first}..{len} on the host, others on the device")),
        }
    }

    /// Appends rows to one sequence or two.
    fn append(&mut self) -> Result<(), String> {
        let mut which = vec![self.rng.below(self.sequences.len())];
        let other = self.rng.below(self.sequences.len());
        if other != which[0] && self.rng.below(3) == 0 {
            which.push(other);
        }
        let tokens: Vec<usize> = which.iter().map(|_| 1 + self.rng.below(6)).collect();
        let total: usize = tokens.iter().sum();
        let desc = *self.host.desc();
        let heads = desc.kv_heads;
        let element = self.element;
        let mut rows = |dim: usize| -> Vec<f32> {
            let round = |x: f32| match element {
                ScalarType::F32 => x,
                _ => half::bf16::from_f32(x).to_f32(),
            };
            (0..total * heads * dim).map(|_| round(self.rng.normal())).collect()
        };
        let rows: Vec<[Vec<f32>; 2]> =
            (0..desc.layers).map(|_| [rows(desc.head_dim), rows(desc.value_dim)]).collect();
        let view = |x, dim| TensorView::packed::<f32>(x, [total, heads, dim]).map_err(|e| e.to_string());
        let on_host: Vec<_> = rows
            .iter()
            .map(|[k, v]| Ok::<_, String>((view(k, desc.head_dim)?, view(v, desc.value_dim)?)))
            .collect::<Result<_, _>>()?;
        let device = self.device.store().device();
        let memories: Vec<[D::Memory; 2]> = rows
            .iter()
            .map(|[k, v]| Ok::<_, String>([on_device(device, element, k)?, on_device(device, element, v)?]))
            .collect::<Result<_, _>>()?;
        let shapes = [desc.head_dim, desc.value_dim].map(|dim| ([1, heads, total, dim], packed(heads, dim)));
        let of = |x, (shape, strides): ([usize; 4], [usize; 4])| GpuRows { view: x, shape, strides };
        let on_device: Vec<_> =
            memories.iter().map(|[k, v]| (of(k.view(), shapes[0]), of(v.view(), shapes[1]))).collect();
        let batch = |name: fn(&(SeqId, SeqId)) -> SeqId| -> Vec<(SeqId, usize)> {
            which.iter().zip(&tokens).map(|(&n, &tokens)| (name(&self.sequences[n]), tokens)).collect()
        };
        let (of_host, of_device) = (batch(|s| s.0), batch(|s| s.1));
        let host = self.host.append(&of_host, &on_host);
        let device = self.device.append(&of_device, &on_device);
        agree("append", host, device)?;
        self.device.check_stored().map_err(|e| e.to_string())
    }

    /// Compares bytes and decoded rows of every sequence, bookkeeping and means.
    ///
    /// # Errors
    /// The first difference.
    pub fn compare(&self) -> Result<(), String> {
        if self.host.memory() != self.device.memory() {
            return Err(format!("{:?} and {:?}", self.host.memory(), self.device.memory()));
        }
        for n in 0..self.sequences.len() {
            let (host, device) = self.sequences[n];
            let (first, len) = self.kept(n)?;
            let a = self.host.snapshot(host).map_err(|e| e.to_string())?;
            let b = self.device.snapshot(device).map_err(|e| e.to_string())?;
            if a.to_bytes() != b.to_bytes() {
                let (a, b) = (a.as_bytes(), b.as_bytes());
                let at = a.iter().zip(b).position(|(a, b)| a != b);
                return Err(format!("sequence {n}, tokens {first}..{len}: byte {at:?} differs"));
            }
            for layer in 0..self.host.desc().layers {
                self.compare_decoded(n, layer, len - first)?;
            }
        }
        Ok(())
    }

    fn compare_decoded(&self, n: usize, layer: usize, tokens: usize) -> Result<(), String> {
        let desc = self.host.desc();
        let ((host, device), heads) = (self.sequences[n], desc.kv_heads);
        if tokens == 0 {
            return Ok(());
        }
        let dims = [desc.head_dim, desc.value_dim];
        let [mut k, mut v] = dims.map(|dim| vec![0.0f32; tokens * heads * dim]);
        let view = |x, dim| TensorViewMut::packed::<f32>(x, [tokens, heads, dim]).map_err(|e| e.to_string());
        let (mut k_view, mut v_view) = (view(&mut k, dims[0])?, view(&mut v, dims[1])?);
        self.host.linearize(host, layer, &mut k_view, &mut v_view).map_err(|e| e.to_string())?;
        let of = self.device.store().device();
        let room = |len| of.zeroed(ScalarType::F32, len).map_err(|e| e.to_string());
        let (mut k_memory, mut v_memory) = (room(k.len())?, room(v.len())?);
        let [k_shape, v_shape] = dims.map(|dim| [1, heads, tokens, dim]);
        let [k_strides, v_strides] = dims.map(|dim| packed(heads, dim));
        let mut k_rows = GpuRowsMut { view: k_memory.view_mut(), shape: k_shape, strides: k_strides };
        let mut v_rows = GpuRowsMut { view: v_memory.view_mut(), shape: v_shape, strides: v_strides };
        self.device.linearize(device, layer, &mut k_rows, &mut v_rows).map_err(|e| e.to_string())?;
        for (tensor, memory, want) in [("k", &k_memory, &k), ("v", &v_memory, &v)] {
            let mut bytes = vec![0u8; want.len() * 4];
            of.read(memory, 0, &mut bytes).map_err(|e| e.to_string())?;
            let got = bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x));
            let different =
                got.zip(want).enumerate().find(|(_, (got, want))| got.to_bits() != want.to_bits());
            if let Some((at, (got, want))) = different {
                return Err(format!("sequence {n} layer {layer}: {tensor}[{at}] is {got}, not {want}"));
            }
        }
        Ok(())
    }
}
