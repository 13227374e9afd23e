//! The memory of a run: copies of its buffers, and threadgroup memory. Allocations lie apart, so that an access out of the bounds
//! of one is not inside another.

/// Bytes of threadgroup memory that a threadgroup may have.
pub(crate) const THREADGROUP_LIMIT: usize = 32 << 10;
/// Bytes between allocations.
const GAP: usize = 256;

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

/// An access to one byte, with the barriers that order accesses to its kind of memory.
#[derive(Clone, Copy, Debug, Default)]
struct Touch {
    group: u32,
    thread: u16,
    atomic: bool,
    barriers: u32,
    simd_barriers: u32,
}

impl Touch {
    /// Whether nothing orders this access before `now`.
    fn races(&self, now: &Touch, across_groups: bool) -> bool {
        if self.group == 0 || (self.atomic && now.atomic) {
            return false;
        }
        if self.group != now.group {
            return across_groups;
        }
        self.thread != now.thread
            && self.barriers == now.barriers
            && (self.thread / 32 != now.thread / 32 || self.simd_barriers == now.simd_barriers)
    }
}

/// The last write of a byte, and the last reads by two different threads.
#[derive(Clone, Copy, Debug, Default)]
struct Shadow {
    write: Touch,
    reads: [Touch; 2],
}

#[derive(Debug)]
struct Region {
    start: u64,
    end: u64,
    writable: bool,
    /// Threadgroup memory, rather than a buffer that all threadgroups share.
    is_threadgroup: bool,
    name: String,
    /// One entry per byte; empty where no write is possible.
    shadow: Vec<Shadow>,
}

/// Why an access is refused.
#[derive(Debug)]
pub(crate) enum Fault {
    Access(String),
    Race { does: String, group: u32, thread: u32, wrote: bool },
}

impl Region {
    fn race(&mut self, at: u64, size: u64, write: bool, stamp: &Stamp) -> Option<Fault> {
        let kind = usize::from(self.is_threadgroup);
        let now = Touch {
            group: stamp.group,
            thread: stamp.thread,
            atomic: stamp.atomic,
            barriers: stamp.barriers[kind],
            simd_barriers: stamp.simd_barriers[kind],
        };
        let across = !self.is_threadgroup;
        let offset = (at - self.start) as usize;
        let mut found: Option<(Touch, bool)> = None;
        for s in self.shadow.get_mut(offset..offset + size as usize)? {
            if s.write.races(&now, across) {
                found = Some((s.write, true));
            }
            if write {
                if let Some(r) = s.reads.iter().find(|r| r.races(&now, across)) {
                    found = Some((*r, false));
                }
                s.write = now;
            } else {
                if (s.reads[0].group, s.reads[0].thread) != (now.group, now.thread) {
                    s.reads[1] = s.reads[0];
                }
                s.reads[0] = now;
            }
        }
        let (other, wrote) = found?;
        let verb = if write { "writes" } else { "reads" };
        let does = format!("{verb} {size} bytes at byte {offset} of {}", self.name);
        Some(Fault::Race { does, group: other.group - 1, thread: u32::from(other.thread), wrote })
    }
}

/// An allocation whose bytes start at a multiple of 256.
#[derive(Debug)]
pub(crate) struct Block {
    words: Vec<[u64; 32]>,
    bytes: usize,
}

impl Block {
    fn new(bytes: usize, fill: u8) -> Self {
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
    arena: Block,
    used: usize,
    counted: usize,
    /// Addresses of the threadgroup variables, by number.
    variables: Vec<Option<u64>>,
    launch: Mark,
    last: usize,
    /// Whether races are detected.
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
        let arena = Block::new(THREADGROUP_LIMIT + 512 * GAP, 0xff);
        Self {
            regions: Vec::new(),
            arena,
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
        self.regions.push(Region {
            start,
            end,
            writable: false,
            is_threadgroup: false,
            name,
            shadow: Vec::new(),
        });
    }

    /// Copies a buffer; the copy, and the address of its first byte.
    pub(crate) fn buffer(&mut self, index: usize, data: &[u8], writable: bool) -> (Block, u64) {
        let mut block = Block::new(data.len() + 2 * GAP, 0xa5);
        let inside = &mut block.bytes()[GAP..GAP + data.len()];
        inside.copy_from_slice(data);
        let start = inside.as_ptr() as u64;
        let name = format!("buffer {index}");
        let shadow =
            if writable && self.checks_races { vec![Shadow::default(); data.len()] } else { Vec::new() };
        self.regions.push(Region {
            start,
            end: start + data.len() as u64,
            writable,
            is_threadgroup: false,
            name,
            shadow,
        });
        (block, start)
    }

    /// The bytes of a copy made by [`Memory::buffer`].
    pub(crate) fn content(block: &mut Block, bytes: usize) -> &[u8] {
        &block.bytes()[GAP..GAP + bytes]
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
        let shadow = if self.checks_races { vec![Shadow::default(); bytes] } else { Vec::new() };
        self.regions.push(Region {
            start,
            end: start + bytes as u64,
            writable: true,
            is_threadgroup: true,
            name,
            shadow,
        });
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

    /// Checks an access.
    pub(crate) fn check(&mut self, at: u64, size: u64, write: bool, stamp: &Stamp) -> Result<(), Fault> {
        let inside = |r: &Region| at >= r.start && at + size <= r.end;
        let found = match self.regions.get(self.last) {
            Some(r) if inside(r) => Some(self.last),
            _ => self.regions.iter().position(inside),
        };
        let verb = if write { "writes" } else { "reads" };
        if let Some(i) = found {
            self.last = i;
            let r = &mut self.regions[i];
            if write && !r.writable {
                return Err(Fault::Access(format!("writes {}, which is bound for reading", r.name)));
            }
            return r.race(at, size, write, stamp).map_or(Ok(()), Err);
        }
        let distance = |r: &Region| if at < r.start { r.start - at } else { at - r.end.min(at) };
        let Some(r) = self.regions.iter().min_by_key(|r| distance(r)) else {
            return Err(Fault::Access(format!("{verb} memory, but the launch has none")));
        };
        let offset = at.wrapping_sub(r.start).cast_signed();
        Err(Fault::Access(if offset.unsigned_abs() > (1 << 40) {
            format!("{verb} {size} bytes at address {at:#x}, which is in no buffer")
        } else {
            format!("{verb} {size} bytes at byte {offset} of {}, which has {}", r.name, r.end - r.start)
        }))
    }
}
