//! The simulator: results, and each kind of fault that it reports.

use crate::natives::{fault, run, run_on};
use flashtile_kernel::ops::{self, Elements as _, Place as _};
use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Arguments, Fault, FaultKind, Memory, MemoryError, Simulator};

/// The line of this file that a fault names.
fn source(fault: &Fault) -> &'static str {
    assert!(fault.file.ends_with("simulator.rs"), "{fault}");
    include_str!("simulator.rs").lines().nth(fault.line as usize - 1).unwrap_or_default()
}

#[track_caller]
fn assert_fault(fault: &Fault, line: &str, message: &str) {
    assert!(source(fault).contains(line), "{fault}\n{}", source(fault));
    assert!(fault.message.contains(message), "{}", fault.message);
}

fn words(arguments: &Arguments) -> Buffer<u32> {
    arguments.buffer(0)
}

// --- results

#[test]
fn threads_know_where_they_are() {
    let (out, _) = run(&[0; 6 * 64], (3, 128), |arguments| {
        let mut x = words(arguments);
        assert_eq!((threads(), simd_groups(), groups_x(), groups_y(), group_z()), (128, 4, 3, 1, 0));
        assert_eq!(simd_index() * 32 + simd_lane(), thread_index());
        x.ft_set(thread_position(), group_x() * 1000 + thread_index());
    })
    .unwrap();
    assert_eq!((out[0], out[127], out[128], out[383]), (0, 127, 1000, 2127));
}

#[test]
fn simd_operations_see_all_lanes() {
    let (out, report) = run(&[0; 64 * 8], (1, 64), |arguments| {
        let mut x = words(arguments);
        let (i, lane) = (thread_index(), simd_lane());
        let y = i + 1;
        let values = [
            simd_sum(y),
            simd_max(y),
            simd_min(y),
            simd_shuffle(y, (lane + 1) % 32),
            simd_shuffle_xor(y, 5),
            simd_broadcast(y, 7),
            simd_prefix_sum(y),
            simd_prefix_sum_inclusive(y),
        ];
        x.store(i * 8, values);
        assert_eq!(simd_ballot(lane < 4), 0xf);
        assert!(simd_any(lane == 31) && !simd_all(lane == 31) && simd_all(lane < 32));
        assert_eq!(simd_sum(1.5f32), 48.0);
    })
    .unwrap();
    for i in 0..64u32 {
        let first = i / 32 * 32 + 1;
        let sum = |count: u32| (first..first + count).sum::<u32>();
        let lane = i % 32;
        let expected = [
            sum(32),
            first + 31,
            first,
            first + (lane + 1) % 32,
            first + (lane ^ 5),
            first + 7,
            sum(lane),
            sum(lane + 1),
        ];
        assert_eq!(out[i as usize * 8..][..8], expected, "thread {i}");
    }
    assert_eq!(report.simd_operations, 2 * 13);
}

#[test]
fn fragments_multiply_as_matrices() {
    // a[r][c] = r + 2c, b[r][c] = 3r - c, c = 1: as small integers exactly.
    let (out, _) = run(&[0; 64], (1, 32), |arguments| {
        let mut x = words(arguments);
        let (mut a, mut b, mut d): (Shared<f16>, Shared<f16>, Shared<f32>) =
            (shared(64), shared(72), shared(64));
        for n in 0..2u32 {
            let at = simd_lane() * 2 + n;
            let (r, c) = (at / 8, at % 8);
            a.ft_set(at, f16::from_f32((r + 2 * c) as f32));
            // Stored as columns, a column every 9 elements.
            b.ft_set(c * 9 + r, f16::from_f32(3.0 * r as f32 - c as f32));
        }
        simd_barrier();
        let a = Fragment::load(&a, 0, 8);
        let b = Fragment::load_transposed(&b, 0, 9);
        let c = Fragment::multiply_accumulate(&a, &b, &Fragment::filled(1.0));
        c.store(&mut d, 0, 8);
        simd_barrier();
        for n in 0..2 {
            let at = simd_lane() * 2 + n;
            x.ft_set(at, d.ft_get(at) as i32 as u32);
        }
    })
    .unwrap();
    for (r, c) in (0..64).map(|n| (n / 8, n % 8)) {
        let expected: i32 = 1 + (0..8).map(|k| (r + 2 * k) * (3 * k - c)).sum::<i32>();
        assert_eq!(out[(r * 8 + c) as usize] as i32, expected, "({r}, {c})");
    }
}

