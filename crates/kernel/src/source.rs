//! Kernels as data: their names, parameters and printed source.
//!
//! Printed C++ is one source for both targets; their differences are in preludes, whose names all start with
//! `ft_` or `FT_`. An instance's program defines its generics (`using T = float;`, `N = 4`) and holds one
//! kernel, so that the printed kernel is the one that runs: no template of a kernel is left to be
//! instantiated.

use crate::arguments::Arguments;
use crate::facts::{Constant, Facts};
pub use crate::generic::{Generic, GenericKind};
pub use crate::literal::literal;
use crate::scalar::{ParamsField, ScalarType};
use std::fmt::{self, Write as _};

/// The language a kernel is printed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Metal Shading Language 3.1, for `newLibraryWithSource`.
    Metal,
    /// CUDA C++ 17, for NVRTC, without any header.
    Cuda,
}

/// The kind of item of an [`ItemSource`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ItemKind {
    /// A `#[device]` function.
    Function,
    /// A `#[device]` or `#[params]` struct.
    Struct,
    /// A `#[constant]` table.
    Constant,
    /// The body of a `#[kernel]`.
    Kernel,
}

/// One item of the kernel language, as Rust and as C++.
#[derive(Debug)]
pub struct ItemSource {
    /// The item's name, in Rust.
    pub name: &'static str,
    /// The item's name, in C++, which differs where the name is a word of C++.
    pub symbol: &'static str,
    /// The kind of item.
    pub kind: ItemKind,
    /// The item in C++, for both targets.
    pub cpp: Cpp,
    /// The item as written, in formatted tokens.
    pub rust: &'static str,
    /// The items that it uses directly.
    pub depends: &'static [&'static ItemSource],
    /// The module it is defined in: two items that one macro makes in two modules have one place in the source.
    pub module: &'static str,
    /// The source file.
    pub file: &'static str,
    /// The line of the item's name.
    pub line: u32,
}

/// The printed C++ of an [`ItemSource`].
#[derive(Debug)]
pub enum Cpp {
    /// A function or struct with all its template heads; for a kernel the statements of its body, without braces.
    Printed(&'static str),
    /// A table in constant memory, whose values are known when the crate has been compiled.
    Table {
        /// The type of an element.
        element: ScalarType,
        /// Elements, or `None` for a scalar.
        len: Option<usize>,
        /// The literals in C++, in order: [`Constants::literals`] of the constant.
        literals: fn() -> Vec<String>,
    },
}

/// A type with an [`ItemSource`]: `#[device]` and `#[params]` structs.
pub trait Described {
    /// The struct's source.
    const SOURCE: &'static ItemSource;
}

/// A constant that can be printed: a scalar or an array of scalars.
pub trait Constants {
    /// The literals in C++, in order.
    fn literals(&self) -> Vec<String>;
}

impl<T: crate::scalar::Scalar> Constants for T {
    fn literals(&self) -> Vec<String> {
        vec![literal(T::TYPE, self.to_raw())]
    }
}

impl<T: crate::scalar::Scalar, const N: usize> Constants for [T; N] {
    fn literals(&self) -> Vec<String> {
        self.iter().map(|x| literal(T::TYPE, x.to_raw())).collect()
    }
}

/// The type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// Always this type.
    Scalar(ScalarType),
    /// The type given for the generic parameter of this number.
    Generic(usize),
}

impl ElementType {
    /// The type, for an instance of these generics; `None` where the generic is missing or no type.
    pub fn of(self, generics: &[Generic]) -> Option<ScalarType> {
        match self {
            Self::Scalar(scalar) => Some(scalar),
            Self::Generic(n) => generics.get(n).and_then(|generic| generic.as_type()),
        }
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Its name in C++, which differs where the name is a word of C++.
    pub cpp: &'static str,
    /// The kind of argument.
    pub kind: ParameterKind,
}

/// The kind of a parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParameterKind {
    /// `&Buffer<T>` or `&mut Buffer<T>`.
    Buffer {
        /// The type of the elements.
        element: ElementType,
        /// True if the kernel may write.
        writable: bool,
    },
    /// `&P` for a `#[params]` struct.
    Params {
        /// The name of the struct in C++.
        cpp: &'static str,
        /// Its size.
        bytes: usize,
        /// Its fields, in the order in which they lie.
        fields: &'static [ParamsField],
    },
    /// A number, copied at every launch.
    Scalar(ScalarType),
    /// A `#[constant]` number or flag, fixed when the pipeline is made.
    Constant(ScalarType),
}

