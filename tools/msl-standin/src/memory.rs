//! The memory of a run: allocations of the host, threadgroup memory, and the constants of the program. Each access of a kernel is
//! checked against their bounds and recorded in their shadows.

use crate::accesses::Accesses;
use crate::shadow::{Earlier, Shadow, Touch};

/// Bytes of threadgroup memory that a threadgroup may have.
pub(crate) const THREADGROUP_LIMIT: usize = 32 << 10;
/// Bytes between regions of threadgroup memory, and around a copied buffer: an access out of the bounds of one is not inside
/// another.
pub(crate) const GAP: usize = 256;

/// The thread that accesses memory, and the barriers that it has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Number of the threadgroup plus one; 0 is no access.
    pub(crate) group: u32,
    pub(crate) thread: u16,
    pub(crate) atomic: bool,
    /// Barriers passed by the threadgroup and by the SIMD-group, for device and for threadgroup memory.
    pub(crate) barriers: [u32; 2],
    pub(crate) simd_barriers: [u32; 2],
}

/// Why an access is refused.
#[derive(Debug)]
pub(crate) enum Fault {
    Access(String),
    Race { does: String, group: u32, thread: u32, wrote: bool },
}

/// The owner of a region.
#[derive(Clone, Copy, Debug)]
enum Owner {
    /// The compiled library, whose memory is only read and has no shadow.
    Program,
    /// The allocation of the run with this number.
    Allocation(usize),
    Threadgroup,
}

/// Addresses that a kernel may access.
#[derive(Debug)]
struct Region {
    start: u64,
    end: u64,
    /// From where on it may be written; `end` where it may only be read.
    writable_from: u64,
    owner: Owner,
    name: String,
}

/// An allocation of the host and its shadow.
#[derive(Debug)]
struct Shared {
    id: u64,
    start: u64,
    shadow: Shadow,
}

/// An allocation of the host, as far as a run may access it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) id: u64,
    pub(crate) start: u64,
    pub(crate) bytes: usize,
    /// The offset of the first byte that may be accessed.
    pub(crate) offset: usize,
    /// The offset of the first byte that may be written, if any may.
    pub(crate) writable_from: Option<usize>,
}

/// An allocation whose bytes start at a multiple of 256.
#[derive(Debug)]
pub(crate) struct Block {
    words: Vec<[u64; 32]>,
    bytes: usize,
}

impl Block {
    pub(crate) fn new(bytes: usize, fill: u8) -> Self {
        Self { words: vec![[u64::from_ne_bytes([fill; 8]); 32]; bytes.div_ceil(256) + 2], bytes }
    }

    fn offset(&self) -> usize {
        let at = self.words.as_ptr() as usize;
        at.next_multiple_of(256) - at
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let (offset, bytes) = (self.offset(), self.bytes);
        &mut self.words.as_flattened_mut_bytes()[offset..offset + bytes]
    }
}

trait AsBytes {
    fn as_flattened_mut_bytes(&mut self) -> &mut [u8];
}

impl AsBytes for Vec<[u64; 32]> {
    #[allow(unsafe_code)]
    fn as_flattened_mut_bytes(&mut self) -> &mut [u8] {
        let words = self.as_flattened_mut();
        // SAFETY: integers have no padding, and any bytes are valid integers.
        unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
    }
}

#[derive(Debug)]
pub(crate) struct Memory {
    regions: Vec<Region>,
    allocations: Vec<Shared>,
    /// Threadgroup memory. Its shadow lasts for the run: accesses of another threadgroup are no race.
    arena: Block,
    arena_shadow: Shadow,
    used: usize,
    counted: usize,
    /// Addresses of the threadgroup variables, by number.
    variables: Vec<Option<u64>>,
    launch: Mark,
    last: usize,
    /// True if races are detected.
    checks_races: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    regions: usize,
    used: usize,
    counted: usize,
}

impl Memory {
    pub(crate) fn new(checks_races: bool) -> Self {
        // 32 KiB in up to 512 variables with gaps between them.
        let mut arena = Block::new(THREADGROUP_LIMIT + 512 * GAP, 0xff);
        let addresses = arena.bytes().as_ptr_range();
        let arena_shadow = Shadow::new(addresses.start as u64, addresses.end as u64, false, checks_races);
        Self {
            regions: Vec::new(),
            allocations: Vec::new(),
            arena,
            arena_shadow,
            used: GAP,
            counted: 0,
            variables: Vec::new(),
            launch: Mark::default(),
            last: 0,
            checks_races,
        }
    }

    /// The address range of the compiled library, whose constants may be read.
    pub(crate) fn image(&mut self, [start, end]: [u64; 2]) {
        let name = "the constants of the program".into();
        self.regions.push(Region { start, end, writable_from: end, owner: Owner::Program, name });
    }

