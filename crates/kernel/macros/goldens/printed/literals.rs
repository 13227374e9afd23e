#[device]
fn beside_known_types(a: i32, b: u32, c: i64, d: u64, n: usize) -> i64 {
    let mut e = c + -3000000000;
    e += -3000000000;
    e -= -0xb2d0_5e00;
    e ^= 3000000000;
    e &= -0b1000_0000_0000_0000_0000_0000_0000_0001;
    let least = (c & -9223372036854775808) + (a | -2147483648) as i64;
    let less = c < -2147483649 || -2147483648 > c || c == -2147483648 || a < -0x8000_0000;
    let twice = c * - -2147483648;
    let words = b ^ 0xffff_ffff ^ 4294967295;
    let wide = d ^ 18446744073709551615 ^ 3000000000 ^ 5000000000 ^ n as u64;
    e + if less { -3000000000 } else { 5 } + least + twice + words as i64 + wide as i64
}

#[device]
fn beside_unknown_types(s: Held, low: bool) -> bool {
    let mut t = s;
    t.wide += -3000000000;
    t.wide = -0xffff_ffff;
    t.wide -= if low { 3000000000 } else { -5 };
    t.wide ^= -(if low { 2147483648 } else { 7 });
    let a = s.wide + -4294967296 - -2147483648 + 4294967295;
    let b = -3000000000 - wide(-3000000000);
    let c = [s.wide, -3000000000, 3000000000];
    let d = 7 % s.wide + s.word as i64 % -3 + 3000000000 % t.wide + s.wide % t.wide;
    let e = s.word ^ if low { 3000000000 } else { 5 };
    let f = [-3000000000, 3000000000];
    a < -3000000000 && b > s.wide && c[1] == -5000000000 && d != 2147483648 && e > 2147483648 && f[0] < 0
}

#[device]
fn narrow(s: Held, low: bool) -> i8 {
    let a = -128i8;
    let b: [i16; 2] = [-32768, - -7];
    let c = [-5i8; 2];
    let d = if low { s.tiny } else { -5i8 };
    let e = -32768i16 as u16 as i32 + -1i8 as i32;
    if e < b[0] as i32 { a } else if low { c[0] } else { d }
}

#[device]
fn constants() -> i64 {
    let a = of::<-2147483648>() + of::<{ -3 }>();
    let b = [0u32; 0x10];
    let c = -3000000000 as i64 + -2147483648 as i64 + 0xffff_ffff as i64;
    let d = -5i64 as i32 + -3000000000i64 as i32;
    c + a + b[3] as i64 + d as i64
}
