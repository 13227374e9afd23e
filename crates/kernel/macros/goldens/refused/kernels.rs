#[kernel]
fn no_threads(out: &mut Buffer<f32>) {}

#[kernel(threads = 32)]
fn no_output(x: &Buffer<f32>) {}

#[kernel(threads = 32, speed = 3)]
fn unknown(out: &mut Buffer<f32>) {}

#[kernel(threads = 32, threads <= 64)]
fn twice(out: &mut Buffer<f32>) {}

#[kernel(threads = 32, requires(out.len() > 3))]
fn no_message(out: &mut Buffer<f32>) {}

#[kernel(threads = 32, requires(size_of::<T>() == 2, "half"))]
fn types<T: Element>(out: &mut Buffer<T>) {}

#[kernel(threads = 32, bench(shape(n = [1, 2], m = [1]), bytes = 1))]
fn shapes(out: &mut Buffer<f32>) {}

#[kernel(threads = 32, bench(shape(n = [1, 2]), bytes = 1))]
fn no_flops(out: &mut Buffer<f32>) {}

#[kernel(threads = 32, bench(size(n = [1, 2])))]
fn sizes(out: &mut Buffer<f32>) {}

#[kernel(threads = 32)]
fn parameters<T: Element>(
    out: &mut Buffer<f32>,
    tile: &mut Shared<f32>,
    array: [f32; 4],
    generic: T,
    by_value: Params,
    reference: &mut Params,
    number: &mut f32,
    mut count: u32,
    groups: u32,
    threads: u32,
    #[constant] wide: u64,
    #[constant] table: &Buffer<f32>,
) -> u32 {
    3
}

#[kernel(threads = 33)]
fn odd_group(out: &mut Buffer<f32>) {}

#[kernel(threads = 2048)]
fn large_group(out: &mut Buffer<f32>) {}

#[kernel(threads <= 100)]
fn odd_limit(out: &mut Buffer<f32>) {}

#[kernel(threads = 32, derive(W = N / 8))]
fn derived_without_type<const N: usize>(out: &mut Buffer<f32>) {}

#[kernel(threads = 32, derive(W: f32 = 1.0, X: Display = 2))]
fn derived_of_no_kind(out: &mut Buffer<f32>) {}

#[kernel(threads = 32)]
const fn constant_kernel(out: &mut Buffer<f32>) {}
