//! Products of 8x8 matrices, two left operands at a time, in the layout that the device multiplies them in.
//!
//! A left operand `A` and a sum `C` are held alike: the lane of row [`matrix_row`] and pair [`matrix_pair`] has columns `2 * pair` and
//! `2 * pair + 1` of the row. The layout of a right operand differs between devices: it is made from a lane's two elements of a row ([`right`])
//! or of a column ([`right_transposed`]), or loaded from memory of the threadgroup ([`load_rights`]). The lane of a row and a pair differs between devices too: on Apple's GPUs, and in the
//! simulator, as in [`Fragment`](crate::Fragment); on NVIDIA's the row is `lane / 4`, the pair `lane % 4`.
//!
//! Operands are f16, bf16 or f32, sums f32. On NVIDIA GPUs a product of f16 (from capability 7.5 on) or bf16 (8.0) is one instruction of the
//! matrix unit (PTX `mma.m16n8k8`); others are made of shuffles. On Apple's it is two of `simdgroup_multiply_accumulate`.
//!
//! These are device functions with C++ of their own, not words of the language: a crate may add others in the same way.

use crate::lanes::position_of;
use crate::memory::{Place, Shared};
use crate::scalar::{Element, ScalarType, Value};
use crate::simulator;
use crate::source::{Cpp, Described, ItemKind, ItemSource};

/// A left operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Left<T> {
    elements: [T; 2],
}

/// A right operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Right<T> {
    elements: [T; 2],
}

impl<T> Value for Left<T> {}
impl<T> Value for Right<T> {}

impl<T: Element> Described for Left<T> {
    const SOURCE: &'static ItemSource = &SOURCE;
}

impl<T: Element> Described for Right<T> {
    const SOURCE: &'static ItemSource =
        &ItemSource { name: "Right", symbol: "Right", cpp: Cpp::Printed(""), depends: &[&SOURCE], ..SOURCE };
}

/// The C++ of the whole module: the functions are printed with their operands.
const SOURCE: ItemSource = ItemSource {
    name: "Left",
    symbol: "Left",
    kind: ItemKind::Struct,
    cpp: Cpp::Printed(include_str!("prelude/matrix.h")),
    rust: "",
    depends: &[],
    module: module_path!(),
    file: file!(),
    line: line!(),
};

/// The row of this lane's pair, below 8.
#[must_use]
pub fn matrix_row() -> u32 {
    position_of(crate::intrinsics::simd_lane()).0
}

/// This lane's pair of columns, below 4.
#[must_use]
pub fn matrix_pair() -> u32 {
    position_of(crate::intrinsics::simd_lane()).1 / 2
}

/// The lane that has a pair of a row.
#[must_use]
pub fn matrix_lane(row: u32, pair: u32) -> u32 {
    (0..32).find(|lane| position_of(*lane) == (row % 8, 2 * (pair % 4))).unwrap_or(0)
}

/// This lane's pair of a left operand, from the bits of its elements: both in `low` where they have 16 bits, one in each of `low` and
/// `high` where they have 32.
#[must_use]
pub fn left<T: Element>(low: u32, high: u32) -> Left<T> {
    let bits = if T::TYPE == ScalarType::F32 { [low, high] } else { [low & 0xffff, low >> 16] };
    Left { elements: bits.map(|bits| T::from_raw(u64::from(bits))) }
}

/// This lane's pair of a left operand, rounded to nearest even.
#[must_use]
pub fn left_from<T: Element>(x: f32, y: f32) -> Left<T> {
    Left { elements: [T::from_f32(x), T::from_f32(y)] }
}

