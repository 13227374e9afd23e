//! The parts of the language, one by one.

use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{FaultKind, Memory, Simulator};
use flashtile_kernel::{Generic, Kernel, LaunchError, ScalarType, Target};

/// What a code of 4 bits stands for.
#[constant]
pub const LEVELS: [f32; 16] = levels();

const fn levels() -> [f32; 16] {
    let mut table = [0.0; 16];
    let mut n = 0;
    while n < 16 {
        table[n] = n as f32 - 7.5;
        n += 1;
    }
    table
}

/// The least and the greatest.
#[device]
pub struct Range {
    pub low: f32,
    pub high: f32,
}

#[device]
pub fn widen(range: &mut Range, x: f32) {
    range.low = range.low.min(x);
    range.high = range.high.max(x);
}

/// The range of each row of `32 * N` packed codes, a SIMD group a row.
#[kernel(threads = 32, requires(codes.len() >= groups[0] as usize * 16 * N, "a row a group"))]
pub fn ranges<const N: usize>(codes: &Buffer<u8>, out: &mut Buffer<f32>, #[constant] signed: bool) {
    const {
        assert!(N % 8 == 0, "a lane has whole words");
    }
    let mut range = Range { low: f32::INFINITY, high: f32::NEG_INFINITY };
    for word in 0..N as u32 / 8 {
        // Four bytes from element `i` on, as one word: `i` is a multiple of 4.
        let i = group_x() * 16 * N as u32 + 4 * (word * 32 + simd_lane());
        let bits = codes.load_as::<u32, 1>(i)[0];
        for n in 0..8u32 {
            let level = LEVELS[bits >> (4 * n) & 15];
            widen(&mut range, if signed { level } else { level + 7.5 });
        }
    }
    let low = simd_min(range.low);
    let high = simd_max(range.high);
    if simd_lane() == 0 {
        out[2 * group_x()] = low;
        out[2 * group_x() + 1] = high;
    }
}

#[test]
fn packed_codes_are_read_as_words() {
    let codes: Vec<u8> = (0..3 * 256).map(|i| if i < 256 { 0x73 } else { (i * 7 % 251) as u8 }).collect();
    for signed in [true, false] {
        let value = |code: u8| f32::from(code) - if signed { 7.5 } else { 0.0 };
        let row = |row: &[u8]| {
            let values = row.iter().flat_map(|byte| [value(byte & 15), value(byte >> 4)]);
            values.fold([f32::MAX, f32::MIN], |[low, high], x| [low.min(x), high.max(x)])
        };
        let expected: Vec<f32> = codes.chunks(256).flat_map(row).collect();
        crate::anywhere::everywhere(&expected, |device| {
            let (codes, mut out) = (Memory::from_slice(&codes), Memory::from_slice(&[0f32; 6]));
            ranges::Call { codes: codes.view(), out: out.view_mut(), signed, groups: [3, 1, 1] }
                .launch::<16>(device)
                .unwrap();
            out.to_vec().unwrap()
        });
    }
}

/// Rows of a matrix in the order of a table.
#[device]
pub struct TableRows<'a, T: Element> {
    pub elements: &'a Buffer<T>,
    pub table: &'a Buffer<u32>,
    pub columns: u32,
}

/// The sum of row `n` of the table.
#[device]
pub fn sum_of_row<T: Element>(rows: TableRows<T>, n: u32) -> f32 {
    let start = rows.table[n] * rows.columns;
    let mut sum = 0.0;
    for i in (simd_lane()..rows.columns).step_by(32) {
        sum += rows.elements[start + i].to_f32();
    }
    simd_sum(sum)
}

/// The sum of each row of a table, a SIMD group a row.
#[kernel(threads = 32, requires(table.len() >= groups[0] as usize, "a row a group"))]
pub fn table_sums<T: Element>(
    elements: &Buffer<T>,
    table: &Buffer<u32>,
    out: &mut Buffer<f32>,
    columns: u32,
) {
    let rows = TableRows::<T> { elements, table, columns };
    let sum = sum_of_row(rows, group_x());
    if simd_lane() == 0 {
        out[group_x()] = sum;
    }
}

#[test]
fn structs_hold_buffers_everywhere() {
    let elements: Vec<f32> = (0..3 * 40).map(|i| i as f32).collect();
    let row = |n: usize| elements[40 * n..40 * (n + 1)].iter().sum::<f32>();
    crate::anywhere::everywhere(&vec![row(2), row(0), row(2), row(1)], |device| {
        let (elements, table) = (Memory::from_slice(&elements), Memory::from_slice(&[2u32, 0, 2, 1]));
        let mut out = Memory::from_slice(&[0f32; 4]);
        table_sums::Call {
            elements: elements.view(),
            table: table.view(),
            out: out.view_mut(),
            columns: 40,
            groups: [4, 1, 1],
        }
        .launch::<f32>(device)
        .unwrap();
        out.to_vec().unwrap()
    });
}

