//! Every construct means the same in a kernel and in plain Rust: each function here is compiled twice, by the language
//! and by rustc alone, and both run on the same values.

use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Instance, Target};
use flashtile_kernel_macros::{constant, device, kernel, params};

use crate::gcc;
use crate::nvrtc::Nvrtc;

/// Compiles an instance's source for CUDA, without warnings; says so where there is no compiler.
pub(crate) fn compiles(instance: &Instance, options: &[&str]) {
    let Some(nvrtc) = Nvrtc::find() else { return };
    let source = instance.source(Target::Cuda);
    let options = [&["--std=c++17", "--gpu-architecture=compute_80"], options].concat();
    if let Err(log) = nvrtc.compile(&source, &options) {
        let lines: Vec<String> =
            source.lines().enumerate().map(|(n, line)| format!("{:4} {line}", n + 1)).collect();
        panic!("{}:\n{}\n{log}", instance.entry(), lines.join("\n"));
    }
}

macro_rules! twins {
    ($(fn $name:ident $arguments:tt -> $result:ty $body:block)*) => {
        pub mod twin {
            use super::*;
            $(
                #[device]
                pub fn $name $arguments -> $result $body
            )*
        }

        // Written for the language's forms, not for Rust's taste.
        #[allow(clippy::all)]
        pub mod plain {
            use super::*;
            $(pub fn $name $arguments -> $result $body)*
        }

        /// Every function of every pair of numbers.
        #[kernel(threads = 32)]
        #[allow(unused_assignments)]
        pub fn all(a: &Buffer<u32>, x: &Buffer<f32>, out: &mut Buffer<u32>) {
            let i = thread_position();
            let mut place = i * FUNCTIONS;
            $(
                out[place] = twin::$name(a[i], x[i]);
                place += 1;
            )*
        }

        const NAMES: &[&str] = &[$(stringify!($name)),*];

        fn expected(a: u32, x: f32) -> Vec<u32> {
            vec![$(plain::$name(a, x)),*]
        }
    };
}

#[constant]
pub const FUNCTIONS: u32 = NAMES.len() as u32;

#[constant]
pub const SQUARES: [u32; 16] = {
    let mut table = [0; 16];
    let mut n = 0;
    while n < 16 {
        table[n] = (n * n) as u32;
        n += 1;
    }
    table
};

#[constant]
pub const LEVELS: [f32; 4] = [-1.5, 0.0, 0.1, f32::INFINITY];

/// A struct with everything a struct may hold.
#[device]
pub struct Best<T: Element, const N: usize> {
    pub value: [T; N],
    pub index: u32,
    pub signed: bool,
}

#[device]
pub struct Pair {
    pub a: u32,
    pub b: f32,
}

#[device]
pub fn make<T: Element, const N: usize>(value: T, index: u32) -> Best<T, N> {
    Best { index, signed: index > 3, value: [value; N] }
}

#[device]
pub fn total<T: Element, const N: usize>(of: [T; N]) -> f32 {
    let mut sum = 0.0;
    for i in 0..N {
        sum += of[i].to_f32();
    }
    sum
}

#[device]
pub fn next(state: &mut u32) -> u32 {
    *state = state.wrapping_mul(1664525).wrapping_add(1013904223);
    *state >> 8
}

#[device]
pub fn add_one(of: &mut [u32; 4], pair: &mut Pair) {
    for i in 0..4usize {
        of[i] = of[i].wrapping_add(1);
    }
    pair.a = of[0];
    pair.b += 1.0;
}

#[device]
pub fn early(a: u32) -> u32 {
    if a < 10 {
        return a;
    }
    let mut n = 0u32;
    loop {
        n += 1;
        if n * n > a % 1000 {
            return n;
        }
    }
}

#[device]
pub fn last<const WIDE: bool, const M: i32>(a: u32) -> u32 {
    if WIDE { a ^ M as u32 } else { !a }
}

#[device]
pub struct Wide {
    pub wide: i64,
    pub int: i32,
    pub tiny: i8,
}

#[device]
pub fn widened(a: i32) -> i64 {
    a as i64
}

