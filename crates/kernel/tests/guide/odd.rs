//! Rust that is easy to print wrongly as C++: each function as plain Rust, and as a `#[device]` function in the simulator, in
//! printed Metal and in printed CUDA.

#![allow(
    clippy::all,
    unused_parens,
    unused_braces,
    double_negations,
    unused_mut,
    unused_variables,
    unused_assignments,
    dead_code,
    non_snake_case,
    reason = "oddness is the point"
)]

use crate::anywhere::devices;
use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::Memory;

/// Constants of another module.
pub mod tables {
    use super::*;

    #[constant]
    pub const PRIMES: [u32; 8] = primes();

    #[constant]
    pub const OFFSETS: [i32; 4] = [-1, i32::MIN, 7, i32::MAX];

    #[constant]
    pub const LIMIT: u32 = 1 << 7;

    #[constant]
    pub const HUGE: u64 = u64::MAX - 1;

    #[constant]
    pub const FLOATS: [f32; 6] = [0.1, -0.0, 1e-45, f32::MAX, 16777217.0, 1.5];

    #[constant]
    pub const FLAGS: [bool; 3] = [true, false, true];

    #[constant]
    pub const SMALL: [i8; 3] = [-128, 127, -1];

    const fn primes() -> [u32; 8] {
        let mut found = [0; 8];
        let (mut n, mut next) = (0, 2);
        while n < 8 {
            let mut divisor = 2;
            while divisor < next && next % divisor != 0 {
                divisor += 1;
            }
            if divisor == next {
                found[n] = next;
                n += 1;
            }
            next += 1;
        }
        found
    }

    pub mod deeper {
        use super::*;

        #[constant]
        pub const STEP: usize = 3;
    }
}

