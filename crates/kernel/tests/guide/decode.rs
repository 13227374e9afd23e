//! Attention of one query per head, in two passes.

use flashtile_kernel::prelude::*;

/// Keys of a block, which a threadgroup of the first pass attends to.
#[constant]
pub const BLOCK: u32 = 64;

/// Parameters of a launch.
#[params]
#[derive(Clone, Copy, Debug)]
pub struct Decode {
    /// Keys of each head.
    pub keys: u32,
    /// The factor of scores, times log2(e): `p` is a power of two.
    pub scale: f32,
}

/// The running state of the online softmax.
#[device]
pub struct Running<const N: usize> {
    /// The greatest score so far.
    pub row_max: f32,
    /// The sum of `p = 2^(score - row_max)`.
    pub row_sum: f32,
    /// This lane's elements of the sum of `p * value`.
    pub values: [f32; N],
}

/// Adds a key.
#[device]
pub fn fold<const N: usize>(state: &mut Running<N>, score: f32, value: [f32; N]) {
    let row_max = state.row_max.max(score);
    let before = (state.row_max - row_max).exp2();
    let p = (score - row_max).exp2();
    state.row_max = row_max;
    state.row_sum = state.row_sum * before + p;
    for i in 0..N {
        state.values[i] = state.values[i] * before + p * value[i];
    }
}

/// This lane's elements of a row.
#[device]
pub fn lane_of<T: Element, const N: usize>(rows: &Buffer<T>, row: u32) -> [f32; N] {
    let stored = rows.load::<N>((row * 32 + simd_lane()) as u64 * N as u64);
    let mut elements = [0.0; N];
    for i in 0..N {
        elements[i] = stored[i].to_f32();
    }
    elements
}

/// A threadgroup attends to one block of keys; heads have `32 * N` dimensions. Threadgroups are (heads, blocks).
#[kernel(
    threads = 128,
    requires(params.keys > 0, "there are keys"),
    requires(q.len() >= groups[0] as usize * 32 * N, "a query a head"),
    requires(k.len() >= groups[0] as usize * params.keys as usize * 32 * N, "k holds the keys of each head"),
    requires(v.len() >= groups[0] as usize * params.keys as usize * 32 * N, "v holds the values of each head"),
    requires(groups[1] == params.keys.div_ceil(BLOCK), "a group for each block"),
    requires(partial_out.len() >= (groups[0] * groups[1]) as usize * 32 * N, "the partial output of each block"),
    requires(row_max_sum.len() >= (groups[0] * groups[1]) as usize * 2, "row_max and row_sum of each block"),
)]
pub fn partials<T: Element, const N: usize>(
    q: &Buffer<T>,
    k: &Buffer<T>,
    v: &Buffer<T>,
    partial_out: &mut Buffer<f32>,
    row_max_sum: &mut Buffer<f32>,
    params: &Decode,
) {
    let mut values: Shared<f32> = shared(128 * N);
    let mut heads: Shared<f32> = shared(8);
    let head = group_x();
    let first = group_y() * BLOCK;
    let end = (first + BLOCK).min(params.keys);

    // Every SIMD group takes each fourth key of the block; its lanes share a row.
    let query = lane_of::<T, N>(q, head);
    let mut state = Running::<N> { row_max: f32::NEG_INFINITY, row_sum: 0.0, values: [0.0; N] };
    for key in (first + simd_index()..end).step_by(4) {
        let row = lane_of::<T, N>(k, head * params.keys + key);
        let mut dot = 0.0;
        for i in 0..N {
            dot += query[i] * row[i];
        }
        let score = simd_sum(dot) * params.scale;
        fold(&mut state, score, lane_of::<T, N>(v, head * params.keys + key));
    }

    // The four become one through shared memory.
    let lane = simd_lane() * N as u32;
    for i in 0..N {
        values[simd_index() * 32 * N as u32 + lane + i as u32] = state.values[i];
    }
    if simd_lane() == 0 {
        heads[2 * simd_index()] = state.row_max;
        heads[2 * simd_index() + 1] = state.row_sum;
    }
    barrier();
    let row_max = heads[0].max(heads[2]).max(heads[4]).max(heads[6]);
    let split = head * groups_y() + group_y();
    for d in (thread_index()..32 * N as u32).step_by(128) {
        let mut sum = 0.0;
        for i in 0..4u32 {
            sum += (heads[2 * i] - row_max).exp2() * values[i * 32 * N as u32 + d];
        }
        partial_out[split * 32 * N as u32 + d] = sum;
    }
    if thread_index() == 0 {
        let mut row_sum = 0.0;
        for i in 0..4u32 {
            row_sum += (heads[2 * i] - row_max).exp2() * heads[2 * i + 1];
        }
        row_max_sum[2 * split] = row_max;
        row_max_sum[2 * split + 1] = row_sum;
    }
}