twins! {
    fn literals_of_context(a: u32, x: f32) -> u32 {
        let b = Wide { wide: a as i32 as i64 * 5, int: a as i32 >> 1, tiny: a as i8 };
        let mut c = b;
        let mut d = a as i64;
        d += -3000000000;
        d ^= -0xb2d0_5e00;
        c.wide += -3000000000;
        c.wide -= if x < 1.0 { 3000000000 } else { -5 };
        c.wide ^= -(if x < 2.0 { 2147483648 } else { 7 });
        c.int &= -2147483648;
        c.tiny = -128;
        let e = 7 % c.wide.max(1) + b.wide % -3000000007 + -4294967295 / (b.wide & 63 | 1);
        let f = [-3000000000, 5][(a & 1) as usize] ^ [b.wide, -2147483649][1];
        let g = (widened(b.int) < -3000000000) as u32 + ((b.wide > -2147483649) as u32) * 2;
        let h = -128i8 as i32 + -32768i16 as i32 + if x < 3.0 { b.tiny } else { -1i8 } as i32;
        let i = b.wide.clamp(-3000000000, 2147483648) ^ select(x < 0.0, b.wide, -9223372036854775808);
        let all = d ^ c.wide.wrapping_mul(31) ^ c.int as i64 ^ c.tiny as i64 ^ e ^ f ^ h as i64 ^ i;
        (all ^ all >> 32) as u32 ^ g << 20
    }
    fn remainders(a: u32, x: f32) -> u32 {
        let b = a as f32 * 0.37 - 1e6;
        let pair = Pair { a, b: x };
        let mut c = [b % 3.5, x % b, b % x, pair.b % b, 1e30 % x, -0.0 % b];
        c[0] %= 0.3;
        c[(a % 6) as usize] %= x;
        let mut all = 0u32;
        for n in 0..6usize {
            let y = c[n];
            all = all.rotate_left(5) ^ if y.is_nan() { 1 } else { y.to_bits() };
        }
        all ^ 7 % (pair.a | 1) ^ pair.a % 1000 ^ 4000000000 % (pair.a | 1)
    }
    fn signed_steps(a: u32, x: f32) -> u32 {
        let low = -((a & 0xffff) as i32);
        let ends = Wide { wide: x as i32 as i64, int: 100, tiny: 0 };
        let mut hash = 1i64;
        for i in (low..9).step_by(1000) { hash = (hash * 31 + i as i64) % 65521; }
        for i in (low..ends.int).step_by((a & 7) as usize + 700) { hash = (hash * 31 + i as i64) % 65521; }
        for i in (i32::MAX - 5..i32::MAX).step_by(4) { hash = (hash * 31 + i as i64) % 65521; }
        for i in (i32::MIN..i32::MAX - 5).step_by(2_000_000_000) { hash = (hash * 31 + i as i64) % 65521; }
        for i in (ends.wide..8_589_934_592).step_by(1_000_000_007) { hash = (hash * 31 + i) % 65521; }
        for _ in (-7..ends.int).step_by(20) { hash += 1; }
        for i in (i64::MIN..i64::MAX).step_by(1) {
            if i > i64::MIN + 3 {
                break;
            }
            hash += i % 1000;
        }
        hash as u32
    }
    fn arithmetic(a: u32, _x: f32) -> u32 {
        let b = a & 0xffff;
        let c = b * 3 + 7 - b / 5 * 2 + b % 13;
        c - (b - (b / 2)) + (c << 3 >> 1)
    }
    fn precedence(a: u32, _x: f32) -> u32 {
        let b = a & 0xff | 1u32 << (a & 7) as u64 as u32 & 0 ^ a >> 3;
        let c = a & b == 0 || a | 1 == b && a ^ b > 3;
        if c { b } else { a & !b ^ 5 }
    }
    fn compound(a: u32, x: f32) -> u32 {
        let mut b = a & 0xffff;
        b += 3;
        b *= 5;
        b -= 7;
        b /= 3;
        b %= 1000;
        b <<= 4;
        b >>= 1;
        b |= 0x10;
        b &= 0xfff;
        b ^= 0xf0f;
        let mut y = 1.0;
        y += x;
        y *= 0.5;
        y -= 0.25;
        y /= 4.0;
        b ^ (y as u32)
    }
    fn signed(a: u32, _x: f32) -> u32 {
        let b = a as i32;
        let c = b >> 3;
        let d = (c & 0xfff) - 0x800;
        let e = -d / 7 + d % 5 * -3;
        let f = if d < -28 { e } else { -e };
        let g = -2147483648i32;
        let h = (d > -1) as i32;
        (f ^ g).wrapping_add(h) as u32
    }
    fn wide(a: u32, _x: f32) -> u32 {
        let b = a as u64 * 3_000_000_000 + 5_000_000_000;
        let c = b ^ 0xffff_ffff_ffff_ffff;
        let d = (c >> 32) as u32 ^ c as u32;
        let e = (a as i64 - 3_000_000_000) * -2;
        let f = a as usize + 0xffff_ffff;
        let g = a & 0x8000_0000;
        let h: u64 = 18446744073709551615;
        let i: i64 = -9223372036854775808;
        d ^ e as u32 ^ (e >> 32) as u32 ^ f as u32 ^ (f >> 32) as u32 ^ g ^ (h >> 40) as u32 ^ (i >> 60) as u32
    }
    fn narrow(a: u32, x: f32) -> u32 {
        let b = a as u8;
        let c = a as i8;
        let d = a as u16;
        let e = a as i16;
        let f: u8 = 200;
        let g = [b, f, 7];
        let h = x as i8;
        let i = x as u16;
        b as u32 + (c as i32 as u32 ^ d as u32) ^ e as u32 ^ g[1] as u32 ^ h as u32 ^ i as u32 ^ b'a' as u32
    }
    fn casts(_a: u32, x: f32) -> u32 {
        let b = x as u32;
        let c = x as i32;
        let d = x as u64;
        let e = x as i64;
        let f = x as usize;
        b ^ c as u32 ^ d as u32 ^ (d >> 32) as u32 ^ (e >> 32) as u32 ^ e as u32 ^ f as u32
    }
    fn to_floats(a: u32, _x: f32) -> u32 {
        let b = a as f32;
        let c = a as i32 as f32;
        let d = (a as u64 * 0x1_0000_0001) as f32;
        let e = (a as i32 as i64 * 0x4000_0001) as f32;
        let f = 3 as f32 + a as u8 as f32;
        b.to_bits() ^ c.to_bits().rotate_left(3) ^ d.to_bits().rotate_left(7) ^ e.to_bits().rotate_left(9) ^ f.to_bits()
    }
    fn booleans(a: u32, x: f32) -> u32 {
        let b = a > 5;
        let c = x < 1.0;
        let both = b & c;
        let either = (b | c) ^ !both;
        let mut all = b && c || !either;
        all &= a != 3;
        all |= x == 0.0;
        all ^= true;
        let flags = [b, c, both, either, all];
        let mut bits = 0u32;
        for i in 0..5usize {
            bits = bits << 1u32 | flags[i] as u32;
        }
        if both == either { bits } else { bits | 32 }
    }
    fn methods(a: u32, x: f32) -> u32 {
        let b = a.min(7).max(3).clamp(4, 6);
        let c = a.wrapping_add(5).wrapping_mul(7).wrapping_sub(a);
        let d = a.rotate_left(3) ^ a.rotate_right(5) ^ a.reverse_bits();
        let e = a.count_ones() + a.leading_zeros() * 100 + a.trailing_zeros() * 10000;
        let f = a.saturating_sub(100).saturating_add(4294967200);
        let g = (a as i32).wrapping_neg().unsigned_abs();
        let h = a.abs_diff(1000) ^ (a as i32).abs_diff(-1000);
        let i = (a % 10).pow(3) + a.div_ceil(3);
        let j = (a as i32).saturating_sub(2147483647) as u32;
        let k = (a as u64).leading_zeros() + (a as u64).count_ones();
        let l = a.wrapping_shl(35) ^ (a as i32).wrapping_shr(33) as u32;
        let m = x.is_nan() as u32 + x.is_finite() as u32 * 2 + x.is_infinite() as u32 * 4;
        b ^ c ^ d ^ e ^ f ^ g ^ h ^ i ^ j ^ k ^ l ^ m
    }
    fn floats(_a: u32, x: f32) -> u32 {
        let b = x.floor() + 0.5;
        let c = x.ceil().min(100.0).max(-100.0);
        let d = x.trunc() - x.round_ties_even();
        let e = x.abs().sqrt();
        let f = x.mul_add(2.0, -1.0);
        let g = 1f32.copysign(x) * 2. - 1e-3;
        let h = x.clamp(-2.5, 1e2);
        let i = -x;
        let j = if x.is_nan() { 0.0 } else { x - (x / 3.0).trunc() * 3.0 };
        // The bits of a NaN are not specified.
        let bits = [b, c, d, e, f, g, h, i, j];
        let mut all = 0u32;
        for n in 0..9usize {
            let y = bits[n];
            all = all.rotate_left(3) ^ if y.is_nan() { 1 } else { y.to_bits() };
        }
        all
    }
    fn limits(a: u32, x: f32) -> u32 {
        let b = x < f32::INFINITY && x > f32::NEG_INFINITY;
        let c = x <= f32::MAX && x >= f32::MIN;
        let d = f32::NAN.is_nan();
        let e = f32::MIN_POSITIVE.to_bits() ^ f32::EPSILON.to_bits();
        let f = u32::MAX - a.max(100) + u32::BITS;
        let g = i32::MIN as u32 ^ i32::MAX as u32 ^ u32::MIN;
        let h = (u64::MAX >> 7) as u32 ^ (i64::MIN >> 33) as u32;
        let i = (b as u32) << 1 | (c as u32) << 2 | (d as u32) << 3;
        e ^ f.wrapping_add(7) ^ g ^ h ^ i
    }
    fn choices(a: u32, x: f32) -> u32 {
        let b = if a > 5 { a } else { 0 };
        let c = if a > 100 { 1 } else if a > 50 { b } else { 3 };
        let d: u32 = if a & 1 == 0 {
            let t = c ^ 5;
            t.wrapping_mul(3)
        } else if x > 2.0 {
            return 7;
        } else {
            b
        };
        let e: u32 = {
            let d = d ^ 9;
            d >> 1
        };
        let mut f = e;
        f = if x < 0.0 { f ^ 1 } else { f };
        f = if f > 7 {
            let t = f >> 1;
            t ^ f
        } else {
            f
        };
        if a % 3 == 0 {
            return if f > 3 { f } else { d };
        }
        if f == 9 {
            let s = d;
            s
        } else {
            e ^ f
        }
    }
    fn loops(a: u32, _x: f32) -> u32 {
        let n = a % 20;
        let mut sum = 0u32;
        for i in 0..n {
            if i == 3 {
                continue;
            }
            if i == 17 {
                break;
            }
            sum = sum * 3 % 10007 + i;
        }
        for i in n..n + 5 {
            sum = sum * 3 % 10007 + i;
        }
        for i in 1..=n {
            sum = sum * 3 % 10007 + i;
        }
        for i in (0..n).step_by(4) {
            sum = sum * 3 % 10007 + i;
        }
        for i in (3..n as u64 * 2).step_by(n as usize + 1) {
            sum = sum * 3 % 10007 + i as u32;
        }
        for i in (0..n).rev() {
            if i == 2 {
                continue;
            }
            sum = sum * 3 % 10007 + i;
        }
        for i in (n / 2..n + 1).rev() {
            sum = sum * 3 % 10007 + i;
        }
        for i in n..3 {
            sum = sum * 3 % 10007 + i;
        }
        for i in (n..3).rev() {
            sum = sum * 3 % 10007 + i;
        }
        for i in -2..3i32 {
            sum = sum * 3 % 10007 + (i + 2) as u32;
        }
        let mut j = n;
        while j > 0 && sum < 10000 {
            j -= 1;
            loop {
                sum += 1;
                if sum % 3 == 0 {
                    break;
                }
            }
        }
        sum
    }
    fn ends_of_types(a: u32, _x: f32) -> u32 {
        let mut sum = 0u32;
        let most = u32::MAX - a % 4;
        for i in most..=u32::MAX {
            sum += i / 1000 + 1;
        }
        for i in (u32::MAX - 10..most).step_by(7) {
            sum += i / 1000 + 1;
        }
        for i in (0..u32::MAX).step_by(4294967295) {
            sum += i + 1;
        }
        for i in (0..a % 7 + 4294967000).step_by(2000000000) {
            sum ^= i + 1;
        }
        for i in 2147483640..=i32::MAX {
            sum ^= i as u32;
        }
        for i in i32::MIN..-2147483640 {
            sum ^= i as u32;
        }
        for i in u64::MAX - 3..=u64::MAX {
            sum ^= i as u32;
        }
        for i in a..=a {
            sum ^= i;
        }
        sum
    }
    fn bounds_once(a: u32, _x: f32) -> u32 {
        let mut n = a % 10 + 1;
        let mut sum = 0u32;
        for i in 0..n {
            n += 1;
            sum += i + n;
        }
        let mut step = 1usize;
        for i in (0..20u32).step_by(step) {
            step += 1;
            sum += i;
        }
        for i in (n..30).rev() {
            n = 0;
            sum += i;
        }
        for i in n..=n + 3 {
            n += 1;
            sum += i;
        }
        sum + n + step as u32
    }
    fn shadows(a: u32, x: f32) -> u32 {
        let x = x.to_bits();
        let a = a ^ x;
        let x = a.wrapping_add(x);
        let y = x;
        {
            let x = y >> 1;
            let a = x ^ a;
            let _ = early(a);
        }
        let mut sum = a;
        for x in x..x.saturating_add(3) {
            let a = x;
            let x = a.wrapping_mul(3);
            sum = sum.wrapping_add(x);
        }
        let int = sum ^ a;
        let float = int.wrapping_add(y);
        let x_2 = float ^ x;
        let x = x_2;
        x
    }
    fn arrays(a: u32, x: f32) -> u32 {
        let mut b = [0u32; 4];
        let mut c = [[0.0; 3]; 2];
        let d = [a & 15, 3, 7, 1];
        let e: [[u32; 2]; 2] = [[0; 2], [1, 2]];
        for i in 0..4usize {
            b[i] = d[i] * 2;
            b[i] += SQUARES[(d[i] & 15) as usize];
            c[i % 2][i % 3] = d[i] as f32 * 0.5;
            c[i % 2][i % 3] += LEVELS[i % 3];
        }
        let mut copy = b;
        copy[1] = 0;
        let mut n = 0u32;
        for r in 0..2usize {
            for k in 0..3usize {
                n = n.wrapping_mul(31).wrapping_add(c[r][k].to_bits());
            }
        }
        let nested = [b, copy, d];
        if x > 0.0 {
            copy = nested[0];
        }
        n ^ b[1] ^ copy[1] << 8 ^ nested[2][3] << 16 ^ e[1][(a & 1) as usize] << 24 ^ b[b[3] as usize % 4]
    }
    fn structs(a: u32, x: f32) -> u32 {
        let x = if x.is_nan() { 1.0 } else { x };
        let mut best = make::<f32, 4>(x, a % 9);
        let half: Best<f16, 2> = Best { value: [f16::from_f32(1.5), f16::from_f32(0.1)], index: 1, signed: false };
        let other = best;
        best.value[1] = 2.5;
        best.index += half.index;
        best.signed = best.value[1] > other.value[1];
        let pair = Pair { b: total(half.value), a: best.index };
        let pair = Pair { a: pair.a + 1, b: if best.signed { let t = pair.b; t * 2.0 } else { pair.b } };
        let mut sum = pair.a ^ pair.b.to_bits() ^ other.index;
        if best.signed || other.signed {
            sum ^= best.value[1].to_bits();
        }
        sum ^ other.value[1].to_bits()
    }
    fn references(a: u32, x: f32) -> u32 {
        let mut state = a;
        let first = next(&mut state);
        let mut second = next(&mut state);
        second ^= first;
        let _ = next(&mut state);
        let mut four = [first, second, state, a];
        let mut pair = Pair { a: 0, b: if x.is_nan() { 0.0 } else { x } };
        add_one(&mut four, &mut pair);
        let third = next(&mut pair.a);
        if next(&mut state) & 1 == 0 && third > 3 {
            second ^= 1;
        }
        second ^ third ^ four[3] ^ pair.a ^ pair.b.to_bits() ^ state
    }
    fn calls(a: u32, x: f32) -> u32 {
        let b = early(a) ^ early(early(a));
        let c = total([x, 1.0, 2.0]);
        let d = total::<f32, 2>([0.5; 2]);
        let e = last::<true, -3>(a) ^ last::<false, 7>(b);
        b ^ e ^ d.to_bits() ^ if c.is_nan() { 0 } else { c.to_bits() }
    }
    fn elements(a: u32, x: f32) -> u32 {
        let b = f16::from_f32(x);
        let c = bf16::from_f32(x);
        let d = [b, f16::from_bits(a as u16)];
        let e = d[1].to_f32();
        let f = bf16::from_bits((a >> 16) as u16).to_f32();
        let g = if x.is_nan() { 0 } else { b.to_bits() as u32 ^ (c.to_bits() as u32) << 16 };
        let h = if e.is_nan() { 1 } else { e.to_bits() };
        g ^ h ^ if f.is_nan() { 2 } else { f.to_bits() } ^ f32::from_bits(a ^ 0x8000_0000).to_bits()
    }
    fn selected(a: u32, x: f32) -> u32 {
        let b = select(x > 0.0, a, 7);
        let c = select(a > 9, 1, b);
        let d = select(a & 1 == 0, x, 0.0);
        b ^ c ^ if d.is_nan() { 0 } else { d.to_bits() }
    }
}