/// Items as plain Rust: without the attributes of the language.
macro_rules! plain {
    (@ [$($out:tt)*]) => { $($out)* };
    (@ [$($out:tt)*] #[device] pub struct $($rest:tt)*) => {
        plain!(@ [$($out)* #[derive(Clone, Copy, Debug)] pub struct] $($rest)*);
    };
    (@ [$($out:tt)*] #[device] $($rest:tt)*) => { plain!(@ [$($out)*] $($rest)*); };
    (@ [$($out:tt)*] $first:tt $($rest:tt)*) => { plain!(@ [$($out)* $first] $($rest)*); };
}

/// Items with the attributes of the language, and again as plain Rust.
macro_rules! twins {
    ($($items:tt)*) => {
        pub mod marked {
            use super::*;
            $($items)*
        }
        pub mod plain {
            use super::*;
            plain!(@ [] $($items)*);
        }
    };
}

/// Words of output for each pair of arguments.
#[constant]
const ROOM: usize = 64;

/// A kernel of all functions `(u32, u32) -> u32` of `marked`, and their names and twins.
macro_rules! compared {
    ($($name:ident)*) => {
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
        const PLAIN: &[fn(u32, u32) -> u32] = &[$(plain::$name),*];

        /// Every function of every pair.
        #[kernel(threads = 64, requires(pairs.len() >= 2 * n as usize, "n pairs"), exact)]
        pub fn all(pairs: &Buffer<u32>, out: &mut Buffer<u32>, n: u32) {
            let pair = thread_position();
            if pair < n {
                let a = pairs[2 * pair];
                let b = pairs[2 * pair + 1];
                let mut at = pair * ROOM as u32;
                $(
                    out[at] = marked::$name(a, b);
                    at += 1;
                )*
            }
        }
    };
}

twins! {
    #[device]
    pub fn shadows(a: u32, b: u32) -> u32 {
        let x = a;
        let x = x + 1;
        let x_2 = b * 1000;
        let x: u32 = {
            let x = x * 2;
            let x = x + x_2;
            x + 3
        };
        if x > 10 {
            let x = x - 10;
            return x + x_2;
        }
        let a = x + a;
        let a = a as u64;
        let x = a as f32;
        x as u32
    }

    #[device]
    pub fn loops_shadow(a: u32, b: u32) -> u32 {
        let mut sum = 0u32;
        for a in 0..a {
            for a in a..a + 3 {
                for a in (a..a + 2).rev() {
                    sum += a * b + 1;
                }
            }
            sum += a;
        }
        let b = b;
        for b in (b..b + 7).step_by(3) {
            sum = sum * 3 % 100_003 + b;
        }
        sum
    }

    #[device]
    pub fn nested_values(a: u32, b: u32) -> u32 {
        let y: u32 = if a > b {
            if a > 2 * b {
                1
            } else {
                let t = a - b;
                t * 3
            }
        } else if a == b {
            7
        } else {
            let mut t = 0u32;
            while t < 5 {
                t += 2;
            }
            t
        };
        let z = if y > 3 { if y > 5 { y } else { y + 1 } } else if y == 2 { 12 } else { 13 };
        let w = (if z > y { z - y } else { y - z }) + if a > 4 { 1u32 } else { 2 } * 3;
        y * 10000 + z * 100 + w
    }

    #[device]
    pub fn early_returns(a: u32, b: u32) -> u32 {
        for i in 0..a {
            if i == 30 {
                return 1;
            }
            for j in 0..b {
                if i * j == 12 {
                    return i * 100 + j;
                } else if j > 20 {
                    break;
                }
                if j % 2 == 0 {
                    continue;
                }
                if i + j == 19 { return 5 }
            }
        }
        if a > 3 { return a } else if b > 3 { b } else { return 9999; }
    }

    #[device]
    pub fn negatives(a: u32, b: u32) -> u32 {
        let s = a as i32 - 20;
        let t = -(b as i32) + 7;
        let q = if t == 0 { 1 } else { t };
        let mut sum = s / 3 * 7 + s % 3 * 5 + (s >> 2) + (s / q) - s % q;
        sum = sum - -s;
        sum = -sum - -(-s);
        sum = -(-sum);
        sum += - -s;
        sum -= -3;
        let shifted = (s << 3) as u32 >> 3;
        sum as u32 ^ shifted
    }

    #[device]
    pub fn precedence(a: u32, b: u32) -> u32 {
        let mut bits = 0u32;
        if a & 7 == b & 7 { bits |= 1; }
        if a | 1 != b ^ 3 { bits |= 2; }
        if a > b && b > 2 || a == 0 { bits |= 4; }
        if a > 1 || b > 2 && a < 5 { bits |= 8; }
        if (a > 1 || b > 2) && a < 5 { bits |= 16; }
        if !(a > 1) == (b > 3) { bits |= 32; }
        if a << 2u32 + 1 > b { bits |= 64; }
        if !a & 255 > b { bits |= 128; }
        if -(a as i32) as u32 > 5 { bits |= 256; }
        if (a as u8 as u32) < b { bits |= 512; }
        let x = a ^ b | a & b << 1;
        let y = 2 * a + 100 - (b - b / 2) - (a - a / 2);
        let z = a / (b / 2 + 1) * 3 - a / (b / 2 + 1) % 4;
        let w = 1u32 << a % 5 << b % 3;
        let v = 100 + a - b % 50 - 3 + (a + (b % 7 - b % 7 / 2)) % 11;
        bits + x * 3 + y * 5 + z * 7 + w * 11 + v
    }

    #[device]
    pub fn booleans(a: u32, b: u32) -> u32 {
        let p = a > b;
        let q = !p;
        let r = p ^ q ^ (a % 2 == 0);
        let s = p & (b > 1) | q & !(b % 3 == 1);
        let mut t = p | s;
        t &= s;
        t ^= true;
        t |= !r & q;
        let u = !!p == !q;
        let v = p != (a == b);
        p as u32 + 2 * (q as u32) + 4 * r as u32 + s as u32 * 8 + ((t as u32) << 4) + u as u32 * 32 + v as u32 * 64
    }

    #[device]
    pub fn arrays_of_arrays(a: u32, b: u32) -> u32 {
        let mut m = [[0u32; 3]; 4];
        for i in 0..4usize {
            for j in 0..3usize {
                m[i][j] += (i * 3 + j) as u32 * a;
                m[i][j] ^= b;
                m[i][j] %= 1000;
            }
        }
        m[2][1] <<= 2;
        m[3][0] |= 1u32 << 9;
        m[0] = m[2];
        m[1][2] -= m[1][2] / 2;
        m[(a % 4) as usize][(b % 3) as usize] *= 5;
        let row = m[3];
        m[3][1] = row[0] + m[0][1];
        let copy = m;
        m[0][0] = 77;
        let n = [[a, b], [b, a], [1u32, 2]];
        let cube = [[[1u32, 2], [3u32, 4]], [[5u32, 6], [a, 7]]];
        let mut sum = n[1][0] * 3 + n[2][1] + cube[1][1][1] + copy[0][0];
        for i in 0..4usize {
            for j in 0..3usize {
                sum = sum * 31 % 65_521 + m[i][j];
            }
        }
        sum
    }

    #[device]
    pub fn loops(a: u32, b: u32) -> u32 {
        let mut hash = 7u32;
        for i in (0..a).rev() { hash = (hash * 31 + i) % 65_521; }
        for i in (b..a).rev() { hash = (hash * 31 + i) % 65_521; }
        for i in (b..a).step_by(3) { hash = (hash * 31 + i) % 65_521; }
        for i in (1..a + 1).rev() { hash = (hash * 31 + i) % 65_521; }
        for i in (b..a + 1).step_by(2) { hash = (hash * 31 + i) % 65_521; }
        for i in b..=a { hash = (hash * 31 + i) % 65_521; }
        for i in a..=a { hash = (hash * 31 + i) % 65_521; }
        for i in u32::MAX - 2..=u32::MAX { hash = (hash + i % 97) % 65_521; }
        for i in (u32::MAX - 5..u32::MAX).step_by(4) { hash = (hash * 31 + i % 1000) % 65_521; }
        for i in -3..b as i32 { hash = (hash * 31 + (i + 3) as u32) % 65_521; }
        for i in (-3..a as i32 - 5).rev() { hash = (hash * 31 + (i + 3) as u32) % 65_521; }
        for i in i32::MAX - 2..=i32::MAX { hash = (hash + i as u32 % 97) % 65_521; }
        for i in 0..a as u64 { hash = (hash * 31 + (i << 33 >> 33) as u32) % 65_521; }
        for i in (0..b as usize).rev() { hash = (hash * 31 + i as u32) % 65_521; }
        for i in 5..3u32 { hash = 0; }
        for _ in 0..a { hash = (hash * 3 + 1) % 65_521; }
        let mut n = a;
        for i in 0..n { n -= 1; if i > n { break; } hash = (hash * 31 + n) % 65_521; }
        let mut step = 2usize;
        for i in (0..b).step_by(step) { step += 1; hash = (hash * 31 + i) % 65_521; }
        hash
    }

    #[device]
    pub fn whiles(a: u32, b: u32) -> u32 {
        let mut x = a;
        let mut steps = 0u32;
        while x > 1 && steps < 50 {
            steps += 1;
            if x % 2 == 0 {
                x /= 2;
                continue;
            }
            x = 3 * x + 1;
        }
        loop {
            if x >= b { break; }
            x += if x % 3 == 0 { 5 } else { 2 };
            loop {
                if steps % 4 == 3 { break }
                steps += 1;
            }
            steps += 1;
        }
        x * 1000 + steps
    }

    #[device]
    pub fn words_of_cpp(a: u32, b: u32) -> u32 {
        let float = a;
        let int = float + 1;
        let class = int * 2;
        let auto = class ^ b;
        let template = auto + 1;
        let threadgroup = template % 1000;
        let device = threadgroup + 1;
        let kernel = device + 2;
        let constant = kernel + 3;
        let thread = constant + 4;
        let this = thread + 5;
        let new = this + 6;
        let uint = new + 7;
        let half = uint + 8;
        let float4 = half + 9;
        let metal = float4 + 10;
        let min = metal.min(b);
        let select = select(min > 3, min, 4);
        let exp2 = (select % 4) as f32;
        let exp2 = exp2.exp2();
        let tile = exp2 as u32;
        let main = tile + min;
        let NULL = main + 1;
        let asm = NULL + 2;
        let _unused = asm;
        let double = asm + half;
        let signed = double;
        let r#match = signed + 1;
        let r#struct = r#match + 2;
        r#struct
    }

    #[device]
    pub struct Pair<T: Element, const N: usize> {
        pub values: [T; N],
        pub count: u32,
    }

    #[device]
    pub struct Outer<const N: usize> {
        pub inner: Pair<f32, N>,
        pub pairs: [Pair<f32, 2>; 2],
        pub int: i32,
        pub on: bool,
    }

    #[device]
    pub fn pair_of<T: Element, const N: usize>(x: T, count: u32) -> Pair<T, N> {
        Pair { values: [x; N], count }
    }

    #[device]
    pub fn total<T: Element, const N: usize>(pair: Pair<T, N>) -> f32 {
        let mut sum = 0.0;
        for i in 0..N {
            sum += pair.values[i].to_f32();
        }
        sum * pair.count as f32
    }

    #[device]
    pub fn bump<const N: usize>(outer: &mut Outer<N>, by: u32) -> bool {
        outer.inner.count += by;
        outer.pairs[1].values[0] -= 1.5;
        outer.pairs[0].count <<= 1;
        outer.int = -outer.int;
        outer.on ^= true;
        outer.on
    }

    #[device]
    pub fn structs(a: u32, b: u32) -> u32 {
        let small: Pair<f32, 2> = pair_of::<f32, 2>(0.5, b);
        let mut outer = Outer::<3> {
            on: a > b,
            int: a as i32 - 7,
            pairs: [small; 2],
            inner: Pair::<f32, 3> { count: a, values: [1.0, 2.0, a as f32] },
        };
        let before = outer;
        let first = bump(&mut outer, 3);
        let second = bump(&mut outer, b);
        let third = bump(&mut outer, 1);
        let half = pair_of::<f16, 3>(f16::from_f32(2.5), 2);
        let mut copies = [before.inner, outer.inner];
        copies[1].values[2] *= 2.0;
        copies[0].count = 5;
        let sum = total(outer.inner) + total(copies[1]) - total(copies[0]) + total(half)
            + total(outer.pairs[1]) - before.inner.values[2];
        let flags = first as u32 + 2 * second as u32 + 4 * third as u32 + 8 * outer.on as u32;
        ((sum * 4.0) as i32 + outer.int + before.int * 1000) as u32 ^ flags
    }

    #[device]
    pub fn choose_struct(a: u32, b: u32) -> u32 {
        let p: Pair<f32, 2> = if a > b {
            let x = a as f32;
            Pair { values: [x, 1.0], count: 2 }
        } else {
            pair_of::<f32, 2>(3.0, b)
        };
        let q = if p.count > 2 { p } else { pair_of::<f32, 2>(0.25, 4) };
        (total(q) * 8.0) as u32 + p.count
    }

    #[device]
    pub fn constants(a: u32, b: u32) -> u32 {
        let mut sum = tables::PRIMES[(a % 8) as usize] + tables::LIMIT;
        sum ^= tables::OFFSETS[(b % 4) as usize] as u32;
        sum ^= (tables::HUGE >> (a % 64)) as u32;
        for i in (0..6usize).step_by(tables::deeper::STEP) {
            sum ^= tables::FLOATS[i].to_bits();
        }
        sum ^= tables::FLOATS[(a % 6) as usize].to_bits() ^ (tables::FLOATS[1] * b as f32).to_bits();
        if tables::FLAGS[(a % 3) as usize] && !tables::FLAGS[1] {
            sum ^= 1;
        }
        let row = [1u32; tables::deeper::STEP];
        sum ^ tables::SMALL[(b % 3) as usize] as i32 as u32 ^ row[2]
    }

    #[device]
    pub fn step_up(x: &mut u32, by: u32) -> u32 {
        *x += by;
        let old = *x;
        *x = *x * 2 % 10_007;
        old
    }

    #[device]
    pub fn fill<const N: usize>(row: &mut [u32; N], x: &mut u32, from: u32) {
        for i in 0..N {
            row[i] += from + i as u32;
            row[i] ^= *x;
            let last = step_up(x, row[i]);
            row[i] += last % 3;
        }
    }

    #[device]
    pub fn references(a: u32, b: u32) -> u32 {
        let mut x = a;
        let first = step_up(&mut x, b);
        let mut row = [a; 5];
        fill(&mut row, &mut x, first);
        fill(&mut row, &mut x, 2);
        let second = step_up(&mut x, row[3]);
        let _ = step_up(&mut x, 1);
        step_up(&mut x, 1);
        let mut sum = x + first * 3 + second;
        for i in 0..5usize { sum = (sum * 31 + row[i]) % 65_521; }
        sum
    }

    #[device]
    pub fn wide(a: u32, b: u32) -> u32 {
        let p = a as u64 * 0x1_0000_0001 + (b as u64) << 3;
        let q = p % 0xffff_fffb * (p % 0xffff) >> 7 ^ p;
        let s = -(a as i64) * 3_000_000_007 - 1;
        let t = s / 7 % 1000 + (s >> 5) + (s as u64 >> 5) as i64 % 77;
        let n = (a as usize + 3) * (b as usize) % 5 + usize::MAX / 3 % 11;
        let mut m = u64::MAX - b as u64;
        m /= 3;
        m %= 1u64 << 40;
        m ^= 18446744073709551615;
        m -= 0xffff_ffff;
        (q ^ t as u64 ^ n as u64 ^ m ^ m >> 32) as u32 ^ (q >> 32) as u32 ^ (t >> 32) as u32
    }

    #[device]
    pub fn casts(a: u32, b: u32) -> u32 {
        let f = a as f32 * -1.5 + b as f32;
        let mut bits = f as i32 as u32 ^ f as u32;
        bits ^= (f * 1e12) as i64 as u32 ^ ((f * 1e12) as u64 >> 9) as u32 ^ (f * 1e9) as i32 as u32;
        bits ^= (0.0f32 / 0.0 * f) as u32 ^ (1.0f32 / 0.0) as u32 ^ (-1.0f32 / 0.0) as i32 as u32;
        bits ^= (f * 3.0) as u8 as u32 ^ (f * 3.0) as i8 as u32 ^ (f * 999.0) as i16 as u32;
        bits ^= (a * 77) as u8 as u32 ^ (a * 77) as i8 as i32 as u32 ^ (a * 7777) as i16 as u32 ^ (a * 7777) as u16 as u32;
        bits ^= ((a as i32 - 300) as i8 as i64 as u64 >> 8) as u32;
        bits ^= (a as u64 * 0x3_1234_5677) as u32 ^ (a as u64 * 0x3_1234_5677) as f32 as u32;
        bits ^= (u32::MAX as f32).to_bits() ^ (i32::MIN as f32).to_bits() ^ (u64::MAX as f32).to_bits();
        bits ^= (a > b) as u32 ^ (a > b) as u8 as u32 ^ (a == b) as i32 as u32;
        bits ^= -1i32 as u32 ^ b'a' as u32 ^ 300u32 as u8 as u32 ^ -5i32 as i64 as u32;
        bits ^= a as usize as u32 ^ (b as i32 - 9) as usize as u32 ^ ((b as i32 - 9) as u64 >> 32) as u32;
        bits
    }

    #[device]
    pub fn literals(a: u32, b: u32) -> u32 {
        let mut bits = 4294967295 ^ a;
        bits ^= 0xffff_0000u32 ^ 0b1010 ^ 0o17 ^ 1_000;
        bits ^= (-2147483648i32) as u32 ^ i32::MIN as u32 ^ 2147483648;
        bits ^= (1e-3f32).to_bits() ^ 1e10f32.to_bits() ^ (1. * a as f32).to_bits() ^ 0.1f32.to_bits();
        bits ^= 3.4028235e38f32.to_bits() ^ 1e-45f32.to_bits() ^ 16777217f32.to_bits() ^ 2f32.to_bits();
        bits ^= (b as f32 * 1e-40).to_bits();
        bits ^= (0x8000_0000_0000_0000u64 >> 33) as u32 ^ (9223372036854775807i64 >> 40) as u32;
        bits ^= ((-9223372036854775807i64 - 1) >> 60) as u32;
        bits ^= f32::MIN_POSITIVE.to_bits() ^ f32::EPSILON.to_bits() ^ f32::MIN.to_bits() ^ f32::NEG_INFINITY.to_bits();
        bits ^= u32::BITS ^ i64::MAX as u32 ^ (i64::MIN >> 63) as u32 ^ u64::MAX as u32 ^ usize::MAX as u32;
        bits ^= 0x7fff_ffff + a % 2;
        let t = if a > b { 0xffff_ffff } else { 1u32 };
        bits ^ t ^ 5000000000u64 as u32
    }

    #[device]
    pub fn less<T: Number>(x: T, y: T) -> u32 {
        if x < y { 1 } else if x == y { 2 } else { 4 }
    }

    #[device]
    pub fn generic_numbers(a: u32, b: u32) -> u32 {
        let l = a as i64 - 9;
        less(a, b) + 8 * less(a as f32, b as f32) + 64 * less(a as i32 - 50, b as i32)
            ^ less(l, 0i64) * 512 ^ less(f32::NAN, 0f32) * 4096 ^ less(b as usize, 7usize) << 20
    }

    #[device]
    pub fn sized<const N: usize, const M: i32, const ON: bool>(x: u32) -> u32 {
        let mut sum = 0u32;
        for i in 0..N { sum += x + i as u32; }
        for i in (0..N + 2).rev() { sum = sum * 3 % 10_007 + i as u32; }
        for i in (0..N * 4).step_by(N) { sum = sum * 3 % 10_007 + i as u32; }
        for i in M..3 { sum += (i - M) as u32; }
        if ON { sum * 2 } else { sum + N as u32 }
    }

    #[device]
    pub fn const_generics(a: u32, b: u32) -> u32 {
        let x = sized::<4, -3, true>(a) + sized::<1, 2, false>(b);
        let y = sized::<{ 2usize + 3 }, { -7 }, { 3u32 > 2 }>(a + b);
        let z = sized::<{ tables::deeper::STEP }, 0, false>(a);
        x ^ y << 3 ^ z << 7
    }

    #[device]
    pub fn assigned_values(a: u32, b: u32) -> u32 {
        let mut x = a;
        let mut m = [1u32, 2, 3];
        x = if x > b { let t = x - b; t * t } else { x + 1 };
        x = { let t = x + 1; t * 2 };
        x += if x % 2 == 0 { 3 } else { x };
        m[0] = if x > 20 { m[1] } else { m[2] };
        m[(x % 3) as usize] += m[0] * x;
        m = [m[2], m[0], m[1]];
        let i = (a % 3) as usize;
        m[i] = m[(i + 1) % 3] + i as u32;
        x = x * 7 % 1009;
        x ^= m[0] ^ m[1] << 4 ^ m[2] << 8;
        ((x))
    }

    #[device]
    pub fn twice(x: u32) -> u32 { x * 2 }

    #[device]
    pub fn nothing(x: u32) {
        if x > 3 {
            return;
        }
        let y = x + 1;
    }

    #[device]
    pub fn calls(a: u32, b: u32) -> u32 {
        nothing(a);
        let twice = twice(twice(a) + twice(b));
        let big = twice.max(b).min(1000).clamp(3, 900);
        let f = (a as f32 - 8.0).abs().sqrt().max(0.5).floor();
        let g = -(f.max(1.0)) + f.clamp(0.0, 4.0) - -f.trunc();
        let h = (b as f32).mul_add(2.0, -1.0).min(f);
        let n = 5u32.max(a) + (a + 1).min(b) + (b - b / 2).pow(2) + a.abs_diff(b) + a.div_ceil(b + 1);
        let s = (a as i32 - 30).abs() + (a as i32 - 30).min(-3) + (b as i32).saturating_sub(i32::MAX) % 9;
        select(a > b, big, n) ^ (g * 8.0) as i32 as u32 ^ h.to_bits() % 1000 ^ s as u32 ^ n.count_ones()
    }

    #[device]
    pub fn not_a_number(a: u32, b: u32) -> u32 {
        let nan = f32::NAN * a as f32;
        let inf = f32::INFINITY;
        let mut bits = 0u32;
        if !(nan < 1.0) { bits |= 1; }
        if nan >= 1.0 { bits |= 2; }
        if nan == nan { bits |= 4; }
        if nan != nan { bits |= 8; }
        if !(nan > 1.0 || nan <= 1.0) { bits |= 16; }
        if nan.max(2.0) == 2.0 && 2.0f32.min(nan) == 2.0 { bits |= 32; }
        if inf - inf != 0.0 { bits |= 64; }
        if -0.0 == 0.0f32 { bits |= 128; }
        bits |= ((-0.0f32 * a as f32).to_bits() >> 31) << 8;
        bits |= ((0.0f32 - 0.0 * b as f32).to_bits() >> 31) << 9;
        bits |= ((-(b as f32 * 0.0)).to_bits() >> 31) << 10;
        bits |= (nan.is_nan() as u32) << 11;
        bits
    }

    #[device]
    pub fn blocks(a: u32, b: u32) -> u32 {
        let mut sum = 0u32;
        {
            let sum = a;
            {
                let a = sum + b;
                let sum = a;
                if sum > 100 { return sum; }
            }
        }
        { sum += a; }
        let v = { b + 1 };
        if { a > b } { sum += 1; }
        let c: u32 = if a > 1 { { { let d = a; d + v } } } else { { v } };
        sum + v + c
    }

    #[device]
    pub fn stepped(a: u32, b: u32) -> u32 {
        let mut i = 0usize;
        let mut row = [0u32; 6];
        while i < 6 {
            row[i] = a + i as u32;
            row[5 - i] += b;
            i += 1;
            if i == 4 { i += 1; continue; }
            row[i - 1] *= 2;
        }
        let mut j = 5u64;
        let mut hash = 0u32;
        loop {
            hash = (hash * 31 + row[j as usize]) % 65_521;
            if j == 0 { return hash; }
            j -= 1;
        }
    }

    #[device]
    pub fn conditional_returns(a: u32, b: u32) -> u32 {
        let x: u32 = if a == 0 {
            return 3;
        } else if a == 1 {
            if b == 0 { return 4; }
            b
        } else {
            loop {
                if b > a { break; }
                return 5;
            }
            a * b
        };
        if x > 50 {
            if b > 30 { return 6; }
            x + 1
        } else {
            let y = x * 2;
            if y > 40 { y } else { return y + 3; }
        }
    }

    #[device]
    pub fn mutable_argument(mut a: u32, b: u32) -> u32 {
        a += b;
        a *= 2;
        let mut b = b;
        b <<= 2u64;
        a >>= 1i32;
        a ^ b >> (a % 3)
    }

    #[device]
    pub fn elements_of<T: Element>(x: f32) -> u32 {
        let y = T::from_f32(x);
        let mut row = [T::from_f32(0.0); 2];
        row[1] = y;
        (row[1].to_f32() + row[0].to_f32()).to_bits()
    }

    #[device]
    pub struct Narrow {
        pub byte: u8,
        pub short: i16,
        pub tiny: i8,
    }

    #[device]
    pub fn row_of<T: Scalar>(x: T) -> [T; 2] { [x; 2] }

    #[device]
    pub fn narrow_literals(a: u32, b: u32) -> u32 {
        let least = -128i8;
        let less = -32768i16;
        let minus = -5i8;
        let twice = - -7i8;
        let row = [-128i8, 127, minus, twice];
        let filled: [i8; 3] = [-5; 3];
        let shorts: [i16; 3] = [-32768, less, - -300];
        let chosen = if a > b { -5i8 } else { 2 };
        let pair = [chosen, least];
        let mut narrow = Narrow { byte: 255, short: -32768, tiny: if a > b { -128 } else { 127 } };
        let kept = if a > b { narrow.tiny } else { -1i8 };
        let of_function: [i8; 2] = row_of(-128i8);
        let of_choice = row_of(kept);
        let mut sum = least as i32 + less as i32 * 3 + minus as i32 * 5 + twice as i32 * 7;
        sum += row[(a % 4) as usize] as i32 * 11 + filled[1] as i32 * 13 + shorts[(b % 3) as usize] as i32 * 17;
        sum += pair[(a % 2) as usize] as i32 * 19 + of_function[1] as i32 * 23 + of_choice[0] as i32 * 29;
        sum += narrow.byte as i32 + narrow.short as i32 * 31 + narrow.tiny as i32 * 37;
        narrow.short = if a > b { -32768 } else { -1 };
        sum += narrow.short as i32 * 41 + (-128i8 as i32) * 43 + (-32768i16 as i64 as i32) * 47;
        (sum as u32) ^ (-1i16 as u16 as u32) ^ (-128i8 as u8 as u32) << 20
    }

    #[device]
    pub struct Ends<T: Number> {
        pub low: T,
        pub high: T,
    }

    #[device]
    pub fn signed_steps(a: u32, b: u32) -> u32 {
        let mut hash = 7i64;
        let low = -(a as i32);
        for i in (-7..b as i32).step_by(3) { hash = (hash * 31 + i as i64) % 65_521; }
        for i in (low..40).step_by(7) { hash = (hash * 31 + i as i64) % 65_521; }
        for i in (-20..-1i32).step_by(4) { hash = (hash * 31 + i as i64) % 65_521; }
        for i in (b as i32..low).step_by(2) { hash = (hash * 31 + i as i64) % 65_521; }
        // No step leaves the range of the type, in either direction.
        for i in (i32::MAX - 5..i32::MAX).step_by(4) { hash = (hash * 31 + i as i64) % 65_521; }
        for i in (i32::MIN..i32::MAX).step_by(2_000_000_000) { hash = (hash * 31 + i as i64) % 65_521; }
        for i in (i32::MIN..i32::MAX).step_by(5_000_000_000) { hash = (hash * 31 + i as i64) % 65_521; }
        for i in (i32::MIN..i32::MAX).step_by(1) {
            if i > i32::MIN + 4 { break; }
            hash = (hash * 31 + i as i64) % 65_521;
        }
        for i in (i64::MIN..i64::MAX - a as i64).step_by(4_000_000_000_000_000_000) {
            hash = (hash * 31 + i % 1000) % 65_521;
        }
        for i in (-5_000_000_000..a as i64).step_by(1_250_000_001) { hash = (hash * 31 + i) % 65_521; }
        // Ends whose type is not written.
        let ints = Ends::<i32> { low, high: b as i32 };
        for i in (ints.low..ints.high).step_by(5) { hash = (hash * 31 + i as i64) % 65_521; }
        for i in (-9..ints.high).step_by(2) { hash = (hash * 31 + i as i64) % 65_521; }
        let longs = Ends::<i64> { low: low as i64 * 3_000_000_000, high: b as i64 };
        for i in (longs.low..longs.high).step_by(20_000_000_000) { hash = (hash * 31 + i % 1000) % 65_521; }
        let words = Ends::<u32> { low: b, high: u32::MAX - a };
        for i in (words.low..words.high).step_by(1_073_741_824) { hash = (hash * 31 + i as i64) % 65_521; }
        // A bound that the body changes is read once.
        let mut end = ints.high;
        let mut step = 2usize;
        for i in (low + 1..end).step_by(step) {
            end -= 1;
            step += 1;
            hash = (hash * 31 + i as i64 + end as i64) % 65_521;
        }
        hash as u32
    }

    #[device]
    pub fn integer_remainders(a: u32, b: u32) -> u32 {
        let longs = Ends::<i64> { low: (a as i64 + 1) << 32, high: -(b as i64 + 1) };
        let words = Ends::<u32> { low: u32::MAX - a, high: b + 1 };
        let mut other = Ends::<i64> { low: -7, high: 5 };
        other.low %= longs.high;
        other.high %= 3;
        let mut sum = 7 % longs.low + -7 % longs.high + 3_000_000_000 % longs.high + longs.low % longs.high;
        sum += longs.low % -3_000_000_007 + other.low + other.high + (if a > b { 5 } else { -5 }) % longs.low;
        sum as u32 ^ 5 % words.low ^ words.low % words.high << 8 ^ 3_000_000_000 % words.low
    }

    #[device]
    pub fn float_remainders(a: u32, b: u32) -> u32 {
        let x = (a as f32 - 20.0) * 1.7;
        let y = (b as f32 - 25.0) * 0.3 + 0.05;
        let ends = Ends::<f32> { low: x * 1e30, high: y };
        let mut row = [x % y, ends.low % ends.high, ends.high % ends.low, x % 3.0, 1e38 % y, y % 1e-40];
        let mut left = x;
        left %= 2.5;
        let mut both = ends;
        both.low %= y;
        both.high %= both.low.abs() + 1e-3;
        row[(a % 6) as usize] %= 0.7;
        row[1] %= ends.high * 0.1;
        let mut bits = left.to_bits() ^ both.low.to_bits() ^ both.high.to_bits().rotate_left(5);
        for i in 0..6usize {
            bits = bits.rotate_left(3) ^ row[i].to_bits();
        }
        // Signs of zeros, infinities, NaN.
        bits ^= (-6.0 % 3.0f32).to_bits() ^ (x % f32::INFINITY).to_bits().rotate_left(9) ^ (-0.0 % y).to_bits();
        bits ^= (x % 0.0).is_nan() as u32 | ((f32::INFINITY % y).is_nan() as u32) << 1;
        bits ^ ((f32::NAN % y).is_nan() as u32) << 2 ^ (1.0 + x % y * 2.0).to_bits() >> 7
    }

    #[device]
    pub fn elements(a: u32, b: u32) -> u32 {
        let x = a as f32 * 1.1 - b as f32 / 3.0;
        let h = f16::from_f32(x * 3000.0);
        let g = bf16::from_bits((a * 311) as u16);
        elements_of::<f16>(x) ^ elements_of::<bf16>(x) << 1 ^ elements_of::<f32>(x) << 2
            ^ h.to_bits() as u32 ^ g.to_f32().to_bits()
    }
}

compared! {
    shadows loops_shadow nested_values early_returns negatives precedence booleans arrays_of_arrays loops whiles words_of_cpp
    structs choose_struct constants references wide casts literals generic_numbers const_generics assigned_values calls
    not_a_number blocks stepped conditional_returns mutable_argument elements
    narrow_literals signed_steps integer_remainders float_remainders
}

#[test]
fn odd_rust_means_the_same_everywhere() {
    let mut pairs = vec![0u32, 0, 1, 0, 0, 1, 1, 1, 7, 7];
    for i in 0..59u32 {
        pairs.extend([i * 37 % 41, i * i % 53]);
    }
    let n = pairs.len() / 2;
    let memory = Memory::from_slice(&pairs);
    for device in devices() {
        let mut out = Memory::from_slice(&vec![u32::MAX; n * ROOM]);
        let groups = [n.div_ceil(64) as u32, 1, 1];
        let call = all::Call { pairs: memory.view(), out: out.view_mut(), n: n as u32, groups };
        call.launch(&device).unwrap_or_else(|why| panic!("{device}: {why}"));
        if !device.runs() {
            continue;
        }
        let out = out.to_vec::<u32>().unwrap();
        let mut wrong = Vec::new();
        for (k, (name, f)) in NAMES.iter().zip(PLAIN).enumerate() {
            let differ = (0..n).find(|&i| out[i * ROOM + k] != f(pairs[2 * i], pairs[2 * i + 1]));
            wrong.extend(differ.map(|i| {
                let (a, b) = (pairs[2 * i], pairs[2 * i + 1]);
                format!("{name}({a}, {b}) is {:#x}, found {:#x}", f(a, b), out[i * ROOM + k])
            }));
        }
        assert!(wrong.is_empty(), "{device}:\n{}", wrong.join("\n"));
    }
}
