#[device]
fn loops(n: u32, m: usize) -> f32 {
    let mut sum = 0.0;
    for i in 0..n {
        sum += i as f32;
    }
    for i in 0..n * 2 {
        if i == 3 {
            continue;
        }
        sum += i as f32;
    }
    for i in 1..=n {
        sum += i as f32;
    }
    for i in 1..=8u32 {
        sum += i as f32;
    }
    for i in (0..n).step_by(4) {
        sum += i as f32;
    }
    let mut step = 1usize;
    for i in (n..n + 100).step_by(step) {
        step += 1;
        sum += i as f32;
    }
    for i in (0..n).rev() {
        sum += i as f32;
    }
    for i in (n..n * n).rev() {
        sum += i as f32;
    }
    #[unroll]
    for i in 0..m {
        sum += i as f32;
    }
    for _ in 0..4u32 {
        sum += 1.0;
    }
    let mut j = n;
    while j > 0 && sum < 100.0 {
        j -= 1;
        loop {
            sum -= 1.0;
            if sum < 50.0 {
                break;
            }
        }
    }
    for i in 0..count(n) {
        sum += i as f32;
    }
    sum
}

#[device]
fn constants<const N: usize, const WIDE: bool>(x: [f32; N]) -> f32 {
    const {
        assert!(N % 4 == 0 && N >= 8, "N is a multiple of 4");
    }
    let mut sum = 0.0;
    for i in 0..N {
        sum += x[i];
    }
    for i in (0..N).step_by(8) {
        sum += x[i];
    }
    for i in (0..N).rev() {
        sum += x[i];
    }
    for i in 0..=N {
        sum -= i as f32;
    }
    if WIDE { sum * 2.0 } else { sum }
}

#[device]
fn values(a: u32, b: bool, params: &Params) -> u32 {
    let x = if b { a } else { 0 };
    let y = if a > 3 { 1 } else if a > 2 { x } else { 3 };
    let z: u32 = if b {
        let t = a * 2;
        t + 1
    } else if a == 7 {
        return 5;
    } else {
        y
    };
    let w: u32 = {
        let t = z * z;
        t + 1
    };
    let mut v = { w };
    v = if b { v } else { v + 1 };
    v = if b {
        let t = v + 1;
        t * t
    } else {
        v + 1
    };
    {
        let v = 5u32;
        let _ = next(v);
        next(v);
    }
    let u = select(params.n > a, params.n, 7);
    if a > u {
        return if b { v } else { w };
    }
    if v > 3 {
        let s = v;
        s
    } else {
        v
    }
}

#[device]
fn nothing(x: &mut f32) {
    if *x < 0.0 {
        return;
    }
    *x = x.sqrt();
    *x *= 2.0;
}

#[device]
fn steps(low: i32, high: i32, from: i64, ends: Ends, mut step: u32) -> i64 {
    let mut sum = 0i64;
    for i in (low..high).step_by(4) { sum += i as i64; }
    for i in (-7..high - low).step_by(step as usize) { step += 1; sum += i as i64; }
    for _ in (low + 1..1).step_by(3) { sum += 1; }
    for i in (from..-3_000_000_000).step_by(5_000_000_000) { sum += i; }
    for i in (ends.low..ends.high).step_by(2) { sum += i as i64; }
    for i in (0..ends.high).step_by(2) { sum += i as i64; }
    for i in (-8..8i32).step_by(2) { sum += i as i64; }
    sum
}
