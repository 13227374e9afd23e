//! Faults that only rustc can see: types. Every function here is refused at the operand.

use flashtile_kernel::prelude::*;
use flashtile_kernel_macros::{constant, device, kernel, params};

#[device]
fn sum_of_bytes(a: u8, b: u8) -> u8 {
    a + b
}

#[device]
fn product_of_halves(a: f16, b: f16) -> f16 {
    a * b
}

#[device]
fn comparison_of_bytes(a: u8) -> bool {
    a > 3
}

#[device]
fn equal_bytes(a: u8, b: u8) -> bool {
    a == b
}

#[device]
fn equal_arrays(a: [f32; 2], b: [f32; 2]) -> bool {
    a == b
}

#[device]
fn bits_of_floats(a: f32) -> f32 {
    a & a
}

#[device]
fn not_of_floats(a: f32) -> f32 {
    !a
}

#[device]
fn generic_arithmetic<T: Element>(a: T) -> T {
    a + a
}

#[device]
fn mixed(a: u32, b: f32) -> f32 {
    a + b
}

#[device]
fn mixed_integers(a: u32, b: u64) -> u64 {
    b * a
}

#[device]
fn number_as_condition(a: u32) -> u32 {
    if a { 1 } else { 0 }
}

#[device]
fn method_of_bytes(a: u8) -> u8 {
    a.max(3)
}

#[device]
fn method_of_floats_on_integers(a: u32) -> u32 {
    a.exp2()
}

#[device]
fn signed_index(a: [f32; 4], i: i32) -> f32 {
    a[i]
}

#[device]
fn steps_of_bytes(n: u8) -> u32 {
    let mut sum = 0u32;
    for i in (0..n).step_by(2) {
        sum += i as u32;
    }
    sum
}

#[device]
pub struct Byte {
    pub x: u8,
}

#[device]
fn bytes_beside_literals(a: Byte) -> u8 {
    let b = if a.x as u32 > 3 { a.x } else { 3 };
    let c = if a.x as u32 > 3 {
        1
    } else if b as u32 > 2 {
        a.x
    } else {
        2u8
    };
    if b as u32 > c as u32 { a.x } else { 0 }
}

pub struct Foreign {
    pub a: f32,
}

#[device]
fn foreign_value(a: Foreign) -> f32 {
    let b = a;
    b.a
}

pub struct Operator(f32);

impl Operator {
    pub fn exp2(self) -> f32 {
        self.0
    }
}

impl core::ops::Add for Operator {
    type Output = Operator;
    fn add(self, other: Operator) -> Operator {
        other
    }
}

pub fn operator() -> Operator {
    Operator(1.0)
}

#[device]
fn functions_without_text() -> f32 {
    plain_function(1.0)
}

pub fn plain_function(x: f32) -> f32 {
    x
}

pub const PLAIN: u32 = 3;

#[device]
fn constants_without_text() -> u32 {
    PLAIN
}

#[device]
fn typo(count: u32) -> u32 {
    cuont + 1
}

#[device]
fn unknown_bools(a: Flags) -> bool {
    a.first & a.second
}

#[device]
pub struct Flags {
    pub first: bool,
    pub second: bool,
}

pub type Alias = Flags;

#[device]
fn alias(a: Alias) -> bool {
    a.first
}

pub use twice as renamed;

#[device]
pub fn twice(x: f32) -> f32 {
    x * 2.0
}

#[device]
fn renamed_call(x: f32) -> f32 {
    renamed(x)
}

#[device]
pub fn generic<T: Number>(x: T) -> T {
    x
}

#[device]
fn literal_for_a_generic() -> u32 {
    generic(3)
}

#[device]
pub fn nothing_to_deduce_from<const N: usize>() -> usize {
    N
}

#[device]
fn written_elsewhere(x: u32) -> u32 {
    let a: [f32; 4] = made();
    x + a[0] as u32
}

#[device]
pub fn made<const N: usize>() -> [f32; N] {
    [0.0; N]
}

#[device]
fn store_to_read_only(x: &Buffer<f32>) {
    x[0] = 1.0;
}

#[device]
fn atomics_on_read_only(x: &Buffer<u32>) {
    atomic_add(x, 0, 1);
}

#[device]
fn assignment_to_constant(x: u32) {
    let a = x;
    a += 1;
}

#[params]
#[derive(Clone, Copy)]
pub struct Padded {
    pub a: u32,
    pub b: u64,
}

#[constant]
pub const WRONG: [u32; 2] = [1.0, 2.0];

#[kernel(threads = 32)]
fn params_of_a_value(out: &mut Buffer<f32>, flags: &Flags) {
    out[0] = 1.0;
}

pub mod other {
    use super::*;

    #[device]
    pub fn twice(x: f32) -> f32 {
        x * 3.0
    }
}

#[kernel(threads = 32)]
fn two_of_one_name(out: &mut Buffer<f32>) {
    out[0] = twice(1.0) + other::twice(2.0);
}

/// Two items of one name and one place in the source.
macro_rules! scaled {
    ($module:ident $factor:literal) => {
        pub mod $module {
            use super::*;

            #[device]
            pub fn scale(x: f32) -> f32 {
                x * $factor
            }
        }
    };
}
scaled!(by_two 2.0);
scaled!(by_three 3.0);

#[kernel(threads = 32)]
fn two_of_one_macro(out: &mut Buffer<f32>) {
    out[0] = by_two::scale(1.0) + by_three::scale(2.0);
}

/// Items that kernels use without naming them.
pub mod hidden {
    use super::*;

    #[constant]
    pub const DIM: u32 = 4;

    #[device]
    pub fn center(x: u32) -> u32 {
        x / 2 + DIM
    }
}

#[device]
pub fn middle(x: u32) -> u32 {
    hidden::center(x)
}

#[kernel(threads = 32)]
fn generic_of_an_items_name<const DIM: usize>(out: &mut Buffer<u32>) {
    out[0] = middle(DIM as u32);
}

#[kernel(threads = 32)]
fn constant_of_an_items_name(out: &mut Buffer<u32>, #[constant] center: u32) {
    out[0] = middle(center);
}

#[kernel(threads = 32)]
fn center(out: &mut Buffer<u32>) {
    out[0] = middle(1);
}

#[device]
pub fn after_barrier(tile: &Shared<u32>) -> u32 {
    barrier();
    tile[0]
}

#[device]
pub fn after_another(tile: &Shared<u32>) -> u32 {
    let x = after_barrier(tile);
    x + 1
}

#[device]
pub fn of_lanes(x: u32) -> u32 {
    simd_sum(x)
}

#[device]
fn barriers_beside_reads(tile: &Shared<u32>) -> u32 {
    let a = tile[1] + after_another(tile);
    let b = 2 * after_another(tile);
    // Operations of a SIMD group order no memory.
    let c = tile[1] + of_lanes(a);
    let d = twice(after_barrier(tile) as f32);
    a + b + c + d as u32
}

fn main() {}