#[test]
fn operations_of_simd_groups_are_counted_by_kind() {
    let (_, report) = run(&[0; 64], (2, 64), |arguments| {
        let mut x = words(arguments);
        let (mut m, mut d): (Shared<f16>, Shared<f32>) = (shared(2 * 16 * 24), shared(128));
        let start = simd_index() * 16 * 24;
        for n in (simd_lane()..16 * 24).step_by(32) {
            m.ft_set(start + n, f16::from_f32(1.0));
        }
        simd_barrier();
        let [b, ..] = load_rights::<f16>(&m, start, 24);
        let [a, next, ..] = load_lefts::<f16>(&m, start, 24);
        let sums = multiply_add::<f16>([a, next], b, [[0.0; 2]; 2]);
        let f = Fragment::multiply_accumulate(
            &Fragment::load(&m, start, 24),
            &Fragment::load_transposed(&m, start, 24),
            &Fragment::filled(ops::exponent(sums[0][0]).exp2() + ops::exponent(sums[1][1]).exp()),
        );
        f.store(&mut d, 64 * simd_index(), 8);
        let sum = simd_sum(matrix_row_max(f.element(0)));
        barrier();
        if thread_position() == 0 {
            x.ft_set(0u32, sum.to_bits());
        }
    })
    .unwrap();
    let groups = 2 * 2;
    assert_eq!(report.matrix_products, groups * 3);
    assert_eq!((report.matrix_loads, report.matrix_stores), (groups * 10, groups));
    assert_eq!((report.exchanges, report.simd_barriers, report.barriers), (groups * 2, groups, 2));
    assert_eq!(report.simd_operations, groups * (3 + 2 + 2 + 1 + 2 + 1));
    assert_eq!(report.exponentials, 2 * 128);
    // Ten matrices of 64 f16 are read, one of f32 is written beside what is filled.
    assert_eq!(report.shared_read, groups * 10 * 64 * 2);
    assert_eq!(report.shared_written, groups * (16 * 24 * 2 + 64 * 4));
}

#[test]
fn accesses_to_each_buffer_are_counted() {
    let simulator = Simulator::new();
    let mut memory = Memory::from_slice(&[7u32; 64]);
    run_on(&simulator, &mut memory, (3, 32), |arguments| {
        let mut x = words(arguments);
        let [first, _] = x.load::<2>(2 * (simd_lane() / 2));
        if thread_position() == 0 {
            x.ft_set(63u32, first);
        }
    })
    .unwrap();
    let [report] = simulator.buffer_reports()[..] else { panic!("one buffer") };
    assert_eq!((report.name, report.written), ("x", 4));
    assert_eq!((report.read, report.distinct_read), (3 * 32 * 8, 32 * 4));
    assert_eq!(report.read, simulator.report().device_read);
}

