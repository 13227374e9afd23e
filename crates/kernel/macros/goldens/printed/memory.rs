/// Parameters.
#[params]
pub struct Params {
    /// Rows.
    pub n: u32,
    pub scale: f32,
    pub strides: [u64; 3],
    pub signs: [[i32; 2]; 4],
    pub float: f32,
    pub last: u32,
}

#[kernel(threads = 32 * N)]
pub fn copy<T: Element, const N: usize>(
    x: &Buffer<T>,
    words: &Buffer<u32>,
    out: &mut Buffer<T>,
    counts: &mut Buffer<u32>,
    params: &Params,
    register: f32,
    #[constant] wide: bool,
) {
    let mut tile: Shared<f32> = shared(N * 32);
    let mut sums = shared::<u32>(LANES as usize);
    let i = thread_position();
    tile[i] = x[i].to_f32() * register;
    tile[thread_index()] += params.scale;
    sums[0] |= 1u32 << simd_lane();
    barrier();
    let lanes = simd_ballot(tile[i] > 0.0);
    let v = x.load::<4>(i * 4);
    let w = words.load_as::<u16, 8>(i);
    let first = x.load::<4>(i)[0];
    out.store(i * 4, [v[0], first, v[2], v[3]]);
    counts.store_as::<u32, 2>(i, [0, w[1] as u32]);
    let old = atomic_add(counts, 0, 1);
    atomic_max(&mut sums, 1, old);
    let mut seen = atomic_compare_exchange(counts, 1, 0, lanes);
    seen = atomic_exchange(counts, 2, seen);
    if atomic_add(counts, 3, 1) == params.n - 1 {
        seen = 0;
    }
    out[params.strides[1] + i as u64] = T::from_f32(LEVELS[(i % 4) as usize] + tables::BIAS);
    fill(out, &mut tile, &sums, params, v);
    let row = read_row::<T, N>(x, params);
    if wide && row[3] > 0.0 {
        counts[i] -= seen;
    }
}

#[device]
fn fill<T: Element>(
    out: &mut Buffer<T>,
    tile: &mut Shared<f32>,
    sums: &Shared<u32>,
    params: &Params,
    v: [T; 4],
) {
    for i in 0..params.n {
        out[i] = v[i % 4];
        tile[i] = sums[i] as f32;
    }
    fill_again(out, tile, sums, params);
    fill_again(&mut *out, &mut *tile, &*sums, params);
}

#[device]
fn arrays<const N: usize, const R: usize>(
    acc: &mut [[f32; N]; R],
    mut row: [f32; N],
    total: &mut f32,
    pair: &mut Pair,
) -> [[f32; N]; R] {
    let mut copy = *acc;
    for r in 0..R {
        for c in 0..N {
            acc[r][c] += row[c];
            copy[r][c] = acc[r][c] * *total;
            row[c] = 0.0;
        }
    }
    *total += row[0];
    pair.a = row[0];
    pair.values[1] += row[1];
    reset(&mut copy, total, &mut pair.a);
    copy
}

#[kernel(threads = 128)]
fn multiply<T: Element>(a: &Buffer<T>, b: &Buffer<T>, out: &mut Buffer<f32>) {
    let mut tile: Shared<f32> = shared(64);
    let mut acc = [Fragment::<f32>::zero(); 2];
    let left = Fragment::<T>::load(a, 0, 8);
    let right = Fragment::<T>::load_transposed(b, 8 * group_x(), 8);
    for i in 0..2u32 {
        acc[i] = Fragment::multiply_accumulate(&left, &right, &acc[i]);
    }
    acc[0].set_element(1, acc[1].element(0) * 2.0);
    acc[0].store(&mut tile, 0, 8);
    simd_barrier();
    acc[1].store(out, group_x() * 64, 8);
    out[0] = tile[0] + simd_sum(1.0) + simd_shuffle_xor(tile[1], 1);
}
