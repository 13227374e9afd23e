//! Compiled texts, their kernels, and launches.
#![allow(unsafe_code)]

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, RunError};
use crate::memory::{Block, Memory, THREADGROUP_LIMIT};
use crate::run::{Entry, Group, HOST, Host, ThreadContext, with_stacks};
use crate::text::{self, Constant, Parsed, Source};

/// The value of a function constant.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A `bool`.
    Bool(bool),
    /// A `char`.
    I8(i8),
    /// A `uchar`.
    U8(u8),
    /// A `short`.
    I16(i16),
    /// A `ushort`.
    U16(u16),
    /// An `int`.
    I32(i32),
    /// A `uint`.
    U32(u32),
    /// A `long`.
    I64(i64),
    /// A `ulong`.
    U64(u64),
    /// A `float`.
    F32(f32),
    /// A `half`, by its bits.
    F16Bits(u16),
}

impl Value {
    /// Its type in the text, and its bits.
    fn parts(self) -> (&'static str, u64) {
        match self {
            Self::Bool(v) => ("bool", u64::from(v)),
            Self::I8(v) => ("char", u64::from(v.cast_unsigned())),
            Self::U8(v) => ("uchar", u64::from(v)),
            Self::I16(v) => ("short", u64::from(v.cast_unsigned())),
            Self::U16(v) => ("ushort", u64::from(v)),
            Self::I32(v) => ("int", u64::from(v.cast_unsigned())),
            Self::U32(v) => ("uint", u64::from(v)),
            Self::I64(v) => ("long", v.cast_unsigned()),
            Self::U64(v) => ("ulong", v),
            Self::F32(v) => ("float", u64::from(v.to_bits())),
            Self::F16Bits(v) => ("half", u64::from(v)),
        }
    }
}

/// A function constant and its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FunctionConstant {
    /// The number of its `[[function_constant(n)]]`.
    pub index: u32,
    /// Its value.
    pub value: Value,
}

impl FunctionConstant {
    /// A value for a constant.
    pub fn new(index: u32, value: Value) -> Self {
        Self { index, value }
    }
}

#[derive(Debug)]
enum Bytes<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
}

/// The memory of a `[[buffer(n)]]`, in the byte order of the machine.
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
}

struct Loaded {
    library: libloading::Library,
    parsed: Parsed,
    /// Runs of a library share its function constants.
    running: Mutex<()>,
}

/// A compiled text.
#[derive(Clone)]
pub struct Library {
    loaded: Arc<Loaded>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("kernels", &self.kernels()).finish_non_exhaustive()
    }
}

impl Library {
    pub(crate) fn load(path: &Path, parsed: Parsed) -> Result<Self, String> {
        // SAFETY: the library has been made from the header, and its one initialiser does nothing.
        let library =
            unsafe { libloading::Library::new(path) }.map_err(|e| format!("cannot load it: {e}"))?;
        // SAFETY: the header defines a table of 8 pointers of this name, and `Host` has no more.
        unsafe {
            let table = library.get::<*mut Host>(b"msl_host").map_err(|e| e.to_string())?;
            let table: *mut Host = *table;
            std::ptr::copy_nonoverlapping(&raw const HOST, table, 1);
        }
        Ok(Self { loaded: Arc::new(Loaded { library, parsed, running: Mutex::new(()) }) })
    }

    /// The names of its kernels, in the order of the text.
    pub fn kernels(&self) -> Vec<&str> {
        self.loaded.parsed.kernels.iter().map(|k| k.name.as_str()).collect()
    }