#[test]
fn lanes_hold_the_elements_of_apples_layout() {
    run(&[0; 64], (1, 32), |arguments| {
        let mut x = words(arguments);
        let mut m: Shared<f32> = shared(64);
        for n in 0..2u32 {
            m.ft_set(simd_lane() * 2 + n, (simd_lane() * 2 + n) as f32);
        }
        simd_barrier();
        let mut f = Fragment::load(&m, 0, 8);
        let (quad, lane) = (simd_lane() / 4, simd_lane());
        let (row, col) = ((quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2);
        assert_eq!((f.element(0), f.element(1)), ((row * 8 + col) as f32, (row * 8 + col + 1) as f32));
        f.set_element(1, -1.0);
        assert_eq!(f.element(1), -1.0);
        x.ft_set(lane, 1);
    })
    .unwrap();
}

#[test]
fn atomics_add_up() {
    let (out, report) = run(&[5, 0, u32::MAX, 0xf0, 9], (4, 64), |arguments| {
        let mut x = words(arguments);
        atomic_add(&mut x, 0u32, 2);
        atomic_max(&mut x, 1u32, thread_position());
        atomic_min(&mut x, 2u32, thread_position() + 3);
        atomic_or(&mut x, 3u32, 1 << (thread_index() % 4));
        // Exactly one thread sees the 9.
        if atomic_compare_exchange(&mut x, 4u32, 9, 10) == 9 {
            atomic_add(&mut x, 4u32, 90);
        }
    })
    .unwrap();
    assert_eq!(out, [5 + 512, 255, 3, 0xff, 100]);
    assert_eq!(report.atomics, 5 * 256 + 1);
}

#[test]
fn a_thread_may_wait_for_another_of_its_group() {
    let mut memory = Memory::from_slice(&[0u32]);
    run_on(&Simulator::new(), &mut memory, (1, 64), |arguments| {
        let mut x = words(arguments);
        if thread_index() == 63 {
            atomic_exchange(&mut x, 0u32, 1);
        }
        while atomic_add(&mut x, 0u32, 0) == 0 {
            ops::count_iteration();
        }
    })
    .unwrap();
}

#[test]
fn memory_is_read_as_other_types_little_endian() {
    let (out, report) = run(&[0x0403_0201, 0x8070_6050, 0, 0], (1, 32), |arguments| {
        let mut x = words(arguments);
        if thread_index() == 0 {
            let [low, high] = x.load_as::<u16, 2>(0u32);
            assert_eq!((low, high), (0x0201, 0x0403));
            x.store_as::<u8, 8>(2u32, x.load_as::<u8, 8>(0u32));
            assert_eq!(x.load_as::<u64, 1>(2u64), [0x8070_6050_0403_0201]);
        }
    })
    .unwrap();
    assert_eq!(out[2..], [0x0403_0201, 0x8070_6050]);
    assert_eq!((report.device_read, report.device_written), (4 + 8 + 8, 8));
}

#[test]
fn shared_arrays_belong_to_a_group() {
    let (out, report) = run(&[0; 4 * 32], (4, 32), |arguments| {
        let mut x = words(arguments);
        let mut a: Shared<u32> = shared(32);
        let mut b: Shared<u32> = shared(32);
        a.ft_set(thread_index(), group_x());
        b.ft_set(thread_index(), 7);
        barrier();
        x.ft_set(thread_position(), a.ft_get(31 - thread_index()) * 10 + b.ft_get(31 - thread_index()));
    })
    .unwrap();
    assert_eq!((out[0], out[32], out[127]), (7, 17, 37));
    assert_eq!((report.barriers, report.shared_read, report.shared_written), (4, 1024, 1024));
}

#[test]
fn seeds_change_the_order_and_nothing_else() {
    let order = |seed| {
        let simulator = Simulator::new().seed(seed);
        let mut memory = Memory::from_slice(&[0u32; 65]);
        run_on(&simulator, &mut memory, (1, 64), |arguments| {
            let mut x = words(arguments);
            let turn = atomic_add(&mut x, 64u32, 1);
            x.ft_set(thread_index(), turn);
        })
        .unwrap();
        memory.to_vec::<u32>().unwrap()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert_eq!(order(3)[64], 64);
}

// --- faults

#[test]
fn outside_of_a_buffer() {
    let fault = fault(FaultKind::OutOfBounds, (2, 32), |arguments| {
        let x = words(arguments);
        let _ = x.ft_get(thread_position() + 1);
    });
    assert_fault(&fault, "ft_get(thread_position() + 1)", "x[64] is read, x has 64 elements");
    assert_eq!((fault.thread, fault.lane, fault.group), (31, 31, [1, 0, 0]));
    let text = fault.to_string();
    assert!(text.starts_with(concat!("words, ", file!(), ":")), "{text}");
    assert!(
        text.ends_with(", thread 31 (lane 31) of group [1, 0, 0]: x[64] is read, x has 64 elements"),
        "{text}"
    );
}

#[test]
fn outside_by_far_and_by_a_vector() {
    let far = fault(FaultKind::OutOfBounds, (1, 32), |arguments| words(arguments).ft_set(u64::MAX, 1));
    assert!(far.message.contains("x[18446744073709551615] is written"), "{far}");
    let vector = fault(FaultKind::OutOfBounds, (1, 32), |arguments| {
        let _ = words(arguments).load::<4>(62u32);
    });
    assert_fault(&vector, "load::<4>(62u32)", "16 bytes from x[62] on are read, x has 64 elements");
    let array = fault(FaultKind::OutOfBounds, (1, 32), |_| {
        let local = [[0u32; 3]; 2];
        let _ = local.ft_at(1u32).ft_get(thread_index());
    });
    assert_fault(&array, "ft_get(thread_index())", "of a local array of 3 elements");
}

#[test]
fn outside_of_a_view() {
    let fault = fault(FaultKind::OutOfBounds, (1, 32), |_| {
        let tile: Shared<u32> = shared(8);
        let _ = tile.ft_get(8u32);
    });
    assert_fault(&fault, "tile.ft_get(8u32)", "[8] is read, shared has 8 elements");
}

#[test]
fn uninitialised_shared_memory() {
    let fault = fault(FaultKind::Uninitialised, (1, 64), |_| {
        let mut tile: Shared<f32> = shared(128);
        tile.ft_set(thread_index(), 1.0);
        barrier();
        let _ = tile.ft_get(thread_index() * 2);
    });
    assert_fault(&fault, "tile.ft_get(thread_index() * 2)", "is read, nothing was written to it");
}

#[test]
fn uninitialised_device_memory_and_padding() {
    let read_all = |arguments: &Arguments| {
        let _ = words(arguments).ft_get(thread_index());
    };
    let mut memory = Memory::uninit::<u32>(32);
    let fault = run_on(&Simulator::new(), &mut memory, (1, 32), read_all).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised);
    assert_eq!(memory.to_vec::<u32>(), Err(MemoryError::Uninitialised { index: 0 }));

    let mut memory = Memory::from_slice(&[1u32; 32]);
    memory.poison(31..40);
    let fault = run_on(&Simulator::new(), &mut memory, (1, 32), read_all).unwrap_err();
    assert!(fault.message.starts_with("x[31] is read"), "{fault}");
    assert_eq!((fault.kind, fault.thread), (FaultKind::Uninitialised, 31));
    assert_eq!(memory.to_vec_or(7u32).unwrap()[30..], [1, 7]);

    let mut written = Memory::uninit::<u32>(32);
    run_on(&Simulator::new(), &mut written, (1, 32), |arguments| {
        words(arguments).ft_set(thread_index(), 5);
    })
    .unwrap();
    assert_eq!(written.to_vec::<u32>().unwrap(), [5; 32]);
    assert!(matches!(written.to_vec::<f32>(), Err(MemoryError::Element { .. })));
}

#[test]
fn a_part_of_a_vector_is_uninitialised() {
    let fault = fault(FaultKind::Uninitialised, (1, 32), |_| {
        let mut tile: Shared<u8> = shared(512);
        tile.store::<8>(thread_index() * 16, [1; 8]);
        let _ = tile.load::<16>(thread_index() * 16);
    });
    assert_fault(&fault, "load::<16>", "is read, nothing was written to it");
    assert!(fault.message.contains(&format!("[{}]", fault.thread * 16 + 8)), "{fault}");
}

#[test]
fn races_in_shared_memory() {
    let neighbour = |arguments: &Arguments| {
        let mut tile: Shared<u32> = shared(64);
        tile.ft_set(thread_index(), 1);
        words(arguments).ft_set(thread_index(), tile.ft_get((thread_index() + 1) % 64));
    };
    // A thread that runs before its neighbour reads an uninitialised element: the order decides which fault is found first.
    for seed in 0..20 {
        let simulator = Simulator::new().seed(seed);
        let fault = run_on(&simulator, &mut Memory::from_slice(&[0u32; 64]), (1, 64), neighbour).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
        assert!(source(&fault).contains("tile.ft_"), "{fault}");
    }
    let all = fault(FaultKind::Race, (1, 64), |_| {
        let mut tile: Shared<u32> = shared(1);
        tile.ft_set(0u32, thread_index());
    });
    assert_fault(
        &all,
        "tile.ft_set(0u32, thread_index())",
        "race on shared[0]: the thread writes it, thread ",
    );
    assert!(all.message.contains(concat!("writes it at ", file!(), ":")), "{all}");
}

#[test]
fn a_simd_barrier_orders_its_lanes_only() {
    // Lane 31 writes to lane 32's element, 63 to 0's: the other SIMD group.
    let fault = run(&[0; 64], (1, 64), |arguments| {
        let mut x = words(arguments);
        let _ = x.ft_get(thread_index());
        simd_barrier();
        x.ft_set((thread_index() + 1) % 64, 1);
    })
    .unwrap_err();
    assert_eq!(fault.kind, FaultKind::Race);
    // Within a SIMD group: ordered.
    run(&[0; 64], (1, 64), |arguments| {
        let mut x = words(arguments);
        let _ = x.ft_get(thread_index());
        simd_barrier();
        x.ft_set(thread_index() ^ 1, 1);
    })
    .unwrap();
    // A shuffle orders no memory.
    let fault = run(&[0; 64], (1, 32), |arguments| {
        let mut x = words(arguments);
        let _ = simd_sum(x.ft_get(thread_index()));
        x.ft_set(thread_index() ^ 1, 1);
    })
    .unwrap_err();
    assert_eq!(fault.kind, FaultKind::Race);
}

#[test]
fn races_between_groups() {
    let writes = fault(FaultKind::Race, (2, 32), |arguments| words(arguments).ft_set(thread_index(), 1));
    assert!(writes.message.contains("of another group writes it"), "{writes}");
    let reads = fault(FaultKind::Race, (2, 32), |arguments| {
        let mut x = words(arguments);
        let y = x.ft_get(0u32);
        barrier();
        if thread_position() == 40 {
            x.ft_set(0u32, y);
        }
    });
    assert!(reads.message.contains("race on x[0]"), "{reads}");
}

#[test]
fn atomics_race_with_plain_uses() {
    let fault = fault(FaultKind::Race, (1, 64), |arguments| {
        let mut x = words(arguments);
        atomic_add(&mut x, 0u32, 1);
        let _ = x.ft_get(0u32);
    });
    assert_fault(&fault, "x, 0u32", "");
}

#[test]
fn overlapping_vectors_race() {
    let fault = fault(FaultKind::Race, (1, 32), |_| {
        let mut tile: Shared<u8> = shared(64);
        // Each thread writes its byte and the next.
        if thread_index().is_multiple_of(2) {
            tile.store::<2>(thread_index(), [0, 0]);
        } else {
            tile.ft_set(thread_index(), 1);
        }
    });
    assert!(source(&fault).contains("tile."), "{fault}");
}

#[test]
#[expect(clippy::if_same_then_else, reason = "two places of the source")]
fn divergent_barriers() {
    let returned = fault(FaultKind::DivergentBarrier, (1, 64), |_| {
        if thread_index() != 5 {
            barrier();
        }
    });
    assert_fault(&returned, "barrier();", "waits in barrier, thread 5 has returned");
    let elsewhere = fault(FaultKind::DivergentBarrier, (1, 64), |_| {
        if thread_index() < 32 {
            barrier();
        } else {
            barrier();
        }
    });
    assert!(elsewhere.message.contains(concat!("in barrier at ", file!(), ":")), "{elsewhere}");
}

#[test]
fn divergent_simd_operations() {
    let returned = fault(FaultKind::DivergentSimd, (1, 64), |_| {
        if simd_lane() != 9 {
            simd_sum(1u32);
        }
    });
    assert_fault(&returned, "simd_sum(1u32);", "waits in simd_sum, lane 9 has returned");
    let elsewhere = fault(FaultKind::DivergentSimd, (1, 32), |_| {
        if simd_lane() < 16 {
            simd_sum(1u32);
        } else {
            simd_max(1u32);
        }
    });
    assert!(elsewhere.message.contains(" in simd_"), "{elsewhere}");
    assert!(elsewhere.message.contains(concat!(" at ", file!(), ":")), "{elsewhere}");
    let barrier = fault(FaultKind::DivergentSimd, (1, 64), |_| {
        if thread_index() == 40 {
            barrier();
        } else if thread_index() > 31 {
            simd_barrier();
        } else {
            barrier();
        }
    });
    assert!(barrier.message.contains("waits in simd_barrier, lane 8 in barrier at "), "{barrier}");
}

#[test]
fn lanes_that_are_none() {
    let shuffle = fault(FaultKind::Lane, (1, 32), |_| {
        simd_shuffle(1u32, simd_lane() + 1);
    });
    assert_fault(&shuffle, "simd_shuffle(1u32, simd_lane() + 1)", "there is no lane 32");
    let xor = fault(FaultKind::Lane, (1, 32), |_| {
        simd_shuffle_xor(1u32, 32);
    });
    assert!(xor.message.contains("there is no lane 32"), "{xor}");
    let broadcast = fault(FaultKind::Lane, (1, 32), |_| {
        simd_broadcast(1u32, simd_lane() / 31);
    });
    assert!(broadcast.message.contains("simd_broadcast of lane "), "{broadcast}");
}

#[test]
fn misaligned_vectors() {
    let address = fault(FaultKind::Misaligned, (1, 32), |arguments| {
        let _ = words(arguments).load::<4>(2u32);
    });
    assert_fault(
        &address,
        "load::<4>(2u32)",
        "16 bytes from x[2] on start at byte 8, which is no multiple of 16",
    );
    let size = fault(FaultKind::Misaligned, (1, 32), |arguments| {
        words(arguments).store::<3>(0u32, [0; 3]);
    });
    assert!(size.message.contains("12 bytes from x[0] on: neither"), "{size}");
}

fn discard<T>(_: T) {}

#[test]
fn arithmetic_without_a_result() {
    type Case = (fn(&Arguments), &'static str);
    let faults: [Case; 8] = [
        (|_| discard(ops::add(1, u32::MAX)), "1 + 4294967295 has no value in u32"),
        (|_| discard(ops::sub(0u32, 1)), "0 - 1 has no value in u32"),
        (|_| discard(ops::mul(i32::MAX, 2)), "2147483647 * 2 has no value in i32"),
        (|_| discard(ops::div(1u32, ops::value(0))), "1 / 0 has no value in u32"),
        (|_| discard(ops::shl(1u32, 32u32)), "1 << 32: u32 has 32 bits"),
        (|_| discard(ops::shr(1u64, -1)), "1 >> -1: u64 has 64 bits"),
        (|_| discard(ops::neg(i32::MIN)), "-(-2147483648) has no value in i32"),
        (|_| discard(ops::clamp(1.0, 2.0, f32::NAN)), "there is nothing between"),
    ];
    for (native, message) in faults {
        let fault = run(&[0; 64], (1, 32), native).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Arithmetic);
        assert!(source(&fault).contains("ops::"), "{fault}");
        assert!(fault.message.contains(message), "{fault}");
    }
}

#[test]
fn a_panic_is_a_fault_with_its_line() {
    let fault = fault(FaultKind::Panic, (1, 64), |arguments| {
        if thread_index() == 33 {
            let none: Option<u32> = None;
            assert!(none.is_some(), "thread {} is unlucky", thread_index());
        }
        barrier();
        words(arguments).ft_set(thread_index(), 1);
    });
    assert_fault(&fault, "is unlucky", "thread 33 is unlucky");
    assert_eq!(fault.thread, 33);
    // The program's own panics still reach its hook.
    let caught = std::panic::catch_unwind(|| assert_eq!(1, 2));
    assert!(caught.is_err());
}

#[test]
fn values_of_unwound_threads_are_dropped() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static ALIVE: AtomicUsize = AtomicUsize::new(0);
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            ALIVE.fetch_sub(1, Ordering::Relaxed);
        }
    }
    fault(FaultKind::OutOfBounds, (1, 256), |arguments| {
        ALIVE.fetch_add(1, Ordering::Relaxed);
        let _guard = Guard;
        simd_barrier();
        barrier();
        words(arguments).ft_set(1u32 << 30, 0);
    });
    assert_eq!(ALIVE.load(Ordering::Relaxed), 0);
}