/// Words of each lane, of a row of `dim` codes of `bits` bits.
#[device]
pub const fn words_of_lane(dim: usize, bits: usize) -> usize {
    dim * bits / 1024
}

/// The sum of each row of `D` packed codes, a SIMD group a row.
#[kernel(
    threads = 32,
    derive(WORDS: usize = words_of_lane(D, BITS)),
    requires(codes.len() >= groups[0] as usize * 32 * WORDS, "a row a group"),
)]
pub fn code_sums<const D: usize, const BITS: usize>(codes: &Buffer<u32>, out: &mut Buffer<u32>) {
    let mut words = [0u32; WORDS];
    for i in 0..WORDS {
        words[i] = codes[(group_x() * WORDS as u32 + i as u32) * 32 + simd_lane()];
    }
    let mut sum = 0u32;
    for i in 0..WORDS {
        for n in 0..32 / BITS as u32 {
            sum += words[i] >> (n * BITS as u32) & ((1u32 << BITS as u32) - 1);
        }
    }
    let sum = simd_sum(sum);
    if simd_lane() == 0 {
        out[group_x()] = sum;
    }
}

#[test]
fn generics_are_derived_everywhere() {
    let codes: Vec<u32> = (0..2 * 64).map(|i: u32| i.wrapping_mul(2_654_435_761)).collect();
    let sum = |row: &[u32]| row.iter().flat_map(|word| word.to_le_bytes()).map(u32::from).sum::<u32>();
    let expected: Vec<u32> = codes.chunks(64).map(sum).collect();
    crate::anywhere::everywhere(&expected, |device| {
        let (codes, mut out) = (Memory::from_slice(&codes), Memory::from_slice(&[0u32; 2]));
        code_sums::Call { codes: codes.view(), out: out.view_mut(), groups: [2, 1, 1] }
            .launch::<256, 8, 2>(device)
            .unwrap();
        out.to_vec().unwrap()
    });
    let chosen = code_sums::specialise(&[Generic::Usize(256), Generic::Usize(8)]).unwrap();
    assert_eq!(chosen.all_generics(), [256, 8, 2].map(Generic::Usize));
    assert_eq!(chosen.entry(), "code_sums_256_8");
    assert_eq!(chosen.source(Target::Cuda), code_sums::instance::<256, 8, 2>().source(Target::Cuda));
    let by_formula = code_sums::instance::<256, 8, { code_sums::derived(256, 8).WORDS }>();
    assert_eq!(chosen.all_generics(), by_formula.all_generics());
    assert!(chosen.rust_source().contains("// WORDS = words_of_lane(D, BITS) = 2\n"));
}

/// Statements.
#[device]
pub fn statements(n: u32, flag: bool) -> u32 {
    let mut sum = 0u32;
    for i in (0..n).step_by(2) {
        if i == 10 {
            continue;
        }
        sum += i;
    }
    for i in (0..n).rev() {
        sum = sum * 3 % 1009 + i;
    }
    let mut x = n;
    while x > 1 {
        x = if x % 2 == 0 { x / 2 } else { 3 * x + 1 };
        sum += 1;
    }
    let last: u32 = if flag {
        let twice = sum * 2;
        twice + 1
    } else {
        sum
    };
    #[unroll]
    for i in 0..n.min(4) {
        sum += i;
    }
    loop {
        if sum > last {
            return sum;
        }
        sum += 7;
    }
}

/// How often each number below 8 occurs.
#[kernel(threads = 64, requires(counts.len() >= 8, "8 counts"), requires(x.len() >= n as usize, "n numbers"))]
pub fn histogram(x: &Buffer<u32>, counts: &mut Buffer<u32>, n: u32) {
    let mut here: Shared<u32> = shared(8);
    if thread_index() < 8 {
        here[thread_index()] = 0;
    }
    barrier();
    let i = thread_position();
    if i < n {
        atomic_add(&mut here, x[i] % 8, 1);
    }
    barrier();
    if thread_index() < 8 {
        atomic_add(counts, thread_index(), here[thread_index()]);
    }
}