/// Merges the blocks of a head into its output. A threadgroup merges one head.
#[kernel(
    threads <= 256,
    requires(splits > 0, "there are blocks"),
    requires(partial_out.len() >= (groups[0] * splits * dim) as usize, "the partial output of each block"),
    requires(row_max_sum.len() >= (groups[0] * splits) as usize * 2, "row_max and row_sum of each block"),
    requires(out.len() >= (groups[0] * dim) as usize, "an output a head"),
)]
pub fn merge<T: Element>(
    partial_out: &Buffer<f32>,
    row_max_sum: &Buffer<f32>,
    out: &mut Buffer<T>,
    splits: u32,
    dim: u32,
) {
    let first = group_x() * splits;
    let mut row_max = f32::NEG_INFINITY;
    for split in first..first + splits {
        row_max = row_max.max(row_max_sum[2 * split]);
    }
    let mut row_sum = 0.0;
    for split in first..first + splits {
        row_sum += (row_max_sum[2 * split] - row_max).exp2() * row_max_sum[2 * split + 1];
    }
    for d in (thread_index()..dim).step_by(threads() as usize) {
        let mut sum = 0.0;
        for split in first..first + splits {
            sum += (row_max_sum[2 * split] - row_max).exp2() * partial_out[split * dim + d];
        }
        out[group_x() * dim + d] = T::from_f32(sum / row_sum);
    }
}

use flashtile_kernel::simulator::Memory;
use flashtile_kernel::{Device, LaunchError};

/// Attention of `heads` queries, each to `keys` keys of its own, of 64 dimensions.
fn decode<T: Element, D: Device<Memory = Memory>>(
    device: &D,
    [q, k, v]: [&Memory; 3],
    heads: u32,
    keys: u32,
) -> Result<Vec<T>, LaunchError<D::Error>> {
    let blocks = keys.div_ceil(BLOCK);
    let splits = (heads * blocks) as usize;
    let mut partial_out = Memory::uninit::<f32>(splits * 64);
    let mut row_max_sum = Memory::uninit::<f32>(splits * 2);
    let mut out = Memory::uninit::<T>(heads as usize * 64);
    partials::Call {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        partial_out: partial_out.view_mut(),
        row_max_sum: row_max_sum.view_mut(),
        params: Decode { keys, scale: 64f32.sqrt().recip() * std::f32::consts::LOG2_E },
        groups: [heads, blocks, 1],
    }
    .launch::<T, 2>(device)?;
    merge::Call {
        partial_out: partial_out.view(),
        row_max_sum: row_max_sum.view(),
        out: out.view_mut(),
        splits: blocks,
        dim: 64,
        groups: [heads, 1, 1],
        threads: 64,
    }
    .launch::<T>(device)?;
    Ok(out.to_vec_or(T::from_f32(f32::NAN)).unwrap_or_default())
}

/// The definition, in f64.
fn attention(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let probs: Vec<f64> = k.chunks(64).map(|row| (dot(q, row) / 8.0).exp()).collect();
    let total: f64 = probs.iter().sum();
    let sum = |d: usize| v.chunks(64).zip(&probs).map(|(row, p)| p * f64::from(row[d])).sum::<f64>();
    (0..64).map(|d| (sum(d) / total) as f32).collect()
}

fn check<T: Element>(heads: u32, keys: u32, tolerance: f32) {
    use crate::anywhere::{devices, eighths};
    let n = (heads * keys) as usize * 64;
    let (q, k, v) = (eighths::<T>(heads as usize * 64, 1), eighths::<T>(n, 2), eighths::<T>(n, 3));
    let wide = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (wide_q, wide_k, wide_v) = (wide(&q), wide(&k), wide(&v));
    let memory = [&q, &k, &v].map(|x| Memory::from_slice(x));
    for device in devices() {
        let out = decode::<T, _>(&device, [&memory[0], &memory[1], &memory[2]], heads, keys).unwrap();
        if !device.runs() {
            continue;
        }
        let each = n / heads as usize;
        for head in 0..heads as usize {
            let (k, v) = (&wide_k[head * each..][..each], &wide_v[head * each..][..each]);
            for (d, want) in attention(&wide_q[head * 64..][..64], k, v).into_iter().enumerate() {
                let found = out[head * 64 + d].to_f32();
                assert!(
                    (found - want).abs() <= tolerance,
                    "{device}, {keys} keys, head {head}: {found} for {want}"
                );
            }
        }
    }
}

#[test]
fn any_number_of_keys_is_attended_to() {
    for keys in [1, 3, 63, 64, 65, 300] {
        check::<f32>(2, keys, 1e-5);
    }
    check::<f16>(1, 130, 4e-3);
}