/// A generic parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenericParameter {
    /// Its name.
    pub name: &'static str,
    /// Its name in C++.
    pub cpp: &'static str,
    /// The types or numbers that it stands for.
    pub kind: GenericKind,
}

/// A generic parameter that follows from others: `derive(..)` of `#[kernel]`.
#[derive(Clone, Copy, Debug)]
pub struct DerivedGeneric {
    /// The parameter.
    pub parameter: GenericParameter,
    /// Its value, as written.
    pub expression: &'static str,
    /// Its value, out of the values of the parameters before it.
    pub value: fn(&[Generic]) -> Generic,
}

/// The type of a const generic, for reading its value out of a [`Generic`].
pub trait ConstGeneric: Copy {
    /// The value as data.
    fn generic(self) -> Generic;
    /// The value of generic parameter `n`; zero or `false` where it is another kind, which no [`Instance`] has.
    fn of(generics: &[Generic], n: usize) -> Self;
}

macro_rules! const_generic {
    ($($T:ident $Variant:ident $zero:literal;)*) => {$(
        impl ConstGeneric for $T {
            fn generic(self) -> Generic {
                Generic::$Variant(self)
            }
            fn of(generics: &[Generic], n: usize) -> Self {
                match generics.get(n) {
                    Some(Generic::$Variant(x)) => *x,
                    _ => $zero,
                }
            }
        }
    )*};
}
const_generic!(usize Usize 0; u32 U32 0; i32 I32 0; bool Bool false;);

/// The type that generic parameter `n` is; `f32` where it is another kind, which no [`Instance`] has.
pub fn type_of(generics: &[Generic], n: usize) -> ScalarType {
    generics.get(n).and_then(|generic| generic.as_type()).unwrap_or(ScalarType::F32)
}

/// The number of threads of a threadgroup that a kernel is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// Exactly this number.
    Exactly(u32),
    /// Any multiple of 32 up to this.
    UpTo(u32),
}

impl Threads {
    /// The greatest number of threads of a threadgroup.
    pub const fn most(self) -> u32 {
        match self {
            Self::Exactly(n) | Self::UpTo(n) => n,
        }
    }

    /// Returns true if threadgroups of `threads` threads may be launched.
    pub const fn admits(self, threads: u32) -> bool {
        threads > 0
            && threads.is_multiple_of(32)
            && match self {
                Self::Exactly(n) => threads == n,
                Self::UpTo(n) => threads <= n,
            }
    }
}

impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(n) => write!(f, "{n}"),
            Self::UpTo(n) => write!(f, "a multiple of 32 up to {n}"),
        }
    }
}

/// A `shared(..)` array of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct SharedArray {
    /// The variable.
    pub name: &'static str,
    /// The type of the elements.
    pub element: ElementType,
    /// Elements, for an instance of these generics.
    pub len: fn(&[Generic]) -> usize,
}

/// A condition of a kernel's `requires`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The expression as written.
    pub condition: &'static str,
    /// The meaning of the condition, as the author wrote it.
    pub message: &'static str,
}

/// Shapes to measure a kernel on, with its bytes, operations and tolerance.
#[derive(Clone, Copy, Debug)]
pub struct Bench {
    /// The shapes.
    pub shapes: &'static [Shape],
    /// Bytes that must be read and written.
    pub bytes: fn(&Shape) -> u64,
    /// Operations on floats.
    pub flops: fn(&Shape) -> u64,
    /// Greatest error relative to the greatest magnitude.
    pub tolerance: f64,
}

