//! Facts about a compiled program for the host: arguments of kernels, their threadgroup variables, and
//! function constants.
#![allow(unsafe_code)]

use std::collections::BTreeMap;

use crate::run::Entry;
use crate::source::Program;
use crate::source::kernels::{Argument, Kernel};

/// An address space of Metal, of those that parameters of kernels point into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressSpace {
    /// `device`.
    Device,
    /// `constant`.
    Constant,
    /// `threadgroup`.
    Threadgroup,
}

/// A buffer or threadgroup parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArgumentInfo {
    /// Its name; empty if it has none.
    pub name: String,
    /// `n` of its `[[buffer(n)]]` or `[[threadgroup(n)]]`. The two are numbered apart.
    pub index: usize,
    /// Where it points. `[[threadgroup(n)]]` is [`AddressSpace::Threadgroup`], `[[buffer(n)]]` one of the others.
    pub address_space: AddressSpace,
    /// True if the kernel can only read through it: it points to `const`, or into `constant` memory.
    pub is_const: bool,
    /// The size in bytes of what it points to, padding included: `sizeof` of one element. None for `void`.
    pub bytes: Option<usize>,
    /// True if it is a reference, such as `constant Params&`, and so to one value rather than to an array.
    pub is_reference: bool,
    /// The `bool` constant of its `[[function_constant(..)]]`; the kernel has the argument only where that is true.
    pub condition: Option<String>,
}

/// A function constant that a program declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstantInfo {
    /// Its name.
    pub name: String,
    /// `n` of its `[[function_constant(n)]]`.
    pub index: u32,
    /// The name of its type, as the program spells it: `uint`, `bool`.
    pub type_name: String,
    /// True if the program asks `is_function_constant_defined` of it, so that it need not be set.
    pub is_optional: bool,
}

/// Facts about a compiled kernel.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) arguments: Vec<ArgumentInfo>,
    /// Bytes of its threadgroup variables.
    pub(crate) static_bytes: usize,
}

/// A threadgroup variable of a kernel, as its code records it; `msl_statics` of the header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Variable {
    /// An address inside the code of the kernel, or of its entry point where the kernel is inlined there.
    code: u64,
    number: u64,
    bytes: u64,
    align: u64,
}

/// Facts of the kernels of a library, in the order of the program.
pub(crate) fn read(
    library: &libloading::Library,
    program: &Program,
) -> Result<Vec<Facts>, libloading::Error> {
    // Variables belong to the function with the last start before them: code of a function is contiguous.
    let mut starts: BTreeMap<u64, usize> = BTreeMap::new();
    for k in 0..program.kernels.len() {
        // SAFETY: `assemble` defines both functions, with these types, for each kernel. The second one returns a constant.
        unsafe {
            let entry = library.get::<Entry>(format!("msl_entry_{k}").as_bytes())?;
            starts.insert(*entry as usize as u64, k);
            let address = library.get::<extern "C" fn() -> u64>(format!("msl_address_{k}").as_bytes())?;
            starts.insert(address(), k);
        }
    }
    // The number of each variable, its bytes and its alignment. Optimised code may hold several records of one variable.
    let mut variables: Vec<BTreeMap<u64, (u64, u64)>> = vec![BTreeMap::new(); program.kernels.len()];
    for v in records(library)? {
        if let Some((_, &k)) = starts.range(..=v.code).next_back() {
            variables[k].insert(v.number, (v.bytes, v.align));
        }
    }
    let mut facts = Vec::new();
    for (k, (kernel, variables)) in program.kernels.iter().zip(&variables).enumerate() {
        let place = |at: u64, &(bytes, align): &(u64, u64)| at.next_multiple_of(align.max(1)) + bytes;
        let static_bytes = variables.values().fold(0, place) as usize;
        facts.push(Facts { arguments: arguments(library, k, kernel)?, static_bytes });
    }
    Ok(facts)
}

/// The records of threadgroup variables in a library.
fn records(library: &libloading::Library) -> Result<Vec<Variable>, libloading::Error> {
    // SAFETY: the header defines two addresses with this name, the start and the end of a section that holds whole records.
    unsafe {
        let [start, end] = **library.get::<*const [*const Variable; 2]>(b"msl_static_range")?;
        let count = (end.addr() - start.addr()) / size_of::<Variable>();
        Ok(std::slice::from_raw_parts(start, count).to_vec())
    }
}

fn arguments(
    library: &libloading::Library,
    k: usize,
    kernel: &Kernel,
) -> Result<Vec<ArgumentInfo>, libloading::Error> {
    let mut infos = Vec::new();
    // SAFETY: `assemble` defines an array of 4 words for each buffer and threadgroup parameter of the kernel with this name.
    let mut row: *const [u64; 4] = unsafe { *library.get(format!("msl_arguments_{k}").as_bytes())? };
    for parameter in &kernel.parameters {
        let (index, condition) = match &parameter.argument {
            Argument::Buffer { index, condition } => (*index, condition.clone()),
            Argument::Threadgroup(index) => (*index, None),
            Argument::VectorBuiltin(_) | Argument::ScalarBuiltin(_) => continue,
        };
        // SAFETY: the array has a row for this parameter, and one more row than there are parameters.
        let [space, is_const, bytes, is_reference] = unsafe {
            let this = row.read();
            row = row.add(1);
            this
        };
        infos.push(ArgumentInfo {
            name: parameter.name.clone(),
            index,
            address_space: match space {
                1 => AddressSpace::Device,
                2 => AddressSpace::Constant,
                _ => AddressSpace::Threadgroup,
            },
            is_const: is_const != 0,
            bytes: (bytes != 0).then_some(bytes as usize),
            is_reference: is_reference != 0,
            condition,
        });
    }
    Ok(infos)
}