#[test]
fn atomics_count_everywhere() {
    let x: Vec<u32> = (0..200).map(|i| i * i).collect();
    let mut expected = vec![0u32; 8];
    x.iter().for_each(|x| expected[(x % 8) as usize] += 1);
    crate::anywhere::everywhere(&expected, |device| {
        let (x, mut counts) = (Memory::from_slice(&x), Memory::from_slice(&[0u32; 8]));
        histogram::Call { x: x.view(), counts: counts.view_mut(), n: 200, groups: [4, 1, 1] }
            .launch(device)
            .unwrap();
        counts.to_vec().unwrap()
    });
}

/// Sums of eight rows of statements.
#[kernel(threads = 32)]
pub fn stated(out: &mut Buffer<u32>) {
    out[thread_index()] = statements(thread_index(), thread_index() % 2 == 0);
}

#[test]
fn statements_mean_the_same_everywhere() {
    let expected: Vec<u32> = (0..32).map(|n| statements(n, n % 2 == 0)).collect();
    crate::anywhere::everywhere(&expected, |device| {
        let mut out = Memory::from_slice(&[0u32; 32]);
        stated::Call { out: out.view_mut(), groups: [1, 1, 1] }.launch(device).unwrap();
        out.to_vec().unwrap()
    });
}

/// A copy, with what is needed to measure it.
#[kernel(
    threads = 256,
    requires(x.len() >= n as usize && out.len() >= n as usize, "n numbers"),
    bench(
        shape(n = [1 << 20, 1 << 24]),
        bytes = 8 * n,
        flops = 0,
        tolerance = 0.0,
    ),
)]
pub fn copy(x: &Buffer<f32>, out: &mut Buffer<f32>, n: u32) {
    let i = thread_position();
    if i < n {
        out[i] = x[i];
    }
}

#[test]
fn a_kernel_says_what_to_measure() {
    let bench = copy::KERNEL.bench.unwrap();
    let bytes: Vec<u64> = bench.shapes.iter().map(|shape| (bench.bytes)(shape)).collect();
    assert_eq!(bytes, [8 << 20, 8 << 24]);
}

#[test]
fn texts_are_printed() {
    let half = ranges::instance::<16>();
    let same = ranges::specialise(&[Generic::Usize(16)]).unwrap();
    assert_eq!(half.source(Target::Metal), same.source(Target::Metal));
    assert_eq!(half.entry(), "ranges_16");
    assert!(crate::sums::row_sums::specialise(&[Generic::Type(ScalarType::U32)]).is_err());
}

/// The kernels of a library.
pub static KERNELS: &[&Kernel] = &[&ranges::KERNEL, &histogram::KERNEL, &copy::KERNEL];

#[test]
fn a_registry_is_a_list() {
    let names: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
    assert_eq!(names, ["ranges", "histogram", "copy"]);
}

/// Faults, by number.
#[kernel(threads = 32)]
pub fn faulty(x: &Buffer<f32>, out: &mut Buffer<f32>, which: u32) {
    let mut tile: Shared<f32> = shared(32);
    let i = thread_index();
    if which == 0 {
        out[i] = x[i + 1];
    } else if which == 1 {
        out[i] = tile[i];
    } else if which == 2 {
        out[0u32] = x[i];
    } else if which == 3 {
        if i < 16 {
            barrier();
        }
    } else if which == 4 {
        if i < 16 {
            out[i] = simd_sum(x[i]);
        }
    } else if which == 5 {
        out[i] = simd_shuffle(x[i], i + 1);
    } else if which == 6 {
        out[i] = x.load::<2>(i % 2)[0];
    } else if which == 7 {
        out[i] = (i - 1) as f32;
    } else if which == 8 {
        while i < 32 {
            tile[i] = 0.0;
        }
    }
}

#[test]
fn every_fault_is_in_the_document() {
    let kinds = [
        FaultKind::OutOfBounds,
        FaultKind::Uninitialised,
        FaultKind::Race,
        FaultKind::DivergentBarrier,
        FaultKind::DivergentSimd,
        FaultKind::Lane,
        FaultKind::Misaligned,
        FaultKind::Arithmetic,
        FaultKind::Endless,
    ];
    let x = Memory::from_slice(&[1f32; 32]);
    for (which, kind) in kinds.into_iter().enumerate() {
        let mut out = Memory::from_slice(&[0f32; 32]);
        let call = faulty::Call { x: x.view(), out: out.view_mut(), which: which as u32, groups: [1, 1, 1] };
        let Err(LaunchError::Device(fault)) = call.launch(&Simulator::new().iterations(1000)) else {
            panic!("{which}")
        };
        assert_eq!(fault.kind, kind, "{fault}");
        let documented = crate::document::read("../../docs/kernel-language.md");
        let name = format!("`{kind:?}`");
        assert!(documented.contains(&name), "docs/kernel-language.md does not say {name}: {fault}");
        println!("{kind:?}: {}", fault.message);
    }
}