/// Named sizes of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Names and values, in the order written.
    pub sizes: &'static [(&'static str, u64)],
}

impl Shape {
    /// The size called `name`; 0 where there is none.
    pub fn get(&self, name: &str) -> u64 {
        self.sizes.iter().find(|(n, _)| *n == name).map_or(0, |&(_, size)| size)
    }
}

/// A `#[kernel]`, as a registry lists it.
#[derive(Debug)]
pub struct Kernel {
    /// The function's name.
    pub name: &'static str,
    /// The function's name in C++.
    pub cpp: &'static str,
    /// The module it is in.
    pub module: &'static str,
    /// Its doc comment.
    pub docs: &'static str,
    /// Its parameters, in order.
    pub parameters: &'static [Parameter],
    /// The generic parameters that instances choose, in order.
    pub generics: &'static [GenericParameter],
    /// The generic parameters that follow from them, in order.
    pub derived: &'static [DerivedGeneric],
    /// The conditions that every launch is checked against.
    pub requirements: &'static [Requirement],
    /// The index of the first requirement that does not hold.
    pub unmet: fn(&Facts<'_>) -> Option<usize>,
    /// Threads of a threadgroup, for an instance of these generics.
    pub threads: fn(&[Generic]) -> Threads,
    /// Threadgroups that a core is to hold at a time, for an instance of these generics: a bound of a thread's registers on NVIDIA's GPUs; 0
    /// where it has none.
    pub resident: fn(&[Generic]) -> u32,
    /// Its shared arrays.
    pub shared: &'static [SharedArray],
    /// True if it is compiled without contraction, approximation and reassociation.
    pub exact: bool,
    /// Its body, and the items that the body uses.
    pub source: ItemSource,
    /// The shapes to measure.
    pub bench: Option<Bench>,
}

/// The native code of an [`Instance`]: calls the kernel's function once, as one simulated thread.
pub type Native = fn(&Arguments);

/// A kernel with its generics fixed.
#[derive(Clone)]
pub struct Instance {
    kernel: &'static Kernel,
    /// The chosen ones, then the derived ones.
    generics: Vec<Generic>,
    native: Option<Native>,
}

impl fmt::Debug for Instance {
    /// Not the sources of the kernel, which are in [`Instance::kernel`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let native = self.native.is_some();
        f.debug_struct("Instance")
            .field("entry", &self.entry())
            .field("native", &native)
            .finish_non_exhaustive()
    }
}

/// Generics that do not fit a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GenericsError {
    /// The number of generics differs from the kernel's.
    Count {
        /// The kernel.
        kernel: &'static str,
        /// The number of the kernel's generic parameters.
        expected: usize,
        /// The number of generics given.
        found: usize,
    },
    /// One does not fit its parameter.
    Kind {
        /// The kernel.
        kernel: &'static str,
        /// The generic parameter.
        parameter: GenericParameter,
        /// The generic given.
        found: Generic,
    },
}

impl fmt::Display for GenericsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { kernel, expected, found } => {
                write!(f, "{kernel} has {expected} generic parameters, {found} given")
            }
            Self::Kind { kernel, parameter, found } => {
                let expected = match parameter.kind {
                    GenericKind::Element => "a type of f32, f16, bf16",
                    GenericKind::Number => "a type of u32, i32, u64, i64, usize, f32",
                    GenericKind::Scalar => "a scalar type",
                    GenericKind::Const(scalar) => scalar.name(),
                };
                write!(f, "{kernel}: {} is {expected}, {found:?} given", parameter.name)
            }
        }
    }
}

impl std::error::Error for GenericsError {}

