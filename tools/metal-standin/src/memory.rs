//! Memory of buffers and heaps, and what is known of each buffer.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

use block2::RcBlock;
use objc2_metal::{MTLResourceOptions, MTLStorageMode};

use crate::machine::{Label, Machine, lock, unique};
use crate::object::Sent;

/// The block that frees memory of `newBufferWithBytesNoCopy:`.
pub(crate) type Deallocator = Sent<RcBlock<dyn Fn(NonNull<c_void>, usize)>>;

/// Bytes that are left free before and after memory, so that an access past its end is inside no other buffer.
const GAP: usize = 256;

/// Pages of Apple's processors.
pub(crate) const PAGE: usize = 16384;

enum Owner {
    Own(Layout),
    Host(Option<Deallocator>),
}

/// Memory that lives as long as something refers to it.
pub(crate) struct Storage {
    pub(crate) id: u64,
    pub(crate) bytes: usize,
    /// True if Metal orders the encoders of a queue that use it.
    pub(crate) is_tracked: bool,
    /// True if the CPU may read and write it.
    pub(crate) is_visible: bool,
    start: *mut u8,
    owner: Owner,
    is_counted: bool,
    machine: Arc<Machine>,
}

// SAFETY: the address gives no access by itself; who reads and writes the memory orders that with the device, as with a GPU.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

/// The properties of a new storage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) is_tracked: bool,
    pub(crate) is_visible: bool,
    /// True if its bytes count as the device's memory.
    pub(crate) is_counted: bool,
}

impl Storage {
    /// Memory of its own, filled with `fill`.
    pub(crate) fn own(machine: &Arc<Machine>, bytes: usize, kind: Kind, fill: u8) -> Arc<Self> {
        let layout = Layout::from_size_align(bytes + 2 * GAP, GAP).expect("a length of a buffer");
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        assert!(!base.is_null(), "out of memory: {bytes} bytes");
        // SAFETY: the gap lies inside the allocation.
        let start = unsafe { base.add(GAP) };
        if fill != 0 {
            // SAFETY: the memory is that long.
            unsafe { start.write_bytes(fill, bytes) };
        }
        Self::made(machine, (start, bytes), kind, Owner::Own(layout))
    }

    /// Memory of the host.
    pub(crate) fn host(
        machine: &Arc<Machine>,
        memory: (*mut u8, usize),
        kind: Kind,
        free: Option<Deallocator>,
    ) -> Arc<Self> {
        Self::made(machine, memory, kind, Owner::Host(free))
    }

    fn made(machine: &Arc<Machine>, (start, bytes): (*mut u8, usize), kind: Kind, owner: Owner) -> Arc<Self> {
        let Kind { is_tracked, is_visible, is_counted } = kind;
        Arc::new(Self {
            id: unique(),
            bytes,
            is_tracked,
            is_visible,
            start,
            owner,
            is_counted,
            machine: machine.clone(),
        })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// A copy of some of its bytes.
    pub(crate) fn read(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        let mut copy = vec![0; range.len()];
        // SAFETY: the range is inside the memory. A host that writes at the same time races, which is what its test looks for.
        unsafe { std::ptr::copy(self.start.add(range.start), copy.as_mut_ptr(), range.len()) };
        copy
    }

    /// Writes bytes.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.bytes, "{} bytes at {at} of {}", bytes.len(), self.bytes);
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Own(layout) => {
                // SAFETY: `own` has allocated it with this layout, one gap before `start`.
                unsafe { dealloc(self.start.sub(GAP), *layout) };
                if self.is_counted {
                    self.machine.free(self.bytes);
                }
            }
            Owner::Host(free) => {
                if let (Some(free), Some(at)) = (free, NonNull::new(self.start)) {
                    free.call((at.cast(), self.bytes));
                }
            }
        }
    }
}

/// A buffer apart from its object, so that work in flight can tell that the object is gone.
pub(crate) struct BufferState {
    pub(crate) id: u64,
    pub(crate) machine: Arc<Machine>,
    pub(crate) storage: Arc<Storage>,
    /// The first byte of the storage that belongs to it: not 0 in heaps.
    pub(crate) base: usize,
    pub(crate) length: usize,
    pub(crate) options: MTLResourceOptions,
    pub(crate) label: Label,
    pub(crate) is_alive: AtomicBool,
    pub(crate) is_aliasable: AtomicBool,
    /// True if the host has asked for its address, by which kernels may reach it.
    pub(crate) has_address: AtomicBool,
    /// MTLPurgeableState.
    pub(crate) purgeable: AtomicUsize,
}

impl BufferState {
    pub(crate) fn is_private(&self) -> bool {
        storage_mode(self.options) == MTLStorageMode::Private
    }

    /// Its bytes in its storage, from an offset on.
    pub(crate) fn range(&self, offset: usize, length: usize) -> Range<usize> {
        self.base + offset..self.base + offset + length
    }

    pub(crate) fn start(&self) -> *mut u8 {
        // SAFETY: the base lies inside the storage.
        unsafe { self.storage.start().add(self.base) }
    }

    /// `buffer "label"`.
    pub(crate) fn shown(&self) -> String {
        format!("buffer{}", self.label.shown())
    }

    pub(crate) fn is_gone(&self) -> bool {
        !self.is_alive.load(SeqCst)
    }
}

/// Buffers whose address a host has asked for.
static ADDRESSED: Mutex<Vec<Weak<BufferState>>> = Mutex::new(Vec::new());

/// The address of a buffer for kernels.
pub(crate) fn address(buffer: &Arc<BufferState>) -> u64 {
    if !buffer.has_address.swap(true, SeqCst) {
        let mut all = lock(&ADDRESSED);
        all.retain(|b| b.strong_count() > 0);
        all.push(Arc::downgrade(buffer));
    }
    buffer.start().expose_provenance() as u64
}

/// A buffer of a device whose address is among these words, and to which `is_bound` does not apply.
pub(crate) fn addressed(
    machine: u64,
    words: &[u64],
    is_bound: impl Fn(u64) -> bool,
) -> Option<Arc<BufferState>> {
    let all: Vec<_> = lock(&ADDRESSED).iter().filter_map(Weak::upgrade).collect();
    all.into_iter().filter(|b| b.machine.id == machine && !is_bound(b.id)).find(|b| {
        let start = b.start().addr() as u64;
        words.iter().any(|w| (start..start + b.length as u64).contains(w))
    })
}

/// The storage mode in resource options, bits 4 to 7.
pub(crate) fn storage_mode(options: MTLResourceOptions) -> MTLStorageMode {
    MTLStorageMode(options.0 >> 4 & 15)
}

/// The hazard tracking mode in resource options, bits 8 and 9.
pub(crate) fn is_untracked(options: MTLResourceOptions) -> bool {
    options.contains(MTLResourceOptions::HazardTrackingModeUntracked)
}
