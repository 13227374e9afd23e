//! Kernels and their launches.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, PoisonError};

use crate::accesses::Accesses;
use crate::error::RunError;
use crate::loaded::Loaded;
use crate::memory::{Block, Extent, GAP, Memory, THREADGROUP_LIMIT};
use crate::reflection::ArgumentInfo;
use crate::run::{Entry, ThreadContext, Threadgroup, with_stacks};
use crate::source::kernels::{self, Argument};

/// Memory that outlives a run, with an identity: two bindings of one allocation are seen as one memory.
///
/// A kernel runs on this memory itself, and an access is judged by its address: past the end of one allocation and inside another
/// one of the run, it is not seen as out of bounds. Bytes left free around each allocation (256, say) make it a fault.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// Different for different allocations of a run; [`Accesses`] name allocations by it.
    pub id: u64,
    /// The first byte.
    pub start: *mut u8,
    /// How many bytes it has.
    pub bytes: usize,
}

// SAFETY: an allocation is an address and a length, which give no access by themselves: the caller of `Kernel::run_on` answers for
// the memory during a run.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

/// A `[[buffer(n)]]` bound to `allocation` from byte `offset` on.
#[derive(Clone, Copy, Debug)]
pub struct Binding {
    /// `n` of its `[[buffer(n)]]`, from 0 to 30.
    pub index: usize,
    /// The memory; `setBytes` binds one as well, which holds the bytes.
    pub allocation: Allocation,
    /// The byte of the allocation that the kernel sees as the first one, at most the allocation's length. It need not be aligned:
    /// accesses are judged by their addresses.
    pub offset: usize,
    /// True if the kernel may write from `offset` on. Where several bindings cover a byte, one writable
    /// binding is enough: kernels see one memory. A kernel that only reads, through a pointer to `const` or
    /// not, needs no writable binding.
    pub writable: bool,
}

/// The order in which the threadgroups of a grid run. Metal promises none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By their position in the grid, x fastest.
    Forward,
    /// In a random order that this seed determines.
    Random(u64),
}

impl Order {
    /// The threadgroups of a grid by their numbers in it.
    fn of(self, count: u32) -> Box<dyn Iterator<Item = u32>> {
        match self {
            Self::Forward => Box::new(0..count),
            Self::Random(seed) => {
                let mut numbers: Vec<u32> = (0..count).collect();
                fastrand::Rng::with_seed(seed).shuffle(&mut numbers);
                Box::new(numbers.into_iter())
            }
        }
    }
}

#[derive(Debug)]
enum Bytes<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
}

/// The memory of a `[[buffer(n)]]`, in native byte order.
#[derive(Debug)]
pub struct Buffer<'a> {
    index: usize,
    bytes: Bytes<'a>,
}

impl<'a> Buffer<'a> {
    /// A buffer that the kernel may read; a write to it is an error.
    pub fn read(index: usize, bytes: &'a [u8]) -> Self {
        Self { index, bytes: Bytes::Read(bytes) }
    }

    /// A buffer that the kernel may read and write.
    pub fn write(index: usize, bytes: &'a mut [u8]) -> Self {
        Self { index, bytes: Bytes::Write(bytes) }
    }

    /// Its bytes, and whether the kernel may write them.
    fn content(&self) -> (&[u8], bool) {
        match &self.bytes {
            Bytes::Read(bytes) => (bytes, false),
            Bytes::Write(bytes) => (bytes, true),
        }
    }
}

/// A kernel that can be run, by any thread. Runs of kernels of one library wait for each other, since they share the memory of its
/// function constants; runs of different libraries do not.
#[derive(Clone)]
pub struct Kernel {
    pub(crate) loaded: Arc<Loaded>,
    pub(crate) index: usize,
    pub(crate) values: Vec<(u32, Option<u64>)>,
    pub(crate) checks_races: bool,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.declaration().name).finish_non_exhaustive()
    }
}

fn launch<T>(what: impl Into<String>) -> Result<T, RunError> {
    Err(RunError::Launch(what.into()))
}

/// The shape of a launch.
#[derive(Clone, Copy)]
struct Grid {
    groups: [u32; 3],
    threads: [u32; 3],
}

impl Kernel {
    fn declaration(&self) -> &kernels::Kernel {
        &self.loaded.program.kernels[self.index]
    }

