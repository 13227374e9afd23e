#[device]
fn f(x: u32, a: [f32; 4]) {
    for i in a {}
    for i in a.iter() {}
    for (i, v) in a.iter().enumerate() {}
    for i in 0.. {}
    for i in ..x {}
    for i in .. {}
    for i in 0..4 {}
    for i in -1..=1 {}
    for mut i in 0..x {}
    for i in (0..x).rev().rev() {}
    for i in (0..x).rev().step_by(2) {}
    for i in (0..x).step_by(2).rev() {}
    for i in (0..x).step_by(2).step_by(2) {}
    for i in (0..=x).rev() {}
    for i in (0..=x).step_by(2) {}
    for i in (0..x).map(|i| i + 1) {}
    for i in x {
        let n = 0;
    }
}
