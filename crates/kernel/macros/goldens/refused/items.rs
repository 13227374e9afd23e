#[device]
pub const unsafe extern "C" fn f() {}

#[device]
async fn g() {}

#[device(fast)]
#[no_mangle]
fn select() {}

#[device]
fn ft_sum() {}

#[device]
fn __sum(_X: u32, ft_x: u32, größe: u32) {
    let a__b = 3u32;
    let ft_y = 3u32;
}

#[device]
fn sum_() {}

#[device]
fn shared() {}

#[device]
enum E {
    A,
}

#[device]
struct Tuple(f32, f32);

#[device]
struct Unit;

#[device]
struct Empty {}

#[device]
#[repr(packed)]
struct Fields<T> {
    a: f64,
    b: Buffer<f32>,
    #[serde(skip)]
    c: u32,
    ft_d: u32,
}

#[device]
struct Buffer {
    a: f32,
}

#[params(align)]
struct P<T: Element> {
    a: u8,
    b: bool,
    c: f16,
    d: Pair,
    e: [u16; 2],
    f: T,
}

#[params]
fn not_a_struct() {}

#[constant]
const PAIR: Pair = Pair { a: 1 };

#[constant(x)]
const NESTED: [[f32; 2]; 2] = [[0.0; 2]; 2];

#[constant]
const ft_TABLE: [f32; 2] = [0.0; 2];

#[constant]
static TABLE: [f32; 2] = [0.0; 2];

#[device]
struct Memory<'a> {
    a: &'a mut Buffer<f32>,
    b: &'a Shared<f32>,
    c: &'a f32,
    d: Buffer<f32>,
}

#[params]
struct Launch<'a> {
    a: &'a Buffer<f32>,
}
