//! Compiled programs, their kernels, and launches.
#![allow(unsafe_code)]

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, RunError};
use crate::memory::{Block, Memory, THREADGROUP_LIMIT};
use crate::run::{Entry, HOST, Host, ThreadContext, Threadgroup, with_stacks};
use crate::source::Program;
use crate::source::constants::DeclaredConstant;
use crate::source::kernels::{self, Argument};

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
    /// The name of its type in Metal, and its bits.
    fn type_and_bits(self) -> (&'static str, u64) {
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
    /// `n` of its `[[function_constant(n)]]`.
    pub index: u32,
    /// Its value.
    pub value: Value,
}

impl FunctionConstant {
    /// The constant with this index, and its value.
    pub fn new(index: u32, value: Value) -> Self {
        Self { index, value }
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
}

struct Loaded {
    library: libloading::Library,
    program: Program,
    /// Held during a run: all runs of a library share the memory of its function constants.
    running: Mutex<()>,
}

/// A compiled program.
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
    pub(crate) fn load(path: &Path, program: Program) -> Result<Self, String> {
        // SAFETY: the library is compiled with the header, whose one initializer does nothing.
        let library =
            unsafe { libloading::Library::new(path) }.map_err(|e| format!("cannot load it: {e}"))?;
        // SAFETY: the header defines a table of 8 pointers with this name, and `Host` is no larger.
        unsafe {
            let table = library.get::<*mut Host>(b"msl_host").map_err(|e| e.to_string())?;
            let table: *mut Host = *table;
            std::ptr::copy_nonoverlapping(&raw const HOST, table, 1);
        }
        Ok(Self { loaded: Arc::new(Loaded { library, program, running: Mutex::new(()) }) })
    }

    /// The names of its kernels, in the order of the program.
    pub fn kernels(&self) -> Vec<&str> {
        self.loaded.program.kernels.iter().map(|k| k.name.as_str()).collect()
    }

    /// The kernel of this name with these function constants, which may include constants that it does not use.
    ///
    /// # Errors
    /// - [`Error::NoKernel`] if the program has no such kernel.
    /// - [`Error::ConstantIndex`] if a constant is set twice or not declared.
    /// - [`Error::ConstantType`] if a constant is declared with another type.
    /// - [`Error::ConstantNotSet`] if a constant that the kernel uses has no value and the program does not ask
    ///   `is_function_constant_defined` of it.
    pub fn kernel(&self, name: &str, constants: &[FunctionConstant]) -> Result<Kernel, Error> {
        let program = &self.loaded.program;
        let Some(index) = program.kernels.iter().position(|k| k.name == name) else {
            let available = program.kernels.iter().map(|k| k.name.clone()).collect();
            return Err(Error::NoKernel { name: name.to_owned(), available });
        };
        let mut values: Vec<(DeclaredConstant, Option<u64>)> =
            program.constants.iter().map(|c| (c.clone(), None)).collect();
        for given in constants {
            let Some((c, bits_of)) = values.iter_mut().find(|(c, v)| c.index == given.index && v.is_none())
            else {
                return Err(Error::ConstantIndex(given.index));
            };
            let (type_name, bits) = given.value.type_and_bits();
            if type_name != c.type_name {
                return Err(Error::ConstantType {
                    name: c.name.clone(),
                    declared: c.type_name.clone(),
                    given: type_name,
                });
            }
            *bits_of = Some(bits);
        }
        let kernel = &program.kernels[index];
        for (c, value) in &values {
            if value.is_none() && !c.is_optional && kernel.constants.contains(&c.name) {
                return Err(Error::ConstantNotSet { name: c.name.clone(), index: c.index });
            }
        }
        let values = values.into_iter().map(|(c, v)| (c.index, v)).collect();
        Ok(Kernel { loaded: self.loaded.clone(), index, values, checks_races: true })
    }
}

/// A kernel that can be run.
#[derive(Clone)]
pub struct Kernel {
    loaded: Arc<Loaded>,
    index: usize,
    values: Vec<(u32, Option<u64>)>,
    checks_races: bool,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.declaration().name).finish_non_exhaustive()
    }
}

fn launch<T>(what: impl Into<String>) -> Result<T, RunError> {
    Err(RunError::Launch(what.into()))
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

    /// Runs a grid of `groups` threadgroups of `threads` threads each, one threadgroup after the other.
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
        let count = self.check_launch(groups, threads, buffers, threadgroup_bytes)?;
        let _one_at_a_time = self.loaded.running.lock().unwrap_or_else(PoisonError::into_inner);
        let symbols = (|| {
            let name = format!("msl_entry_{}", self.index);
            // SAFETY: `assemble` defines an entry point with this name and type for each kernel.
            let entry: Entry = unsafe { *self.loaded.library.get::<Entry>(name.as_bytes())? };
            for &(index, value) in &self.values {
                // SAFETY: `assemble` defines 8 bytes for each of the two names; no kernel of the library is running.
                unsafe {
                    let at: *mut u64 = *self.loaded.library.get(format!("msl_fc_{index}").as_bytes())?;
                    at.write(value.unwrap_or(0));
                    let at: *mut u64 = *self.loaded.library.get(format!("msl_fcd_{index}").as_bytes())?;
                    at.write(u64::from(value.is_some()));
                }
            }
            // SAFETY: the header defines an array of two words with this name.
            let image = unsafe { **self.loaded.library.get::<*const [u64; 2]>(b"msl_image")? };
            Ok((entry, image))
        })();
        let (entry, image) = symbols.map_err(|e: libloading::Error| {
            RunError::Launch(format!("the compiled library lacks a symbol: {e}"))
        })?;

        let mut memory = Memory::new(self.checks_races);
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
            let mut group = Threadgroup::new(entry, contexts, &mut memory, stacks);
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
        result.unwrap_or_else(|e| launch(format!("cannot allocate {count} stacks: {e}")))
    }

    /// Checks a launch; the number of threads in a threadgroup.
    fn check_launch(
        &self,
        groups: [u32; 3],
        threads: [u32; 3],
        buffers: &[Buffer<'_>],
        threadgroup_bytes: &[usize],
    ) -> Result<usize, RunError> {
        let kernel = self.declaration();
        let count: u64 = threads.iter().map(|&t| u64::from(t)).fold(1, u64::saturating_mul);
        let limit = u64::from(kernel.max_threads.unwrap_or(1024));
        if count == 0 || groups.contains(&0) {
            return launch(format!("nothing to run: {groups:?} threadgroups of {threads:?} threads"));
        }
        if count > limit {
            return launch(format!(
                "{count} threads in a threadgroup of kernel `{}`, whose maximum is {limit}",
                kernel.name
            ));
        }
        if (0..3).any(|d| groups[d].checked_mul(threads[d]).is_none()) {
            return launch(format!("the grid is too large: {groups:?} threadgroups of {threads:?} threads"));
        }
        for (n, b) in buffers.iter().enumerate() {
            if b.index > 30 || buffers[..n].iter().any(|o| o.index == b.index) {
                return launch(format!("buffer {} is bound twice or above 30", b.index));
            }
        }
        if threadgroup_bytes.len() > 31 {
            return launch("more than 31 sizes of threadgroup memory");
        }
        for argument in &kernel.arguments {
            match argument {
                Argument::Buffer { index, condition } => {
                    let is_bound = buffers.iter().any(|b| b.index == *index);
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
        Ok(count as usize)
    }
}
