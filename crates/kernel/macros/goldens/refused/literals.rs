#[device]
fn f() -> f32 {
    let a = 1f64;
    let b = 1.0f64;
    let c = 1isize;
    let d = 1i128;
    let e = 1u128;
    let f = 0x1_0000_0000_0000_0000;
    let g = 1_0000_0000_0000_0000_0000u64;
    1.0
}