    /// Lets the kernel access an allocation; `name` tells faults which buffers it is bound as.
    pub(crate) fn allocation(&mut self, extent: &Extent, name: String) {
        let at = |offset: usize| extent.start + offset as u64;
        let (start, end) = (at(extent.offset), at(extent.bytes));
        let finds_races = self.checks_races && extent.writable_from.is_some();
        let owner = Owner::Allocation(self.allocations.len());
        let writable_from = extent.writable_from.map_or(end, at);
        self.regions.push(Region { start, end, writable_from, owner, name });
        let shadow = Shadow::new(start, end, true, finds_races);
        self.allocations.push(Shared { id: extent.id, start: extent.start, shadow });
    }

    /// The bytes of the allocations that have been read and written.
    pub(crate) fn accesses(&self) -> Accesses {
        let mut accesses = Accesses::default();
        for allocation in &self.allocations {
            accesses.insert(allocation.id, allocation.shadow.ranges(allocation.start));
        }
        accesses
    }

    /// Allocates threadgroup memory; the total that would be needed, if that is more than [`THREADGROUP_LIMIT`].
    pub(crate) fn threadgroup(&mut self, name: String, bytes: usize, align: usize) -> Result<u64, usize> {
        self.counted = self.counted.next_multiple_of(align.max(1)) + bytes;
        if self.counted > THREADGROUP_LIMIT {
            return Err(self.counted);
        }
        let at = self.used.next_multiple_of(align.max(16));
        if at + bytes + GAP > self.arena.bytes {
            return Err(self.counted);
        }
        self.used = at + bytes + GAP;
        let start = self.arena.bytes()[at..].as_ptr() as u64;
        let end = start + bytes as u64;
        self.regions.push(Region { start, end, writable_from: start, owner: Owner::Threadgroup, name });
        Ok(start)
    }

    /// Ends the allocations of the launch; later ones last for one threadgroup.
    pub(crate) fn launched(&mut self) {
        self.launch = Mark { regions: self.regions.len(), used: self.used, counted: self.counted };
    }

    /// Starts a threadgroup, whose memory is filled with NaN.
    pub(crate) fn group(&mut self) {
        let used = self.used;
        self.arena.bytes()[..used].fill(0xff);
        self.regions.truncate(self.launch.regions);
        self.used = self.launch.used;
        self.counted = self.launch.counted;
        self.variables.clear();
        self.last = 0;
    }

    /// The address of a threadgroup variable, allocated when the first thread asks for it.
    pub(crate) fn variable(&mut self, id: usize, bytes: usize, align: usize) -> Result<u64, usize> {
        if self.variables.len() <= id {
            self.variables.resize(id + 1, None);
        }
        if let Some(at) = self.variables[id] {
            return Ok(at);
        }
        let at = self.threadgroup(format!("threadgroup variable {id}"), bytes, align)?;
        self.variables[id] = Some(at);
        Ok(at)
    }

    /// Checks an access, and records it.
    pub(crate) fn check(&mut self, at: u64, size: u64, write: bool, stamp: &Stamp) -> Result<(), Fault> {
        let inside = |r: &Region| at >= r.start && at + size <= r.end;
        let found = match self.regions.get(self.last) {
            Some(r) if inside(r) => Some(self.last),
            _ => self.regions.iter().position(inside),
        };
        let Some(index) = found else { return Err(Fault::Access(self.outside(at, size, write))) };
        self.last = index;
        let region = &self.regions[index];
        if write && at < region.writable_from {
            return Err(Fault::Access(format!("writes {}, which is bound for reading", region.name)));
        }
        let (kind, shadow) = match region.owner {
            Owner::Program => return Ok(()),
            Owner::Allocation(n) => (0, &mut self.allocations[n].shadow),
            Owner::Threadgroup => (1, &mut self.arena_shadow),
        };
        let barriers = [stamp.barriers[kind], stamp.simd_barriers[kind]];
        let now = Touch::new(stamp.group, stamp.thread, stamp.atomic, barriers);
        let Some(Earlier { touch, wrote }) = shadow.access(at, size, write, &now) else { return Ok(()) };
        let verb = if write { "writes" } else { "reads" };
        let does = format!("{verb} {size} bytes at byte {} of {}", at - region.start, region.name);
        Err(Fault::Race { does, group: touch.group() - 1, thread: u32::from(touch.thread()), wrote })
    }

    /// The description of an access outside of all regions.
    fn outside(&self, at: u64, size: u64, write: bool) -> String {
        let verb = if write { "writes" } else { "reads" };
        let distance = |r: &Region| if at < r.start { r.start - at } else { at - r.end.min(at) };
        let Some(r) = self.regions.iter().min_by_key(|r| distance(r)) else {
            return format!("{verb} memory, but the launch has none");
        };
        let offset = at.wrapping_sub(r.start).cast_signed();
        if offset.unsigned_abs() > (1 << 40) {
            return format!("{verb} {size} bytes at address {at:#x}, which is in no buffer");
        }
        format!("{verb} {size} bytes at byte {offset} of {}, which has {}", r.name, r.end - r.start)
    }
}