#[test]
fn endless_loops() {
    let simulator = Simulator::new().iterations(1000);
    let mut memory = Memory::from_slice(&[0u32; 64]);
    let fault = run_on(&simulator, &mut memory, (2, 32), |arguments| {
        let mut x = words(arguments);
        // Groups wait for each other: no device guarantees that this ends.
        atomic_add(&mut x, 0u32, 1);
        while atomic_add(&mut x, 0u32, 0) < 64 {
            ops::count_iteration();
        }
    })
    .unwrap_err();
    assert_eq!(fault.kind, FaultKind::Endless);
    assert!(source(&fault).contains("ops::count_iteration()"));
}

#[test]
fn shared_arrays_are_alike_in_all_threads() {
    let fault = fault(FaultKind::DivergentBarrier, (1, 32), |_| {
        let _: Shared<u32> = shared(1 + (thread_index() as usize) / 31);
    });
    assert!(fault.message.contains("elements in this thread"), "{fault}");
}

#[test]
fn a_fault_leaves_the_memory_and_the_simulator_usable() {
    let simulator = Simulator::new();
    let mut memory = Memory::from_slice(&[3u32; 64]);
    for _ in 0..50 {
        run_on(&simulator, &mut memory, (1, 64), |_| {
            if thread_index() > 3 {
                barrier();
            }
        })
        .unwrap_err();
    }
    assert_eq!(memory.to_vec::<u32>().unwrap(), [3; 64]);
    run_on(&simulator, &mut memory, (1, 64), |arguments| words(arguments).ft_set(thread_index(), 4)).unwrap();
    assert_eq!(memory.to_vec::<u32>().unwrap(), [4; 64]);
}

#[test]
fn a_thousand_threads_take_a_hundred_steps_in_milliseconds() {
    let simulator = Simulator::new();
    let mut memory = Memory::from_slice(&[0u32; 1024]);
    let start = std::time::Instant::now();
    run_on(&simulator, &mut memory, (1, 1024), |arguments| {
        let mut x = words(arguments);
        for _ in 0..100 {
            x.ft_set(thread_index(), ops::add(x.ft_get(thread_index()), 1));
            barrier();
        }
    })
    .unwrap();
    assert_eq!(memory.to_vec::<u32>().unwrap(), [100; 1024]);
    // Generous: the build may share its machine.
    assert!(start.elapsed().as_millis() < 1000, "{:?}", start.elapsed());
}
