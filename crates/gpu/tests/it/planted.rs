//! Copies of kernels with one mistake each: the simulator finds it, and where it is.

use flashtile_gpu::kernels::merge::{Merge, merge};
use flashtile_gpu::kernels::rotation::hadamard;
use flashtile_gpu::kernels::{encode, mask_tiles};
use flashtile_gpu::native_encode;
use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Fault, FaultKind, Memory, Simulator};
use flashtile_kernel::{ContractErrorKind, LaunchError};

/// The line that a comment marks.
fn marked(mark: &str) -> u32 {
    let comment = format!("// mistake: {mark}");
    let lines = include_str!("planted.rs").lines().position(|line| line.trim() == comment);
    lines.unwrap() as u32 + 2
}

fn fault<E: std::fmt::Debug>(result: Result<(), LaunchError<E>>) -> E {
    match result {
        Err(LaunchError::Device(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// Which condition of a contract is broken.
fn broken<E: std::fmt::Debug>(result: Result<(), LaunchError<E>>) -> &'static str {
    match result {
        Err(LaunchError::Contract(broken)) => match broken.what {
            ContractErrorKind::Requirement { message, .. } => message,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// The end of `mask_tiles`, where SIMD groups tell each other what they found.
#[kernel(threads = 128)]
fn no_barrier(kinds: &Buffer<u32>, all_kinds: &mut Buffer<u32>) {
    let mut found: Shared<u32> = shared(4);
    let all = simd_max(kinds[thread_index()]);
    if simd_lane() == 0 {
        // mistake: written
        found[simd_index()] = all;
    }
    if thread_index() == 0 {
        // mistake: read
        all_kinds[0] = found[0] | found[1] | found[2] | found[3];
    }
}

#[test]
fn a_missing_barrier_is_a_race() {
    let kinds = Memory::from_slice(&[1u32; 128]);
    for seed in 0..20 {
        let mut all_kinds = Memory::uninit::<u32>(1);
        let call =
            no_barrier::Call { kinds: kinds.view(), all_kinds: all_kinds.view_mut(), groups: [1, 1, 1] };
        let found = fault(call.launch(&Simulator::new().seed(seed)));
        match found.kind {
            FaultKind::Race => assert!([marked("read"), marked("written")].contains(&found.line), "{found}"),
            // The other SIMD group is still before the write.
            FaultKind::Uninitialised => assert_eq!(found.line, marked("read"), "{found}"),
            _ => panic!("{found}"),
        }
        assert!(found.file.ends_with("planted.rs") && found.kernel == "no_barrier");
    }
}

/// The butterflies of a rotation.
#[kernel(threads = 32)]
fn no_simd_barrier<const D: usize>(x: &mut Buffer<f32>) {
    let mut row: Shared<f32> = shared(D);
    for at in (simd_lane()..D as u32).step_by(32) {
        row[at] = x[at];
    }
    simd_barrier();
    let mut distance = 1u32;
    while distance < D as u32 {
        for at in (simd_lane()..(D / 2) as u32).step_by(32) {
            let low = at / distance * (2 * distance) + at % distance;
            // mistake: first
            let a = row[low];
            let b = row[low + distance];
            row[low] = a + b;
            row[low + distance] = a - b;
        }
        distance *= 2;
    }
    simd_barrier();
    for at in (simd_lane()..D as u32).step_by(32) {
        x[at] = row[at];
    }
}

#[test]
fn a_missing_barrier_of_lanes_is_a_race() {
    for seed in 0..20 {
        let mut x = Memory::from_slice(&[1.0f32; 64]);
        let call = no_simd_barrier::Call { x: x.view_mut(), groups: [1, 1, 1] };
        let found = fault(call.launch::<64>(&Simulator::new().seed(seed)));
        assert_eq!(found.kind, FaultKind::Race, "{found}");
        assert!((marked("first")..marked("first") + 4).contains(&found.line), "{found}");
    }
}

/// Rows as `hadamard` reads them.
#[kernel(threads = 128)]
fn one_more<const D: usize>(x: &Buffer<f32>, out: &mut Buffer<f32>, rows: u32) {
    let row = 4 * group_x() + simd_index();
    if row <= rows {
        for at in (simd_lane()..D as u32).step_by(32) {
            // mistake: a row more
            let number = x[row as u64 * D as u64 + at as u64];
            out[row as u64 * D as u64 + at as u64] = number;
        }
    }
}

#[test]
fn a_row_too_many_is_out_of_bounds() {
    let (x, mut out) = (Memory::from_slice(&[1.0f32; 3 * 64]), Memory::uninit::<f32>(3 * 64));
    let call = one_more::Call { x: x.view(), out: out.view_mut(), rows: 3, groups: [1, 1, 1] };
    let found: Fault = fault(call.launch::<64>(&Simulator::new()));
    assert_eq!((found.kind, found.line), (FaultKind::OutOfBounds, marked("a row more")), "{found}");
    assert!(found.thread >= 96 && found.message.contains("x has 192 elements"), "{found}");
}

/// The greatest magnitude of a row, where 32 lanes do not divide the row.
#[kernel(threads = 32)]
fn in_the_loop<const D: usize>(x: &Buffer<f32>, out: &mut Buffer<f32>) {
    let mut most = 0.0;
    for c in (simd_lane()..D as u32).step_by(32) {
        let size = x[c].abs();
        // mistake: some lanes
        most = simd_max(size).max(most);
    }
    // mistake: other lanes
    most = simd_max(most);
    if simd_lane() == 0 {
        out[0] = most;
    }
}

#[test]
fn a_simd_operation_of_some_lanes_is_divergent() {
    let x = Memory::from_slice(&[1.0f32; 96]);
    let mut out = Memory::uninit::<f32>(1);
    let call = in_the_loop::Call { x: x.view(), out: out.view_mut(), groups: [1, 1, 1] };
    call.launch::<96>(&Simulator::new()).unwrap();
    let call = in_the_loop::Call { x: x.view(), out: out.view_mut(), groups: [1, 1, 1] };
    let found: Fault = fault(call.launch::<80>(&Simulator::new()));
    assert_eq!(found.kind, FaultKind::DivergentSimd, "{found}");
    let (here, there) = (marked("some lanes"), marked("other lanes"));
    assert!(found.line == here || found.line == there, "{found}");
    let other = format!("planted.rs:{}", here + there - found.line);
    assert!(found.message.contains(&other), "{found}: not {other}");
}

/// The size of a coordinate, of which an f32 in fixed point has 15 bits.
#[kernel(threads = 32)]
fn wide(x: &Buffer<f32>, out: &mut Buffer<u32>) {
    let size = x[thread_index()].abs() as u32;
    // mistake: a product
    out[thread_index()] = size * size;
}

#[test]
fn a_product_of_more_than_32_bits_is_a_fault() {
    let mut x = [32767.0f32; 32];
    x[9] = 65536.0;
    let (x, mut out) = (Memory::from_slice(&x), Memory::uninit::<u32>(32));
    let found: Fault =
        fault(wide::Call { x: x.view(), out: out.view_mut(), groups: [1, 1, 1] }.launch(&Simulator::new()));
    assert_eq!(
        (found.kind, found.line, found.lane),
        (FaultKind::Arithmetic, marked("a product"), 9),
        "{found}"
    );
}

#[test]
fn launches_that_are_not_the_kernels_are_refused() {
    let simulator = Simulator::new();
    let (x, mut out) = (Memory::from_slice(&[0.0f32; 5 * 64]), Memory::uninit::<f32>(5 * 64));
    let factors = Memory::from_slice(&[0.0f32; 65]);
    let mut rotated = |rows: u32, groups: u32, factors: &Memory| {
        let (x, out, factors) = (x.view(), out.view_mut(), factors.view());
        broken(
            hadamard::Call { x, factors, out, rows, back: false, groups: [groups, 1, 1] }
                .launch::<64, 1>(&simulator),
        )
    };
    assert_eq!(rotated(5, 1, &factors), "a SIMD group for each row");
    assert_eq!(rotated(6, 2, &factors), "x and out hold the rows");
    assert_eq!(
        rotated(5, 2, &Memory::from_slice(&[0.0f32; 64])),
        "a factor for each coordinate, and a root for each block"
    );

    let (mask, mut tiles) = (Memory::from_slice(&[0u8; 64]), Memory::uninit::<u8>(4));
    let mut refused = |heads: u32, groups: [u32; 3]| {
        let params = mask_tiles::Mask {
            heads,
            queries: 8,
            keys: 8,
            rows: 4,
            columns: 4,
            kind: 3,
            ..Default::default()
        };
        broken(
            mask_tiles::mask_tiles::Call { mask: mask.view(), params, mask_tiles: tiles.view_mut(), groups }
                .launch(&simulator),
        )
    };
    assert_eq!(refused(1, [1, 2, 1]), "a group for each block of keys");
    assert_eq!(refused(1, [2, 3, 1]), "a group for each block of queries");
    assert_eq!(refused(2, [2, 2, 1]), "all heads of every sequence");
    assert_eq!(refused(1, [2, 2, 2]), "a byte for each group");

    let (words, mut pages, mut status) =
        (Memory::from_slice(&[0u32; 320]), Memory::from_slice(&[0u8; 64]), Memory::from_slice(&[0u32]));
    let mut appended = |runs: u32, page: u32, [centered, equalized]: [bool; 2]| {
        let call = encode::encode::Call {
            x: x.view(),
            means: factors.view(),
            inverses: factors.view(),
            factors: factors.view(),
            numbers: words.view(),
            table: words.view(),
            runs: words.view(),
            params: encode::Rows { heads: 2, page, width: 1, dim: 64, ..Default::default() },
            pages: pages.view_mut(),
            status: status.view_mut(),
            centered,
            equalized,
            unbiased: true,
            groups: [1, runs, 1],
        };
        broken(call.launch_instance(&simulator, &native_encode!(f32, 3, 64)))
    };
    assert_eq!(appended(41, 8, [false; 2]), "a run for each y");
    assert_eq!(appended(40, 0, [false; 2]), "pages have rows");
    assert_eq!(appended(40, 8, [true, false]), "a mean for each head");
    assert_eq!(appended(40, 8, [false, true]), "an inverse factor for each coordinate of each head");
}

#[test]
fn memory_that_is_too_short_for_a_kernel_is_refused() {
    let numbers = |len: usize| Memory::from_slice(&vec![0.0f32; len]);
    // Two queries of three heads, of two partial results of 64 numbers each; rows of out are 80 apart.
    let params = Merge { out: [480, 160, 80], q_heads: 3, queries: 2, splits: 2, simds: 1 };
    let lens = [6 * 2 * 64, 6 * 2 * 2, 3, 400 + 64, 6];
    let merged = |lens: [usize; 5]| {
        let [partial_out, partial_max_sum, sinks, mut out, mut lse] = lens.map(numbers);
        let factors = numbers(1);
        merge::Call {
            partial_out: partial_out.view(),
            partial_max_sum: partial_max_sum.view(),
            factors: factors.view(),
            sinks: sinks.view(),
            params,
            out: out.view_mut(),
            lse: lse.view_mut(),
            has_sinks: true,
            with_lse: true,
            has_shift: false,
            groups: [2, 3, 1],
        }
        .launch::<f32, 64, 0>(&Simulator::new())
    };
    merged(lens).unwrap();
    let said = [
        "a partial output of every split",
        "a maximum and a sum of every split",
        "a sink for each head",
        "out reaches to its last row",
        "a logsumexp for each row",
    ];
    for (n, said) in said.into_iter().enumerate() {
        let mut short = lens;
        short[n] -= 1;
        assert_eq!(broken(merged(short)), said);
    }

    let params = mask_tiles::Mask {
        strides: [0, 0, 40],
        step: 1,
        kind: 1,
        heads: 1,
        queries: 3,
        keys: 33,
        rows: 2,
        columns: 32,
        unused: 0,
    };
    let launched = |bytes: usize| {
        let (mask, mut tiles) = (Memory::from_slice(&vec![0u8; bytes]), Memory::uninit::<u8>(4));
        mask_tiles::mask_tiles::Call {
            mask: mask.view(),
            params,
            mask_tiles: tiles.view_mut(),
            groups: [2, 2, 1],
        }
        .launch(&Simulator::new())
    };
    launched(2 * 113).unwrap();
    assert_eq!(broken(launched(2 * 113 - 1)), "mask reaches to its last element");
}