fn numbers() -> (Vec<u32>, Vec<f32>) {
    let mut a = vec![0, 1, 2, 3, 4, 9, 10, 31, 32, 100, 255, 256, 65535, 65536];
    a.extend([i32::MAX as u32 - 1, i32::MAX as u32, 1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX]);
    let mut x = vec![0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.7, -3.7, 100.25, 1e10, -1e10, 1e20, -1e20];
    x.extend([
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        1e-20,
        2147483648.0,
        4294967296.0,
    ]);
    let mut state = 1;
    while a.len() % 32 != 0 || a.len() < 256 {
        state = (state ^ state << 7) & 0xffff_ffffu64;
        state ^= state >> 9;
        state = (state.wrapping_mul(0x9e37_79b9) ^ 0x1234_5678) & 0xffff_ffff;
        a.push(state as u32);
        x.push((state as f32 - 2e9) / (1u64 << (state % 40)) as f32);
    }
    x.resize(a.len(), 3.0);
    (a, x)
}

#[test]
fn functions_give_what_they_give_in_plain_rust() {
    let (a, x) = numbers();
    let mut out = Memory::from_slice(&vec![0u32; a.len() * NAMES.len()]);
    let (a_memory, x_memory) = (Memory::from_slice(&a), Memory::from_slice(&x));
    let groups = [a.len() as u32 / 32, 1, 1];
    all::Call { a: a_memory.view(), x: x_memory.view(), out: out.view_mut(), groups }
        .launch(&Simulator::default())
        .unwrap();
    let found = out.to_vec::<u32>().unwrap();
    for (n, found) in found.chunks(NAMES.len()).enumerate() {
        for ((name, found), expected) in NAMES.iter().zip(found).zip(expected(a[n], x[n])) {
            assert_eq!(*found, expected, "{name}({}, {:?})", a[n], x[n]);
        }
    }
}