    /// The kernel of this name, with these function constants. A constant that the kernel does not reach may be given.
    ///
    /// # Errors
    /// Where there is no such kernel, where a constant that it reaches is not set and the text does not ask whether it
    /// is, and where a constant has another type or is not in the text.
    pub fn kernel(&self, name: &str, constants: &[FunctionConstant]) -> Result<Kernel, Error> {
        let parsed = &self.loaded.parsed;
        let Some(index) = parsed.kernels.iter().position(|k| k.name == name) else {
            let has = parsed.kernels.iter().map(|k| k.name.clone()).collect();
            return Err(Error::NoKernel { name: name.to_owned(), has });
        };
        let mut values: Vec<(Constant, Option<u64>)> =
            parsed.constants.iter().map(|c| (c.clone(), None)).collect();
        for given in constants {
            let Some((c, slot)) = values.iter_mut().find(|(c, v)| c.index == given.index && v.is_none())
            else {
                return Err(Error::ConstantIndex(given.index));
            };
            let (type_name, bits) = given.value.parts();
            if type_name != c.type_name {
                return Err(Error::ConstantType {
                    name: c.name.clone(),
                    declared: c.type_name.clone(),
                    given: type_name,
                });
            }
            *slot = Some(bits);
        }
        let kernel = &parsed.kernels[index];
        for (c, value) in &values {
            if value.is_none() && !c.optional && kernel.constants.contains(&c.name) {
                return Err(Error::ConstantNotSet { name: c.name.clone(), index: c.index });
            }
        }
        let values = values.into_iter().map(|(c, v)| (c.index, v)).collect();
        Ok(Kernel { loaded: self.loaded.clone(), index, values, races: true })
    }
}

/// A kernel that can be run.
#[derive(Clone)]
pub struct Kernel {
    loaded: Arc<Loaded>,
    index: usize,
    values: Vec<(u32, Option<u64>)>,
    races: bool,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.text().name).finish_non_exhaustive()
    }
}

fn launch<T>(what: impl Into<String>) -> Result<T, RunError> {
    Err(RunError::Launch(what.into()))
}

impl Kernel {
    fn text(&self) -> &text::Kernel {
        &self.loaded.parsed.kernels[self.index]
    }

    /// This kernel, whose runs do not look for races: for those that write the same value from many threads.
    #[must_use]
    pub fn with_races(mut self) -> Self {
        self.races = false;
        self
    }