impl Instance {
    /// `kernel` with these generics, to be printed and launched on devices; with `native` on the simulator too.
    ///
    /// `native` is the function of exactly these generics: `#[kernel]` guarantees it.
    ///
    /// # Errors
    /// [`GenericsError`] where `generics` are not the kernel's.
    pub fn new(
        kernel: &'static Kernel,
        generics: &[Generic],
        native: Option<Native>,
    ) -> Result<Self, GenericsError> {
        if generics.len() != kernel.generics.len() {
            let (expected, found) = (kernel.generics.len(), generics.len());
            return Err(GenericsError::Count { kernel: kernel.name, expected, found });
        }
        for (&found, &parameter) in generics.iter().zip(kernel.generics) {
            if !found.fits(parameter.kind) {
                return Err(GenericsError::Kind { kernel: kernel.name, parameter, found });
            }
        }
        let mut generics = generics.to_vec();
        for derived in kernel.derived {
            let value = (derived.value)(&generics);
            generics.push(value);
        }
        Ok(Self { kernel, generics, native })
    }

    /// As [`new`](Self::new), for all generics, which rustc has checked against the function: the derived ones too.
    #[doc(hidden)]
    pub fn checked(kernel: &'static Kernel, generics: &[Generic], native: Native) -> Self {
        let instance = Self { kernel, generics: generics.to_vec(), native: Some(native) };
        debug_assert!(
            Self::new(kernel, instance.generics(), None).is_ok_and(|new| new.generics == instance.generics)
        );
        instance
    }

    /// The kernel.
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// The values that were chosen for its generic parameters.
    pub fn generics(&self) -> &[Generic] {
        &self.generics[..self.kernel.generics.len()]
    }

    /// The values of all its generic parameters: the chosen ones, then the derived ones.
    pub fn all_generics(&self) -> &[Generic] {
        &self.generics
    }

    /// The function the simulator runs; none for an instance whose generics were chosen at run time.
    pub fn native(&self) -> Option<Native> {
        self.native
    }

    /// Threads of a threadgroup.
    pub fn threads(&self) -> Threads {
        (self.kernel.threads)(&self.generics)
    }

    /// Threadgroups that a core is to hold at a time; 0 where the kernel does not say.
    pub fn resident(&self) -> u32 {
        (self.kernel.resident)(&self.generics)
    }

    /// Bytes of shared memory of a threadgroup, each array rounded up to 16.
    pub fn shared_bytes(&self) -> usize {
        self.kernel.shared.iter().fold(0, |sum: usize, array| {
            let bytes = array.element.of(&self.generics).map_or(0, ScalarType::bytes);
            let len = (array.len)(&self.generics);
            sum.saturating_add(len.saturating_mul(bytes).saturating_add(15) & !15)
        })
    }

    /// The name of the function in every target's source: the kernel's name and the chosen generics, joined by `_`.
    pub fn entry(&self) -> String {
        self.generics().iter().fold(self.kernel.cpp.to_owned(), |mut name, generic| {
            name.push('_');
            match generic {
                Generic::I32(x) if *x < 0 => name.push_str(&format!("m{}", x.unsigned_abs())),
                generic => name.push_str(&generic.to_string()),
            }
            name
        })
    }

    /// Bytes of dynamic shared memory of a launch on CUDA: 0 up to the 48 KiB that static arrays may have, all bytes beyond.
    pub fn cuda_dynamic_bytes(&self) -> usize {
        let bytes = self.shared_bytes();
        if bytes > 48 << 10 { bytes } else { 0 }
    }

    /// The options of NVRTC beside the architecture, for these values of the `#[constant]` parameters in order: the language, the
    /// values, and `--fmad=false` for an exact kernel.
    pub fn cuda_options(&self, constants: impl IntoIterator<Item = Constant>) -> Vec<String> {
        let named = self.kernel.parameters.iter().filter(|p| matches!(p.kind, ParameterKind::Constant(_)));
        let constants = named.zip(constants).map(|(parameter, constant)| {
            format!("-DFT_CONSTANT_{}={}", parameter.cpp, constant.cpp().replace(' ', ""))
        });
        let exact = self.kernel.exact.then(|| "--fmad=false".to_owned());
        ["--std=c++17".to_owned()].into_iter().chain(exact).chain(constants).collect()
    }
}