    /// This kernel without race detection, for kernels whose threads write the same value to the same place.
    #[must_use]
    pub fn with_races(mut self) -> Self {
        self.checks_races = false;
        self
    }

    /// The threads that a threadgroup may have: `[[max_total_threads_per_threadgroup(n)]]` of the kernel, else 1024. A device may
    /// allow fewer, by the registers that the kernel needs there.
    pub fn max_threads(&self) -> u32 {
        self.declaration().max_threads.unwrap_or(1024)
    }

    /// Bytes of the threadgroup variables that the kernel declares, each at a multiple of its alignment in the order of the program:
    /// `staticThreadgroupMemoryLength`.
    ///
    /// An upper bound of what a run counts: variables of branches that clang cannot rule out are included, such as those that depend
    /// on function constants. A lower bound of what Apple's compiler reserves is not known: it may drop variables, and round up.
    pub fn static_threadgroup_bytes(&self) -> usize {
        self.loaded.facts[self.index].static_bytes
    }

    /// The kernel's buffers and threadgroup parameters, in the order of its parameters.
    pub fn arguments(&self) -> Vec<ArgumentInfo> {
        self.loaded.facts[self.index].arguments.clone()
    }

    /// Runs a grid of `groups` threadgroups of `threads` threads each, one threadgroup after the other, on copies of `buffers`.
    ///
    /// `threadgroup_bytes[n]` is the size in bytes of the memory of the parameter with `[[threadgroup(n)]]`; sizes are rounded
    /// up to a multiple of 16, as Metal requires. Writable buffers hold what the kernel has written, even if the run fails.
    ///
    /// # Errors
    /// [`RunError`] for a launch that Metal would refuse, and for the first fault of a thread.
    pub fn run(
        &self,
        groups: [u32; 3],
        threads: [u32; 3],
        buffers: &mut [Buffer<'_>],
        threadgroup_bytes: &[usize],
    ) -> Result<(), RunError> {
        let mut blocks = Vec::new();
        let mut bindings = Vec::new();
        for (id, buffer) in (0..).zip(buffers.iter()) {
            let (content, writable) = buffer.content();
            let mut block = Block::new(content.len() + 2 * GAP, 0xa5);
            let inside = &mut block.bytes()[GAP..GAP + content.len()];
            inside.copy_from_slice(content);
            let allocation = Allocation { id, start: inside.as_mut_ptr(), bytes: content.len() };
            bindings.push(Binding { index: buffer.index, allocation, offset: 0, writable });
            blocks.push(block);
        }
        // SAFETY: each allocation is the inside of a block of its own, which nothing else accesses until the run has ended.
        let result = unsafe { self.run_on(groups, threads, &bindings, threadgroup_bytes, Order::Forward) };
        for (buffer, block) in buffers.iter_mut().zip(&mut blocks) {
            if let Bytes::Write(bytes) = &mut buffer.bytes {
                bytes.copy_from_slice(&block.bytes()[GAP..GAP + bytes.len()]);
            }
        }
        result.map(|_| ())
    }

    /// Runs a grid of `groups` threadgroups of `threads` threads each, one threadgroup after the other, on the memory of the
    /// bindings itself; what the run has read and written.
    ///
    /// A kernel may access an allocation from the smallest offset that it is bound with, up to its end; faults count bytes from
    /// there, and name all buffers that it is bound as. `threadgroup_bytes` is as for [`run`](Self::run). After a failed run, the memory holds what the kernel has written until then.
    ///
    /// # Errors
    /// [`RunError`] for a launch that Metal would refuse, for bindings that contradict each other, and for the first fault of a
    /// thread.
    ///
    /// # Safety
    /// - Each allocation is valid for reads and writes of its `bytes` bytes during the run, and nothing else accesses them.
    /// - Allocations with different ids are disjoint memory.
    pub unsafe fn run_on(
        &self,
        groups: [u32; 3],
        threads: [u32; 3],
        bindings: &[Binding],
        threadgroup_bytes: &[usize],
        order: Order,
    ) -> Result<Accesses, RunError> {
        let grid = Grid { groups, threads };
        let count = self.check_launch(grid, bindings, threadgroup_bytes)?;
        let allocations = allocations(bindings)?;
        let _one_at_a_time = self.loaded.running.lock().unwrap_or_else(PoisonError::into_inner);
        let (entry, image) = self.prepare().map_err(|e: libloading::Error| {
            RunError::Launch(format!("the compiled library lacks a symbol: {e}"))
        })?;
        let mut memory = Memory::new(self.checks_races);
        memory.image(image);
        for (extent, name) in allocations {
            memory.allocation(&extent, name);
        }
        let mut context = context(grid, count);
        for b in bindings {
            // The kernel gets the pointer from its address.
            let start = b.allocation.start.expose_provenance() as u64;
            context.buffers[b.index] = start + b.offset as u64;
        }
        for (i, &bytes) in threadgroup_bytes.iter().enumerate() {
            let name = format!("threadgroup memory {i}");
            context.threadgroups[i] = memory
                .threadgroup(name, bytes.next_multiple_of(16), 16)
                .map_err(|bytes| RunError::ThreadgroupMemory { bytes, limit: THREADGROUP_LIMIT })?;
        }
        memory.launched();
        let result = with_stacks(count, |stacks| {
            let mut group = Threadgroup::new(entry, contexts(context, count), &mut memory, stacks);
            let [x, y, z] = groups;
            for number in order.of(x * y * z) {
                group.run([number % x, number / x % y, number / (x * y)], number)?;
            }
            Ok(())
        });
        match result {
            Ok(Ok(())) => Ok(memory.accesses()),
            Ok(Err(fault)) => Err(fault),
            Err(e) => launch(format!("cannot allocate {count} stacks: {e}")),
        }
    }

    /// The kernel's entry point and the address range of its library, whose function constants are set. The caller holds the
    /// lock of the library.
    fn prepare(&self) -> Result<(Entry, [u64; 2]), libloading::Error> {
        let library = &self.loaded.library;
        let name = format!("msl_entry_{}", self.index);
        // SAFETY: `assemble` defines an entry point with this name and type for each kernel.
        let entry: Entry = unsafe { *library.get::<Entry>(name.as_bytes())? };
        for &(index, value) in &self.values {
            // SAFETY: `assemble` defines 8 bytes for each of the two names; no kernel of the library is running.
            unsafe {
                let at: *mut u64 = *library.get(format!("msl_fc_{index}").as_bytes())?;
                at.write(value.unwrap_or(0));
                let at: *mut u64 = *library.get(format!("msl_fcd_{index}").as_bytes())?;
                at.write(u64::from(value.is_some()));
            }
        }
        // SAFETY: the header defines an array of two words with this name.
        let image = unsafe { **library.get::<*const [u64; 2]>(b"msl_image")? };
        Ok((entry, image))
    }

    /// Checks a launch; the number of threads in a threadgroup.
    fn check_launch(
        &self,
        grid: Grid,
        bindings: &[Binding],
        threadgroup_bytes: &[usize],
    ) -> Result<usize, RunError> {
        let kernel = self.declaration();
        let count = check_grid(&kernel.name, grid, self.max_threads())?;
        for (n, b) in bindings.iter().enumerate() {
            if b.index > 30 || bindings[..n].iter().any(|o| o.index == b.index) {
                return launch(format!("buffer {} is bound twice or above 30", b.index));
            }
        }
        if threadgroup_bytes.len() > 31 {
            return launch("more than 31 sizes of threadgroup memory");
        }
        for parameter in &kernel.parameters {
            match &parameter.argument {
                Argument::Buffer { index, condition } => {
                    let is_bound = bindings.iter().any(|b| b.index == *index);
                    // A conditional buffer that is missing is found when it is accessed.
                    if condition.is_none() && !is_bound {
                        return launch(format!("buffer {index} of kernel `{}` is not bound", kernel.name));
                    }
                }
                Argument::Threadgroup(i) => {
                    if threadgroup_bytes.get(*i).is_none_or(|&b| b == 0) {
                        return launch(format!(
                            "threadgroup memory {i} of kernel `{}` has no size",
                            kernel.name
                        ));
                    }
                }
                Argument::VectorBuiltin(_) | Argument::ScalarBuiltin(_) => {}
            }
        }
        Ok(count)
    }
}

/// Checks the shape of a launch; the number of threads in a threadgroup.
fn check_grid(name: &str, Grid { groups, threads }: Grid, limit: u32) -> Result<usize, RunError> {
    let product = |of: [u32; 3]| of.iter().map(|&n| u64::from(n)).fold(1, u64::saturating_mul);
    let count = product(threads);
    if count == 0 || groups.contains(&0) {
        return launch(format!("nothing to run: {groups:?} threadgroups of {threads:?} threads"));
    }
    if count > u64::from(limit) {
        return launch(format!(
            "{count} threads in a threadgroup of kernel `{name}`, whose maximum is {limit}"
        ));
    }
    let is_too_long = (0..3).any(|d| groups[d].checked_mul(threads[d]).is_none());
    if is_too_long || product(groups) >= u64::from(u32::MAX) {
        return launch(format!("the grid is too large: {groups:?} threadgroups of {threads:?} threads"));
    }
    Ok(count as usize)
}

/// The extent that a run may access of each allocation, and the name of the allocation in faults.
fn allocations(bindings: &[Binding]) -> Result<Vec<(Extent, String)>, RunError> {
    let mut found: Vec<(Extent, Vec<usize>)> = Vec::new();
    for b in bindings {
        let Allocation { id, start, bytes } = b.allocation;
        let (index, start) = (b.index, start.addr() as u64);
        if b.offset > bytes || start.checked_add(bytes as u64).is_none() {
            let offset = b.offset;
            return launch(format!(
                "buffer {index} starts at byte {offset} of an allocation of {bytes} bytes"
            ));
        }
        let writable_from = b.writable.then_some(b.offset);
        if let Some((extent, indices)) = found.iter_mut().find(|(e, _)| e.id == id) {
            if (extent.start, extent.bytes) != (start, bytes) {
                return launch(format!("buffer {index} gives allocation {id} another address or length"));
            }
            extent.offset = extent.offset.min(b.offset);
            let from = extent.writable_from.into_iter().chain(writable_from).min();
            extent.writable_from = from;
            indices.push(index);
            continue;
        }
        let overlaps = |e: &Extent| start < e.start + e.bytes as u64 && e.start < start + bytes as u64;
        if let Some((other, _)) = found.iter().find(|(e, _)| overlaps(e)) {
            return launch(format!("allocations {} and {id} overlap", other.id));
        }
        found.push((Extent { id, start, bytes, offset: b.offset, writable_from }, vec![index]));
    }
    Ok(found.into_iter().map(|(extent, indices)| (extent, buffer_name(indices))).collect())
}

/// How faults call an allocation: by the buffers that it is bound as.
fn buffer_name(mut indices: Vec<usize>) -> String {
    if let [index] = indices[..] {
        return format!("buffer {index}");
    }
    indices.sort_unstable();
    let list: Vec<String> = indices.iter().map(usize::to_string).collect();
    format!("the memory of buffers {}", list.join(", "))
}

/// The context that is equal for all threads of a launch, without addresses.
fn context(Grid { groups, threads }: Grid, count: usize) -> ThreadContext {
    ThreadContext {
        thread_position_in_grid: [0; 3],
        thread_position_in_threadgroup: [0; 3],
        threadgroup_position_in_grid: [0; 3],
        threads_per_threadgroup: threads,
        threadgroups_per_grid: groups,
        threads_per_grid: [0, 1, 2].map(|d| groups[d] * threads[d]),
        thread_index_in_threadgroup: 0,
        thread_index_in_simdgroup: 0,
        simdgroup_index_in_threadgroup: 0,
        simdgroups_per_threadgroup: (count as u32).div_ceil(32),
        threads_per_simdgroup: 32,
        padding: 0,
        buffers: [0; 31],
        threadgroups: [0; 31],
    }
}

/// The contexts of the threads of a threadgroup.
fn contexts(context: ThreadContext, count: usize) -> Vec<ThreadContext> {
    let [x, y, _] = context.threads_per_threadgroup;
    (0..count as u32)
        .map(|i| ThreadContext {
            thread_position_in_threadgroup: [i % x, i / x % y, i / (x * y)],
            thread_index_in_threadgroup: i,
            thread_index_in_simdgroup: i % 32,
            simdgroup_index_in_threadgroup: i / 32,
            ..context
        })
        .collect()
}
