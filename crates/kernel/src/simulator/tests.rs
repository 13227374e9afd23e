//! The parts of a launch without coroutines, whose switches of stacks an interpreter of Rust cannot follow: memory, arguments,
//! faults, operations of lanes. The tests switch between threads themselves.

use super::machine::{LANES, Machine, Stopped, multiply_accumulate, with_current};
use super::memory::{CheckedRegion, Memory, MemoryError, Storage, shared};
use super::{Fault, FaultKind};
use crate::arguments::{Arguments, Value};
use crate::facts::Constant;
use crate::lanes::position_of;
use crate::memory::{Buffer, Place, Shared};
use crate::region::Region;
use crate::scalar::{Plain, Scalar, ScalarType};
use crate::source::{Cpp, ItemKind, ItemSource, Kernel, Threads};
use half::{bf16, f16};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

static KERNEL: Kernel = Kernel {
    name: "none",
    cpp: "none",
    module: "",
    docs: "",
    parameters: &[],
    generics: &[],
    derived: &[],
    requirements: &[],
    unmet: |_| None,
    threads: |_| Threads::UpTo(64),
    shared: &[],
    exact: false,
    resident: |_| 0,
    source: ItemSource {
        name: "none",
        symbol: "none",
        kind: ItemKind::Kernel,
        cpp: Cpp::Printed(""),
        rust: "",
        depends: &[],
        module: "",
        file: file!(),
        line: 1,
    },
    bench: None,
};

/// The machine of a launch of one threadgroup of 64 threads, the first of which is the current one.
fn machine() -> Rc<Machine> {
    let machine = Rc::new(Machine::new(&KERNEL, [1; 3], 64, 0, 1 << 10));
    machine.start_group(0, [0; 3]);
    machine.switch_to(0);
    machine
}

/// The handle that a kernel has of a memory.
fn region(machine: &Rc<Machine>, memory: &Memory) -> Region {
    let storage = Storage::new(memory.content().clone(), memory.element());
    let size = memory.element().bytes();
    Region::new(CheckedRegion {
        machine: Rc::clone(machine),
        storage,
        bytes: 0..memory.len() * size,
        size,
        name: "x",
        shared: false,
    })
}

/// The fault that `f` stops with.
fn fault(machine: &Rc<Machine>, f: impl FnOnce()) -> Fault {
    let stopped = catch_unwind(AssertUnwindSafe(f)).unwrap_err();
    assert!(stopped.is::<Stopped>());
    machine.take_fault().unwrap()
}

/// Values of a scalar type from bits, with all of them zero and all of them one among them.
fn values<T: Scalar>() -> Vec<T> {
    [0, 1, 0x7f, 0x80, 0x3c00, 0x8000_0000, 0x7f80_0001, 0x0123_4567_89ab_cdef, u64::MAX]
        .map(T::from_raw)
        .to_vec()
}

/// Memory of every type of scalar: written and read from outside, and by a kernel.
fn memory_keeps<T: Scalar>() {
    let bits = |values: Vec<T>| values.into_iter().map(T::to_raw).collect::<Vec<_>>();
    let written = values::<T>();
    let mut memory = Memory::from_slice(&written);
    assert_eq!(bits(memory.to_vec().unwrap()), bits(written.clone()));
    memory.poison(2..3);
    assert!(matches!(memory.to_vec::<T>(), Err(MemoryError::Uninitialised { index: 2 })));
    assert_eq!(memory.to_vec_or(written[4]).unwrap()[2].to_raw(), written[4].to_raw());
    assert!(Memory::uninit::<T>(3).to_vec::<T>().is_err());
    assert!(Memory::uninit::<T>(0).to_vec::<T>().unwrap().is_empty());
    let machine = machine();
    let mut buffer = Buffer::<T>::new(region(&machine, &Memory::uninit::<T>(written.len())));
    for (n, x) in written.iter().enumerate() {
        buffer.ft_set(n as u32, *x);
        assert_eq!(buffer.ft_get(n).to_raw(), x.to_raw());
    }
    // Vectors, and the same bytes as another type.
    let four = [written[1], written[8], written[3], written[0]];
    buffer.store(4u32, four);
    assert_eq!(bits(buffer.load::<4>(4u64).to_vec()), bits(four.to_vec()));
    let bytes = buffer.load_as::<u8, 4>(4u32);
    assert_eq!(bytes[0], four[0].to_raw() as u8);
    buffer.store_as(4u32, [0u8; 4]);
    assert_eq!(buffer.load_as::<u8, 4>(4u32), [0; 4]);
}

