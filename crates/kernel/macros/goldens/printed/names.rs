#[device]
fn shadows(x: u32) -> u32 {
    let x = x + 1;
    let y = x;
    {
        let x = y * x;
        let y = x;
        let _ = next(y);
    }
    let x_2 = x;
    for x in x..x_2 {
        let x = x;
        let _ = next(x);
    }
    for i in 0..x {
        let _ = next(i);
    }
    for i in 0..x {
        let _ = next(i);
    }
    x
}

#[device]
fn reserved(float: f32, int: u32, kernel: u32, float4: f32) -> f32 {
    let thread = float + int as f32;
    let new = thread * 2.0;
    let int = int + kernel;
    let half = int as f32;
    new + half + float4
}

#[device]
fn dot(next: u32) -> u32 {
    let load = next;
    let length = rows::load(load);
    length
}

/// Adds.
///
/// Twice.
#[device]
fn documented(x: f32) -> f32 {
    x + x
}
