//! Literals whose type the context gives: each in plain Rust, in the simulator, in printed Metal and in printed CUDA.
//!
//! The printer sees the types of variables, and not the types of fields and of results of functions: a literal
//! beside either must have the same value everywhere.

#![allow(
    clippy::all,
    overlapping_range_endpoints,
    unused_assignments,
    unused_comparisons,
    reason = "every operator takes every literal"
)]

use crate::anywhere::devices;
use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::Memory;

/// Adds all bits of a value to a hash.
#[device]
pub fn mixed(hash: u64, x: u64) -> u64 {
    (hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

/// A field and a function of each type.
macro_rules! holders {
    ($($T:ident $Held:ident $same:ident;)*) => {$(
        #[device]
        #[derive(Clone, Copy)]
        pub struct $Held {
            pub x: $T,
        }

        #[device]
        pub fn $same(x: $T) -> $T {
            x
        }
    )*};
}
holders! {
    i32 HeldI32 same_i32;
    u32 HeldU32 same_u32;
    i64 HeldI64 same_i64;
    u64 HeldU64 same_u64;
    usize HeldUsize same_usize;
}

/// A value of any scalar type.
#[device]
pub fn any<T: Scalar>(x: T) -> T {
    x
}

/// A function of each literal: the literal as written, with the suffix of its type, and another literal of the type.
macro_rules! literals {
    ($($name:ident $C:ident $T:ident $Held:ident $same:ident [$($l:tt)*] [$($typed:tt)*] [$($other:tt)*];)*) => {
        pub mod constants {
            use super::*;
            $(
                #[constant]
                pub const $C: $T = $($l)*;
            )*
        }

        pub mod marked {
            use super::*;
            $(literals!(@ #[device] $name $C $T $Held $same [$($l)*] [$($typed)*] [$($other)*]);)*
        }

        pub mod plain {
            use super::*;
            $(literals!(@ #[inline] $name $C $T $Held $same [$($l)*] [$($typed)*] [$($other)*]);)*
        }

        const NAMES: &[&str] = &[$(stringify!($name)),*];
        const PLAIN: &[fn(u64) -> u64] = &[$(plain::$name),*];

        /// Every function of every value.
        #[kernel(threads = 32, requires(x.len() >= n as usize, "n numbers"))]
        pub fn all(x: &Buffer<u64>, out: &mut Buffer<u64>, n: u32) {
            let i = thread_position();
            if i < n {
                let mut at = i * COUNT;
                $(
                    out[at] = marked::$name(x[i]);
                    at += 1;
                )*
            }
        }
    };
    (@ #[$mark:ident] $name:ident $C:ident $T:ident $Held:ident $same:ident
        [$($l:tt)*] [$($typed:tt)*] [$($other:tt)*]) => {
        #[$mark]
        pub fn $name(raw: u64) -> u64 {
            let x = raw as $T;
            let held = $Held { x };
            let even = raw & 1 == 0;
            let mut hash = 0u64;
            // Operators: beside a type that is written, and one that is not.
            hash = mixed(hash, (x ^ $($l)*) as u64);
            hash = mixed(hash, (held.x ^ $($l)*) as u64);
            hash = mixed(hash, ($($l)* ^ held.x) as u64);
            hash = mixed(hash, ($same(x) & $($l)*) as u64);
            hash = mixed(hash, ((held.x | $($l)*) >> 3) as u64);
            hash = mixed(hash, ((x & $($l)*) << 2) as u64);
            hash = mixed(hash, (held.x / 3 / $($typed)*) as u64);
            hash = mixed(hash, (held.x / 3 % $($l)*) as u64);
            hash = mixed(hash, ($($l)* % (held.x & 255 | 2)) as u64);
            hash = mixed(hash, ($($l)* / (held.x & 255 | 2)) as u64);
            // Comparisons.
            hash = mixed(hash, (x < $($l)*) as u64 | ((held.x < $($l)*) as u64) << 1);
            hash = mixed(hash, (held.x >= $($l)*) as u64 | (($($l)* <= held.x) as u64) << 1);
            hash = mixed(hash, (held.x == $($l)*) as u64 | (($($l)* != $same(x)) as u64) << 1);
            // Methods.
            hash = mixed(hash, held.x.wrapping_add($($l)*) as u64);
            hash = mixed(hash, x.wrapping_sub($($l)*) as u64);
            hash = mixed(hash, held.x.max($($l)*).min($($other)*) as u64);
            hash = mixed(hash, select(even, held.x, $($l)*) as u64);
            // Assignments.
            let mut y = x;
            y ^= $($l)*;
            hash = mixed(hash, y as u64);
            let mut other = held;
            other.x &= $($l)*;
            hash = mixed(hash, other.x as u64);
            other.x = $($l)*;
            hash = mixed(hash, other.x as u64);
            y = $($l)*;
            hash = mixed(hash, y as u64);
            // Values of `if`.
            hash = mixed(hash, (held.x ^ if even { $($l)* } else { $($other)* }) as u64);
            hash = mixed(hash, (x ^ if even { $($other)* } else { $($l)* }) as u64);
            hash = mixed(hash, (if even { $($l)* } else { held.x }) as u64);
            let chosen: $T = if even { $($other)* } else if raw & 2 == 0 { $($l)* } else { 5 };
            hash = mixed(hash, chosen as u64);
            // Arrays, fields, arguments, constants, variables.
            let row: [$T; 3] = [$($l)*, x, $($other)*];
            hash = mixed(hash, (row[(raw % 3) as usize] ^ row[0]) as u64);
            let unknown = [held.x, $($l)*];
            hash = mixed(hash, unknown[1] as u64);
            let filled: [$T; 2] = [$($l)*; 2];
            hash = mixed(hash, filled[(raw & 1) as usize] as u64);
            let made = $Held { x: $($l)* };
            hash = mixed(hash, made.x as u64);
            hash = mixed(hash, $same($($l)*) as u64);
            hash = mixed(hash, any($($typed)*) as u64);
            hash = mixed(hash, (constants::$C ^ held.x) as u64);
            let typed = $($typed)*;
            hash = mixed(hash, (typed ^ held.x) as u64);
            // Operators of one operand, conversions.
            hash = mixed(hash, !$($typed)* as u64 ^ (!(held.x ^ $($l)*)) as u64);
            hash = mixed(hash, $($l)* as $T as u64);
            hash = mixed(hash, $($typed)* as i64 as u64 ^ ($($typed)* as u8) as u64);
            mixed(hash, ($($typed)* as f32).to_bits() as u64)
        }
    };
}

#[constant]
pub const COUNT: u32 = NAMES.len() as u32;

literals! {
    small_i32 A0 i32 HeldI32 same_i32 [7] [7i32] [-5];
    negative_i32 A1 i32 HeldI32 same_i32 [-7] [-7i32] [3];
    greatest_i32 A2 i32 HeldI32 same_i32 [2147483647] [2147483647i32] [-2147483648];
    hex_i32 A3 i32 HeldI32 same_i32 [-0x7fff_ffff] [-0x7fff_ffffi32] [0x7fff_ffff];
    least_i32 A4 i32 HeldI32 same_i32 [-2147483648] [-2147483648i32] [-1];
    small_u32 B0 u32 HeldU32 same_u32 [7] [7u32] [5];
    half_u32 B1 u32 HeldU32 same_u32 [2147483648] [2147483648u32] [3];
    greatest_u32 B2 u32 HeldU32 same_u32 [0xffff_ffff] [0xffff_ffffu32] [0x8000_0000];
    small_i64 C0 i64 HeldI64 same_i64 [7] [7i64] [-5];
    negative_i64 C1 i64 HeldI64 same_i64 [-7] [-7i64] [3000000000];
    bit_31 C2 i64 HeldI64 same_i64 [2147483648] [2147483648i64] [-5];
    least_of_32 C3 i64 HeldI64 same_i64 [-2147483648] [-2147483648i64] [4294967295];
    below_least_of_32 C4 i64 HeldI64 same_i64 [-2147483649] [-2147483649i64] [5];
    below_hex C5 i64 HeldI64 same_i64 [-0x8000_0001] [-0x8000_0001i64] [0x8000_0001];
    three_thousand_millions C6 i64 HeldI64 same_i64 [-3000000000] [-3000000000i64] [3000000000];
    hex_of_32 C7 i64 HeldI64 same_i64 [-0xb2d0_5e00] [-0xb2d0_5e00i64] [-3];
    binary C8 i64 HeldI64 same_i64 [-0b1111_1111_1111_1111_1111_1111_1111_1111]
        [-0b1111_1111_1111_1111_1111_1111_1111_1111i64] [0o37777777777];
    greatest_of_32 C9 i64 HeldI64 same_i64 [4294967295] [4294967295i64] [-4294967295];
    above_32 C10 i64 HeldI64 same_i64 [-4294967296] [-4294967296i64] [4294967296];
    greatest_i64 C11 i64 HeldI64 same_i64 [9223372036854775807] [9223372036854775807i64] [-9223372036854775808];
    least_i64 C12 i64 HeldI64 same_i64 [-9223372036854775808] [-9223372036854775808i64] [-1];
    least_hex C13 i64 HeldI64 same_i64 [-0x8000_0000_0000_0000] [-0x8000_0000_0000_0000i64] [2147483648];
    small_u64 D0 u64 HeldU64 same_u64 [7] [7u64] [3000000000];
    bit_31_u64 D1 u64 HeldU64 same_u64 [0x8000_0000] [0x8000_0000u64] [5000000000];
    above_32_u64 D2 u64 HeldU64 same_u64 [4294967296] [4294967296u64] [5];
    half_u64 D3 u64 HeldU64 same_u64 [9223372036854775808] [9223372036854775808u64] [4294967295];
    greatest_u64 D4 u64 HeldU64 same_u64 [0xffff_ffff_ffff_ffff] [0xffff_ffff_ffff_ffffu64] [9223372036854775807];
    large_usize E0 usize HeldUsize same_usize [3000000000] [3000000000usize] [1];
    greatest_usize E1 usize HeldUsize same_usize [18446744073709551615] [18446744073709551615usize] [4294967296];
}

/// Values of every width and sign.
fn numbers() -> Vec<u64> {
    let mut all = vec![0, 1, 2, 7, 255, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 1 << 32, 3_000_000_000];
    all.extend([i64::MAX as u64, u64::MAX, -3_000_000_000i64 as u64, -5i64 as u64, 1294967296]);
    let mut state = 1u64;
    while all.len() < 64 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        all.push(state >> (state >> 58));
    }
    all
}

#[test]
fn literals_have_one_value_everywhere() {
    let numbers = numbers();
    let x = Memory::from_slice(&numbers);
    for device in devices() {
        let mut out = Memory::from_slice(&vec![0u64; numbers.len() * NAMES.len()]);
        let n = numbers.len() as u32;
        all::Call { x: x.view(), out: out.view_mut(), n, groups: [n.div_ceil(32), 1, 1] }
            .launch(&device)
            .unwrap_or_else(|why| panic!("{device}: {why}"));
        if !device.runs() {
            continue;
        }
        let out = out.to_vec::<u64>().unwrap();
        let mut wrong = Vec::new();
        for (k, (name, f)) in NAMES.iter().zip(PLAIN).enumerate() {
            let differ = (0..numbers.len()).find(|&i| out[i * NAMES.len() + k] != f(numbers[i]));
            wrong.extend(differ.map(|i| format!("{name}({:#x})", numbers[i])));
        }
        assert!(wrong.is_empty(), "{device} differs from plain Rust: {}", wrong.join(", "));
    }
}