#[test]
fn functions_give_it_in_printed_cpp() {
    let (a, x) = numbers();
    let list = |words: Vec<u32>| words.iter().map(|word| format!("{word}u")).collect::<Vec<_>>().join(", ");
    let (count, words) = (a.len(), list(a.clone()));
    let floats = list(x.iter().map(|x| x.to_bits()).collect());
    let setup = format!(
        "static const uint ft_a[{count}] = {{{words}}};\nstatic const uint ft_x[{count}] = {{{floats}}};"
    );
    let call = "ft_a, reinterpret_cast<const float*>(ft_x), ft_out";
    let out = count * NAMES.len();
    let Some(found) = gcc::run(&all::instance(), &setup, call, count as u32 / 32, out) else { return };
    let mut wrong = Vec::new();
    for (n, found) in found.chunks(NAMES.len()).enumerate() {
        for ((name, found), expected) in NAMES.iter().zip(found).zip(expected(a[n], x[n])) {
            if *found != expected {
                wrong.push(format!("{name}({}, {:?}) = {found}, not {expected}", a[n], x[n]));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn functions_compile_for_cuda() {
    compiles(&all::instance(), &[]);
}

#[params]
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub strides: [u64; 2],
    pub n: u32,
    pub scale: f32,
    pub offsets: [[i32; 2]; 2],
}

#[constant]
pub const VOTES: u32 = 4;

#[constant]
pub const WIDTH: usize = VOTES as usize;

/// Memory in all its forms.
#[kernel(threads <= 128, exact)]
pub fn memory<T: Element, const N: usize>(
    x: &Buffer<T>,
    bytes: &Buffer<u8>,
    out: &mut Buffer<T>,
    counts: &mut Buffer<u32>,
    shape: &Shape,
    factor: f32,
    #[constant] twice: bool,
    #[constant] steps: u32,
) {
    let mut tile: Shared<f32> = shared(128 * N);
    let mut votes = shared::<u32>(VOTES as usize);
    let i = thread_index();
    for n in 0..N as u32 {
        tile[i * N as u32 + n] = x[i as u64 * shape.strides[0] + n as u64].to_f32() * factor;
    }
    if i < 4 {
        votes[i] = 0;
    }
    barrier();
    let total = simd_sum(tile[i * N as u32]);
    if simd_lane() == 0 {
        atomic_add(&mut votes, simd_index(), total as u32);
        let old = atomic_max(counts, 0, 9);
        let _ = atomic_exchange(counts, 1, old);
    }
    atomic_or(&mut votes, 0, 1u32 << 20);
    barrier();
    let four = x.load::<4>(i * 4);
    let words = bytes.load_as::<u32, 2>(i * 8);
    let mut row: [f32; WIDTH] = [0.0; WIDTH];
    for n in 0..WIDTH {
        row[n] = four[n].to_f32() + (words[n % 2] >> 8 & 0xff) as f32;
        if twice {
            row[n] *= 2.0;
        }
        for _ in 0..steps {
            row[n] += shape.scale + shape.offsets[1][n % 2] as f32;
        }
    }
    out.store(i * 4, [T::from_f32(row[0]), T::from_f32(row[1]), four[2], T::from_f32(row[3])]);
    counts.store_as::<u16, 2>(2 + i, [words[0] as u16, i as u16]);
    finish(counts, &votes, &mut tile, shape);
}

#[device]
pub fn finish(counts: &mut Buffer<u32>, votes: &Shared<u32>, tile: &mut Shared<f32>, shape: &Shape) {
    let i = thread_index();
    tile[i] += 1.0;
    if i < shape.n {
        counts[2 + threads() + i] = votes[i] + tile[i] as u32;
    }
}

#[test]
fn memory_holds_what_was_stored() {
    let threads = 64u32;
    let x: Vec<f16> = (0..256).map(|i| f16::from_f32((i % 32) as f32 * 0.5)).collect();
    let bytes: Vec<u8> = (0..512).map(|i| (i * 7) as u8).collect();
    let (x_memory, bytes_memory) = (Memory::from_slice(&x), Memory::from_slice(&bytes));
    let mut out = Memory::from_slice(&vec![f16::ZERO; 256]);
    let mut counts = Memory::from_slice(&vec![0u32; 2 + 64 + 4]);
    let shape = Shape { strides: [2, 0], n: 4, scale: 0.25, offsets: [[0, 0], [1, -1]] };
    memory::Call {
        x: x_memory.view(),
        bytes: bytes_memory.view(),
        out: out.view_mut(),
        counts: counts.view_mut(),
        shape,
        factor: 2.0,
        twice: true,
        steps: 3,
        groups: [1, 1, 1],
        threads,
    }
    .launch::<f16, 2>(&Simulator::default())
    .unwrap();
    let tile: Vec<f32> = (0..128).map(|i| x[i].to_f32() * 2.0).collect();
    let expected: Vec<f16> = (0..256)
        .map(|i| {
            let (thread, n) = (i / 4, i % 4);
            let byte = bytes[thread * 8 + n % 2 * 4 + 1];
            let step = 0.25 + [1.0, -1.0][n % 2];
            let y = (x[i].to_f32() + byte as f32) * 2.0 + 3.0 * step;
            if n == 2 { x[i] } else { f16::from_f32(y) }
        })
        .collect();
    assert_eq!(out.to_vec::<f16>().unwrap(), expected);
    let counts = counts.to_vec::<u32>().unwrap();
    assert!(counts[0] == 9 && (counts[1] == 0 || counts[1] == 9));
    for i in 0..64u32 {
        let word = i as usize * 8;
        let low = u16::from_le_bytes([bytes[word], bytes[word + 1]]);
        assert_eq!(counts[2 + i as usize], low as u32 | i << 16);
    }
    let sums = [0..32, 32..64].map(|lanes| lanes.map(|i| tile[i * 2]).sum::<f32>() as u32);
    for i in 0..4 {
        let votes = [sums[0] | 1 << 20, sums[1], 0, 0][i];
        assert_eq!(counts[66 + i], votes + (tile[i] + 1.0) as u32, "{i}");
    }
}

#[test]
fn memory_compiles_for_cuda() {
    let options = ["-DFT_CONSTANT_twice=true", "-DFT_CONSTANT_steps=3u", "--fmad=false"];
    compiles(&memory::instance::<f16, 2>(), &options);
    compiles(&memory::instance::<bf16, 1>(), &options);
    compiles(&memory::instance::<f32, 3>(), &options);
}

/// A product of matrices of 8 rows and 16 columns, by fragments.
#[kernel(threads = 32)]
pub fn product<T: Element>(a: &Buffer<T>, b: &Buffer<T>, out: &mut Buffer<f32>) {
    let mut tile: Shared<f32> = shared(64);
    let mut sums = [Fragment::<f32>::zero(); 2];
    for k in (0..16u32).step_by(8) {
        let left = Fragment::<T>::load(a, k, 16);
        for n in 0..2u32 {
            let right = Fragment::<T>::load_transposed(b, n * 8 * 16 + k, 16);
            sums[n] = Fragment::multiply_accumulate(&left, &right, &sums[n]);
        }
    }
    let first = sums[1].element(0);
    sums[1].set_element(0, first + 100.0);
    sums[1].store(&mut tile, 0, 8);
    simd_barrier();
    sums[0].store(out, 0, 8);
    let lane = simd_lane();
    out[64 + lane] = tile[lane];
    out[96 + lane] = tile[32 + lane];
}

#[test]
fn fragments_multiply() {
    let a: Vec<f32> = (0..128).map(|i| (i % 7) as f32 - 3.0).collect();
    let b: Vec<f32> = (0..256).map(|i| (i % 5) as f32 * 0.5).collect();
    let (a_memory, b_memory) = (Memory::from_slice(&a), Memory::from_slice(&b));
    let mut out = Memory::from_slice(&vec![0f32; 128]);
    product::Call { a: a_memory.view(), b: b_memory.view(), out: out.view_mut(), groups: [1, 1, 1] }
        .launch::<f32>(&Simulator::default())
        .unwrap();
    let out = out.to_vec::<f32>().unwrap();
    for (i, found) in out.iter().enumerate() {
        let (matrix, row, column) = (i / 64, i % 64 / 8, i % 8);
        let dot: f32 = (0..16).map(|k| a[row * 16 + k] * b[(matrix * 8 + column) * 16 + k]).sum();
        let changed = matrix == 1 && column % 2 == 0;
        assert_eq!(*found, dot + if changed { 100.0 } else { 0.0 }, "{i}");
    }
}

#[test]
fn fragments_compile_for_cuda() {
    compiles(&product::instance::<f16>(), &[]);
    compiles(&product::instance::<f32>(), &[]);
}