/// The 16x16 matrix whose element `(r, c)` is `memory[offset + r * stride + c]`, as four left operands: operand `n` has rows from
/// `8 * (n % 2)` and columns from `8 * (n / 2)` on.
///
/// Its lines start at multiples of 16 bytes. For elements of 16 bits it is one instruction (PTX `ldmatrix`) on NVIDIA GPUs, without bank
/// conflicts where lines start an odd multiple of 16 bytes apart.
///
/// # Faults
/// Where a line is not aligned or the lanes diverge, and as for reading each element.
#[track_caller]
#[must_use]
pub fn load_lefts<T: Element>(memory: &Shared<T>, offset: u32, stride: u32) -> [Left<T>; 4] {
    check_lines(memory, offset, stride);
    let first = offset + matrix_row() * stride + 2 * matrix_pair();
    let pair = |n: u32| {
        let at = first + 8 * (n % 2) * stride + 8 * (n / 2);
        Left { elements: [memory.ft_get(at), memory.ft_get(at + 1)] }
    };
    [pair(0), pair(1), pair(2), pair(3)]
}

/// The 16x16 matrix whose element `(r, c)` is `memory[offset + r * stride + c]`, as four right operands: operand `n` has rows from
/// `8 * (n % 2)` and columns from `8 * (n / 2)` on. Lines are as in [`load_lefts`].
///
/// # Faults
/// As [`load_lefts`].
#[track_caller]
#[must_use]
pub fn load_rights<T: Element>(memory: &Shared<T>, offset: u32, stride: u32) -> [Right<T>; 4] {
    load_lefts(memory, offset, stride).map(|operand| Right { elements: operand.elements })
}

/// The 16x16 matrix whose element `(r, c)` is `memory[offset + c * stride + r]`, as four right operands: operand `n` has rows from
/// `8 * (n % 2)` and columns from `8 * (n / 2)` on. Lines, here columns, are as in [`load_lefts`].
///
/// # Faults
/// As [`load_lefts`].
#[track_caller]
#[must_use]
pub fn load_rights_transposed<T: Element>(memory: &Shared<T>, offset: u32, stride: u32) -> [Right<T>; 4] {
    check_lines(memory, offset, stride);
    let first = offset + 2 * matrix_pair() * stride + matrix_row();
    let pair = |n: u32| {
        let at = first + 8 * (n / 2) * stride + 8 * (n % 2);
        Right { elements: [memory.ft_get(at), memory.ft_get(at + stride)] }
    };
    [pair(0), pair(1), pair(2), pair(3)]
}

/// Reads the beginning of the part of a line that this lane addresses, which starts at a multiple of 16 bytes.
#[track_caller]
fn check_lines<T: Element>(memory: &Shared<T>, offset: u32, stride: u32) {
    simulator::load_matrices("a load of matrices", 4);
    let lane = crate::intrinsics::simd_lane();
    // The elements that the lane gets are counted where they are read.
    simulator::uncounted(|| memory.load_as::<u32, 4>(offset + lane % 16 * stride + lane / 16 * 8));
}

/// A right operand of which this lane has columns `2 * pair` and `2 * pair + 1` of its row, rounded to nearest even.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn right<T: Element>(x: f32, y: f32) -> Right<T> {
    simulator::simd_converge("right");
    Right { elements: [T::from_f32(x), T::from_f32(y)] }
}

/// A right operand of which this lane has rows `2 * pair` and `2 * pair + 1` of the column of its row's number, rounded to nearest even.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn right_transposed<T: Element>(x: f32, y: f32) -> Right<T> {
    let shown = simulator::gather("right_transposed", u64::from(x.to_bits()) | u64::from(y.to_bits()) << 32);
    let (row, pair) = (matrix_row(), matrix_pair());
    let element = |column: u32| {
        let bits = shown[matrix_lane(column, row / 2) as usize] >> (32 * (row % 2));
        T::from_f32(f32::from_bits(bits as u32))
    };
    Right { elements: [element(2 * pair), element(2 * pair + 1)] }
}

/// A right operand of zeros.
#[must_use]
pub fn right_zero<T: Element>() -> Right<T> {
    Right { elements: [T::from_f32(0.0); 2] }
}

