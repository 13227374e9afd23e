#[device]
fn f<'a, T, U: Copy, V: Element + Copy, W: Element = f32, const N: u8, const M: usize = 3, int: Element, ft_t: Element>(
    a: f64,
    b: isize,
    c: i128,
    d: char,
    e: &str,
    g: (u32, u32),
    h: [u32],
    i: *const u32,
    j: fn(u32) -> u32,
    k: impl Element,
    l: Box<dyn Element>,
    m: &u32,
    n: &[f32; 4],
    o: Buffer<f32>,
    p: Shared<f32>,
    q: &Buffer<Pair>,
    r: &Buffer,
    s: &&Buffer<f32>,
    t: &'a Buffer<f32>,
    u: <T as Iterator>::Item,
    v: T::Item<u32>,
    w: _,
    x: [f32; n],
    (y, z): (u32, u32),
    #[constant] aa: u32,
    #[cfg(test)] ab: u32,
    self_: Self,
    N_: N,
) -> &Buffer<f32>
where
    T: Element,
{
    let y: f64 = 1.0;
    let z: &u32 = a;
    let w: _ = a;
    a
}

#[device]
fn g(&self) -> ! {}

#[device]
fn h() -> (u32, u32) {}

#[device]
fn i() -> Buffer<f32> {}