#[test]
fn memory_keeps_the_bits_of_every_scalar() {
    memory_keeps::<bool>();
    memory_keeps::<u8>();
    memory_keeps::<i8>();
    memory_keeps::<u16>();
    memory_keeps::<i16>();
    memory_keeps::<u32>();
    memory_keeps::<i32>();
    memory_keeps::<u64>();
    memory_keeps::<i64>();
    memory_keeps::<usize>();
    memory_keeps::<f32>();
    memory_keeps::<f16>();
    memory_keeps::<bf16>();
    let words = Memory::from_slice(&[1u32]);
    let (expected, found) = (ScalarType::U32, ScalarType::F32);
    assert_eq!(words.to_vec::<f32>(), Err(MemoryError::Element { expected, found }));
}

#[test]
fn arguments_are_the_bytes_of_their_values() {
    let machine = machine();
    let value = [[1i32, -2], [3, i32::MIN]];
    let mut bytes = Vec::new();
    value.write(&mut bytes);
    assert_eq!(bytes.len(), <[[i32; 2]; 2]>::BYTES);
    let words = region(&machine, &Memory::from_slice(&[7u32, 8]));
    let arguments = Arguments::of(vec![
        Value::Buffer(words),
        Value::Bytes(bytes),
        Value::Constant(Constant::of(f16::from_f32(-0.5))),
    ]);
    assert_eq!(arguments.buffer::<u32>(0).ft_get(1u32), 8);
    assert_eq!(arguments.plain::<[[i32; 2]; 2]>(1), value);
    assert_eq!(arguments.constant::<f16>(2), f16::from_f32(-0.5));
    // Missing bytes are zeros.
    assert_eq!(u64::read(&mut &[1u8, 2][..]), 0x201);
}

#[test]
fn uses_without_a_result_stop_the_thread() {
    let machine = machine();
    let mut memory = Memory::from_slice(&[1u32, 2, 3, 4, 5, 6, 7, 8]);
    memory.poison(7..8);
    let mut buffer = Buffer::<u32>::new(region(&machine, &memory));
    let mut stops = |kind: FaultKind, f: &mut dyn FnMut(&mut Buffer<u32>)| {
        let fault = fault(&machine, || f(&mut buffer));
        assert_eq!(fault.kind, kind, "{fault}");
    };
    stops(FaultKind::OutOfBounds, &mut |x| _ = x.ft_get(8u32));
    stops(FaultKind::OutOfBounds, &mut |x| x.ft_set(u64::MAX, 1));
    stops(FaultKind::OutOfBounds, &mut |x| _ = x.load::<4>(6u32));
    stops(FaultKind::OutOfBounds, &mut |x| _ = x.load_as::<u64, 2>(u64::MAX / 4));
    stops(FaultKind::Misaligned, &mut |x| _ = x.load::<4>(1u32));
    stops(FaultKind::Misaligned, &mut |x| x.store_as(0u32, [0u8; 3]));
    stops(FaultKind::Uninitialised, &mut |x| _ = x.ft_get(7u32));
    stops(FaultKind::Uninitialised, &mut |x| _ = x.load_as::<u8, 16>(4u32));
    stops(FaultKind::Race, &mut |x| {
        x.ft_set(3u32, 1);
        machine.switch_to(1);
        _ = x.ft_get(3u32);
    });
}

#[test]
fn lanes_meet_at_the_last_of_them() {
    let machine = machine();
    let elements = |lane: usize| [lane as f32 * 2.0 - 20.0, lane as f32 * 2.0 - 19.0];
    let mut matrix = [[0f32; 8]; 8];
    for lane in 0..LANES {
        let (row, col) = position_of(lane as u32);
        matrix[row as usize][col as usize..][..2].copy_from_slice(&elements(lane));
    }
    let sum = |row: u32, col: u32| {
        (0..8).map(|k| matrix[row as usize][k] * matrix[k][col as usize]).sum::<f32>() + 0.5
    };
    with_current(&machine, || {
        for lane in 0..LANES {
            machine.switch_to(lane as u32);
            let [x, y] = elements(lane);
            // All lanes but the last would suspend their coroutines here.
            let found = multiply_accumulate([x, y, x, y], [0.5; 2]);
            if lane == LANES - 1 {
                let (row, col) = position_of(lane as u32);
                assert_eq!(found, [sum(row, col), sum(row, col + 1)]);
            }
        }
    });
}

#[test]
fn shared_arrays_are_one_for_all_threads() {
    let machine = machine();
    with_current(&machine, || {
        let mut first = Shared::<u32>::new(shared(ScalarType::U32, 4));
        first.ft_set(2u32, 9);
        // A lane of the same SIMD group races too: nothing orders it.
        machine.switch_to(5);
        let same = Shared::<u32>::new(shared(ScalarType::U32, 4));
        assert_eq!(fault(&machine, || _ = same.ft_get(2u32)).kind, FaultKind::Race);
        machine.switch_to(6);
        let other = fault(&machine, || _ = shared(ScalarType::U32, 5));
        assert_eq!(other.kind, FaultKind::DivergentBarrier);
    });
    machine.end();
}
