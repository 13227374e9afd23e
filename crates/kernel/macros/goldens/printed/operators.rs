#[device]
fn integers(a: u32, b: u32, c: i32, d: u64, n: usize) -> u32 {
    let sum = a + b * 3 - (a - b);
    let bits = (a & 0xff) | b << 8 ^ a >> 4;
    let mask = a & b == 0;
    let other = !a;
    let negative = -c;
    let remainder = a % b;
    let wide = d * 3_000_000_000 + 5;
    let wider = d + 0xffff_ffff_ffff_ffff;
    let large = a & 0x8000_0000;
    let place = n * 4 + a as usize;
    let least = c + -2147483648;
    let nested = a - (b - (c as u32));
    let compared = (a < b) == (c < 3) && !mask || a >= 7;
    if compared { sum } else { bits + other + negative as u32 + remainder + wide as u32 + wider as u32 + large + place as u32 + least as u32 + nested }
}

#[device]
fn floats(x: f32, y: f32) -> f32 {
    let a = x * 2.0 + 1. - 1e-3;
    let b = -x.exp2() * (-1.5f32).max(y);
    let c = x.mul_add(y, 0.5).clamp(0.0, 1f32);
    let d = if x < y { f32::NEG_INFINITY } else { f32::MAX };
    let e = f32::from_bits(x.to_bits() ^ 0x8000_0000);
    a + b / c - d * e
}

#[device]
fn bools(a: bool, b: bool) -> bool {
    let both = a & b;
    let either = (a | b) ^ !both;
    let mut all = a && b || !either;
    all &= b;
    all ^= true;
    all == either
}

#[device]
fn literals() -> u64 {
    let a = 1u32;
    let b = 2i32;
    let c = 3u64;
    let d: u8 = 4;
    let e: i64 = -5;
    let f = 0xffu32;
    let g: usize = 8;
    let h = -2147483648i32;
    let i: i64 = -9223372036854775808;
    let j = 4_294_967_295u32;
    let k = b'a';
    let l: u64 = 18446744073709551615;
    let m = [0u32, 1, 2];
    let n: [u16; 3] = [0, 1, 2];
    let o = [[0.0; 4]; 2];
    let p: [[u32; 2]; 2] = [[0; 2], [1, 2]];
    let q = u32::MAX - i32::BITS;
    c + a as u64 + b as u64 + d as u64 + e as u64 + f as u64 + g as u64 + h as u64 + i as u64 + j as u64 + k as u64 + l + m[0] as u64 + n[1] as u64 + o[0][1] as u64 + p[1][1] as u64 + q as u64
}

#[device]
fn casts<const N: usize>(x: f32, i: i32, u: u8) -> u32 {
    let a = x as u32;
    let b = i as u32;
    let c = u as u32;
    let d = N as u32;
    let e = 5 as u64;
    let f = -1 as i64;
    let g = i as f32;
    let h = i as u8 as i8 as i32;
    a + b + c + d + e as u32 + f as u32 + g as u32 + h as u32
}

#[device]
fn methods(a: u32, b: i32, d: u64, x: f32) -> u32 {
    let p = a.min(7).max(b.unsigned_abs()).clamp(1, 9);
    let q = a.wrapping_add(5).rotate_left(3).count_ones();
    let r = d.saturating_sub(1).leading_zeros() + b.abs_diff(-3);
    let s = select(x.is_nan(), 0, p);
    let t = select(x > 0.0, 1, b);
    p + q + r + s + t as u32 + x.round_ties_even() as u32
}

#[device]
fn remainders(x: f32, y: f32, a: u32, s: Held) -> f32 {
    let mut left = x % y + x % 3.0 * 2.0;
    left %= y + 1.0;
    let mut t = s;
    t.x %= y;
    t.n %= 7;
    t.n %= a;
    t.n %= s.n;
    left + t.x % s.x + (t.n % 5 + 5 % t.n + s.n % t.n) as f32
}