/// `a[n] b + c[n]` for both left operands: products are exact, and sums are f32 in the device's own order.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn multiply_add<T: Element>(a: [Left<T>; 2], b: Right<T>, c: [[f32; 2]; 2]) -> [[f32; 2]; 2] {
    let b = b.elements.map(T::to_f32);
    let product = |n: usize| {
        let [x, y] = a[n].elements.map(T::to_f32);
        simulator::multiply_accumulate([x, y, b[0], b[1]], c[n])
    };
    [product(0), product(1)]
}

/// `a_next[n] b_next + (a[n] b + c[n])` for both left operands: of 16 bits in one step of the matrix units that multiply 16 columns.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn multiply_add_twice<T: Element>(
    a: [Left<T>; 2],
    b: Right<T>,
    a_next: [Left<T>; 2],
    b_next: Right<T>,
    c: [[f32; 2]; 2],
) -> [[f32; 2]; 2] {
    multiply_add(a_next, b_next, multiply_add(a, b, c))
}

/// The greatest value of the lanes with this lane's pair; a NaN counts only where all of them have one.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn matrix_column_max(x: f32) -> f32 {
    column("matrix_column_max", x).into_iter().fold(x, f32::max)
}

/// The sum over the lanes with this lane's pair.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn matrix_column_sum(x: f32) -> f32 {
    let mut sums = column("matrix_column_sum", x);
    for half in [4, 2, 1] {
        for n in 0..half {
            sums[n] += sums[n + half];
        }
    }
    sums[0]
}

/// The greatest value of the lanes with this lane's row; a NaN counts only where all of them have one.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn matrix_row_max(x: f32) -> f32 {
    row("matrix_row_max", x).into_iter().fold(x, f32::max)
}

/// The sum over the lanes with this lane's row.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
#[must_use]
pub fn matrix_row_sum(x: f32) -> f32 {
    let sums = row("matrix_row_sum", x);
    (sums[0] + sums[2]) + (sums[1] + sums[3])
}

#[track_caller]
fn row(name: &'static str, x: f32) -> [f32; 4] {
    let shown = simulator::gather(name, u64::from(x.to_bits()));
    let row = matrix_row();
    std::array::from_fn(|pair| f32::from_bits(shown[matrix_lane(row, pair as u32) as usize] as u32))
}

#[track_caller]
fn column(name: &'static str, x: f32) -> [f32; 8] {
    let shown = simulator::gather(name, u64::from(x.to_bits()));
    let pair = matrix_pair();
    std::array::from_fn(|row| f32::from_bits(shown[matrix_lane(row as u32, pair) as usize] as u32))
}

/// The signs of the bytes that [`byte_permute`](crate::intrinsics::byte_permute) selects: 0xff where bit 7 of the byte is set, else 0.
#[must_use]
#[track_caller]
pub fn byte_signs(a: u32, b: u32, selector: u32) -> u32 {
    let signs = crate::intrinsics::byte_permute(a, b, selector) >> 7 & 0x0101_0101;
    signs * 0xff
}

/// The modules beside device functions: whether C++ deduces the generic arguments, and whether the function is convergent.
macro_rules! function_modules {
    ($($name:ident $deducible:literal $convergent:literal)*) => {$(
        #[doc(hidden)]
        #[allow(non_upper_case_globals)]
        pub mod $name {
            pub const SOURCE: &crate::source::ItemSource = &super::SOURCE;
            pub const DEDUCED: u64 = 0;
            pub const DEDUCIBLE: bool = $deducible;
            pub const IS_CONVERGENT: bool = $convergent;
            pub const HAS_BARRIER: bool = false;
            pub const $name: () = ();
        }
    )*};
}
function_modules! {
    matrix_row true false
    matrix_pair true false
    matrix_lane true false
    left false false
    left_from false false
    load_lefts false true
    load_rights false true
    load_rights_transposed false true
    right false true
    right_transposed false true
    right_zero false false
    multiply_add false true
    multiply_add_twice false true
    matrix_column_max true true
    matrix_column_sum true true
    matrix_row_max true true
    matrix_row_sum true true
    byte_signs true false
}
