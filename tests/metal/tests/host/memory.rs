//! Memory: pages of the host without copies, buffers of the caller's, and devices of the caller's.

use crate::support::{Tensors, control_of, expected, metal};
use flashtile::ViewError;
use flashtile_kernel::Device;
use flashtile_metal::objc2::rc::autoreleasepool;
use flashtile_metal::objc2_metal::{MTLBuffer, MTLDevice};
use flashtile_metal::{DeviceError, GpuKv, GpuTensor, HostPages, Metal, ScalarType, dense};
use flashtile_metal_standin::{Profile, device};

#[test]
fn pages_of_the_host_are_used_without_a_copy() {
    let metal = metal(Profile::m3_max());
    let mut pages = HostPages::zeroed(20_000).unwrap();
    assert_eq!(pages.bytes().len(), 32 << 10);
    let at = pages.bytes().as_ptr();
    for (n, bytes) in pages.bytes_mut().chunks_exact_mut(4).enumerate() {
        bytes.copy_from_slice(&(n as f32).to_ne_bytes());
    }
    let memory = metal.gpu().adopt(pages, ScalarType::F32).unwrap();
    assert_eq!((memory.len(), memory.element()), (8 << 10, ScalarType::F32));
    assert!(std::ptr::eq(memory.buffer().contents().as_ptr().cast::<u8>(), at));
    assert_eq!(metal.gpu().to_vec::<f32>(&memory).unwrap()[8191], 8191.0);
    let error = metal.gpu().to_vec::<u32>(&memory).unwrap_err();
    assert_eq!(error, DeviceError::Element { expected: ScalarType::U32, found: ScalarType::F32 });
}

#[test]
fn tensors_are_ranges_of_buffers_of_the_caller() {
    let metal = metal(Profile::m3_max());
    let want = expected(&metal, 1, 100);
    let mut tensors = Tensors::new(&metal, 1, 100);
    // Queries, keys and values one after another in one buffer.
    let all: Vec<f32> = [&tensors.q, &tensors.k, &tensors.v]
        .into_iter()
        .flat_map(|memory| metal.gpu().to_vec::<f32>(memory).unwrap())
        .collect();
    let whole = metal.gpu().buffer_from(&all).unwrap();
    let (q_len, kv_len) = (tensors.q.len(), tensors.k.len());
    // SAFETY: nothing writes the buffer.
    let part = |start: usize, len: usize| unsafe {
        metal.gpu().borrow(whole.buffer().clone(), 4 * start, ScalarType::F32, len).unwrap()
    };
    (tensors.q, tensors.k) = (part(0, q_len), part(q_len, kv_len));
    tensors.v = part(q_len + kv_len, kv_len);
    let desc = tensors.desc();
    let (inputs, mut outputs) = tensors.tensors();
    metal.session().run(&desc, &inputs, &mut outputs).unwrap();
    assert_eq!(tensors.out(&metal), want);
    for (offset, len) in [(2, 1), (4 * all.len(), 1), (0, all.len() + 1), (usize::MAX - 3, 2)] {
        // SAFETY: refused.
        let error = unsafe { metal.gpu().borrow(whole.buffer().clone(), offset, ScalarType::F32, len) };
        assert!(matches!(error, Err(DeviceError::Range { .. })), "{offset} {len}");
    }
    assert_eq!(control_of(&metal).take_violations(), [""; 0]);
}

#[test]
fn shapes_and_strides_are_checked() {
    let metal = metal(Profile::m3_max());
    let memory = metal.zeros(ScalarType::F16, [1, 2, 3, 64]).unwrap();
    let refuse = |shape: [usize; 4], strides: [usize; 4], why: &str| {
        let error = GpuTensor::new(memory.view(), shape, strides).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refuse([1, 2, 4, 64], dense([1, 2, 4, 64]), "view reaches 512 elements, memory holds 384");
    refuse([1, 2, 3, 32], [0, 192, 64, 2], "innermost stride is 2");
    refuse([usize::MAX, 2, 3, 64], [usize::MAX, 1, 1, 1], "not addressable");
    let words = metal.gpu().buffer_from(&[0u32; 64]).unwrap();
    let words = GpuTensor::new(words.view(), [1, 1, 1, 64], dense([1, 1, 1, 64])).unwrap();
    assert_eq!(GpuKv::elements(words).unwrap_err(), ViewError::Element);
}

#[test]
fn devices_and_queues_are_the_callers() {
    autoreleasepool(|_| {
        let of = device(Profile::m2());
        let queue = of.newCommandQueue().unwrap();
        let metal = Metal::with_queue(queue.clone()).unwrap();
        assert_eq!(metal.name(), "Apple M2");
        assert_eq!(metal.gpu().queue().map(|of| &**of as *const _), Some(&*queue as *const _));
        assert_eq!(metal.gpu().limits().shared_bytes, 32 << 10);
        // Memory of another device is refused before anything is launched.
        let other = self::metal(Profile::m2());
        let (mut mine, theirs) = (Tensors::new(&metal, 1, 100), Tensors::new(&other, 1, 100));
        mine.k = theirs.k;
        let desc = mine.desc();
        let (inputs, mut outputs) = mine.tensors();
        let error = metal.session().run(&desc, &inputs, &mut outputs).unwrap_err();
        assert!(error.to_string().contains("the memory given for k is of another device"), "{error}");
        // A GPU that is not Apple's has no simdgroup matrices that kernels could use.
        let mut radeon = Profile::m1();
        radeon.name = "AMD Radeon Pro 5500M".to_owned();
        let error = Metal::with_device(device(radeon)).unwrap_err();
        assert!(error.to_string().contains("not one of Apple's own GPUs of the family Apple7"), "{error}");
    });
}