    /// Runs a grid of `groups` threadgroups of `threads` threads each, one group after the other.
    ///
    /// `threadgroup_bytes[n]` is the size of the memory of the parameter with `[[threadgroup(n)]]`; sizes are rounded up
    /// to 16 as Metal asks. Buffers that are given for writing hold what the kernel wrote, also where it fails halfway.
    ///
    /// # Errors
    /// A launch that Metal would refuse, and the first thing that goes wrong in a thread.
    pub fn run(
        &self,
        groups: [u32; 3],
        threads: [u32; 3],
        buffers: &mut [Buffer<'_>],
        threadgroup_bytes: &[usize],
    ) -> Result<(), RunError> {
        let count = self.check_launch(groups, threads, buffers, threadgroup_bytes)?;
        let _one_at_a_time = self.loaded.running.lock().unwrap_or_else(PoisonError::into_inner);
        let symbols = (|| {
            let name = format!("msl_entry_{}", self.index);
            // SAFETY: `assemble` gives each kernel an entry of this type and name.
            let entry: Entry = unsafe { *self.loaded.library.get::<Entry>(name.as_bytes())? };
            for &(index, value) in &self.values {
                // SAFETY: `assemble` gives each constant 8 bytes of each of the names; no kernel of the library runs.
                unsafe {
                    let at: *mut u64 = *self.loaded.library.get(format!("msl_fc_{index}").as_bytes())?;
                    at.write(value.unwrap_or(0));
                    let at: *mut u64 = *self.loaded.library.get(format!("msl_fcd_{index}").as_bytes())?;
                    at.write(u64::from(value.is_some()));
                }
            }
            // SAFETY: the header defines two words of this name.
            let image = unsafe { **self.loaded.library.get::<*const [u64; 2]>(b"msl_image")? };
            Ok((entry, image))
        })();
        let (entry, image) = symbols
            .map_err(|e: libloading::Error| RunError::Launch(format!("the library lacks a symbol: {e}")))?;

        let mut memory = Memory::new(self.races);
        memory.image(image);
        let mut context = ThreadContext {
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
        };
        let mut blocks: Vec<Block> = Vec::new();
        for b in buffers.iter() {
            let (bytes, writable): (&[u8], bool) = match &b.bytes {
                Bytes::Read(bytes) => (bytes, false),
                Bytes::Write(bytes) => (bytes, true),
            };
            let (block, at) = memory.buffer(b.index, bytes, writable);
            context.buffers[b.index] = at;
            blocks.push(block);
        }
        for (i, &bytes) in threadgroup_bytes.iter().enumerate() {
            let name = format!("threadgroup memory {i}");
            context.threadgroups[i] = memory
                .threadgroup(name, bytes.next_multiple_of(16), 16)
                .map_err(|bytes| RunError::ThreadgroupMemory { bytes, limit: THREADGROUP_LIMIT })?;
        }
        memory.launched();

        let contexts: Vec<_> = (0..count as u32)
            .map(|i| {
                let [x, y, _] = threads;
                ThreadContext {
                    thread_position_in_threadgroup: [i % x, i / x % y, i / (x * y)],
                    thread_index_in_threadgroup: i,
                    thread_index_in_simdgroup: i % 32,
                    simdgroup_index_in_threadgroup: i / 32,
                    ..context
                }
            })
            .collect();
        let result = with_stacks(count, |stacks| {
            let mut group = Group::new(entry, contexts, &mut memory, stacks);
            for z in 0..groups[2] {
                for y in 0..groups[1] {
                    for x in 0..groups[0] {
                        group.run([x, y, z])?;
                    }
                }
            }
            Ok(())
        });
        for (b, block) in buffers.iter_mut().zip(&mut blocks) {
            if let Bytes::Write(bytes) = &mut b.bytes {
                bytes.copy_from_slice(Memory::content(block, bytes.len()));
            }
        }
        result.unwrap_or_else(|e| launch(format!("no memory for {count} stacks: {e}")))
    }

    /// The number of threads in a group of a launch that is allowed.
    fn check_launch(
        &self,
        groups: [u32; 3],
        threads: [u32; 3],
        buffers: &[Buffer<'_>],
        threadgroup_bytes: &[usize],
    ) -> Result<usize, RunError> {
        let kernel = self.text();
        let count: u64 = threads.iter().map(|&t| u64::from(t)).fold(1, u64::saturating_mul);
        let limit = u64::from(kernel.max_threads.unwrap_or(1024));
        if count == 0 || groups.contains(&0) {
            return launch(format!("nothing to run: groups {groups:?} of threads {threads:?}"));
        }
        if count > limit {
            return launch(format!(
                "{count} threads in a threadgroup of kernel `{}`, which takes {limit}",
                kernel.name
            ));
        }
        if (0..3).any(|d| groups[d].checked_mul(threads[d]).is_none()) {
            return launch(format!("the grid is too large: groups {groups:?} of threads {threads:?}"));
        }
        for (n, b) in buffers.iter().enumerate() {
            if b.index > 30 || buffers[..n].iter().any(|o| o.index == b.index) {
                return launch(format!("buffer {} is given twice or is above 30", b.index));
            }
        }
        if threadgroup_bytes.len() > 31 {
            return launch("more than 31 sizes of threadgroup memory");
        }
        for source in &kernel.parameters {
            match source {
                Source::Buffer(i, on) => {
                    let given = buffers.iter().any(|b| b.index == *i);
                    // Without the condition's value the access check says what is missing.
                    if on.is_none() && !given {
                        return launch(format!("buffer {i} of kernel `{}` is not given", kernel.name));
                    }
                }
                Source::Threadgroup(i) => {
                    if threadgroup_bytes.get(*i).is_none_or(|&b| b == 0) {
                        return launch(format!(
                            "threadgroup memory {i} of kernel `{}` has no size",
                            kernel.name
                        ));
                    }
                }
                Source::Vector(_) | Source::Scalar(_) => {}
            }
        }
        Ok(count as usize)
    }
}