/// The items that `source` uses, directly or not: each once, after the items that it uses itself.
pub fn dependencies(source: &'static ItemSource) -> Vec<&'static ItemSource> {
    fn visit(source: &'static ItemSource, done: &mut Vec<&'static ItemSource>) {
        for &used in source.depends {
            if !done.iter().any(|other| same(other, used)) {
                visit(used, done);
                done.push(used);
            }
        }
    }
    let mut done = Vec::new();
    visit(source, &mut done);
    done
}

/// Returns true if two sources are one item. A constant has no address of its own: its module and its place
/// in the file identify it.
const fn same(a: &ItemSource, b: &ItemSource) -> bool {
    a.line == b.line && equal(a.name, b.name) && equal(a.module, b.module) && equal(a.file, b.file)
}

/// More items than any kernel uses: a power of two.
const MAX_ITEMS: usize = 1024;

/// The items that a kernel uses, directly or not, each once. `#[kernel]` checks them while a crate is
/// compiled.
///
/// An item that is used by many others is visited once: the work is linear in the items and their uses.
#[derive(Debug)]
pub struct Items<'a> {
    /// An item is at its line modulo the length, or at the next free place behind.
    table: [Option<&'a ItemSource>; MAX_ITEMS],
}

impl<'a> Items<'a> {
    /// The items of `source`, without itself.
    pub const fn of(source: &'a ItemSource) -> Self {
        let mut items = Self { table: [None; MAX_ITEMS] };
        items.add_uses(source);
        items
    }

    const fn add_uses(&mut self, source: &'a ItemSource) {
        let mut n = 0;
        while n < source.depends.len() {
            let used = source.depends[n];
            if self.add(used) {
                self.add_uses(used);
            }
            n += 1;
        }
    }

    /// Adds an item, unless it is there.
    const fn add(&mut self, item: &'a ItemSource) -> bool {
        let mut place = item.line as usize % MAX_ITEMS;
        let mut probes = 0;
        while let Some(other) = self.table[place] {
            if same(other, item) {
                return false;
            }
            place = (place + 1) % MAX_ITEMS;
            probes += 1;
            assert!(probes < MAX_ITEMS, "this kernel uses more than 1024 items");
        }
        self.table[place] = Some(item);
        true
    }

    /// Returns true if no item is called `symbol` in C++, where the kernel's program defines something else
    /// of that name.
    pub const fn is_free(&self, symbol: &str) -> bool {
        let mut n = 0;
        while n < MAX_ITEMS {
            if let Some(item) = self.table[n]
                && equal(item.symbol, symbol)
            {
                return false;
            }
            n += 1;
        }
        true
    }

    /// Fails to compile where two different items have one name: C++ has one namespace for them.
    pub const fn assert_distinct(&self) {
        let mut n = 0;
        while n < MAX_ITEMS {
            if let Some(item) = self.table[n] {
                assert!(
                    self.is_only(item),
                    "two different items of one name are used by this kernel: rename one"
                );
            }
            n += 1;
        }
    }

    /// Returns true if no other item has the name of `item`.
    const fn is_only(&self, item: &ItemSource) -> bool {
        let mut n = 0;
        while n < MAX_ITEMS {
            if let Some(other) = self.table[n]
                && equal(other.name, item.name)
                && !same(other, item)
            {
                return false;
            }
            n += 1;
        }
        true
    }
}

const fn equal(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut n = 0;
    while n < a.len() {
        if a[n] != b[n] {
            return false;
        }
        n += 1;
    }
    true
}

/// Writes `lines`, each indented by four spaces; empty ones stay empty.
pub(crate) fn indent(out: &mut String, lines: &str) {
    for line in lines.lines() {
        let _ = if line.is_empty() { writeln!(out) } else { writeln!(out, "    {line}") };
    }
}
